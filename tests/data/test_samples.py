import io
import json

import pytest
import torch
from PIL import Image

from mmtrain.data.images import image_transform
from mmtrain.data.samples import IGNORE, IMAGE_POSITION, Document, Pack, Sample, make_batch, pack_documents, read_sample
from mmtrain.errors import UserError


def png(colour: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(stream, "PNG")
    return stream.getvalue()


def members(question="<image>", answer="A cat.", **files):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    named = {suffix.replace("_", "."): content for suffix, content in files.items()}
    return {"__key__": "k7", "__url__": "s.tar", "json": json.dumps({"id": "k7", "conversations": turns}), **named}


def document(key: str, length: int, images: tuple[bytes, ...] = ()) -> Document:
    ids = tuple(range(100, 100 + length))
    return Document(Sample(key, "s.tar", (), images), ids, (*ids[1:], IGNORE))


def test_a_sample_keeps_its_turns_and_its_images_in_number_order():
    files = {f"{number}_png": bytes([number]) for number in (2, 10, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    sample = read_sample(members("<image>" * 11 + "Who?", **files))
    assert sample.turns == (("human", "<image>" * 11 + "Who?"), ("gpt", "A cat."))
    assert sample.images == tuple(bytes([number]) for number in range(11))
    assert read_sample(members(jpeg=b"only")).images == (b"only",)
    assert read_sample(members("Who?")).images == ()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (members("<image><image>", png=b""), "2 <image> marks in the conversation, but 1 images"),
        (members("<image>"), "1 <image> marks in the conversation, but 0 images"),
        (members("Who?", png=b""), "0 <image> marks in the conversation, but 1 images"),
        (members("<image><image>", **{"0_png": b"", "2_png": b""}), "without a gap"),
        (members("<image><image>", **{"png": b"", "0_png": b""}), r"must be k7\.jpg alone"),
        (members("<image>", png=b"", jpg=b""), "two files for image k7"),
        ({"__key__": "k7", "__url__": "s.tar", "png": b""}, r"has no json member \(it has png\)"),
        ({"__key__": "k7", "__url__": "s.tar", "json": b"{"}, "not valid JSON"),
        ({"__key__": "k7", "__url__": "s.tar", "json": b'{"text": "hello"}'}, "no list `conversations`"),
        (
            {"__key__": "k7", "__url__": "s.tar", "json": b'{"conversations": [{"role": "user"}]}'},
            "a turn must be .* not .*role",
        ),
    ],
)
def test_a_sample_in_another_form_is_refused_with_shard_and_key(broken, message):
    with pytest.raises(UserError, match=r"^s\.tar: sample k7: .*" + message):
        read_sample(broken)


def test_packing_is_first_fit_in_order_and_gives_out_the_oldest_pack():
    lengths = {"a": 6, "b": 5, "c": 4, "d": 5, "e": 9, "f": 1}
    packs = pack_documents((document(key, length) for key, length in lengths.items()), pack_length=10, open_packs=2)
    assert [[d.sample.key for d in p.documents] for p in packs] == [["a", "c"], ["b", "d"], ["e", "f"]]


def test_overlong_samples_are_counted_or_refused():
    documents = [document("a", 11), document("b", 10), document("c", 12), document("d", 3), document("e", 99)]
    packs = list(pack_documents(documents, 10, "skip"))
    assert [[d.sample.key for d in p.documents] for p in packs] == [["b"], ["d"]]
    assert sum(p.skipped for p in packs) == 3
    with pytest.raises(UserError, match=r"s\.tar: sample a: 11 tokens, but data\.pack_length is 10"):
        list(pack_documents(documents, 10, "refuse"))


def test_a_batch_restarts_positions_in_every_document_and_in_the_padding(tiny):
    transform = image_transform(str(tiny / "vision"))
    red = Document(Sample("r", "s", (), (png("red"),)), (IMAGE_POSITION, 5, 2), (5, 2, IGNORE))
    batch = make_batch([Pack((document("a", 2), red)), Pack((document("c", 7),), skipped=4)], 7, 0, transform)
    x = IGNORE
    assert batch.input_ids.tolist() == [[100, 101, IMAGE_POSITION, 5, 2, 0, 0], [100, 101, 102, 103, 104, 105, 106]]
    assert batch.labels.tolist() == [[101, x, 5, 2, x, x, x], [101, 102, 103, 104, 105, 106, x]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert (batch.keys, batch.samples, batch.tokens, batch.skipped) == (("a", "r", "c"), 3, 12, 4)


def test_images_come_in_the_order_of_their_positions(tiny):
    transform = image_transform(str(tiny / "vision"))
    first = document("a", 2, (png("red"), png("lime")))
    second = document("b", 2, (png("blue"),))
    batch = make_batch([Pack((first,)), Pack((second,))], 4, 0, transform)
    assert batch.images.dtype == torch.float32
    assert batch.images[:, :, 0, 0].tolist() == [[1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    assert make_batch([Pack((document("t", 2),))], 4, 0, transform).images is None


def test_a_damaged_image_names_shard_key_and_image(tiny):
    transform = image_transform(str(tiny / "vision"))
    with pytest.raises(UserError, match=r"s\.tar: sample a, image 1: not a readable image"):
        make_batch([Pack((document("a", 2, (png("red"), b"nonsense")),))], 4, 0, transform)
