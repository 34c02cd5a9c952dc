"""What each rank holds instead of an empty optimizer, and the pure functions around it.

Learning rate and clipping are functions of the step and the global gradient norm, so that a rank which trains nothing
and a rank which trains everything take the same decisions without asking each other twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from mmtrain.base.printing import first_few
from mmtrain.config.schema import OptimizerSection
from mmtrain.plan.optimizers import REST, OptimizerKind, optimizer_of, parameter_groups

NAMES_SHOWN = 5  # of each kind, in an error


class NoOpOptimizer(torch.optim.Optimizer):
    """The explicit optimizer of a rank on which nothing trains.

    torch refuses an empty parameter list ("optimizer got an empty parameter list"), but takes one empty group: `step`
    does nothing, `state_dict` round-trips, LR schedulers accept it. Raises ValueError where a trainable parameter
    exists, since it would be left without updates in silence.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if trainable:
            raise ValueError(f"NoOpOptimizer on a rank that trains {len(trainable)} parameters, first {trainable[0]}")
        super().__init__([{"params": [], "lr": 0.0, "name": REST}], {"lr": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run the closure, if any; there is nothing to update."""
        return None if closure is None else closure()


class MasterWeights:
    """fp32 twins of what trains: the optimizer updates them, gradients add up in them, checkpoints hold them.

    An update of lr 1e-3 is below bf16's rounding of most weights and would be lost in silence. So a parameter stored in
    bf16 computes in bf16, as in the stock model; each micro-batch's gradient is added to its twin's in fp32; and after
    an update it becomes its twin, rounded. A parameter stored in fp32 is its own twin. `by_name` are the twins.
    """

    def __init__(self, stored: Mapping[str, torch.nn.Parameter]) -> None:
        self.by_name = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().to(torch.float32))
            for name, p in stored.items()
        }
        self._pairs = [(p, self.by_name[name]) for name, p in stored.items() if p is not self.by_name[name]]
        for parameter, master in self._pairs:
            parameter.register_post_accumulate_grad_hook(functools.partial(_hand_over_gradient, master))

    def reduce_gradients(self, replicas: dist.ProcessGroup | None) -> None:
        """Add up the gradients of all replicas (None: there is one), also where this one's micro-batches gave none."""
        for master in self.by_name.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if replicas is not None:
                dist.all_reduce(master.grad, group=replicas)

    def squared_norm(self, replicas: int, device: torch.device) -> torch.Tensor:
        """This rank's share of the gradient's squared L2 norm, float64: all `replicas` hold the same gradient."""
        square = torch.zeros((), dtype=torch.float64, device=device)
        for master in self.by_name.values():
            square += torch.linalg.vector_norm(master.grad, dtype=torch.float64).square() / replicas
        return square

    def write_back(self) -> None:
        """After an update: the stored parameters become their twins, rounded to the type they are stored in."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for master in self.by_name.values():
            master.grad = None


def _hand_over_gradient(master: torch.nn.Parameter, parameter: torch.Tensor) -> None:
    gradient = parameter.grad.to(torch.float32)
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def make_optimizer(
    module: torch.nn.Module, trainable: Mapping[str, torch.nn.Parameter], config: OptimizerSection
) -> torch.optim.Optimizer:
    """Make the run's optimizer over this rank's master weights, or a NoOpOptimizer if there are none.

    Its parameter groups are those of `parameter_groups` that hold any of them, with their "name". Raises ValueError for
    a weight that is not fp32: most updates of it would be lost in rounding.
    """
    if not trainable:
        return NoOpOptimizer(module)
    if stored := [f"{name} {weight.dtype}" for name, weight in trainable.items() if weight.dtype != torch.float32]:
        raise ValueError(f"not a master weight in torch.float32: {first_few(stored, NAMES_SHOWN)}")
    groups = [
        {
            "params": [trainable[name] for name in group.parameters],
            "lr": group.lr,
            "weight_decay": group.weight_decay,
            "name": group.name,
        }
        for group in parameter_groups(config, trainable)
        if group.parameters
    ]
    return optimizer_of(config).make(groups, config)


def optimizer_state(
    kind: OptimizerKind, optimizer: torch.optim.Optimizer, trainable: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the state tensors of each trained weight by `NAME/PART`, fp32; `kind` says which parts there are.

    Empty before the first update, and where nothing trains. The tensors are the optimizer's own: the next update
    changes them.
    """
    updated = {name: optimizer.state[p] for name, p in trainable.items() if p in optimizer.state}
    return {f"{name}/{part}": state[part] for name, state in updated.items() for part in kind.state_names}


def load_trained(
    kind: OptimizerKind,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Load copies of master weights, by name, and of the `optimizer_state` that belongs to them (empty: no update yet).

    Raises ValueError for what does not fit the names and shapes that train here, or is not in fp32, before any change.
    """
    shapes = {name: p.shape for name, p in masters.by_name.items()}
    of_state = {
        f"{name}/{part}": torch.Size() if part in kind.counters else shape
        for name, shape in shapes.items()
        for part in kind.state_names
    }
    _check_fit("weights", shapes, weights)
    _check_fit("optimizer states", of_state if state else {}, state)
    optimizer.state.clear()
    with torch.no_grad():
        for name, master in masters.by_name.items():
            master.copy_(weights[name])
            if state:
                devices = dict.fromkeys(kind.moments, master.device) | dict.fromkeys(kind.counters, "cpu")
                optimizer.state[master] = {
                    part: state[f"{name}/{part}"].to(device, copy=True) for part, device in devices.items()
                }
    masters.write_back()


def _check_fit(what: str, shapes: Mapping[str, torch.Size], found: Mapping[str, torch.Tensor]) -> None:
    common = [name for name in shapes if name in found]
    problems = {
        "missing": [name for name in shapes if name not in found],
        "not trained here": [name for name in found if name not in shapes],
        "of another shape": [
            f"{name} {tuple(found[name].shape)} instead of {tuple(shapes[name])}"
            for name in common
            if found[name].shape != shapes[name]
        ],
        "not in float32": [f"{name} {found[name].dtype}" for name in common if found[name].dtype != torch.float32],
    }
    if any(problems.values()):
        said = (f"{problem}: {first_few(names, NAMES_SHOWN)}" for problem, names in problems.items() if names)
        raise ValueError(f"{what} do not fit what trains on this rank; {'; '.join(said)}")


def learning_rate(step: int, max_steps: int, config: OptimizerSection, peak: float) -> float:
    """Learning rate of 0-based `step` of what has this `peak`: linear warm-up, never 0 at its first step, `schedule`.

    Half a cosine (arXiv:1608.03983), a straight line, or, for wsd (arXiv:2404.06395), the peak and then a straight line
    (arXiv:2405.18392) falls to `min_lr_fraction * peak`, which it reaches one step after the last.
    """
    warmup = math.ceil(config.warmup_fraction * max_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    falling = max(1, max_steps - warmup)  # steps
    match config.schedule:
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * ((step - warmup) / falling)))
        case "linear":
            left = (max_steps - step) / falling
        case "constant":
            left = 1.0
        case "wsd":
            left = min(1.0, (max_steps - step) / min(falling, math.ceil(config.decay_fraction * max_steps)))
    return peak * (config.min_lr_fraction + (1 - config.min_lr_fraction) * left)


def clip_coefficient(norm: float, limit: float | None) -> float:
    """Factor that brings a gradient of this global norm to at most `limit` (as torch.nn.utils.clip_grad_norm_)."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
