"""Where a run begins that goes on from another's weights alone: `model.init_from`, looked at without torch.

run or checkpoint --names and shapes--> each tensor of it trains here, or UserError --load_init_from--> fp32 weights

Step, optimizer and place in the data are this run's own. The other's projector comes by `model.projector.init_from`,
which this key stands for too, since it may stay frozen.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, first_few
from mmtrain.checkpoint.step_folder import StepFolder, find, names_checkpoint
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.adapters import is_adapter
from mmtrain.models.facts.model_files import read_header
from mmtrain.models.facts.shapes import matches_any
from mmtrain.plan.planner import models_of

_log = logging.getLogger(__name__)
KEY = "model.init_from"
PROJECTOR = "projector."
NAMES_SHOWN = 3


def find_beginning(config: RunConfig) -> StepFolder | None:
    """The checkpoint whose weights a run begins with, of a run the newest whole one; None where none is named."""
    path = config.model.init_from
    if path is None:
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir() or not names_checkpoint(folder):
        raise UserError(
            f"{KEY}: {path}: no run and no checkpoint of mmtrain; of an exported model begin by "
            "model.pretrained, or by its folder as model.llm.path"
        )
    return find(folder)


def refuse_unfit_beginning(config: RunConfig, run: Path) -> None:
    """Before a rank starts: raises UserError unless all that `model.init_from` has trained goes on in this run.

    `run` is this run's folder, which run.overwrite is about to delete.
    """
    checkpoint = find_beginning(config)
    if checkpoint is None:
        return
    if config.run.overwrite and run.resolve() in checkpoint.path.resolve().parents:
        path = config.model.init_from
        raise UserError(f"{KEY}: {path} lies in {run}, which run.overwrite=true deletes; choose another run.name")
    if new := names_beginning_anew(config, checkpoint):
        _log.info(
            f"{KEY}: all else that trains is as {checkpoint.path} has trained it; {len(new):,} more train "
            f"here, from their own beginning: {first_few(new, NAMES_SHOWN)}"
        )


def names_beginning_anew(config: RunConfig, checkpoint: StepFolder) -> list[str]:
    """What trains with this configuration, which begins with the checkpoint, and did not train there.

    Raises UserError unless all that did goes on.
    """
    path = config.model.init_from
    there = read_header(checkpoint.tensors_file)
    here = {p.name: p.shape for p in models_of(config).parameters}
    for name, shape in there.items():
        if name not in here:
            shown = escape(name)
            raise UserError(f"{KEY}: {path} has trained {shown}, which this run does not have; {_remedy(name)}")
        if here[name] != shape:
            raise UserError(
                f"{KEY}: {path}: {name} has shape {shape}, and here it is {here[name]}: another model, or model.lora.r"
            )
        if name.startswith(PROJECTOR):
            if config.model.projector.init_from != path:
                raise UserError(
                    f"{KEY}: {path} has trained {name}, but model.projector.init_from is "
                    f"{config.model.projector.init_from or 'null'}; leave that out"
                )
        elif not matches_any(name, config.model.trainable):
            raise UserError(
                f"{KEY}: {path} has trained {name}, which stays frozen here, as its published file has it; add it to "
                "model.trainable, or export that run (--format hf) and begin with the folder as model.pretrained"
            )
    ours, theirs = config.model.lora, checkpoint.config.model.lora
    if any(map(is_adapter, there)) and ours.alpha / ours.r != theirs.alpha / theirs.r:
        raise UserError(
            f"{KEY}: the adapters of {path} were trained with model.lora.alpha {theirs.alpha:g}, and with "
            f"{ours.alpha:g} they would compute something else; set model.lora.alpha={theirs.alpha:g}"
        )
    return [name for name in here if matches_any(name, config.model.trainable) and name not in there]


def _remedy(name: str) -> str:
    if is_adapter(name):
        return "give model.lora as that run had it, or export that run (--format hf) and begin with the folder"
    return "export that run (--format hf) and begin with the folder as model.pretrained or model.llm.path"
