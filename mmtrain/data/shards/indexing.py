"""Make the indexes of many shards in parallel.

tar without index
    --headers, contents, in one sequential read--> offset, size, CRC32 of every file
    --neighbours of one key: samples, judged; TextCounter--> index with text lengths
tar whose index lacks this tokenizer and template
    --members that hold the texts--> its index, with the lengths

Samples are formed as webdataset forms them. What makes one sample unusable is noted as its fault;
what would make webdataset drop or mix up samples in silence is an error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO

from mmtrain.base.durable import held, lock
from mmtrain.base.errors import UserError
from mmtrain.base.progress import ProgressBar
from mmtrain.data.samples.formats import LLAVA, TEXT_SUFFIXES, SampleFormat, text_suffix
from mmtrain.data.samples.records import MAX_IMAGE_BYTES, MAX_RECORD_BYTES, BadSample, image_size
from mmtrain.data.samples.sample import (
    Sample,
    Sizes,
    Tokenization,
    image_number,
    image_suffixes,
    read_sample,
)
from mmtrain.data.shards.archive import read_headers, sample_name
from mmtrain.data.shards.index import (
    MAKE,
    MEND,
    UNKNOWN_SIZE,
    Header,
    Member,
    MissingIndex,
    ShardIndex,
    TextLengths,
    checksum_detail,
    read_header,
    read_index,
    write_index,
)
from mmtrain.data.shards.pool import Advance, worker_pool
from mmtrain.data.shards.remote import RemoteTar, Tar
from mmtrain.runtime.gpus import usable_cores

if TYPE_CHECKING:
    from mmtrain.data.samples.templates import TextCounter

_log = logging.getLogger(__name__)
FAILURES_SHOWN = 5
INDEXED_WHILE_OTHERS_WAIT = 1_000_000_000  # bytes of shards: seconds to a minute
_CHUNK = 1 << 20  # bytes


def ensure_indexes(
    tars: Sequence[Tar],
    how: Tokenization,
    *,
    workers: int | None = None,
    stream: TextIO | None = None,
    others_wait: bool = False,
) -> None:
    """Make or complete the indexes with text lengths as `how` makes them.

    `workers` is the number of processes, None one for each core. A `stream` that is a terminal gets
    a progress bar. With `others_wait` other processes wait for this one, with a timeout. Raises
    UserError where that may take too long, and for indexes that are stale or damaged: their
    checksums are the only record of what the tars hold.
    """
    _, missing = index_headers(tars, how.fingerprint)
    if not missing:
        return
    takes_long = sum(path.stat().st_size for path in missing) > INDEXED_WHILE_OTHERS_WAIT
    if others_wait and takes_long:
        raise UserError(
            f"{len(missing):,} of {len(tars):,} shards have no index for this tokenizer and "
            f"template yet, and other processes would wait for it. First run {MAKE}"
        )
    _log.info(f"indexing {len(missing):,} of {len(tars):,} shards (once; the indexes are kept)")
    build_indexes(missing, how, workers=workers or usable_cores(), stream=stream)


def index_headers(tars: Sequence[Tar], fingerprint: str) -> tuple[list[Header], list[Tar]]:
    """Return the first line of each index with lengths under this fingerprint, and the shards
    without one.

    Raises UserError naming stale or damaged indexes. Cost: 50 us a shard.
    """
    headers = []
    missing = []
    failures = []
    for tar in tars:
        header = None
        try:
            with contextlib.suppress(MissingIndex):
                header = read_header(tar)
        except UserError as error:
            failures.append(error)
        if header is not None and fingerprint in header.texts:
            headers.append(header)
        else:
            missing.append(tar)
    raise_all(failures, len(tars))
    return headers, missing


def build_indexes(
    tars: Sequence[Tar],
    how: Tokenization,
    *,
    workers: int = 1,
    rebuild: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Give each tar an index with text lengths as `how` makes them.

    An index that is there is completed; with `rebuild` it is made anew, without other formats and
    lengths. Raises UserError, after all others are done, for shards that cannot be indexed. Cost: a
    shard is read once; for another tokenizer only its texts.
    """
    # imports torch: once, before workers are forked
    from mmtrain.data.samples.templates import TextCounter

    index = functools.partial(_index_shard, TextCounter(how), rebuild)
    failures = []
    done = samples = 0

    def show(through: int) -> None:
        nonlocal samples
        samples = through
        failed = f"{len(failures):,} failed" if failures else ""
        progress.show(done, samples, failed)

    with (
        worker_pool(index, min(workers, len(tars))) as run,
        ProgressBar("shards", len(tars), stream) as progress,
    ):
        for _, error in run(tars, show):
            done += 1
            if error is not None:
                failures.append(error)
        show(samples)
    raise_all(failures, len(tars))


def _index_shard(
    count: TextCounter,
    rebuild: bool,
    tar: Tar,
    advance: Advance,
) -> UserError | None:
    """Index one shard.

    Return the error that kept it from being indexed, so that the other shards go on.
    """
    try:
        with tar.open("rb") as stream, contextlib.ExitStack() as locked:
            # a process with another tokenizer waits, and then adds its lengths to these
            if isinstance(tar, RemoteTar):
                tar.index.parent.mkdir(parents=True, exist_ok=True)
                locked.enter_context(held(tar.index.with_suffix(".lock"), wait=True))
            else:
                lock(stream)
            index = None
            form = count.how.form
            fingerprint = count.how.fingerprint
            lengths = TextLengths([])
            if not rebuild:
                with contextlib.suppress(MissingIndex):
                    index = read_index(tar)
            if index is not None and fingerprint in index.texts:
                return None

            def measure(sample: Sample | BadSample | None) -> None:
                lengths.add(sample, count)
                advance(1)

            if index is None:
                index = scan_shard(tar, measure, form)
            elif form.reading in index.faults:
                _measure_texts(tar, stream, index, measure, form)
            else:
                scanned = scan_shard(tar, measure, form)
                if scanned.keys != index.keys:
                    raise UserError(
                        f"{tar}: its samples differ from its index. "
                        f"If the samples are right: {MEND} {tar}"
                    )
                index.faults |= scanned.faults
            index.texts[fingerprint] = lengths
            write_index(tar, index)
    except OSError as error:
        return UserError(f"{tar}: cannot be read ({error.strerror})")
    except UserError as error:
        return error
    return None


def _measure_texts(
    tar: Tar,
    stream: BinaryIO,
    index: ShardIndex,
    measure: Callable[[Sample | BadSample | None], None],
    form: SampleFormat,
) -> None:
    """Measure an indexed shard by the members with texts alone."""

    def read(member: Member) -> bytes:
        stream.seek(member.offset)
        content = stream.read(member.size)
        if zlib.crc32(content) != member.crc32:
            raise BadSample("checksum", checksum_detail(member))
        return content

    for place, members in enumerate(index.members):
        sample = None
        if place not in index.faults[form.reading]:
            try:
                sample = _without_images(
                    tar,
                    index.keys[place],
                    members,
                    index.image_sizes[place],
                    form,
                    read,
                )
            except BadSample as error:
                sample = error
        measure(sample)


def _without_images(
    tar: Tar,
    key: str,
    members: Sequence[Member],
    sizes: Sizes,
    form: SampleFormat,
    read: Callable[[Member], bytes],
) -> Sample:
    """Return a sample with empty images.

    Only the member with its text is read. Raises BadSample.
    """
    contents = {member.suffix: b"" for member in members}
    text = text_suffix(form.reading, contents)
    for member in members:
        if member.suffix == text:
            if member.size > MAX_RECORD_BYTES:
                raise BadSample(
                    "too_many_bytes", f"{text}: {member.size:,} bytes; at most {MAX_RECORD_BYTES:,}"
                )
            contents[text] = read(member)
    return replace(read_sample(key, str(tar), contents, members[0].offset, form), sizes=sizes)


class _File(NamedTuple):
    """A member that was read: its text or its image's size, and what is wrong with it."""

    key: str
    member: Member
    text: bytes
    image_size: tuple[int, int]
    fault: tuple[str, str] | None


def scan_shard(
    tar: Tar,
    on_sample: Callable[[Sample | None], None],
    form: SampleFormat = LLAVA,
) -> ShardIndex:
    """Read a tar once and return its index without text lengths, its samples read in this format.

    `on_sample` gets each sample with empty images, or None for one with a fault. Memory is that of
    an image. Raises UserError for a damaged tar, and for names that webdataset forms no sample of.
    """
    try:
        # Pillow's
        with tar.open("rb", buffering=_CHUNK) as stream, warnings.catch_warnings(action="ignore"):
            index = ShardIndex(stream.seek(0, 2), [], [], [], {form.reading: {}})
            for key, files in itertools.groupby(_files(tar, stream), key=attrgetter("key")):
                on_sample(_add_sample(index, tar, key, list(files), form))
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror or error})") from error
    return index


def _files(tar: Tar, stream: BinaryIO) -> Iterator[_File]:
    for file in read_headers(tar, stream):
        named = sample_name(file.name)
        if named is None:
            raise UserError(
                f"{tar}: {file.name!r} belongs to no sample: webdataset skips names without a key "
                "or a suffix, and some that begin with two underscores. Write the tar without it"
            )
        key, suffix = named
        stream.seek(file.offset)
        is_image = image_number(suffix) is not None
        is_text = suffix in TEXT_SUFFIXES
        limit = 0
        if is_image:
            limit = MAX_IMAGE_BYTES
        elif is_text:
            limit = MAX_RECORD_BYTES

        # What is not too large comes as one chunk.
        crc32 = 0
        content = b""
        for chunk in _chunks(stream, file.size, max(limit, _CHUNK)):
            crc32 = zlib.crc32(chunk, crc32)
            content = chunk

        size = UNKNOWN_SIZE
        fault = None
        if is_image and file.size > limit:
            fault = ("too_many_bytes", f"{suffix}: {file.size:,} bytes; at most {limit:,}")
        elif is_image:
            try:
                size = image_size(content)
            except BadSample as error:
                fault = (error.reason, f"{suffix}: {error.detail}")
        text = content if is_text and file.size <= limit else b""
        yield _File(
            key,
            Member(suffix, file.offset, file.size, crc32),
            text,
            size,
            fault,
        )


def _chunks(stream: BinaryIO, size: int, largest: int) -> Iterator[bytes]:
    """Read the next `size` bytes: in one piece up to `largest`, else in small ones."""
    if size > largest:
        largest = _CHUNK
    while size > 0:
        chunk = stream.read(min(largest, size))
        if not chunk:
            raise OSError("it became shorter while it was read")
        size -= len(chunk)
        yield chunk


def _add_sample(
    index: ShardIndex,
    tar: Tar,
    key: str,
    files: list[_File],
    form: SampleFormat,
) -> Sample | None:
    """Append a sample to the index and return it without its images; None for one with a fault."""
    members = {file.member.suffix: file for file in files}
    sample = None
    sizes = ()
    try:
        if len(members) < len(files):
            suffixes = ", ".join(file.member.suffix for file in files)
            raise BadSample("duplicate_member", f"{suffixes}: one appears twice")
        sizes = tuple(members[suffix].image_size for suffix in image_suffixes(members))
        for file in files:
            if file.fault is not None:
                raise BadSample(*file.fault)
        in_order = [file.member for file in files]
        sample = _without_images(
            tar,
            key,
            in_order,
            sizes,
            form,
            lambda member: members[member.suffix].text,
        )
    except BadSample as error:
        index.faults[form.reading][len(index.keys)] = (error.reason, error.detail)
    index.add(key, (file.member for file in files), sizes)
    return sample


def raise_all(failures: Sequence[UserError], tars: int) -> None:
    """Raise one error that lists the first failures, if there are any."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        lines = [f"{len(failures):,} of {tars:,} shards:", *map(str, failures[:FAILURES_SHOWN])]
        if len(failures) > FAILURES_SHOWN:
            lines.append(f"and {len(failures) - FAILURES_SHOWN:,} more")
        raise UserError("\n  ".join(lines))
