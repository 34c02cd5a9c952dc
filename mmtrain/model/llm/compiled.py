"""Layers compiled by torch.compile, which fuses their elementwise operations.

a class of layers --trial on a random micro-batch of the run's shape--> compiled, where it agrees
    with eager and is faster; else eager

Compiled is the stock forward of a class, one layer at a time, below recomputation and streaming.
Packed attention and recurrent mixers interrupt it: their documents differ in every micro-batch. A
last decoder layer that computes supervised tokens only (last_layer.py) stays eager.
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
from mmtrain.model.llm.kernels import Backend
from mmtrain.model.llm.last_layer import Forward, states_of
from mmtrain.model.weights.fp8 import Fp8Linears
from mmtrain.model.weights.streaming import StreamedLayer

# norm of the difference from eager over the norm: the bounds of `mmtrain doctor`
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# Of FP8 products from those of dequantised weights. Tiny layers of llama, gemma2 and qwen3_moe were
# off by 0.02 to 0.07; a wrong scale or matrix is off by more than this.
FP8_TOLERANCES = dict.fromkeys(TOLERANCES, 0.15)
# chosen, not measured: no GPU has run it
LEAST_FACTOR = 1.03
PAIRS = 3  # timed runs of each layer, old code and new in turn
requires_grad = operator.attrgetter("requires_grad")


class LayerCode:
    """The forward of all layers of one class: stock, or other code after a trial that it passed."""

    def __init__(
        self,
        kind: type[nn.Module],
        *,
        pairs: int = 0,
        differentiable: bool = True,
    ) -> None:
        """`differentiable`: decoder layers, compared with gradients and compiled for one shape.
        False: encoder blocks, compared forward only and compiled for any number of tiles but one.
        """
        self.kind = kind
        self.pairs = pairs
        self.differentiable = differentiable
        self.forward = kind.forward
        self.linears: dict[nn.Module, Fp8Linears] = {}
        """FP8 linears by layer, for layers kept in FP8."""
        self.trial: Trial | None = None

    def run(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        if self.trial is not None:
            self.trial.run(layer, *arguments, **options)
        return self.forward(layer, *arguments, **options)

    @functools.cached_property
    def _compiled(self) -> Forward:
        # at the first call, which is a trial: torch.compile itself may raise
        return torch.compile(self.kind.forward, dynamic=False)

    def compiled(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        return self._compiled(layer, *arguments, **options)

    def multiplied(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Run compiled code that multiplies by what is kept in FP8."""
        linears = self.linears.get(layer)
        if linears is None:  # a layer that trains
            return self.compiled(layer, *arguments, **options)
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
        if self.reason is None:
            try:
                self.reason = self._compare(layer, arguments, options)
            except Exception as error:  # compilers raise what they like
                text = escape(str(error).strip().partition("\n")[0], 200)
                self.reason = text or type(error).__name__

    def _compare(
        self,
        layer: nn.Module,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> str | None:
        code = self._code

        def call(forward: Forward) -> list[Tensor]:
            results = outcome(forward, layer, *arguments, **options)
            if code.differentiable:
                results += gradients_of(forward, layer, *arguments, **options)
            return results

        # a cache that cannot be written is a reason to stay eager
        Path(cache_dir()).chmod(0o700)
        if not code.differentiable:
            torch._dynamo.mark_dynamic(arguments[0], 0)
        expected = call(code.forward)
        graphs = counters["stats"]["unique_graphs"]
        began = time.perf_counter()
        # else torch would run more variants of a class than its limit eagerly, without notice
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            ours = call(self._candidate)
        self._compile_seconds = max(self._compile_seconds, time.perf_counter() - began)
        self._graphs += counters["stats"]["unique_graphs"] - graphs
        wrong = disagreement(ours, expected, self._tolerances)
        if wrong is not None:
            return wrong

        device = expected[0].device
        for _ in range(code.pairs):
            self._used_seconds.append(seconds_of(lambda: call(code.forward), device))
            self._candidate_seconds.append(seconds_of(lambda: call(self._candidate), device))
        return None

    def end(self, passed: str, failed: str) -> Backend:
        """Decide the trial and return the Backend: `passed`, with the class's code replaced, or
        `failed`, with the reason.
        """
        code = self._code
        code.trial = None
        factor = None
        is_fault = True
        if self.reason is None and not self._graphs:
            self.reason = "torch runs all of their code eagerly"
        if self.reason is None and self._used_seconds:
            used = statistics.median(self._used_seconds)
            factor = used / statistics.median(self._candidate_seconds)
            if factor < LEAST_FACTOR:
                self.reason = f"it is not {LEAST_FACTOR} times as fast"
                is_fault = False
        name = code.kind.__name__
        if self.reason is not None:
            return Backend(name, failed, self.reason, slow=is_fault)
        code.forward = self._candidate
        return Backend(name, passed, factor=factor, seconds=self._compile_seconds)


@torch.no_grad()
def outcome(forward: Forward, layer: nn.Module, *arguments: Any, **options: Any) -> list[Tensor]:
    """Return a layer's result without gradients, as evaluations compute it."""
    return [states_of(forward(layer, *arguments, **options))]


@torch.enable_grad()
def gradients_of(
    forward: Forward,
    layer: nn.Module,
    hidden: Tensor,
    *arguments: Any,
    **options: Any,
) -> list[Tensor]:
    """Return a layer's result, and gradients of its input (B, L, D) and of what it trains."""
    hidden = hidden.detach().requires_grad_()
    output = states_of(forward(layer, hidden, *arguments, **options))
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
    """Return a message if a result differs from the expected one by more than its tolerance, or is
    NaN; else None.
    """
    for one, other in zip(ours, expected, strict=True):
        size = float(torch.linalg.vector_norm(other, dtype=torch.float32))
        difference = float(torch.linalg.vector_norm(one - other, dtype=torch.float32))
        # not `>`, which NaN would pass
        if not difference <= tolerances[other.dtype] * size:
            return f"wrong results: off by {difference / size:.0e} of their norm"
    return None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
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


def set_up(folder: Path, *, deterministic: bool) -> None:
    """Let torch's compiler in this process use `folder` for its code, and the rank's cores."""
    # Code that lies there is executed. Torch's own folder is a temporary one with a known name.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    inductor = torch._inductor.config
    inductor.compile_threads = torch.get_num_threads()  # else up to 32 processes a rank
    inductor.deterministic = deterministic


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
        set_up(folder, deterministic=deterministic)

    def around(
        self,
        layer: nn.Module,
        streamed: StreamedLayer | None = None,
        *,
        differentiable: bool = True,
    ) -> Callable[..., Any]:
        """Return a layer's forward by the code of its class; `streamed` may keep it in FP8."""
        kind = type(layer)
        if kind not in self._codes:
            self._codes[kind] = LayerCode(
                kind,
                pairs=self._pairs,
                differentiable=differentiable,
            )
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

        # Again, for classes whose frozen matrices may be multiplied as they are kept. Their time
        # counts no dequantisation, which is saved besides.
        quantised = list(filter(operator.attrgetter("trial"), codes))
        if quantised:
            run_layers()
        for code in quantised:
            backend = code.trial.end("fp8", "dequantised")
            chosen.add(backend)
            if backend.reason is None:
                # from now on for good, not call by call
                code.forward = code.compiled
                for linears in code.linears.values():
                    linears.multiply()
        return chosen
