"""A plan as text for a terminal: a table with a row a rank, and what it means in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from mmtrain.base.printing import COLUMNS, bytes_text, table_lines
from mmtrain.models.facts.quantised import BITS
from mmtrain.plan.plan import Plan, RankPlan


def render(plan: Plan) -> list[str]:
    """The plan as lines of plain text, at most 80 columns: a row for each stage of a pipeline rank and its replicas."""
    replica = [rank for rank in plan.ranks if rank.data == 0]
    largest = max(rank.total_bytes for rank in replica)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    measures = (f">weights\n{name}", f">activations\n{name}", f">total\n{name}", ">work\n%", ">idle\n%")
    rows = []
    for rank in replica:
        cells = [
            f"{rank.trainable:,}" if rank.trainable < 1e8 else f"{rank.trainable / 1e6:,.1f}M",
            rank.optimizer,
            *(f"{size / unit:,.1f}" for size in (rank.weight_bytes, rank.activation_bytes, rank.total_bytes)),
            *(f"{100 * share:.1f}" for share in (rank.work_share, rank.idle_share)),
        ]
        number = _numbers(plan, rank)
        for stage in rank.stages:
            rows.append([number, stage.stage, stage.summary.replace("llm.layers.", "").replace(" + ", ", "), *cells])
            number, cells = "", []
    table = table_lines((">rank", ">stage", "layers", ">trainable", "optimizer", *measures), rows)
    sentences = (
        f"{_ranks(plan, rank)}: {rank.optimizer}, {rank.reason}{_memory_choices(plan, rank)}" for rank in replica
    )
    return [
        *wrapped(*_headline(plan), *_image(plan), *_rates(plan)),
        *table,
        *wrapped(*sentences, *_footer(plan, replica)),
    ]


def _memory_choices(plan: Plan, rank: RankPlan) -> str:
    held = sum(stage.last - stage.first for stage in rank.stages)
    recompute = f"; {rank.recompute_layers} of {held} layers recompute" if rank.recompute_layers else ""
    how = "quantised" if plan.streaming is not None and plan.streaming.source in BITS else "streamed"
    return recompute + (f"; {rank.streamed_layers} of {held} layers are {how}" if rank.streamed_layers else "")


def wrapped(*texts: str) -> list[str]:
    """Sentences as lines for a terminal; lines after a sentence's first are indented."""
    options = {"subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}
    return [line for text in texts for line in textwrap.wrap(text, COLUMNS, **options)]


def _numbers(plan: Plan, rank: RankPlan) -> str:
    """Global ranks of all replicas of this pipeline rank, which are neighbours: `4-5`."""
    return str(rank.rank) if plan.data == 1 else f"{rank.rank}-{rank.rank + plan.data - 1}"


def _ranks(plan: Plan, rank: RankPlan) -> str:
    return f"rank{'s' * (plan.data > 1)} {_numbers(plan, rank)}"


def _headline(plan: Plan) -> tuple[str, str]:
    limit = "no memory limit" if plan.memory_limit_bytes is None else f"{bytes_text(plan.memory_limit_bytes)} per rank"
    packs = "pack" if plan.packs_per_microbatch == 1 else "packs"
    begins_with = "text" if plan.vision is None else f"{plan.vision} -> projector"
    return (
        f"{plan.run}: {begins_with} -> {plan.llm}; trains {', '.join(plan.trainable)}",
        f"pipeline {plan.pipeline} x data {plan.data} = {plan.pipeline * plan.data} ranks; per step and replica "
        f"{plan.microbatches_per_step} micro-batches of {plan.packs_per_microbatch} {packs} of "
        f"{plan.pack_length:,} tokens; {limit}",
    )


def _image(plan: Plan) -> list[str]:
    image = plan.image
    if image is None:
        return []
    room = "" if image.fits else "; a sample with one that large fits into no pack (data.overlong)"
    return [
        f"an image ({image.layout}): {image.tiles:g} tiles and {image.positions:,g} positions expected, at most "
        f"{image.most_tiles} and {image.most_positions:,}{room}"
    ]


def _rates(plan: Plan) -> list[str]:
    groups = (
        f"{group.name} {group.lr:g}{f' with weight decay {group.weight_decay:g}' if group.weight_decay else ''} "
        f"({group.trainable:,} parameters)"
        for group in plan.groups
    )
    return [f"learning rates: {'; '.join(groups)}"] if plan.groups else []


def _encoder(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    """Where the encoder runs, and how many micro-batches each of its slices has encoded when a step begins."""
    slices = [f"{stage.slice} on {_ranks(plan, rank)}" for rank in replica for stage in rank.stages if stage.slice]
    if slices:
        *others, last = (str(encodes.ahead) for encodes in plan.chain if encodes is not None)
        yield f"encoder: {', '.join(slices)}; prefetch {', '.join(others)} and {last} micro-batches"
    elif plan.encode_ahead:
        yield f"encoder: on rank 0; prefetch {plan.encode_ahead} micro-batch{'es' * (plan.encode_ahead > 1)}"


def _streaming(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    """Where streamed layers come from, and from how many tokens on that costs no time."""
    streaming = plan.streaming
    if streaming is None:
        return
    most = max(replica, key=lambda rank: rank.fetched_bytes)
    fetches = f"{bytes_text(most.fetched_bytes // plan.microbatches_per_step)} a micro-batch"
    costs = (
        f"fetches hide behind computing from {streaming.hidden_from_tokens:,} tokens a micro-batch on; it has "
        f"{streaming.microbatch_tokens:,}"
    )
    if not streaming.hidden_from_tokens:
        fetches, costs = f"{bytes_text(most.fetched_bytes)} a step", "no rank has more layers than stay whole"
    if streaming.source in BITS:
        yield f"quantised layers: {streaming.source}, made whole before each use; {costs}"
        yield f"that is another LLM, near {plan.llm}: use what is trained with {plan.llm} itself"
        return
    who = _ranks(plan, most) if plan.data == 1 else f"each of {_ranks(plan, most)}"
    if streaming.source == "host":
        source = f"host memory, which holds {bytes_text(most.host_bytes)} for it"
    else:
        source = f"its peers: each of {streaming.weight_shards} replicas keeps a part"
    yield f"streamed layers: {who} fetches {fetches} from {source}; {costs}"


def _footer(plan: Plan, replica: list[RankPlan]) -> Iterator[str]:
    total = sum(rank.flops.total + rank.recompute_flops for rank in replica) / 1e12
    slowest = max(replica, key=lambda rank: rank.work_share)
    took = "" if plan.step_seconds is None else f"{plan.step_seconds:,.3g} s, "
    yield (
        f"step: {took}{total:,.{0 if total >= 100 else 3}f} TFLOP per replica, of which any exact training needs "
        f"{plan.minimal_flops_share:.1%}; slowest {_ranks(plan, slowest)} with {slowest.work_share:.1%} of the "
        f"work; idle {plan.idle_share:.1%}"
    )
    if plan.step_seconds is None:
        yield "costs: assumed, from FLOPs and bytes: shares, no seconds; mmtrain calibrate CONFIG measures those"
    else:
        yield f"costs: {plan.costs}"
    yield from _encoder(plan, replica)
    yield from _streaming(plan, replica)
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
