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

FP8_BLOCK = 128  # weights a side that share a scale
MXFP4_GROUP = 32  # weights that share a scale
MXFP4_CODES = "_blocks"  # behind the weight's name
WHAT_IS_READ = (
    "Use a release of it in bfloat16, in FP8 by blocks of 128 x 128 or in MXFP4; if its publisher "
    "has none, a bfloat16 copy on the hub"
)
_WEIGHTS = ("F64", "F32", "F16", "BF16")
_SCALE_BYTES = {"F8_E4M3": {"F32": 4, "BF16": 2}, "U8": {"U8": 1}}  # by type of codes and scales
_BUFFER = re.compile(
    r"(?:.*[._])?(?:position_ids|(?:attn|attention)\.(?:masked_)?bias|index|mask|num_batches_tracked)"
)


class Stored(NamedTuple):
    """A tensor as its safetensors file's header describes it."""

    dtype: str
    shape: Shape


class Weight(NamedTuple):
    """A weight in a model's files."""

    shape: Shape
    name: str  # of the tensor on disk that holds it, or its codes
    scales: str | None = None  # name of the codes' scales
    coded_bytes: int | None = None  # of codes and scales


def refuse_other_codes(config_json: Settings, source: str) -> None:
    """Raise UserError for a checkpoint whose raw config.json says that its weights are quantised
    otherwise.
    """
    for key in SYNONYMS["quantisation"]:
        settings = config_json.get(key)
        if not settings:
            continue
        method = settings.get("quant_method")
        blocks = settings.get("weight_block_size")
        activations = settings.get("activation_scheme", "dynamic")
        is_read = method == "mxfp4"
        said = str(method or "unknown")
        if method == "fp8":
            is_read = blocks == [FP8_BLOCK, FP8_BLOCK] and activations == "dynamic"
            said += f" by blocks of {blocks}, activations {activations}"
        if is_read and key == "quantization_config":
            continue
        raise UserError(f"{source}: its weights are quantised ({escape(said)}). {WHAT_IS_READ}")


def weights_of(stored: Mapping[str, Stored], folder: Path) -> dict[str, Weight]:
    """Return the weights that a folder's tensors stand for, by name, in their order.

    Raises UserError for codes that do not have the scales above, and for other types of less than
    16 bits.
    """
    scales = {}  # names of scales by the name of their codes
    for name, tensor in stored.items():
        if tensor.dtype == "F8_E4M3":
            scales[name] = f"{name}_scale_inv"
        elif tensor.dtype == "U8" and name.endswith(MXFP4_CODES):
            scales[name] = f"{name.removesuffix(MXFP4_CODES)}_scales"

    weights = {}
    beside_codes = set(scales.values())
    for name, tensor in stored.items():
        if name in beside_codes:
            continue
        if name in scales:
            weight = _coded(name, scales[name], stored, folder)
            weights[name.removesuffix(MXFP4_CODES)] = weight
        elif tensor.dtype in _WEIGHTS or _BUFFER.fullmatch(name):
            weights[name] = Weight(tensor.shape, name)
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
    return experts, groups * MXFP4_GROUP, columns


def _coded(
    name: str,
    scales_name: str,
    stored: Mapping[str, Stored],
    folder: Path,
) -> Weight:
    """Return the weight of codes and their scales; raises UserError where these do not fit."""
    codes = stored[name]
    said = f"{folder}: {escape(name)} is {codes.dtype} {codes.shape}"
    if codes.dtype == "F8_E4M3" and len(codes.shape) > 1:
        *most, rows, columns = shape = codes.shape
        grid = (*most, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    elif codes.dtype == "U8" and len(codes.shape) == 4 and 2 * codes.shape[3] == MXFP4_GROUP:
        shape = shape_of_blocks(codes.shape)
        grid = codes.shape[:-1]
    else:
        raise UserError(f"{said}, which is no matrix of codes. {WHAT_IS_READ}")

    sizes = _SCALE_BYTES[codes.dtype]
    scales = stored.get(scales_name)
    if scales is None:
        raise UserError(
            f"{said}, but its scales, {escape(scales_name)}, are missing. {WHAT_IS_READ}"
        )
    if scales.shape != grid or scales.dtype not in sizes:
        raise UserError(
            f"{said}; needed are scales of {' or '.join(sizes)} {grid}, but {escape(scales_name)} "
            f"is {scales.dtype} {scales.shape}. {WHAT_IS_READ}"
        )
    size = math.prod(codes.shape) + sizes[scales.dtype] * math.prod(grid)
    return Weight(shape, name, scales_name, size)
