"""The run checks itself: who trains what, that nothing frozen changed and that everything trainable moved.

Before step 0 each rank compares what it holds with the plan; at the end it proves by fingerprint that every frozen
tensor is bit for bit what was loaded and that every trainable one that had a gradient has moved. `audit.json` is the
record of all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.images import image_transform
from mmtrain.engine.optimizer import NoOpOptimizer
from mmtrain.models.facts.adapters import is_adapter
from mmtrain.models.facts.families import llm_config
from mmtrain.models.facts.model_files import model_folder, read_json
from mmtrain.models.facts.vision_files import is_timm_name
from mmtrain.models.modules.stage import Stage
from mmtrain.models.weights.fingerprint import fingerprint
from mmtrain.models.weights.streaming import StreamedLayer, StreamedLayers
from mmtrain.plan.plan import Plan, RankPlan

UNMEANT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # of config.json: they change nothing here


class AuditError(RuntimeError):
    """What the run did is not what the plan says; the message names rank and tensor."""


class RankAudit:
    """One rank's watch over its tensors, from loading to the end.

    `masters` are the fp32 weights of what trains, by global name: their movement counts, since an update can be too
    small to show in bf16. Frozen are all other parameters, and the buffers that checkpoints hold. Raises AuditError
    where the rank holds something else than the plan says, UserError for weights that are not finite.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, torch.Tensor],
    ) -> None:
        self.plan = plan
        self.optimizer = "NoOp" if isinstance(optimizer, NoOpOptimizer) else type(optimizer).__name__
        self.masters = masters
        named = {name: p for stage in stages.values() for name, p in stage.global_parameters()}
        self.stored = {name: p for name, p in named.items() if p.requires_grad}
        self.frozen: dict[str, torch.Tensor] = {name: p for name, p in named.items() if not p.requires_grad}
        self._check_holdings(stages, optimizer)
        self._buffers = {name: fingerprint(b) for stage in stages.values() for name, b in stage.layer_buffers()}
        for number, stage in stages.items():
            kept = set(stage.state_dict())
            self.frozen |= {f"stage {number} {name}": b for name, b in stage.named_buffers() if name in kept}
        # A rank has one, whatever its stages are; none where nothing of it is streamed.
        self._streamed = [stage.streamed for stage in stages.values() if stage.streamed is not None][:1]
        self._check_finite()
        self.before = self._fingerprints()
        self._check_fetched()
        self._versions = {name: tensor._version for name, tensor in self.frozen.items()}

    def _whole_layers(self) -> Iterator[tuple[StreamedLayers, StreamedLayer]]:
        """Each streamed layer in turn, while it is whole."""
        for streamed in self._streamed:
            for number in streamed.layers:
                with streamed.whole(number) as layer:
                    yield streamed, layer

    def _resident(self) -> dict[str, torch.Tensor]:
        """All tensors by name, but for those of streamed layers."""
        elsewhere = {name for streamed in self._streamed for layer in streamed.layers.values() for name in layer.names}
        return {name: x for name, x in {**self.frozen, **self.masters}.items() if name not in elsewhere}

    def _fingerprints(self) -> dict[str, str]:
        found = {name: fingerprint(tensor) for name, tensor in self._resident().items()}
        for streamed, layer in self._whole_layers():
            found |= zip(layer.names, streamed.source.fingerprints(layer), strict=True)
        return found

    def _check_fetched(self) -> None:
        """Raises AuditError for a weight that is fetched otherwise than it was read from its file."""
        for streamed in self._streamed:
            for layer in streamed.layers.values() if streamed.source.is_exact else ():
                for name, loaded in zip(layer.names, layer.loaded, strict=True):
                    if self.before[name] != loaded:
                        raise self._fail(
                            f"{name} is fetched with other values than its file has here: the model's files must be "
                            "the same on every machine"
                        )

    def _fail(self, message: str) -> AuditError:
        stages = ", ".join(str(stage.stage) for stage in self.plan.stages)
        return AuditError(f"rank {self.plan.rank} (stage {stages}): {message}")

    def _check_holdings(self, stages: Mapping[int, Stage], optimizer: torch.optim.Optimizer) -> None:
        trainable = [p for stage in stages.values() for p in stage.parameters() if p.requires_grad]
        if {id(p) for p in trainable} != {id(p) for p in self.stored.values()}:
            raise self._fail("some trainable parameter has no global name")
        held = {*self.stored, *filter(is_adapter, self.frozen)}  # no plan has an adapter that does not train
        if odd := sorted(held.symmetric_difference(self.plan.trainable_names)):
            held_alone = f"holds {odd[0]}, which the plan does not train"
            raise self._fail(held_alone if odd[0] in held else f"does not train {odd[0]}, which the plan trains")
        if self.optimizer != self.plan.optimizer:
            raise self._fail(f"holds the optimizer {self.optimizer}, but the plan says {self.plan.optimizer}")
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self.masters.keys() != self.stored.keys() or optimized != {id(p) for p in self.masters.values()}:
            raise self._fail(f"{len(self.stored)} tensors train, but the optimizer holds {len(optimized)}")

    def _check_finite(self) -> None:
        """Raises UserError naming a tensor that was loaded with NaN or infinity: no step could come out right."""
        for name, tensor in self._resident().items():
            self._refuse_non_finite(name, tensor)
        for _, layer in self._whole_layers():
            for name, tensor in zip(layer.names, layer.parameters, strict=True):
                self._refuse_non_finite(name, tensor)

    def _refuse_non_finite(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and not bool(tensor.sum(dtype=torch.float32).isfinite()):
            source = "model.projector.init_from" if name.startswith("projector.") else "the model's folder"
            raise UserError(
                f"rank {self.plan.rank} read NaN or infinity as {name}: its file, of {source}, is damaged on that "
                "rank's machine; get it again"
            )

    def start(self) -> dict[str, Any]:
        """What this rank begins with, for `check_replicas` and `model_fingerprint`."""
        parameters = [name for name, tensor in self.frozen.items() if isinstance(tensor, torch.nn.Parameter)]
        layers = [layer for streamed in self._streamed for layer in streamed.layers.values()]
        in_files = {name: found for layer in layers for name, found in zip(layer.names, layer.loaded, strict=True)}
        return {
            "rank": self.plan.rank,
            "pipeline": self.plan.pipeline,
            "frozen": _combined(self.before, self.frozen),
            "trainable": _combined(self.before, self.masters),
            "frozen_parameters": {name: self.before[name] for name in parameters},
            "files": {name: in_files.get(name, self.before[name]) for name in parameters} | self._buffers,
        }

    def notes(self, saw_gradient: Collection[str]) -> dict[str, dict[str, Any]]:
        """For a checkpoint, of each trained tensor: its fingerprint as the run began, and whether it had a gradient."""
        return {name: {"begin": self.before[name], "had_gradient": name in saw_gradient} for name in self.masters}

    def begin_with(self, notes: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the beginning of a resumed run, from a checkpoint's `notes`, as that of the tensors that train."""
        self.before |= {name: notes[name]["begin"] for name in self.masters}

    def check_versions(self) -> None:
        """Free check for every step: no in-place operation touched a frozen tensor (writes to `.data` are missed)."""
        for name, tensor in self.frozen.items():
            if tensor._version != self._versions[name]:
                raise self._fail(f"frozen tensor {name} was written to")

    def finish(self, saw_gradient: Collection[str]) -> dict[str, Any]:
        """Compare with the beginning; returns this rank's record, with what went wrong under "failures"."""
        after = self._fingerprints()
        moved = {name: after[name] != self.before[name] for name in after}
        failures = [f"frozen tensor {name} changed" for name in self.frozen if moved[name]]
        for name, master in self.masters.items():
            if name in saw_gradient and not moved[name]:
                failures.append(f"trainable tensor {name} had a gradient but did not move")
            if not bool(master.isfinite().all()):
                failures.append(f"{name} is not finite")
            elif not torch.equal(self.stored[name], master.to(self.stored[name].dtype)):
                failures.append(f"{name} computes with other values than were trained")
        layers = count = 0
        for streamed in self._streamed:
            layers, count, planned = len(streamed.layers), streamed.fetch_count, streamed.planned_fetches
            if count != planned:
                failures.append(f"{count} layers were fetched where the instruction lists ask for {planned}")
        return {
            "rank": self.plan.rank,
            "pipeline": self.plan.pipeline,
            "data": self.plan.data,
            "optimizer": self.optimizer,
            "reason": self.plan.reason,
            "trainable": [
                {
                    "name": name,
                    "shape": list(p.shape),
                    "had_gradient": name in saw_gradient,
                    "moved": moved[name],
                    "fingerprint": after[name],
                }
                for name, p in self.masters.items()
            ],
            "trainable_parameters": sum(p.numel() for p in self.masters.values()),
            "frozen": {
                "tensors": len(self.frozen),
                "bytes": sum(p.numel() * p.element_size() for p in self.frozen.values()),
                "fingerprint_before": _combined(self.before, self.frozen),
                "fingerprint_after": _combined(after, self.frozen),
                "streamed_from": self._streamed[0].source.name if self._streamed else None,
                "streamed_layers": layers,
                "fetches": count,
            },
            "failures": failures,
        }


def _combined(fingerprints: Mapping[str, str], names: Collection[str]) -> str:
    lines = "\n".join(f"{name} {fingerprints[name]}" for name in sorted(names))
    return hashlib.sha256(lines.encode()).hexdigest()


def model_fingerprint(held: Iterable[Mapping[str, str]]) -> str:
    """Of all frozen parameters, whatever the layout: a tied matrix that two ranks hold counts once.

    `held`: the "frozen_parameters" of each rank's RankAudit.start(), fingerprints by name.
    """
    parameters = {found for by_name in held for found in by_name.values()}
    return hashlib.sha256("\n".join(sorted(parameters)).encode()).hexdigest()


def settings_fingerprint(config: RunConfig) -> str:
    """Of what the folders of the frozen models say beside their weights, and of the encoder's pixel statistics."""
    llm = llm_config(model_folder(config.model.llm.path))
    said: list[Any] = [{key: value for key, value in llm.items() if key not in UNMEANT}]
    if config.model.vision is not None:
        name = config.model.vision.name
        vision = name if is_timm_name(name) else read_json(model_folder(name) / "config.json")
        said += [vision, asdict(image_transform(name))]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def check_replicas(starts: Sequence[dict[str, Any]]) -> None:
    """Raise AuditError unless all replicas begin with the same weights; `starts` are all ranks' RankAudit.start().

    Nothing is broadcast: each rank reads its own files, and a stale copy on one machine would train in silence. Where
    several stages hold a frozen parameter (slices of an encoder all hold its stem) it must be the same on all.
    """
    for start in starts:
        twin = next(other for other in starts if other["pipeline"] == start["pipeline"])
        for kind in ("frozen", "trainable"):
            if start[kind] != twin[kind]:
                raise AuditError(
                    f"ranks {twin['rank']} and {start['rank']} hold replicas of one stage but loaded different {kind} "
                    "weights: the model's files must be the same on every machine"
                )
    holders: dict[str, dict[str, Any]] = {}
    for start in starts:
        for name, found in start["frozen_parameters"].items():
            first = holders.setdefault(name, start)
            if found != first["frozen_parameters"][name]:
                raise AuditError(
                    f"ranks {first['rank']} and {start['rank']} both hold {name} but loaded different values: the "
                    "model's files must be the same on every machine"
                )


def write_audit(path: Path, plan: Plan, records: Sequence[dict[str, Any]], *, learns: bool) -> str:
    """Compare replicas, write `audit.json` with every rank's record; returns what was found, in a sentence.

    Raises AuditError if anything failed. A run that `learns`, with a learning rate above 0, must have had a gradient.
    """
    records = sorted(records, key=lambda record: record["rank"])
    failures = [f"rank {record['rank']}: {failure}" for record in records for failure in record["failures"]]
    for record in records:
        twin = next(r for r in records if r["pipeline"] == record["pipeline"])
        if record["trainable"] != twin["trainable"]:
            failures.append(f"ranks {twin['rank']} and {record['rank']} trained the same parameters apart")
    tensors = [tensor for record in records if record["data"] == 0 for tensor in record["trainable"]]
    moved = sum(tensor["moved"] for tensor in tensors)
    if learns and not any(tensor["had_gradient"] for tensor in tensors):
        failures.append(
            f"nothing trained: in no step did a gradient reach any of {', '.join(plan.trainable)}; is there an image "
            "in the data, and a text to answer with?"
        )
    content = {"pipeline": plan.pipeline, "data": plan.data, "passed": not failures, "failures": failures}
    write_whole(path, json.dumps({**content, "ranks": records}, indent=2) + "\n")
    if failures:
        raise AuditError(f"{len(failures)} failure(s), all in {path}: " + "; ".join(failures[:5]))
    return f"{moved} of {len(tensors)} trainable tensors moved, frozen weights unchanged on all ranks"
