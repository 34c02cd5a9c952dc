"""Streamed decoder layers that are kept on the device in fewer bits, by bitsandbytes: 4 (nf4) or 8 a weight.

a layer's matrices --quantize--> codes and scales, kept --dequantize--> the layer's buffer, before each use

So a quantised layer is another layer: what computes are the dequantised weights, in the LLM's type, and no activation
is quantised. The functions are those of bitsandbytes' Linear4bit; no module is exchanged, so that whatever a family
does with a weight works, fused experts, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mmtrain.models.facts.quantised import BLOCK, Quantisation, is_quantised
from mmtrain.models.weights.fingerprint import fingerprint
from mmtrain.models.weights.streaming import SideStream, StreamedLayer, Wait


class _Kept(NamedTuple):
    """One parameter: codes (uint8) and bitsandbytes' description of them, or, without that, itself."""

    codes: torch.Tensor
    state: Any


class QuantisedSource:
    """Each rank keeps its streamed layers in fewer bits on its device; a fetch dequantises."""

    is_exact = False

    def __init__(self, quantisation: Quantisation, device: torch.device) -> None:
        import bitsandbytes.functional  # an extra, and it takes a second

        self.device = device
        self.name = self.quantisation = quantisation
        self._library = bitsandbytes.functional
        self._beside = SideStream(device)

    def padded(self, size: int) -> int:
        return size

    def keep(self, layer: StreamedLayer) -> Sequence[_Kept]:
        return [self._kept(name, p) for name, p in zip(layer.names, layer.parameters, strict=True)]

    @torch.no_grad()
    def _kept(self, name: str, parameter: torch.Tensor) -> _Kept:
        if not is_quantised(name, tuple(parameter.shape)):
            return _Kept(parameter.detach().clone(), None)
        block = BLOCK[self.quantisation]
        if self.quantisation == "nf4":
            return _Kept(*self._library.quantize_4bit(parameter.detach(), blocksize=block, quant_type="nf4"))
        return _Kept(*self._library.quantize_blockwise(parameter.detach(), blocksize=block))

    def fetch(self, layer: StreamedLayer) -> Wait:
        return self._beside.run(lambda: self._fill(layer))

    @torch.no_grad()
    def _fill(self, layer: StreamedLayer) -> None:
        nf4 = self.quantisation == "nf4"
        dequantize = self._library.dequantize_4bit if nf4 else self._library.dequantize_blockwise
        for (codes, state), home in zip(layer.kept, layer.homes, strict=True):
            if state is None:
                home.copy_(codes)
            elif home.device.type == "cuda":
                dequantize(codes, state, out=home)
            else:  # on a CPU it has no `out`
                home.copy_(dequantize(codes, state))

    def fingerprints(self, layer: StreamedLayer) -> list[str]:
        """Of each parameter: of its codes and scales."""
        return [
            fingerprint(codes)
            if state is None
            else hashlib.sha256(
                f"{self.quantisation} {fingerprint(codes)} {fingerprint(state.absmax)}".encode()
            ).hexdigest()
            for codes, state in layer.kept
        ]
