"""mmtrain: train the connector of a vision-language model, the LLM frozen and cut into pipeline
stages.

    import mmtrain

    config = mmtrain.load_config("example:llava_pp4", ["train.max_steps=40"])  # pip install
                                                                               'mmtrain[demo]'
    plan = mmtrain.make_plan(config)                     # who holds, trains and runs what; needs no
                                                         GPU and no weights
    run = mmtrain.train(config).wait()                   # processes of their own; their console is
                                                         shown here
    print(run.scores[-1]["exact_match"], run.checkpoints)
    folder = mmtrain.export(run, "hf", "exported/demo")  # for stock transformers
    print(mmtrain.generate(folder, "picture.png", "Which digit is at the top left?"))

    run = mmtrain.load_run("runs/llava_pp4")             # of any run, also one that is under way
    pandas.DataFrame(run.metrics("train")).plot("step", "loss")
    run.report()                                         # its page, runs/llava_pp4/report.html

Importing this imports nothing of it: each name brings its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmtrain.api.export import export
    from mmtrain.api.generate import generate
    from mmtrain.api.run import Run, RunError, load_config, load_run, train
    from mmtrain.base.errors import UserError
    from mmtrain.launching.machine import plan_for_here as make_plan

    __version__: str

__all__ = [
    "Run",
    "RunError",
    "UserError",
    "export",
    "generate",
    "load_config",
    "load_run",
    "make_plan",
    "train",
]

_PLACES = {
    "__version__": ("mmtrain.base.version", "VERSION"),
    "Run": ("mmtrain.api.run", "Run"),
    "RunError": ("mmtrain.api.run", "RunError"),
    "UserError": ("mmtrain.base.errors", "UserError"),
    "export": ("mmtrain.api.export", "export"),
    "generate": ("mmtrain.api.generate", "generate"),
    "load_config": ("mmtrain.api.run", "load_config"),
    "load_run": ("mmtrain.api.run", "load_run"),
    "make_plan": ("mmtrain.launching.machine", "plan_for_here"),
    "train": ("mmtrain.api.run", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'mmtrain' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
