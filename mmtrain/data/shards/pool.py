"""Jobs done by several processes: one pool to shard, to index and to count.

tasks --at most 2 x workers held--> work(task, advance), each in one of the workers -->
    results, in the tasks' order
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO, TypeVar

from mmtrain.base.errors import UserError, naming_shared_memory
from mmtrain.base.progress import ProgressBar
from mmtrain.runtime.child import die_with_parent, shield_multiprocessing

SECONDS_BETWEEN_LOOKS = 0.1
SHOWN_FROM = 1_000_000  # samples: they take a second

Task = TypeVar("Task")
Result = TypeVar("Result")
Advance = Callable[[int], None]  # called by a task with the number of samples that it has just done
Tick = Callable[[int], None]  # called by the pool with the number of samples that are done in all
RunTasks = Callable[[Iterable[Task], Tick], Iterator[tuple[Task, Result]]]


class _Stopped(Exception):  # noqa: N818
    """Ends a worker's task between two samples."""


@contextlib.contextmanager
def worker_pool(work: Callable[[Task, Advance], Result], workers: int) -> Iterator[RunTasks]:
    """Yield `run(tasks, tick)`: it yields each task with its `work(task, advance)`, in order.

    With one worker the tasks run here. Otherwise workers are forked, on macOS spawned, so `work`
    must be picklable. `tick` is called several times a second and after each task. Raises UserError
    for a worker that was killed.
    """
    if workers <= 1:
        yield functools.partial(_run_here, work)
        return
    shield_multiprocessing()
    context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "fork")
    with naming_shared_memory():  # here: the caller takes an OSError for one of what it writes
        stop = context.Event()
        through = context.Value("q", 0)
        pool = ProcessPoolExecutor(
            workers,
            context,
            _begin,
            (work, os.getpid(), stop, through),
        )
    try:
        # a worker that has not begun would print a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # forks all workers: later, they would copy the locks of a progress bar's thread
        pool.submit(int)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield functools.partial(_run_in_pool, pool, 2 * workers, through)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed from outside, perhaps for lack of memory. "
            "Use fewer workers; finished work is kept"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def results_of(
    work: Callable[[Task, Advance], Result],
    tasks: Sequence[Task],
    workers: int,
    what: str,
    samples: int,
    stream: TextIO | None,
) -> list[Result]:
    """Return the results of tasks that take a microsecond a sample; a bar shows what takes long."""
    shown = stream if samples > SHOWN_FROM else None
    with (
        worker_pool(work, min(workers, len(tasks))) as run,
        ProgressBar(what, samples, shown, is_brief=True) as progress,
    ):
        found = run(tasks, lambda through: progress.show(through, through))
        return [result for _, result in found]


def _run_here(
    work: Callable[[Task, Advance], Result],
    tasks: Iterable[Task],
    tick: Tick,
) -> Iterator[tuple[Task, Result]]:
    through = 0
    ticked = time.monotonic()

    def advance(samples: int) -> None:
        nonlocal through, ticked
        through += samples
        if time.monotonic() - ticked > SECONDS_BETWEEN_LOOKS:
            tick(through)
            ticked = time.monotonic()

    for task in tasks:
        result = work(task, advance)
        tick(through)
        yield task, result


def _run_in_pool(
    pool: ProcessPoolExecutor,
    most: int,
    through: Any,
    tasks: Iterable[Task],
    tick: Tick,
) -> Iterator[tuple[Task, Result]]:
    waiting: deque[tuple[Task, Future[Result]]] = deque()

    def first() -> tuple[Task, Result]:
        task, result = waiting.popleft()
        while not wait([result], timeout=SECONDS_BETWEEN_LOOKS).done:
            tick(through.value)
        tick(through.value)
        return task, result.result()

    for task in tasks:
        waiting.append((task, pool.submit(_in_worker, task)))
        if len(waiting) >= most:
            yield first()
    while waiting:
        yield first()


_work: Callable[[Any], Any]  # set in workers only


def _begin(work: Callable[[Any, Advance], Any], parent: int, stop: Any, through: Any) -> None:
    """Become a worker that ends when its parent does.

    Ctrl-C, which all get, is the parent's to answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def advance(samples: int) -> None:
        if stop.is_set() or os.getppid() != parent:
            raise _Stopped
        with through.get_lock():
            through.value += samples

    global _work
    _work = lambda task: work(task, advance)  # noqa: E731


def _in_worker(task: Any) -> Any:
    with contextlib.suppress(_Stopped):
        return _work(task)
