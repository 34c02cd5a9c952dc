"""Codes and scales of published folders, seen as the weights that they stand for, without torch.

    FP8     X (..., N, K) in e4m3 and X_scale_inv, a scale for each block of 128 x 128
    MXFP4   X_blocks (E, N, K / 32, 16) and X_scales (E, N, K / 32), of bytes: two codes of 4 bits
            in each, and a power of two for each 32 weights. X itself is (E, K, N)

FP8 is that of DeepSeek-V3 and Qwen3, MXFP4 that of gpt-oss (OCP Microscaling Formats 1.0).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.settings import SYNONYMS, Settings, Shape, Shapes

BLOCK = 128  # weights a side that share a scale, of FP8
GROUP = 32  # weights that share a scale, of MXFP4
WHAT_IS_READ = (
    "Use its release in bfloat16, in FP8 by blocks of 128 x 128 or in MXFP4 or, where its "
    "publisher has none, a bfloat16 copy of it on the hub"
)
BLOCKS = "_blocks"  # behind the names of MXFP4's codes
_WEIGHTS = ("F64", "F32", "F16", "BF16")
_SCALE_BYTES = {"F8_E4M3": {"F32": 4, "BF16": 2}, "U8": {"U8": 1}}  # by type of codes and scales
_BUFFER = re.compile(
    r"(?:.*[._])?(?:position_ids|(?:attn|attention)\.(?:masked_)?bias|index|mask|num_batches_tracked)"
)


class Stored(NamedTuple):
    """A tensor by the header of its safetensors file."""

    dtype: str
    shape: Shape


class Weight(NamedTuple):
    """A weight in a model's files."""

    shape: Shape
    names: tuple[str, ...]  # on disk: its own, or those of its codes and of their scales
    coded_bytes: int | None = None  # of codes and scales; None: it has none


def refuse_other_codes(config_json: Settings, source: str) -> None:
    """Raise UserError for a checkpoint whose raw config.json says that its weights are quantised
    otherwise.
    """
    for settings in map(config_json.get, SYNONYMS["quantisation"]):
        if not settings:
            continue
        method = settings.get("quant_method")
        blocks = settings.get("weight_block_size")
        if method == "mxfp4" or (method == "fp8" and blocks == [BLOCK, BLOCK]):
            continue
        said = str(method or "unknown")
        if method == "fp8":
            said += f" by blocks of {blocks}"
        raise UserError(f"{source}: its weights are quantised ({escape(said)}). {WHAT_IS_READ}")


def weights_of(stored: Mapping[str, Stored], folder: Path) -> dict[str, Weight]:
    """Return the weights that a folder's tensors stand for, by name, in their order.

    Raises UserError for codes without the scales above, and other types of less than 16 bits.
    """
    scales = {}  # names of scales by that of their codes
    for name, tensor in stored.items():
        if tensor.dtype == "F8_E4M3":
            scales[name] = f"{name}_scale_inv"
        elif tensor.dtype == "U8" and name.endswith(BLOCKS):
            scales[name] = f"{name.removesuffix(BLOCKS)}_scales"

    weights = {}
    beside_codes = set(scales.values())
    for name, tensor in stored.items():
        if name in beside_codes:
            continue
        if name in scales:
            names = (name, scales[name])
            weights[name.removesuffix(BLOCKS)] = _coded(names, stored, folder)
        elif tensor.dtype in _WEIGHTS or _BUFFER.fullmatch(name):
            weights[name] = Weight(tensor.shape, (name,))
        else:
            raise UserError(
                f"{folder}: {escape(name)} is stored as {tensor.dtype}, which is no floating-point "
                f"number of 16 bits or more. {WHAT_IS_READ}"
            )
    return weights


def shapes_of(tensors: Mapping[str, Stored] | Mapping[str, Weight]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


def shape_of_blocks(blocks: Shape) -> Shape:
    """Return the shape of the weight that MXFP4's X_blocks stands for."""
    experts, columns, groups, _ = blocks
    return experts, groups * GROUP, columns


def _coded(names: tuple[str, str], stored: Mapping[str, Stored], folder: Path) -> Weight:
    """Return the weight of two tensors; raises UserError where they are not of one."""
    codes = stored[names[0]]
    scales = stored.get(names[1], Stored("nothing", ()))
    shape = grid = None
    if codes.dtype == "F8_E4M3" and len(codes.shape) > 1:
        *most, rows, columns = shape = codes.shape
        grid = (*most, -(-rows // BLOCK), -(-columns // BLOCK))
    elif codes.dtype == "U8" and len(codes.shape) == 4 and 2 * codes.shape[3] == GROUP:
        shape = shape_of_blocks(codes.shape)
        grid = codes.shape[:-1]
    scale_bytes = _SCALE_BYTES[codes.dtype].get(scales.dtype)
    if shape is None or grid != scales.shape or scale_bytes is None:
        raise UserError(
            f"{folder}: {escape(names[0])} is {codes.dtype} {codes.shape}, but its scales "
            f"{escape(names[1])} are {scales.dtype} {scales.shape}. {WHAT_IS_READ}"
        )
    return Weight(shape, names, math.prod(codes.shape) + scale_bytes * math.prod(grid))
