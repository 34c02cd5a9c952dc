"""Recurrent layers in packs: modules that mix tokens without attention run document by document.

    hidden (B, L, D) of packed rows --documents of one length--> (n, length, D) --stock mixer-->
        results --> (B, L, D)
    on a GPU with kernels that take borders: hidden (1, B * L, D), seq_idx, cu_seq_lens_q --stock
        mixer--> (B, L, D)

Gated delta rules, Mamba and short convolutions carry state from each token to the next. In a pack
the stock module would carry it from one document into the next, which no mask forbids. A mixer is
recognised by its code: its forward takes a cache, and it calls neither transformers' attention
functions nor softmax.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.base.devices import copied
from mmtrain.base.printing import escape
from mmtrain.model.llm.attention import Documents, NoPadding
from mmtrain.model.llm.kernels import Backend, note_backend
from mmtrain.model.llm.last_layer import (
    CACHE_ARGUMENTS,
    Forward,
    map_tokens,
    recomputing,
    states_of,
)

_CACHES = {*CACHE_ARGUMENTS, "cache_params"}
_ATTENTION = {"ALL_ATTENTION_FUNCTIONS", "softmax"}  # what the code of attention calls
_TRIED = (13, 1, 40, 6)  # tokens of the documents on which kernels are compared with the loop
# relative; rounding in bf16 is a few hundredths at most, a leak changes results by far more
AGREEMENT = 0.1


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a decoder layer that mix its tokens without attention, outermost ones
    alone.
    """
    mixers = []
    inside = set()
    for module in list(layer.modules())[1:]:
        stock = inspect.unwrap(type(module).forward)
        takes_cache = not _CACHES.isdisjoint(inspect.signature(stock).parameters)
        if takes_cache and module not in inside and _ATTENTION.isdisjoint(stock.__code__.co_names):
            mixers.append(module)
            inside.update(module.modules())
    return mixers


@dataclass(frozen=True, eq=False)
class Sequences:
    """Documents of packed rows (B, L) laid end to end, those of one length side by side."""

    shape: tuple[int, int]
    # (length, places (n * length,) int64 on the device)
    groups: tuple[tuple[int, Tensor], ...]
    # (B * L,), on the device: places of tokens in the groups; None: they are in order
    inverse: Tensor | None
    # of the documents, as kernels take them, under transformers' names
    borders: dict[str, Tensor]

    @classmethod
    def of_positions(
        cls,
        position_ids: Tensor,
        device: torch.device | str,
    ) -> Sequences:
        """Find the documents where `position_ids` (B, L) do not go on, and at the beginning of each
        row.
        """
        positions = position_ids.cpu()
        begins = torch.ones(positions.shape, dtype=torch.bool)
        begins[:, 1:] = positions.diff() != 1
        firsts = begins.flatten().nonzero().flatten()
        lengths = torch.cat([firsts, torch.tensor([positions.numel()])]).diff()
        of_length = defaultdict(list)
        for begin, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            of_length[length].append(begin)

        groups = []
        in_groups = []
        for length, of in of_length.items():
            places = (torch.tensor(of)[:, None] + torch.arange(length)).flatten()
            in_groups.append(places)
            groups.append((length, copied(places, device)))
        inverse = None
        if len(groups) > 1:
            inverse = copied(torch.cat(in_groups).argsort(), device)

        numbers = torch.repeat_interleave(lengths)[None]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        borders = {
            "cu_seq_lens_q": copied(offsets.int(), device),
            "seq_idx": copied(numbers.int(), device),
        }
        return cls(tuple(positions.shape), tuple(groups), inverse, borders)


_SEQUENCES: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


@contextmanager
def running_on(sequences: Sequences | None) -> Iterator[None]:
    """Let mixers keep these documents apart within this context."""
    token = _SEQUENCES.set(sequences)
    try:
        yield
    finally:
        _SEQUENCES.reset(token)


def recomputing_on_documents(forward: Forward) -> Forward:
    """Wrap a decoder layer's forward as `recomputing` does, so that its mixers see the same
    documents in backward.
    """

    def run(
        sequences: Sequences | None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        with running_on(sequences):
            return forward(*arguments, **options)

    recomputed = recomputing(run)
    return lambda *arguments, **options: recomputed(_SEQUENCES.get(), *arguments, **options)


class ByDocument:
    """The forward of a stock mixer that keeps the documents of `running_on` apart; results are (B,
    L, D).

    The first call on a GPU compares the library's kernels with the loop. In a layer that is
    recomputed this would end in torch's CheckpointError, so a stage runs once when it is built
    (`Stage.try_out`).
    """

    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward
        self._signature = inspect.signature(mixer.forward)
        self._backend: Backend | None = None

    @torch.compiler.disable
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        sequences = _SEQUENCES.get()
        assert sequences is not None, "a mixer was called without its documents"
        call = self._signature.bind(*arguments, **options)
        if self._backend is None:
            self._backend = self._choose(next(iter(call.arguments.values())))
        note_backend(self._backend)
        if self._backend.reason is None:
            return self._in_one_call(call, sequences)
        return self._loop(call, sequences)

    def _loop(
        self,
        call: inspect.BoundArguments,
        sequences: Sequences,
    ) -> Any:
        results = []
        for length, places in sequences.groups:

            def chosen(
                tokens: Tensor,
                length: int = length,
                places: Tensor = places,
            ) -> Tensor:
                if sequences.inverse is not None:
                    tokens = tokens.index_select(0, places)
                return tokens.unflatten(0, (-1, length))

            results.append(self._run(call, sequences, chosen))
        hidden = [states_of(result).flatten(0, 1) for result in results]
        joined = hidden[0]
        if sequences.inverse is not None:
            joined = torch.cat(hidden).index_select(0, sequences.inverse)
        return _like(results[0], joined.unflatten(0, sequences.shape))

    def _in_one_call(
        self,
        call: inspect.BoundArguments,
        sequences: Sequences,
    ) -> Any:
        result = self._run(
            call,
            sequences,
            lambda tokens: tokens[None],
            **sequences.borders,
        )
        return _like(result, states_of(result)[0].unflatten(0, sequences.shape))

    def _run(
        self,
        call: inspect.BoundArguments,
        sequences: Sequences,
        chosen: Callable[[Tensor], Tensor],
        **borders: Tensor,
    ) -> Any:
        """Run the stock forward on what `chosen` makes of each argument for all tokens, (B * L,
        ...).
        """

        def of_call(value: Tensor | Documents) -> Tensor | None:
            if isinstance(value, (Documents, NoPadding)):
                return None  # within a document no token is hidden
            return chosen(value.expand(sequences.shape[0], *value.shape[1:]).flatten(0, 1))

        arguments = map_tokens(call.arguments, sequences.shape, of_call)
        own = inspect.BoundArguments(call.signature, arguments)
        return self._forward(*own.args, **own.kwargs, **borders)

    def _choose(self, hidden: Tensor) -> Backend:
        layers = "recurrent layers"
        if not hidden.is_cuda:
            return Backend(layers, "document", "kernels that take borders need a GPU")
        reason = self.reason_against_kernels(hidden)
        if reason is None:
            return Backend(layers, "library")
        return Backend(layers, "document", reason, slow=True)

    @torch.enable_grad()
    def reason_against_kernels(self, hidden: Tensor) -> str | None:
        """Compare the library's kernels, given documents' borders, with the loop; None if both are
        alike.

        Compares results and input gradients in the type of `hidden` (B, L, D), on documents so
        short that a leak shows.
        """
        generator = torch.Generator(hidden.device).manual_seed(0)
        inputs, upstream = torch.randn(
            2,
            1,
            sum(_TRIED),
            hidden.shape[-1],
            generator=generator,
            device=hidden.device,
        )
        inputs = inputs.to(hidden.dtype).requires_grad_()
        positions = torch.cat([torch.arange(length) for length in _TRIED])[None]
        sequences = Sequences.of_positions(positions, hidden.device)
        accepted = self._signature.parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
        if "seq_idx" not in accepted and not takes_any:
            return "transformers' code of this layer takes no borders of documents"
        try:
            call = self._signature.bind(inputs)
        except TypeError:
            return "kernels are compared on hidden states alone, and this layer needs more"

        def outcome(result: Any) -> Tensor:
            states = states_of(result)
            (gradient,) = torch.autograd.grad(states, inputs, upstream.to(states.dtype))
            return torch.stack([states, gradient])

        try:
            expected = outcome(self._loop(call, sequences))
            ours = outcome(self._in_one_call(call, sequences))
            leaking = outcome(self._forward(inputs))
        except Exception as error:  # kernels of foreign libraries raise what they like
            return escape(str(error).strip().partition("\n")[0], 200) or type(error).__name__
        if not _differ(ours, expected) and _differ(leaking, expected):
            return None
        return (
            "the kernels found here mix documents. "
            "Install causal-conv1d with flash-linear-attention or mamba-ssm"
        )


def _differ(result: Tensor, expected: Tensor) -> bool:
    gaps = (result - expected).float().abs().amax((1, 2, 3))
    most = expected.float().abs().amax((1, 2, 3))
    return not bool((gaps <= AGREEMENT * most).all())


def _like(result: Any, hidden: Tensor) -> Any:
    """Return `hidden` as a mixer returns it."""
    return (hidden, *result[1:]) if isinstance(result, tuple) else hidden
