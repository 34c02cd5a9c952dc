"""LoRA (arXiv:2106.09685): linear layers with an adapter, its parameters and names, without torch.

X.weight (out, in) --model.lora.targets match X--> X.lora_A.weight (r, in) and
                                                   X.lora_B.weight (out, r) behind it

The layer then gives W x + (alpha / r) B A x. A layer that a pattern names and that cannot have an
adapter is refused, never skipped.
"""

import itertools
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
    """Return the global name of the linear layer of a weight or adapter."""
    return re.sub(r"(\.lora_[AB])?\.weight$", "", name)


def is_target(name: str, shape: Shape, lora: LoraSection | None) -> bool:
    """Whether `model.lora` gives an adapter to the layer of this weight."""
    if lora is None or not _block(name):
        return False
    return name.endswith(".weight") and len(shape) == 2 and matches_any(name, lora.targets)


def _block(name: str) -> str:
    """Return the beginning of a name up to its decoder layer or encoder block; "" outside."""
    match = _DECODER_LAYER.match(name) or ENCODER_BLOCK.match(name)
    return match[0] if match else ""


def with_adapters(
    llm: LlmShape, vision: VisionShape, lora: LoraSection | None
) -> tuple[LlmShape, VisionShape]:
    """Add the parameters of the adapters of `model.lora`, each pair behind its layer's weight.

    Raises UserError for a pattern that names no linear layer, and for a layer that cannot have an
    adapter.
    """
    if lora is None:
        return llm, vision
    transposed = llm.model_type in _TRANSPOSED
    decoder = tuple(_with_pairs(layer, lora, transposed=transposed) for layer in llm.decoder)
    encoder = _with_pairs(vision.parameters, lora)
    pairs = [p.name for p in itertools.chain(encoder, *decoder) if is_adapter(p.name)]
    adapted = {adapted_layer(name) + ".weight" for name in pairs}
    for pattern in lora.targets:
        if not any(matches_any(name, (pattern,)) for name in adapted):
            every = LoraSection(targets=("llm.layers.*",))
            names = [p.name for p in llm.decoder[0] if is_target(p.name, p.shape, every)]
            fitting = ", ".join(map(adapted_layer, names)).replace(".0.", ".*.")
            raise UserError(
                f"model.lora.targets: {pattern!r} names no linear layer of a decoder layer or of "
                f"an encoder's block (vision.*); decoder layers have {fitting}"
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
            outputs, inputs = parameter.shape
            if transposed:
                outputs, inputs = inputs, outputs
            layer = adapted_layer(parameter.name)
            result.append(ParameterShape(layer + LORA_A, (lora.r, inputs)))
            result.append(ParameterShape(layer + LORA_B, (outputs, lora.r)))
    return tuple(result)


def _refuse_unfit(parameter: ParameterShape, siblings: Sequence[ParameterShape]) -> None:
    """Raise UserError for a matrix of a decoder layer or block that no adapter fits."""
    block = _block(parameter.name)
    if not block or len(parameter.shape) < 2:
        return
    # a recurrent mixer's convolution: small, as norms are
    if len(parameter.shape) == 3 and parameter.shape[1] == 1:
        return

    layer = adapted_layer(parameter.name)
    own = {p.name: p.shape for p in siblings if p.name.startswith(block)}
    has_own_bias = layer.endswith(".qkv") and f"{layer.removesuffix('qkv')}q_bias" in own
    stacks = [name for name, shape in own.items() if len(shape) > 2 and shape[1] > 1]
    experts = {name.rpartition(".")[0]: own[name][0] for name in stacks}  # how many each holds
    routers = {(module.rpartition(".")[0], count) for module, count in experts.items()}
    is_experts = parameter.name.rpartition(".")[0] in experts
    is_router = (layer.rpartition(".")[0], parameter.shape[0]) in routers
    if has_own_bias or is_experts or is_router:
        raise UserError(
            f"model.lora.targets: {layer} cannot have an adapter: "
            "it is all experts in one tensor, a router, or a qkv "
            "with a separate bias tensor. Name the layers beside it instead."
        )
