"""A vision encoder in stock code, whole or a slice: blocks [first, last), the others replaced by
bookends.

    images (N, 3, S, S) float32, normalised --stem, blocks 0 .. b-1--> hidden (N, T + prefix, W)
        --blocks b .. c-1--> hidden
        --blocks c .. n-1, last norm if asked for, prefix tokens dropped--> features (N, T, W)

An encoder that takes images of any size (`NativeTower`) has cells for images: those of one picture
are put together before the stem, and its features are taken apart again. Between slices they keep
the encoder's own order.

Every slice holds what stands around the blocks (patches, positions, norms; the stem), which is
small: behind the first slice it runs on zeros, in whose place the slice's first block takes what
was received.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.base.errors import UserError
from mmtrain.facts.chunks import tiles_per_call
from mmtrain.facts.encoders import ENCODER_BLOCK
from mmtrain.facts.vision_files import patches_per_image
from mmtrain.model.llm.bookends import Bookend
from mmtrain.model.llm.compiled import Compiler
from mmtrain.model.trained.lora import without_marks

Blocks = tuple[int, int]  # first, and the one behind the last
Grids = Sequence[tuple[int, int]]  # rows and columns of cells of each picture


class VisionTower(nn.Module):
    """Blocks [first, last) of an encoder, loaded frozen: all of the `depth` that run, or a slice of
    them.

    The first slice takes images (N, 3, S, S) float32, others hidden states (N, *hidden_shape) of
    the encoder's `dtype`. The last gives features (N, *feature_shape), others hidden states.
    """

    needs_grids = False

    def __init__(
        self,
        model: nn.Module,
        features: Callable[..., Tensor],
        width: int,
        image_size: int,
        patch_size: int,
        prefix_tokens: int,
        published: Callable[[str], str] = str,
        blocks: Blocks | None = None,
    ) -> None:
        """`features(model, images)` runs the encoder's own forward up to the selected block and
        drops prefix tokens.

        `published` maps a parameter's name in `model` to that in files. `model` has bookends for
        all but `blocks`.
        """
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.features = features
        self.published = published
        self.width = width
        self.image_size = image_size
        self.patches_per_image = patches_per_image(image_size, patch_size)
        self.depth = len(block_list(model))
        self.blocks = (0, self.depth) if blocks is None else blocks
        self.hidden_shape = (self.patches_per_image + prefix_tokens, width)
        self.feature_shape = (self.patches_per_image, width)

    @property
    def is_whole(self) -> bool:
        return self.blocks == (0, self.depth)

    @property
    def is_last(self) -> bool:
        return self.blocks[1] == self.depth

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def slice_of(self, first: int, last: int) -> VisionTower:
        """Copy blocks [first, last) of a whole encoder."""
        assert self.is_whole, self.blocks
        absent = {}
        for i, block in enumerate(block_list(self.model)):
            if not first <= i < last:
                absent[id(block)] = Bookend(block)
        part = copy.deepcopy(self, absent)
        part.blocks = (first, last)
        return part

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its global name; each slice has those outside the blocks."""
        for name, parameter in self.model.named_parameters():
            yield self.canonical_name(without_marks(name)), parameter

    def canonical_name(self, name: str) -> str:
        return f"vision.{self.published(name)}"

    def forward(self, taken: Tensor, grids: Grids = ()) -> Tensor:
        """Encode normalised images (N, 3, S, S), or hidden states (N, *hidden_shape), into features
        or hidden states.

        `grids` of pictures count for a `NativeTower` alone.
        """
        side = (3, self.image_size, self.image_size)
        if taken.ndim == len(side) + 1:
            # some encoders take other sizes
            assert taken.shape[1:] == side and self.blocks[0] == 0, (taken.shape, self.blocks)
            output = self._run(None, taken.to(self.dtype), grids)
        else:
            assert taken.shape[1:] == self.hidden_shape, (taken.shape, self.hidden_shape)
            zeros = taken.new_zeros(1, 1, 1, 1).expand(len(taken), *side)
            output = self._run(taken, zeros, grids)
        of_tile = self.feature_shape if self.is_last else self.hidden_shape
        expected = (len(taken), *of_tile)
        assert output.shape == expected and output.dtype == self.dtype, (
            output.shape,
            expected,
            output.dtype,
        )
        return output

    def _run(
        self,
        hidden: Tensor | None,
        images: Tensor,
        grids: Grids,
    ) -> Tensor:
        """Run the encoder once on N images, or on zeros in whose place `hidden` enters the slice's
        first block.
        """
        if hidden is not None:
            images = images[:1]
        return self._call(hidden, images)

    def _call(self, hidden: Tensor | None, *images: Any) -> Tensor:
        """Return `features(model, *images)`, or what a slice before the last hands on, in the
        encoder's own order.
        """
        first, last = self.blocks
        blocks = block_list(self.model)
        handles = []

        def hand_in(
            _: nn.Module,
            arguments: tuple[Any, ...],
        ) -> tuple[Any, ...]:
            """Replace what the stem made."""
            made, *others = arguments
            return (self._handed_in(hidden, made), *others)

        if hidden is not None:
            handles.append(blocks[first].register_forward_pre_hook(hand_in))
        try:
            output = self.features(self.model, *images)
            if not self.is_last:
                output = blocks[last].handed_out
        finally:  # else these hidden states would stay alive, or enter the next call after an error
            for handle in handles:
                handle.remove()
            for block in blocks:
                if isinstance(block, Bookend):
                    block.handed_out = None
        return output

    def _handed_in(self, hidden: Tensor, made: Tensor) -> Tensor:
        """Return received hidden states in the shape of those that the stem `made`."""
        return hidden

    def compile_blocks(self, compiler: Compiler) -> None:
        """Let `compiler` choose how the blocks of a frozen encoder run."""
        for block in block_list(self.model)[slice(*self.blocks)]:
            block.forward = compiler.around(block, differentiable=False)

    def groups(
        self,
        tiles: int,
        grids: Grids,
    ) -> list[tuple[int, Grids]]:
        """Split `tiles` into those of each call, with their pictures' grids."""
        at_once = tiles_per_call(self.patches_per_image)
        return [(min(at_once, tiles - begin), ()) for begin in range(0, tiles, at_once)]

    @torch.no_grad()
    def in_groups(
        self,
        taken: Tensor,
        prepared: Callable[[Tensor], Tensor] = lambda part: part,
        grids: Grids = (),
    ) -> Tensor:
        """Run N tiles' images or hidden states without a graph, a group at a time; contiguous.

        Groups and strides are those of every other slice: they decide which kernels run, and so the
        bits. `prepared` makes the input of a group.
        """
        groups = self.groups(len(taken), grids)
        sizes = [tiles for tiles, _ in groups]
        parts = taken.split(sizes)
        output = self(prepared(parts[0]), groups[0][1])
        if len(groups) == 1:
            return output.contiguous()
        outputs = output.new_empty(len(taken), *output.shape[1:])
        outputs[: len(output)] = output
        del output  # else it lives while the others are made
        rest = zip(parts[1:], outputs.split(sizes)[1:], groups[1:], strict=True)
        for part, room, (_, of_part) in rest:
            room.copy_(self(prepared(part), of_part))
        return outputs


def block_list(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    """Return an encoder's blocks, absent ones included; raises UserError without any."""
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.Sequential | nn.ModuleList)
        if is_list and ENCODER_BLOCK.match(f"vision.{name}.0."):
            return module
    raise UserError(
        f"model.vision.name: the blocks of a {type(model).__name__} are not in one known list. "
        "Use a ViT"
    )


def drop_other_blocks(model: nn.Module, held: Blocks | None) -> None:
    """Put bookends in the places of all of an encoder's blocks but `held`; None: keep all."""
    if held is None:
        return
    first, last = held
    blocks = block_list(model)
    assert 0 <= first <= last <= len(blocks), (first, last, len(blocks))
    for i, block in enumerate(blocks):
        if not first <= i < last:
            blocks[i] = Bookend(block)


def slices_difference(
    whole: VisionTower,
    cuts: Sequence[int],
    images: Tensor,
    grids: Grids = (),
) -> float:
    """Return the largest difference between features by slices with borders `cuts` and by the whole
    encoder; never NaN.
    """
    expected = whole.in_groups(images, grids=grids)
    taken = images
    for first, last in pairwise(cuts):
        taken = whole.slice_of(first, last).in_groups(taken, grids=grids)
    if torch.equal(taken, expected):
        return 0.0
    difference = float((taken.double() - expected.double()).abs().max())
    if math.isnan(difference):
        return math.inf
    return difference
