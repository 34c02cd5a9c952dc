import io
import json

import pytest
import torch
from gpu_ranks import run_gpu_ranks
from json_files import read_json
from PIL import Image

from mmtrain.config.load import load_config
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, QuarantinedSample, Sample
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.packs import Gap, Pack, PackedBatch, Processor, make_batch, to_device
from mmtrain.layouts.layout import Tiling

X = IGNORE


def png(colour: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(stream, "PNG")
    return stream.getvalue()


def document(key: str, length: int, images: tuple[bytes, ...] = ()) -> Document:
    """`length` tokens 100, 101, ..., behind one position for each image."""
    ids = (*[IMAGE_POSITION] * len(images), *range(100, 100 + length - len(images)))
    labels = [X if token == IMAGE_POSITION else token for token in ids]
    tilings = (Tiling(0, 0, 1),) * len(images)
    return Document(Sample(key, "s.tar", (), images, offset=512), ids, (*labels[1:], X), tilings)


def gap(length: int) -> Gap:
    return Gap(QuarantinedSample("lost", "s.tar", 1024, "checksum", "image 0"), length)


def batch_of(*packs: tuple[Document | Gap, ...], length: int = 10, decode=None):
    return make_batch(
        [Pack(entries, epoch=n) for n, entries in enumerate(packs)], length, decode or no_image
    )


def no_image(content: bytes, tiling: Tiling, is_control: bool) -> torch.Tensor:
    raise AssertionError("no image belongs to this batch")


@pytest.fixture
def decode(tiny):
    transform = image_transform(str(tiny / "vision"))
    return lambda content, tiling, is_control: transform.decode(
        content, tiling, is_control=is_control
    )


def test_positions_restart_in_every_document_and_in_the_padding():
    batch = batch_of((document("a", 2), document("b", 3)), (document("c", 7),), length=7)
    assert batch.input_ids.tolist() == [
        [100, 101, 100, 101, 102, 0, 0],
        [100, 101, 102, 103, 104, 105, 106],
    ]
    assert batch.labels.tolist() == [[101, X, 101, 102, X, X, X], [101, 102, 103, 104, 105, 106, X]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert (batch.keys, batch.samples, batch.tokens) == (("a", "b", "c"), 3, 12)
    assert (batch.samples_of_packs, batch.epochs, batch.faults) == ((2, 1), (0, 1), ())


def test_no_position_predicts_a_token_beyond_its_document():
    lengths = (1, 5, 2, 7, 1, 4)
    batch = batch_of(tuple(document(str(n), length) for n, length in enumerate(lengths)), length=24)
    positions, labels = batch.position_ids[0], batch.labels[0]
    last = [t for t in range(24) if t == 23 or positions[t + 1] == 0]
    assert [t for t in range(20) if labels[t] == X] == [0, 5, 7, 14, 15, 19] == last[:-1]
    assert all(labels[t] == batch.input_ids[0, t + 1] for t in range(20) if t not in last)
    assert (labels[20:] == X).all()


def test_a_gap_keeps_its_place_and_length_and_teaches_nothing():
    batch = batch_of((document("a", 2), gap(3), document("b", 2)), (gap(7),), length=8)
    assert batch.input_ids.tolist() == [[100, 101, 0, 0, 0, 100, 101, 0], [0] * 8]
    assert batch.labels.tolist() == [[101, X, X, X, X, 101, X, X], [X] * 8]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 0]]
    assert (batch.keys, batch.tokens, batch.samples_of_packs) == (("a", "b"), 4, (2, 0))
    assert batch.faults == ((0, gap(3).fault), (1, gap(7).fault))


def test_images_come_in_the_order_of_their_positions(decode):
    first, second = document("a", 3, (png("red"), png("lime"))), document("b", 2, (png("blue"),))
    batch = batch_of((document("t", 1), first), (second,), decode=decode)
    assert batch.tiles.dtype == torch.uint8
    assert batch.tiles[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert (batch.input_ids == IMAGE_POSITION).sum() == 3
    assert batch_of((document("t", 2),)).tiles is None


def test_a_sample_with_one_bad_image_becomes_a_gap_and_all_of_its_images_are_left_out(decode):
    broken = document("broken", 4, (png("red"), b"nonsense"))
    batch = batch_of((document("a", 2), broken, document("b", 3, (png("blue"),))), decode=decode)
    ((row, fault),) = batch.faults
    assert row == 0
    assert (fault.key, fault.shard, fault.offset, fault.reason) == (
        "broken",
        "s.tar",
        512,
        "undecodable_image",
    )
    assert fault.detail.startswith("image 1: ")
    assert batch.tiles[:, :, 0, 0].tolist() == [[0, 0, 255]]
    assert batch.input_ids.tolist() == [[100, 101, 0, 0, 0, 0, IMAGE_POSITION, 100, 101, 0]]
    assert batch.labels.tolist() == [[101, X, X, X, X, X, 100, 101, X, X]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 0]]
    assert (batch.keys, batch.tokens) == (("a", "b"), 5)


def test_a_batch_of_nothing_but_bad_images_has_none(decode):
    assert batch_of((document("a", 4, (b"",)),), decode=decode).tiles is None


def test_only_rejected_images_become_gaps():
    def fail(content: bytes, tiling: Tiling, is_control: bool) -> torch.Tensor:
        raise MemoryError

    def reject(content: bytes, tiling: Tiling, is_control: bool) -> torch.Tensor:
        raise BadSample("too_many_pixels", "9 x 9")

    assert (
        batch_of((document("a", 4, (b"",)),), decode=reject).faults[0][1].detail == "image 0: 9 x 9"
    )
    with pytest.raises(MemoryError):
        batch_of((document("a", 4, (b"",)),), decode=fail)


def test_on_the_cpu_a_micro_batch_is_taken_as_it_is(decode):
    batch = batch_of((document("a", 5, (png("red"),)),), decode=decode)
    assert to_device(batch, "cpu") is batch


def moved_to_a_gpu(batch: PackedBatch) -> PackedBatch:
    """Moves it there and back, in a rank; all but positions and labels was there."""
    moved = to_device(batch, torch.device("cuda"))
    for name, value in vars(moved).items():
        if isinstance(value, torch.Tensor):
            assert value.is_cuda == (name not in ("position_ids", "labels")), name
            setattr(moved, name, value.cpu())
    return moved


@pytest.mark.gpu
@pytest.mark.nightly
def test_on_cuda_all_but_position_ids_and_labels_is_there_and_nothing_else_changed(decode):
    batch = batch_of((document("a", 5, (png("red"),)), document("b", 3)), (gap(4),), decode=decode)
    [moved] = run_gpu_ranks(1, moved_to_a_gpu, batch)
    for name, value in vars(batch).items():
        assert isinstance(value, torch.Tensor) or getattr(moved, name) == value, name
        assert not isinstance(value, torch.Tensor) or torch.equal(getattr(moved, name), value), name


def test_a_run_turns_pictures_by_exif(tiny):
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = 3
    picture = Image.linear_gradient("L").convert("RGB")
    picture.save(stream, "PNG", exif=exif)
    processor = Processor(load_config(tiny / "config.yaml"))
    expected = processor.transform.fitted(picture.rotate(180))
    batch = processor.batch([Pack((document("a", 3, (stream.getvalue(),)),))])
    assert batch.tiles is not None and batch.tiles[0].equal(expected)


def test_padding_has_a_row_of_the_embedding_whatever_ends_a_text(tiny, llm_with):
    tokens = tuple(f"<more{number}>" for number in range(99))
    llm = llm_with("{% for m in messages %}{{ m.content }} {% endfor %}", tokens)
    settings = llm / "tokenizer_config.json"
    settings.write_text(json.dumps({**read_json(settings), "eos_token": tokens[-1]}))
    processor = Processor(
        load_config(tiny / "config.yaml", [f"model.llm.path={llm}", "data.template=llava_v1"])
    )
    assert processor.tokenizer.eos_token_id > 320 > processor.batch([Pack(())]).input_ids.max()
