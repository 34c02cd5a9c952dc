"""Layers compiled by torch.compile, which fuses their elementwise operations.

a class of layers --trials on the run's own micro-batch--> compiled, where it agrees with eager and
    is faster; else eager

Compiled is the stock forward of a class, one layer at a time, below recomputation and streaming.
Packed attention and recurrent mixers interrupt it: their documents differ in every micro-batch.
The last decoder layer for some tokens alone stays eager.
"""

from __future__ import annotations

import functools
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.codecache import cache_dir

from mmtrain.base.devices import seconds_between, time_mark
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.model.llm.attention import Backend
from mmtrain.model.llm.last_layer import Forward
from mmtrain.model.weights.fp8 import Fp8Linears
from mmtrain.model.weights.streaming import StreamedLayer

# relative to eager: the norm of the difference over the norm
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LEAST_FACTOR = 1.03  # less is within the noise of a GPU's clock
# results of a layer by FP8 products are off those of its dequantised weights by 1 to 6%
FP8_TOLERANCES = dict.fromkeys(TOLERANCES, 0.15)
requires_grad = operator.attrgetter("requires_grad")
PAIRS = 3  # timed runs of each layer, old code and new in turn


class LayerCode:
    """The forward of all layers of one class: stock, or other code after a trial that it passed."""

    def __init__(self, kind: type[nn.Module], *, pairs: int = 0, trains: bool = True) -> None:
        """`pairs`: timed runs of each layer, old code and new in turn. `trains`: gradients pass
        through the layers, whose input has one shape; else its first dimension differs.
        """
        self.kind = kind
        self.pairs = pairs
        self.trains = trains
        self.forward = kind.forward
        self.linears: dict[nn.Module, Fp8Linears] = {}
        """Those of each layer that is kept in FP8."""
        self.trial: Trial | None = None

    def run(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        if self.trial is not None:
            self.trial.run(layer, *arguments, **options)
        return self.forward(layer, *arguments, **options)

    @functools.cached_property
    def _compiled(self) -> Forward:
        return torch.compile(self.kind.forward, dynamic=False)

    def compiled(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        return self._compiled(layer, *arguments, **options)

    def multiplied(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Run compiled code that multiplies by what is kept in FP8."""
        linears = self.linears[layer]
        linears.multiply()
        try:
            return self.compiled(layer, *arguments, **options)
        finally:
            linears.dequantise()


class Trial:
    """A comparison of other code of a class's layers with that in use: results and seconds."""

    def __init__(
        self,
        code: LayerCode,
        candidate: Forward,
        tolerances: Mapping[torch.dtype, float],
    ) -> None:
        self._code = code
        self._candidate = candidate
        self._tolerances = tolerances
        self._used_seconds: list[float] = []
        self._candidate_seconds: list[float] = []
        self._compile_seconds = 0.0
        self._graphs = 0
        self.reason: str | None = None
        """Why the class stays as it is."""

    def run(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        """Compare one layer on the arguments of its call, unless its class has failed."""
        if self.reason is not None:
            return

        def call(forward: Forward, *, trains: bool = self._code.trains) -> list[Tensor]:
            any_length = not self._code.trains
            return outcome(
                forward,
                layer,
                *arguments,
                trains=trains,
                any_length=any_length,
                **options,
            )

        used = self._code.forward
        candidate = self._candidate
        try:
            # What lies there is executed. Torch's own folder is a temporary one with a known name.
            folder = Path(cache_dir())
            folder.chmod(0o700)
            # without gradients it is other code, which evaluations run
            expected = call(used) + call(used, trains=False)
            graphs = counters["stats"]["unique_graphs"]
            began = time.perf_counter()
            # else torch would run the variants of a class that are too many eagerly, in silence
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                ours = call(candidate) + call(candidate, trains=False)
            seconds = time.perf_counter() - began
            self._compile_seconds = max(self._compile_seconds, seconds)
            self._graphs += counters["stats"]["unique_graphs"] - graphs
            self.reason = disagreement(ours, expected, self._tolerances)
            for _ in range(self._code.pairs):
                self._used_seconds.append(seconds_of(lambda: call(used), layer))
                self._candidate_seconds.append(seconds_of(lambda: call(candidate), layer))
        except Exception as error:  # compilers raise what they like
            text = escape(str(error).strip().partition("\n")[0], 200)
            self.reason = text or type(error).__name__

    def end(self, passed: str, failed: str) -> Backend:
        """Let the class run the other code if that is right and, where timed, faster.

        Returns the kernel `passed` or `failed`.
        """
        code = self._code
        code.trial = None
        factor = None
        if self.reason is None and not self._graphs:
            self.reason = "torch runs all of their code eagerly"
        if self.reason is None and self._used_seconds:
            used = statistics.median(self._used_seconds)
            factor = used / statistics.median(self._candidate_seconds)
            if factor < LEAST_FACTOR:
                self.reason = f"they would take {1 / factor:.2f} times as long"
        name = code.kind.__name__
        if self.reason is not None:
            return Backend(name, failed, self.reason, slow=factor is None)
        code.forward = self._candidate
        return Backend(name, passed, factor=factor, seconds=self._compile_seconds)


def outcome(
    forward: Forward,
    layer: nn.Module,
    hidden: Tensor,
    *arguments: Any,
    trains: bool,
    any_length: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Return a layer's result and, if it `trains`, gradients of its input and of what it trains.

    `any_length`: code compiled by this call runs for other lengths of the first dimension, too.
    """
    hidden = hidden.detach().requires_grad_(trains)
    if any_length:
        torch._dynamo.mark_dynamic(hidden, 0)
    with torch.set_grad_enabled(trains):
        output = forward(layer, hidden, *arguments, **options)
    if not isinstance(output, Tensor):
        output = output[0]
    if not trains:
        return [output]
    inputs = [hidden, *filter(requires_grad, layer.parameters())]
    generator = torch.Generator(output.device).manual_seed(0)
    upstream = torch.empty_like(output).normal_(generator=generator)
    gradients = torch.autograd.grad(output, inputs, upstream, materialize_grads=True)
    return [output.detach(), *gradients]


def disagreement(
    ours: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerances: Mapping[torch.dtype, float],
) -> str | None:
    """Tell how far results are off expected ones, if that is more than rounding; NaN is."""
    for one, other in zip(ours, expected, strict=True):
        size = float(torch.linalg.vector_norm(other, dtype=torch.float32))
        difference = float(torch.linalg.vector_norm(one - other, dtype=torch.float32))
        if not difference <= tolerances[other.dtype] * size:
            return f"they would be wrong: {difference:.1e} off results of norm {size:.1e}"
    return None


def seconds_of(work: Callable[[], object], layer: nn.Module) -> float:
    device = next(layer.parameters()).device
    began = time_mark(device)
    work()
    return seconds_between(began, time_mark(device))


@contextmanager
def compiling() -> Iterator[None]:
    """Compile within this context alone; later, calls that need other code run eagerly."""
    torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance("eager_on_recompile")


class Compiler:
    """The code of all classes of layers on this rank, and the choice between compiled and eager."""

    def __init__(self, mode: Literal["auto", True], folder: Path, *, deterministic: bool) -> None:
        """Set torch's compiler up for this process; compiled code lies in `folder`.

        `mode` True: what is right is compiled, and a class that cannot be is an error.
        `deterministic`: no time decides, so that a resumed run chooses alike.
        """
        self._mode = mode
        self._pairs = 0
        if mode == "auto" and not deterministic:
            self._pairs = PAIRS
        self._codes: dict[type[nn.Module], LayerCode] = {}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        inductor = torch._inductor.config
        inductor.compile_threads = torch.get_num_threads()
        inductor.deterministic = deterministic

    def around(
        self,
        layer: nn.Module,
        streamed: StreamedLayer | None = None,
        *,
        trains: bool = True,
    ) -> Callable[..., Any]:
        """Return a layer's forward by the code of its class; `streamed` may keep it in FP8."""
        kind = type(layer)
        if kind not in self._codes:
            self._codes[kind] = LayerCode(kind, pairs=self._pairs, trains=trains)
        code = self._codes[kind]
        if streamed is not None and streamed.source.name == "fp8":
            code.linears[layer] = Fp8Linears(layer, streamed)
        return functools.partial(code.run, layer)

    def choose(self, run_layers: Callable[[], None]) -> set[Backend]:
        """Try every class while `run_layers` runs all layers, and return what computes it.

        Raises UserError where a class must be compiled and cannot be.
        """
        codes = self._codes.values()
        for code in codes:
            code.trial = Trial(code, code.compiled, TOLERANCES)
        run_layers()
        chosen = set()
        for code in codes:
            backend = code.trial.end("compiled", "eager")
            if self._mode is True and backend.reason is not None:
                raise UserError(
                    f"train.compile: {backend.layers} cannot be compiled here: {backend.reason}. "
                    "Set train.compile=auto or false; mmtrain doctor tries the compiler"
                )
            chosen.add(backend)
            if backend.reason is None and code.linears:
                code.trial = Trial(code, code.multiplied, FP8_TOLERANCES)

        # again, for classes whose frozen matrices may be multiplied as they are kept
        run_layers()
        for code in codes:
            if code.trial is None:
                continue
            backend = code.trial.end("fp8", "dequantised")
            chosen.add(backend)
            if backend.reason is None:
                code.forward = code.compiled
                for linears in code.linears.values():
                    linears.multiply()
        return chosen
