"""Where a run begins: anew, or at a checkpoint, with everything that was recorded after it cut off.

run folder, configuration --> the newest whole checkpoint --> same meaning? --> records cut back --> its step folder

The records (metrics, ledger, ...) only grow, and a checkpoint notes their lengths. What is cut off is kept in
discarded.jsonl, with the step that the run went back to. No torch here: the launcher decides before ranks start.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.base.durable import flush, flush_folder
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json
from mmtrain.checkpoint.step_folder import (
    CHECKPOINTS,
    StepFolder,
    find,
    newest,
    remove_unfinished,
    step_folders,
    step_of,
)
from mmtrain.config.keys import OnResume, all_fields, declared_path, marked
from mmtrain.config.problems import nearest_key
from mmtrain.config.schema import RunConfig

METRICS, BAD_STEPS = "metrics.jsonl", "bad_steps.jsonl"
RECORDS = (METRICS, "samples.jsonl", "quarantine.jsonl", BAD_STEPS)
DISCARDED = "discarded.jsonl"
AUDIT = "audit.json"

ON_RESUME = marked(RunConfig, OnResume)


@dataclass(frozen=True)
class Begin:
    """What every rank knows of the checkpoint that the run goes on from."""

    path: str
    is_own: bool  # of this run, not of another one from which it branches
    state: Mapping[str, Any]
    allowed: tuple[str, ...]
    branched_from: str | None  # fingerprint of the other run's checkpoint that this run began with

    @property
    def step(self) -> int:
        """The next step."""
        return self.state["step"]

    def refuse_other_contents(self, data: str, model: str, settings: str, max_steps: int) -> None:
        """Raise UserError unless data and frozen models are, by their fingerprints, those that were trained with.

        `model` is of the frozen weights, `settings` of what else the models' folders say.
        """
        if self.step > max_steps:
            raise UserError(
                f"{self.path}: {self.step} steps are made, and train.max_steps or train.epochs now mean {max_steps}"
            )
        models = ("model.llm.path", "model.vision.name")
        for what, keys, was, now in (
            ("data", ("data.shards", "data.sets"), self.state["data"]["fingerprint"], data),
            ("frozen weights", models, self.state["frozen_fingerprint"], model),
            ("models' config.json", models, self.state["settings_fingerprint"], settings),
        ):
            if was != now and not any(_allows(name, key) for name in self.allowed for key in keys):
                raise UserError(
                    f"{self.path}: the {what} are not those that it was trained with (fingerprint {was[:16]}, now "
                    f"{now[:16]}); bring them back, or allow it: --allow-change {keys[0]}"
                )


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from, and the changes that its user allows."""

    checkpoint: StepFolder
    is_own: bool
    allowed: tuple[str, ...] = ()

    @property
    def begin(self) -> Begin:
        state = self.checkpoint.state
        branched_from = state["branched_from"] if self.is_own else self.checkpoint.fingerprint
        return Begin(str(self.checkpoint.path), self.is_own, state, self.allowed, branched_from)


def choose(
    folder: Path, config: RunConfig, path: Path | None, allowed: Sequence[str], say: Callable[[str], None]
) -> Start | None:
    """The checkpoint at which the run in `folder` goes on; None: there is none, it begins with its first step.

    `path` names a checkpoint of this run, or one of another run, from which this one then branches; None takes the
    run's newest whole one. Raises UserError where none can be used, and for keys that have changed but by `allowed`.
    """
    known = {".".join(key) for key, _ in all_fields(RunConfig)}
    for name in allowed:
        if name not in known:
            near = ".".join(nearest_key(tuple(name.split(".")), [tuple(key.split(".")) for key in known]))
            raise UserError(f"--allow-change {name}: no key or section of a configuration; the nearest is {near}")
    if path is not None:
        start = find(path.expanduser(), say)
    else:
        start, damaged = newest(folder)
        listed = "".join(f"\n  {damaged_one}: {why}" for damaged_one, why in damaged.items())
        if start is None and damaged:
            raise UserError(
                f"no checkpoint of {folder} is whole:{listed}\nrestore one of them, or start anew: another run.name, "
                "or run.overwrite=true, which deletes the folder"
            )
        if damaged:
            say(f"passed over:{listed}")
    if start is None:
        _refuse_lost_checkpoints(folder)
        return None
    refuse_changes(start, config, allowed)
    # By the folder's own name for it: the path may be a link, or relative to somewhere inside the run.
    own = next((one for one in step_folders(folder) if one.resolve() == start.path.resolve()), None)
    if own is None and start.path.resolve().parent == (folder / CHECKPOINTS).resolve():
        raise UserError(
            f"{start.path} was set aside, or is not finished; to go on from it name it step-{start.step:08d} again"
        )
    return Start(start if own is None else StepFolder(own), own is not None, tuple(allowed))


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Raise UserError where a run without checkpoints has had some: beginning anew would cost what it trained."""
    set_aside = any((folder / CHECKPOINTS).glob("step-*.discarded*"))
    if set_aside or any(recorded(folder / METRICS, "checkpoint", "resume", "end")):
        raise UserError(
            f"{folder} has had checkpoints, and none is in {CHECKPOINTS}/ any more; put one back, or start anew: "
            "another run.name, or run.overwrite=true, which deletes the folder"
        )


def go_back(folder: Path, start: StepFolder | None, say: Callable[[str], None]) -> None:
    """Cut the run's records back to this checkpoint of its own, None: to nothing, and set later checkpoints aside."""
    try:
        remove_unfinished(folder)
        for later in step_folders(folder):
            if start is not None and step_of(later) <= start.step:
                break
            say(f"set aside as {_set_aside(later)}")
        if (folder / CHECKPOINTS).exists():
            flush_folder(folder / CHECKPOINTS)  # else a power cut might bring them back beside records that are cut
        lengths = {} if start is None else start.state["files"]
        for name in RECORDS:
            _cut_back(folder, name, lengths.get(name, 0), 0 if start is None else start.step, say)
        (folder / AUDIT).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot go back to a checkpoint: {error}") from error


def recorded(file: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The records of these kinds in a file of JSON lines, none if it is not there; what is no record is passed over."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for line in iter(functools.partial(lines.readline, MAX_JSON_BYTES), b""):
            if any(f'"{kind}"'.encode() in line for kind in kinds):  # parsing all lines of a long run takes seconds
                record = _parsed(line)
                if isinstance(record, dict) and record.get("kind") in kinds:
                    yield record


def is_complete(folder: Path, start: StepFolder, config: RunConfig) -> bool:
    """Whether this run, as configured, has reached its end after this checkpoint, final evaluation included."""
    if any(changes(start.config, config)):
        return False
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            last = _parsed(file.read().splitlines()[-1])
    except (OSError, IndexError):
        return False
    return isinstance(last, dict) and (last.get("kind"), last.get("step")) == ("end", start.step)


def refuse_changes(start: StepFolder, config: RunConfig, allowed: Sequence[str] = ()) -> None:
    """Raise UserError, with old and new values, for keys whose change would make another run of it.

    `allowed` are keys, or sections, that may change all the same.
    """
    changed = dict(changes(start.config, config))
    fixed = [key for key in changed if _on_resume(key) is OnResume.FIXED]
    refused = fixed or [key for key in changed if not any(_allows(name, key) for name in allowed)]
    if not refused:
        return
    lines = [f"{key}: was {_shown(changed[key][0])}, is now {_shown(changed[key][1])}" for key in refused]
    if fixed:
        mend = (
            "its weights and its place in the data have no meaning then; for a new run that begins with its projector "
            f"set another run.name and model.projector.init_from={start.path}"
        )
    else:
        allow = " ".join(f"--allow-change {key}" for key in refused)
        mend = f"set the old values, or allow it: {allow}; for a new run set another run.name"
    raise UserError("\n  ".join([f"{start.path} is of a run with another configuration:", *lines]) + f"\n{mend}")


def changes(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Each key that is not free to change and whose value differs, with both values."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key), after.get(key)
        if values[0] != values[1] and _on_resume(key) is not OnResume.FREE:
            yield key, values


def _on_resume(key: str) -> OnResume:
    return ON_RESUME[declared_path(tuple(key.split(".")))]


def _allows(name: str, key: str) -> bool:
    """Whether --allow-change with this name, a key's or a section's, is about this key."""
    return key == name or key.startswith(name + ".")


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; the elements of a list of sections by their number."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): element for number, element in enumerate(value)}
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _set_aside(path: Path) -> Path:
    """Rename a step folder, since the run will come to this step again; its new path."""
    target, number = path.with_name(path.name + ".discarded"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.discarded-{number}")
    path.rename(target)
    return target


def _cut_back(folder: Path, name: str, length: int, step: int, say: Callable[[str], None]) -> None:
    """Cut a record to its first `length` bytes; the rest goes into discarded.jsonl."""
    path = folder / name
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        say(f"{path}: {length - size:,} bytes fewer than the checkpoint knew of; what they recorded is gone")
        length = _whole_lines(path) if size else 0
    if size <= length:
        return
    with path.open("rb") as file, JsonLines(folder / DISCARDED) as discarded:
        file.seek(max(length - 1, 0))
        if length and file.read(1) != b"\n":
            raise UserError(f"{path} was changed since the checkpoint was written: move it away, and start again")
        for line in file:
            discarded.write(file=name, back_to_step=step, record=_parsed(line))
    flush(folder / DISCARDED)  # before the cut: a crash in between leaves a line twice rather than none
    if length:
        os.truncate(path, length)
    else:
        path.unlink()


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def _parsed(line: bytes) -> Any:
    """The content of a line of JSON; its text if it is none."""
    try:
        return parse_json(line)
    except ValueError:
        return line.decode(errors="replace").rstrip("\n")
