"""A run's folder, run.dir/run.name: made for a new run, or opened for one that goes on; two runs are never mixed."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mmtrain.base.durable import UNFINISHED, flush_folder, held, write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import say
from mmtrain.checkpoint.resume import METRICS, Start, choose, go_back
from mmtrain.checkpoint.step_folder import newest
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig
from mmtrain.plan.layout import Plan

AUTO, NEVER = "auto", "never"  # what --resume takes besides a path
CONFIG, PLAN = "config.yaml", "plan.json"
BEFORE_THE_FIRST_STEP = ("log*.txt", "quarantine.jsonl", f"*{UNFINISHED}")  # what a start that fails may leave


def run_folder(config: RunConfig) -> Path:
    """Where everything of this run goes."""
    return Path(config.run.dir).expanduser() / config.run.name


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a run's folder until the block ends, so that no second run can delete it or write into it.

    The kernel lets go when this process dies, however it dies. Raises UserError if another run holds it.
    """
    folder = folder.resolve()  # whatever it is called
    path = folder.with_name(f".{folder.name}.lock")  # beside the folder, which run.overwrite deletes
    holding = contextlib.ExitStack()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        holding.enter_context(held(path, wait=False))
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by a run that is still going; stop it, or choose another run.name"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}; run.dir and run.name say where a run goes") from error
    with holding:
        yield


def find_start(
    config: RunConfig, resume: str = AUTO, allowed: Sequence[str] = (), say: Callable[[str], None] = say
) -> Start | None:
    """The checkpoint at which the run goes on, None where it begins with its first step; changes nothing.

    `resume` is what --resume says, `allowed` the keys of --allow-change. Raises UserError where going on would mix two
    runs, or lose one.
    """
    folder = run_folder(config)
    contents = contents_of_a_run(folder)
    listed = ", ".join(contents[:3])
    path = None if resume in (AUTO, NEVER) else Path(resume)
    if contents and not all((folder / name).is_file() for name in (CONFIG, PLAN)):
        raise UserError(f"{folder} holds {listed}, but no config.yaml or plan.json: not the folder of a run")
    if config.run.overwrite:
        if path is not None:
            raise UserError(f"run.overwrite=true would delete {folder}; without it --resume {resume} can be followed")
        return None
    if contents and resume == NEVER:
        raise UserError(
            f"{folder} holds an earlier run ({listed}); choose another run.name, or set run.overwrite=true to delete it"
        )
    start = choose(folder, config, path, allowed, say)
    if start is None or start.is_own or not contents:
        return start
    own, _ = newest(folder)
    if own is not None and own.state["branched_from"] == start.checkpoint.fingerprint:
        say(f"{folder} has branched from {start.checkpoint.path} already")
        return choose(folder, config, None, allowed, say)
    if own is not None or ((folder / METRICS).exists() and (folder / METRICS).stat().st_size):
        raise UserError(
            f"{folder} holds an earlier run ({listed}), and {start.checkpoint.path} is of another; choose a new "
            "run.name"
        )
    return start  # the branch died before it had saved where it begins


def prepare_folder(config: RunConfig, plan: Plan, start: Start | None, say: Callable[[str], None] = say) -> None:
    """Make the run's folder, which the caller has claimed; for a run that begins, as `find_start` said, at `start`.

    For a new run it then has config.yaml and plan.json, what a start that failed has left being replaced; with
    `run.overwrite` an earlier run is deleted. One that goes on is left alone until `take_over`.
    """
    folder = run_folder(config)
    contents = contents_of_a_run(folder)
    if contents and config.run.overwrite:
        # Under its own name no moment shows half of it, and another node may be opening its log here.
        whole = folder.resolve()
        for left in whole.parent.glob(f".{whole.name}.{'[0-9a-f]' * 8}"):  # of a launcher that was killed here
            shutil.rmtree(left)
        discarded = whole.with_name(f".{whole.name}.{secrets.token_hex(4)}")
        whole.rename(discarded)
        shutil.rmtree(discarded)
    if start is not None:
        _make(folder)
        return
    if contents and not config.run.overwrite:
        say(f"{folder} has no checkpoint yet: the run begins with its first step again")
        go_back(folder, None, say)
    for pattern in BEFORE_THE_FIRST_STEP:
        for left in folder.glob(pattern):
            left.unlink()
    _describe_run(folder, config, plan)


def take_over(folder: Path, config: RunConfig, plan: Plan, start: Start, say: Callable[[str], None]) -> None:
    """Go back to `start` if it is the run's own; from now on the folder's config.yaml and plan.json are these.

    To be called when all that could keep the run from going on has been checked.
    """
    if start.is_own:
        go_back(folder, start.checkpoint, say)
    _describe_run(folder, config, plan)


def _describe_run(folder: Path, config: RunConfig, plan: Plan) -> None:
    _make(folder)
    _write(folder / PLAN, json.dumps(plan.as_dict(), indent=1) + "\n")
    _write(folder / CONFIG, dump_config(config))


def _make(folder: Path) -> None:
    try:
        folder.resolve().mkdir(parents=True, exist_ok=True)  # behind a link, where it is one
        flush_folder(folder.resolve().parent)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error}; run.dir and run.name say where a run goes") from error


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}; run.dir and run.name say where a run goes") from error


def contents_of_a_run(folder: Path) -> list[str]:
    """Names in the folder that only a run that took its first step has made."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not any(entry.match(pattern) for pattern in (CONFIG, PLAN, *BEFORE_THE_FIRST_STEP))
    )
