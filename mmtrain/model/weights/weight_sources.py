"""Stores of streamed decoder layers: the host's memory, parts on several ranks, or fewer bits.

host       all bytes of a layer, in memory that a GPU reads by itself (page-locked); one copy for
           the ranks of a machine that stream the same layers
peers      1/S of them on each of S ranks' devices; a fetch is one all-gather
nf4, int8, fp8  codes and scales on the device; a fetch dequantises. Compiled layers may multiply
           FP8 codes without a fetch
published  the same, with the codes and scales that the LLM's files have
"""

import hashlib
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.quantised import BLOCK, Quantisation, is_quantised
from mmtrain.model.weights.files import coded_parameters, read_stored
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.model.weights.fp8 import FP8, cast
from mmtrain.model.weights.published import dequantise
from mmtrain.model.weights.streaming import SideStream, Source, StreamedLayer, Wait
from mmtrain.plan.instructions import ALIGNMENT

HAS_MEMORY_FILES = hasattr(os, "memfd_create")  # Linux


class PeerSource(Source):
    """A store on devices: each rank of a process group keeps an equal part of every layer."""

    name = "peers"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(device)
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    def padded(self, size: int) -> int:
        step = ALIGNMENT * self._size
        return -(-size // step) * step

    def keep(self, layer: StreamedLayer) -> Tensor:
        part = layer.bytes // self._size
        return layer.buffer[self._rank * part : (self._rank + 1) * part].clone()

    def fetch(self, layer: StreamedLayer) -> Wait:
        return dist.all_gather_into_tensor(
            layer.buffer,
            layer.kept,
            group=self._group,
            async_op=True,
        ).wait


class HostSource(Source):
    """A store in host memory of all bytes of every layer, one for all ranks of `group` on a
    machine.

    `group`, of ranks that keep the same layers at the same time, carries objects on the host; None:
    this rank alone.
    """

    name = "host"

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device)
        self._beside = SideStream(device)
        self._group = group if HAS_MEMORY_FILES else None
        # ranks of the group on this machine, the first of which fills the memory
        self._here = []
        if self._group is not None:
            machines = [()] * dist.get_world_size(self._group)
            dist.all_gather_object(machines, _machine(), group=self._group)
            self._here = [rank for rank, machine in enumerate(machines) if machine == _machine()]

    def keep(self, layer: StreamedLayer) -> Tensor:
        """Copy the layer to the host. Raises UserError for too little memory, or a driver that
        cannot lock it.
        """
        if self._group is None:
            kept = _filled(_memory_file(layer.bytes), layer)
        else:
            kept = self._filled_once(layer)
        if self.device.type == "cuda":
            lock(kept)
        return kept

    def _filled_once(self, layer: StreamedLayer) -> Tensor:
        """Let the first rank of this machine fill memory with the layer's bytes, and the others map
        it.
        """
        is_first = self._here[0] == dist.get_rank(self._group)
        file = -1
        if is_first:
            file = _memory_file(layer.bytes)
            kept = _filled(os.dup(file), layer)
        owners = [(0, 0)] * dist.get_world_size(self._group)
        dist.all_gather_object(owners, (os.getpid(), file), group=self._group)
        if not is_first:
            kept = _mapped(*owners[self._here[0]], layer.bytes)
        dist.barrier(self._group)  # all have it open
        if is_first:
            os.close(file)
        return kept

    def fetch(self, layer: StreamedLayer) -> Wait:
        return self._beside.run(lambda: layer.buffer.copy_(layer.kept, non_blocking=True))


def lock(kept: Tensor) -> None:
    """Let the GPU read this memory by itself. Raises UserError where its driver refuses."""
    refused = torch.cuda.cudart().cudaHostRegister(kept.data_ptr(), kept.nbytes, 0)
    if int(refused) != 0:
        raise UserError(
            f"CUDA cannot lock {bytes_text(kept.nbytes)} of host memory for a decoder layer "
            f"(error {refused}). Stream fewer layers (parallel.streamed_layers), or let the "
            "machine lock more memory (ulimit -l)"
        )
    # Else the driver would take this memory for locked when it is somebody else's. At the process's
    # end it all goes.
    weakref.finalize(kept, torch.cuda.cudart().cudaHostUnregister, kept.data_ptr()).atexit = False


def _machine() -> tuple[str, ...]:
    """Return a name that processes share if they can open each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _memory_file(size: int) -> int:
    """Open a file in memory, -1 where the system has none. Raises UserError without room."""
    if not HAS_MEMORY_FILES:
        return -1
    file = os.memfd_create("mmtrain-decoder-layer", os.MFD_CLOEXEC)
    try:
        # else too little memory would end the process at the first write
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise UserError(
            f"a decoder layer of {bytes_text(size)} does not fit in the host's memory "
            f"({error.strerror}). Stream fewer layers (parallel.streamed_layers), or use a machine "
            "with more"
        ) from error
    return file


def _filled(file: int, layer: StreamedLayer) -> Tensor:
    """Copy a layer into memory that is not torch's own, which rounds page-locked memory up to a
    power of two.
    """
    kept = torch.frombuffer(mmap.mmap(file, layer.bytes), dtype=torch.uint8)
    if file >= 0:
        os.close(file)
    return kept.copy_(layer.buffer)


def _mapped(process: int, file: int, size: int) -> Tensor:
    try:
        with Path(f"/proc/{process}/fd/{file}").open("r+b") as stream:
            return torch.frombuffer(mmap.mmap(stream.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise UserError(
            f"ranks of one machine cannot open each other's memory ({error.strerror}). Start them "
            "as one user, with /proc mounted without hidepid"
        ) from error


class Codes(NamedTuple):
    """A kept parameter: codes with the state that dequantises them (bitsandbytes' own, or FP8's
    scales). Without a state: the parameter as it is.
    """

    codes: Tensor
    state: Any


class QuantisedSource(Source):
    """A store of a rank's layers in fewer bits on its device; a fetch dequantises, to the LLM's
    type.

    No module is exchanged, so that whatever a family does with a weight works, fused experts too.
    """

    is_exact = False

    def __init__(self, quantisation: Quantisation, device: torch.device) -> None:
        super().__init__(device)
        self.name = self.quantisation = quantisation
        self._beside = SideStream(device)

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _dequantise(self, codes: Tensor, state: Any, home: Tensor) -> None:
        """Fill a parameter's memory."""
        raise NotImplementedError

    def _scales(self, state: Any) -> Tensor:
        return state

    @torch.no_grad()
    def keep(self, layer: StreamedLayer) -> Sequence[Codes]:
        kept = []
        for name, parameter in zip(layer.names, layer.parameters, strict=True):
            weight = parameter.detach()
            kept.append(self._codes(name, weight) or Codes(weight.clone(), None))
        return kept

    def _codes(self, name: str, weight: Tensor) -> Codes | None:
        """Return what is kept of a parameter; None: all of its bits."""
        if not is_quantised(name, tuple(weight.shape)):
            return None
        return Codes(*self._quantise(weight))

    def fetch(self, layer: StreamedLayer) -> Wait:
        return self._beside.run(lambda: self._fill(layer))

    @torch.no_grad()
    def _fill(self, layer: StreamedLayer) -> None:
        pairs = zip(layer.kept, layer.homes, strict=True)
        for place, ((codes, state), home) in enumerate(pairs):
            if place in layer.unfetched:
                continue
            if state is None:
                home.copy_(codes)
            else:
                self._dequantise(codes, state, home)

    def fingerprints(self, layer: StreamedLayer) -> list[str]:
        return [self._fingerprint(codes, state) for codes, state in layer.kept]

    def _fingerprint(self, codes: Tensor, state: Any) -> str:
        if state is None:
            return fingerprint(codes)
        text = f"{self.quantisation} {fingerprint(codes)} {fingerprint(self._scales(state))}"
        return hashlib.sha256(text.encode()).hexdigest()


class BlockSource(QuantisedSource):
    """A store of bitsandbytes' codes, in blocks with a scale each."""

    def __init__(self, quantisation: Quantisation, device: torch.device) -> None:
        import bitsandbytes.functional  # an extra, and it takes a second

        super().__init__(quantisation, device)
        self._library = bitsandbytes.functional

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Any]:
        block = BLOCK[self.quantisation]
        if self.quantisation == "nf4":
            return self._library.quantize_4bit(weight, blocksize=block, quant_type="nf4")
        return self._library.quantize_blockwise(weight, blocksize=block)

    def _dequantise(self, codes: Tensor, state: Any, home: Tensor) -> None:
        dequantize = self._library.dequantize_blockwise
        if self.quantisation == "nf4":
            dequantize = self._library.dequantize_4bit
        if home.device.type == "cuda":
            dequantize(codes, state, out=home)
        else:  # on a CPU it has no `out`
            home.copy_(dequantize(codes, state))

    def _scales(self, state: Any) -> Tensor:
        return state.absmax


class Fp8Source(QuantisedSource):
    """A store of FP8 codes with a scale for each row; compiled layers may multiply by them."""

    def _quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return cast(weight)

    def _dequantise(self, codes: Tensor, state: Tensor, home: Tensor) -> None:
        home.copy_(codes).mul_(state)


class PublishedSource(QuantisedSource):
    """A store of the codes that an LLM's files have; fetches make the weights of these files."""

    def __init__(self, device: torch.device, path: str) -> None:
        super().__init__("published", device)
        self._entries = coded_parameters(model_folder(path))

    def _codes(self, name: str, weight: Tensor) -> Codes | None:
        entries = self._entries.get(name)
        if entries is None:
            return None
        codes = []
        scales = []
        for entry in entries:
            codes.append(read_stored(entry))
            scales.append(read_stored(entry.scales))
        if len(entries) == 1:
            return Codes(codes[0].to(self.device), scales[0].to(self.device))
        return Codes(torch.stack(codes).to(self.device), torch.stack(scales).to(self.device))

    def _dequantise(self, codes: Tensor, state: Tensor, home: Tensor) -> None:
        if codes.dtype == FP8:
            # Experts: gates and what they multiply are (E, 2I, D) here and 2E matrices (I, D) on
            # disk, each with blocks of its own.
            home = home.view(codes.shape)
        dequantise(codes, state, home)

    def keep(self, layer: StreamedLayer) -> Sequence[Codes]:
        """Read the layer's codes. Raises UserError where they do not make the weights that were
        loaded.
        """
        layer.kept = super().keep(layer)
        # This overwrites the weights that were loaded; `layer.loaded` has their fingerprints.
        self._fill(layer)
        for name, parameter, loaded in zip(
            layer.names, layer.parameters, layer.loaded, strict=True
        ):
            if fingerprint(parameter) != loaded:
                raise UserError(
                    f"{name}: its codes on disk are not, row by row, the weight that transformers "
                    "loads. Leave model.llm.quantize out"
                )
        return layer.kept


def quantised_source(
    quantisation: Quantisation,
    device: torch.device,
    path: str = "",
) -> QuantisedSource:
    """Return the source of a quantisation; `path` is the LLM's, for `published`."""
    if quantisation == "published":
        return PublishedSource(device, path)
    if quantisation == "fp8":
        return Fp8Source(quantisation, device)
    return BlockSource(quantisation, device)
