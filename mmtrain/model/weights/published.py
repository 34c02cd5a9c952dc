"""Weights made of published codes and scales; facts/published.py has their forms."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers import AutoQuantizationConfig

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.model_files import model_config, stored_weights
from mmtrain.facts.published import FP8_BLOCK, shape_of_blocks

# of MXFP4's codes, e2m1: a sign, two bits of exponent, one of mantissa
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))


class CodedWeight:
    """A weight in a file, which is dequantised when it is read, by `[...]`, to float32."""

    def __init__(self, codes: Any, scales: Any) -> None:
        """Take safetensors' slices."""
        self._codes = codes
        self._scales = scales

        self.shape = codes.get_shape()
        if codes.get_dtype() == "U8":
            self.shape = shape_of_blocks(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        weight = torch.empty(self.shape)
        dequantise(self._codes[...], self._scales[...], weight)
        return weight[index]


def dequantise(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Fill a weight's memory, in its own type.

    A number is rounded once: codes are exact in every type that is computed in, powers of two
    change no mantissa.
    """
    if codes.dtype == torch.uint8:
        _dequantise_mxfp4(codes, scales, weight)
    else:
        _dequantise_fp8(codes, scales, weight)


def _dequantise_mxfp4(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Fill a weight (E, K, N) by codes (E, N, K / 32, 16) and scales (E, N, K / 32).

    A byte holds the code of an even column in its lower bits, and the next one's in its upper.
    """
    values = torch.tensor(_FP4, device=codes.device)
    # one expert at a time: the float32 numbers of all would not fit on a GPU
    for of_expert, exponents, home in zip(codes, scales, weight, strict=True):
        pairs = torch.stack((of_expert & 15, of_expert >> 4), -1)
        groups = values[pairs.int()].flatten(-2)
        home.copy_(torch.ldexp(groups, exponents[..., None].int() - 127).flatten(1).t())


def _dequantise_fp8(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Fill a weight (..., N, K) by codes of its shape and scales (..., N / 128, K / 128), rounded
    up.
    """
    weight.copy_(codes)
    columns = weight.shape[-1]
    for number, rows in enumerate(weight.split(FP8_BLOCK, -2)):
        of_rows = scales[..., number : number + 1, :].float()
        rows.mul_(of_rows.repeat_interleave(FP8_BLOCK, -1)[..., :columns])


def dequantising(folder: Path) -> dict[str, Any]:
    """Return the options by which `from_pretrained` dequantises what is coded in `folder`.

    Without them transformers multiplies by codes where it sees a GPU. Raises UserError for FP8 that
    it would read wrongly: it takes the blocks of a matrix for equally large.
    """
    settings = model_config(folder).get("quantization_config", {})
    method = settings.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        return {}
    for name, weight in (stored_weights(folder) or {}).items():
        if method != "fp8" or weight.scales is None:
            continue
        for size in weight.shape[-2:]:
            if size > FP8_BLOCK and size % FP8_BLOCK:
                raise UserError(
                    f"{folder}: transformers dequantises FP8 by equal blocks, but {escape(name)} "
                    f"{weight.shape} is no multiple of 128. Leave out --verify; this folder can "
                    "be used where FP8 is multiplied"
                )
    whole = AutoQuantizationConfig.from_dict({**settings, "dequantize": True})
    return {"quantization_config": whole}
