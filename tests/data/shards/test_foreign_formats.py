"""Shards that others wrote, by webdataset's own writer, are found to be what they are, indexed and
read as LLaVA's.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from archives import conversation, picture, write_tar
from catalogs import lengths, opened, reasons

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.data.samples.formats import LLAVA, READERS, SampleFormat
from mmtrain.data.samples.sample import Tokenization, read_sample
from mmtrain.data.shards.detection import AUTO, sample_format
from mmtrain.data.shards.index import index_path, read_index
from mmtrain.data.shards.indexing import build_indexes, index_headers, scan_shard
from mmtrain.data.stream.catalog import Reader
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.square import Square

LLM = "demo:llm"
READ = ("example:llava_pp4", "data.template=plain", "--workers", "1")
PROMPT = "What is it?"
JPEG = picture(6, 4, "JPEG")


pytestmark = pytest.mark.usefixtures("own_cache")


def answer(number: int) -> str:
    return f"A red door, number {number}, " + "and more " * (number % 5)


def llava(number: int) -> dict:
    asked = conversation(f"<image>\n{PROMPT}", answer(number).strip())
    return {"jpg": JPEG, "json": asked, "txt": "another text"}


def messages(number: int) -> dict:
    parts = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": answer(number).strip()},
    ]
    return {"0.png": JPEG, "json": {"messages": turns, "images": ["a.png"], "source": "web"}}


def unmarked(number: int) -> dict:
    turns = [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": answer(number).strip()}]
    return {"jpg": JPEG, "json": {"conversations": turns, "image": "somewhere/a.jpg"}}


def with_system(number: int) -> dict:
    made = llava(number)
    return {**made, "json": {**json.loads(made["json"]), "system": "Be brief."}}


def masked(number: int) -> dict:
    turns = [
        {"from": "human", "value": f"<image>{PROMPT}"},
        {"from": "gpt", "value": "No.", "weight": 0},
    ]
    return {"jpg": JPEG, "json": {"conversations": turns}}


WRITERS = {
    "llava": (llava, LLAVA),
    "sharegpt, messages": (messages, SampleFormat("sharegpt")),
    "sharegpt, no marks": (unmarked, SampleFormat("sharegpt")),
    "caption, txt": (
        lambda number: {
            "jpg": JPEG,
            "txt": answer(number),
            "json": {"url": "a"},
            "npy": np.ones(2),
        },
        SampleFormat("caption", caption_prompt=PROMPT),
    ),
    "caption, json": (
        lambda number: {
            "gif": picture(6, 4, "GIF"),
            "json": {"caption": answer(number), "width": 6},
        },
        SampleFormat("caption", caption_prompt=PROMPT),
    ),
    "caption, key": (
        lambda number: {"jpg": JPEG, "txt": "an alt text", "json": {"title": answer(number)}},
        SampleFormat("caption", "title", PROMPT),
    ),
}


def write(folder, make, count: int = 30):
    """Shards of 20 samples by webdataset's ShardWriter."""
    folder.mkdir(exist_ok=True)
    with webdataset.ShardWriter(f"{folder}/%05d.tar", maxcount=20, verbose=0) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:06d}", **make(number)})
    return sorted(folder.glob("*.tar"))


def found(tars, key: str | None = None, prompt: str = PROMPT) -> SampleFormat:
    return sample_format(SampleFormat(AUTO, key, prompt), tars, "data.shards")


@pytest.mark.parametrize("kind", WRITERS)
def test_each_is_found_and_trains_on_what_the_same_conversations_as_llavas_would(
    tmp_path, kind, logged
):
    make, form = WRITERS[kind]
    tars, ours = write(tmp_path / "theirs", make), write(tmp_path / "ours", llava)
    assert found(tars, form.caption_key) == SampleFormat(form.name, form.caption_key, PROMPT)
    suffix = "txt" if kind == "caption, txt" else "json"
    more = "; not read: source" if make is messages else ""
    assert logged == [
        f"data.shards: format {form.name} (KEY.{suffix}), as in 30 of the first 30 samples{more}"
    ]
    read = []
    for shards, one in ((tars, form), (ours, LLAVA)):
        build_indexes(shards, Tokenization(LLM, "chat", form=one))
        text = text_fingerprint(model_folder(LLM), "chat", wording=one.wording)
        catalog = opened(shards, Square(4), text, form=one)
        assert reasons(catalog) == {} and len(catalog) == 30
        reader = Reader(catalog, 0)
        samples = [reader.read(number) for number in range(30)]
        read.append((lengths(catalog), [(sample.key, sample.turns) for sample in samples]))
        assert {len(sample.images) for sample in samples} == {1}
    assert read[0] == read[1]
    assert index_headers(tars, text_fingerprint(model_folder(LLM), "chat"))[1] == (
        [] if form == LLAVA else list(tars)
    )


def test_a_format_is_found_by_the_first_hundred_samples_and_a_share_that_no_quarantine_stops(
    tmp_path,
):
    def mostly(first, share, other):
        return lambda number: first(number) if number % 100 < share else other(number)

    caption = WRITERS["caption, txt"][0]
    assert found(write(tmp_path / "a", mostly(caption, 90, messages), 100)).name == "caption"
    assert found(write(tmp_path / "b", mostly(caption, 60, llava), 100)).name == "caption"
    assert found(write(tmp_path / "c", mostly(llava, 99, unmarked), 100)).name == "llava", (
        "sharegpt reads all of them"
    )
    assert found(write(tmp_path / "d", mostly(llava, 98, unmarked), 100)).name == "sharegpt"
    assert found(write(tmp_path / "f", mostly(llava, 99, with_system), 100)).name == "sharegpt", (
        "llava would drop it"
    )
    assert found(write(tmp_path / "g", mostly(llava, 99, masked), 100)).name == "sharegpt", (
        "llava would train on it"
    )
    assert (
        found(write(tmp_path / "e", lambda n: (llava if n < 100 else caption)(n), 300)).name
        == "llava"
    )


def test_what_no_format_reads_says_why_for_each(tmp_path, capsys):
    tars = write(
        tmp_path / "a",
        lambda number: {"jpg": JPEG, "json": {"alt": "\x1b[2J a door"}, "cls": 3},
        12,
    )
    with pytest.raises(UserError) as refused:
        found(tars)
    first, *others = str(refused.value).split("\n  ")
    assert first.startswith(f"data.shards: none of the first 12 samples of {tars[0]} can be read")
    *faults, remedy = others
    why = dict(fault.split(": ", 1) for fault in faults)
    caption = why.pop("caption")
    assert caption == "12 no_caption: its json has no key caption or text; its keys are alt"
    assert {*why} == {*READERS}
    assert all(fault.startswith("12 no_conversation: ") for fault in why.values())
    assert "data.caption_key" in remedy and found(tars, "alt").name == "caption"
    command = ["index", *READ, str(tars[0].parent)]
    assert main(command) == 2 and main([*command, "data.caption_key=alt"]) == 0
    assert (
        "SHARDS: format caption (KEY.json), as in 12 of the first 12 samples"
        in capsys.readouterr().out
    )


def test_files_of_a_sample_that_others_lie_between_are_named(tmp_path):
    made = [llava(number) for number in range(150)]
    texts = [(f"{number:03}.json", content["json"]) for number, content in enumerate(made)]
    images = [(f"{number:03}.jpg", content["jpg"]) for number, content in enumerate(made)]
    for members, pair in (
        (texts + images, "000.json and 000.jpg"),
        (images + texts, "000.jpg and 000.json"),
    ):
        tar = write_tar(tmp_path / "a.tar", members)
        with pytest.raises(
            UserError, match=rf"a\.tar: {pair} are not neighbours, .* tar --sort=name"
        ):
            found([tar])


@pytest.mark.parametrize(
    "names",
    [
        ("a.1.json", "a.1.jpg", "a.2.json", "a.2.jpg"),
        ("a.v1.json", "a.v1.jpg"),
        ("a.0.json", "a.0.jpg"),
        ("photo.2024.txt", "photo.2024.jpg"),
    ],
)
def test_a_dot_in_what_was_meant_as_a_key_is_named(tmp_path, names):
    contents = {"json": llava(0)["json"], "txt": b"A door.", "jpg": JPEG}
    tar = write_tar(
        tmp_path / "a.tar", [(name, contents[name.rpartition(".")[2]]) for name in names]
    )
    with pytest.raises(UserError, match="a key ends at the first dot of a name"):
        found([tar])


def test_a_format_that_an_index_lacks_is_added_and_the_order_of_formats_does_not_matter(tmp_path):
    def make(number):
        spoiled = {3: {"jpg": b"no picture"}, 5: {"1.jpg": JPEG}, 7: {"txt": b""}, 8: {"json": {}}}
        return {**llava(number), "txt": answer(number), **spoiled.get(number, {})}

    (tar,) = write(tmp_path / "a", make, 20)
    form = SampleFormat("caption", caption_prompt=PROMPT)
    for one in (form, LLAVA):
        build_indexes([tar], Tokenization(LLM, "plain", form=one))
    other_way = index_path(tar).read_bytes()
    build_indexes([tar], Tokenization(LLM, "plain"), rebuild=True)
    build_indexes([tar], Tokenization(LLM, "plain", form=form))
    assert index_path(tar).read_bytes() == other_way
    faults = read_index(tar).faults
    of_files = {3: "undecodable_image", 5: "image_names"}
    assert {place: reason for place, (reason, _) in faults["llava"].items()} == of_files | {
        8: "no_conversation"
    }
    assert {place: reason for place, (reason, _) in faults["caption"].items()} == of_files | {
        7: "no_answer"
    }


def test_a_shard_without_a_sample_that_can_be_trained_on_is_said_and_all_such_are_an_error(
    tmp_path, capsys
):
    good, bad = (
        write(tmp_path / "good", llava, 5),
        write(tmp_path / "bad", lambda n: {"json": llava(n)["json"]}, 5),
    )
    command = [*READ, "data.format=llava"]
    assert main(["index", str(good[0].parent), str(bad[0].parent), *command]) == 0
    said = (
        "SHARDS: 1 of 2 shards hold no sample that can be trained on; "
        f"the first is {bad[0]} (5 image_count: "
    )
    assert said in capsys.readouterr().out
    assert main(["index", str(bad[0].parent), *command]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "error: SHARDS: no sample in 1 shards can be trained on, read as llava (5 image"
    )
    assert "samples that cannot be trained on: 5" in captured.out and captured.err.count("\n") == 1


def test_a_template_that_holds_none_of_the_conversations_is_blamed_and_not_their_format(
    tmp_path, capsys
):
    turns = 2 * [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": "that"}]
    write(tmp_path / "talk", lambda number: {"json": {"conversations": turns}}, 5)
    assert main(["index", *READ, str(tmp_path / "talk")]) == 2
    said = capsys.readouterr().err
    assert "5 template: a conversation that data.template cannot hold" in said
    assert said.endswith(". Fix them, or set data.template to one that holds them\n")


def test_a_shard_of_img2dataset_is_read_sample_for_sample(logged):
    tar = Path(__file__).parent / "img2dataset" / "00000.tar"  # its README says how it was made
    (form,) = {found([tar])}
    assert form.name == "caption" and "(KEY.txt)" in logged[0]
    with tarfile.open(tar) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    captions = {name[:-4]: text.decode() for name, text in files.items() if name.endswith(".txt")}
    index = scan_shard(tar, lambda sample: None, form=form)
    assert index.keys == sorted(captions) and index.faults == {"caption": {}}
    for key, caption in captions.items():
        members = {
            name.partition(".")[2]: content
            for name, content in files.items()
            if name.startswith(f"{key}.")
        }
        sample = read_sample(key, str(tar), members, form=form)
        assert sample.turns == (("human", f"<image>\n{PROMPT}"), ("gpt", caption.strip()))
        assert sample.images == (members["jpg"],)
