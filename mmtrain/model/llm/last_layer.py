"""The last decoder layer for the tokens whose output is used: the supervised ones, often one in
five.

    hidden (B, L, D) --stock layer as far as its cache--> keys and values of all tokens
    rows (S,) of hidden --stock layer, given these keys and values--> (1, S, D)

The layer's own code runs twice: a stand-in for its cache takes the keys and values out of the first
run, where queries are not projected, and hands them to the second, where keys and values are not. A
trainable layer's gradients are exact. Which families this is right for is measured
(`parity.takes_rows`).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmtrain.base.devices import copied
from mmtrain.model.llm.attention import Documents

# Names in decoder layers, over all families.
CACHE_ARGUMENTS = ("past_key_values", "layer_past")
# one that makes queries, keys and values in one is not left out
QUERY_PROJECTIONS = ("q_proj", "q_b_proj")
KEY_PROJECTIONS = ("k_proj", "v_proj")

Forward = Callable[..., Any]


def recomputing(forward: Forward) -> Forward:
    """Wrap a forward so that it saves its inputs alone and runs once more in backward; works in
    eval mode.
    """
    return functools.partial(
        checkpoint,
        forward,
        use_reentrant=False,
        preserve_rng_state=False,
    )


def states_of(result: Any) -> Tensor:
    """Return the hidden states of a layer's result, which are alone or first of several."""
    if isinstance(result, tuple):
        return result[0]
    return result


class Rows:
    """Rising places (S,) int64 of tokens in rows laid end to end, on the model's device and on the
    CPU.
    """

    def __init__(self, places: Tensor, device: torch.device) -> None:
        self.places = copied(places, device)
        self.on_host = places.cpu()

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Select the tokens of (B, L, ...) as (1, S, ...), on the tensor's device."""
        places = self.places
        if tensor.device != places.device:
            places = self.on_host
        return tensor.flatten(0, 1).index_select(0, places)[None]


class LastLayer:
    """A stock decoder layer's `forward` for all tokens, or for those of `rows` while it is set."""

    def __init__(self, layer: nn.Module, *, recompute: bool) -> None:
        queries = _named(layer, QUERY_PROJECTIONS)
        keys = _named(layer, KEY_PROJECTIONS)
        self.whole = layer.forward
        self.on_rows = functools.partial(run_on_rows, layer.forward, queries, keys)
        if recompute:
            self.whole = recomputing(self.whole)
            self.on_rows = recomputing(self.on_rows)
        self.rows: Rows | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the stock layer returns; with `rows`, hidden states are (1, S, D)."""
        if self.rows is None:
            return self.whole(*arguments, **options)
        # an argument: recomputation gets those of its own batch
        return self.on_rows(self.rows, *arguments, **options)


def _named(layer: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return [module for name, module in layer.named_modules() if name.split(".")[-1] in names]


def run_on_rows(
    forward: Forward,
    query_projections: Sequence[nn.Module],
    key_projections: Sequence[nn.Module],
    rows: Rows,
    hidden: Tensor,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Run a stock decoder layer's `forward` of `hidden` (B, L, D) for the tokens of `rows` alone.

    What the stock model's arguments hold for each token is cut to `rows`. Raises TypeError for a
    layer without a cache.
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

    def of_rows(value: Tensor | Documents) -> Tensor | Documents:
        if isinstance(value, Documents):
            return value.at(rows.on_host)
        return rows.of_tensor(value.expand(of_all[0], *value.shape[1:]))

    call.arguments.update(map_tokens(call.arguments, of_all, of_rows))
    call.arguments[name] = _Cache(*keys_and_values)
    with _giving_zeros(key_projections):
        return forward(*call.args, **call.kwargs)


@contextlib.contextmanager
def _giving_zeros(projections: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear layers with unused results give zeros within this context, without a matrix
    product.
    """
    linear = []
    for module in projections:
        if type(module) is nn.Linear or hasattr(module, "base_layer"):
            module.forward = functools.partial(_zeros, module.out_features)
            linear.append(module)
    try:
        yield
    finally:
        for module in linear:
            del module.forward


def _zeros(width: int, rows: Tensor) -> Tensor:
    return rows.new_zeros(()).expand(*rows.shape[:-1], width)


def map_tokens(
    value: Any,
    of_all: tuple[int, int],
    change: Callable[[Any], Any],
) -> Any:
    """Apply `change` to Documents and to each tensor for all tokens (B, L), `of_all`, in a layer's
    argument.
    """
    if isinstance(value, Documents):
        return change(value)
    if isinstance(value, Tensor) and tuple(value.shape[:2]) in (of_all, (1, of_all[1])):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tokens(part, of_all, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tokens(part, of_all, change) for part in value)
    return value


class _CacheReached(Exception):  # noqa: N818 - no error
    """Leaves a layer's forward with its keys and values as arguments."""


class _Cache:
    """A cache that leaves the layer with its keys and values, or returns those that it holds."""

    def __init__(self, *keys_and_values: Tensor) -> None:
        self._keys_and_values = keys_and_values

    def update(
        self,
        key: Tensor,
        value: Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, ...]:
        if not self._keys_and_values:
            raise _CacheReached(key, value)
        return self._keys_and_values
