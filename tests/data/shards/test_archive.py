import gzip
import io
import random
import tarfile
import time

import pytest
from archives import write_tar

from mmtrain.base.errors import UserError
from mmtrain.data.shards.archive import ArchiveFile, read_headers

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
BLOCKS_OF_A_FILE = 512 + 1024  # its header and 700 bytes


def headers(path):
    with path.open("rb") as stream:
        return list(read_headers(path, stream))


def of_python(path):
    with tarfile.open(path) as tar:
        return [
            ArchiveFile(member.name, member.offset_data, member.size)
            for member in tar
            if member.isreg()
        ]


@pytest.fixture
def six_files(tmp_path):
    return write_tar(
        tmp_path / "s.tar",
        [(f"{key}.{end}", b"x" * 700) for key in "abc" for end in ("json", "png")],
    )


def tar_of(path, member: tarfile.TarInfo, content: bytes = b"", form=tarfile.USTAR_FORMAT):
    with tarfile.open(path, "w", format=form) as tar:
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_files_lie_where_python_finds_them_in_every_tar_format(tmp_path, form):
    draw = random.Random(form)
    stems = ["a", "./b", "folder/c", "é/図書館", "d" * 90]
    stems += ["long/" + "k" * 180, "é" * 120] if form != "ustar" else ["p" * 120 + "/" + "q" * 80]
    names = [f"{stem}{number}.json" for number in range(30) for stem in draw.sample(stems, 3)]
    files = [(name, draw.randbytes(draw.choice([0, 1, 511, 512, 513, 5000]))) for name in names]
    path = write_tar(tmp_path / "s.tar", files, FORMATS[form])
    assert headers(path) == of_python(path)
    assert [file.name for file in headers(path)] == names
    assert [path.read_bytes()[file.offset :][: file.size] for file in headers(path)] == [
        content for _, content in files
    ]


def test_a_size_in_a_pax_header_counts_instead_of_the_one_in_the_ustar_header(tmp_path):
    member = tarfile.TarInfo("a.json")
    member.pax_headers = {"size": "700"}
    path = tar_of(tmp_path / "s.tar", member, b"y" * 700, tarfile.PAX_FORMAT)
    content = bytearray(path.read_bytes())
    header = content.index(b"a.json\0", 1024)
    content[header + 124 : header + 136] = b"00000000000\0"
    field = content[header : header + 512]
    field[148:156] = b" " * 8
    content[header + 148 : header + 156] = b"%06o\0 " % sum(field)
    path.write_bytes(content)
    assert headers(path) == of_python(path) == [ArchiveFile("a.json", header + 512, 700)]


def test_folders_are_passed_over_and_an_archive_without_files_is_empty(tmp_path):
    folder = tarfile.TarInfo("inside")
    folder.type = tarfile.DIRTYPE
    assert headers(tar_of(tmp_path / "folder.tar", folder)) == []
    assert headers(write_tar(tmp_path / "empty.tar", [])) == []


def test_every_bit_of_a_header_that_turns_is_an_error_where_python_drops_the_rest_in_silence(
    six_files,
):
    whole = six_files.read_bytes()
    third = 2 * BLOCKS_OF_A_FILE  # the header of b.json
    silent = 0
    for bit in range(0, 512 * 8, 19):
        content = bytearray(whole)
        content[third + bit // 8] ^= 1 << bit % 8
        six_files.write_bytes(content)
        with tarfile.open(six_files) as tar:
            silent += len(tar.getmembers()) < 6
        try:
            found = headers(six_files)
        except UserError as error:
            assert f"s.tar: damaged tar header at byte {third}, after 'a.png'" in str(error)
        else:  # spaces and nulls around a number mean the same
            assert 148 <= bit // 8 < 156
            assert len(found) == 6
    assert silent > 180


def test_a_header_of_zeros_and_tars_joined_by_cat_are_errors(six_files):
    content = bytearray(six_files.read_bytes())
    content[BLOCKS_OF_A_FILE : BLOCKS_OF_A_FILE + 512] = bytes(512)
    six_files.write_bytes(content)
    with pytest.raises(
        UserError,
        match=rf"end of archive at byte {BLOCKS_OF_A_FILE}, after 'a\.json', but more follows",
    ):
        headers(six_files)
    joined = write_tar(six_files, [("a.json", b"1")]).read_bytes() * 2
    six_files.write_bytes(joined)
    with pytest.raises(UserError, match=r"tars were joined by cat"):
        headers(six_files)


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        b"M",
        b"V",
        b"S",
    ],
)
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    member = tarfile.TarInfo("b.json")
    member.type, member.linkname = kind, "/etc/hostname"
    with pytest.raises(
        UserError, match=r"s\.tar: 'b\.json' at byte 0 is a link, a device or similar"
    ):
        headers(tar_of(tmp_path / "s.tar", member))


@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        (tarfile.XHDTYPE, b"99 path=a.json\n", "damaged pax header at byte 0"),
        (tarfile.XHDTYPE, b"path=a.json\n", "damaged pax header"),
        (tarfile.XHDTYPE, b"14 path=a.json", "damaged pax header"),
        (tarfile.XHDTYPE, b"3 =\n", "damaged pax header"),
        (tarfile.XHDTYPE, b"21 path=../../a.json\n", r"has \.\. in its path"),
        (tarfile.XHDTYPE, b"20 path=/etc/a.json\n", "is an absolute path"),
        (tarfile.XHDTYPE, b"17 path=a\0b.json\n", "holds a control character"),
        (tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n", "sparse file"),
        (tarfile.XHDTYPE, b"19 size=9999999999\n", "cut off by the end of the file"),
        (tarfile.XHDTYPE, b"11 size=-1\n", "cut off by the end of the file"),
        (tarfile.XHDTYPE, b"12 size=1e3\n", "damaged tar header"),
        (tarfile.XHDTYPE, bytes(2 << 20), "more than a name; no shard"),
        (tarfile.XGLTYPE, b"15 path=a.json\n", "gives all files one path"),
        (tarfile.XGLTYPE, b"10 size=1\n", "gives all files one size"),
        (tarfile.XGLTYPE, b"18 comment=x.json\n", None),
        (tarfile.GNUTYPE_LONGNAME, b"../a.json\0", r"has \.\. in its path"),
        (tarfile.GNUTYPE_LONGNAME, b"a" * (2 << 20), "more than a name; no shard"),
    ],
)
def test_a_pax_or_gnu_header_that_is_damaged_or_says_what_none_may_say_is_an_error(
    tmp_path, kind, content, error
):
    header, file = tarfile.TarInfo("header"), tarfile.TarInfo("a.json")
    header.type, header.size = kind, len(content)
    padded = content + bytes(-len(content) % 512)
    path = tmp_path / "s.tar"
    path.write_bytes(
        header.tobuf(tarfile.USTAR_FORMAT) + padded + file.tobuf(tarfile.USTAR_FORMAT) + bytes(1024)
    )
    if error is None:
        assert [each.name for each in headers(path)] == ["a.json"]
    else:
        with pytest.raises(UserError, match=error):
            headers(path)


def test_a_long_name_without_a_file_behind_it_is_an_error(tmp_path):
    path = write_tar(tmp_path / "s.tar", [("k" * 180 + ".json", b"")], tarfile.GNU_FORMAT)
    path.write_bytes(path.read_bytes()[:1024] + bytes(1024))
    with pytest.raises(UserError, match="ends at byte 1024 where a header must follow"):
        headers(path)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("../a.json", "has .. in its path"),
        ("a/../b.json", "has .. in its path"),
        ("a\\..\\b.json", "has .. in its path"),
        ("/etc/a.json", "is an absolute path"),
        ("\\\\host\\a.json", "is an absolute path"),
        ("C:a.json", "is an absolute path"),
        ("a\n.json", "holds a control character"),
        ("a\x7f.json", "holds a control character"),
        ("a\udce9.json", "is not UTF-8"),
    ],
)
def test_unsafe_names_are_refused(tmp_path, name, fault):
    path = write_tar(tmp_path / "s.tar", [("fine.json", b"{}"), (name, b"{}")])
    with pytest.raises(UserError) as refused:
        headers(path)
    assert f"the name {name!r} at byte 1024 {fault}" in str(refused.value)


def test_a_pax_header_is_read_in_time_linear_in_its_size(tmp_path):
    """A header with 40,000 records: a copy of the rest for each would take 5 s."""
    member = tarfile.TarInfo("a.json")
    member.pax_headers = {f"{number:x}": "" for number in range(40_000)}
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    start = time.process_time()
    with (tmp_path / "a.tar").open("rb") as stream:
        assert [file.name for file in read_headers(tmp_path / "a.tar", stream)] == ["a.json"]
    assert time.process_time() - start < 1


def test_compressed_tars_are_named_as_such(tmp_path, six_files):
    zipped = tmp_path / "s.tar.gz"
    zipped.write_bytes(gzip.compress(random.Random(0).randbytes(2000) + six_files.read_bytes()))
    with pytest.raises(UserError, match="Is it compressed"):
        headers(zipped)
