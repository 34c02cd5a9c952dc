"""Prove that a run trains what its plan says, that nothing frozen changes and that everything
trainable moves.

Before the first step each rank compares its tensors with the plan. At the end it proves by
fingerprint that every frozen tensor is bit for bit what was loaded and that every trainable one
that had a gradient of more than rounding has moved. `audit.json` is the record of all ranks.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import first_few
from mmtrain.config.model import ModelSection
from mmtrain.data.stream.images import image_transform
from mmtrain.engine.optimizer import NAMES_SHOWN
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.families import llm_config
from mmtrain.facts.model_files import model_config, model_folder
from mmtrain.facts.vision_files import is_timm_name
from mmtrain.model.stage import Stage, streamed_of
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.plan.plan import Plan, RankPlan

SWALLOWED = 0.01  # of AdamW's eps: gradients below it make a hundredth of a step
# of config.json: they change nothing
IGNORED_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class AuditError(RuntimeError):
    """Raised where a run's tensors are not as its plan says; the message names rank and tensor."""


class RankAudit:
    """One rank's watch over its tensors, from loading to the end.

    `masters` are the fp32 weights of what trains, by global name: their movement counts, since an
    update can be too small to show in bf16. Frozen are all other parameters, and the buffers that
    checkpoints hold.

    Raises: AuditError where the rank's tensors are not those of the plan; UserError for weights
    that are not finite.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, Tensor],
    ) -> None:
        self.plan = plan
        self._optimizer = optimizer
        # as plans call it: NoOp where nothing trains
        self.optimizer = type(optimizer).__name__.removesuffix("Optimizer")
        self.masters = masters
        self.stored: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        for stage in stages.values():
            for name, parameter in stage.global_parameters():
                tensors = self.stored if parameter.requires_grad else self.frozen
                tensors[name] = parameter
        self._check_plan(stages)

        self._buffers = {}
        for number, stage in stages.items():
            self._buffers |= {name: fingerprint(b) for name, b in stage.layer_buffers()}
            saved = set(stage.state_dict())
            for name, buffer in stage.named_buffers():
                if name in saved:
                    self.frozen[f"stage {number} {name}"] = buffer

        self._layers = {}
        self._in_files = {}  # fingerprints of streamed weights
        self._streamed = streamed_of(stages.values())
        if self._streamed is not None:
            self._layers = self._streamed.layers
        for layer in self._layers.values():
            self._in_files |= zip(layer.names, layer.loaded, strict=True)

        self.before = {}
        self._note_start()

    def _note_start(self) -> None:
        """Check each tensor's values, and remember its fingerprint and version."""
        is_exact = self._streamed is not None and self._streamed.source.is_exact
        for name, tensor, digest in self._tensors():
            self._refuse_non_finite(name, tensor)
            if is_exact and digest != self._in_files.get(name, digest):
                raise self._error(
                    f"{name} is fetched with other values than its file has here. "
                    "The model's files must be equal on every machine"
                )
            self.before[name] = digest
        self._versions = {name: tensor._version for name, tensor in self.frozen.items()}

    def _tensors(self) -> Iterator[tuple[str, Tensor, str]]:
        """Yield name, tensor and fingerprint of all tensors, those of streamed layers while the
        layer is whole.
        """
        for name, tensor in (*self.frozen.items(), *self.masters.items()):
            if name not in self._in_files:
                yield name, tensor, fingerprint(tensor)
        for number in self._layers:
            with self._streamed.whole(number) as layer:
                digests = self._streamed.source.fingerprints(layer)
                yield from zip(layer.names, layer.parameters, digests, strict=True)

    def _error(self, message: str) -> AuditError:
        stages = ", ".join(str(stage.stage) for stage in self.plan.stages)
        return AuditError(f"rank {self.plan.rank} (stage {stages}): {message}")

    def _check_plan(self, stages: Mapping[int, Stage]) -> None:
        named = set(map(id, self.stored.values()))
        for stage in stages.values():
            for parameter in stage.parameters():
                if parameter.requires_grad and id(parameter) not in named:
                    raise self._error("a trainable parameter has no global name")

        # no plan has an adapter that does not train
        names = {*self.stored, *filter(is_adapter, self.frozen)}
        for odd in sorted(names.symmetric_difference(self.plan.trainable_names)):
            if odd in names:
                raise self._error(f"holds {odd}, which the plan does not train")
            raise self._error(f"does not train {odd}, which the plan trains")

        if self.optimizer != self.plan.optimizer:
            raise self._error(
                f"holds the optimizer {self.optimizer}, but the plan says {self.plan.optimizer}"
            )
        optimized = set()
        for group in self._optimizer.param_groups:
            optimized.update(map(id, group["params"]))
        is_complete = optimized == set(map(id, self.masters.values()))
        if self.masters.keys() != self.stored.keys() or not is_complete:
            raise self._error(
                f"{len(self.stored)} tensors train, but the optimizer holds {len(optimized)}"
            )

    def _refuse_non_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            source = "the model's folder"
            if name.startswith("projector."):
                source = "model.projector.init_from"
            raise UserError(
                f"rank {self.plan.rank} read NaN or infinity as {name}. Its file in {source} "
                "is damaged on that rank's machine. Download it again"
            )

    def start(self) -> dict[str, Any]:
        """Return what this rank begins with, for `check_replicas`, `model_fingerprint` and
        checkpoints.
        """
        parameters = {}
        for name, tensor in self.frozen.items():
            if isinstance(tensor, torch.nn.Parameter):
                parameters[name] = self.before[name]
        return {
            "rank": self.plan.rank,
            "tensors": self.before,
            "frozen_parameters": parameters,
            "files": {**parameters, **self._in_files, **self._buffers},
        }

    def notes(self, saw_gradient: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return for a checkpoint each trained tensor's fingerprint at the run's start, and if it
        had a gradient.
        """
        return {
            name: {"begin": self.before[name], "had_gradient": name in saw_gradient}
            for name in self.masters
        }

    def begin_with(self, notes: Mapping[str, Mapping[str, Any]]) -> None:
        """Let a resumed run compare with the start of the run that it continues; `notes` are the
        checkpoint's.
        """
        self.before |= {name: notes[name]["begin"] for name in self.masters}

    def check_versions(self) -> None:
        """Check, for free, that no in-place operation touched a frozen tensor (writes to `.data`
        are missed).
        """
        for name, tensor in self.frozen.items():
            if tensor._version != self._versions[name]:
                raise self._error(f"frozen tensor {name} was written to")

    def finish(self, saw_gradient: Collection[str]) -> dict[str, Any]:
        """Compare with the start; return this rank's record, with what went wrong under
        "failures".
        """
        after = {name: digest for name, _, digest in self._tensors()}
        changed = {name for name, digest in after.items() if digest != self.before[name]}
        failures = [f"frozen tensor {name} changed" for name in self.frozen if name in changed]
        trainable = []
        for name, master in self.masters.items():
            had_gradient = name in saw_gradient
            moved = name in changed
            if had_gradient and not moved and not self._is_swallowed(master):
                failures.append(f"trainable tensor {name} had a gradient but did not move")
            if not master.isfinite().all():
                failures.append(f"{name} is not finite")
            elif not torch.equal(self.stored[name], master.to(self.stored[name].dtype)):
                failures.append(f"{name} computes with other values than those trained")
            trainable.append(
                {
                    "name": name,
                    "shape": list(master.shape),
                    "had_gradient": had_gradient,
                    "moved": moved,
                    "fingerprint": after[name],
                }
            )

        streamed_from = None
        fetches = 0
        if self._streamed is not None:
            streamed_from = self._streamed.source.name
            fetches = self._streamed.fetch_count
            planned = self._streamed.planned_fetches
            if fetches != planned:
                failures.append(f"{fetches} layers were fetched, but {planned} were planned")
        return {
            "rank": self.plan.rank,
            "pipeline": self.plan.pipeline,
            "data": self.plan.data,
            "optimizer": self.optimizer,
            "reason": self.plan.reason,
            "trainable": trainable,
            "trainable_parameters": sum(p.numel() for p in self.masters.values()),
            "frozen": {
                "tensors": len(self.frozen),
                "bytes": sum(p.nbytes for p in self.frozen.values()),
                "fingerprint_before": _combined(self.before, self.frozen),
                "fingerprint_after": _combined(after, self.frozen),
                "streamed_from": streamed_from,
                "streamed_layers": len(self._layers),
                "fetches": fetches,
            },
            "failures": failures,
        }

    def _is_swallowed(self, master: Tensor) -> bool:
        """Whether AdamW's eps leaves next to nothing of this weight's updates, as of a key's bias.

        Softmax does not depend on that bias, so its gradient is mere rounding.
        """
        state = self._optimizer.state.get(master)
        if not state:
            return False
        limit = SWALLOWED * self._optimizer.defaults["eps"]
        return 0 < state["exp_avg_sq"].max().sqrt() < limit


def _combined(
    fingerprints: Mapping[str, str],
    names: Collection[str],
) -> str:
    return _digest(f"{name} {fingerprints[name]}" for name in sorted(names))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def model_fingerprint(ranks: Iterable[Mapping[str, str]]) -> str:
    """Return one fingerprint of all frozen parameters, equal in every layout.

    `ranks`: the "frozen_parameters" of each rank's `RankAudit.start()`. A tied matrix that two
    ranks hold counts once.
    """
    parameters = set()
    for by_name in ranks:
        parameters.update(by_name.values())
    return _digest(sorted(parameters))


def settings_fingerprint(model: ModelSection) -> str:
    """Return a fingerprint of the frozen models' config.json files and of the encoder's pixel
    statistics.
    """
    llm = llm_config(model_folder(model.llm.path))
    settings = [{key: value for key, value in llm.items() if key not in IGNORED_KEYS}]
    if model.vision is not None:
        vision = name = model.vision.name
        if not is_timm_name(name):
            vision = model_config(model_folder(name))
        settings += [vision, asdict(image_transform(name))]
    return _digest([json.dumps(settings, sort_keys=True)])


def check_replicas(starts: Sequence[dict[str, Any]]) -> None:
    """Raise AuditError unless all ranks that hold a tensor begin with the same values of it.

    Nothing is broadcast: each rank reads its own files, and a stale copy on one machine would train
    unnoticed. `starts` are all ranks' `RankAudit.start()`. Besides replicas, slices of an encoder
    hold the same tensors: its stem.
    """
    holders: dict[str, dict[str, Any]] = {}
    for start in starts:
        for name, digest in start["tensors"].items():
            first = holders.setdefault(name, start)
            if digest != first["tensors"][name]:
                raise AuditError(
                    f"ranks {first['rank']} and {start['rank']} both hold {name} but loaded "
                    "different values. The model's files must be equal on every machine"
                )


def write_audit(
    path: Path,
    plan: Plan,
    records: Sequence[dict[str, Any]],
    *,
    learns: bool,
) -> str:
    """Compare replicas and write `audit.json` with every rank's record; return the result in one
    sentence.

    Raises AuditError if anything failed. A run that `learns`, with a learning rate above 0, must
    have had a gradient.
    """
    failures = []
    for record in records:
        failures += [f"rank {record['rank']}: {failure}" for failure in record["failures"]]

    tensors = []
    twins = {}  # the first record of each pipeline rank
    for record in records:
        twin = twins.setdefault(record["pipeline"], record)
        if record["trainable"] != twin["trainable"]:
            failures.append(
                f"ranks {twin['rank']} and {record['rank']} have different values for "
                "shared parameters"
            )
        if record["data"] == 0:
            tensors += record["trainable"]
    unmoved = [tensor["name"] for tensor in tensors if not tensor["moved"]]
    if learns and not any(tensor["had_gradient"] for tensor in tensors):
        failures.append(
            f"nothing trained: no gradient ever reached {', '.join(plan.trainable)}. "
            "Do the data have images and answers?"
        )

    moved = f"{len(tensors) - len(unmoved)} of {len(tensors)} trainable tensors moved"
    result = f"{moved}, frozen weights unchanged on all ranks"
    if unmoved:
        result += (
            f"; a learning rate of 0 or too small a gradient kept {first_few(unmoved, NAMES_SHOWN)}"
        )
    content = {
        "pipeline": plan.pipeline,
        "data": plan.data,
        "passed": not failures,
        "failures": failures,
        "result": result,
        "ranks": records,
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")
    if failures:
        raise AuditError(f"{len(failures)} failure(s), all in {path}: " + "; ".join(failures[:5]))
    return result
