"""The last decoder layer for the tokens whose output is used: the supervised ones, often one in five.

    hidden (B, L, D) --stock layer as far as its cache--> keys and values of all tokens
    rows (S,) of hidden --stock layer, given these keys and values--> (1, S, D)

The layer's own code runs twice: a stand-in for its cache takes the keys and values out of the first run, where queries
are not projected, and hands them to the second, where keys and values are not. A trainable layer's gradients are exact.
Which families this is right for is measured (`parity.takes_rows`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmtrain.base.devices import copied
from mmtrain.model.llm.attention import Documents

# Names in decoder layers, over all families.
CACHE_ARGUMENTS = ("past_key_values", "layer_past")
QUERY_PROJECTIONS = ("q_proj", "q_b_proj")  # one that makes queries, keys and values in one is not left out
KEY_PROJECTIONS = ("k_proj", "v_proj")

Forward = Callable[..., Any]


def recomputing(forward: Forward) -> Forward:
    """Wrap a forward so that it saves its inputs alone and runs once more in backward; works in eval mode."""
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


class Rows:
    """Rising places (S,) int64 of tokens in rows laid end to end, on the model's device and on the CPU."""

    def __init__(self, places: torch.Tensor, device: torch.device) -> None:
        self.places, self.on_host = copied(places, device), places.cpu()

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) -> (1, S, ...), on the tensor's device."""
        places = self.places if tensor.device == self.places.device else self.on_host
        return tensor.flatten(0, 1).index_select(0, places)[None]


class LastLayer:
    """A stock decoder layer's `forward` for all tokens, or for those of `rows` while it is set."""

    def __init__(self, layer: nn.Module, *, recompute: bool) -> None:
        queries, keys = (
            [module for name, module in layer.named_modules() if name.split(".")[-1] in names]
            for names in (QUERY_PROJECTIONS, KEY_PROJECTIONS)
        )
        on_rows = functools.partial(run_on_rows, layer.forward, queries, keys)
        self.whole = recomputing(layer.forward) if recompute else layer.forward
        self.on_rows = recomputing(on_rows) if recompute else on_rows
        self.rows: Rows | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the stock layer returns; with `rows`, hidden states are (1, S, D)."""
        if self.rows is None:
            return self.whole(*arguments, **options)
        return self.on_rows(self.rows, *arguments, **options)  # an argument: recomputation gets those of its own batch


def run_on_rows(
    forward: Forward,
    query_projections: Sequence[nn.Module],
    key_projections: Sequence[nn.Module],
    rows: Rows,
    hidden: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Run a stock decoder layer's `forward` of `hidden` (B, L, D) for the tokens of `rows` alone.

    What the stock model's arguments hold for each token is cut to `rows`. Raises TypeError for a layer without a cache.
    """
    call = inspect.signature(forward).bind(hidden, *arguments, **options)
    name = next((name for name in CACHE_ARGUMENTS if name in call.signature.parameters), None)
    if name is None:
        raise TypeError(f"{inspect.unwrap(forward)} has no argument for a cache")
    call.arguments[name] = _Cache()
    try:
        with _giving_zeros(query_projections):
            forward(*call.args, **call.kwargs)
        raise TypeError(f"{inspect.unwrap(forward)} does not use its cache")
    except _CacheReached as reached:
        keys_and_values = reached.args
    of_all = tuple(hidden.shape[:2])

    def of_rows(value: torch.Tensor | Documents) -> torch.Tensor | Documents:
        if isinstance(value, Documents):
            return value.at(rows.on_host)
        return rows.of_tensor(value.expand(of_all[0], *value.shape[1:]))

    call.arguments.update({name: map_tokens(value, of_all, of_rows) for name, value in call.arguments.items()})
    call.arguments[name] = _Cache(*keys_and_values)
    with _giving_zeros(key_projections):
        return forward(*call.args, **call.kwargs)


@contextlib.contextmanager
def _giving_zeros(projections: Sequence[nn.Module]) -> Iterator[None]:
    """Within this context linear layers whose results are not used give zeros, without a matrix product."""
    linear = [module for module in projections if type(module) is nn.Linear or hasattr(module, "base_layer")]
    for module in linear:
        module.forward = functools.partial(_zeros, module.out_features)
    try:
        yield
    finally:
        for module in linear:
            del module.forward


def _zeros(width: int, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(()).expand(*rows.shape[:-1], width)


def map_tokens(value: Any, of_all: tuple[int, int], change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each tensor for all tokens (B, L), `of_all`, and to Documents in an argument of a layer."""
    if isinstance(value, Documents):
        return change(value)
    if isinstance(value, torch.Tensor):
        return change(value) if tuple(value.shape[:2]) in (of_all, (1, of_all[1])) else value
    if isinstance(value, dict):
        return {key: map_tokens(part, of_all, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tokens(part, of_all, change) for part in value)
    return value


class _CacheReached(Exception):  # noqa: N818 - no error
    """Leaves a layer's forward with its keys and values as arguments."""


class _Cache:
    """A cache that leaves the layer with its keys and values, or returns those that it holds."""

    def __init__(self, *keys_and_values: torch.Tensor) -> None:
        self._keys_and_values = keys_and_values

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        if not self._keys_and_values:
            raise _CacheReached(key, value)
        return self._keys_and_values
