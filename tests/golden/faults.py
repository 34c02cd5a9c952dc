"""Start a training run, break it at a moment, and see how it ends: exit code, the rank that is
named, seconds.

A case breaks something `before` the run starts, or at a `moment` of it by `actions`, one after the
other.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from processes import Command, last_given, ranks_of, running, steps_of

LAUNCH = ("-m", "mmtrain.launch")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *LAUNCH)
ALWAYS = (
    "parallel.pipeline=2",
    "parallel.threads_per_rank=1",
    "data.io_retry_seconds=0",
    "train.max_steps=100000",
)
NAMED = re.compile(r"\brank (\d+) \(stage")
INJECTED = Path(__file__).parent / "injected"


def outcome_of(case: dict[str, Any], tiny: Path, scratch: Path) -> dict[str, Any]:
    """Run a case in `scratch`. Return exit code, named rank or None, seconds from the fault to the
    end, and stderr.
    """
    run = scratch / "runs" / "tiny"
    overrides = [override.format(scratch=scratch) for override in case.get("overrides", ())]
    arguments = last_given(tiny / "config.yaml", f"run.dir={run.parent}", *ALWAYS, *overrides)
    path = os.pathsep.join([str(INJECTED), os.environ.get("PYTHONPATH", "")])
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, PYTHONPATH=path, INJECTED=case.get("injected", ""))
        )
        if "before" in case:
            prepare(case["before"], tiny, scratch, stack)
        launcher = TORCHRUN if case.get("torchrun") else LAUNCH
        command = stack.enter_context(running([*launcher, *arguments], scratch))
        began = time.monotonic()
        if "moment" in case:
            wait_for_moment(command, run, MOMENTS[case["moment"]])
            began = time.monotonic()
            for action in case["actions"]:
                act(action, command, run)
        code = command.wait(300)
        command.seconds_until_gone(60)
        seconds = time.monotonic() - began
    named = NAMED.search(command.stderr)
    return {
        "exit": code,
        "rank": named and int(named[1]),
        "seconds": round(seconds, 1),
        "stderr": command.stderr,
    }


# ---- moments and actions


MOMENTS: dict[str, Callable[[Path], object]] = {
    "start": lambda run: len(ranks_of(run)) == 2,
    # where eval.every_steps is 1, an evaluation follows at once
    "step": lambda run: steps_of(run) >= 2,
    "saving": lambda run: (
        steps_of(run) >= 2 and next((run / "checkpoints").glob(".step-*.tmp"), None)
    ),
}


def wait_for_moment(command: Command, run: Path, has_come: Callable[[Path], object]) -> None:
    """Poll quickly: a save takes milliseconds."""
    deadline = time.monotonic() + 120
    while not has_come(run):
        assert command.process.poll() is None, f"ended before the moment: {command.stderr}"
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.0005)


def act(action: str, command: Command, run: Path) -> None:
    """Do `wait SECONDS`, `move the run`, `cut the shards`, or `SIGNAL launcher|group|ranks|rank
    N`.
    """
    verb, _, target = action.partition(" ")
    if verb == "wait":
        time.sleep(float(target))
    elif verb == "move":
        run.rename(run.with_name("elsewhere"))
    elif verb == "cut":
        for tar in (run.parent.parent / "shards").glob("*.tar"):
            os.truncate(tar, 10_240)
    elif target == "group":
        os.killpg(command.process.pid, signal.Signals[verb])
    else:
        ranks = {f"rank {rank}": pid for rank, pid in ranks_of(run).items()}
        pids = (
            list(ranks.values())
            if target == "ranks"
            else [(ranks | {"launcher": command.process.pid})[target]]
        )
        for pid in pids:
            os.kill(pid, signal.Signals[verb])


# ---- what is broken before the run starts


def prepare(what: str, tiny: Path, scratch: Path, stack: contextlib.ExitStack) -> None:
    """Copy the shards, damage them or checkpoints, or mount a small disk: PermissionError without
    the right to.
    """
    runs, shards = scratch / "runs", scratch / "shards"
    if "shards" in what:
        shutil.copytree(tiny / "shards", shards)
    if what == "damaged shards":
        train_two_steps(tiny, scratch, f"data.shards={shards}/*.tar")  # indexes them
        shutil.rmtree(runs)
        for tar in shards.glob("*.tar"):
            content = bytearray(tar.read_bytes())
            # 8 bytes of every second block, sound at first
            for place in range(41_060, len(content) - 10_240, 1024):
                content[place : place + 8] = bytes(8)
            tar.write_bytes(content)
    elif "checkpoint" in what:
        train_two_steps(tiny, scratch, "checkpoint.every_steps=1")
        saved = sorted((runs / "tiny" / "checkpoints").glob("step-*"))
        for step in saved[-1:] if what == "damaged newest checkpoint" else saved:
            (step / "projector.safetensors").write_bytes(b"")
    elif what == "small disk":
        runs.mkdir(parents=True)
        mount = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", runs], capture_output=True
        )
        if mount.returncode:
            raise PermissionError(mount.stderr.decode())
        stack.callback(subprocess.run, ["umount", "--lazy", runs], check=True)


def train_two_steps(tiny: Path, scratch: Path, *overrides: str) -> None:
    settings = (f"run.dir={scratch / 'runs'}", *ALWAYS, "train.max_steps=2", *overrides)
    arguments = last_given(tiny / "config.yaml", *settings)
    with running((*LAUNCH, *arguments), scratch) as command:
        assert command.wait() == 0, command.stderr
