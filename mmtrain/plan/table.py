"""A plan as text for a terminal: a table with a row a rank, and what it means in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mmtrain.base.printing import bytes_text
from mmtrain.plan.plan import Plan, RankPlan

COLUMNS = 80
LEFT = {"layers", "optimizer"}  # columns of words


def render(plan: Plan) -> str:
    """The plan as plain text of at most 80 columns: a row for each pipeline rank, which its replicas share."""
    replica = [rank for rank in plan.ranks if rank.data == 0]
    largest = max(rank.total_bytes for rank in replica)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    header = {"rank": "", "stage": "", "layers": "", "trainable": "", "optimizer": ""}
    header |= {"weights": name, "activations": name, "total": name, "work": "%", "idle": "%"}
    rows = [
        [
            _ranks(plan, rank),
            "",
            "",
            f"{rank.trainable:,}" if rank.trainable < 1e8 else f"{rank.trainable / 1e6:,.1f}M",
            rank.optimizer,
            *(f"{size / unit:,.1f}" for size in (rank.weight_bytes, rank.activation_bytes, rank.total_bytes)),
            *(f"{100 * share:.1f}" for share in (rank.work_share, rank.idle_share)),
        ]
        for rank in replica
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    room = COLUMNS - sum(widths) - len(widths) + 1 + len("layers")
    lines = [list(header), list(header.values())]
    for row, rank in zip(rows, replica, strict=True):
        lines += _with_stages(row, rank, room)
    widths[2] = max(len(line[2]) for line in lines)
    lines.insert(2, ["-" * width for width in widths])
    between = "  " if sum(widths) + 2 * len(widths) - 2 <= COLUMNS else " "
    text = [
        between.join(
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for cell, width, column in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]
    sentences = (f"rank {_ranks(plan, rank)}: {rank.optimizer}, {rank.reason}{_recomputes(rank)}" for rank in replica)
    return "\n".join([*_wrapped(*_headline(plan)), *text, *_wrapped(*sentences, *_footer(plan, replica))])


def _with_stages(row: Sequence[str], rank: RankPlan, room: int) -> Iterator[list[str]]:
    """The rank's row with its first stage, and a line for each other stage; layers are wrapped into `room` columns."""
    for i, stage in enumerate(rank.stages):
        held = stage.summary.replace("llm.layers.", "").replace(" + ", ", ")
        for j, part in enumerate(textwrap.wrap(held, room, break_on_hyphens=False)):
            number = str(stage.stage) if j == 0 else ""
            yield [row[0], number, part, *row[3:]] if i == j == 0 else ["", number, part, *[""] * len(row[3:])]


def _recomputes(rank: RankPlan) -> str:
    held = sum(stage.last - stage.first for stage in rank.stages)
    return f"; {rank.recompute_layers} of {held} layers recompute" if rank.recompute_layers else ""


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
        f"step: {took}{total:,.{0 if total >= 100 else 3}f} TFLOP per replica, of which any exact training needs "
        f"{plan.minimal_flops_share:.1%}; slowest rank {_ranks(plan, slowest)} with {slowest.work_share:.1%} of the "
        f"work; idle {plan.idle_share:.1%}"
    )
    if plan.step_seconds is None:
        yield "costs: assumed, from FLOPs and bytes: shares and ratios, no seconds; mmtrain calibrate measures those"
    else:
        yield f"costs: {plan.costs}"
    if plan.fewer_chunks_time_ratio is not None:
        longer = plan.fewer_chunks_time_ratio - 1
        yield f"{plan.stages_per_rank} stages a rank, interleaved: with fewer a step takes {longer:.1%} longer"
    if plan.no_prefetch_time_ratio is not None:
        batches = "micro-batch" if plan.encode_ahead == 1 else "micro-batches"
        ahead = f"a step begins with {plan.encode_ahead} {batches} encoded" if plan.encode_ahead else "inside a step"
        yield f"encoder prefetch: {ahead}; without, a step takes {plan.no_prefetch_time_ratio - 1:.1%} longer"
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
