"""LoRA (arXiv:2106.09685) by peft, put into a slice of the LLM or the encoder; every draw a
function of (seed, name).

X: nn.Linear or Conv1D --peft--> X: its base_layer as it was, lora_A (r, in), lora_B (out, r): W x +
    (alpha / r) B A x

Adapters are stored in the type of what they stand in: in fp32, as peft makes them, every layer
would keep its input in fp32 besides. What they learn is kept by master weights, as with everything
that trains.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mmtrain.base.errors import UserError
from mmtrain.base.printing import first_few
from mmtrain.config.model import LoraSection
from mmtrain.facts.adapters import LORA_A, adapted_layer, is_target

_PEFT_NAME = "default"  # of the adapter; stands in the names of its parameters


def without_marks(name: str) -> str:
    """Drop what peft has put into a parameter's name: X.base_layer.weight,
    X.lora_A.default.weight.
    """
    return name.replace(".base_layer.", ".").replace(f".{_PEFT_NAME}.", ".")


@contextmanager
def refusing_unused(
    model: nn.Module,
    canonical_name: Callable[[str], str],
) -> Iterator[None]:
    """Raise UserError for a layer of `model` that has an adapter and is not called within this
    context.
    """
    unused = set()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if hasattr(module, "base_layer"):
                unused.add(name)
                hook = module.register_forward_hook(lambda *_, name=name: unused.discard(name))
                hooks.enter_context(hook)
        yield
    if unused:
        layers = sorted(adapted_layer(canonical_name(f"{name}.weight")) for name in unused)
        raise UserError(
            f"model.lora.targets: the model computes {first_few(layers, 3)} without a call of "
            "the layer, so an adapter there would train nothing. Name other layers"
        )


def add_adapters(
    model: nn.Module,
    lora: LoraSection | None,
    canonical_name: Callable[[str], str],
    seed: int,
) -> None:
    """Give the linear layers of `model` that `lora` names adapters that change nothing yet: B is
    zeros.

    `canonical_name` maps a parameter's name in `model` to its global one. Raises UserError for a
    layer that is not linear.
    """
    targets = {}
    for name, parameter in model.named_parameters():
        global_name = canonical_name(name)
        if is_target(global_name, tuple(parameter.shape), lora):
            targets[name.removesuffix(".weight")] = global_name.removesuffix(".weight")
    if not targets:  # the front or the head alone: peft refuses a model without any
        return
    # takes a second, and most runs have no adapters
    from peft import LoraConfig, inject_adapter_in_model

    layers = {name: model.get_submodule(name) for name in targets}
    for name, layer in layers.items():
        if type(layer) not in (nn.Linear, Conv1D):
            raise UserError(
                f"model.lora.targets: {targets[name]} is a {type(layer).__name__}, which no "
                "adapter fits. Name linear layers only"
            )
    # In a list, which has no `config`: in a MoE model itself peft adapts every layer whose last
    # name is a target's.
    pattern = r"0\.(?:" + "|".join(map(re.escape, targets)) + ")"
    described = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=pattern,
        fan_in_fan_out=any(type(layer) is Conv1D for layer in layers.values()),
    )
    with torch.random.fork_rng(devices=[]):  # what peft draws is drawn anew below
        inject_adapter_in_model(described, nn.ModuleList([model]))
    for name, layer in layers.items():
        _draw(model.get_submodule(name), layer.weight, f"{seed}/{targets[name]}{LORA_A}")
    model.eval()


def _draw(
    adapted: nn.Module,
    weight: torch.Tensor,
    key: str,
) -> None:
    """Set an adapter's start, a function of `key`, in the device and type of `weight`."""
    matrices = (adapted.lora_A[_PEFT_NAME], adapted.lora_B[_PEFT_NAME])
    starts = [torch.zeros(matrix.weight.shape) for matrix in matrices]
    bound = 1 / math.sqrt(starts[0].shape[1])
    starts[0].uniform_(-bound, bound, generator=generator_of(key))
    for matrix, start in zip(matrices, starts, strict=True):
        matrix.weight = nn.Parameter(start.to(weight.device, weight.dtype))


def generator_of(key: str) -> torch.Generator:
    """Make a random generator whose numbers are a function of `key` alone."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def merge_adapters(model: nn.Module) -> None:
    """Add adapters to the weights of their layers, in the weights' own type."""
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.merge()
