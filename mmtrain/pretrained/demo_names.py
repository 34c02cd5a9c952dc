"""The embedded default's names: what a configuration says instead of a path.

`demo:llm` and `demo:vision` are frozen models that come with this package, `demo:train` and `demo:held-out` are shards
that `data` makes on first use. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

from mmtrain.base.errors import UserError

PREFIX = "demo:"
MODELS = {name: Path(__file__).parents[1] / "demo" / name for name in ("llm", "vision")}


def is_demo(name: str) -> bool:
    """Whether `name` speaks of the embedded default rather than of a path or a hub id."""
    return name.startswith(PREFIX)


def demo_model(name: str) -> Path:
    """The folder of `demo:llm` or `demo:vision`; raises UserError for another name."""
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        raise UserError(f"{name}: the demo has no such model; it has {', '.join(PREFIX + known for known in MODELS)}")
    return MODELS[model]
