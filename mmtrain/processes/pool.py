"""Jobs done by several processes: one pool for indexing and for sharding.

jobs --at most 2 x workers held--> work(job, report), each in one of the workers --> results, in the jobs' order
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from mmtrain.base.errors import UserError
from mmtrain.processes.parent import die_with_parent

SECONDS_BETWEEN_LOOKS = 0.1

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[int], None]  # told of samples: by a job how many more are through, by the pool how many in all
Run = Callable[[Iterable[Job], Report], Iterator[tuple[Job, Result]]]


class _Stopped(Exception):  # noqa: N818
    """Ends a worker's job between two samples: nobody wants its result any more."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def worker_pool(work: Callable[[Job, Report], Result], workers: int) -> Iterator[Run]:
    """Gives `run(jobs, tick)`: each job with the result of `work(job, report)`, in the jobs' order.

    With one worker the jobs run here. Otherwise workers are forked on entering, which shares what `work` has loaded,
    and are stopped on leaving. `tick` is called several times a second, and after each job. Raises what a job raises,
    and UserError for a worker that was killed.
    """
    if workers <= 1:
        yield functools.partial(_run_here, work)
        return
    context = multiprocessing.get_context("fork")
    stop, through = context.Event(), context.Value("q", 0)

    def report(samples: int) -> None:
        if stop.is_set() or os.getppid() != parent:
            raise _Stopped
        with through.get_lock():
            through.value += samples

    parent = os.getpid()
    pool = ProcessPoolExecutor(workers, context, _begin, (lambda job: work(job, report), parent))
    try:
        with _interrupts_later():
            pool.submit(int)  # forks all workers: later, they would copy the locks of a progress bar's thread
        yield functools.partial(_run_in_pool, pool, 2 * workers, lambda: through.value)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed from outside, perhaps for want of memory: fewer workers need less; what is "
            "finished stays"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _run_here(work: Callable[[Job, Report], Result], jobs: Iterable[Job], tick: Report) -> Iterator[tuple[Job, Result]]:
    through, told = 0, time.monotonic()

    def report(samples: int) -> None:
        nonlocal through, told
        through += samples
        if time.monotonic() - told > SECONDS_BETWEEN_LOOKS:
            tick(through)
            told = time.monotonic()

    for job in jobs:
        result = work(job, report)
        tick(through)
        yield job, result


def _run_in_pool(
    pool: ProcessPoolExecutor, most: int, through: Callable[[], int], jobs: Iterable[Job], tick: Report
) -> Iterator[tuple[Job, Result]]:
    waiting: deque[tuple[Job, Future[Result]]] = deque()

    def first() -> tuple[Job, Result]:
        job, result = waiting.popleft()
        while not wait([result], timeout=SECONDS_BETWEEN_LOOKS).done:
            tick(through())
        tick(through())
        return job, result.result()

    for job in jobs:
        waiting.append((job, pool.submit(_in_worker, job)))
        if len(waiting) >= most:
            yield first()
    while waiting:
        yield first()


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


_work: Callable[[Any], Any]  # set in workers only


def _begin(work: Callable[[Any], Any], parent: int) -> None:
    """Become a worker that ends when its parent does; Ctrl-C, which all get, is the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _work
    _work = work


def _in_worker(job: Any) -> Any:
    with contextlib.suppress(_Stopped):
        return _work(job)
