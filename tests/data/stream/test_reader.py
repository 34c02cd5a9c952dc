import json
import os
import random
import shutil
import tarfile
import threading
from pathlib import Path

import pytest
from archives import conversation, picture, write_tar
from catalogs import opened

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import Sample
from mmtrain.data.shards.index import TextLengths, read_index, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.catalog import OPEN_FILES, Reader
from mmtrain.layouts.square import Square

pytestmark = pytest.mark.slow

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def open_reader(*tars: Path, retry_seconds: float = 0) -> Reader:
    """A reader of shards, each indexed as it is now."""
    for tar in tars:
        index = scan_shard(tar, lambda sample: None)
        index.texts["feed"] = TextLengths([1] * len(index.keys))
        write_index(tar, index)
    return Reader(opened(tars, Square(1)), retry_seconds)


def captions(folder: Path, shards: int, samples: int = 3) -> list[Path]:
    return [
        write_tar(
            folder / f"{shard:03d}.tar",
            [
                (f"{shard}-{number}.json", conversation("Q", f"{shard}-{number}"))
                for number in range(samples)
            ],
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
            turns = tuple(
                (turn["from"], turn["value"])
                for turn in json.loads(members["json"])["conversations"]
            )
            images = tuple(members[suffix] for suffix in sorted(members) if suffix.endswith("png"))
            expected.append(Sample(key, str(tar), turns, images, offset))
    reader = open_reader(*tars)
    numbers = [draw.randrange(len(expected)) for _ in range(200)]
    assert [reader.read(number) for number in numbers] == [expected[number] for number in numbers]


def test_members_that_are_no_part_of_the_sample_are_not_read(tmp_path):
    files = [("a.json", conversation("Q", "A")), ("a.mp4", bytes(999)), ("a.txt", b"")]
    tar = write_tar(tmp_path / "s.tar", files)
    reader = open_reader(tar)
    before = reader.read(0)
    spoil(tar, "a.mp4")
    assert reader.read(0) == before


def test_a_shard_replaced_by_one_of_the_same_size_gives_no_other_sample_and_says_how_to_index_it(
    tmp_path,
):
    tar = write_tar(tmp_path / "s.tar", [("a.json", conversation("Q", "A cat."))])
    reader = open_reader(tar)
    write_tar(tar, [("a.json", conversation("Q", "A dog."))])
    fault = reader.read(0)
    assert (
        fault.reason == "checksum"
        and "replaced after it was indexed (then run mmtrain index CONFIG --rebuild" in fault.detail
    )


def test_a_member_that_would_not_fit_into_memory_is_not_read(tmp_path):
    (tar,) = captions(tmp_path, 1)
    open_reader(tar)
    index = read_index(tar)
    os.truncate(tar, 1 << 30)  # a hole: no disk is used
    index.tar_bytes, index.members[1] = 1 << 30, (index.members[1][0]._replace(size=100 << 20),)
    write_index(tar, index)
    reader = Reader(opened((tar,), Square(1)), 0)
    assert (reader.read(1).reason, reader.read(0).key) == ("too_many_bytes", "0-0")


def lead_to(target: str):
    def begin(tar: Path, aside: Path) -> None:
        tar.rename(aside)
        tar.symlink_to(target)

    return begin


def make_a_folder(tar: Path, aside: Path) -> None:
    tar.rename(aside)
    tar.mkdir()


def cut(tar: Path, aside: Path) -> None:
    shutil.copy(tar, aside)
    os.truncate(tar, 512)


def put_back(tar: Path, aside: Path) -> None:
    if tar.is_dir():
        tar.rmdir()
    aside.replace(tar)


TROUBLES = {  # what becomes of a shard, whether it was open, the system's reason
    "gone": (lambda tar, aside: tar.rename(aside), False, "No such file"),
    "reads fail": (lead_to("/proc/self/mem"), False, "Input/output error"),
    "a link to nothing": (lead_to("nothing"), False, "No such file"),
    "a folder": (make_a_folder, False, "Is a directory"),
    "cut off while it is open": (
        cut,
        True,
        "json member at byte .* is cut off by the end of the file",
    ),
}


@pytest.mark.parametrize("heals", [True, False])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_read_that_fails_is_tried_until_it_works_or_for_as_long_as_allowed(
    tmp_path, trouble, heals
):
    (tar,) = captions(tmp_path, 1)
    reader, (begin, is_open, reason) = (
        open_reader(tar, retry_seconds=30 if heals else 0.25),
        TROUBLES[trouble],
    )
    before = reader.read(2)
    if not is_open:
        reader.close()
    begin(tar, tmp_path / "aside")
    if heals:
        healer = threading.Timer(0.25, put_back, (tar, tmp_path / "aside"))
        healer.start()
        assert reader.read(2) == before
        healer.join()
    else:
        message = (
            rf"^{tar}: cannot be read \(.*{reason}.*\), retried for 0\.25 s "
            r"\(data\.io_retry_seconds\)"
        )
        with pytest.raises(UserError, match=message):
            reader.read(2)


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
        numbers = random.Random(seed).choices(range(120), k=600)
        return all(reader.read(number) == expected[number] for number in numbers)

    children = []
    for seed in (1, 2):
        child = os.fork()
        if child == 0:
            os._exit(0 if all_right(seed) else 1)
        children.append(child)
    assert all_right(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
