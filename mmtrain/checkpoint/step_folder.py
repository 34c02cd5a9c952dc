"""The step folder: what a checkpoint is on disk, and how it is known to be whole.

RUN/checkpoints/step-00000120/     after 120 updates
    projector.safetensors          every trained tensor, fp32, by global name
    optimizer.safetensors          AdamW's state: NAME/exp_avg, NAME/exp_avg_sq, NAME/step
    state.json                     where the run stands, what it was, with what it was made
    manifest.json                  size and SHA-256 of each file, and of itself; written last

It has its name when all of it is on the disk: it is a whole checkpoint, or one that was damaged
later, which the manifest shows. Nothing is pickled. No torch here: the launcher decides by it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from mmtrain.base.durable import flush, leftovers, lock, remove_folder, whole_folder
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import MAX_JSON_BYTES, open_file, parse_json, read_limited
from mmtrain.config.load import restore_config
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import Models, models_of

_log = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT = 2
CHECKPOINTS = "checkpoints"
TENSORS, OPTIMIZER, STATE, MANIFEST = (
    "projector.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
NAME = re.compile(r"step-(\d{8,})")

STATE_KEYS = {
    "step": int,  # updates made: the number of the next step
    "max_steps": int,
    "config": dict,
    "versions": dict,
    "topology": dict,
    "data": dict,  # fingerprint, and samples of each replica: see mmtrain.data.stream.account
    "frozen_fingerprint": str,
    "frozen_files": dict,  # fingerprints of frozen tensors as loaded, before any is quantised
    "settings_fingerprint": str,  # of what else the models' folders say
    # fingerprint of the other run's checkpoint that the run began with
    "branched_from": str | None,
    "loss": float | int | str | None,  # of the latest step
    "bad_steps": int,
    # by name of the tensor: its fingerprint before the first step, and whether it had a gradient
    "trained": dict,
    "files": dict,  # lengths of the run's records, in bytes
}


@dataclass(frozen=True)
class StepFolder:
    """A checkpoint whose manifest was found right."""

    path: Path
    held: BinaryIO | None = field(default=None, compare=False, repr=False)
    """Its manifest, locked: the run that saved it does not delete it while this object lives."""

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "held": None, "state": self.state}

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """Content of state.json, which has STATE_KEYS.

        It travels with the object to processes without the files.
        """
        return parse_json(read_limited(self.path / STATE, MAX_JSON_BYTES, "what mmtrain writes"))

    @property
    def frozen_projector(self) -> dict[str, str]:
        """Fingerprints of the projector's tensors that the run did not train."""
        frozen = self.state["frozen_files"]
        return {name: frozen[name] for name in frozen if name.startswith("projector.")}

    @property
    def step(self) -> int:
        return self.state["step"]

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration of the run that saved it.

        Raises UserError if this version does not know it.
        """
        return restore_config(self.state["config"], str(self.path / STATE))

    @functools.cached_property
    def models(self) -> Models:
        """The models of the run that saved it."""
        return models_of(self.config)

    @property
    def run(self) -> Path:
        """The folder of the run that saved it, if this one was not moved."""
        return self.path.resolve().parent.parent

    @property
    def tensors_file(self) -> Path:
        return self.path / TENSORS

    @property
    def optimizer_file(self) -> Path:
        return self.path / OPTIMIZER

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest: of everything in the folder."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()


def split(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split a checkpoint's tensors into trained weights and their optimizer state."""
    weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    return weights, {name: tensor for name, tensor in tensors.items() if "/" in name}


def step_of(path: Path) -> int:
    return int(NAME.fullmatch(path.name)[1])


def step_path(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


@contextlib.contextmanager
def new_step_folder(path: Path) -> Iterator[Path]:
    """Yield a folder for a checkpoint's files; a block without error gives it manifest and name.

    Raises FileExistsError rather than write into an existing one, and OSError for a full disk,
    leaving nothing.
    """
    if path.exists():
        raise FileExistsError(
            f"{path} exists; a checkpoint is never written into an existing folder"
        )
    # not its parents: a run's folder that was moved is not made anew
    path.parent.mkdir(exist_ok=True)
    with whole_folder(path) as unfinished:
        yield unfinished
        entries = {file.name: _entry(file) for file in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(_manifest(entries))
    flush(path.parent.parent)


def why_damaged(path: Path) -> str | None:
    """Return the damage of a step folder, naming the file; None if it is whole.

    Cost: hashes every byte.
    """
    name = MANIFEST
    try:
        # the manifest itself
        text = read_limited(path / MANIFEST, MAX_JSON_BYTES, "what mmtrain writes").decode()
        content = parse_json(text.encode())
        if content["format"] != FORMAT:
            return (
                f"{MANIFEST} has version {escape(repr(content['format']))}; "
                f"this mmtrain reads {FORMAT}"
            )
        if text != _manifest(content["files"]):
            return f"{MANIFEST} is damaged: its checksum is wrong"

        # the files that it lists, and those that every checkpoint has
        for name in sorted({TENSORS, OPTIMIZER, STATE, *content["files"]}):
            entry = _entry(path / name)
            written = content["files"][name]
            if entry["bytes"] != written["bytes"]:
                return (
                    f"{name} is damaged: it has {entry['bytes']:,} bytes, but "
                    f"{written['bytes']:,} were written"
                )
            if entry != written:
                return f"{name} is damaged: its SHA-256 differs from the one recorded"

        # the state, which is as mmtrain writes it
        name = STATE
        state = StepFolder(path).state
        for key, kinds in STATE_KEYS.items():
            if not isinstance(state.get(key, ...), kinds):
                return f"{STATE} is damaged: mmtrain did not write its {key}"
        if NAME.fullmatch(path.name) and step_of(path) != state["step"]:
            return f"{STATE} is from step {state['step']}: the folder was renamed"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, UserError) as error:
        return f"{name} cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        # ValueError: JSON and UTF-8 errors are
        return f"{name} is damaged: mmtrain did not write it so"
    return None


def step_folders(run: Path) -> list[Path]:
    """List a run's checkpoints, whole or not, newest first."""
    candidates = (run / CHECKPOINTS).glob("step-*")
    folders = [path for path in candidates if NAME.fullmatch(path.name)]
    return sorted(folders, key=lambda path: (step_of(path), path), reverse=True)


def newest(run: Path) -> tuple[StepFolder | None, dict[Path, str]]:
    """Return a run's newest whole checkpoint, held, and the damage of each newer one."""
    damaged = {}
    for path in step_folders(run):
        held = _hold(path)
        why = why_damaged(path)
        if why is None:
            return StepFolder(path, held), damaged
        if not path.exists():  # deleted since it was listed, so there is a newer one now
            return newest(run)
        damaged[path] = why
    return None, damaged


def names_checkpoint(path: Path) -> bool:
    """Whether `find` takes a path for a run's folder or a checkpoint, whole or not."""
    return (
        (path / CHECKPOINTS).is_dir()
        or (path / MANIFEST).exists()
        or bool(NAME.fullmatch(path.name))
    )


def find_newest(run: Path, remedy: str = "Restore one of them") -> StepFolder | None:
    """Return a run's newest whole checkpoint, held; None if it has none at all.

    Warns of damaged ones that it passes over. Raises UserError, with the `remedy`, where all are
    damaged.
    """
    found, damaged = newest(run)
    listed = "".join(f"\n  {folder}: {why}" for folder, why in damaged.items())
    if found is None and damaged:
        raise UserError(f"no checkpoint of {run} is whole:{listed}\n{remedy}")
    if damaged:
        _log.warning(f"skipped damaged checkpoints:{listed}")
    return found


def find(path: Path) -> StepFolder:
    """Return the checkpoint of a step folder, or the newest whole one of a run's folder.

    Raises UserError where there is none.
    """
    if (path / CHECKPOINTS).is_dir():
        if (found := find_newest(path)) is None:
            raise UserError(f"{path} has no checkpoint yet. Name a run that has saved one")
        return found
    if not path.is_dir():
        raise UserError(
            f"{path}: no such folder. Name a run's folder or one of its checkpoints/step-..."
        )
    if not names_checkpoint(path):
        raise UserError(
            f"{path}: neither a run's folder (with {CHECKPOINTS}/) nor a checkpoint "
            f"(with {MANIFEST})"
        )
    held = _hold(path)
    if (why := why_damaged(path)) is not None:
        raise UserError(f"{path}: {why}")
    return StepFolder(path, held)


def remove_unfinished(run: Path) -> None:
    for path in (run / CHECKPOINTS).glob(leftovers("step-*")):
        shutil.rmtree(path)


def remove(path: Path) -> None:
    """Delete a step folder, which loses its name first.

    Raises BlockingIOError where another program reads it (`find` locks it), and OSError where it
    cannot go.
    """
    with contextlib.ExitStack() as opened:
        # what is no whole checkpoint is held by nobody
        with contextlib.suppress(FileNotFoundError):
            lock(opened.enter_context((path / MANIFEST).open("r+b")), wait=False)
        remove_folder(path)


def _hold(path: Path) -> BinaryIO | None:
    """Open and lock a step folder's manifest, so that no run deletes it; None: it is gone."""
    try:
        manifest = open_file(path / MANIFEST)
    except (OSError, UserError):
        return None
    lock(manifest, shared=True)
    return manifest


def _manifest(entries: Mapping[str, Any]) -> str:
    """Return the manifest's text, whose last line is the checksum of the rest."""
    content = {"format": FORMAT, "files": entries}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": checksum}, indent=1) + "\n"


def _entry(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
