"""records.py: JSON is read record by record, and what passes is what samples.read_sample accepts."""

import copy
import gzip
import io
import json
import os
import random
import tracemalloc
import zlib

import pytest
from PIL import Image

from mmtrain.data import records
from mmtrain.data.records import REASONS, Rejected, parse_record, read_image, read_llava_json
from mmtrain.data.samples import read_sample
from mmtrain.errors import UserError


def encoded(file_format: str, size=(9, 7), **options) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(stream, file_format, **options)
    return stream.getvalue()


def record(question="<image>\nWhat is it?", answer="A cat.", **fields) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "a1", "image": "a.png", "conversations": turns} | fields


MANY = [record(id=f"r{number}", answer="ü\u2028 \U0001f600" * (number % 50 + 1)) for number in range(400)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(MANY),
        json.dumps(MANY, indent=2, ensure_ascii=False),
        "\ufeff \n" + json.dumps(MANY, ensure_ascii=False) + "\n\n",
        "\n".join(json.dumps(record, ensure_ascii=False) for record in MANY),
        "\r\n\r\n".join(json.dumps(record) for record in MANY) + "\r\n",
    ],
    ids=["array", "indented array", "array after a byte order mark", "lines", "lines from Windows, some empty"],
)
def test_json_arrays_and_json_lines_give_their_records_in_order(tmp_path, monkeypatch, text):
    path = tmp_path / "data.json"
    path.write_bytes(text.encode())
    assert list(read_llava_json(path)) == MANY
    monkeypatch.setattr(records, "_CHUNK", 37)  # every record crosses an end of the window
    assert list(read_llava_json(path)) == MANY


@pytest.mark.parametrize("chunk", range(1, 12))
def test_values_that_end_with_the_window_are_read_whole(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(records, "_CHUNK", chunk)
    path = tmp_path / "data.json"
    path.write_text('[123, -4.5e6, "a\\u00e9\\n", true , null,{"a":[]} ]')
    assert list(read_llava_json(path)) == [123, -4500000.0, "aé\n", True, None, {"a": []}]
    path.write_text(" [ ] ")
    assert list(read_llava_json(path)) == []


def test_memory_is_that_of_a_window_and_not_of_the_file(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([record(answer="x" * 1000)] * 20_000))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    assert sum(1 for _ in read_llava_json(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"id,image\n1,a.jpg\n", "begins with 'i'; needed is a JSON array"),
        (gzip.compress(b"[]"), "is not UTF-8 text .*unpack it"),
        ('[{"id": "ü"}]'.encode("utf-16"), "is not UTF-8 text"),
        (b'{\n "images": []\n}', "line 1 is not valid JSON"),
        (b'{"id": 1}\n\n{"id": 2', "line 3 is not valid JSON"),
        (b'[{"id": 1}, {"id": 2}', r"after 2 records, at character 21 \(the array does not end\)"),
        (b'[{"id": 1}, {"id', r"after 1 records, at character 12 .*is the file complete"),
        (b'[{"id": 1} {"id": 2}]', "after 1 records, at character 11 .*expecting , or ]"),
        (b'[{"id": 1}]{"id": 2}', "something follows the array's end"),
        (b"[" * 100_000, "not valid JSON after 0 records"),
        (b"[1, \xff]", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_neither_is_refused(tmp_path, content, message):
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.json: .*" + message):
        list(read_llava_json(path))


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="no such file; a LLaVA JSON or JSONL file is needed"):
            list(read_llava_json(path))


def test_a_good_record_keeps_its_content_its_id_and_its_image_names():
    content = record(extra={"source": "web"})
    parsed = parse_record(content)
    assert (parsed.content, parsed.id, parsed.images) == (content, "a1", ("a.png",))
    two = parse_record(record("<image> and <image>", image=["x/b.jpg", "a.png"], id=17))
    assert (two.id, two.images) == ("17", ("x/b.jpg", "a.png"))
    alone = record("Who?")
    del alone["image"], alone["id"]
    assert (parse_record(alone).id, parse_record(alone).images) == (None, ())
    assert parse_record(record("Who?", image=None)).images == parse_record(record("Who?", image=[])).images == ()


def turns(*pairs) -> dict:
    return record("", conversations=[{"from": speaker, "value": text} for speaker, text in pairs])


# Reasons that a record's text gives, each with what read_sample makes of the same record: True where it accepts it.
BAD_TEXTS = [
    ("not_an_object", ["a"], False),
    ("not_json", record(score=float("nan")), True),
    ("not_json", record(answer="half a pair: \ud83d"), True),
    ("bad_id", record(id=""), True),
    ("bad_id", record(id=True), True),
    ("bad_id", record(id=1.5), True),
    ("bad_id", record(id=["a"]), True),
    ("no_conversation", record(conversations=[]), False),
    ("no_conversation", record(conversations={"from": "gpt"}), False),
    ("no_conversation", record(conversations=["hello"]), False),
    ("no_conversation", {"id": "a1", "image": "a.png", "text": "a cat"}, False),
    ("unknown_role", turns(("system", "Be kind. <image>"), ("gpt", "Yes.")), False),
    ("unknown_role", record(conversations=[{"role": "user", "content": "<image>"}]), False),
    ("non_text_value", turns(("human", "<image>"), ("gpt", 7)), False),
    ("non_text_value", turns(("human", "<image>"), ("gpt", None)), False),
    ("no_answer", turns(("human", "<image>")), True),
    ("no_answer", turns(("human", "<image>"), ("gpt", " \n")), True),
    ("turn_order", turns(("gpt", "Hello."), ("human", "<image>"), ("gpt", "Yes.")), True),
    ("turn_order", turns(("human", "<image>"), ("human", "Who?"), ("gpt", "Yes.")), True),
    ("turn_order", turns(("human", "<image>"), ("gpt", "Yes."), ("human", "Who?")), True),
    ("image_in_answer", turns(("human", "Who?"), ("gpt", "He: <image>")), True),
    ("bad_image_field", record(image=7), True),
    ("bad_image_field", record(image=""), True),
    ("bad_image_field", record(image=["a.png", None]), True),
    ("image_count", record("Who?"), False),
    ("image_count", record("<image><image>"), False),
    ("image_count", record("<image>", image=None), False),
]


@pytest.mark.parametrize(("reason", "bad", "readable"), BAD_TEXTS)
def test_bad_text_is_rejected_by_its_reason(reason, bad, readable):
    with pytest.raises(Rejected) as caught:
        parse_record(bad)
    assert caught.value.reason == reason and caught.value.detail
    named = isinstance(bad, dict) and bad.get("image") is not None
    members = {"__key__": "a1", "__url__": "s.tar", "json": json.dumps(bad).encode()}
    members |= {"png": b""} if named else {}
    if readable:
        read_sample(members)
    else:
        with pytest.raises(UserError, match="sample a1"):
            read_sample(members)


def test_the_suffixes_are_those_that_samples_are_read_by():
    for suffix in records.IMAGE_SUFFIXES:
        assert read_sample(sample_of(record("<image>"), [(suffix, b"x")])).images == (b"x",)


def sample_of(content: dict, files) -> dict:
    names = [suffix if len(files) == 1 else f"{number}.{suffix}" for number, (suffix, _) in enumerate(files)]
    bodies = {name: body for name, (_, body) in zip(names, files, strict=True)}
    return {"__key__": "a1", "__url__": "s.tar", "json": json.dumps(content).encode(), **bodies}


def test_what_passes_is_what_read_sample_accepts():
    """Records made by random damage to good ones: accepted ones read back, the others fail there or are stricter."""
    draw = random.Random(0)
    stricter = {"not_json", "bad_id", "no_answer", "bad_image_field", "turn_order", "image_in_answer"}
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        images = draw.randrange(3)
        content = turns(*[("human", "<image>" * images + "?"), ("gpt", "!")] * draw.randint(1, 2))
        content["conversations"][-2]["value"] = "And?" if len(content["conversations"]) > 2 else "<image>" * images
        content["image"] = [f"{number}.png" for number in range(images)]
        damage(draw, content)
        try:
            parsed = parse_record(copy.deepcopy(content))
        except Rejected as error:
            outcomes[False] += 1
            if error.reason not in stricter:
                with pytest.raises(UserError):
                    read_sample(sample_of(content, [("png", b"x")] * images))
        else:
            outcomes[True] += 1
            sample = read_sample(sample_of(content, [("png", bytes([n])) for n in range(len(parsed.images))]))
            assert sample.turns == tuple((turn["from"], turn["value"]) for turn in content["conversations"])
            assert sample.images == tuple(bytes([number]) for number in range(len(parsed.images)))
    assert min(outcomes.values()) > 500


def damage(draw: random.Random, content: dict) -> None:
    """At most one random change to a record's text, often harmless; the number of its images stays."""
    turn = draw.choice(content["conversations"])
    values = ["<image>", "", "text", 3, None, [], {}, "human", "gpt", "system", float("inf"), "\ud800", "é"]
    change = draw.randrange(6)
    if change == 0:
        turn[draw.choice(["from", "value", "weight"])] = draw.choice(values)
    elif change == 1:
        turn.pop(draw.choice(["from", "value"]))
    elif change == 2:
        content["conversations"] = draw.choice([content["conversations"][:1], content["conversations"][::-1], *values])
    elif change == 3:
        content["id"] = draw.choice(values)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images" / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(encoded("PNG"))
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("name", "content", "suffix"),
    [
        ("a.jpg", encoded("JPEG"), "jpg"),
        ("sub/b.JPEG", encoded("JPEG"), "jpeg"),
        ("sub/../c.Png", encoded("PNG"), "png"),
        ("d.e.webp", encoded("WEBP"), "webp"),
        ("png in disguise.jpg", encoded("PNG"), "jpg"),
        ("gif in disguise.jpg", encoded("GIF"), "jpg"),
        ("ünïcode \U0001f600.png", encoded("PNG"), "png"),
    ],
)
def test_a_good_image_keeps_its_bytes_and_its_own_suffix_in_lower_case(folder, name, content, suffix):
    (folder / name).write_bytes(content)
    assert read_image(folder, name) == (suffix, content)


def test_a_link_inside_the_folder_is_followed(folder):
    (folder / "a.png").write_bytes(encoded("PNG"))
    (folder / "link.png").symlink_to(folder / "a.png")
    assert read_image(folder, "link.png") == ("png", (folder / "a.png").read_bytes())


def jpeg_cut_off() -> bytes:
    content = encoded("JPEG", (64, 64))
    return content[: len(content) * 2 // 3]


def png_with_a_flipped_bit() -> bytes:
    content = bytearray(encoded("PNG", (64, 64)))
    content[len(content) // 2] ^= 1
    return bytes(content)


BAD_IMAGES = {
    "no file": ("missing_image", "none.png"),
    "a folder that is none": ("missing_image", "none/a.png"),
    "parent folder": ("outside_images", "../secret.png"),
    "absolute path": ("outside_images", "/etc/secret.png"),
    "link out": ("outside_images", "out.png"),
    "folder that is a link out": ("outside_images", "up/secret.png"),
    "link to nothing inside": ("missing_image", "nothing.png"),
    "links in a circle": ("unreadable_image missing_image", "circle.png"),
    "a folder": ("unreadable_image", "folder.png"),
    "a named pipe": ("unreadable_image", "pipe.png"),
    "a null byte": ("unreadable_image", "a\0.png"),
    "a name too long for any system": ("unreadable_image", "n" * 5000 + ".png"),
    "no suffix": ("unsupported_image", "plain"),
    "a suffix that readers do not know": ("unsupported_image", "plain.gif"),
    "empty": ("undecodable_image", "empty.png"),
    "text": ("undecodable_image", "text.jpg"),
    "cut off": ("undecodable_image", "cut.jpg"),
    "one flipped bit": ("undecodable_image", "flipped.png"),
    "PostScript": ("undecodable_image", "script.jpg"),
    "a bomb": ("undecodable_image", "bomb.png"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_images_are_rejected_by_their_reason(folder, case):
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "nothing.png").symlink_to(folder / "none.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    for name in ("plain", "plain.gif"):
        (folder / name).write_bytes(encoded("GIF"))
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("<html>404</html>")
    (folder / "cut.jpg").write_bytes(jpeg_cut_off())
    (folder / "flipped.png").write_bytes(png_with_a_flipped_bit())
    (folder / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    bomb = bytearray(encoded("PNG"))
    bomb[16:24] = (20_000).to_bytes(4, "big") * 2  # IHDR's width and height; 400 million pixels
    (folder / "bomb.png").write_bytes(with_header_checksum(bomb))
    reasons, name = BAD_IMAGES[case]
    with pytest.raises(Rejected) as caught:
        read_image(folder, name)
    assert caught.value.reason in reasons.split()
    assert caught.value.detail.startswith(name)


def with_header_checksum(png: bytearray) -> bytes:
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)


def test_every_reason_has_a_test_here_or_with_the_tool():
    tested = {reason for reason, *_ in BAD_TEXTS} | {name for words, _ in BAD_IMAGES.values() for name in words.split()}
    assert set(REASONS) - tested == {"duplicate_id"}
