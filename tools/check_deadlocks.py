"""Tries which layouts of a pipeline can hang on GPUs, by how devices and hosts order their work; starts nothing.

layouts (ranks, stages a rank, micro-batches, first trainable stage, encoder run-ahead) --instruction lists of a
training step, an evaluation and a training step--> plan/deadlocks.py --> for each ordering, how many can hang

All of it takes 4 minutes of a core: 2,944 layouts. The test suite runs a part.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from mmtrain.base.printing import say
from mmtrain.plan.deadlocks import Ordering, find_deadlock
from mmtrain.plan.schedule import (
    Encodes,
    Schedule,
    forward_schedule,
    immediate_encodes,
    in_common_order,
    training_schedule,
)


class Layout(NamedTuple):
    """A pipeline to try."""

    pipeline: int
    chunks_per_rank: int
    microbatches: int
    first_trainable_stage: int
    encode_ahead: int

    @property
    def steps(self) -> tuple[Schedule, Schedule, Schedule]:
        """A training step, an evaluation, a training step."""
        shape = self.pipeline, self.microbatches, self.first_trainable_stage, self.chunks_per_rank
        training = training_schedule(*shape)
        if self.encode_ahead:  # each where the one before it would be, the rest at the end
            before = list(immediate_encodes(training[0]).before)
            training = training_schedule(*shape, Encodes(self.encode_ahead, tuple(before)))
        return training, forward_schedule(self.pipeline, self.microbatches, self.chunks_per_rank), training


class Found(NamedTuple):
    """How a layout fares: the orderings under which it hangs, as planned and in one order common to all ranks."""

    layout: Layout
    hangs: tuple[Ordering, ...]
    hangs_in_common_order: tuple[Ordering, ...]


def layouts(pipelines: Iterable[int], chunks: Iterable[int], microbatches: Sequence[int]) -> Iterator[Layout]:
    """The grid: first trainable stage 0, the middle one and the last, without run-ahead and one micro-batch ahead."""
    for p in pipelines:
        for v in chunks:
            for m in microbatches:
                for first in sorted({0, p * v // 2, p * v - 1}):
                    for ahead in (0, 1):
                        yield Layout(p, v, m, first, ahead)


def try_layout(layout: Layout) -> Found:
    """Every ordering on one layout."""
    steps = layout.steps
    common = [in_common_order(schedule) for schedule in steps]
    return Found(
        layout,
        tuple(ordering for ordering in Ordering if find_deadlock(steps, ordering)),
        tuple(ordering for ordering in Ordering if find_deadlock(common, ordering)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a layout hangs that must not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pipeline", type=int, default=8, metavar="P", help="up to so many ranks (default 8)")
    parser.add_argument("--chunks", type=int, default=4, metavar="V", help="up to so many stages a rank (default 4)")
    parser.add_argument("--microbatches", type=int, default=16, metavar="M", help="up to so many (default 16)")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    grid = list(
        layouts(range(1, options.pipeline + 1), range(1, options.chunks + 1), range(1, options.microbatches + 1))
    )
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(try_layout, grid, chunksize=8))
    say(f"{len(found):,} layouts, {time.perf_counter() - begin:.0f} s. Hang, as planned / in common order:")
    for ordering in Ordering:
        planned = [one.layout for one in found if ordering in one.hangs]
        common = sum(ordering in one.hangs_in_common_order for one in found)
        say(f"  {len(planned):6,} / {common:,}  {ordering.value}")
        by_shape = Counter((layout.pipeline, layout.chunks_per_rank) for layout in planned)
        for chunks in sorted({v for _, v in by_shape}):
            counts = ", ".join(f"{p}: {count}" for (p, v), count in sorted(by_shape.items()) if v == chunks)
            say(f"           {chunks} stages a rank, by ranks: {counts}")
    return int(any(Ordering.IDEAL in one.hangs or one.hangs_in_common_order for one in found))


if __name__ == "__main__":
    sys.exit(main())
