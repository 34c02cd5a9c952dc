"""What timm knows of its models by name: weights, preprocessing, shapes. timm and torch are imported when it is asked.

Importing them takes seconds, and planning asks only for a model that is neither a folder here nor recorded.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Any

from mmtrain.base.errors import UserError
from mmtrain.pretrained.recorded_shapes import Recorded, nearest_recorded

if TYPE_CHECKING:
    from timm.models import PretrainedCfg


def timm_config(name: str) -> PretrainedCfg:
    """timm's record of a pretrained model: where its weights are, input size, mean, std, interpolation.

    Raises UserError for an unknown name and for weights that were trained with another activation function.
    """
    architecture = _architecture(name)
    import timm

    known = timm.list_pretrained(f"{architecture}.*")
    if not known or ("." in name and name not in known):
        listed = ", ".join(known) or "no weights at all"
        raise UserError(f"model.vision.name: timm has no weights {name}; of {architecture} it has {listed}")
    config = timm.get_pretrained_cfg(name)
    refuse_wrong_activation({"architecture": architecture, "pretrained_cfg": {"tag": config.tag}})
    return config


def refuse_wrong_activation(config_json: dict[str, Any]) -> None:
    """Raise UserError where a CLIP trained with QuickGELU would run with GELU: it loads, and its features are wrong.

    config_json: a timm folder's config.json; timm's registry notes of which weights this holds.
    """
    import timm

    architecture = config_json["architecture"]
    name = f"{architecture}.{(config_json.get('pretrained_cfg') or {}).get('tag')}"
    notes = timm.get_pretrained_cfg(name).notes if name in timm.list_pretrained(f"{architecture}.*") else None
    if "QuickGELU" in " ".join(notes or ()) and "quickgelu" not in architecture:
        right = name.replace("_clip_", "_clip_quickgelu_")
        raise UserError(
            f"model.vision.name: {name} was trained with QuickGELU, but this architecture computes GELU; use {right}"
        )


@functools.cache
def timm_record(name: str) -> Recorded:
    """Names and shapes of a timm model's parameters, which is built without memory for its weights.

    Its architecture (the name without tag) is an alias. Raises UserError for a name that timm does not know, with the
    nearest, and where timm is not installed.
    """
    architecture = _architecture(name)
    import timm
    import torch

    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    config = {"architecture": architecture, "pretrained_cfg": {"input_size": list(model.pretrained_cfg["input_size"])}}
    attention = getattr(next(iter(getattr(model, "blocks", ())), None), "attn", None)
    if (heads := getattr(attention, "num_heads", None)) is not None:
        config["num_heads"] = heads
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Recorded("vision", name, tuple({architecture} - {name}), config, shapes)


def _architecture(name: str) -> str:
    """The part of a timm name before its tag."""
    try:
        import timm
    except ImportError:
        nearest = ", ".join(nearest_recorded("vision", name)) or "none"
        raise UserError(
            f"model.vision.name: {name} is no folder here, its shape is not recorded, and timm, which may know it, "
            f"is not installed; install it, or take what is recorded: {nearest}"
        ) from None
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UserError(f"model.vision.name: {name} is neither a folder here nor a model that timm knows{hint}")
    return architecture
