"""Which frozen decoder layers a rank fetches before they compute, in which order, and how often.

A rank's instructions --uses_of--> the streamed layers that they use, in order --fetches_of--> those that are fetched

A **streamed** layer is whole on the device only while it computes, and right before that. Two layers are whole at once
at most: the one that computes and the next other one, which is fetched meanwhile. What is used again soon enough stays:
a forward that ends with layers 7, 8 and a backward that begins with 8, 7 fetch these two once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mmtrain.plan.instructions import Instruction, Op

WHOLE_AT_ONCE = 2
"""Streamed layers of a rank."""
ALIGNMENT = 512
"""Bytes: each parameter of a streamed layer begins at a multiple, as what CUDA's allocator gives does."""


def offsets_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where parameters of so many bytes begin in the one buffer of their layer, and the bytes of that."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def uses_of(
    instructions: Iterable[Instruction], streamed: Mapping[int, Sequence[int]], first_trainable_layer: int
) -> list[int]:
    """The streamed decoder layers that a rank's list uses, in its order; `streamed`: those of each of its stages.

    Decoder layers from `first_trainable_layer` on run backward (see `Plan`).
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
    """Each use with the next other layer that is used behind it, which is fetched while it computes."""
    following: int | None = None
    found: list[tuple[int, int | None]] = []
    for i in range(len(uses) - 1, -1, -1):
        if i + 1 < len(uses) and uses[i + 1] != uses[i]:
            following = uses[i + 1]
        found.append((uses[i], following))
    return reversed(found)


def fetches_of(uses: Sequence[int]) -> list[int]:
    """The layers that a list fetches which begins and ends with no layer whole, in order."""
    whole: set[int] = set()
    found: list[int] = []
    for pair in with_following(uses):
        wanted = {layer: None for layer in pair if layer is not None}
        found += [layer for layer in wanted if layer not in whole]
        whole = set(wanted)
    return found
