"""Stand-ins in a stock causal LM for modules that another stage holds, and in an encoder's slice.

    layers  0 .. first-2   first-1    first .. last-1      last       last+1 .. N-1
            Bookend        Bookend    stock decoder layers Bookend    Bookend
                           hands in                        hands out

The stock forward runs over the whole list as ever: the bookend before the slice returns the hidden
states that this stage received, whatever came before, and the one after it keeps the slice's
result.
"""

import dis
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmtrain.base.errors import UserError
from mmtrain.facts.families import canonical_name


class Bookend(nn.Module):
    """A stand-in for a layer or block of another rank: passes on, hands in or hands out hidden
    states.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.hand_in = self.handed_out = None
        # bamba's and falcon_h1's layers return a tuple, which their models take apart.
        steps = itertools.pairwise(dis.get_instructions(inspect.unwrap(type(layer).forward)))
        self._behind = None
        for one, after in steps:
            if (one.opname, after.opname) == ("BUILD_TUPLE", "RETURN_VALUE"):
                self._behind = (None,) * (one.arg - 1)
        # Some models ask a layer for its kind before they call it (`decoder_layer.attention_type`).
        copy_settings(layer, self)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor | tuple[Any, ...]:
        self.handed_out = hidden_states
        if self.hand_in is not None:
            hidden_states = self.hand_in
        if self._behind is None:
            return hidden_states
        return (hidden_states, *self._behind)


class AbsentEmbedding(nn.Module):
    """A stand-in for learned position embeddings behind decoder layer 0, where their sum is thrown
    away.
    """

    def forward(
        self,
        given: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        # a zero of the host would be copied, and the host would wait
        return torch.zeros((), device=given.device)


def copy_settings(module: nn.Module, replacement: nn.Module) -> None:
    """Give a replacement the numbers and texts that a module's attributes hold, which its model may
    ask for.
    """
    for name, attribute in vars(module).items():
        is_setting = not name.startswith("_") and name != "training"
        if is_setting and isinstance(attribute, (str, int, float)):
            setattr(replacement, name, attribute)


def decoder_path(model: PreTrainedModel) -> tuple[str, str]:
    """Return the path of the module that runs a stock causal LM's decoder layers, and its name for
    their list.

    ("model", "layers") for llama, ("transformer", "h") for gpt2. Raises UserError where there is no
    list.
    """
    for name, module in model.named_modules():
        first = canonical_name(f"{name}.0.weight")
        if isinstance(module, nn.ModuleList) and first == "llm.layers.0.weight":
            path, _, layers = name.rpartition(".")
            return path, layers
    raise UserError(
        f"{model.config.model_type} cannot be staged: its decoder layers are not in one known list"
    )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.get_submodule(".".join(decoder_path(model)))


def absent_modules(
    model: PreTrainedModel,
    first: int,
    last: int,
    *,
    embedding: bool,
    head: bool,
) -> dict[nn.Module, nn.Module]:
    """Map every module that a slice of decoder layers [first, last) does not hold to what takes its
    place.

    Raises UserError for a family with parameters outside its decoder layers that more than one
    stage would need.
    """
    absent = {}
    for i, layer in enumerate(decoder_layers(model)):
        if not first <= i < last:
            absent[layer] = Bookend(layer)
    if not embedding:
        absent[model.get_input_embeddings()] = nn.Identity()
    if not head:
        absent[model.get_output_embeddings()] = nn.Identity()
        for name, module in model.named_modules():
            if canonical_name(f"{name}.weight") == "llm.norm.weight":
                absent[module] = nn.Identity()
    if holds_layer_0(first, last):
        return absent
    for name, module in model.named_modules():
        part = canonical_name(f"{name}.weight").split(".")[1]
        is_empty = not list(module.parameters(recurse=False))
        if is_empty or part in ("layers", "embedding", "norm", "head"):
            continue
        if not isinstance(module, nn.Embedding):
            raise UserError(
                f"{model.config.model_type} cannot be staged: every stage would need its {name}"
            )
        absent[module] = AbsentEmbedding()
    return absent


def holds_layer_0(first: int, last: int) -> bool:
    """Whether decoder layer 0, and with it learned position embeddings, is in [first, last)."""
    return first == 0 and last > 0


def replace(
    model: nn.Module,
    module: nn.Module,
    replacement: nn.Module,
) -> None:
    name = next(name for name, child in model.named_modules() if child is module)
    model.set_submodule(name, replacement)
