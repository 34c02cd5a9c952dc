"""Streamed layers: which frozen decoder layers a rank fetches, in which order, and how long it waits for them.

a rank's instructions --uses_of--> the streamed layers that they use, in order --fetches_of--> those that are fetched

A **streamed** layer is whole on the device only right before and while it computes. At most two layers are whole at
once: the one that computes, and the next one, which is fetched meanwhile. A layer that is used again soon stays: a
forward that ends with layers 7, 8 and a backward that begins with 8, 7 fetch these two once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mmtrain.plan.instructions import Instruction, Op

WHOLE_AT_ONCE = 2
"""Streamed layers of a rank."""
ALIGNMENT = 512
"""Bytes: each parameter of a streamed layer begins at a multiple, as memory from CUDA's allocator does."""
BOTH_ENDS = 2
"""Fetches saved by a compute whose neighbours on its rank run its stage in the other direction: one at each end."""


def offsets_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where parameters of these sizes begin in the buffer of their layer, and the buffer's bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def uses_of(
    instructions: Iterable[Instruction], streamed: Mapping[int, Sequence[int]], first_trainable_layer: int
) -> list[int]:
    """Return the streamed decoder layers that a rank's list uses, in order; `streamed` has those of each stage.

    Decoder layers from `first_trainable_layer` on run backward.
    """
    uses: list[int] = []
    for x in instructions:
        layers = streamed.get(x.stage, ())
        if x.op is Op.FORWARD:
            uses += layers
        elif x.op is Op.BACKWARD:
            uses += [layer for layer in reversed(layers) if layer >= first_trainable_layer]
    return uses


def with_following(uses: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Yield each used layer with the next other one, which is fetched while the first computes."""
    following: int | None = None
    pairs: list[tuple[int, int | None]] = []
    for i in range(len(uses) - 1, -1, -1):
        if i + 1 < len(uses) and uses[i + 1] != uses[i]:
            following = uses[i + 1]
        pairs.append((uses[i], following))
    return reversed(pairs)


def fetches_of(uses: Sequence[int]) -> list[int]:
    """Return the layers that are fetched for these uses, in order, if no layer is whole before and after them."""
    whole: set[int] = set()
    fetches: list[int] = []
    for pair in with_following(uses):
        wanted = {layer: None for layer in pair if layer is not None}
        fetches += [layer for layer in wanted if layer not in whole]
        whole = set(wanted)
    return fetches


class Waits(NamedTuple):
    """How long a FORWARD or BACKWARD of one micro-batch waits for fetches."""

    fetches: int  # if its neighbours on the rank use none of its layers
    each: float  # seconds by which a fetch takes longer than the computing that it hides behind
    share: float = 0.0  # seconds of all fetches over those of the decoder layers that they hide behind

    def seconds(self, spared: int = BOTH_ENDS) -> float:
        """Seconds of waiting for all fetches but `spared`."""
        return max(0, self.fetches - spared) * self.each


NO_WAITS = Waits(0, 0.0)


def waits_of(fetches: int, fetch_seconds: float, compute_seconds: float) -> Waits:
    """Return the waits of a stage that fetches `fetches` layers while its decoder layers compute `compute_seconds`.

    The fetch of the next layer begins when a layer begins to compute. Streamed layers are spread evenly, so each fetch
    has the same share of the computing to hide behind.
    """
    if not fetches:
        return NO_WAITS
    share = fetches * fetch_seconds / compute_seconds if compute_seconds else 0.0
    return Waits(fetches, max(0.0, fetch_seconds - compute_seconds / fetches), share)


def spread(count: int, of: int) -> list[int]:
    """Return `count` of `of` places, evenly spread, with as much room before the first as behind the last."""
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]
