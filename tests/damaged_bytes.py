"""What disks, copies and mix-ups make of a shard or its index; see broken_shards."""

from __future__ import annotations

import random
import re
import tarfile
from collections.abc import Callable
from functools import partial

from broken_shards import (
    AFTER,
    BEFORE,
    BETWEEN,
    BLOCK,
    Broken,
    Case,
    File,
    Kind,
    changed,
    flipped,
    key,
    zeroed,
)


def header_byte(case: Case) -> int:
    """Anywhere in a header but in its checksum, some of whose bits say nothing."""
    file = case.draw.choice(case.shard.files)
    return file.offset_data - BLOCK + case.draw.choice([byte for byte in range(BLOCK) if not 148 <= byte < 156])


def content_byte(case: Case, ending: str) -> int:
    file = case.shard.pick(case.draw, ending)
    return case.draw.randrange(file.offset_data, file.offset_data + file.size)


def padding_byte(case: Case) -> int:
    file = case.draw.choice([file for file in case.shard.files if file.size % BLOCK])
    return case.draw.randrange(file.offset_data + file.size, file.offset_data + -(-file.size // BLOCK) * BLOCK)


def end_byte(case: Case) -> int:
    return case.draw.randrange(case.shard.end, len(case.shard.tar))


def flip(case: Case, where: Callable[[Case], int], error: str | None = None) -> Broken:
    tar = flipped(case.shard.tar, where(case), case.draw)
    return Broken(tar, error=error, quarantined=changed(case.shard, tar))


def flip_in_text_after_indexing_for_another_tokenizer(case: Case) -> Broken:
    tar = flipped(case.shard.tar, content_byte(case, "json"), case.draw)
    return Broken(tar, unusable=changed(case.shard, tar))


def flip_in_image_head(case: Case) -> Broken:
    """In the signature, or where the PNG checksum of the size guards it."""
    file = case.shard.pick(case.draw, "png" if case.number % 2 else "jpg")
    byte = file.offset_data + case.draw.randrange(33 if case.number % 2 else 2)
    tar = flipped(case.shard.tar, byte, case.draw)
    return Broken(tar, unusable={key(file): "undecodable_image"})


def flip_in_brace(case: Case) -> Broken:
    file = case.shard.pick(case.draw, "json")
    byte = case.draw.choice([file.offset_data, file.offset_data + file.size - 1])
    return Broken(flipped(case.shard.tar, byte, case.draw), unusable={key(file): "not_json"})


def zero_bytes(case: Case) -> Broken:
    tar = zeroed(case.shard.tar, content_byte(case, ""), case.draw.randint(1, 100))
    return Broken(tar, quarantined=changed(case.shard, tar))


def zero_blocks(case: Case) -> Broken:
    start = case.draw.randrange(0, case.shard.end, BLOCK)
    tar = zeroed(case.shard.tar, start, case.draw.choice([BLOCK, 4096]))
    return Broken(tar, quarantined=changed(case.shard, tar))


def noise(case: Case) -> Broken:
    start, length = case.draw.randrange(case.shard.end), case.draw.randint(1, 6000)
    tar = (case.shard.tar[:start] + case.draw.randbytes(length) + case.shard.tar[start + length :])[
        : len(case.shard.tar)
    ]
    return Broken(tar, quarantined=changed(case.shard, tar))


def all_zeros(case: Case) -> Broken:
    tar = bytes(len(case.shard.tar))
    return Broken(tar, quarantined=changed(case.shard, tar))


def zeroed_header(case: Case) -> Broken:
    file = case.draw.choice(case.shard.files)
    tar = zeroed(case.shard.tar, file.offset_data - BLOCK, BLOCK)
    return Broken(tar, error=f"end of archive at byte {file.offset_data - BLOCK}, .*but more follows")


def zeroed_content(case: Case) -> Broken:
    form = "json" if case.number % 2 else "(png|jpg)"
    files = [file for file in case.shard.files if re.search(f"{form}$", file.name)]
    file = files[case.number // 2]
    tar = zeroed(case.shard.tar, file.offset_data, file.size)
    return Broken(tar, unusable={key(file): "not_json" if case.number % 2 else "undecodable_image"})


def cut_tar(case: Case, error: str = "ends at byte|cut off by the file's end", end_matters: bool = True) -> Broken:
    size, end = len(case.shard.tar), case.shard.end
    special = (0, 1, BLOCK, end, end + 1, end + BLOCK, size - 1)
    if case.number < len(special):
        length = special[case.number]
    else:
        length = case.number * BLOCK if case.number % 3 == 0 else case.draw.randrange(size)
    whole = end_matters and length >= end + BLOCK  # one block of zeros is enough of an end
    return Broken(case.shard.tar[:length], error=None if whole else error)


def grown_tar(case: Case) -> Broken:
    more = (b"\0", bytes(10240), case.other.tar, b"rubbish")[case.number]
    return Broken(case.shard.tar + more, error="is stale: made for a tar of")


def exchanged_contents(case: Case) -> Broken:
    """Of two files of one size, under their sound headers."""
    files = [file for file in case.shard.files if key(file) in case.shard.read]
    pairs = [(one, two) for one in files for two in files if one.offset < two.offset and one.size == two.size]
    one, two = pairs[case.number // 2]
    tar = bytearray(case.shard.tar)
    for source, target in ((one, two), (two, one)):
        tar[target.offset_data : target.offset_data + one.size] = case.shard.content(source)
    return Broken(bytes(tar), quarantined=changed(case.shard, bytes(tar)))


def exchanged_members(case: Case) -> Broken:
    """Of two samples, with their headers: the tar is whole, and not the one that was indexed."""

    def blocks(file: tarfile.TarInfo) -> int:
        return -(-file.size // BLOCK)

    one = case.shard.pick(case.draw, "json")
    two = case.draw.choice([file for file in case.shard.files if key(file) != key(one) and blocks(file) == blocks(one)])
    tar = bytearray(case.shard.tar)
    length = BLOCK + blocks(one) * BLOCK
    for source, target in ((one, two), (two, one)):
        start = source.offset_data - BLOCK
        tar[target.offset_data - BLOCK : target.offset_data - BLOCK + length] = case.shard.tar[start : start + length]
    return Broken(bytes(tar), error="the shard was replaced after it was indexed")


def reordered(case: Case) -> Broken:
    """The same files in another order."""

    def turn(files: list[File]) -> list[File]:
        return files[case.number + 1 :] + files[: case.number + 1]

    return Broken(case.shard.rewritten(turn), error="the shard was replaced after it was indexed")


def another_tar(case: Case) -> Broken:
    return Broken(case.other.tar, error="the shard was replaced after it was indexed")


def renamed_samples(case: Case) -> Broken:
    """The same contents at the same places: what the index says of them stays right."""

    def rename(files: list[File]) -> None:
        for file, _ in files:
            file.name = f"{case.number + 1}{file.name[1:]}"

    return Broken(case.shard.rewritten(rename))


def negative_size(case: Case) -> Broken:
    """In base 256, its checksum made right."""
    file = case.draw.choice(case.shard.files)
    header = bytearray(case.shard.tar[file.offset_data - BLOCK : file.offset_data])
    header[124:136] = (b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"\xff" * 11 + b"\0")[case.number]
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(header))[0]
    tar = case.shard.tar[: file.offset_data - BLOCK] + bytes(header) + case.shard.tar[file.offset_data :]
    return Broken(tar, error="cut off by the file's end")


def broken_index(case: Case, spoil: Callable[[bytes, random.Random], bytes]) -> Broken:
    return Broken(case.shard.tar, spoil(case.shard.index, case.draw), error="tar.index: ")


def flipped_anywhere(index: bytes, draw: random.Random) -> bytes:
    return flipped(index, draw.randrange(len(index)), draw)


def cut_index(index: bytes, draw: random.Random) -> bytes:
    return index[: draw.randrange(len(index))]


def zeros_in_index(index: bytes, draw: random.Random) -> bytes:
    return zeroed(index, draw.randrange(len(index) - 64), draw.choice([1, 64]))


NO_INDEXES = (b"[]\n[]\n", b"\n\n", b"3\n", b'{"format": 1}\n{}\n', b"\xff\xfe\n", b"{}", b'"' * 99, b"[" * 200_000)


def another_index(case: Case) -> Broken:
    return Broken(case.shard.tar, case.other.index, error="the shard was replaced after it was indexed")


def index_of_a_shorter_tar(case: Case) -> Broken:
    return Broken(case.shard.tar + bytes(BLOCK * (case.number + 1)), error="is stale")


def no_index(case: Case) -> Broken:
    return Broken(case.shard.tar)


DAMAGES = [
    Kind("bit flip in a header", AFTER, 30, partial(flip, where=header_byte)),
    Kind("bit flip in a text", AFTER, 30, partial(flip, where=partial(content_byte, ending="json"))),
    Kind("bit flip in an image", AFTER, 40, partial(flip, where=partial(content_byte, ending="(png|jpg)"))),
    Kind("bit flip in padding", AFTER, 10, partial(flip, where=padding_byte)),
    Kind("bit flip in the end of archive", AFTER, 6, partial(flip, where=end_byte)),
    Kind("zeroed bytes", AFTER, 15, zero_bytes),
    Kind("zeroed blocks", AFTER, 20, zero_blocks),
    Kind("all zeros", AFTER, 1, all_zeros),
    Kind("noise", AFTER, 12, noise),
    Kind("truncated", AFTER, 24, partial(cut_tar, error="is stale: made for a tar of", end_matters=False)),
    Kind("grown", AFTER, 4, grown_tar),
    Kind("exchanged contents", AFTER, 2, exchanged_contents),
    Kind("exchanged members", AFTER, 8, exchanged_members),
    Kind("reordered", AFTER, 4, reordered),
    Kind("another tar of the same size", AFTER, 2, another_tar),
    Kind("renamed samples", AFTER, 2, renamed_samples),
    Kind("index: bit flip", AFTER, 40, partial(broken_index, spoil=flipped_anywhere)),
    Kind("index: truncated", AFTER, 10, partial(broken_index, spoil=cut_index)),
    Kind("index: zeroed", AFTER, 6, partial(broken_index, spoil=zeros_in_index)),
    Kind("index: appended to", AFTER, 1, partial(broken_index, spoil=lambda index, _: index + b"\n")),
    *[
        Kind(f"index: no index {content[:14]!r}", AFTER, 1, partial(broken_index, spoil=lambda _, __, c=content: c))
        for content in NO_INDEXES
    ],
    Kind("index: of another tar of the same size", AFTER, 2, another_index),
    Kind("index: of a shorter tar", AFTER, 2, index_of_a_shorter_tar),
    Kind("index: missing", BEFORE, 2, no_index),
    Kind("bit flip in a text", BETWEEN, 10, flip_in_text_after_indexing_for_another_tokenizer),
    Kind("bit flip in an image", BETWEEN, 6, partial(flip, where=partial(content_byte, ending="(png|jpg)"))),
    Kind("bit flip in a header", BETWEEN, 4, partial(flip, where=header_byte)),
    Kind("bit flip in a header", BEFORE, 40, partial(flip, where=header_byte, error="damaged tar header")),
    Kind("bit flip in padding", BEFORE, 10, partial(flip, where=padding_byte)),
    Kind("bit flip in the end", BEFORE, 8, partial(flip, where=end_byte, error="damaged tar header|more follows")),
    Kind("bit flip in an image's head", BEFORE, 24, flip_in_image_head),
    Kind("bit flip in a text's braces", BEFORE, 8, flip_in_brace),
    Kind("zeroed header", BEFORE, 10, zeroed_header),
    Kind("zeroed content", BEFORE, 8, zeroed_content),
    Kind("truncated", BEFORE, 24, cut_tar),
    Kind("negative size", BEFORE, 3, negative_size),
]
