"""Weights that train on a rank with their optimizer, and the functions that decide an update.

Learning rate and clipping are functions of the step and the global gradient norm, so that a rank
which trains nothing and a rank which trains everything take the same decisions without asking each
other.
"""

import functools
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.base.printing import first_few
from mmtrain.config.schema import OptimizerSection
from mmtrain.plan.optimizer_kinds import REST, optimizer_of, parameter_groups

NAMES_SHOWN = 5  # of each kind, in an error


class NoOpOptimizer(torch.optim.SGD):
    """The explicit optimizer of a rank on which nothing trains.

    torch refuses an empty parameter list ("optimizer got an empty parameter list"), but takes one
    empty group.
    """

    def __init__(self) -> None:
        super().__init__([{"params": [], "name": REST}], lr=0.0)


class MasterWeights:
    """fp32 masters of the trained weights, `by_name`, with their `optimizer`. They collect
    gradients and go into checkpoints.

    bf16's rounding would swallow most updates of lr 1e-3. So each micro-batch's gradient is added
    to its master's in fp32, and after an update a parameter stored in bf16 becomes its master,
    rounded. One in fp32 is its own master.
    """

    def __init__(
        self,
        stored: Mapping[str, nn.Parameter],
        config: OptimizerSection,
    ) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self._pairs = []
        for name, parameter in stored.items():
            master = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().to(torch.float32))
                hand_over = functools.partial(_hand_over_gradient, master)
                parameter.register_post_accumulate_grad_hook(hand_over)
                self._pairs.append((parameter, master))
            self.by_name[name] = master
        self.config = config
        self.optimizer = make_optimizer(self.by_name, config)
        self._kind = optimizer_of(config)

    def reduce_gradients(self, replicas: dist.ProcessGroup | None) -> None:
        """Add up the gradients of all replicas (None: there is one); a replica without a gradient
        adds zeros.
        """
        for master in self.by_name.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if replicas is not None:
                dist.all_reduce(master.grad, group=replicas)

    def squared_norm(
        self,
        replicas: int,
        device: torch.device,
    ) -> Tensor:
        """Return this rank's share of the gradient's squared L2 norm, float64; `replicas` hold the
        same gradient.
        """
        square = torch.zeros((), dtype=torch.float64, device=device)
        for master in self.by_name.values():
            square += torch.linalg.vector_norm(master.grad, dtype=torch.float64).square() / replicas
        return square

    def write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for master in self.by_name.values():
            master.grad = None

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's own state tensors of each weight by `NAME/PART`, fp32; none before
        an update.
        """
        tensors = {}
        for name, master in self.by_name.items():
            if master in self.optimizer.state:
                for part in (*self._kind.moments, *self._kind.counters):
                    tensors[f"{name}/{part}"] = self.optimizer.state[master][part]
        return tensors

    def load(
        self,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> None:
        """Load copies of master weights, by name, and of their `optimizer_state()` (empty: no
        update yet).

        Raises ValueError, before any change, for other names or shapes than those that train here.
        """
        kind = self._kind
        expected = set()
        for name, master in self.by_name.items():
            expected.add((name, master.shape))
            if state:
                expected |= {(f"{name}/{part}", master.shape) for part in kind.moments}
                expected |= {(f"{name}/{part}", torch.Size()) for part in kind.counters}
        loaded = {(name, tensor.shape) for name, tensor in (*weights.items(), *state.items())}
        odd = sorted({name for name, _ in expected ^ loaded})
        if odd:
            raise ValueError(
                f"loaded tensors do not fit what trains on this rank: {first_few(odd, NAMES_SHOWN)}"
            )

        self.optimizer.state.clear()
        with torch.no_grad():
            for name, master in self.by_name.items():
                master.copy_(weights[name])
                if state:
                    devices = dict.fromkeys(kind.moments, master.device)
                    devices |= dict.fromkeys(kind.counters, "cpu")
                    parts = self.optimizer.state[master] = {}
                    for part, device in devices.items():
                        parts[part] = state[f"{name}/{part}"].to(device, copy=True)
        self.write_back()


def _hand_over_gradient(
    master: nn.Parameter,
    parameter: Tensor,
) -> None:
    gradient = parameter.grad.to(torch.float32)
    if master.grad is None:
        master.grad = gradient
    else:
        master.grad.add_(gradient)
    parameter.grad = None


def make_optimizer(
    trainable: Mapping[str, nn.Parameter],
    config: OptimizerSection,
) -> torch.optim.Optimizer:
    """Make the run's optimizer over this rank's master weights, or a NoOpOptimizer if there are
    none.
    """
    if not trainable:
        return NoOpOptimizer()
    groups = []
    for group in parameter_groups(config, trainable):
        if group.parameters:
            groups.append(
                {
                    "params": [trainable[name] for name in group.parameters],
                    "lr": group.lr,
                    "weight_decay": group.weight_decay,
                    "name": group.name,
                }
            )
    return optimizer_of(config).make(groups, config)


def learning_rate(
    step: int,
    max_steps: int,
    config: OptimizerSection,
    peak: float,
) -> float:
    """Return the learning rate at 0-based `step`: a linear warm-up, which begins above 0, to
    `peak`; then `schedule`.

    `constant` stays there. `cosine` (arXiv:1608.03983) and `linear` fall at once; `wsd`
    (arXiv:2404.06395) stays, then falls in a straight line (arXiv:2405.18392). Each would reach
    `min_lr_fraction * peak` one step after the last.
    """
    warmup = math.ceil(config.warmup_fraction * max_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    falling = max(1, max_steps - warmup)  # steps
    match config.schedule:
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * ((step - warmup) / falling)))
        case "linear":
            share = (max_steps - step) / falling
        case "constant":
            share = 1.0
        case "wsd":
            decay = min(falling, math.ceil(config.decay_fraction * max_steps))
            share = min(1.0, (max_steps - step) / decay)
    return peak * (config.min_lr_fraction + (1 - config.min_lr_fraction) * share)


def clip_coefficient(norm: float, limit: float | None) -> float:
    """Return the factor that brings a gradient of this global norm to at most `limit` (as torch's
    clip_grad_norm_).
    """
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
