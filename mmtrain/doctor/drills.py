"""The doctor's drills: a rank is killed, a rank is stopped; the job must end in bounded time and name it."""

from __future__ import annotations

import random
from dataclasses import asdict

from mmtrain.config.load import DEMO
from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.doctor.crash_job import SECONDS_AFTER_TIMEOUT, SECONDS_TO_END, Kill, Launched
from mmtrain.doctor.runs import short_run

# parallel.timeout_seconds of the run in which a rank is stopped: connecting on GPUs may take some of it.
TIMEOUT_SECONDS = {"cpu": 10, "cuda": 30}
STEP = 2  # the drill strikes from here on
LONG = "train.max_steps=100000"  # so that no run ends before it is struck


def kill(here: Here) -> Seen:
    """SIGKILL of a rank in a step."""
    return _drill(here, Kill("step", "rank", STEP, 0.05), 60, SECONDS_TO_END)


def stop(here: Here) -> Seen:
    """SIGSTOP of a rank in a step: nothing but a timeout tells the others."""
    timeout = TIMEOUT_SECONDS["cuda" if here.gpus else "cpu"]
    return _drill(here, Kill("step", "stop", STEP, 0.05), timeout, timeout + SECONDS_AFTER_TIMEOUT)


def _drill(here: Here, how: Kill, timeout: int, limit: float) -> Seen:
    name = f"drill-{how.who}"
    layout = ("parallel.pipeline=2", f"parallel.timeout_seconds={timeout}")
    run = Launched([DEMO, *short_run(here, name, *layout, LONG)], here.runs / name, here.folder / "tmp")
    try:
        killed = run.strike(how, random.Random(0), limit + 30)
    finally:
        run.end()
    if killed is None:
        raise FailedError(f"the run ended before step {STEP}: {run.stderr.read_text().strip().splitlines()[-1:]}")
    facts = asdict(killed)
    text = f"{'killed' if how.who == 'rank' else 'stopped'} at {killed.doing}: all gone in {killed.seconds:.1f} s"
    problems = killed.problems(limit)
    if killed.expected_message is None:
        problems.append("the run's log names no rank to strike")
    if problems:
        raise FailedError("; ".join([text, *problems]), facts=facts)
    return Seen(f"{text}, the rank named", facts)
