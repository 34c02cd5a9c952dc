"""LoRA (arXiv:2106.09685): which linear layers have an adapter, its parameters and their names, without torch.

X.weight (out, in) --model.lora.targets match X--> X.lora_A.weight (r, in) and X.lora_B.weight (out, r) behind it

The layer then gives W x + (alpha / r) B A x. What a pattern names and cannot have an adapter is refused, never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mmtrain.base.errors import UserError
from mmtrain.config.model import LoraSection
from mmtrain.facts.encoders import ENCODER_BLOCK
from mmtrain.facts.shapes import LlmShape, ParameterShape, Shape, VisionShape, matches_any

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_DECODER_LAYER = re.compile(r"llm\.layers\.\d+\.")
_TRANSPOSED = ("gpt2",)  # families whose linear layers are transformers' Conv1D, weights (in, out)


def is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


def is_llm_adapter(name: str) -> bool:
    return name.startswith("llm.") and is_adapter(name)


def adapted_layer(name: str) -> str:
    """The global name of the linear layer whose weight or adapter a parameter is."""
    return re.sub(r"(\.lora_[AB])?\.weight$", "", name)


def is_target(name: str, shape: Shape, lora: LoraSection | None) -> bool:
    """Whether `model.lora` gives an adapter to the layer whose weight this parameter is."""
    layer = _DECODER_LAYER.match(name) or ENCODER_BLOCK.match(name)
    return bool(lora and layer and name.endswith(".weight") and len(shape) == 2 and matches_any(name, lora.targets))


def with_adapters(llm: LlmShape, vision: VisionShape, lora: LoraSection | None) -> tuple[LlmShape, VisionShape]:
    """Add the parameters of the adapters that `model.lora` asks for, each pair behind its layer's weight.

    Raises UserError for a pattern that names no linear layer, and for what cannot have an adapter.
    """
    if lora is None:
        return llm, vision
    transposed = llm.model_type in _TRANSPOSED
    decoder = tuple(_with_pairs(layer, lora, transposed=transposed) for layer in llm.decoder)
    encoder = _with_pairs(vision.parameters, lora)
    adapted = {adapted_layer(p.name) + ".weight" for layer in (*decoder, encoder) for p in layer if is_adapter(p.name)}
    for pattern in lora.targets:
        if not any(matches_any(name, (pattern,)) for name in adapted):
            every_layer = LoraSection(targets=("llm.layers.*",))
            fitting = [adapted_layer(p.name) for p in llm.decoder[0] if is_target(p.name, p.shape, every_layer)]
            raise UserError(
                f"model.lora.targets: {pattern!r} names no linear layer of a decoder layer or of an encoder's block "
                f"(vision.*); decoder layers have {', '.join(re.sub(r'[.]0[.]', '.*.', name) for name in fitting)}"
            )
    return replace(llm, decoder=decoder), replace(vision, parameters=encoder)


def _with_pairs(
    parameters: Sequence[ParameterShape], lora: LoraSection, *, transposed: bool = False
) -> tuple[ParameterShape, ...]:
    result = []
    for parameter in parameters:
        result.append(parameter)
        if matches_any(parameter.name, lora.targets):
            _refuse_unfit(parameter, parameters)
        if is_target(parameter.name, parameter.shape, lora):
            outputs, inputs = reversed(parameter.shape) if transposed else parameter.shape
            layer = adapted_layer(parameter.name)
            result.append(ParameterShape(layer + LORA_A, (lora.r, inputs)))
            result.append(ParameterShape(layer + LORA_B, (outputs, lora.r)))
    return tuple(result)


def _refuse_unfit(parameter: ParameterShape, siblings: Sequence[ParameterShape]) -> None:
    """Raise UserError for a matrix of a decoder layer or block that no adapter fits."""
    block = _DECODER_LAYER.match(parameter.name) or ENCODER_BLOCK.match(parameter.name)
    if not block or len(parameter.shape) < 2:
        return
    layer = adapted_layer(parameter.name)
    siblings = [p for p in siblings if p.name.startswith(block[0])]
    if len(parameter.shape) == 3 and parameter.shape[1] == 1:  # a recurrent mixer's convolution: small, as norms are
        return
    stacked = (p for p in siblings if len(p.shape) > 2 and p.shape[1] > 1)
    experts = {p.name.rpartition(".")[0]: p.shape[0] for p in stacked}  # how many each holds
    routers = {(module.rpartition(".")[0], count) for module, count in experts.items()}
    is_experts = parameter.name.rpartition(".")[0] in experts
    is_router = (layer.rpartition(".")[0], parameter.shape[0]) in routers
    has_own_bias = layer.endswith(".qkv") and any(p.name == f"{layer.removesuffix('qkv')}q_bias" for p in siblings)
    if is_experts or is_router or has_own_bias:
        raise UserError(
            f"model.lora.targets: {layer} cannot have an adapter: it is all experts in one tensor, a router, or a qkv "
            "with a separate bias tensor. Name the layers beside it instead."
        )
