"""sharding.py: tars that any reader opens, the same bytes for the same samples, whole under their
name or not there.
"""

import hashlib
import io
import json
import random
import re
import tarfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.data.prepare.sharding import sample_key, tar_bytes, write_shard, write_shards
from mmtrain.data.samples.sample import read_sample
from mmtrain.data.shards.index import index_path, read_index
from mmtrain.data.shards.indexing import scan_shard


def picture(number: int, suffix: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (number + 1, 7), (number % 256, 80, 120)).save(
        stream, {"jpg": "JPEG"}.get(suffix, suffix)
    )
    return stream.getvalue()


def sample(key: str, images: int = 1, text: str = "A cat.", suffix: str = "png"):
    turns = [{"from": "human", "value": "<image>" * images}, {"from": "gpt", "value": text}]
    return (
        key,
        {"id": key, "conversations": turns},
        [(suffix, picture(number, suffix)) for number in range(images)],
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


TWO_WITH_INDEXES = [
    f"shard-00000{number}.tar{more}" for number in range(2) for more in ("", ".index")
]
MIXED = [
    sample(f"k{number}", images=number % 4, text="ü\U0001f600" * (number + 1), suffix="webp")
    for number in range(10)
]


def test_the_index_finds_every_member_by_its_bytes_and_is_that_of_a_scan(tmp_path):
    write_shards(MIXED, tmp_path, samples_per_shard=3)
    tars = sorted(tmp_path.glob("*.tar"))
    assert len(tars) == 4
    for tar in tars:
        content, index = tar.read_bytes(), read_index(tar)
        assert (
            index.tar_bytes == len(content) and index.faults == {"llava": {}} and index.texts == {}
        )
        for key, members, sizes in zip(index.keys, index.members, index.image_sizes, strict=True):
            _, record, files = next(entry for entry in MIXED if entry[0] == key)
            found = {member.suffix: content[member.offset :][: member.size] for member in members}
            assert [member.crc32 for member in members] == [
                zlib.crc32(body) for body in found.values()
            ]
            read = read_sample(key, tar.name, found)
            assert read.turns == tuple(
                (turn["from"], turn["value"]) for turn in record["conversations"]
            )
            assert list(read.images) == [body for _, body in files]
            assert sizes == tuple((number + 1, 7) for number in range(len(files)))
        assert index == scan_shard(tar, lambda sample: None)


def test_the_bytes_are_those_that_pythons_tarfile_writes(tmp_path):
    write_shard(tmp_path / "s.tar", MIXED)
    stream, sizes = io.BytesIO(), []
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for key, record, files in MIXED:
            names = [
                suffix if len(files) == 1 else f"{number}.{suffix}"
                for number, (suffix, _) in enumerate(files)
            ]
            contents = [
                json.dumps(record, ensure_ascii=False).encode(),
                *(content for _, content in files),
            ]
            for name, content in zip(["json", *names], contents, strict=True):
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                sizes.append(len(content))
        assert tar_bytes(sizes) == archive.offset
    assert (tmp_path / "s.tar").read_bytes() == stream.getvalue()


@pytest.mark.parametrize("identifier", ["004539375", "a", "A-b_C9", "x" * 80, "0-", "9__"])
def test_a_safe_id_is_its_own_key(identifier):
    assert sample_key(identifier) == identifier


@pytest.mark.parametrize(
    ("identifier", "begin"),
    [
        ("coco/train2017/000000033471.jpg", "coco-train2017-000000033471-jpg-"),
        ("../../etc/passwd", "etc-passwd-"),
        ("__meta__", "meta-"),
        ("-rf", "rf-"),
        ("wiki.page", "wiki-page-"),
        ("x" * 81, "x" * 60 + "-"),
        ("図書館", ""),
        ("日本 2", "2-"),
        (".", ""),
        ("a\n", "a-"),
    ],
)
def test_an_unsafe_id_gets_a_safe_key_with_a_hash_of_it(identifier, begin):
    digits = hashlib.sha256(identifier.encode()).hexdigest()[:12]
    assert sample_key(identifier) == begin + digits


def test_different_ids_have_different_safe_keys():
    draw = random.Random(0)
    ids = {"".join(draw.choices("aB0_-./ é", k=draw.randint(1, 6))) for _ in range(20_000)}
    keys = {sample_key(identifier) for identifier in ids}
    assert len(keys) == len(ids) > 10_000
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", key) for key in keys)


def test_a_shard_is_invisible_to_readers_until_it_is_complete(tmp_path):
    seen = []

    def samples():
        yield sample("a")
        seen.extend(path.name for path in tmp_path.iterdir())
        yield sample("b")

    write_shard(tmp_path / "s.tar", samples())
    assert re.fullmatch(r"\.s\.tar\.\w+\.tmp", seen[0]) and len(seen) == 1
    assert names_in(tmp_path) == ["s.tar", "s.tar.index"]


def test_nothing_that_is_there_is_written_over(tmp_path):
    write_shards(MIXED, tmp_path, samples_per_shard=4)
    before = (tmp_path / "shard-000000.tar").read_bytes()
    with pytest.raises(UserError, match=r"shard-000000\.tar: exists already"):
        write_shards([sample("new")], tmp_path, samples_per_shard=4)
    assert (tmp_path / "shard-000000.tar").read_bytes() == before


def test_a_tar_whose_index_cannot_be_written_is_not_left_alone(tmp_path):
    index_path(tmp_path / "s.tar").mkdir()
    with pytest.raises(UserError, match=r"s\.tar\.index: cannot be written"):
        write_shard(tmp_path / "s.tar", [sample("a")])
    assert names_in(tmp_path) == ["s.tar.index"]
