"""Choose a run's beginning: its first step, a checkpoint, or the weights of another run.

run folder, --resume    --the newest whole checkpoint, or the named one--> same configuration? -->
    ResumePoint
model.init_from         --names and shapes--> each tensor trains here too, or UserError; the step
    begins at 0

No torch here: the launcher decides before ranks start.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import escape, first_few
from mmtrain.checkpoint.run_folder import CONFIG, METRICS, PLAN, contents_of_a_run, run_folder
from mmtrain.checkpoint.step_folder import (
    CHECKPOINTS,
    StepFolder,
    find,
    find_newest,
    names_checkpoint,
    newest,
    step_folders,
)
from mmtrain.config.keys import OnResume, all_fields, declared_path, marked, section_of
from mmtrain.config.problems import nearest_key
from mmtrain.config.schema import RunConfig
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.model_files import read_header
from mmtrain.facts.models import models_of
from mmtrain.facts.settings import Shape
from mmtrain.facts.shapes import matches_any

_log = logging.getLogger(__name__)
AUTO, NEVER = "auto", "never"  # what --resume takes besides a path
INIT_FROM = "model.init_from"
PROJECTOR = "projector."
NAMES_SHOWN = 3

ON_RESUME = marked(RunConfig, OnResume)
OPTIONAL_SECTIONS = {
    ".".join(p) for p, f in all_fields(RunConfig) if p in ON_RESUME and section_of(f.annotation)
}


# ---- at a checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint at which a run resumes, one for all ranks; rank 0 alone sees its files."""

    checkpoint: StepFolder
    is_own: bool  # of this run, not of another one from which it branches
    allowed: Sequence[str]  # keys and sections that --allow-change names
    branched_from: str | None  # fingerprint of the other run's checkpoint that this run began with

    def refuse_other_contents(
        self,
        data: str,
        model: str,
        settings: str,
        max_steps: int,
    ) -> None:
        """Raise UserError unless data and frozen models are those that the run was trained with.

        `data`, `model` and `settings` are fingerprints: of the data, of the frozen weights, of what
        else the models' folders hold.
        """
        state = self.checkpoint.state
        path = self.checkpoint.path
        if state["step"] > max_steps:
            raise UserError(
                f"{path} has {state['step']} steps, but train.max_steps or train.epochs asks for "
                f"{max_steps}. Raise it, or choose another run.name"
            )
        models = ("model.llm.path", "model.vision.name", "model.llm.quantize")
        compared = (
            ("data", ("data.shards", "data.sets"), state["data"]["fingerprint"], data),
            ("frozen weights", models, state["frozen_fingerprint"], model),
            ("models' config.json", models, state["settings_fingerprint"], settings),
        )
        for what, keys, was, now in compared:
            if was != now and not any(_is_allowed(key, self.allowed) for key in keys):
                raise UserError(
                    f"{path}: the {what} are not those it was trained with "
                    f"(fingerprint {was[:16]}, now {now[:16]}). Restore them, "
                    f"or allow the change: --allow-change {keys[0]}"
                )


def find_start(
    config: RunConfig,
    resume: str = AUTO,
    allowed: Sequence[str] = (),
) -> ResumePoint | None:
    """Find the checkpoint at which the run resumes; None: it begins with its first step.

    `resume` is the value of --resume, `allowed` the keys of --allow-change. Raises UserError where
    resuming would mix two runs, or lose one.
    """
    folder = run_folder(config)
    contents = contents_of_a_run(folder)
    listed = ", ".join(contents[:3])
    path = None if resume in (AUTO, NEVER) else Path(resume)

    # refuse what is no run's folder: a start that failed has no config.yaml without plan.json
    missing = [name for name in (CONFIG, PLAN) if not (folder / name).is_file()]
    if (contents and missing) or missing == [PLAN]:
        raise UserError(
            f"{folder} holds {listed or CONFIG}, but no {' and no '.join(missing)}: "
            "it is not a run's folder. Choose another run.name"
        )

    # refuse what would lose an earlier run
    if config.run.overwrite:
        if path is not None:
            raise UserError(
                f"run.overwrite=true would delete {folder}. Leave it out to use --resume {resume}"
            )
        return None
    if contents and resume == NEVER:
        raise UserError(
            f"{folder} holds an earlier run ({listed}). "
            "Choose another run.name, or set run.overwrite=true to delete it"
        )

    start = _resume_point(folder, config, path, allowed)
    if start is None or start.is_own or not contents:
        return start

    # the checkpoint is another run's, but this one has begun
    own, _ = newest(folder)
    if own is not None and own.state["branched_from"] == start.branched_from:
        _log.info(
            f"{folder} has already branched from {start.checkpoint.path}: resuming that branch"
        )
        return _resume_point(folder, config, None, allowed)
    if own is not None or any(recorded(folder / METRICS, "train")):
        raise UserError(
            f"{folder} holds an earlier run ({listed}), but {start.checkpoint.path} is from "
            "another. Choose a new run.name"
        )
    return start  # the branch died before it had saved where it begins


def _resume_point(
    folder: Path,
    config: RunConfig,
    path: Path | None,
    allowed: Sequence[str],
) -> ResumePoint | None:
    """Find the checkpoint `path`, of this run or another one; None: the run's newest whole one.

    Raises UserError where none can be used, and for keys that have changed and are not `allowed`
    to.
    """
    keys = [key for key, _ in all_fields(RunConfig)]
    for name in allowed:
        if (key := tuple(name.split("."))) not in keys:
            near = nearest_key(key, keys)
            hint = f"; the nearest is {'.'.join(near)}" if near else ""
            raise UserError(f"--allow-change {name}: not a key or section of a configuration{hint}")

    anew = (
        "Restore one of them, or start over: "
        "another run.name, or run.overwrite=true, which deletes the folder"
    )
    if path is not None:
        checkpoint = find(path.expanduser())
    else:
        checkpoint = find_newest(folder, remedy=anew)
    if checkpoint is None:
        _refuse_lost_checkpoints(folder)
        return None
    _refuse_changes(checkpoint, config, allowed)

    # By the folder's own name for it: the path may be a link, or relative to somewhere inside the
    # run.
    here = checkpoint.path.resolve()
    for own in step_folders(folder):
        if own.resolve() == here:
            return ResumePoint(
                StepFolder(own),
                True,
                allowed,
                checkpoint.state["branched_from"],
            )
    if here.parent == (folder / CHECKPOINTS).resolve():
        raise UserError(
            f"{checkpoint.path} was set aside, or is not finished. To resume from it, rename it "
            f"step-{checkpoint.step:08d}"
        )
    return ResumePoint(checkpoint, False, allowed, checkpoint.fingerprint)


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Raise UserError where a run without checkpoints has had some.

    Beginning anew would cost what it trained.
    """
    set_aside = any((folder / CHECKPOINTS).glob("step-*.discarded*"))
    if set_aside or any(recorded(folder / METRICS, "checkpoint", "resume", "end")):
        raise UserError(
            f"{folder} had checkpoints, but none is in {CHECKPOINTS}/ any more. Put one back, or "
            "start over: another run.name, or run.overwrite=true, which deletes the folder"
        )


def is_complete(folder: Path, checkpoint: StepFolder, config: RunConfig) -> bool:
    """Whether this run, as configured, has ended with this checkpoint, evaluation included."""
    if any(_changes(checkpoint.config, config)):
        return False
    return any(end.get("step") == checkpoint.step for end in recorded(folder / METRICS, "end"))


# ---- what may change


def _refuse_changes(checkpoint: StepFolder, config: RunConfig, allowed: Sequence[str]) -> None:
    """Raise UserError, with old and new values, for keys whose change would make another run of it.

    `allowed` are keys, or sections, that may change all the same.
    """
    changed = dict(_changes(checkpoint.config, config))
    fixed = [key for key in changed if _on_resume(key) is OnResume.FIXED]
    refused = fixed or [key for key in changed if not _is_allowed(key, allowed)]
    if not refused:
        return

    lines = [f"{checkpoint.path} is from a run with another configuration:"]
    for key in refused:
        was, now = (escape(json.dumps(value, ensure_ascii=False)) for value in changed[key])
        lines.append(f"{key}: was {was}, is now {now}")

    if fixed:
        remedy = (
            "Its weights and its place in the data do not fit then. For a new run that begins with "
            f"what it trained, set another run.name and {INIT_FROM}={checkpoint.path}. If that "
            "does not fit either, export it (mmtrain export --format hf) and begin with the folder"
        )
    else:
        # of a list's elements the list
        keys = dict.fromkeys(re.sub(r"\.\d+\..*", "", key) for key in refused)
        allow = " ".join(f"--allow-change {key}" for key in keys)
        remedy = (
            f"Set the old values, or allow the change: {allow}. For a new run, set another run.name"
        )
    raise UserError("\n  ".join(lines) + f"\n{remedy}")


def _changes(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each key that is not free to change and whose value differs, with both values."""
    before = flat(old.model_dump(mode="json"))
    after = flat(new.model_dump(mode="json"))
    for key in before | after:
        was = before.get(key)
        now = after.get(key)
        if was != now and _on_resume(key) is not OnResume.FREE:
            yield key, (was, now)


def _on_resume(key: str) -> OnResume:
    return ON_RESUME[declared_path(tuple(key.split(".")))]


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether --allow-change names this key, or a section that holds it."""
    return any(f"{key}.".startswith(f"{name}.") for name in allowed)


def flat(value: Any, *path: str) -> dict[str, Any]:
    """Return a configuration's values by dotted key.

    Elements of a list of sections have their number in the key; an optional section is "set".
    """
    own = ".".join(path)
    if isinstance(value, list) and all(isinstance(element, dict) for element in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {own: value}
    leaves = {}
    if own in OPTIONAL_SECTIONS:
        leaves[own] = "set"
    for name, inner in value.items():
        leaves |= flat(inner, *path, str(name))
    return leaves


# ---- with another run's weights


def find_init_from(config: RunConfig) -> StepFolder | None:
    """Find the checkpoint `model.init_from`, or a run's newest whole one; None: the key is null."""
    path = config.model.init_from
    if path is None:
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir() or not names_checkpoint(folder):
        raise UserError(
            f"{INIT_FROM}: {path}: neither a run nor a checkpoint of mmtrain. Begin with "
            "an exported model by model.pretrained, or by its folder as model.llm.path"
        )
    return find(folder)


def refuse_unfit_init_from_run(config: RunConfig, run: Path) -> None:
    """Raise UserError unless all that `model.init_from` has trained trains in this run.

    `run` is this run's folder, which run.overwrite is about to delete.
    """
    checkpoint = find_init_from(config)
    if checkpoint is None:
        return
    path = config.model.init_from
    if config.run.overwrite and run.resolve() in checkpoint.path.resolve().parents:
        raise UserError(
            f"{INIT_FROM}: {path} lies in {run}, which run.overwrite=true deletes. "
            "Choose another run.name"
        )

    trained = read_header(checkpoint.tensors_file)
    shapes = {parameter.name: parameter.shape for parameter in models_of(config).parameters}
    for name, shape in trained.items():
        if why := _why_unfit(config, name, shape, shapes.get(name)):
            raise UserError(f"{INIT_FROM}: {path} has trained {escape(name)}, {why}")
    ours = config.model.lora
    theirs = checkpoint.config.model.lora
    if any(map(is_adapter, trained)) and ours.alpha / ours.r != theirs.alpha / theirs.r:
        raise UserError(
            f"{INIT_FROM}: the adapters of {path} were trained with model.lora.alpha "
            f"{theirs.alpha:g}; with {ours.alpha:g} they would compute something else. "
            f"Set model.lora.alpha={theirs.alpha:g}"
        )

    # name the tensors that begin to train here
    trainable = [name for name in shapes if matches_any(name, config.model.trainable)]
    new = [name for name in trainable if name not in trained]
    drawn = [name for name in new if is_adapter(name) or name.startswith(PROJECTOR)]
    published = [name for name in new if name not in drawn]
    for names, values in (drawn, "with their own initial values"), (published, "as published"):
        if names:
            _log.info(
                f"{INIT_FROM}: {len(names):,} tensors that train here were not trained in "
                f"{checkpoint.path} and begin {values}: {first_few(names, NAMES_SHOWN)}"
            )


def _why_unfit(
    config: RunConfig,
    name: str,
    shape: Shape,
    own: Shape | None,
) -> str | None:
    """Explain why a trained tensor cannot be used where its shape is `own`; None: it can."""
    export = "export that run (--format hf) and begin with the folder as model.pretrained"
    if own is None:
        remedy = ""
        if is_adapter(name):
            remedy = "set model.lora as in that run, or "
        return f"which this run does not have; {remedy}{export} or model.llm.path"
    if own != shape:
        return (
            f"in shape {shape}, but here it has shape {own}: another model, or another model.lora.r"
        )
    if name.startswith(PROJECTOR):
        source = config.model.projector.init_from
        if source != config.model.init_from:
            return f"but model.projector.init_from is {source or 'null'}. Leave that out"
    elif not matches_any(name, config.model.trainable):
        return (
            "which stays frozen here, with its published weights; "
            f"add it to model.trainable, or {export}"
        )
    return None
