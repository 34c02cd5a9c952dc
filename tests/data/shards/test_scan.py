import random
import struct
import tarfile
import zlib

import pytest
from archives import conversation, picture, png_chunk, write_tar

from mmtrain.base.errors import UserError
from mmtrain.data.shards import indexing
from mmtrain.data.shards.index import Member
from mmtrain.data.shards.indexing import scan_shard

TEXT = conversation("Hi.", "Hello.")
ONE_IMAGE = conversation("<image>\nWhat?", "A cat.")
TWO_IMAGES = conversation("<image><image>\nWhat?", "Cats.")
PNG = picture(3, 2)


def scanned(path):
    samples = []
    return scan_shard(path, samples.append), samples


def test_image_sizes_come_in_the_order_of_the_marks_whatever_the_order_in_the_tar(tmp_path):
    sizes = [(number + 1, 50 - number) for number in range(11)]
    images = [(f"a.{number}.jpg", picture(*size, "JPEG")) for number, size in enumerate(sizes)]
    random.Random(0).shuffle(images)
    files = [
        *images,
        ("a.json", conversation("<image>" * 11, "Yes.")),
        ("b.json", TEXT),
        ("c.webp", picture(7, 9, "WEBP")),
    ]
    index, _ = scanned(write_tar(tmp_path / "s.tar", [*files, ("c.json", ONE_IMAGE)]))
    assert index.image_sizes == [tuple(sizes), (), ((7, 9),)]
    assert index.faults["llava"] == {}


def png_that_claims(width: int, height: int) -> bytes:
    return (
        PNG[:8]
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + PNG[33:]
    )


@pytest.mark.parametrize(
    ("files", "reason", "sizes"),
    [
        ([("json", b"{"), ("png", PNG)], "not_json", ((3, 2),)),
        ([("json", b""), ("png", PNG)], "not_json", ((3, 2),)),
        ([("json", b"\xff\xfe{}\x80")], "not_json", ()),
        ([("json", b"[" * 100_000)], "not_json", ()),
        ([("json", TEXT + TEXT)], "not_json", ()),
        ([("json", b'{"n": ' + b"1" * 5000 + b"}")], "not_json", ()),
        ([("json", TEXT.replace(b"Hello", b"\\ud800"))], "not_json", ()),
        ([("json", b"[1]")], "no_conversation", ()),
        ([("json", b'{"conversations": [[]]}')], "no_conversation", ()),
        ([("json", conversation("<image>" * 100_000, "Yes."))], "image_count", ()),
        ([("json", b" " * (17 << 20))], "too_many_bytes", ()),
        ([("json", conversation("Hi.", " "))], "no_answer", ()),
        ([("json", ONE_IMAGE)], "image_count", ()),
        ([("json", TEXT), ("png", PNG)], "image_count", ((3, 2),)),
        ([("png", PNG)], "no_json", ((3, 2),)),
        ([("json", TWO_IMAGES), ("0.png", PNG), ("2.png", PNG)], "image_names", ()),
        ([("json", TWO_IMAGES), ("png", PNG), ("jpg", PNG)], "image_names", ()),
        ([("json", ONE_IMAGE), (f"{'7' * 5000}.png", PNG)], "image_names", ()),
        ([("json", ONE_IMAGE), ("png", PNG), ("png", PNG)], "duplicate_member", ()),
        ([("json", ONE_IMAGE), ("png", PNG), ("PNG", PNG)], "duplicate_member", ()),
        ([("json", TEXT), ("json", TEXT)], "duplicate_member", ()),
        ([("json", ONE_IMAGE), ("png", b"")], "undecodable_image", ((0, 0),)),
        ([("json", ONE_IMAGE), ("png", b"GIF89a")], "undecodable_image", ((0, 0),)),
        (
            [("json", TWO_IMAGES), ("0.png", PNG), ("1.jpg", bytes(900))],
            "undecodable_image",
            ((3, 2), (0, 0)),
        ),
        (
            [("json", ONE_IMAGE), ("png", png_that_claims(60_000, 60_000))],
            "too_many_pixels",
            ((0, 0),),
        ),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_noted_and_its_neighbours_are_not(
    tmp_path, files, reason, sizes
):
    around = [("a.json", TEXT)], [("c.json", ONE_IMAGE), ("c.png", PNG)]
    members = [*around[0], *((f"b.{end}", content) for end, content in files), *around[1]]
    index, samples = scanned(write_tar(tmp_path / "s.tar", members, tarfile.PAX_FORMAT))
    assert index.keys == ["a", "b", "c"]
    assert {place: fault[0] for place, fault in index.faults["llava"].items()} == {1: reason}
    assert index.image_sizes == [(), sizes, ((3, 2),)]
    assert [sample and sample.key for sample in samples] == ["a", None, "c"]
    assert [member.crc32 for member in index.members[1]] == [
        zlib.crc32(content) for _, content in files
    ]


def test_pixels_below_pillows_own_limit_are_for_the_run_to_judge(tmp_path):
    large = png_that_claims(13_000, 13_000)
    index, _ = scanned(write_tar(tmp_path / "s.tar", [("a.json", ONE_IMAGE), ("a.png", large)]))
    assert index.image_sizes == [((13_000, 13_000),)]
    assert index.faults["llava"] == {}


def test_members_over_the_limits_are_passed_over_in_pieces_and_others_may_have_any_size(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(indexing, "MAX_IMAGE_BYTES", 1000)
    monkeypatch.setattr(indexing, "MAX_RECORD_BYTES", 300)
    monkeypatch.setattr(indexing, "_CHUNK", 256)
    just, more = PNG + bytes(1000 - len(PNG)), PNG + bytes(1001 - len(PNG))
    long = TEXT + b" " * (301 - len(TEXT))
    array = random.Random(0).randbytes(5000)
    files = [
        ("a.json", ONE_IMAGE),
        ("a.png", just),
        ("b.json", ONE_IMAGE),
        ("b.png", more),
        ("c.json", long),
    ]
    path = write_tar(tmp_path / "s.tar", [*files, ("d.json", TEXT), ("d.npy", array)])
    index, _ = scanned(path)
    assert {place: fault[0] for place, fault in index.faults["llava"].items()} == {
        1: "too_many_bytes",
        2: "too_many_bytes",
    }
    assert index.faults["llava"][1][1] == "png: 1,001 bytes; at most 1,000"
    sums = [member.crc32 for members in index.members for member in members]
    assert sums == [zlib.crc32(content) for _, content in [*files, ("", TEXT), ("", array)]]


def test_members_of_a_sample_that_are_no_neighbours_make_two_samples_as_in_webdataset(tmp_path):
    path = write_tar(tmp_path / "s.tar", [("a.json", ONE_IMAGE), ("b.json", TEXT), ("a.png", PNG)])
    index, _ = scanned(path)
    assert index.keys == ["a", "b", "a"]
    assert {place: fault[0] for place, fault in index.faults["llava"].items()} == {
        0: "image_count",
        2: "no_json",
    }


@pytest.mark.parametrize(
    "name", ["README", "a.b/README", ".DS_Store", "a/._b.json", "__meta__/a.json", "a/__b.json"]
)
def test_files_that_webdataset_drops_in_silence_are_refused(tmp_path, name):
    path = write_tar(tmp_path / "s.tar", [("a.json", TEXT), (name, TEXT)])
    with pytest.raises(UserError) as refused:
        scanned(path)
    assert f"s.tar: {name!r} belongs to no sample" in str(refused.value)


def test_a_member_is_known_by_its_suffix_in_lower_case(tmp_path):
    index, _ = scanned(
        write_tar(tmp_path / "s.tar", [("folder/a.JSON", TEXT), ("folder/a.Seg.TXT", b"x")])
    )
    assert index.keys == ["folder/a"]
    assert index.members == [
        (
            Member("json", 512, len(TEXT), zlib.crc32(TEXT)),
            Member("seg.txt", 1536, 1, zlib.crc32(b"x")),
        )
    ]
