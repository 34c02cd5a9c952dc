"""What the vision encoder costs, per micro-batch: of the whole, of one block, and of what stands around its blocks.

A frozen encoder may be cut into slices of whole blocks (`StagePlan.encoder`). Its blocks are alike, so that what a
slice costs follows from how many it has. The stem is all else: patches, positions, the norm behind the last block.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from mmtrain.plan.block_costs import Block, Flops, Part, block_parts, total
from mmtrain.plan.workload import FP32, INTEGER, Workload, tiles_per_call
from mmtrain.pretrained.encoders import ENCODER_BLOCK
from mmtrain.pretrained.shapes import ParameterShape, VisionShape


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """The vision encoder's forward, an instruction of its own, and its weights; all 0 in a run without images."""

    forward: int  # FLOPs of all of it: of the stem and `blocks` times `block_forward`
    frozen: bool  # else it belongs to the step, is not prefetched, and is whole on stage 0
    working_bytes: int  # of one ENCODE: tiles go through all slices in the same groups
    feature_bytes: int  # what a micro-batch's features take until its forward
    batch_bytes: int  # what a loaded micro-batch takes until its forward, pixels left out
    pixel_bytes: int = 0  # of a loaded micro-batch, until it is encoded
    in_fp32: bool = False
    blocks: int = 0  # that run
    block_forward: int = 0  # FLOPs of one
    block_bytes: int = 0  # weights of one; 0 if the encoder trains: its weights are the front layer's
    stem_bytes: int = 0  # weights of all else, which every slice holds; 0 likewise
    hidden_bytes: int = 0  # what a micro-batch's tiles are between two slices; features are less by prefix tokens
    stem_working_bytes: int | None = None  # of an ENCODE of a first slice without blocks, where that is known
    later_working_bytes: int | None = None  # of a slice behind the first, likewise

    @property
    def stem_forward(self) -> int:
        """FLOPs of what is outside the blocks, which the first slice runs."""
        return self.forward - self.blocks * self.block_forward

    def working_of(self, blocks: int, *, first: bool) -> int:
        """Of one ENCODE of a slice with so many blocks, the first or a later one; where unknown, as the whole one's."""
        found: int | None = self.working_bytes
        if not first:
            found = self.later_working_bytes
        elif blocks == 0:
            found = self.stem_working_bytes
        return self.working_bytes if found is None else found


@dataclass(frozen=True, slots=True)
class EncoderBackward:
    """What an encoder adds to the front's backward; nothing if it is frozen."""

    flops: Flops = field(default_factory=Flops)
    kept_bytes: int = 0
    working_bytes: int = 0


def encoder_costs(
    vision: VisionShape, trained: Collection[str], work: Workload, size: int
) -> tuple[EncoderCost, EncoderBackward]:
    """The encoder's costs, stored in `size` bytes an element; parameters named in `trained` train."""
    tokens = work.tiles * (vision.patches_per_image + vision.prefix_tokens)
    flops, kept, upstream, in_blocks = Flops(), 0, False, 0
    for parts, is_block in _parts(vision, trained, tokens, work.tiles * vision.patches_per_image, size):
        flops_here, kept_here = total(parts, upstream)
        flops, kept = flops + flops_here, kept + kept_here
        in_blocks += flops_here.forward * is_block
        upstream = upstream or any(part.trained for part in parts)
    pixels = round(3 * vision.image_size**2 * work.tiles)
    features = round(work.tiles * vision.patches_per_image * vision.width) * size
    at_once = 1.0  # share of the tiles
    if work.tiles and not upstream:
        at_once = min(1.0, tiles_per_call(vision.patches_per_image) / work.tiles)
    # While a block runs: residual, normed, query, key, value, result, and the MLP's inner width (4x) twice.
    block_working = round(14 * vision.width * tokens * at_once) * size
    working = round(pixels * at_once) * FP32 + block_working
    if at_once < 1:  # beside the tensor of all features
        working += features
    blocks = max(1, vision.blocks_run)
    block_bytes = size * sum(p.numel for p in vision.parameters if ENCODER_BLOCK.match(p.name)) // blocks
    weight_bytes = size * sum(p.numel for p in vision.parameters)
    cost = EncoderCost(
        flops.forward,
        frozen=not upstream,
        working_bytes=working,
        feature_bytes=features,
        batch_bytes=round(3 * INTEGER * work.tokens),  # token ids, positions, labels
        pixel_bytes=pixels,
        in_fp32=size == FP32,
        blocks=vision.blocks_run,
        block_forward=in_blocks // blocks,
        block_bytes=0 if upstream else block_bytes,
        stem_bytes=0 if upstream else weight_bytes - vision.blocks_run * block_bytes,
        hidden_bytes=round(tokens * vision.width) * size,
    )
    if not upstream:
        return cost, EncoderBackward()
    return cost, EncoderBackward(replace(flops, forward=0), kept, 2 * block_working)


_NORM = re.compile(r"vision\.(?:norm|layernorm|post_layernorm)\.")


def _parts(
    vision: VisionShape, trained: Collection[str], tokens: float, patches: float, size: int
) -> Iterator[tuple[list[Part], bool]]:
    """Patch convolution, class token, positions; each block, with True; the norm behind them if it runs."""
    stem, norm = [], []
    blocks: dict[int, tuple[str, list[ParameterShape]]] = {}
    for parameter in vision.parameters:
        is_trained = parameter.name in trained
        if found := ENCODER_BLOCK.match(parameter.name):
            blocks.setdefault(int(found[1]), (found[0], []))[1].append(parameter)
        elif _NORM.match(parameter.name):  # it keeps its input in fp32
            norm.append(Part(0, trained=is_trained, saved_for_dgrad=2 * parameter.numel * tokens))
        else:
            flops = 2 * parameter.numel * patches if len(parameter.shape) == 4 else 0.0
            stem.append(Part(0, flops, trained=is_trained))
    yield stem, False
    head_dim, keys = vision.width // vision.heads, vision.patches_per_image + vision.prefix_tokens
    for _, (prefix, parameters) in sorted(blocks.items()):
        block = Block(parameters, prefix, vision.width, vision.heads, vision.heads, head_dim)
        yield block_parts(block, trained, size, tokens, tokens, keys), True
    yield norm, False
