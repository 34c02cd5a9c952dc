"""A run's folder, run.dir/run.name: made for a new run, never mixed with an earlier one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from mmtrain.config import RunConfig, dump_config
from mmtrain.errors import UserError
from mmtrain.plan.layout import Plan

BEFORE_THE_FIRST_STEP = ("log*.txt", "quarantine.jsonl")  # what a start that fails may leave


def run_folder(config: RunConfig) -> Path:
    """Where everything of this run goes."""
    return Path(config.run.dir).expanduser() / config.run.name


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a run's folder until the block ends, so that no second run can delete it or write into it.

    The kernel lets go when this process dies, however it dies. Raises UserError if another run holds it.
    """
    path = folder.with_name(f".{folder.name}.lock")  # beside the folder, which run.overwrite deletes
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}; run.dir and run.name say where a run goes") from error
    if file is None:
        raise UserError(f"{folder} is in use by a run that is still going; stop it, or choose another run.name")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _locked(path: Path) -> int | None:
    """A descriptor of the file at `path`, made if need be, that holds its lock; None if another process does."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)  # its last holder has just removed it: this lock would keep nobody out


def prepare_folder(config: RunConfig, plan: Plan) -> None:
    """Make the run's folder, which the caller has claimed, with config.yaml and plan.json.

    Raises UserError rather than mix with an earlier run. What a start that failed before its first step has left is
    replaced.
    """
    folder = run_folder(config)
    contents = contents_of_a_run(folder)
    if contents and not config.run.overwrite:
        raise UserError(
            f"{folder} holds an earlier run ({', '.join(contents[:3])}); choose another run.name, or set "
            "run.overwrite=true to delete it"
        )
    if contents and not all((folder / name).is_file() for name in ("config.yaml", "plan.json")):
        raise UserError(
            f"run.overwrite=true would delete {folder}, which lacks config.yaml or plan.json: not the folder of a run"
        )
    if contents:
        # Under its own name no moment shows half of it, and another node may be opening its log here.
        discarded = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        folder.rename(discarded)
        shutil.rmtree(discarded)
    write_plan(folder, plan)
    for pattern in BEFORE_THE_FIRST_STEP:
        for left in folder.glob(pattern):
            left.unlink()
    (folder / "config.yaml").write_text(dump_config(config))


def write_plan(folder: Path, plan: Plan) -> Path:
    """Write plan.json into the run's folder, making that; its path."""
    path = folder / "plan.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan.as_dict(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}; run.dir and run.name say where a run goes") from error
    return path


def contents_of_a_run(folder: Path) -> list[str]:
    """Names in the folder that only a run that took its first step has made."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if not any(entry.match(pattern) for pattern in ("config.yaml", "plan.json", *BEFORE_THE_FIRST_STEP))
    )
