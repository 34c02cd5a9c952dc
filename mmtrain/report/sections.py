"""Sections of one run's page, each made from its RunRecord.

A section without data tells how to get it.
"""

import base64
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, counted, first_few, percent
from mmtrain.base.progress import clock
from mmtrain.base.small_files import read_limited
from mmtrain.data.stream.copies import summary_of
from mmtrain.report.elements import (
    NOT_EVALUATED,
    NOT_YET,
    SHOWN_NAMES,
    SHOWN_RANKS,
    Chart,
    Picture,
    Question,
    Section,
    Series,
    lines_of,
    listed,
    number,
    table,
)
from mmtrain.report.headline import NO_PLAN, audit_sentence, models
from mmtrain.report.records import LISTED, Benchmark, Evaluation, RankPlan, RunRecord, inside

PICTURE_PATH = re.compile(r"answers/[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.jpg")
MAX_PICTURE_BYTES, MAX_PICTURE_SIDE = 300_000, 1024
MAX_PICTURES_BYTES = 600_000  # of all pictures of a page, as text
NO_TIMES = (
    "Nothing is recorded yet: times come every 100 steps, at saves and at the end, without the "
    "first step of each process."
)
# kinds of a rank's time, and their colours
TIMES = {
    "compute": 0,
    "communication": 1,
    "data": 4,
    "fetching": 3,
    "idle": 6,
}
# planned memory: its field, and its colour
PARTS = {
    "weights": ("weight_bytes", 0),
    "optimizer": ("optimizer_bytes", 3),
    "activations": ("activation_bytes", 2),
    "workspace": ("workspace_bytes", 4),
}


def sections(run: RunRecord) -> list[Section]:
    makers = (
        trained,
        learning,
        evaluations,
        answers,
        rank_times,
        memory,
        samples,
        faults,
        configuration,
    )
    return [make(run) for make in makers]


def trained(run: RunRecord) -> Section:
    title = "What was trained"
    plan = run.plan
    if plan is None:
        return Section("trained", title, (NO_PLAN, audit_sentence(run)))
    microbatches = counted(plan.microbatches_per_step, "micro-batch", "micro-batches")
    says = (
        f"{models(run)}; {first_few(plan.trainable, SHOWN_NAMES)} trains; "
        "everything else is frozen.",
        f"Pipeline {plan.pipeline} x data {plan.data}: {counted(len(plan.ranks), 'rank')}; "
        f"per step and replica {microbatches} of "
        f"{counted(plan.packs_per_microbatch, 'pack')} of {counted(plan.pack_length, 'token')}.",
        audit_sentence(run),
    )
    rows = []
    for rank in plan.ranks[:SHOWN_RANKS]:
        layers = "; ".join(_holdings(rank))
        rows.append((str(rank.rank), layers, rank.trainable, rank.optimizer, rank.reason))
    held = table(
        "Layers and optimizers by rank",
        ">rank, layers, >trainable, optimizer, why",
        rows,
    )
    return Section("trained", title, says, tables=(held,))


def learning(run: RunRecord) -> Section:
    if not run.steps:
        return Section("learning", "Loss and speed", (NOT_YET,))
    losses = lines_of("training", run.curves["loss"])
    if held_out := run.curves["eval_loss"].points():
        losses.append(Series("held-out samples", held_out, "dots", 1))

    without_group = "parameters in no group" if run.rates else "lr"
    rates = []
    curves = {without_group: run.curves["lr"], **run.rates}
    for place, (name, curve) in enumerate(curves.items()):
        if len(curve):
            rates.append(Series(name, curve.points(), colour=place % 8, dash=place // 8))

    charts = (
        Chart(
            "loss",
            "Loss",
            losses,
            "nats per supervised token",
            log=True,
        ),
        Chart("rates", "Learning rates", rates, "learning rate"),
        Chart(
            "norm",
            "Gradient norm",
            lines_of("gradient norm", run.curves["grad_norm"]),
            "L2, before clipping",
            log=True,
        ),
        Chart(
            "speed",
            "Tokens a second",
            lines_of("tokens a second", run.curves["tokens_per_second"]),
            "tokens a second, without padding",
        ),
    )
    says = []
    if utilization := run.curves["model_flops_utilization"].means(1):
        share = percent(utilization[0].y)
        says.append(f"Model FLOPs utilization: {share} of the devices' measured matmul speed.")
    return Section("learning", "Loss and speed", says, [chart for chart in charts if chart.series])


def evaluations(run: RunRecord) -> Section:
    title = "Evaluations and control"
    control = run.control
    tables = []
    if run.benchmarks:
        scores = table(
            "Scores by lmms-eval (mmtrain benchmark)",
            "benchmark, metric, >score, >answers, >step, versions",
            benchmark_rows(run.benchmarks.values()),
        )
        tables.append(scores)
    if not run.evaluations:
        return Section("evaluations", title, (NOT_EVALUATED,), tables=tables)

    says = [
        "Exact match: every token of the answer, end mark included, is ranked first, given the "
        "true tokens before."
    ]
    rows = []
    if len(run.evaluations) > 1:
        rows.append(_score_row("first", run.evaluations[0]))
    rows.append(_score_row("last", run.evaluations[-1]))
    if control is not None:
        rows.append(_score_row("control with shuffled images", control))
        says.append(
            f"In the control, {control.permuted_samples:,} of {control.samples:,} samples got "
            "another sample's images: "
            "its scores are those of a model that does not look at the images."
        )
    columns = "evaluation, >step, >loss, >exact match, >token accuracy, >answers, >samples"
    tables.insert(0, table("Scores", columns, rows))
    series = (
        Series("exact match", run.curves["eval_exact_match"].points()),
        Series("token accuracy", run.curves["eval_token_accuracy"].points(), colour=1),
    )
    chart = Chart("scores", "Scores on held-out samples", series, "share", "share")
    return Section("evaluations", title, says, (chart,), tables)


def benchmark_rows(benchmarks: Iterable[Benchmark]) -> Iterator[tuple[str, ...]]:
    """Yield (task, metric, score ± standard error, answers, step, versions) of each score."""
    for record in benchmarks:
        asked = number(record.answers)
        if record.limit:
            asked += f" (--limit {record.limit})"
        versions = ", ".join(map(" ".join, record.versions.items()))
        for metric, (value, error) in record.scores.items():
            score = number(value)
            if error is not None:
                score += f" ± {number(error)}"
            yield record.task, metric, score, asked, number(record.step), versions


def answers(run: RunRecord) -> Section:
    title = "Questions and answers"
    if not run.questions:
        why = (
            "No questions were asked. To have held-out questions answered before the first step "
            "and after the last, set eval.show_answers, and eval.shards or eval.fraction."
        )
        return Section("answers", title, (why,))
    room = MAX_PICTURES_BYTES
    questions = []
    for given in run.questions.values():
        *_, asked = given.values()
        pictures = []
        for name in asked.pictures:
            picture = read_picture(run.folder, name)
            if len(picture.source) > room:
                picture = Picture(why="left out, so that the page stays small")
            room -= len(picture.source)
            pictures.append(picture)
        texts = [(when, answer.given, answer.right) for when, answer in given.items()]
        questions.append(Question(asked.key, asked.question, asked.truth, texts, pictures))
    says = (
        "Held-out questions, answered one token at a time. "
        "An answer is right if all its tokens are right."
    )
    return Section("answers", title, (says,), questions=questions)


def read_picture(folder: Path, name: str) -> Picture:
    """Read a picture of the run's folder; its name in answers.jsonl may be any text."""
    try:
        if not PICTURE_PATH.fullmatch(name):
            raise ValueError(name)
        content = read_limited(inside(folder, name), MAX_PICTURE_BYTES, "a small JPEG")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            warnings.simplefilter("ignore")
            width, height = image.size
        if max(width, height) > MAX_PICTURE_SIDE:
            raise ValueError(name)
    except (UserError, OSError, ValueError, Image.DecompressionBombError):
        return Picture(why="not a small JPEG in the run's folder")
    return Picture(f"data:image/jpeg;base64,{base64.b64encode(content).decode()}", width, height)


def rank_times(run: RunRecord) -> Section:
    title = "Where the time went"
    times = run.times
    totals = {}
    for rank in sorted(times["idle"])[:SHOWN_RANKS]:
        if total := sum(times[kind][rank] for kind in TIMES):
            totals[rank] = total
    if not totals or not run.timed_steps:
        return Section("ranks", title, (NO_TIMES if run.steps else NOT_YET,))

    idle = percent(sum(times["idle"][rank] for rank in totals) / sum(totals.values()))
    planned = ""
    if run.plan:
        planned = f" (planned: {percent(run.plan.idle_share)})"
    says = [
        f"Over {counted(run.timed_steps, 'step')}, without the first of each process, which "
        f"includes warm-up, the ranks were idle {idle} of the time{planned}.",
        "Idle: waiting for other ranks. Data: waiting for samples. "
        "The optimizer's time is not included.",
    ]
    if run.plan and run.plan.step_seconds is None:
        says.append(
            "The plan assumes costs from FLOPs and bytes. Run mmtrain calibrate to measure them."
        )

    if run.copies:
        says.append(summary_of(vars(run.copies)))
    fetches = any(times["fetching"][rank] for rank in totals)
    if fetches:
        says.append(
            "Fetching: waiting for the weights of streamed layers, which are not "
            "kept on the device."
        )
    kinds = [kind for kind in TIMES if fetches or kind != "fetching"]
    return Section("ranks", title, says, (_times_chart(run, totals, kinds),))


def _times_chart(
    run: RunRecord,
    totals: Mapping[int, float],
    kinds: Sequence[str],
) -> Chart:
    """Draw shares of these kinds of time, by rank; `totals` are the ranks' seconds."""
    series, shares = [], {}
    for kind in kinds:
        shares[kind] = [run.times[kind][rank] / total for rank, total in totals.items()]
        series.append(
            Series(
                kind,
                shares[kind],
                "bar",
                TIMES[kind],
                stack="measured",
            )
        )

    planned = {}  # shares of idle time, by rank
    if run.plan:
        planned = {rank.rank: rank.idle_share for rank in run.plan.ranks}
    if planned.keys() >= totals.keys():
        idle = [planned[rank] for rank in totals]
        busy = [1 - share for share in idle]
        series.append(Series("planned: busy", busy, "bar", 5, stack="planned"))
        series.append(Series("planned: idle", idle, "bar", 6, stack="planned"))

    rows = []
    for rank, share in zip(totals, shares["idle"], strict=True):
        seconds = [run.times[kind][rank] / run.timed_steps for kind in kinds]
        rows.append((str(rank), *seconds, percent(share), percent(planned.get(rank))))
    columns = (">rank", *(f">{kind}, s" for kind in kinds), ">idle", ">planned idle")
    return Chart(
        "ranks",
        "Shares of time, by rank",
        series,
        "share of time",
        "share",
        rows=[f"rank {rank}" for rank in totals],
        behind=table("Seconds per step and idle share, by rank", columns, rows),
    )


def memory(run: RunRecord) -> Section:
    title = "Memory"
    if run.plan is None:
        return Section("memory", title, (NO_PLAN,))
    ranks = run.plan.ranks[:SHOWN_RANKS]
    measured = [run.peaks.get(rank.rank, 0.0) for rank in ranks]
    planned = [rank.total_bytes for rank in ranks]
    unit = 2**20
    name = "MiB"
    if max(*measured, *planned, 0) >= 2**30:
        unit = 2**30
        name = "GiB"

    bars, sizes = [], {}
    for part, (part_bytes, colour) in PARTS.items():
        sizes[part] = [getattr(rank, part_bytes) / unit for rank in ranks]
        bars.append(
            Series(
                f"planned: {part}",
                sizes[part],
                "bar",
                colour,
                stack="planned",
            )
        )
    sizes["planned"] = [total / unit for total in planned]
    sizes["measured"] = [peak / unit for peak in measured]

    says = ["Planned: the peak of each rank.", "No limit was set."]
    if run.plan.memory_limit_bytes is not None:
        says[1] = f"The limit is {bytes_text(run.plan.memory_limit_bytes)} per rank."
    if any(measured):
        bars.append(
            Series(
                "measured",
                sizes["measured"],
                "bar",
                1,
                stack="measured",
            )
        )
        says.append(
            "Measured: the most that tensors took; on a CPU the heap, which holds a little more."
        )

    rows = []
    for rank, *parts, peak in zip(ranks, *sizes.values(), strict=True):
        rows.append((str(rank.rank), *parts, peak or "-"))
    chart = Chart(
        "memory",
        "Memory, by rank",
        bars,
        name,
        rows=[f"rank {rank.rank}" for rank in ranks],
        behind=table(f"Memory in {name}, by rank", f">rank, >{', >'.join(sizes)}", rows),
    )
    return Section("memory", title, says, (chart,))


def samples(run: RunRecord) -> Section:
    if not run.steps and not run.reasons:
        return Section("samples", "Samples", (NOT_YET,))
    says = [
        f"{counted(run.totals['samples'], 'sample')} trained on in {counted(run.steps, 'step')}; "
        f"{run.totals['quarantined']:,} more were packed, but quarantined."
    ]

    tables = []
    if run.epochs:
        rows = []
        for e in run.epochs:
            is_complete = "yes" if e.complete else "no"
            rows.append(
                (
                    str(e.epoch),
                    is_complete,
                    e.packs,
                    e.read,
                    e.trained,
                    e.quarantined,
                    e.overlong,
                )
            )
        columns = "epoch, complete, >packs, >read, >trained on, >quarantined, >too long"
        tables.append(table("Epochs: read = trained on + quarantined + too long", columns, rows))
        says.append("Samples that are too long are counted only in complete epochs.")

    if run.quarantined:
        tables.append(
            table("Quarantined, by reason", "reason, >samples", run.reasons.most_common())
        )
        left_out = []
        for q in run.quarantined:
            step = "from the start" if q.step is None else str(q.step + 1)
            left_out.append((step, q.key, q.reason, q.detail, q.shard))
        caption = f"Quarantined samples, first {len(left_out)} of {run.reasons.total():,}"
        columns = ">step, sample, reason, details, shard"
        tables.append(table(caption, columns, left_out, folded=True))
    return Section("samples", "Samples", says, tables=tables)


def faults(run: RunRecord) -> Section:
    says, tables = [], []
    if run.discarded:
        again = []
        for step, n in run.discarded.items():
            again.append(f"{counted(n, 'step')} when the run went back to step {step:,}")
        says.append(f"Discarded and repeated: {listed(again)}.")
    says += [f"{problem}." for problem in run.problems]
    if run.counts.keys() <= {"begin", "end"}:
        says.append(
            "No resume, no bad step, no quarantined sample and no failed checkpoint is recorded."
        )
    if run.events:
        rows = [(clock(event.at), event.step, event.kind, event.text) for event in run.events]
        caption = f"Events, at most the first {LISTED} of each kind"
        tables.append(table(caption, ">time, >step, event, details", rows))
    return Section("faults", "Faults and resumes", says, tables=tables)


def configuration(run: RunRecord) -> Section:
    tables = []
    if run.config:
        tables.append(table("config.yaml", "key, value", run.config.items(), folded=True))
    if run.begin is not None:
        versions = run.begin.versions.items()
        tables.append(table("Versions", "library, version", versions, folded=True))
    return Section("configuration", "Configuration", tables=tables)


# ---- parts


def _holdings(rank: RankPlan) -> Iterator[str]:
    """Yield the layers of a rank: `encoder blocks 0-1`, `front to llm.layers.7` for each stage."""
    slices = [stage.encoder for stage in rank.stages if stage.encoder]
    if slices and slices[0][-1] > slices[0][0]:
        yield f"encoder blocks {slices[0][0]}-{slices[0][-1] - 1}"
    for stage in rank.stages:
        if len(stage.layers) > 1:
            yield f"{stage.layers[0]} to {stage.layers[-1]}"
        else:
            yield from stage.layers


def _score_row(name: str, scores: Evaluation) -> tuple[Any, ...]:
    return (
        name,
        scores.step,
        number(scores.loss),
        percent(scores.exact_match),
        percent(scores.token_accuracy),
        scores.answers,
        scores.samples,
    )
