"""Many shards in parallel: each a job of its own, so that its bytes depend on neither the workers nor their number.

ShardJob: records with sound text and the names of their images --read and decode images--> tar and index
                                                                --> FinishedShard: what was written and what was not
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.data.prepare.sharding import UNFINISHED, KeyedSample, TextMeter, WrittenShard, shard_name, write_shard
from mmtrain.data.samples.records import ImageLimits, Rejected, read_image
from mmtrain.data.shards.index import text_fingerprint
from mmtrain.pretrained.model_files import model_folder
from mmtrain.processes.rank import die_with_parent

SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Candidate:
    """A record with sound text: a sample, if its images are sound too."""

    record: int  # its number over all input files, from 0
    id: str | int | None
    key: str
    content: dict
    images: tuple[str, ...]


@dataclass(frozen=True)
class Rejection:
    """A record that becomes no sample."""

    record: int  # its number over all input files, from 0
    id: str | int | None  # None also where it has none that could be written
    reason: str  # a code of records.REASONS
    detail: str


@dataclass(frozen=True)
class ShardJob:
    """What one shard is made of: the records of a range."""

    number: int
    first: int  # record
    end: int  # the record behind the last
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]  # for their text


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is written, and the records that it lacks because of their images."""

    first: int  # record
    end: int  # the record behind the last
    shard: WrittenShard
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True)
class ShardTask:
    """What all jobs have in common."""

    images: Path  # folder, absolute and without links
    out: Path
    limits: ImageLimits
    tokenizer: str | None = None  # folder or hub id; None: the indexes get no text lengths
    template: str | None = None

    def meter(self) -> TextMeter | None:
        """The tokenizer, loaded (seconds); raises UserError."""
        if self.tokenizer is None:
            return None
        from mmtrain.data.samples.text_lengths import TextCounter  # imports torch

        fingerprint = text_fingerprint(model_folder(self.tokenizer), self.template)
        return TextMeter(fingerprint, TextCounter(self.tokenizer, self.template))


Results = Iterator[tuple[ShardJob, FinishedShard]]
Tick = Callable[[int], None]  # gets the number of candidates that are through


class _Stopped(Exception):  # noqa: N818
    """The job's result is no longer wanted."""


def run_jobs(
    jobs: Iterator[ShardJob],
    task: ShardTask,
    workers: int,
    finished: Mapping[int, FinishedShard],
    tick: Tick,
) -> Results:
    """Each job with its result, in the jobs' order; those of `finished` (by number) are not run again.

    At most 2 x workers jobs are held at a time. `tick` is called several times a second. Close the iterator to stop the
    workers. Raises UserError: what a worker raised, and for a worker that was killed.
    """
    if workers == 1:
        return _run_here(jobs, task, finished, tick)
    return _run_in_processes(jobs, task, workers, finished, tick)


def _known(job: ShardJob, task: ShardTask, finished: Mapping[int, FinishedShard]) -> FinishedShard | None:
    """The result of a job that ran before; raises UserError if it was another one."""
    known = finished.get(job.number)
    if known is not None and (known.first, known.end) != (job.first, job.end):
        raise UserError(
            f"{known.shard.file} holds records {known.first:,} to {known.end - 1:,}, and would now hold {job.first:,} "
            f"to {job.end - 1:,}: images have changed in size since it was written. Delete {task.out} and start again"
        )
    return known


def _run_here(jobs: Iterator[ShardJob], task: ShardTask, finished: Mapping[int, FinishedShard], tick: Tick) -> Results:
    meter, through = task.meter(), 0

    def next_one() -> None:
        nonlocal through
        through += 1
        tick(through)

    for job in jobs:
        yield job, _known(job, task, finished) or _make_shard(job, task, meter, next_one)


def _run_in_processes(
    jobs: Iterator[ShardJob],
    task: ShardTask,
    workers: int,
    finished: Mapping[int, FinishedShard],
    tick: Tick,
) -> Results:
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of a progress bar
    stop, through = context.Event(), context.Value("q", 0)
    waiting: deque[tuple[ShardJob, FinishedShard | Future[FinishedShard]]] = deque()
    pool = ProcessPoolExecutor(workers, context, _begin, (task, stop, through, os.getpid()))

    def first() -> tuple[ShardJob, FinishedShard]:
        job, result = waiting.popleft()
        if isinstance(result, FinishedShard):
            return job, result
        while not wait([result], timeout=SECONDS_BETWEEN_LOOKS).done:
            tick(through.value)
        tick(through.value)
        return job, result.result()

    try:
        for job in jobs:
            with _interrupts_held():  # new processes inherit the mask: Ctrl-C is for this one alone
                waiting.append((job, _known(job, task, finished) or pool.submit(_run, job)))
            if len(waiting) >= 2 * workers:
                yield first()
        while waiting:
            yield first()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed from outside, perhaps for want of memory: fewer --workers need less"
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        for file in task.out.glob(f"*{UNFINISHED}"):  # of workers that were killed
            file.unlink()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Worker:
    """What a worker process is told when it starts."""

    task: ShardTask
    stop: Event
    through: Synchronized
    parent: int
    meter: TextMeter | None = None

    def next_one(self) -> None:
        if self.stop.is_set() or os.getppid() != self.parent:
            raise _Stopped
        with self.through.get_lock():
            self.through.value += 1


_worker: _Worker | None = None  # of this process


def _begin(task: ShardTask, stop: Event, through: Synchronized, parent: int) -> None:
    global _worker
    die_with_parent(parent)
    _worker = _Worker(task, stop, through, parent)


def _run(job: ShardJob) -> FinishedShard:
    assert _worker is not None, "only in a process that _begin has prepared"
    if _worker.task.tokenizer is not None and _worker.meter is None:
        _worker.meter = _worker.task.meter()
    return _make_shard(job, _worker.task, _worker.meter, _worker.next_one)


def _make_shard(job: ShardJob, task: ShardTask, meter: TextMeter | None, next_one: Callable[[], None]) -> FinishedShard:
    """Write a job's shard; `next_one` is called after each candidate, and may stop it by an exception."""
    rejected: list[Rejection] = []

    def samples() -> Iterator[KeyedSample]:
        for candidate in job.candidates:
            try:
                images = [read_image(task.images, name, task.limits) for name in candidate.images]
            except Rejected as error:
                rejected.append(Rejection(candidate.record, candidate.id, error.reason, error.detail))
            else:
                yield candidate.key, candidate.content, images
            next_one()

    shard = write_shard(task.out / shard_name(job.number), samples(), meter)
    return FinishedShard(job.first, job.end, shard, tuple(rejected))
