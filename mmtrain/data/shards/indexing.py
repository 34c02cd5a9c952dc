"""Indexes made for many shards at once, in parallel.

tar without index --scan_shard, TextCounter--> index with text lengths
tar whose index lacks this tokenizer and template --json members at their offsets--> the same index, lengths added

Tars are only read. What an index holds is a function of the tar, the tokenizer and the template, not of the workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from mmtrain.base.errors import UserError
from mmtrain.base.progress import Progress
from mmtrain.data.samples.records import Rejected
from mmtrain.data.samples.sample import Sample, read_sample
from mmtrain.data.shards.index import (
    IndexState,
    ShardIndex,
    TextLengths,
    index_state,
    read_index,
    text_fingerprint,
    write_index,
)
from mmtrain.data.shards.retry import RETRY_SECONDS, UnreadableError
from mmtrain.data.shards.scan import scan_shard
from mmtrain.pretrained.model_files import model_folder
from mmtrain.processes.rank import die_with_parent

if TYPE_CHECKING:
    from mmtrain.data.samples.text_lengths import TextCounter

SAMPLES_BETWEEN_REPORTS = 50
SECONDS_BETWEEN_LOOKS = 0.2
FAILURES_SHOWN = 5


def ensure_indexes(
    tars: Sequence[Path],
    tokenizer_path: str,
    template: str,
    *,
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    stream: TextIO | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> None:
    """Make or complete the indexes that a run with this tokenizer and template needs; nothing where all are there.

    `workers` is the number of processes, None one for each core that this process may use. `say` is told when there are
    some to make; a `stream` that is a terminal gets a progress bar. Raises UserError for indexes that are stale or
    damaged: they are never replaced unasked, for their checksums are the only record of what the tars should hold.
    """
    missing = unready_shards(tars, text_fingerprint(model_folder(tokenizer_path), template), retry_seconds)
    if missing:
        say(f"indexing {len(missing):,} of {len(tars):,} shards (once; the indexes are kept beside them)")
        build_indexes(missing, tokenizer_path, template, workers or usable_cores(), say=say, stream=stream)


def unready_shards(tars: Sequence[Path], fingerprint: str, retry_seconds: float = RETRY_SECONDS) -> list[Path]:
    """Those without an index that holds lengths under this fingerprint.

    Raises UserError naming the indexes that are stale or damaged, or the first that the storage fails to give.
    """
    missing: list[Path] = []
    failures: list[UserError] = []
    for tar in tars:
        try:
            if index_state(tar, fingerprint, retry_seconds) is not IndexState.READY:
                missing.append(tar)
        except UnreadableError:
            raise
        except UserError as error:
            failures.append(error)
    _raise_all(failures, len(tars))
    return missing


def build_indexes(
    tars: Sequence[Path],
    tokenizer_path: str,
    template: str,
    workers: int,
    *,
    rebuild: bool = False,
    say: Callable[[str], None] = lambda line: None,
    stream: TextIO | None = None,
) -> None:
    """Give each tar an index with text lengths under this tokenizer and template.

    An index that is there is completed; with `rebuild` it is made anew from the tar, without the lengths of other
    tokenizers. Raises UserError, after all others are done, for shards that cannot be indexed. Time: a shard is read
    once, of one that has an index only the json members; each worker takes one shard at a time.
    """
    from mmtrain.data.samples.text_lengths import TextCounter

    count = TextCounter(tokenizer_path, template)
    fingerprint = text_fingerprint(model_folder(tokenizer_path), template)
    jobs = [(tar, fingerprint, rebuild) for tar in tars]
    open_progress = functools.partial(Progress, "shards", len(tars), say, stream)
    if min(workers, len(jobs)) <= 1:
        failures = _index_here(jobs, count, open_progress)
    else:
        failures = _index_in_processes(jobs, count, open_progress, min(workers, len(jobs)))
    _raise_all([failures[number] for number in sorted(failures)], len(tars))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def measure_texts(tar: Path, index: ShardIndex, count: TextCounter, report: Callable[[int], None]) -> TextLengths:
    """Text lengths of an indexed shard, from its json members alone; `report` is told of samples that went through."""
    lengths = _Lengths(count, report)
    try:
        with tar.open("rb") as stream:
            for place, members in enumerate(index.members):
                if place in index.faults:
                    lengths.add(None)
                    continue
                contents = dict.fromkeys((member.suffix for member in members), b"")
                json = next(member for member in members if member.suffix == "json")
                contents["json"] = os.pread(stream.fileno(), json.size, json.offset)
                if zlib.crc32(contents["json"]) != json.crc32:
                    detail = f"json: {json.size:,} bytes whose CRC32 is not {json.crc32:08x}"
                    lengths.reject(Rejected("checksum", detail))
                    continue
                try:
                    lengths.add(read_sample(index.keys[place], str(tar), contents, members[0].offset))
                except Rejected as error:
                    lengths.reject(error)
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror})") from error
    return lengths.finish()


class _Lengths:
    """Text lengths, one sample after the other."""

    def __init__(self, count: TextCounter, report: Callable[[int], None]) -> None:
        self.count = count
        self.report = report
        self.texts = TextLengths([])

    def add(self, sample: Sample | None) -> None:
        """The next sample, None where the index knows that it is unusable."""
        try:
            self._append(0 if sample is None else self.count(sample))
        except Rejected as error:
            self.reject(error)

    def reject(self, error: Rejected) -> None:
        self.texts.faults[len(self.texts.tokens)] = (error.reason, error.detail)
        self._append(0)

    def finish(self) -> TextLengths:
        self.report(len(self.texts.tokens) % SAMPLES_BETWEEN_REPORTS)
        return self.texts

    def _append(self, tokens: int) -> None:
        self.texts.tokens.append(tokens)
        if len(self.texts.tokens) % SAMPLES_BETWEEN_REPORTS == 0:
            self.report(SAMPLES_BETWEEN_REPORTS)


Job = tuple[Path, str, bool]  # tar, fingerprint, rebuild


def _index_shard(job: Job, count: TextCounter, report: Callable[[int], None]) -> None:
    tar, fingerprint, rebuild = job
    state = IndexState.MISSING if rebuild else index_state(tar, fingerprint)
    if state is IndexState.MISSING:
        lengths = _Lengths(count, report)
        index = scan_shard(tar, lengths.add)
        index.texts[fingerprint] = lengths.finish()
    elif state is IndexState.NO_LENGTHS:
        index = read_index(tar)
        index.texts[fingerprint] = measure_texts(tar, index, count, report)
    else:  # another process was faster
        return
    if rebuild:
        write_index(tar, index)
    else:
        write_merged(tar, index)


def write_merged(tar: Path, index: ShardIndex) -> None:
    """Write an index with the lengths that another process, for another tokenizer, has written in the meantime."""
    with _locked(tar):
        with contextlib.suppress(UserError):  # none yet, or one that this one replaces
            written = read_index(tar)
            if (written.keys, written.members) == (index.keys, index.members):
                index.texts = {**written.texts, **index.texts}
        write_index(tar, index)


@contextlib.contextmanager
def _locked(tar: Path) -> Iterator[None]:
    """Keep other processes that index this shard waiting; where the file system has no locks, do not."""
    with tar.open("rb") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _index_here(jobs: Sequence[Job], count: TextCounter, open_progress: Callable[[], Progress]) -> dict[int, UserError]:
    failures: dict[int, UserError] = {}
    samples = 0

    def report(more: int) -> None:
        nonlocal samples
        samples += more
        if more:
            progress.show(number, samples, _failed(failures))

    with open_progress() as progress:
        for number, job in enumerate(jobs):
            try:
                _index_shard(job, count, report)
            except UserError as error:
                failures[number] = error
        progress.show(len(jobs), samples, _failed(failures))
    return failures


def _index_in_processes(
    jobs: Sequence[Job], count: TextCounter, open_progress: Callable[[], Progress], workers: int
) -> dict[int, UserError]:
    # Forked ones share the tokenizer that is loaded already; others would take seconds to import what it needs.
    context = multiprocessing.get_context("fork")
    shared = _Shared(count, context.Value("q", 0), context.Event())
    failures: dict[int, UserError] = {}
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), shared)) as pool:
        try:
            with _interrupts_later():
                numbers = {pool.submit(_index_in_worker, job): number for number, job in enumerate(jobs)}
            waiting = set(numbers)
            with open_progress() as progress:  # after the forks: they would copy the locks of the bar's thread
                while waiting:
                    finished, waiting = wait(waiting, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                    for job in finished:
                        if error := job.result():
                            failures[numbers[job]] = error
                    progress.show(len(jobs) - len(waiting), shared.samples.value, _failed(failures))
        except BrokenProcessPool:
            raise UserError(
                "a worker was killed, perhaps because memory ran out: try fewer workers; finished indexes stay"
            ) from None
        finally:
            shared.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    return failures


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C back while workers are forked: what it raises in the middle of a fork is dropped by Python.

    Blocking the signal would not do: it would come through any other thread that a library has started.
    """
    if threading.current_thread() is not threading.main_thread():  # no Ctrl-C is raised here
        yield
        return
    seen = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: seen.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen.is_set():
            signal.raise_signal(signal.SIGINT)


class _Shared(NamedTuple):
    """What the workers of one call have in common."""

    count: TextCounter
    samples: Any  # multiprocessing's Value: how many went through all of them
    stop: Any  # its Event: the parent wants no more


class _Stopped(Exception):  # noqa: N818
    """Ends a worker's shard between two samples."""


_shared: _Shared  # set in workers only


def _start_worker(parent: int, shared: _Shared) -> None:
    """Become a worker that ends when its parent does; Ctrl-C, which all get, is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _shared
    _shared = shared


def _index_in_worker(job: Job) -> UserError | None:
    try:
        _index_shard(job, _shared.count, _report_to_parent)
    except UserError as error:  # as a value: raised, it would come with the worker's traceback
        return error
    except _Stopped:
        return None
    return None


def _report_to_parent(samples: int) -> None:
    if _shared.stop.is_set():
        raise _Stopped
    with _shared.samples.get_lock():
        _shared.samples.value += samples


def _failed(failures: dict[int, UserError]) -> str:
    return f"{len(failures):,} failed" if failures else ""


def _raise_all(failures: Sequence[UserError], tars: int) -> None:
    """Raise one error that lists the first few; nothing where there are none."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        listed = "\n  ".join(map(str, failures[:FAILURES_SHOWN]))
        more = f"\n  and {len(failures) - FAILURES_SHOWN:,} more" if len(failures) > FAILURES_SHOWN else ""
        raise UserError(f"{len(failures):,} of {tars:,} shards:\n  {listed}{more}")
