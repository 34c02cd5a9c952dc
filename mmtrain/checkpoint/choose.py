"""Where a run begins: anew, or at a checkpoint of its own, or of another run, from which it then branches.

run folder, configuration --> the newest whole checkpoint, or the one that is named --> same meaning? --> Start

No torch here: the launcher decides before ranks start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import parse_line, recorded
from mmtrain.base.printing import escape
from mmtrain.checkpoint.begin import names_beginning_anew
from mmtrain.checkpoint.run_folder import CONFIG, METRICS, PLAN, contents_of_a_run, run_folder
from mmtrain.checkpoint.step_folder import CHECKPOINTS, StepFolder, find, find_newest, newest, step_folders
from mmtrain.config.keys import OnResume, all_fields, declared_path, marked, section_of
from mmtrain.config.problems import nearest_key
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.connectors import has_newline

_log = logging.getLogger(__name__)
AUTO, NEVER = "auto", "never"  # what --resume takes besides a path

ON_RESUME = marked(RunConfig, OnResume)
OPTIONAL_SECTIONS = {".".join(p) for p, f in all_fields(RunConfig) if p in ON_RESUME and section_of(f.annotation)}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from, known on every rank; rank 0 alone sees its files."""

    checkpoint: StepFolder
    is_own: bool  # of this run, not of another one from which it branches
    allowed: tuple[str, ...]  # keys and sections that --allow-change names
    branched_from: str | None  # fingerprint of the other run's checkpoint that this run began with

    def refuse_other_contents(self, data: str, model: str, settings: str, max_steps: int) -> None:
        """Raise UserError unless data and frozen models are, by their fingerprints, those that were trained with.

        `model` is of the frozen weights, `settings` of what else the models' folders say.
        """
        state, path = self.checkpoint.state, self.checkpoint.path
        if state["step"] > max_steps:
            raise UserError(
                f"{path} has {state['step']} steps, and train.max_steps or train.epochs asks for {max_steps}: raise "
                "it, or choose another run.name"
            )
        models = ("model.llm.path", "model.vision.name", "model.llm.quantize")
        for what, keys, was, now in (
            ("data", ("data.shards", "data.sets"), state["data"]["fingerprint"], data),
            ("frozen weights", models, state["frozen_fingerprint"], model),
            ("models' config.json", models, state["settings_fingerprint"], settings),
        ):
            if was != now and not any(_allows(name, key) for name in self.allowed for key in keys):
                raise UserError(
                    f"{path}: the {what} are not those that it was trained with (fingerprint {was[:16]}, now "
                    f"{now[:16]}); bring them back, or allow it: --allow-change {keys[0]}"
                )


def find_start(config: RunConfig, resume: str = AUTO, allowed: Sequence[str] = ()) -> ResumePoint | None:
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
    start = _choose(folder, config, path, allowed)
    if start is None or start.is_own or not contents:
        return start
    own, _ = newest(folder)
    if own is not None and own.state["branched_from"] == start.branched_from:
        _log.info(f"{folder} has branched from {start.checkpoint.path} already: that branch goes on")
        return _choose(folder, config, None, allowed)
    if own is not None or ((folder / METRICS).exists() and (folder / METRICS).stat().st_size):
        raise UserError(
            f"{folder} holds an earlier run ({listed}), and {start.checkpoint.path} is of another; choose a new "
            "run.name"
        )
    return start  # the branch died before it had saved where it begins


def _choose(folder: Path, config: RunConfig, path: Path | None, allowed: Sequence[str]) -> ResumePoint | None:
    """The checkpoint at which the run in `folder` goes on; None: there is none, it begins with its first step.

    `path` names a checkpoint of this run, or one of another run, from which this one then branches; None takes the
    run's newest whole one. Raises UserError where none can be used, and for keys that have changed but by `allowed`.
    """
    known = [key for key, _ in all_fields(RunConfig)]
    for name in allowed:
        if (key := tuple(name.split("."))) not in known:
            near = nearest_key(key, known)
            meant = f"; the nearest is {'.'.join(near)}" if near else ""
            raise UserError(f"--allow-change {name}: no key or section of a configuration{meant}")
    anew = "restore one of them, or start anew: another run.name, or run.overwrite=true, which deletes the folder"
    start = find_newest(folder, remedy=anew) if path is None else find(path.expanduser())
    if start is None:
        _refuse_lost_checkpoints(folder)
        return None
    _refuse_changes(start, config, allowed)
    # By the folder's own name for it: the path may be a link, or relative to somewhere inside the run.
    own = next((one for one in step_folders(folder) if one.resolve() == start.path.resolve()), None)
    if own is None and start.path.resolve().parent == (folder / CHECKPOINTS).resolve():
        raise UserError(
            f"{start.path} was set aside, or is not finished; to go on from it name it step-{start.step:08d} again"
        )
    if own is None:
        return ResumePoint(start, False, tuple(allowed), branched_from=start.fingerprint)
    return ResumePoint(StepFolder(own), True, tuple(allowed), start.state["branched_from"])


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Raise UserError where a run without checkpoints has had some: beginning anew would cost what it trained."""
    set_aside = any((folder / CHECKPOINTS).glob("step-*.discarded*"))
    if set_aside or any(recorded(folder / METRICS, "checkpoint", "resume", "end")):
        raise UserError(
            f"{folder} has had checkpoints, and none is in {CHECKPOINTS}/ any more; put one back, or start anew: "
            "another run.name, or run.overwrite=true, which deletes the folder"
        )


def is_complete(folder: Path, start: StepFolder, config: RunConfig) -> bool:
    """Whether this run, as configured, has reached its end after this checkpoint, final evaluation included."""
    if any(_changes(start.config, config)):
        return False
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            last = parse_line(file.read().splitlines()[-1])
    except (OSError, IndexError):
        return False
    return isinstance(last, dict) and (last.get("kind"), last.get("step")) == ("end", start.step)


def _refuse_changes(start: StepFolder, config: RunConfig, allowed: Sequence[str]) -> None:
    """Raise UserError, with old and new values, for keys whose change would make another run of it.

    `allowed` are keys, or sections, that may change all the same.
    """
    changed = dict(_changes(start.config, config))
    fixed = [key for key in changed if _on_resume(key) is OnResume.FIXED]
    refused = fixed or [key for key in changed if not any(_allows(name, key) for name in allowed)]
    if not refused:
        return
    lines = []
    for key in refused:
        was, is_now = (json.dumps(value, ensure_ascii=False) for value in changed[key])
        parted = next((i for i, (one, other) in enumerate(zip(was, is_now, strict=False)) if one != other), 0)
        alike = max(parted - 40, 0)  # of long texts what differs is shown
        was, is_now = (escape("..." + text[alike:] if alike else text) for text in (was, is_now))
        lines.append(f"{key}: was {was}, is now {is_now}")
    if fixed:
        mend = (
            "its weights and its place in the data have no meaning then; for a new run that begins with what it has "
            f"trained set another run.name{_beginning(start, config, fixed)}"
        )
    else:
        named = dict.fromkeys(re.sub(r"\.\d+\..*", "", key) for key in refused)  # of a list's elements the list
        allow = " ".join(f"--allow-change {key}" for key in named)
        mend = f"set the old values, or allow it: {allow}; for a new run set another run.name"
    raise UserError("\n  ".join([f"{start.path} is of a run with another configuration:", *lines]) + f"\n{mend}")


def _beginning(start: StepFolder, config: RunConfig, fixed: Sequence[str]) -> str:
    """How a new run of this configuration begins with all that the checkpoint's has trained, as it can."""
    sees, saw = (one.model.vision is not None for one in (config, start.config))
    is_same_projector = sees == saw and not any(key.startswith("model.projector.") for key in fixed)
    is_same_projector &= has_newline(config) == has_newline(start.config)
    if is_same_projector:
        changes = dict.fromkeys(("model.init_from", "model.projector.init_from"), str(start.path))
        with contextlib.suppress(UserError):
            names_beginning_anew(config.changed(changes), start)
            return f" and model.init_from={start.path}"
    if sees and is_same_projector:
        keys = "model.pretrained=FOLDER in place of model.llm.path, model.vision.name and model.projector.init_from"
    else:
        keys = "model.llm.path=FOLDER" + " model.vision.name=FOLDER" * (sees and saw)
    return f" and {keys}, made by mmtrain export --checkpoint {start.path} --format hf --out FOLDER"


def _changes(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Each key that is not free to change and whose value differs, with both values."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key), after.get(key)
        if values[0] != values[1] and _on_resume(key) is not OnResume.FREE:
            yield key, values


def _on_resume(key: str) -> OnResume:
    return ON_RESUME[declared_path(tuple(key.split(".")))]


def _allows(name: str, key: str) -> bool:
    """Whether --allow-change with this name, a key's or a section's, is about this key."""
    return key == name or key.startswith(name + ".")


def flat(value: Any, *path: str) -> dict[str, Any]:
    """Values by dotted key; the elements of a list of sections by their number, a section that may be null as set.

    An empty list has none.
    """
    own = ".".join(path)
    if isinstance(value, list) and all(isinstance(element, dict) for element in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {own: value}
    leaves = {own: "set"} if own in OPTIONAL_SECTIONS else {}
    return leaves | {key: leaf for name, inner in value.items() for key, leaf in flat(inner, *path, str(name)).items()}
