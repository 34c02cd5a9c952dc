"""What a run writes into a checkpoint's state.json, where a test needs no particular run."""

from __future__ import annotations

from typing import Any

VERSIONS = {
    "python": "3.11",
    "torch": "2",
    "transformers": "5",
    "timm": "1",
    "deepspeed": "0",
    "mmtrain": "0.1.0",
}


def state_of(step: int, **others: object) -> dict[str, Any]:
    """The state after `step` updates, with `others` for what it would be."""
    return {
        "format": 2,
        "step": step,
        "max_steps": step,
        "config": {},
        "data": {"fingerprint": "d" * 64, "counts": None},
        "frozen_fingerprint": "f" * 64,
        "frozen_files": {},
        "settings_fingerprint": "s" * 64,
        "branched_from": None,
        "loss": 1.25,
        "bad_steps": 0,
        "versions": VERSIONS,
        "topology": {"pipeline": 1, "data": 1, "threads": 1},
        "trained": {},
        "files": {},
        **others,
    }


def run_state() -> dict[str, Any]:
    """Of it, what the run itself gives to its Checkpointer."""
    own = ("format", "step", "trained", "files")
    return {key: value for key, value in state_of(0).items() if key not in own}
