import json
import os
import random
import tarfile
import threading
from pathlib import Path

import pytest
from archives import conversation, picture, write_tar

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import QuarantinedSample, Sample
from mmtrain.data.shards.index import TextLengths, write_index
from mmtrain.data.shards.index_file import index_path
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.catalog import OPEN_FILES, Catalog, DataSet, Reader
from mmtrain.models.layouts.square import Square

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def open_reader(*tars: Path, retry_seconds: float = 0) -> Reader:
    """A reader of shards, each indexed as it is now."""
    for tar in tars:
        index = scan_shard(tar, lambda sample: None)
        index.texts["any"] = TextLengths([1] * len(index.keys))
        write_index(tar, index)
    return Reader(Catalog([DataSet(tars)], ["any"], Square(1), 10**6), retry_seconds)


def captions(folder: Path, shards: int, samples: int = 3) -> list[Path]:
    return [
        write_tar(
            folder / f"{shard:03d}.tar",
            [(f"{shard}-{number}.json", conversation("Q", f"{shard}-{number}")) for number in range(samples)],
        )
        for shard in range(shards)
    ]


def spoil(tar: Path, name: str) -> int:
    """Flip a bit in the middle of a member; returns where its content begins."""
    with tarfile.open(tar) as archive:
        member = archive.getmember(name)
    content = bytearray(tar.read_bytes())
    content[member.offset_data + member.size // 2] ^= 1
    tar.write_bytes(content)
    return member.offset_data


@pytest.mark.parametrize("form", FORMATS)
def test_any_sample_in_any_order_has_the_bytes_that_tarfile_reads(tmp_path, form):
    draw = random.Random(form)
    tars = []
    for shard in range(3):
        files = []
        for number in range(12):
            images, key = draw.randrange(4), f"{draw.choice(['', 'a/', './'])}{shard}-{number}"
            parts = [(f"{key}.json", conversation("<image>" * images, f"{key} é"))]
            parts += [(f"{key}.{n}.PNG", picture(draw.randint(1, 30), 9)) for n in range(images)]
            draw.shuffle(parts)
            files += [*parts, (f"{key}.cls", b"7")]
        tars.append(write_tar(tmp_path / f"{shard}.tar", files, FORMATS[form]))
    expected = []
    for tar in tars:
        samples: dict[str, tuple[int, dict[str, bytes]]] = {}
        with tarfile.open(tar) as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                content = archive.extractfile(member).read()
                samples.setdefault(key, (member.offset_data, {}))[1][suffix.lower()] = content
        for key, (offset, members) in samples.items():
            turns = tuple((turn["from"], turn["value"]) for turn in json.loads(members["json"])["conversations"])
            images = tuple(members[suffix] for suffix in sorted(members) if suffix.endswith("png"))
            expected.append(Sample(key, str(tar), turns, images, offset))
    reader = open_reader(*tars)
    numbers = [draw.randrange(len(expected)) for _ in range(200)]
    assert [reader.read(number) for number in numbers] == [expected[number] for number in numbers]


def test_a_damaged_member_is_a_fault_at_its_place_and_its_neighbours_are_sound(tmp_path):
    files = [
        file
        for number in range(3)
        for file in ((f"{number}.json", conversation("<image>", f"is {number}")), (f"{number}.png", picture(9, 9)))
    ]
    tar = write_tar(tmp_path / "s.tar", files)
    reader = open_reader(tar)
    before = [reader.read(number) for number in range(3)]
    offset = spoil(tar, "1.png")
    fault = reader.read(1)
    assert isinstance(fault, QuarantinedSample)
    assert (fault.key, fault.shard, fault.offset, fault.reason) == ("1", str(tar), offset, "checksum")
    assert fault.detail.startswith(f"png: {len(picture(9, 9))} bytes whose CRC32 is not ")
    assert [reader.read(0), reader.read(2)] == [before[0], before[2]]


def test_members_that_are_no_part_of_the_sample_are_not_read(tmp_path):
    files = [("a.json", conversation("Q", "A")), ("a.mp4", bytes(999)), ("a.txt", b"")]
    tar = write_tar(tmp_path / "s.tar", files)
    reader = open_reader(tar)
    before = reader.read(0)
    spoil(tar, "a.mp4")
    assert reader.read(0) == before


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stem", ["a", "A/b", "é", "図書館/猫", "k" * 95, "p" * 80 + "/" + "q" * 90, "é/" * 40 + "é"])
def test_damage_under_any_name_is_a_fault_and_not_taken_for_another_shard(tmp_path, form, stem):
    tar = write_tar(tmp_path / "s.tar", [(f"{stem}.json", conversation("Q", "A"))], FORMATS[form])
    reader = open_reader(tar)
    spoil(tar, f"{stem}.json")
    assert reader.read(0).reason == "checksum"


@pytest.mark.parametrize(
    ("name", "answer", "seen"),
    [
        ("b.json", "A dog.", r"lies 'b\.json', {size} bytes, where its index has a\.json, {size} bytes"),
        ("a.json", "A hen", r"lies 'a\.json', {less} bytes, where its index has a\.json, {size} bytes"),
    ],
)
def test_a_shard_replaced_by_one_of_the_same_size_is_an_error_that_says_how_to_index_it(tmp_path, name, answer, seen):
    sound = conversation("Q", "A cat.")
    tar = write_tar(tmp_path / "s.tar", [("a.json", sound)])
    reader = open_reader(tar)
    bytes_before = tar.stat().st_size
    write_tar(tar, [(name, conversation("Q", answer))])
    assert tar.stat().st_size == bytes_before
    seen = seen.format(size=len(sound), less=len(sound) - 1)
    with pytest.raises(UserError, match=rf"^{tar}: at byte 512 {seen}.*mmtrain index --rebuild .* {tar}$"):
        reader.read(0)


def test_a_read_that_fails_is_tried_until_it_works(tmp_path):
    (tar,) = captions(tmp_path, 1)
    reader = open_reader(tar, retry_seconds=30)
    before = reader.read(2)
    content = tar.read_bytes()
    os.truncate(tar, 600)  # while it is open
    healer = threading.Timer(0.25, tar.write_bytes, (content,))
    healer.start()
    assert reader.read(2) == before
    healer.join()


@pytest.mark.parametrize("becomes", ["gone", "of other samples"])
def test_what_becomes_of_an_index_while_a_run_reads_changes_nothing(tmp_path, becomes):
    first, other = captions(tmp_path, 2)
    reader = open_reader(first)
    open_reader(other)
    if becomes == "gone":
        index_path(first).unlink()
    else:
        index_path(first).write_bytes(index_path(other).read_bytes())
    assert [reader.read(number).turns[1] for number in range(3)] == [("gpt", f"0-{number}") for number in range(3)]


@pytest.mark.parametrize(
    ("break_", "reason"), [("gone", "No such file or directory"), ("cut", "json member at byte 1,536 is cut")]
)
def test_a_read_that_fails_for_too_long_ends_with_the_systems_reason(tmp_path, break_, reason):
    (tar,) = captions(tmp_path, 1)
    reader = open_reader(tar, retry_seconds=0.25)
    tar.unlink() if break_ == "gone" else os.truncate(tar, 1600)
    message = rf"^{tar}: cannot be read \(.*{reason}.*\), tried for 0\.25 s \(data\.io_retry_seconds\)"
    with pytest.raises(UserError, match=message):
        reader.read(1)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux's /proc")
def test_of_many_shards_few_are_open(tmp_path):
    def open_tars() -> int:
        links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        return sum(file.readlink().parent == tmp_path for file in links if file.exists())

    shards = OPEN_FILES + 6
    reader = open_reader(*captions(tmp_path, shards, samples=1))
    most = 0
    for number in [*range(shards), *reversed(range(shards))]:
        assert reader.read(number).key == f"{number}-0"
        most = max(most, open_tars())
    assert most == OPEN_FILES
    reader.close()
    assert open_tars() == 0 and reader.read(0).key == "0-0"
    assert open_tars() == 1
    del reader
    assert open_tars() == 0, "closed with the reader that nobody has closed"


def test_a_forked_copy_and_its_parent_read_the_same_open_files_at_once(tmp_path):
    tars = captions(tmp_path, 3, samples=40)
    reader = open_reader(*tars)
    expected = [reader.read(number) for number in range(120)]

    def all_right(seed: int) -> bool:
        numbers = random.Random(seed).choices(range(120), k=2000)
        return all(reader.read(number) == expected[number] for number in numbers)

    children = []
    for seed in (1, 2):
        child = os.fork()
        if child == 0:
            os._exit(0 if all_right(seed) else 1)
        children.append(child)
    assert all_right(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
