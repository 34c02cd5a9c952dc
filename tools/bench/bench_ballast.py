"""Work of the lowest priority beside a rank, so that a rank that waits does not make another one faster.

Ranks of a cluster have a processor each. Here they share caches and memory, and while one waits the others run up to a
third faster, which no planner should count on. The ballast takes a core only while nothing else wants it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

ROWS, WIDTH, OUT = 336, 512, 1536  # as a decoder layer's projections
MATRICES = 64  # 192 MiB: they come from memory, as weights do


@contextlib.contextmanager
def ballast() -> Iterator[int | None]:
    """One process of it, for as long as the block runs, by its id; none where there is no idle priority (not Linux)."""
    if not hasattr(os, "SCHED_IDLE"):
        yield None
        return
    process = subprocess.Popen([sys.executable, __file__, str(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _multiply(parent: int) -> None:
    """Products in the manner of a decoder layer, until the parent is gone."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import torch

    torch.set_num_threads(1)
    tokens, weights, out = torch.randn(ROWS, WIDTH), torch.randn(MATRICES, WIDTH, OUT), torch.empty(ROWS, OUT)
    while os.getppid() == parent:
        for weight in weights:
            torch.nn.functional.silu(torch.mm(tokens, weight, out=out), inplace=True)


if __name__ == "__main__":
    _multiply(int(sys.argv[1]))
