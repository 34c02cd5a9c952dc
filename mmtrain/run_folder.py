"""A run's folder, run.dir/run.name: made for a new run, never mixed with an earlier one."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from pathlib import Path

from mmtrain.config import RunConfig, dump_config
from mmtrain.errors import UserError
from mmtrain.plan.layout import Plan


def run_folder(config: RunConfig) -> Path:
    """Where everything of this run goes."""
    return Path(config.run.dir) / config.run.name


def prepare_folder(config: RunConfig, plan: Plan) -> None:
    """Make the run's folder with config.yaml and plan.json; raises UserError rather than mix with an earlier run.

    What a start that failed before its first step has left is replaced.
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
    for log in folder.glob("log*.txt"):
        log.unlink()
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
        if entry.name not in ("config.yaml", "plan.json") and not re.fullmatch(r"log.*\.txt", entry.name)
    )
