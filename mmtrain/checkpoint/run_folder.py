"""A run's folder, run.dir/run.name: made for a new run, cut back to a checkpoint for a resumed one.

The records (metrics, ledger, ...) only grow, and a checkpoint notes their lengths. What is cut off
is kept in discarded.jsonl, with the step that the run went back to. Two runs are never mixed.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from mmtrain.base.durable import flush, held, holder, leftovers, remove_folder, write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines, parse_line
from mmtrain.checkpoint.step_folder import (
    CHECKPOINTS,
    StepFolder,
    remove_unfinished,
    step_folders,
    step_of,
)
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig
from mmtrain.plan.plan import Plan

_log = logging.getLogger(__name__)
CONFIG, PLAN = "config.yaml", "plan.json"
METRICS, ANSWERS, BAD_STEPS = "metrics.jsonl", "answers.jsonl", "bad_steps.jsonl"
QUARANTINE = "quarantine.jsonl"  # written by data/stream/account, which lies below
RECORDS = (METRICS, ANSWERS, "samples.jsonl", QUARANTINE, BAD_STEPS)
DISCARDED = "discarded.jsonl"
AUDIT = "audit.json"
BENCHMARKS = "benchmarks.jsonl"
REPORT = "report.html"
# What a start that fails may leave.
BEFORE_THE_FIRST_STEP = ("log*.txt", QUARANTINE, REPORT, *map(leftovers, (CONFIG, PLAN, REPORT)))


def run_folder(config: RunConfig) -> Path:
    return Path(config.run.dir).expanduser() / config.run.name


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder until the block or the process ends.

    Raises UserError if another run holds it.
    """
    lock = _lock_file(folder)
    folder = folder.resolve()
    with contextlib.ExitStack() as holding:
        if not folder.parent.exists():
            holding.callback(_remove_if_empty, folder.parent)  # a refused start leaves nothing
        with _named(f"write {lock}"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                holding.enter_context(held(lock, wait=False))
            except BlockingIOError:
                raise UserError(
                    f"{folder} is in use by a run that is still going. "
                    "Stop it, or choose another run.name"
                ) from None
        yield


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def launcher(folder: Path) -> psutil.Process | None:
    """Return this user's process on this machine that holds a run's folder; None: there is none."""
    return holder(_lock_file(folder))


def _lock_file(folder: Path) -> Path:
    folder = folder.resolve()
    # beside the folder, which run.overwrite deletes
    return folder.with_name(f".{folder.name}.lock")


def contents_of_a_run(folder: Path) -> list[str]:
    """List the files of a run that has taken a step: all but those of a failed start."""
    if not folder.is_dir():
        return []
    patterns = (CONFIG, PLAN, *BEFORE_THE_FIRST_STEP)
    return sorted(entry.name for entry in folder.iterdir() if not any(map(entry.match, patterns)))


def prepare_folder(config: RunConfig, plan: Plan, *, goes_on: bool) -> None:
    """Make a new run's folder, which the caller holds, in place of what a failed start left.

    run.overwrite deletes an earlier run. The folder of a run that `goes_on` is left to `go_back`.
    """
    folder = run_folder(config)
    contents = contents_of_a_run(folder)
    if contents and config.run.overwrite:
        remove_folder(folder.resolve())  # whole at once: another node may be opening its log there
    with _named(f"make {folder}"):
        folder.resolve().mkdir(parents=True, exist_ok=True)  # behind a link, where it is one
        flush(folder.resolve().parent)
    if goes_on:
        return

    if contents and not config.run.overwrite:
        _log.info(f"{folder} has no checkpoint yet: the run starts again at its first step")
        go_back(folder, None)
    for pattern in BEFORE_THE_FIRST_STEP:
        for left in folder.glob(pattern):
            left.unlink()
    describe_run(folder, config, plan)


def describe_run(folder: Path, config: RunConfig, plan: Plan) -> None:
    """Write the folder's config.yaml and plan.json."""
    plan_text = json.dumps(plan.as_dict(), indent=1) + "\n"
    for name, text in (PLAN, plan_text), (CONFIG, dump_config(config)):
        with _named(f"write {folder / name}"):
            write_whole(folder / name, text)


def go_back(folder: Path, to: StepFolder | None) -> None:
    """Cut the run's records back to its own checkpoint `to` and set later checkpoints aside.

    `to` None: back to nothing. Call it when everything else that could stop the run has been
    checked.
    """
    lengths = {}
    step = 0
    if to is not None:
        lengths = to.state["files"]
        step = to.step
    try:
        remove_unfinished(folder)
        for later in step_folders(folder):
            if to is not None and step_of(later) <= step:
                break
            _log.info(f"a later checkpoint was set aside as {_set_aside(later)}")
        if (folder / CHECKPOINTS).exists():
            # else a power cut might bring them back beside records that are cut
            flush(folder / CHECKPOINTS)
        for name in RECORDS:
            _cut_back(folder, name, lengths.get(name, 0), step)
        (folder / AUDIT).unlink(missing_ok=True)
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"cannot go back to a checkpoint: {what}") from error


@contextlib.contextmanager
def _named(act: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot {act} ({error.strerror}). Choose another folder with run.dir and run.name"
        ) from error


def _set_aside(path: Path) -> Path:
    """Rename a step folder, since the run will come to this step again; return its new path."""
    target = path.with_name(path.name + ".discarded")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.discarded-{number}")
    return path.rename(target)


def _cut_back(folder: Path, name: str, length: int, step: int) -> None:
    """Cut a record to its first `length` bytes; the rest goes into discarded.jsonl."""
    path = folder / name
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        _log.warning(
            f"{path} is {length - size:,} bytes shorter than when the checkpoint was saved; "
            "these records are lost"
        )
        length = 0
        if size:  # whole lines are kept
            length = path.read_bytes().rfind(b"\n") + 1
    if size <= length:
        return

    with path.open("rb") as file, JsonLines(folder / DISCARDED) as discarded:
        file.seek(max(length - 1, 0))
        if length and file.read(1) != b"\n":
            raise UserError(
                f"{path} was changed after the checkpoint was saved. Move it away, and start again"
            )
        for line in file:
            discarded.write(file=name, back_to_step=step, record=parse_line(line))

    # before the cut: a crash in between leaves a line twice rather than none
    flush(folder / DISCARDED)
    if length:
        os.truncate(path, length)
    else:
        path.unlink()
