"""Tars whose members are misnamed, misplaced, or no files at all; see broken_shards."""

from __future__ import annotations

import copy
import gzip
import tarfile
import zlib
from functools import partial
from typing import Any

from broken_shards import (
    BEFORE,
    Broken,
    Case,
    File,
    Kind,
    key,
    with_files,
)


def renamed(case: Case, name: str, **expected: Any) -> Broken:
    def change(files: list[File], place: int) -> None:
        files[place][0].name = name

    return with_files(case, change, **expected)


def special(case: Case, kind: bytes, error: str | None) -> Broken:
    """A member that is no regular file, before, amid or after the others."""
    member = tarfile.TarInfo(f"{case.draw.randrange(100)}.json")
    member.type, member.linkname = kind, "/etc/passwd"
    place = (0, len(case.shard.files) // 2, len(case.shard.files))[case.number % 3]
    return Broken(case.shard.rewritten(lambda files: files.insert(place, (member, b""))), error=error)


UNSAFE_NAMES = {
    "../000003.json": r"has \.\. in its path",
    "a/../../b.json": r"has \.\. in its path",
    "/etc/passwd.json": "is an absolute path",
    "\\\\server\\share\\b.json": "is an absolute path",
    "c:b.json": "is an absolute path",
    "a\nb.json": "holds a control character",
    "a\udcffb.json": "is not UTF-8",
    "README": "belongs to no sample",
    "__a/b.json": "belongs to no sample",
    ".json": "belongs to no sample",
}


def duplicated(case: Case, suffix: str) -> Broken:
    def change(files: list[File], place: int) -> None:
        again = copy.copy(files[place][0])
        again.name = again.name.rpartition(".")[0] + suffix
        files.insert(place + 1, (again, files[place][1]))

    return with_files(case, change, at=suffix.lower(), unusable=lambda name: {name: "duplicate_member"})


def sample_twice(case: Case) -> Broken:
    """A whole sample again, elsewhere in the shard: webdataset gives both."""
    victim = case.shard.pick(case.draw, "json")
    again = [(copy.copy(file), case.shard.content(file)) for file in case.shard.files_of(key(victim))]
    place = len(case.shard.files) if key(victim) == key(case.shard.files[0]) else 0
    tar = case.shard.rewritten(lambda files: files[:place] + again + files[place:])
    return Broken(tar, added=1, repeated=(key(victim),))


def torn_apart(case: Case) -> Broken:
    """A sample's image at another place of the shard: two parts, neither of which is a sample."""
    image = case.shard.pick(case.draw, "(png|jpg)", lambda name: len(case.shard.files_of(name)) == 2)

    def move(files: list[File]) -> list[File]:
        taken = next(file for file in files if file[0].name == image.name)
        files.remove(taken)
        place = 0 if key(files[0][0]) != key(image) else len(files)
        return [*files[:place], taken, *files[place:]]

    # whichever part is met last gives the reason that the key keeps
    return Broken(case.shard.rewritten(move), added=1, unusable={key(image): "no_json|image_count"})


def image_names(case: Case) -> Broken:
    def change(files: list[File], place: int) -> None:
        file, content = files[place]
        stem, _, suffix = file.name.rpartition(".")
        if case.number % 2:
            file.name = f"{stem}.1.{suffix}"
        else:
            again = copy.copy(file)
            again.name = f"{stem}.0.{suffix}"
            files.insert(place, (again, content))

    return with_files(case, change, at="(png|jpg)", unusable=lambda name: {name: "image_names"})


def one_more_file(case: Case, size: int) -> Broken:
    """A file that is neither text nor image is not read, whatever becomes of it."""

    def change(files: list[File], place: int) -> None:
        files.insert(place, (tarfile.TarInfo(f"{key(files[place][0])}.npy"), bytes(size)))

    return with_files(case, change)


def damaged_pax(case: Case) -> Broken:
    """A name in a header of its own, whose records are damaged, or say what none may say."""
    content, kind, error = (
        (b"99 path=a.json\n", tarfile.XHDTYPE, "damaged pax header"),
        (b"path=a.json\n", tarfile.XHDTYPE, "damaged pax header"),
        (b"14 path=a.json", tarfile.XHDTYPE, "damaged pax header"),
        (b"3 =\n", tarfile.XHDTYPE, "damaged pax header"),
        (b"20 path=../../a.json\n", tarfile.XHDTYPE, "damaged pax header"),
        (b"21 path=../../a.json\n", tarfile.XHDTYPE, r"has \.\. in its path"),
        (b"19 path=/etc/a.json", tarfile.XHDTYPE, "damaged pax header"),
        (b"20 path=/etc/a.json\n", tarfile.XHDTYPE, "is an absolute path"),
        (b"15 path=a.json\n", tarfile.XGLTYPE, "gives all files one path"),
        (b"10 size=1\n", tarfile.XGLTYPE, "gives all files one size"),
        (b"22 GNU.sparse.major=1\n", tarfile.XHDTYPE, "sparse file"),
        (b"19 size=9999999999\n", tarfile.XHDTYPE, "cut off by the file's end"),
        (b"11 size=-1\n", tarfile.XHDTYPE, "cut off by the file's end"),
        (b"12 size=1e3\n", tarfile.XHDTYPE, "damaged tar header"),
        (bytes(2 << 20), tarfile.XHDTYPE, "more than a name is no shard"),
        (b"../a.json\0", tarfile.GNUTYPE_LONGNAME, r"has \.\. in its path"),
        (b"a" * (2 << 20), tarfile.GNUTYPE_LONGNAME, "more than a name is no shard"),
    )[case.number]

    def change(files: list[File], place: int) -> None:
        member = tarfile.TarInfo("header")
        member.type = kind
        files.insert(place, (member, content))

    return with_files(case, change, error=error)


def no_tar(case: Case) -> Broken:
    tar = case.shard.tar
    return Broken(
        (gzip.compress(tar), zlib.compress(tar), b"", b"text" * 999, tar + case.other.tar, tar[1:], b"\0" + tar)[
            case.number
        ],
        error="damaged tar header|ends at byte|more follows",
    )


STRUCTURES = [
    Kind("a file that belongs to nothing", BEFORE, 1, partial(one_more_file, size=20 << 20)),
    *[
        Kind(f"name {name!r}", BEFORE, 1, partial(renamed, name=name, error=error))
        for name, error in UNSAFE_NAMES.items()
    ],
    Kind(
        "a text under a device's name",
        BEFORE,
        2,
        partial(renamed, name="NUL.json", added=1, unusable=lambda name: {name: "no_json", "NUL": "image_count"}),
    ),
    *[
        Kind(
            f"tar member of type {kind.decode()}",
            BEFORE,
            3,
            partial(special, kind=kind, error="regular files only"),
        )
        for kind in (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.BLKTYPE,
            tarfile.FIFOTYPE,
            tarfile.GNUTYPE_SPARSE,
            b"Z",
        )
    ],
    Kind("a folder", BEFORE, 3, partial(special, kind=tarfile.DIRTYPE, error=None)),
    Kind("a text twice", BEFORE, 2, partial(duplicated, suffix=".json")),
    Kind("an image twice, once in capitals", BEFORE, 4, partial(duplicated, suffix=".PNG")),
    Kind("a sample twice", BEFORE, 2, sample_twice),
    Kind("a sample torn apart", BEFORE, 6, torn_apart),
    Kind("images misnamed", BEFORE, 4, image_names),
    Kind("pax or GNU header", BEFORE, 17, damaged_pax),
    Kind("no tar", BEFORE, 7, no_tar),
]
