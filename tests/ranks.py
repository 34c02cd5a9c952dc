"""Runs a function on several real ranks: forked processes, gloo, results in rank order, a timeout that kills."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _child(function: Callable, rank: int, world: int, port: int, args: tuple, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send(result)
    pipe.close()
    os._exit(0)  # a failing peer would leave this rank in a collective at exit


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
    """Results of `function(*args)` from ranks 0 .. world - 1; AssertionError with the first failing traceback."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(function, rank, world, port, args, sender), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    try:
        for rank, receiver in enumerate(pipes):
            assert receiver.poll(timeout), f"rank {rank} of {world} said nothing for {timeout} s"
            ok, value = receiver.recv()
            assert ok, f"rank {rank} of {world} failed:\n{value}"
            results.append(value)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results
