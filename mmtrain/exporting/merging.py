"""Adapters of a run in the layers that they stand beside, for formats that have no place for them.

X.weight, X.lora_A.weight (r, in), X.lora_B.weight (out, r) --fp32--> X.weight + (alpha / r) B A, transposed in a Conv1D

A layer is merged in fp32, when it is written, and cast to the export's type once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mmtrain.base.errors import UserError
from mmtrain.config.model import LoraSection
from mmtrain.config.schema import RunConfig
from mmtrain.exporting.tensors import TensorSource, in_memory
from mmtrain.models.facts.adapters import LORA_A, LORA_B, adapted_layer, is_adapter
from mmtrain.models.modules.vision import load_vision


def take_merged(
    waiting: dict[str, TensorSource], name: str, weight: TensorSource, lora: LoraSection | None, transposed: bool
) -> TensorSource:
    """Return the weight `name` merged with its adapter, if `waiting` has one, which is removed from there.

    transposed: the weight is (in, out). Raises UserError for an adapter of another shape.
    """
    layer = adapted_layer(name)
    if lora is None or layer + LORA_A not in waiting or layer + LORA_B not in waiting:
        return weight
    first, second = waiting.pop(layer + LORA_A), waiting.pop(layer + LORA_B)
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    if (first.shape, second.shape) != ((lora.r, inputs), (outputs, lora.r)):
        raise UserError(
            f"{layer}: its adapter was trained with shapes {list(first.shape)} and {list(second.shape)}, and its "
            f"weight has {list(weight.shape)}: another model lies there than the run was trained with"
        )

    def read() -> torch.Tensor:
        update = (second.read() @ first.read()) * (lora.alpha / lora.r)
        return weight.read().to(torch.float32) + (update.T if transposed else update)

    return TensorSource(torch.float32, weight.shape, read)


def merged_encoder(config: RunConfig, trained: Mapping[str, TensorSource]) -> dict[str, torch.Tensor]:
    """Return the trained tensors of a run's encoder, by global name, adapters merged into their layers' weights.

    Raises UserError for an adapter of a layer that the encoder does not have.
    """
    waiting = dict(trained)
    chosen, merged = config.model.vision, {}
    if any(map(is_adapter, trained)):
        tower = load_vision(chosen.name, chosen.select_layer, torch.float32, final_norm=chosen.final_norm)
        for name, parameter in tower.global_parameters():
            weight = waiting.get(name) or in_memory(parameter.detach())
            result = take_merged(waiting, name, weight, config.model.lora, transposed=False)
            if result is not weight:
                merged[name] = result
        if idle := next(filter(is_adapter, waiting), None):
            raise UserError(f"{idle} was trained, and the encoder {chosen.name} has no such layer")
    return {name: source.read() for name, source in (waiting | merged).items()}
