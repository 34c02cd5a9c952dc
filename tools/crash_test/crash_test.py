"""Kill a training run at random moments, give the same command again, and compare the end with an
undisturbed run's.

The run is first left alone once. Then each trial is a run of its own that is killed once or twice:
a random rank, the launcher, or all processes at once (SIGKILL); in a step, during a save, while it
starts, while it loads its checkpoint. After every kill each checkpoint that is left must verify,
and the next start must go on from the newest one. At the end the ledger must be equal byte for
byte, losses, gradient norms and scores to the last bit, the final projector and its optimizer state
bitwise. A dead rank must end its job within 10 s, with one message that names rank, stage, step and
instruction. --hang trials stop a rank (SIGSTOP) instead, at parallel.timeout_seconds=10: the job
must end within 55 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crash_job import MEASURED, SECONDS_AFTER_TIMEOUT, SECONDS_TO_END, Kill, Killed, Launched

from mmtrain.api.run import Run, load_config
from mmtrain.base.durable import UNFINISHED
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_result, run_command
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.checkpoint.step_folder import (
    CHECKPOINTS,
    OPTIMIZER,
    TENSORS,
    newest,
    step_folders,
    step_path,
    why_damaged,
)
from mmtrain.config.load import DEMO

EXAMPLES = """\
examples:
  twenty runs of the demo, shortened to 30 steps, on the CPU, killed in about 35 ways:
    python tools/crash_test/crash_test.py
  the demo as it is, evaluations included:
    python tools/crash_test/crash_test.py --full
  your own job, another draw, results for a program:
    python tools/crash_test/crash_test.py my.yaml train.max_steps=50 --seed 7 --json crashes.json

exit codes:
  0    every trial ended like the undisturbed run
  1    one did not; its folder is kept, and named
  2    wrong input, or the undisturbed run fails
  130  stopped by Ctrl-C
"""
SHORT = (
    "train.max_steps=30",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=2",
    "eval.shards=null",
)
FULL = ("checkpoint.every_steps=10",)
# What each trial of a round is killed at: one start after the other.
ROUND = (
    ("save", "load"),
    ("step",),
    ("save",),
    ("step", "load"),
    ("save", "save"),
    ("start", "step"),
)
VICTIMS = ("rank", "all", "launcher")
EXIT_DIFFERENT = 1
HANG_TIMEOUT = 10  # parallel.timeout_seconds of a start in which a rank is stopped


@dataclass
class Trial:
    """A run that was killed, and what was found wrong with it."""

    number: int
    kills: list[Killed] = field(default_factory=list)
    # step that each start after a kill went on from
    resumed_at: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: int = 0  # samples of the undisturbed run's ledger
    repeated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Setup:
    """What is run, and where."""

    config: str
    overrides: Sequence[str]
    folder: Path  # of all runs
    scratch: Path

    def start(self, name: str, number: int = 0, *more: str) -> Launched:
        """Start the run of this name, the `number`-th time."""
        arguments = [
            self.config,
            *self.overrides,
            f"run.dir={self.folder}",
            f"run.name={name}",
            *more,
        ]
        return Launched(arguments, self.folder / name, self.scratch / f"{name}-{number}")


@dataclass(frozen=True)
class Reference:
    """The undisturbed run."""

    folder: Path
    start_seconds: float  # until its first step


def crash_test(options: argparse.Namespace) -> int:
    """Run all trials, print a row of each and what they found together; the exit code."""
    own = FULL if options.full else SHORT if options.config == DEMO else ()
    given = {word.partition("=")[0] for word in options.overrides}  # a command takes no key twice
    overrides = [word for word in own if word.partition("=")[0] not in given]
    overrides += [*options.overrides, "data.ledger=true"]
    load_config(options.config, overrides)  # or say what is wrong with it before anything is made
    # A socket's path, below TMPDIR, must not have more than 107 characters: not in the folder,
    # whose path may be long.
    scratch = Path(tempfile.mkdtemp(prefix="crash-"))
    setup = Setup(
        options.config,
        overrides,
        Path(tempfile.mkdtemp(prefix="crash_test-", dir=options.folder)),
        scratch,
    )
    keep, trials = True, []
    try:
        reference = _undisturbed(setup)
        print_result(
            f"undisturbed: {_last_step(reference)} steps; "
            f"the first one came after {reference.start_seconds:.1f} s"
        )
        for trial in _trials(reference, setup, options):
            trials.append(trial)
            _print_row(trial)
        keep = any(trial.problems for trial in trials)
    finally:
        shutil.rmtree(scratch)
        if keep:
            print_result(f"kept: {setup.folder}")
        else:
            shutil.rmtree(setup.folder)
    summary = _summary(trials)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"summary": summary, "trials": [asdict(trial) for trial in trials]}) + "\n"
        )
    _print_summary(summary)
    return EXIT_DIFFERENT if keep else 0


def _undisturbed(setup: Setup) -> Reference:
    began = time.monotonic()
    start, seconds = setup.start("undisturbed"), None
    try:
        while start.process.poll() is None:
            if seconds is None and any(
                doing[0].isupper() for _, doing in start.progress().values()
            ):
                seconds = time.monotonic() - began
            time.sleep(0.01)
    finally:
        start.end()
    if start.process.returncode:
        raise UserError(
            f"the undisturbed run fails: {start.stderr.read_text().strip().removeprefix('error: ')}"
        )
    return Reference(start.run, seconds or 0.0)


def _trials(reference: Reference, setup: Setup, options: argparse.Namespace) -> Iterator[Trial]:
    """Trials in which at least one kill found its moment: `--trials` of them, then `--hang` of the
    other kind.
    """
    draw = random.Random(options.seed)
    steps = range(1, _last_step(reference) - 1)
    kinds = [*itertools.islice(itertools.cycle(ROUND), options.trials), *[("hang",)] * options.hang]
    victims = itertools.cycle(VICTIMS)
    for number, kind in enumerate(kinds, start=1):
        while True:
            how = [("step", "stop") if when == "hang" else (when, next(victims)) for when in kind]
            kills = [Kill.draw(*one, steps, reference.start_seconds, draw) for one in how]
            trial = _run_trial(number, kills, reference, setup, draw)
            if trial.kills or trial.problems:
                break
        yield trial


def _run_trial(
    number: int, kills: Sequence[Kill], reference: Reference, setup: Setup, draw: random.Random
) -> Trial:
    """A run that is killed as said, each kill in a start of its own, and then left to its end."""
    trial, began = Trial(number), time.monotonic()
    name = f"trial-{number}"
    run = setup.folder / name
    for start_number, kill in enumerate([*kills, None]):
        more, limit = [], SECONDS_TO_END
        if kill is not None and kill.who == "stop":
            more, limit = (
                [f"parallel.timeout_seconds={HANG_TIMEOUT}"],
                HANG_TIMEOUT + SECONDS_AFTER_TIMEOUT,
            )
        whole = newest(run)[0]
        expected = 0 if whole is None else whole.step
        del whole  # the run could not delete what this process holds
        start, killed = setup.start(name, start_number, *more), None
        try:
            if kill is None:
                start.process.wait()
            elif (killed := start.strike(kill, draw, limit + 30)) is not None:
                trial.kills.append(killed)
                trial.problems += [*_damaged(run), *killed.problems(limit)]
        finally:
            start.end()
        said = start.stdout.read_text()
        begun = re.search(
            r"^(?:resuming from .* \(step|complete: .* has made all its) (\d+) ", said, re.M
        )
        # else it ended before it said so
        if begun or (killed is None and start.process.returncode == 0):
            went_on = int(begun[1]) if begun else 0
            trial.resumed_at.append(went_on)
            if went_on != expected:
                trial.problems.append(
                    f"went on after step {went_on}, not from the newest whole {expected}"
                )
        if killed is None:  # it came to an end of its own
            if start.process.returncode:
                trial.problems.append(
                    f"exit code {start.process.returncode}: {start.stderr.read_text().strip()}"
                )
            break
    if not trial.problems:
        _compare(trial, run, reference)
    trial.seconds = time.monotonic() - began
    if not trial.problems:
        shutil.rmtree(run)
        for used in setup.scratch.glob(f"{name}-*"):
            shutil.rmtree(used)
    return trial


def _damaged(run: Path) -> list[str]:
    return [
        f"{path}: {why}" for path in step_folders(run) if (why := why_damaged(path)) is not None
    ]


def _compare(trial: Trial, run: Path, reference: Reference) -> None:
    """Note what differs from the undisturbed run's end."""
    ledgers = [(folder / "samples.jsonl").read_bytes() for folder in (reference.folder, run)]
    expected, found = (_samples(ledger) for ledger in ledgers)
    trial.lost, trial.repeated = (expected - found).total(), (found - expected).total()
    if trial.lost or trial.repeated:
        trial.problems.append(
            f"{trial.lost} samples lost, {trial.repeated} repeated or in another step"
        )
    elif ledgers[0] != ledgers[1]:
        trial.problems.append("samples.jsonl differs")
    for kind in ("train", "eval", "epoch"):
        for ours, theirs in itertools.zip_longest(
            _records(run, kind), _records(reference.folder, kind)
        ):
            if ours != theirs:
                trial.problems.append(
                    f"{METRICS} differs, the first time in {ours} instead of {theirs}"
                )
                break
    last = _last_step(reference)
    for name in (TENSORS, OPTIMIZER):
        if (step_path(run, last) / name).read_bytes() != (
            step_path(reference.folder, last) / name
        ).read_bytes():
            trial.problems.append(f"the final {name} differs")
    trial.problems += _damaged(run)
    kept, expected_kept = (
        [path.name for path in step_folders(folder)] for folder in (run, reference.folder)
    )
    if kept != expected_kept:
        trial.problems.append(f"checkpoints {kept} are left instead of {expected_kept}")
    trial.problems += [
        f"{path.name} is left" for path in (run / CHECKPOINTS).glob(f"*{UNFINISHED}")
    ]


def _samples(ledger: bytes) -> Counter[tuple[int, str]]:
    """How often each sample was trained on in each step."""
    steps = map(json.loads, ledger.splitlines())
    return Counter((record["step"], key) for record in steps for key in record["keys"])


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    records = Run(run).metrics(kind)
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in records
    ]


def _last_step(reference: Reference) -> int:
    return len(_records(reference.folder, "train"))


def _print_row(trial: Trial) -> None:
    for number, killed in enumerate(trial.kills):
        first = trial.number if number == 0 else ""
        torn = "  torn save" if killed.tore_a_save else ""
        print_result(f"{first:>3}  {killed.kill!s:<57}  gone in {killed.seconds:5.2f} s")
        print_result(f"       at step {killed.step}, {killed.doing}{torn}")
    said = ", ".join(map(str, trial.resumed_at)) or "-"
    verdict = "DIFFERENT" if trial.problems else "equal"
    print_result(
        f"     resumed at {said}; {trial.lost} lost, {trial.repeated} repeated: "
        f"{verdict} ({trial.seconds:.0f} s)"
    )
    for problem in trial.problems:
        print_result(f"     {problem}")


def _summary(trials: Sequence[Trial]) -> dict[str, Any]:
    kills = [killed for trial in trials for killed in trial.kills]
    return {
        "trials": len(trials),
        "different": sum(bool(trial.problems) for trial in trials),
        "kills": len(kills),
        "kills_by_moment": dict(Counter(killed.kill.when for killed in kills)),
        "kills_by_victim": dict(Counter(killed.kill.who for killed in kills)),
        "torn_saves": sum(killed.tore_a_save for killed in kills),
        "killed_more_than_once": sum(len(trial.kills) > 1 for trial in trials),
        "samples_lost": sum(trial.lost for trial in trials),
        "samples_repeated": sum(trial.repeated for trial in trials),
        "longest_end_after_a_dead_rank_seconds": _longest(kills, "rank"),
        "longest_end_after_a_dead_launcher_seconds": _longest(kills, "launcher"),
        "longest_end_after_a_stopped_rank_seconds": _longest(kills, "stop"),
    }


def _longest(kills: Sequence[Killed], who: str) -> float | None:
    return max(
        (round(killed.seconds, 3) for killed in kills if killed.kill.who == who), default=None
    )


def _print_summary(summary: dict[str, Any]) -> None:
    for name, value in summary.items():
        shown = (
            ", ".join(f"{count} {what}" for what, count in value.items())
            if isinstance(value, dict)
            else value
        )
        print_result(f"{name.replace('_', ' ')}: {'-' if shown is None else shown}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        default=DEMO,
        help="YAML file of the run (the demo's)",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="set a key, as for mmtrain train"
    )
    parser.add_argument(
        "--full", action="store_true", help="do not shorten the demo: all its steps and evaluations"
    )
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="runs to kill (default 20)"
    )
    parser.add_argument(
        "--hang",
        type=int,
        default=1,
        metavar="N",
        help="runs of which a rank is stopped (default 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random moments and victims (default 0)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every trial and the summary as JSON too"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="of the runs, which stay if one differs (temporary)",
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return run_command(lambda: crash_test(options))


if __name__ == "__main__":
    sys.exit(main())
