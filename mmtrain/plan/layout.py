"""A plan: who holds and trains what, in which order it runs, what it costs; as a table and as plan.json's content."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmtrain.plan.block_costs import Flops
from mmtrain.plan.schedule import Schedule
from mmtrain.plan.simulate import StageSeconds

COLUMNS = 120  # of a printed plan


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The contents of one stage: decoder layers [first, last), with the front or the head where it has them."""

    stage: int
    first: int
    last: int
    front: bool
    head: bool
    recompute_layers: int = 0  # of its decoder layers, from the first on

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers placed here: `front`, `llm.layers.0`, ..., `head`."""
        decoder = (f"llm.layers.{i}" for i in range(self.first, self.last))
        return (*(("front",) * self.front), *decoder, *(("head",) * self.head))

    @property
    def summary(self) -> str:
        """The same with ranges: `front + llm.layers.0-6`."""
        parts = ["front"] * self.front
        if self.last - self.first == 1:
            parts.append(f"llm.layers.{self.first}")
        elif self.last > self.first:
            parts.append(f"llm.layers.{self.first}-{self.last - 1}")
        return " + ".join(parts + ["head"] * self.head)


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
    optimizer: Literal["AdamW", "NoOp"]
    reason: str
    weight_bytes: int
    optimizer_bytes: int  # master weights, gradients and moments
    activation_bytes: int  # kept for backwards, messages, features, loaded batches
    workspace_bytes: int  # of what runs at that moment
    flops: Flops
    recompute_flops: int  # forward again, for recomputed layers
    work_share: float  # of the seconds that its replica's ranks compute
    idle_share: float  # of the step

    @property
    def recompute_layers(self) -> int:
        """Decoder layers that recompute their activations in backward, over all its stages."""
        return sum(stage.recompute_layers for stage in self.stages)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.optimizer_bytes + self.activation_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class UniformCut:
    """What cutting the decoder layers evenly would give: front and head on top, one stage a rank, no run-ahead."""

    boundaries: tuple[int, ...]
    fits: bool
    slowest_work_share: float
    idle_share: float
    step_time_ratio: float  # its step over this plan's


@dataclass(frozen=True, slots=True)
class Plan:
    """The frozen answer to who holds and trains what, and in which order it runs."""

    run: str
    llm: str
    vision: str
    trainable: tuple[str, ...]  # patterns
    pipeline: int
    chunks_per_rank: int
    data: int
    decoder_layers: int
    boundaries: tuple[int, ...]  # decoder layer at which stage 1, 2, ... begins
    first_trainable_stage: int
    microbatches_per_step: int  # of one replica
    encode_ahead: int  # micro-batches whose features are at hand when a step begins
    packs_per_microbatch: int
    pack_length: int
    memory_limit_bytes: int | None
    costs: str  # "assumed", or "calibrated on DEVICE", and whether messages are assumed
    step_seconds: float | None  # predicted; None where costs are assumed
    idle_share: float  # of a step, over all ranks
    minimal_flops_share: float  # of what a step computes: what every exact way of training must compute
    uniform: UniformCut | None  # None with one rank, or with fewer decoder layers than ranks
    fewer_chunks_time_ratio: float | None  # a step of the best plan with fewer chunks a rank over this one's
    no_run_ahead_time_ratio: float | None  # of this plan without run-ahead over this one's
    seconds: StageSeconds  # what was simulated; see `costs`
    ranks: tuple[RankPlan, ...]
    schedule: Schedule  # per pipeline rank

    def as_dict(self) -> dict[str, Any]:
        """The content of plan.json: everything but the instructions."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("ranks", "schedule")}
        content["uniform"] = None if self.uniform is None else asdict(self.uniform)
        content["seconds"] = asdict(self.seconds)
        content["ranks"] = []
        for rank in self.ranks:
            entry = asdict(rank)
            entry["stages"] = [
                {"stage": s.stage, "layers": list(s.layers), "recompute_layers": s.recompute_layers}
                for s in rank.stages
            ]
            entry["recompute_layers"] = rank.recompute_layers
            entry["total_bytes"] = rank.total_bytes
            content["ranks"].append(entry)
        return content


def bytes_text(count: float) -> str:
    """A number of bytes for people: `3.1 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB" if count else "0"


def render(plan: Plan) -> str:
    """The plan as plain text of at most 120 columns, one row per pipeline rank; replicas share a row."""
    replica = [rank for rank in plan.ranks if rank.data == 0]
    recomputes = any(rank.recompute_layers for rank in replica)
    header = ["rank", "stage", "layers", "trainable", "optimizer", "weights", "activations", "total", "work", "idle"]
    rows = []
    for rank in replica:
        rows.append(
            [
                _ranks(plan, rank),
                ",".join(str(stage.stage) for stage in rank.stages),
                _held(rank),
                f"{rank.trainable:,}" if rank.trainable < 1e8 else f"{rank.trainable / 1e6:,.1f}M",
                rank.optimizer,
                bytes_text(rank.weight_bytes),
                bytes_text(rank.activation_bytes),
                bytes_text(rank.total_bytes),
                f"{rank.work_share:.1%}",
                f"{rank.idle_share:.1%}",
            ]
        )
    if recomputes:
        header.insert(7, "recompute")
        for row, rank in zip(rows, replica, strict=True):
            held = sum(stage.last - stage.first for stage in rank.stages)
            row.insert(7, f"{rank.recompute_layers}/{held}" if rank.recompute_layers else "-")
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    between = "  " if sum(widths) + 2 * len(widths) - 2 <= COLUMNS else " "
    left = {"layers", "optimizer"}
    lines = _wrapped(*_headline(plan))
    for line in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(line, widths, header, strict=True)
        ]
        lines.append(between.join(cells).rstrip())
    lines += _wrapped(*(f"rank {_ranks(plan, rank)}: {rank.optimizer}, {rank.reason}" for rank in replica))
    lines += _wrapped(*_footer(plan, replica))
    return "\n".join(lines)


def _held(rank: RankPlan) -> str:
    """The layers of a rank: `front + llm.layers.0-7`; of several stages the decoder layers' numbers alone."""
    if len(rank.stages) == 1:
        return rank.stages[0].summary
    return ", ".join(stage.summary.replace("llm.layers.", "") for stage in rank.stages)


def _wrapped(*texts: str) -> list[str]:
    options = {"subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}
    return [line for text in texts for line in textwrap.wrap(text, COLUMNS, **options)]


def _ranks(plan: Plan, rank: RankPlan) -> str:
    """Global ranks of all replicas of this pipeline rank, which are neighbours: `4-5`."""
    return str(rank.rank) if plan.data == 1 else f"{rank.rank}-{rank.rank + plan.data - 1}"


def _headline(plan: Plan) -> tuple[str, str]:
    limit = "no memory limit" if plan.memory_limit_bytes is None else f"{bytes_text(plan.memory_limit_bytes)} per rank"
    packs = "pack" if plan.packs_per_microbatch == 1 else "packs"
    return (
        f"{plan.run}: {plan.vision} -> projector -> {plan.llm}; trains {', '.join(plan.trainable)}",
        f"pipeline {plan.pipeline} x data {plan.data} = {plan.pipeline * plan.data} ranks; per step and replica "
        f"{plan.microbatches_per_step} micro-batches of {plan.packs_per_microbatch} {packs} of "
        f"{plan.pack_length:,} tokens; {limit}",
    )


def _footer(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    total = sum(rank.flops.total + rank.recompute_flops for rank in replica) / 1e12
    slowest = max(replica, key=lambda rank: rank.work_share)
    took = "" if plan.step_seconds is None else f"{plan.step_seconds:,.3g} s, "
    yield (
        f"step: {took}{total:,.{0 if total >= 100 else 3}f} TFLOP per replica, {plan.minimal_flops_share:.1%} of them "
        f"needed; slowest rank {_ranks(plan, slowest)} with {slowest.work_share:.1%} of the work; idle "
        f"{plan.idle_share:.1%}"
    )
    if plan.step_seconds is None:
        yield "costs: assumed, from FLOPs and bytes, which gives shares and ratios but no seconds; --calibrate measures"
    else:
        yield f"costs: {plan.costs}"
    if plan.fewer_chunks_time_ratio is not None:
        longer = plan.fewer_chunks_time_ratio - 1
        yield f"{plan.chunks_per_rank} chunks a rank, interleaved: with fewer a step takes {longer:.1%} longer"
    if plan.no_run_ahead_time_ratio is not None:
        batches = "micro-batch" if plan.encode_ahead == 1 else "micro-batches"
        ahead = f"a step begins with {plan.encode_ahead} {batches} encoded" if plan.encode_ahead else "inside a step"
        yield f"encoder run-ahead: {ahead}; without, a step takes {plan.no_run_ahead_time_ratio - 1:.1%} longer"
    uniform = plan.uniform
    if uniform is None:
        return
    if uniform.boundaries == plan.boundaries:
        yield "this is the uniform cut of the decoder layers"
        return
    yield (
        f"a uniform cut of the decoder layers: slowest {uniform.slowest_work_share:.1%}, "
        f"idle {uniform.idle_share:.1%}, step {uniform.step_time_ratio:.2f} times as long"
        f"{'' if uniform.fits else ', and it does not fit in memory'}"
    )
