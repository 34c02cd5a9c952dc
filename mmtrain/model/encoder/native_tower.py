"""An encoder that takes images of any size, in stock code, on cells: the tiles of layout `native`.

    cells (N, 3, S, S) of pictures, (rows, columns) of cells each --patches in the encoder's own
        order--> its forward
        --its merger, if asked for; back into cells--> features (N, F^2, W)

A cell is F x F positions of features, F the connector's factor; each is one patch, or the m x m
patches that the encoder's own merger joins. Every picture is encoded as if it were alone.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import vision_utils

from mmtrain.base.devices import copied
from mmtrain.facts.chunks import PATCHES_PER_CALL
from mmtrain.facts.encoders import EncoderFamily, NativeInput
from mmtrain.facts.shapes import VisionShape
from mmtrain.layouts.native import patch_rows, picture
from mmtrain.model.encoder.vision_tower import Grids, VisionTower
from mmtrain.model.llm.attention import IMAGES_FLASH, flash_takes_images


class Unmerged(nn.Module):
    """A stand-in for an encoder's merger that leaves the features (P, W) as they are, `joined` in a
    row.
    """

    def __init__(self, joined: int) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, features: Tensor) -> Tensor:
        if features.ndim == 4:  # (N, W, 2, 2) for GLM's convolution
            features = features.permute(0, 2, 3, 1)
        return features.reshape(-1, self.joined * features.shape[-1])


def on_its_device(
    _: nn.Module,
    taken: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Hook: move the arguments of GLM-4.1V's embeddings to the hidden states' device, where they
    are needed.
    """
    return tuple(map(functools.partial(copied, device=taken[0].device), taken))


class NativeTower(VisionTower):
    """Blocks [first, last) of an encoder for any size. Hidden states are (N, patches of a cell, W),
    in its order.
    """

    needs_grids = True

    def __init__(
        self,
        model: nn.Module,
        family: EncoderFamily,
        shape: VisionShape,
        **options: Any,
    ) -> None:
        """`shape` has the run's cells; `model` merges as it says, or has `Unmerged`."""
        native = family.native
        assert native is not None
        side = shape.image_size // shape.patch_size
        super().__init__(
            model,
            functools.partial(_features, native, side, family.class_token is not None),
            shape.width,
            shape.image_size,
            shape.patch_size,
            shape.prefix_tokens,
            family.published,
            **options,
        )
        self.factor = side // shape.merge
        # patches that the merger has not joined stay in blocks
        self.block = 1 if shape.merge > 1 else native.block
        self.feature_shape = (self.factor**2, shape.feature_width)
        self.images = native.images

    def groups(
        self,
        tiles: int,
        grids: Grids,
    ) -> list[tuple[int, Grids]]:
        """Make groups of whole pictures, of up to PATCHES_PER_CALL patches or one picture."""
        assert sum(rows * columns for rows, columns in grids) == tiles, (tiles, grids)
        groups = []
        for grid in grids:
            count = grid[0] * grid[1]
            if groups and (groups[-1][0] + count) * self.patches_per_image <= PATCHES_PER_CALL:
                groups[-1] = (groups[-1][0] + count, (*groups[-1][1], grid))
            else:
                groups.append((count, (grid,)))
        return groups

    def _run(
        self,
        hidden: Tensor | None,
        images: Tensor,
        grids: Grids,
    ) -> Tensor:
        counts = [rows * columns for rows, columns in grids]
        cells = images.split(counts)
        received = None if hidden is None else hidden.split(counts)
        outputs = [images] * len(grids)
        per_cell, width = self.feature_shape if self.is_last else self.hidden_shape
        for numbers in self._calls(grids):
            taken = None
            if received is not None:
                taken = torch.cat([received[number] for number in numbers])
            own_cells = [cells[number] for number in numbers]
            output = self._call(taken, own_cells, [grids[number] for number in numbers])
            rows = output.reshape(-1, width).split([len(one) * per_cell for one in own_cells])
            for number, of_image in zip(numbers, rows, strict=True):
                if self.is_last:
                    outputs[number] = _in_cells(of_image, grids[number], self.factor, self.block)
                else:
                    outputs[number] = of_image.view(counts[number], per_cell, width)
        return torch.cat(outputs)

    def _calls(self, grids: Grids) -> Collection[Sequence[int]]:
        """Divide pictures by their grids among the encoder's calls; return the numbers of each."""
        if self.images == "packed":
            return [range(len(grids))]
        if self.images == "single":
            return [[number] for number in range(len(grids))]
        equal = {}
        for number, grid in enumerate(grids):
            equal.setdefault(tuple(grid), []).append(number)
        return equal.values()

    def _handed_in(self, hidden: Tensor, made: Tensor) -> Tensor:
        return hidden.reshape(made.shape)


def _in_cells(
    features: Tensor,
    grid: Sequence[int],
    factor: int,
    block: int,
) -> Tensor:
    """Bring features (P, W) from the order of `patch_rows` into cells (N, factor^2, W)."""
    rows, columns = grid
    blocks = factor // block
    apart = features.reshape(rows, blocks, columns, blocks, block, block, -1)
    apart = apart.permute(0, 2, 1, 4, 3, 5, 6)
    return apart.reshape(rows * columns, factor**2, -1)


def _features(
    native: NativeInput,
    side: int,
    has_class_token: bool,
    model: nn.Module,
    cells: Sequence[Tensor],
    grids: Grids,
) -> Tensor:
    """Run a stock encoder on pictures; return their features one after another, in the encoder's
    order.
    """
    if native.patches == "picture":
        pictures = torch.stack(list(map(picture, cells, grids)))
        told = {}
        if not has_class_token:
            told["image_sizes"] = [tuple(pictures.shape[2:])] * len(pictures)
        return model(pictures, **told).last_hidden_state[:, int(has_class_token) :]

    rows = []
    for one, grid in zip(cells, grids, strict=True):
        rows.append(patch_rows(one, grid, side, native.block, native.patches))
    sizes = torch.tensor(grids) * side
    if native.images == "equal":
        # no mask: one of ones would choose another attention kernel
        output = model(torch.stack(rows), pixel_attention_mask=None, spatial_shapes=sizes)
        return output.last_hidden_state

    sizes = nn.functional.pad(sizes, (1, 0), value=1)
    tables = _tables(model, native.block, sizes, cells[0])
    patches = torch.cat(rows)
    if native.block > 1:
        output = model(patches, grid_thw=sizes, **tables)
        if not output.get("deepstack_features"):
            return output.pooler_output
        # before mergers: rows of block^2 patches
        parts = []
        for part in (output.pooler_output, *output.deepstack_features):
            parts.append(part.view(len(patches), -1))
        return torch.cat(parts, dim=-1)
    if native.has_merge_sizes:
        tables["merge_sizes"] = torch.ones_like(sizes[:, 0])
    if native.is_cut_out:
        patches = patches.view(1, len(patches), 3, model.config.patch_size, -1)
    return model(patches, grid_thw=sizes, **tables).last_hidden_state


def _tables(
    model: nn.Module,
    block: int,
    sizes: Tensor,
    like: Tensor,
) -> dict[str, Any]:
    """Make the stock forward's tables for grids `sizes` (N, 3) on the host, so that no call waits.

    Flash attention takes all images in one call; without it the forward splits by borders, which
    stay on the host.
    """
    config = model.config
    device = like.device
    width = getattr(config, "embed_dim", config.hidden_size)  # Qwen2-VL's hidden_size is the LLM's
    is_flash = flash_takes_images(width // config.num_attention_heads, like.dtype, device)
    config._attn_implementation = IMAGES_FLASH if is_flash else "sdpa"
    tables = {"position_ids": vision_utils.get_vision_position_ids(sizes, block)}
    borders = {"seqlens": vision_utils.get_vision_cu_seqlens(sizes)}
    if hasattr(model, "fullatt_block_indexes"):
        tables["window_index"], borders["window_seqlens"] = vision_utils.get_vision_window_index(
            sizes,
            block,
            model.window_size,
            model.patch_size,
        )
    stem = model.vision_model.embeddings if hasattr(model, "vision_model") else model
    if hasattr(stem, "num_grid_per_side"):
        made = vision_utils.get_vision_interpolation_indices_and_weights(
            sizes,
            stem.num_grid_per_side,
            stem.interpolation_mode,
            stem.interpolation_align_corners,
            block,
        )
        tables["interp_indices"], tables["interp_weights"] = made
    told = {name: copied(table, device) for name, table in tables.items()}
    for name, border in borders.items():
        told[f"cu_{name}"] = copied(border, device) if is_flash else border
        told[f"max_{name.removesuffix('s')}"] = int(border.diff().max())
    return told
