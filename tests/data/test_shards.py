import gzip
import io
import tarfile

import pytest
import webdataset

from mmtrain.data.shard_list import check_archive
from mmtrain.data.shards import read_members
from mmtrain.errors import UserError


def write_tar(path, members, links=()):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    return path


@pytest.fixture
def three_samples(tmp_path):
    return write_tar(
        tmp_path / "s.tar", [(f"{key}.{suffix}", b"x" * 700) for key in "abc" for suffix in ("json", "PNG")]
    )


def test_every_member_is_read_once_in_order(three_samples):
    samples = list(read_members(three_samples))
    assert [(sample["__key__"], sample["json"], sample["png"]) for sample in samples] == [
        (key, b"x" * 700, b"x" * 700) for key in "abc"
    ]
    assert check_archive(three_samples) == 6


def test_a_damaged_header_is_an_error_where_webdataset_alone_drops_the_rest(three_samples):
    content = bytearray(three_samples.read_bytes())
    third = 2 * (512 + 1024)  # the header of b.json: each member takes a header and two blocks
    content[third + 100] ^= 1
    three_samples.write_bytes(content)
    alone = list(webdataset.tariterators.tarfile_samples([{"url": str(three_samples)}]))
    assert [sample["__key__"] for sample in alone] == ["a"]
    with pytest.raises(UserError, match=rf"s\.tar: damaged tar header at byte {third}, after a\.PNG"):
        list(read_members(three_samples))


@pytest.mark.parametrize(
    ("keep", "message"), [(1000, "a.json at byte 0 is cut off"), (1536, "without an end of archive")]
)
def test_a_cut_off_archive_is_an_error(three_samples, keep, message):
    three_samples.write_bytes(three_samples.read_bytes()[:keep])
    with pytest.raises(UserError, match=message):
        list(read_members(three_samples))


def test_links_compressed_archives_and_members_without_suffix_are_refused(tmp_path, three_samples):
    with pytest.raises(UserError, match=r"b\.json is a link or a device"):
        list(read_members(write_tar(tmp_path / "link.tar", [("a.json", b"{}")], links=["b.json"])))
    zipped = tmp_path / "s.tar.gz"
    zipped.write_bytes(gzip.compress(three_samples.read_bytes()))
    with pytest.raises(UserError, match="is it compressed"):
        list(read_members(zipped))
    with pytest.raises(UserError, match="2 files in the archive, but samples made of 1"):
        list(read_members(write_tar(tmp_path / "bare.tar", [("a.json", b"{}"), ("README", b"hello")])))
    with pytest.raises(UserError, match=r"after sample the start: a\.json: duplicate file name"):
        list(read_members(write_tar(tmp_path / "twice.tar", [("a.json", b"{}"), ("a.json", b"{}")])))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_both_tar_formats_count_as_one_file(tmp_path, form):
    path, name = tmp_path / "long.tar", "folder/" + "k" * 180 + ".json"
    with tarfile.open(path, "w", format=form) as tar:
        member = tarfile.TarInfo(name)
        member.size = 2
        tar.addfile(member, io.BytesIO(b"{}"))
    assert [sample["__key__"] + ".json" for sample in read_members(path)] == [name]
