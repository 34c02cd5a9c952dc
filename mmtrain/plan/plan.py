"""A plan: who holds and trains what, in which order it runs, what it costs; and plan.json's content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mmtrain.models.facts.quantised import Quantisation
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.instructions import Schedule
from mmtrain.plan.schedule import Chain
from mmtrain.plan.simulate import StageSeconds


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The contents of one stage: decoder layers [first, last), with the front or the head where it has them."""

    stage: int
    first: int
    last: int
    front: bool
    head: bool
    recompute_layers: int = 0  # of its decoder layers, from the first on
    encoder: tuple[int, int] | None = None
    """Blocks [first, last) of the encoder that its rank holds as a slice; None: of stage 0 all, of another none."""
    streamed: tuple[int, ...] = ()
    """Its decoder layers whose frozen weights are fetched before they compute, by number."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers placed here: `front`, `llm.layers.0`, ..., `head`."""
        decoder = (f"llm.layers.{i}" for i in range(self.first, self.last))
        return (*(("front",) * self.front), *decoder, *(("head",) * self.head))

    @property
    def summary(self) -> str:
        """Names of the layers with ranges: `front + llm.layers.0-6`."""
        parts = ["front"] * self.front
        if self.last - self.first == 1:
            parts.append(f"llm.layers.{self.first}")
        elif self.last > self.first:
            parts.append(f"llm.layers.{self.first}-{self.last - 1}")
        return " + ".join(parts + ["head"] * self.head)

    @property
    def slice(self) -> str:
        """Its rank's slice of the encoder: `blocks 0-6`; empty if there are no slices, or none on this rank."""
        if self.encoder is None:
            return ""
        first, last = self.encoder
        if first == last:
            return "patch embedding"
        return f"blocks {first}-{last - 1}" if last - first > 1 else f"block {first}"


def stage_of(cut: Sequence[int], stage: int, recompute_layers: int = 0) -> StagePlan:
    """Stage `stage` of a cut, whose borders count the front as layer 0 and the head as the last layer."""
    begin, end, head = cut[stage], cut[stage + 1], cut[-1] - 1
    return StagePlan(stage, max(begin, 1) - 1, min(end, head) - 1, begin == 0, end > head, recompute_layers)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One process. Bytes are those of its fullest moment; flops are those of one step, what recomputes left out."""

    rank: int  # pipeline * data degree + data
    pipeline: int
    data: int
    stages: tuple[StagePlan, ...]
    trainable_names: tuple[str, ...]
    trainable: int  # elements
    optimizer: str  # "AdamW", or "NoOp" where nothing trains
    reason: str
    weight_bytes: int
    optimizer_bytes: int  # master weights, gradients and moments
    activation_bytes: int  # kept for backwards, messages, features, loaded batches
    workspace_bytes: int  # of what runs at that moment
    host_bytes: int  # of streamed layers, in the host's memory
    fetched_bytes: int  # of a step, for streamed layers
    flops: Flops
    recompute_flops: int  # forward again, for recomputed layers
    work_share: float  # of the seconds that its replica's ranks compute
    idle_share: float  # of the step

    @property
    def recompute_layers(self) -> int:
        """Decoder layers that recompute their activations in backward, over all its stages."""
        return sum(stage.recompute_layers for stage in self.stages)

    @property
    def streamed_layers(self) -> int:
        """Decoder layers whose frozen weights are fetched before they compute, over all its stages."""
        return sum(len(stage.streamed) for stage in self.stages)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class StreamingPlan:
    """How streamed layers are fetched."""

    source: Literal["host", "peers"] | Quantisation  # the latter: in fewer bits, on the device
    weight_shards: int  # replicas that keep a part each
    hidden_from_tokens: int  # tokens of a micro-batch from which on no fetch is waited for
    microbatch_tokens: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What trains at one rate."""

    name: str  # its patterns
    lr: float  # at its peak
    weight_decay: float
    trainable: int  # elements


@dataclass(frozen=True, slots=True)
class UniformCut:
    """What cutting the decoder layers evenly would give: front and head on top, one stage a rank, no prefetch."""

    boundaries: tuple[int, ...]
    fits: bool
    slowest_work_share: float
    idle_share: float
    step_time_ratio: float  # its step over this plan's


@dataclass(frozen=True, slots=True)
class ExpectedImage:
    """What the plan takes an image to be, where that depends on its size."""

    layout: str
    tiles: float  # squares for the encoder
    positions: float  # of the LLM
    most_tiles: int  # of the largest image
    most_positions: int
    fits: bool  # whether a pack has room for the largest


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen answer to who holds and trains what, and in which order it runs."""

    run: str
    llm: str
    vision: str | None  # the encoder; None: text alone
    trainable: tuple[str, ...]  # patterns
    groups: tuple[GroupPlan, ...]  # of `optimizer.groups`, with what they leave; empty without any
    pipeline: int
    stages_per_rank: int
    data: int
    decoder_layers: int
    boundaries: tuple[int, ...]  # decoder layer at which stage 1, 2, ... begins
    first_trainable_stage: int
    first_trainable_layer: int
    """Decoder layers from this one on run backward; as many as there are: the head alone trains."""
    streaming: StreamingPlan | None  # None: all weights stay on the devices
    microbatches_per_step: int  # of one replica
    chain: Chain  # per pipeline rank: where the slice of the encoder runs that it holds
    evaluation_lead: int  # micro-batches that each slice encodes first in an evaluation
    packs_per_microbatch: int
    pack_length: int
    image: ExpectedImage | None  # None: all images take the same, or there are none
    memory_limit_bytes: int | None
    costs: str  # "assumed", or "calibrated on DEVICE", and whether messages are assumed
    step_seconds: float | None  # predicted; None where costs are assumed
    idle_share: float  # of a step, over all ranks
    minimal_flops_share: float  # of what a step computes: what every exact way of training must compute
    uniform: UniformCut | None  # None with one rank, or with fewer decoder layers than ranks
    seconds: StageSeconds  # what was simulated; see `costs`
    ranks: tuple[RankPlan, ...]
    schedule: Schedule  # per pipeline rank

    @property
    def encode_ahead(self) -> int:
        """Micro-batches whose features are there when their step begins."""
        return min(encodes.ahead for encodes in self.chain if encodes is not None)

    @property
    def encoder_slices(self) -> tuple[int, ...]:
        """Blocks that each pipeline rank holds of an encoder in slices; empty where it is whole on rank 0."""
        borders = [rank.stages[0].encoder for rank in self.ranks if rank.data == 0]
        return tuple(border[1] - border[0] if border else 0 for border in borders) if any(borders) else ()

    def as_dict(self) -> dict[str, Any]:
        """The content of plan.json: everything but the instructions."""
        content = asdict(replace(self, schedule=(), chain=()))
        del content["schedule"], content["chain"]
        content["encode_ahead"] = self.encode_ahead
        for entry, rank in zip(content["ranks"], self.ranks, strict=True):
            entry["stages"] = [
                {
                    "stage": s.stage,
                    "encoder": s.encoder and list(s.encoder),
                    "layers": list(s.layers),
                    "recompute_layers": s.recompute_layers,
                    "streamed": list(s.streamed),
                }
                for s in rank.stages
            ]
            entry |= {"recompute_layers": rank.recompute_layers, "total_bytes": rank.total_bytes}
        return content
