"""Keys of other programs of the field, and what is set here instead: the table foreign_keys.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mmtrain.config.keys import Path as KeyPath

TABLE = Path(__file__).with_name("foreign_keys.yaml")


@functools.cache
def answers() -> dict[str, str]:
    """Return the answer to each key that another program has: a sentence that goes on after "here"."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: entry["here"] for entry in table for name in entry["keys"].split()}


def answer_to(path: KeyPath) -> str | None:
    """Return what is set here instead of an unknown key, in whatever section it is."""
    names = [name.lstrip("-").replace("-", "_").lower() for name in path]
    return answers().get("_".join(names[-2:])) or answers().get(names[-1])  # eval: {batch_size: 4}, then batch_size


def foreign_keys_of(content: Mapping[str, Any]) -> list[str]:
    """Return the keys by which a whole file is another program's configuration; none where it may be mmtrain's."""
    if any(isinstance(content.get(section), dict) for section in ("run", "data", "train")):
        return []
    keys = [str(key) for key in content if key in answers()]
    return keys if len(keys) > 1 else []
