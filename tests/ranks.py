"""Runs a function on several real ranks: forked processes, gloo, results in rank order, a timeout
that kills.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from gpu_ranks import run_gpu_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")


ON_GPUS = os.environ.get("MMTRAIN_TEST_RANKS") == "cuda"  # set by pytest --on-gpus
SEED = int(os.environ.get("FAKE_CUDA_SEED", "0"))
_ports = itertools.count()


def free_port() -> int:
    """A port that no other process of this test run is given: the kernel hands none out below 32768
    by itself.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20000 + 500 * (worker % 20)
    for number in _ports:
        port = first + (os.getpid() + number) % 500
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: ports are counted without end")


def _child(function: Callable, rank: int, world: int, port: int, args: tuple, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send(result)
    pipe.close()
    os._exit(0)  # a failing peer would leave this rank in a collective at exit


def run_ranks(
    world: int, function: Callable, *args: Any, timeout: float = 120, daemons: bool = True
) -> list[Any]:
    """Results of `function(*args)` from ranks 0 .. world - 1; AssertionError with the first failing
    traceback.

    Ranks that are no daemons may have data workers.
    """
    if ON_GPUS:  # a fake one computes in one thread
        return run_gpu_ranks(world, function, *args, timeout=3 * timeout, seed=SEED)
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(function, rank, world, port, args, sender), daemon=daemons
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: dict[int, Any] = {}
    waiting = dict(zip(pipes, range(world), strict=True))
    deadline = time.monotonic() + timeout
    try:
        while waiting:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            assert ready, (
                f"ranks {sorted(waiting.values())} of {world} said nothing for {timeout} s"
            )
            # in the order of their ends: the first failure is the cause, later ones its victims
            for receiver in ready:
                rank = waiting.pop(receiver)
                ok, results[rank] = receiver.recv()
                assert ok, f"rank {rank} of {world} failed:\n{results[rank]}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world)]
