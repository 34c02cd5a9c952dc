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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mmtrain.base.devices import seconds_between, time_mark
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.model.llm.attention import Backend
from mmtrain.model.llm.last_layer import Forward

# relative to eager: the norm of the difference over the norm
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LEAST_FACTOR = 1.03  # less is within the noise of a GPU's clock
requires_grad = operator.attrgetter("requires_grad")
PAIRS = 3  # timed runs of each layer, eager and compiled in turn


class LayerCode:
    """The forward of all layers of one class: stock, or compiled after a trial that it passed."""

    def __init__(self, kind: type[nn.Module], *, trains: bool) -> None:
        """`trains`: gradients pass through the layers, whose input always has one shape."""
        self.kind = kind
        self.trains = trains
        self.stock = kind.forward
        self.compiled = torch.compile(kind.forward, dynamic=not trains)
        self.is_used = False
        self.trial: Trial | None = None

    def run(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        if self.trial is not None:
            self.trial.run(layer, *arguments, **options)
        forward = self.stock
        if self.is_used:
            forward = self.compiled
        return forward(layer, *arguments, **options)


class Trial:
    """A comparison of the layers of one class, compiled, with eager ones: results and seconds."""

    def __init__(self, code: LayerCode, *, is_timed: bool) -> None:
        self._code = code
        self._pairs = 0
        if is_timed:
            self._pairs = PAIRS
        self._eager: list[float] = []
        self._compiled: list[float] = []
        self._compile_seconds = 0.0
        self._graphs = 0
        self.reason: str | None = None
        """Why the class stays eager."""

    def run(self, layer: nn.Module, *arguments: Any, **options: Any) -> None:
        """Compare one layer on the arguments of its call, unless its class has failed."""
        if self.reason is not None:
            return

        def call(forward: Forward, *, trains: bool = self._code.trains) -> list[Tensor]:
            return outcome(forward, layer, *arguments, trains=trains, **options)

        stock = self._code.stock
        compiled = self._code.compiled
        try:
            # without gradients it is other code, which evaluations run
            expected = call(stock) + call(stock, trains=False)
            graphs = counters["stats"]["unique_graphs"]
            began = time.perf_counter()
            # else torch would run the variants of a class that are too many eagerly, in silence
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                ours = call(compiled) + call(compiled, trains=False)
            seconds = time.perf_counter() - began
            self._compile_seconds = max(self._compile_seconds, seconds)
            self._graphs += counters["stats"]["unique_graphs"] - graphs
            self.reason = disagreement(ours, expected)
            for _ in range(self._pairs):
                self._eager.append(seconds_of(lambda: call(stock), expected[0].device))
                self._compiled.append(seconds_of(lambda: call(compiled), expected[0].device))
        except Exception as error:  # compilers raise what they like
            text = escape(str(error).strip().partition("\n")[0], 200)
            self.reason = text or type(error).__name__

    def end(self) -> Backend:
        """Let the class run compiled if that is right and, where timed, faster."""
        code = self._code
        code.trial = None
        factor = None
        if self.reason is None and not self._graphs:
            self.reason = "torch runs all of their code eagerly"
        if self.reason is None and self._pairs:
            factor = statistics.median(self._eager) / statistics.median(self._compiled)
            if factor < LEAST_FACTOR:
                self.reason = f"compiled they take {1 / factor:.2f} times as long"
        code.is_used = self.reason is None
        name = code.kind.__name__
        if not code.is_used:
            return Backend(name, "eager", self.reason, slow=factor is None)
        return Backend(name, "compiled", factor=factor, seconds=self._compile_seconds)


def outcome(
    forward: Forward,
    layer: nn.Module,
    hidden: Tensor,
    *arguments: Any,
    trains: bool,
    **options: Any,
) -> list[Tensor]:
    """Return a layer's result and, if it `trains`, gradients of its input and of what it trains."""
    hidden = hidden.detach().requires_grad_(trains)
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


def disagreement(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Tell how far results are off expected ones, if that is more than rounding; NaN is."""
    for one, other in zip(ours, expected, strict=True):
        size = float(torch.linalg.vector_norm(other, dtype=torch.float32))
        difference = float(torch.linalg.vector_norm(one - other, dtype=torch.float32))
        if not difference <= TOLERANCES[other.dtype] * size:
            return f"compiled they are wrong: {difference:.1e} off results of norm {size:.1e}"
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


class Compiler:
    """The code of all classes of layers on this rank, and the choice between compiled and eager."""

    def __init__(self, mode: Literal["auto", True], folder: Path, *, deterministic: bool) -> None:
        """Set torch's compiler up for this process; compiled code lies in `folder`.

        `mode` True: what is right is compiled, and a class that cannot be is an error.
        `deterministic`: no time decides, so that a resumed run chooses alike.
        """
        self._mode = mode
        self._is_timed = mode == "auto" and not deterministic
        self._codes: dict[type[nn.Module], LayerCode] = {}
        # What lies there is executed. Torch's own folder is a temporary one with a known name.
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        inductor = torch._inductor.config
        inductor.compile_threads = torch.get_num_threads()
        inductor.deterministic = deterministic

    def around(self, layer: nn.Module, *, trains: bool = True) -> Callable[..., Any]:
        """Return a layer's forward that is compiled where its class is."""
        kind = type(layer)
        if kind not in self._codes:
            self._codes[kind] = LayerCode(kind, trains=trains)
        return functools.partial(self._codes[kind].run, layer)

    def choose(self, run_layers: Callable[[], None]) -> set[Backend]:
        """Try every class while `run_layers` runs all layers, and return what computes it.

        Raises UserError where a class must be compiled and cannot be.
        """
        for code in self._codes.values():
            code.trial = Trial(code, is_timed=self._is_timed)
        run_layers()
        chosen = set()
        for code in self._codes.values():
            backend = code.trial.end()
            if self._mode is True and backend.reason is not None:
                raise UserError(
                    f"train.compile: {backend.layers} cannot be compiled here: {backend.reason}. "
                    "Set train.compile=auto or false; mmtrain doctor tries the compiler"
                )
            chosen.add(backend)
        return chosen
