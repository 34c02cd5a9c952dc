"""records.py: what passes is what samples.read_sample accepts, and what does not has its reason."""

import io
import json
import os
import random
import time
import zlib

import pytest
from archives import png_chunk
from PIL import Image

from mmtrain.data.samples.records import (
    IMAGE_FORMATS,
    MAX_IMAGE_BYTES,
    MAX_PARTS,
    MAX_RECORD_BYTES,
    MAX_SCANS,
    MAX_TEXT_BYTES,
    MAX_TURNS,
    BadSample,
    open_image,
    parse_record,
    read_image,
)
from mmtrain.data.samples.sample import read_sample


def encoded(file_format: str, size=(9, 7), **options) -> bytes:
    stream = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(stream, file_format, **options)
    return stream.getvalue()


def record(question="<image>\nWhat is it?", answer="A cat.", **fields) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "a1", "image": "a.png", "conversations": turns} | fields


def test_a_good_record_keeps_its_content_its_id_and_its_image_names():
    content = record(extra={"source": "web"})
    parsed = parse_record(content)
    assert (parsed.content, parsed.id, parsed.images) == (content, "a1", ("a.png",))
    two = parse_record(record("<image> and <image>", image=["x/b.jpg", "a.png"], id=17))
    assert (two.id, two.images) == ("17", ("x/b.jpg", "a.png"))
    alone = record("Who?")
    del alone["image"], alone["id"]
    assert (parse_record(alone).id, parse_record(alone).images) == (None, ())
    for none in (None, [], "", [""], [None], {"path": "", "bytes": None}):
        assert parse_record(record("Who?", image=none)).images == ()


def turns(*pairs) -> dict:
    return record("", conversations=[{"from": speaker, "value": text} for speaker, text in pairs])


# Reasons that a record's text gives, each with what read_sample makes of the same record: True
# where it accepts it.
BAD_TEXTS = [
    ("not_an_object", ["a"], False),
    ("not_json", record(answer="half a pair: \ud83d"), False),
    ("bad_id", record(id=""), True),
    ("bad_id", record(id=True), True),
    ("no_conversation", record(conversations=[]), False),
    ("no_conversation", record(conversations={"from": "gpt"}), False),
    ("no_conversation", {"id": "a1", "image": "a.png", "text": "a cat"}, False),
    ("unknown_role", turns(("human", "<image>"), ("gpt", "Yes."), ("system", "Be kind.")), False),
    ("unknown_role", turns(("user", "<image>"), ("gpt", "Yes.")), False),
    ("non_text_value", turns(("human", "<image>"), ("gpt", [7])), False),
    ("no_answer", turns(("human", "<image>")), False),
    ("no_answer", turns(("human", "<image>"), ("gpt", " \n")), False),
    ("turn_order", turns(("gpt", "Hello."), ("human", "<image>"), ("gpt", "Yes.")), False),
    ("turn_order", turns(("human", "<image>"), ("human", "Who?"), ("gpt", "Yes.")), False),
    ("turn_order", turns(("human", "<image>"), ("gpt", "Yes."), ("human", "Who?")), False),
    ("turn_order", turns(("system", "<image>"), ("gpt", "Yes.")), False),
    ("too_many_bytes", record(extra="a" * MAX_RECORD_BYTES), True),
    ("too_long", turns(("human", "<image>"), ("gpt", "a" * MAX_TEXT_BYTES)), False),
    ("too_long", turns(*[("human", "<image>"), ("gpt", "Yes.")] * (MAX_TURNS // 2 + 1)), False),
    ("bad_image_field", record(image=7), True),
    ("bad_image_field", record(image=["a.png", None]), True),
    ("image_count", record("Who?"), False),
    ("image_count", record("<image>", image=None), False),
]


@pytest.mark.parametrize(("reason", "bad", "readable"), BAD_TEXTS)
def test_bad_text_is_rejected_by_its_reason(reason, bad, readable):
    with pytest.raises(BadSample) as caught:
        parse_record(bad)
    assert caught.value.reason == reason and caught.value.detail
    named = isinstance(bad, dict) and bad.get("image") is not None
    members = {"json": json.dumps(bad).encode()} | ({"png": b""} if named else {})
    if readable:
        read_sample("a1", "s.tar", members)
    else:
        with pytest.raises(BadSample):
            read_sample("a1", "s.tar", members)


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
        ("gif in disguise.jpg", encoded("GIF"), "jpg"),
        ("ünïcode \U0001f600.png", encoded("PNG"), "png"),
    ],
)
def test_a_good_image_keeps_its_bytes_and_its_own_suffix_in_lower_case(
    folder, name, content, suffix
):
    (folder / name).write_bytes(content)
    assert read_image(folder, name) == (suffix, content)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("sub/e.png", "sub\\e.png"),
        ("caf\u00e9.png", "cafe\u0301.png"),
        ("cafe\u0301.png", "caf\u00e9.png"),
        ("sub/caf\u00e9.png", "sub\\cafe\u0301.png"),
        ("a\\b.png", "a\\b.png"),
    ],
)
def test_a_name_of_windows_or_in_another_unicode_form_finds_its_image(folder, written, name):
    content = encoded("PNG")
    (folder / written).write_bytes(content)
    assert read_image(folder, name) == ("png", content)


def test_what_a_link_does_is_said_with_the_way_out(folder):
    (folder / "coco").symlink_to(folder.parent)
    with pytest.raises(
        BadSample, match=r"coco/secret\.png: leads out .*, to .*/secret\.png; .* by --images"
    ):
        read_image(folder, "coco/secret.png")
    (folder / "gone.png").symlink_to("blobs/gone")
    with pytest.raises(
        BadSample, match=r"missing_image: gone\.png: a link to a file that is not there"
    ):
        read_image(folder, "gone.png")


def jpeg_cut_off() -> bytes:
    content = encoded("JPEG", (64, 64))
    return content[: len(content) * 2 // 3]


def png_with_a_flipped_bit() -> bytes:
    content = bytearray(encoded("PNG", (64, 64)))
    content[len(content) // 2] ^= 1
    return bytes(content)


BAD_IMAGES = {
    "no file": ("missing_image", "none.png"),
    "parent folder": ("outside_images", "../secret.png"),
    "absolute path": ("outside_images", "/etc/secret.png"),
    "link out": ("outside_images", "out.png"),
    "folder that is a link out": ("outside_images", "up/secret.png"),
    "links in a circle": ("unreadable_image missing_image", "circle.png"),
    "a folder": ("unreadable_image", "folder.png"),
    "a named pipe": ("unreadable_image", "pipe.png"),
    "a null byte": ("unreadable_image", "a\0.png"),
    "a name too long for any system": ("unreadable_image", "n" * 5000 + ".png"),
    "a suffix that readers do not know": ("unsupported_image", "plain.heic"),
    "empty": ("undecodable_image", "empty.png"),
    "cut off": ("undecodable_image", "cut.jpg"),
    "one flipped bit": ("undecodable_image", "flipped.png"),
    "PostScript": ("undecodable_image", "script.jpg"),
    "a bomb that Pillow refuses": ("too_many_pixels", "bomb.png"),
    "a bomb that Pillow warns of": ("too_many_pixels", "large.png"),
    "more bytes than allowed": ("too_many_bytes", "long.jpg"),
    "a JPEG of many scans": ("too_much_work", "scans.jpg"),
    "a PNG of many profiles": ("too_much_work", "profiles.png"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_images_are_rejected_by_their_reason(folder, case):
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "plain.heic").write_bytes(encoded("GIF"))
    (folder / "empty.png").touch()
    (folder / "cut.jpg").write_bytes(jpeg_cut_off())
    (folder / "flipped.png").write_bytes(png_with_a_flipped_bit())
    (folder / "script.jpg").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    )
    (folder / "bomb.png").write_bytes(png_that_claims(20_000))  # 400 million pixels
    (folder / "large.png").write_bytes(png_that_claims(10_001))
    (folder / "long.jpg").write_bytes(encoded("JPEG"))
    # 4 MP, 60 kB: decoding takes seconds
    (folder / "scans.jpg").write_bytes(jpeg_of_scans(2000, 3500))
    profile = png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(1_000_000)))
    # 3 MB: decoding takes seconds
    (folder / "profiles.png").write_bytes(png_with(profile * 3000, b""))
    # the rest are zeros, and take no room on the disk
    os.truncate(folder / "long.jpg", MAX_IMAGE_BYTES + 1)
    reasons, name = BAD_IMAGES[case]
    began = time.thread_time()
    with pytest.raises(BadSample) as caught:
        read_image(folder, name)
    assert time.thread_time() - began < 1
    assert caught.value.reason in reasons.split()
    assert caught.value.detail.startswith(name)


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A progressive grey JPEG, all of whose scans but the first refine nothing: one run of blocks
    without a change.
    """
    segment = lambda kind, body: b"\xff" + kind + (len(body) + 2).to_bytes(2, "big") + body  # noqa: E731
    frame = segment(b"\xc2", b"\x08" + side.to_bytes(2, "big") * 2 + b"\1\1\x11\0")
    codes = b"\1" + bytes(15)  # a Huffman table of one code, 0
    tables = segment(b"\xdb", b"\0" + b"\1" * 64) + segment(b"\xc4", b"\0" + codes + b"\0")
    # that code is a run of 2**14 blocks and more
    tables += segment(b"\xc4", b"\x10" + codes + b"\xe0")
    bits = ("0" + "1" * 14) * -(-(((side + 7) // 8) ** 2) // (2**15 - 1))
    bits += "1" * (-len(bits) % 8)
    run = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    first = segment(b"\xda", b"\1\1\0\0\0\0") + b"\0" + segment(b"\xda", b"\1\1\0\1\x3f\1") + run
    refinement = segment(b"\xda", b"\1\1\0\1\x3f\x10") + run
    return b"\xff\xd8" + tables + frame + first + refinement * (scans - 2) + b"\xff\xd9"


def png_with(before: bytes, behind: bytes) -> bytes:
    """A PNG with these chunks before and behind its pixels."""
    content = encoded("PNG")
    return content[:33] + before + content[33:-12] + behind + content[-12:]


def test_as_many_scans_and_chunks_as_allowed_pass_and_thumbnails_and_what_follows_the_end_are_not_counted(
    folder,
):
    thumbnail = b"\xff\xe1" + (2 + 2 * 200).to_bytes(2, "big") + b"\xff\xda" * 200
    scans = jpeg_of_scans(64, MAX_SCANS)
    contents = {
        "scans.jpg": scans[:2] + thumbnail + scans[2:] + b"\xff\xda" * 200,
        "texts.png": png_with(b"", png_chunk(b"tEXt", b"a\0") * (MAX_PARTS - 2)) + bytes(100_000),
        "photo.jpg": encoded("JPEG", (640, 480)),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        assert read_image(folder, name)[1] == content


def png_that_claims(side: int) -> bytes:
    png = bytearray(encoded("PNG"))
    png[16:24] = side.to_bytes(4, "big") * 2  # IHDR's width and height
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)


def test_limits_are_the_largest_that_pass(folder, recwarn):
    (folder / "a.png").write_bytes(encoded("PNG", (30, 20)))
    assert read_image(folder, "a.png", 600)[0] == "png"
    with pytest.raises(
        BadSample, match=r"too_many_pixels: a\.png: 30 x 20 pixels; at most 599 are allowed"
    ):
        read_image(folder, "a.png", 599)
    (folder / "padded.jpg").write_bytes(encoded("JPEG"))
    os.truncate(folder / "padded.jpg", MAX_IMAGE_BYTES)
    assert len(read_image(folder, "padded.jpg")[1]) == MAX_IMAGE_BYTES
    # Pillow warns of such sizes; that it may be read is said here
    with open_image(png_that_claims(10_000)) as image:
        assert image.size == (10_000, 10_000)
    assert not recwarn.list


@pytest.mark.parametrize(("mode", "progressive"), [("RGB", False), ("RGB", True), ("CMYK", False)])
def test_a_jpeg_is_judged_as_by_decoding_all_its_pixels(folder, mode, progressive):
    """Damage of four kinds: cut off, flipped bits, a wrong byte in the headers, a missing piece."""
    stream = io.BytesIO()
    image = Image.effect_noise((160, 120), 60).convert("RGB").convert(mode)
    image.save(stream, "JPEG", progressive=progressive, quality=85)
    draw, verdicts = random.Random(0), {True: 0, False: 0}
    for _ in range(150):
        content = bytearray(stream.getvalue())
        at = draw.randrange(len(content))
        kind = draw.randrange(4)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            content[draw.randrange(620)] = draw.randrange(256)
        else:
            del content[at : at + draw.randrange(1, 400)]
        (folder / "a.jpg").write_bytes(content)
        try:
            with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as whole:
                whole.load()
            sound = True
        except (OSError, SyntaxError, ValueError):
            sound = False
        verdicts[sound] += 1
        try:
            assert read_image(folder, "a.jpg") == ("jpg", bytes(content)) and sound
        except BadSample as error:
            assert error.reason in ("undecodable_image", "too_many_pixels") and not sound
    assert min(verdicts.values()) > 20
