"""A plan: who holds and trains what, in which order it runs, what it costs; as plan.json and as
text.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mmtrain.base.printing import bytes_text, counted, table_lines, terminal_width
from mmtrain.facts.quantised import BITS, QUANTISATIONS, Quantisation
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.instructions import Schedule
from mmtrain.plan.schedule import Chain, ranks_of
from mmtrain.plan.simulate import StageSeconds


@dataclass(frozen=True)
class StagePlan:
    """The contents of one stage: decoder layers [first, last), with the front or the head where it
    has them.
    """

    stage: int
    first: int
    last: int
    front: bool
    head: bool
    recompute_layers: int = 0  # of its decoder layers, from the first on
    # blocks of its rank's slice; None: of stage 0 all, of another none
    encoder: tuple[int, int] | None = None
    # numbers of its decoder layers whose weights are fetched before they compute
    streamed: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        layers = [f"llm.layers.{i}" for i in range(self.first, self.last)]
        if self.front:
            layers.insert(0, "front")
        if self.head:
            layers.append("head")
        return tuple(layers)

    @property
    def summary(self) -> str:
        parts = []
        if self.front:
            parts.append("front")
        if self.last - self.first == 1:
            parts.append(f"llm.layers.{self.first}")
        elif self.last > self.first:
            parts.append(f"llm.layers.{self.first}-{self.last - 1}")
        if self.head:
            parts.append("head")
        return " + ".join(parts)

    @property
    def slice(self) -> str:
        """Its rank's slice of the encoder: `blocks 0-6`; empty if there are no slices, or none on
        this rank.
        """
        if self.encoder is None:
            return ""
        first, last = self.encoder
        if first == last:
            return "patch embedding"
        if last - first == 1:
            return f"block {first}"
        return f"blocks {first}-{last - 1}"


def stage_of(cut: Sequence[int], stage: int, recompute_layers: int = 0) -> StagePlan:
    """Stage `stage` of a cut, whose borders count the front as layer 0 and the head as the last
    layer.
    """
    begin = cut[stage]
    end = cut[stage + 1]
    head = cut[-1] - 1
    return StagePlan(
        stage,
        max(begin, 1) - 1,
        min(end, head) - 1,
        begin == 0,
        end > head,
        recompute_layers,
    )


@dataclass(frozen=True)
class RankPlan:
    """One process. Bytes are those of its fullest moment; flops are those of one step, what
    recomputes left out.
    """

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
        return sum(stage.recompute_layers for stage in self.stages)

    @property
    def streamed_layers(self) -> int:
        return sum(len(stage.streamed) for stage in self.stages)

    @property
    def total_bytes(self) -> int:
        return (
            self.weight_bytes + self.optimizer_bytes + self.activation_bytes + self.workspace_bytes
        )


@dataclass(frozen=True)
class StreamingPlan:
    """The source of streamed layers, and the tokens that hide their fetches."""

    source: Literal["host", "peers"] | Quantisation  # the latter: in fewer bits, on the device
    weight_shards: int  # replicas that keep a part each
    hidden_from_tokens: int  # tokens of a micro-batch from which on no fetch is waited for
    microbatch_tokens: int


@dataclass(frozen=True)
class GroupPlan:
    name: str  # its patterns
    lr: float  # at its peak
    weight_decay: float
    trainable: int  # elements


@dataclass(frozen=True)
class UniformCut:
    """The decoder layers in equal parts instead: front and head on top, one stage a rank, no
    prefetch.
    """

    boundaries: tuple[int, ...]
    fits: bool
    step_time_ratio: float  # its step over this plan's


@dataclass(frozen=True)
class ExpectedImage:
    layout: str
    tiles: float  # squares for the encoder
    positions: float  # of the LLM
    most_tiles: int  # of the largest image
    most_positions: int
    fits: bool  # whether a pack has room for the largest


@dataclass(frozen=True)
class Plan:
    """The frozen answer to who holds and trains what, and in which order it runs."""

    run: str
    llm: str
    vision: str | None  # the encoder; None: text alone
    trainable: tuple[str, ...]  # patterns
    groups: tuple[GroupPlan, ...]  # empty where all trains at one rate above 0 without weight decay
    pipeline: int
    stages_per_rank: int
    data: int
    decoder_layers: int
    boundaries: tuple[int, ...]  # decoder layer at which stage 1, 2, ... begins
    first_trainable_stage: int
    first_trainable_layer: int  # decoder layers from this one on run backward
    streaming: StreamingPlan | None  # None: all weights stay on the devices
    microbatches_per_step: int  # of one replica
    chain: Chain  # per pipeline rank: where the slice of the encoder runs that it holds
    packs_per_microbatch: int
    pack_length: int
    image: ExpectedImage | None  # None: all images take the same, or there are none
    memory_limit_bytes: int | None
    costs: str  # "assumed", or "calibrated on DEVICE", and whether messages are assumed
    step_seconds: float | None  # predicted; None where costs are assumed
    idle_share: float  # of a step, over all ranks
    # of what a step computes: what every exact way of training must compute
    minimal_flops_share: float
    uniform: UniformCut | None  # None with one rank, or with fewer decoder layers than ranks
    seconds: StageSeconds  # what was simulated; see `costs`
    ranks: tuple[RankPlan, ...]
    schedule: Schedule  # per pipeline rank

    @property
    def evaluation_lead(self) -> int:
        """Micro-batches that each slice encodes first in an evaluation, so that the whole chain has
        work.
        """
        return len(ranks_of(self.chain))

    @property
    def encode_ahead(self) -> int:
        """Micro-batches whose features are there when their step begins."""
        return min(encodes.ahead for encodes in self.chain if encodes is not None)

    @property
    def learns(self) -> bool:
        """Whether anything trains with a learning rate above 0."""
        return not self.groups or any(group.lr > 0 for group in self.groups)

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


# ---- as text


def render(plan: Plan) -> list[str]:
    """Return the plan as lines that fit the terminal: a row for each stage of a pipeline rank and
    its replicas.
    """
    replica = [rank for rank in plan.ranks if rank.data == 0]
    unit, name = unit_of(max(rank.total_bytes for rank in replica))
    rows = []
    for rank in replica:
        trainable = f"{rank.trainable:,}"
        if rank.trainable >= 1e8:
            trainable = f"{rank.trainable / 1e6:,.1f}M"
        cells = [trainable, rank.optimizer]
        for size in (rank.weight_bytes, rank.activation_bytes, rank.total_bytes):
            cells.append(f"{size / unit:,.1f}")
        for share in (rank.work_share, rank.idle_share):
            cells.append(f"{100 * share:.1f}")
        number = _numbers(plan, rank)
        for stage in rank.stages:
            layers = stage.summary.replace("llm.layers.", "").replace(" + ", ", ")
            rows.append([number, stage.stage, layers, *cells])
            number = ""
            cells = []

    columns = (
        ">rank",
        ">stage",
        "layers",
        ">trainable",
        "optimizer",
        f">weights\n{name}",
        f">activations\n{name}",
        f">total\n{name}",
        ">work\n%",
        ">idle\n%",
    )
    return [
        *wrapped(*_run(plan)),
        *table_lines(columns, rows),
        *wrapped(*(_rank(plan, x) for x in replica), *_step(plan, replica)),
    ]


def unit_of(largest: int) -> tuple[int, str]:
    """Return the bytes and the name of the unit for a table whose largest number is this one."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def wrapped(*texts: str) -> list[str]:
    """Return sentences as lines that fit the terminal, all but the first of each indented."""
    lines = []
    for text in texts:
        lines += textwrap.wrap(
            text,
            terminal_width(),
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _numbers(plan: Plan, rank: RankPlan) -> str:
    if plan.data == 1:
        return str(rank.rank)
    return f"{rank.rank}-{rank.rank + plan.data - 1}"


def _ranks(plan: Plan, rank: RankPlan) -> str:
    noun = "rank" if plan.data == 1 else "ranks"
    return f"{noun} {_numbers(plan, rank)}"


def _run(plan: Plan) -> Iterator[str]:
    begins_with = "text" if plan.vision is None else f"{plan.vision} -> projector"
    yield f"{plan.run}: {begins_with} -> {plan.llm}; trains {', '.join(plan.trainable)}"
    limit = "no memory limit"
    if plan.memory_limit_bytes is not None:
        limit = f"{bytes_text(plan.memory_limit_bytes)} per rank"
    yield (
        f"pipeline {plan.pipeline} x data {plan.data} = {counted(len(plan.ranks), 'rank')}; per "
        f"step and replica {counted(plan.microbatches_per_step, 'micro-batch', 'micro-batches')} "
        f"of {counted(plan.packs_per_microbatch, 'pack')} of {counted(plan.pack_length, 'token')}; "
        f"{limit}"
    )

    image = plan.image
    if image is not None:
        tiles = f"{image.tiles:g} tiles and "
        most_tiles = f"{image.most_tiles} and "
        if image.tiles == image.positions:  # a cell each
            tiles = most_tiles = ""
        text = (
            f"an image ({image.layout}): {tiles}{image.positions:,g} positions expected, at most "
            f"{most_tiles}{image.most_positions:,}"
        )
        if not image.fits:
            text += "; a sample with one that large fits into no pack (data.overlong)"
        yield text

    rates = []
    for group in plan.groups:
        rate = f"{group.name} {group.lr:g}"
        if group.weight_decay:
            rate += f" with weight decay {group.weight_decay:g}"
        rates.append(f"{rate} ({group.trainable:,} parameters)")
    if rates:
        yield f"learning rates: {'; '.join(rates)}"


def _rank(plan: Plan, rank: RankPlan) -> str:
    layers = sum(stage.last - stage.first for stage in rank.stages)
    text = f"{_ranks(plan, rank)}: {rank.optimizer}, {rank.reason}"
    if rank.recompute_layers:
        text += f"; {rank.recompute_layers} of {layers} layers recompute"
    if rank.streamed_layers:
        how = "quantised" if plan.streaming.source in QUANTISATIONS else "streamed"
        text += f"; {rank.streamed_layers} of {layers} layers are {how}"
    return text


def _step(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    flops = sum(rank.flops.total + rank.recompute_flops for rank in replica) / 1e12
    work = f"{flops:,.3f}"
    if flops >= 100:
        work = f"{flops:,.0f}"
    slowest = max(replica, key=lambda rank: rank.work_share)
    seconds = ""
    costs = (
        "assumed, from FLOPs and bytes: shares, no seconds; mmtrain calibrate CONFIG measures those"
    )
    if plan.step_seconds is not None:
        seconds = f"{plan.step_seconds:,.3g} s, "
        costs = plan.costs
    yield (
        f"step: {seconds}{work} TFLOP per replica, of which any exact training needs "
        f"{plan.minimal_flops_share:.1%}; slowest {_ranks(plan, slowest)} with "
        f"{slowest.work_share:.1%} of the work; idle {plan.idle_share:.1%}"
    )
    yield f"costs: {costs}"

    yield from _prefetch(plan, replica)
    if plan.streaming is not None:
        yield from _fetches(plan, plan.streaming, max(replica, key=lambda rank: rank.fetched_bytes))
    uniform = plan.uniform
    if uniform is not None and uniform.boundaries == plan.boundaries:
        yield "this is the uniform cut of the decoder layers"
    elif uniform is not None:
        unfit = "" if uniform.fits else ", and it does not fit in memory"
        yield (
            "a uniform cut of the decoder layers: "
            f"step {uniform.step_time_ratio:.2f} times as long{unfit}"
        )


def _prefetch(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    slices = []
    for rank in replica:
        if rank.stages[0].slice:
            slices.append(f"{rank.stages[0].slice} on {_ranks(plan, rank)}")
    if slices:
        *others, last = (str(encodes.ahead) for encodes in plan.chain if encodes is not None)
        yield f"encoder: {', '.join(slices)}; prefetch {', '.join(others)} and {last} micro-batches"
    elif plan.encode_ahead:
        ahead = counted(plan.encode_ahead, "micro-batch", "micro-batches")
        yield f"encoder: on rank 0; prefetch {ahead}"


def _fetches(plan: Plan, streaming: StreamingPlan, rank: RankPlan) -> Iterator[str]:
    """Tell the source of streamed layers, and the number of tokens from which on they cost no time;
    `rank` fetches the most.
    """
    fetches = f"{bytes_text(rank.fetched_bytes)} a step"
    costs = "no rank has more layers than stay whole"
    if streaming.hidden_from_tokens:
        fetches = f"{bytes_text(rank.fetched_bytes // plan.microbatches_per_step)} a micro-batch"
        costs = (
            f"fetches hide behind computing from {streaming.hidden_from_tokens:,} tokens a "
            f"micro-batch on; it has {streaming.microbatch_tokens:,}"
        )
    if streaming.source in QUANTISATIONS:
        how = "made whole before each use"
        if streaming.source == "fp8":
            how += ", unless compiled layers multiply them directly"
        yield f"quantised layers: {streaming.source}, {how}; {costs}"
        if streaming.source in BITS:
            yield (
                f"that is another LLM, near {plan.llm}: use what is trained with {plan.llm} itself"
            )
        return
    source = f"its peers: each of {streaming.weight_shards} replicas keeps a part"
    if streaming.source == "host":
        source = f"host memory, which holds {bytes_text(rank.host_bytes)} for it"
    each = "" if plan.data == 1 else "each of "
    yield f"streamed layers: {each}{_ranks(plan, rank)} fetches {fetches} from {source}; {costs}"
