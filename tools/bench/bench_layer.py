"""Measure one decoder layer of a 7B on a device: the first thing to run on a GPU.

    products   rates of matrix products of the layer's shapes: bfloat16, float32 without and with
               TF32, FP8 by row and by tensor, INT8; bandwidth of memory; transposing an FP8 matrix
    layer      a Llama layer, forward and input gradient: eager, compiled, and compiled with its
               matrices in FP8: seconds, difference from float32, bytes kept for backward
    profile    where eager and compiled code spend their time: products, attention, the rest

No weights are needed. Usage: python tools/bench/bench_layer.py [--json layer.json]
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tables import finish, positive, print_table
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmtrain.base.cache import cache_folder
from mmtrain.base.devices import seconds_between, time_mark
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_info, run_command
from mmtrain.doctor.machine import describe_machine
from mmtrain.model.llm.attention import ATTENTION, Documents
from mmtrain.model.llm.compiled import LayerCode, gradients_of, set_up
from mmtrain.model.weights.fp8 import FP8, Fp8Linears
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import quantised_source

DTYPE = torch.bfloat16
EXAMPLES = """\
examples:
  the first thing to run on a GPU:
    python tools/bench/bench_layer.py --json layer.json
  does it run at all? no GPU needed, numbers without meaning:
    python tools/bench/bench_layer.py --device cpu --quick
"""


class Size(NamedTuple):
    """A layer and its micro-batch."""

    width: int
    mlp_width: int
    heads: int
    packs: int
    length: int  # tokens of a pack
    document: int  # tokens of a document

    @property
    def tokens(self) -> int:
        return self.packs * self.length

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Rows, summed dimension and columns of the layer's products: q and its like; gate and up;
        down.
        """
        tokens = self.tokens
        return (
            (tokens, self.width, self.width),
            (tokens, self.width, self.mlp_width),
            (tokens, self.mlp_width, self.width),
        )


COUNTS = (4, 2, 1)  # of the products: q, k, v, o; gate, up; down
LLAMA_7B = Size(4096, 11008, heads=32, packs=2, length=2048, document=656)
TINY = Size(128, 352, heads=2, packs=2, length=64, document=20)


class Bench:
    """Measurements on one device."""

    def __init__(self, device: torch.device, size: Size, repetitions: int) -> None:
        self.device = device
        self.size = size
        self.repetitions = repetitions
        self.found: dict[str, Any] = {}

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of `work`, by the device's clock, after two calls."""
        for _ in range(2):
            work()
        times = []
        for _ in range(self.repetitions):
            began = time_mark(self.device)
            work()
            times.append(seconds_between(began, time_mark(self.device)))
        return statistics.median(times)

    def draw(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    # ---- products

    def products(self) -> None:
        kinds = {
            "bfloat16": functools.partial(self._plain, DTYPE),
            "float32": functools.partial(self._plain, torch.float32),
            "float32 with TF32": self._tf32,
            "FP8 by row": functools.partial(self._scaled, by_row=True),
            "FP8 by tensor": functools.partial(self._scaled, by_row=False),
            "INT8": self._int8,
        }
        flops = sum(2 * rows * inner * columns for rows, inner, columns in self.size.products)
        rates: dict[str, float] = {}
        refused: dict[str, str] = {}
        for name, make in kinds.items():
            try:
                seconds = sum(self.seconds(make(*shape)) for shape in self.size.products)
                rates[name] = flops / seconds
            except (RuntimeError, ValueError, NotImplementedError) as error:
                refused[name] = str(error).strip().partition("\n")[0][:100]
        torch.set_float32_matmul_precision("highest")
        self.found |= {"flops_per_second": rates, "refused": refused}
        rows = [(name, f"{rate / 1e12:,.2f}") for name, rate in rates.items()]
        rows += refused.items()
        print_table(("matrix products", "TFLOP/s"), rows)

        matrix = self.draw(2 * self.size.mlp_width, self.size.width)
        copied = 2 * matrix.nbytes / self.seconds(matrix.clone)
        w8 = matrix.to(FP8)
        transposed = self.seconds(lambda: w8.t().contiguous())
        self.found |= {"bytes_per_second": copied, "transpose_fp8_seconds": transposed}
        print_info(
            f"memory: {copied / 1e9:,.0f} GB/s copied; "
            f"an FP8 matrix of {w8.nbytes / 1e6:,.0f} MB is transposed in "
            f"{transposed * 1e3:.3f} ms",
            "",
        )

    def _plain(
        self, dtype: torch.dtype, rows: int, inner: int, columns: int
    ) -> Callable[[], object]:
        torch.set_float32_matmul_precision("highest")
        a = self.draw(rows, inner, dtype=dtype)
        b = self.draw(columns, inner, dtype=dtype)
        return lambda: a @ b.t()

    def _tf32(self, *shape: int) -> Callable[[], object]:
        product = self._plain(torch.float32, *shape)
        torch.set_float32_matmul_precision("high")
        return product

    def _scaled(self, rows: int, inner: int, columns: int, *, by_row: bool) -> Callable[[], object]:
        a = self.draw(rows, inner).to(FP8)
        b = self.draw(columns, inner).to(FP8)
        scales = torch.ones(2, device=self.device)
        of_a, of_b = scales[0], scales[1]
        if by_row:
            of_a = torch.ones(rows, 1, device=self.device)
            of_b = torch.ones(1, columns, device=self.device)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=DTYPE)

    def _int8(self, rows: int, inner: int, columns: int) -> Callable[[], object]:
        shapes = ((rows, inner), (columns, inner))
        a, b = (
            torch.randint(-127, 128, shape, dtype=torch.int8, device=self.device)
            for shape in shapes
        )
        return lambda: torch._int_mm(a, b.t())

    # ---- a layer

    def layer(self) -> None:
        """Measure the layer eager and compiled, against itself in float32."""
        size = self.size
        config = LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.mlp_width,
            num_hidden_layers=1,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
        )
        config._attn_implementation = ATTENTION
        torch.manual_seed(0)
        with self.device:
            exact = LlamaDecoderLayer(config, 0).requires_grad_(False).eval()
            layer = LlamaDecoderLayer(config, 0).to(DTYPE).requires_grad_(False).eval()
        layer.load_state_dict(exact.state_dict())
        hidden = self.draw(size.packs, size.length, size.width)
        documents = self._documents()
        rotation = self._rotation()

        def run(forward: Callable[..., Any], layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
            return gradients_of(
                forward,
                layer,
                hidden.to(dtype),
                attention_mask=documents,
                position_embeddings=tuple(table.to(dtype) for table in rotation),
            )

        stock = LlamaDecoderLayer.forward
        expected = run(stock, exact, torch.float32)
        del exact
        flops = 2 * sum(
            count * 2 * rows * inner * columns
            for count, (rows, inner, columns) in zip(COUNTS, size.products, strict=True)
        )
        found = self.found["layer"] = {}
        rows = []
        for name, (forward, module) in self._contestants(layer).items():
            work = functools.partial(run, forward, module, DTYPE)
            began = time.perf_counter()
            result = work()
            first = time.perf_counter() - began
            seconds = self.seconds(work)
            off = [relative(*pair) for pair in zip(result, expected, strict=True)]
            kept = kept_bytes(module, rotation, work)
            found[name] = {
                "first_seconds": first,
                "seconds": seconds,
                "flops_per_second": flops / seconds,
                "off_float32": off,
                "kept_bytes": kept,
                "profile_seconds": self._profile(work),
            }
            rows.append(
                (
                    name,
                    f"{first:.1f}",
                    f"{seconds * 1e3:.2f}",
                    f"{flops / seconds / 1e12:,.2f}",
                    " ".join(f"{each:.1e}" for each in off),
                    f"{kept / hidden.nbytes:.1f}",
                )
            )
        print_table(
            (
                "layer",
                ">first call\ns",
                ">forward and\ngradient, ms",
                ">TFLOP/s of\nits products",
                ">result, gradient\noff float32",
                ">kept, in\nhidden states",
            ),
            rows,
        )
        for name, of_layer in found.items():
            parts = [
                f"{part} {seconds * 1e3:.3f} ms"
                for part, seconds in of_layer["profile_seconds"].items()
            ]
            if parts:
                print_info(f"{name}: {', '.join(parts)}")

    def _contestants(self, layer: nn.Module) -> dict[str, tuple[Callable[..., Any], nn.Module]]:
        """Return code and layer of each; the last one keeps its matrices in FP8."""
        set_up(cache_folder("compiled"), deterministic=False)
        compiled = LayerCode(LlamaDecoderLayer).compiled
        quantised = copy.deepcopy(layer)
        streamed = StreamedLayers(quantised_source("fp8", self.device))
        streamed.take(0, quantised)
        Fp8Linears(quantised, streamed.layers[0]).multiply()
        # fetches the norms, which stay; the matrices stay in FP8
        streamed.follow([0])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {
            "eager": (LlamaDecoderLayer.forward, layer),
            "compiled": (compiled, layer),
            "compiled, FP8": (compiled, quantised),
        }

    def _documents(self) -> Documents:
        size = self.size
        cuts = [*range(0, size.length, size.document), size.length]
        runs = tuple(
            (row, begin, begin, end)
            for row in range(size.packs)
            for begin, end in itertools.pairwise(cuts)
        )
        borders = [row * size.length + begin for row, begin, *_ in runs]
        offsets = torch.tensor([*borders, size.tokens], dtype=torch.int32, device=self.device)
        return Documents(runs, None, offsets, size.document)

    def _rotation(self) -> tuple[Tensor, Tensor]:
        size = self.size
        width = size.width // size.heads
        frequencies = 10_000 ** (-torch.arange(0, width, 2, device=self.device) / width)
        angles = torch.arange(size.length, device=self.device)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)[None].expand(size.packs, -1, -1)
        return angles.cos(), angles.sin()

    def _profile(self, work: Callable[[], object]) -> dict[str, float]:
        """Return the seconds of a call's kernels on a GPU by kind; {} on a CPU."""
        if self.device.type != "cuda":
            return {}
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(self.repetitions):
                work()
            torch.cuda.synchronize(self.device)
        seconds = dict.fromkeys((*KINDS, "the rest"), 0.0)
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                seconds[kind_of(event.name)] += event.device_time_total / 1e6 / self.repetitions
        return seconds


KINDS = {
    "attention": ("flash", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "wgmma"),
}


def kind_of(kernel: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in kernel.lower() for part in parts):
            return kind
    return "the rest"


def relative(ours: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((ours.float() - expected).norm() / expected.norm())


def kept_bytes(layer: nn.Module, rotation: Sequence[Tensor], work: Callable[[], object]) -> int:
    """Return the bytes that a call keeps for its backward, besides weights and rotations."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    held = [*layer.parameters(), *layer.buffers(), *rotation]
    for module in layer.modules():
        held += getattr(module, "kept", ())  # codes and scales
    for tensor in held:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every measurement there")
    add("--repetitions", type=positive, default=20, metavar="N", help="of each (%(default)s)")
    add("--quick", action="store_true", help="a tiny layer, three times")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Measure everything and print it; the exit code. Raises UserError without a CUDA device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device here, so nothing was measured; --device cpu --quick shows that it runs"
        )
    device = torch.device(options.device)
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    bench = Bench(
        device,
        TINY if options.quick else LLAMA_7B,
        3 if options.quick else options.repetitions,
    )
    print_info(f"device: {name}; torch {torch.__version__}", "")
    bench.products()
    bench.layer()
    finish({"machine": describe_machine(), "device": name, **bench.found}, options.json)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
