"""The sections of one run's page, each made from its RunRecord; one without data says what would
give it.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, counted, first_few
from mmtrain.base.progress import clock
from mmtrain.base.small_files import read_limited
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
    percent,
    table,
)
from mmtrain.report.headline import audit_sentence, models
from mmtrain.report.records import LISTED, Benchmark, Evaluation, RankPlan, RunRecord, inside

PICTURE_PATH = re.compile(r"answers/[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.jpg")
MAX_PICTURE_BYTES, MAX_PICTURE_SIDE = 300_000, 1024
MAX_PICTURES_BYTES = 600_000  # of all pictures of a page, as text
# kinds of a rank's time, and their colours
TIMES = {"compute": 0, "communication": 1, "data": 4, "fetching": 3, "idle": 6}
# of planned memory, and their colours
PARTS = {"weights": 0, "optimizer": 3, "activations": 2, "workspace": 4}


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
    title, plan = "What was trained", run.plan
    if plan is None:
        return Section(
            "trained", title, ("plan.json is missing or not readable.", audit_sentence(run))
        )
    says = (
        f"{models(run)}; {first_few(plan.trainable, SHOWN_NAMES)} trains; "
        "everything else is frozen.",
        f"Pipeline {plan.pipeline} x data {plan.data}: {counted(len(plan.ranks), 'rank')}; "
        "per step and replica "
        f"{counted(plan.microbatches_per_step, 'micro-batch', 'micro-batches')} of "
        f"{counted(plan.packs_per_microbatch, 'pack')} of {counted(plan.pack_length, 'token')}.",
        audit_sentence(run),
    )
    rows = [
        (str(rank.rank), "; ".join(_holdings(rank)), rank.trainable, rank.optimizer, rank.reason)
        for rank in plan.ranks[:SHOWN_RANKS]
    ]
    held = table(
        "Layers and optimizers by rank", (">rank", "layers", ">trainable", "optimizer", "why"), rows
    )
    return Section("trained", title, says, tables=(held,))


def learning(run: RunRecord) -> Section:
    if not run.steps:
        return Section("learning", "Loss and speed", (NOT_YET,))
    losses = lines_of("training", run.curves["loss"])
    if held_out := run.curves["eval_loss"].points():
        losses.append(Series("held-out samples", held_out, "dots", 1))
    curves = {("parameters in no group" if run.rates else "lr"): run.curves["lr"], **run.rates}
    rates = [
        Series(name, curve.points(), colour=place % 8, dash=place // 8)
        for place, (name, curve) in enumerate(curves.items())
        if len(curve)
    ]
    norm = lines_of("gradient norm", run.curves["grad_norm"])
    speed = lines_of("tokens a second", run.curves["tokens_per_second"])
    charts = (
        Chart("loss", "Loss", losses, "nats per supervised token", log=True),
        Chart("rates", "Learning rates", rates, "learning rate"),
        Chart("norm", "Gradient norm", norm, "L2, before clipping", log=True),
        Chart("speed", "Tokens a second", speed, "tokens a second, without padding"),
    )
    says = []
    if utilization := run.curves["model_flops_utilization"].means(1):
        says.append(
            f"Model FLOPs utilization: {percent(utilization[0].y)} of the devices' "
            "measured matmul speed."
        )
    return Section("learning", "Loss and speed", says, [chart for chart in charts if chart.series])


def evaluations(run: RunRecord) -> Section:
    title, control = "Evaluations and control", run.control
    columns = ("benchmark", "metric", ">score", ">answers", ">step", "versions")
    benchmarks = benchmark_rows(run.benchmarks)
    tables = (
        [table("Scores by lmms-eval (mmtrain benchmark)", columns, benchmarks)]
        if benchmarks
        else []
    )
    if not run.evaluations:
        return Section("evaluations", title, (NOT_EVALUATED,), tables=tables)
    curves = {"exact match": "eval_exact_match", "token accuracy": "eval_token_accuracy"}
    series = [
        Series(name, run.curves[key].points(), colour=place)
        for place, (name, key) in enumerate(curves.items())
    ]
    says = [
        "Exact match: every token of the answer, end mark included, is ranked first, given the "
        "true tokens before."
    ]
    rows = [_score_row("first", run.evaluations[0])] if len(run.evaluations) > 1 else []
    rows.append(_score_row("last", run.evaluations[-1]))
    if control is not None:
        rows.append(_score_row("control with shuffled images", control))
        says.append(
            f"In the control, {control.permuted_samples:,} of {control.samples:,} samples got "
            "another sample's images: "
            "its scores are those of a model that does not look at the images."
        )
    columns = (
        "evaluation",
        ">step",
        ">loss",
        ">exact match",
        ">token accuracy",
        ">answers",
        ">samples",
    )
    chart = Chart("scores", "Scores on held-out samples", series, "share", y_unit="share")
    return Section("evaluations", title, says, (chart,), (table("Scores", columns, rows), *tables))


def benchmark_rows(benchmarks: Sequence[Benchmark]) -> list[tuple[str, ...]]:
    """Return (task, metric, score ± standard error, answers, step, versions) of each score."""
    return [
        (
            record.task,
            metric,
            number(value) + ("" if error is None else f" ± {number(error)}"),
            ("-" if record.answers is None else f"{record.answers:,}")
            + (f" (--limit {record.limit})" if record.limit else ""),
            f"{record.step:,}",
            ", ".join(f"{library} {version}" for library, version in record.versions.items()),
        )
        for record in benchmarks
        for metric, (value, error) in record.scores.items()
    ]


def answers(run: RunRecord) -> Section:
    title = "Questions and answers"
    if not run.questions:
        why = (
            "No questions were asked. To have held-out questions answered before the first step "
            "and after the last, "
        )
        return Section(
            "answers", title, (f"{why}set eval.show_answers, and eval.shards or eval.fraction.",)
        )
    room, questions = MAX_PICTURES_BYTES, []
    for asked, before, after in run.questions:
        pictures = []
        for name in asked.pictures:
            picture = read_picture(run.folder, name)
            if len(picture.source or "") > room:
                picture = Picture(None, why="left out, so that the page stays small")
            room -= len(picture.source or "")
            pictures.append(picture)
        answers_given = (("before training", before), ("after training", after))
        given = [
            (when, answer.given, answer.right)
            for when, answer in answers_given
            if answer is not None
        ]
        questions.append(Question(asked.key, asked.question, asked.truth, given, pictures))
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
        return Picture(None, why="not a small JPEG in the run's folder")
    return Picture(f"data:image/jpeg;base64,{base64.b64encode(content).decode()}", width, height)


def rank_times(run: RunRecord) -> Section:
    title, plan, times = "Where the time went", run.plan, run.times
    totals = {
        rank: sum(times[kind][rank] for kind in TIMES)
        for rank in sorted(times["idle"])[:SHOWN_RANKS]
    }
    ranks = [rank for rank, total in totals.items() if total]
    if not ranks:
        return Section(
            "ranks",
            title,
            (NOT_YET if not run.steps else "Only first steps of processes are recorded.",),
        )
    shares = {kind: [times[kind][rank] / totals[rank] for rank in ranks] for kind in TIMES}
    idle = sum(times["idle"][rank] for rank in ranks) / sum(totals.values())
    says = [
        f"Over {counted(run.timed_steps, 'step')}, without the first of each process, which "
        "includes warm-up, the "
        f"ranks were idle {percent(idle)} of the "
        f"time{f' (planned: {percent(plan.idle_share)})' if plan else ''}.",
        "Idle: waiting for other ranks. Data: waiting for samples. "
        "The optimizer's time is not included.",
    ]
    if plan and plan.step_seconds is None:
        says.append(
            "The plan assumes costs from FLOPs and bytes. Run mmtrain calibrate to measure them."
        )
    if any(shares["fetching"]):
        says.append(
            "Fetching: waiting for the weights of streamed layers, which are not "
            "kept on the device."
        )
    else:
        del shares["fetching"]
    series = [
        Series(kind, of_ranks, "bar", TIMES[kind], stack="measured")
        for kind, of_ranks in shares.items()
    ]
    planned = {rank.rank: rank for rank in plan.ranks} if plan else {}
    if planned.keys() >= set(ranks):
        idle_shares = [planned[rank].idle_share for rank in ranks]
        busy_shares = [1 - share for share in idle_shares]
        series.append(Series("planned: busy", busy_shares, "bar", 5, stack="planned"))
        series.append(Series("planned: idle", idle_shares, "bar", 6, stack="planned"))
    rows = []
    for place, rank in enumerate(ranks):
        seconds = [times[kind][rank] / run.timed_steps for kind in shares]
        planned_share = planned[rank].idle_share if rank in planned else None
        rows.append((str(rank), *seconds, percent(shares["idle"][place]), percent(planned_share)))
    columns = (">rank", *(f">{kind}, s" for kind in shares), ">idle", ">planned idle")
    chart = Chart(
        id="ranks",
        title="Shares of time, by rank",
        series=series,
        y_name="share of time",
        y_unit="share",
        rows=[f"rank {rank}" for rank in ranks],
        behind=table("Seconds per step and idle share, by rank", columns, rows),
    )
    return Section("ranks", title, says, (chart,))


def memory(run: RunRecord) -> Section:
    title = "Memory"
    if run.plan is None:
        return Section("memory", title, ("plan.json is missing or not readable.",))
    planned = run.plan.ranks[:SHOWN_RANKS]
    measured = [run.peaks.get(rank.rank, 0.0) for rank in planned]
    largest = max(*measured, *(rank.total_bytes for rank in planned))
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    of_parts = [
        [r.weight_bytes, r.optimizer_bytes, r.activation_bytes, r.workspace_bytes] for r in planned
    ]
    bars = []
    for sizes, (part, colour) in zip(zip(*of_parts, strict=True), PARTS.items(), strict=True):
        bars.append(
            Series(
                f"planned: {part}", [size / unit for size in sizes], "bar", colour, stack="planned"
            )
        )
    limit = run.plan.memory_limit_bytes
    says = ["Planned: the peak of each rank."]
    says.append(
        "No limit was set." if limit is None else f"The limit is {bytes_text(limit)} per rank."
    )
    if any(measured):
        bars.append(
            Series("measured", [peak / unit for peak in measured], "bar", 1, stack="measured")
        )
        says.append(
            "Measured: the most that tensors took; on a CPU the heap, which holds a little more."
        )
    rows = []
    for rank, sizes, peak in zip(planned, of_parts, measured, strict=True):
        cells = [number(size / unit) for size in (*sizes, rank.total_bytes)]
        rows.append((str(rank.rank), *cells, number(peak / unit) if peak else "-"))
    columns = (">rank", *(f">{part}" for part in PARTS), ">planned", ">measured")
    chart = Chart(
        id="memory",
        title="Memory, by rank",
        rows=[f"rank {rank.rank}" for rank in planned],
        series=bars,
        y_name=name,
        behind=table(f"Memory in {name}, by rank", columns, rows),
    )
    return Section("memory", title, says, (chart,))


def samples(run: RunRecord) -> Section:
    if not run.steps and not run.reasons:
        return Section("samples", "Samples", (NOT_YET,))
    trained_on = (
        f"{counted(run.totals['samples'], 'sample')} trained on in {counted(run.steps, 'step')}"
    )
    says, tables = (
        [f"{trained_on}; {run.totals['quarantined']:,} more were packed, but quarantined."],
        [],
    )
    if run.epochs:
        columns = (
            "epoch",
            "complete",
            ">packs",
            ">read",
            ">trained on",
            ">quarantined",
            ">too long",
        )
        rows = [
            (
                str(e.epoch),
                "yes" if e.complete else "no",
                e.packs,
                e.read,
                e.trained,
                e.quarantined,
                e.overlong,
            )
            for e in run.epochs
        ]
        tables.append(table("Epochs: read = trained on + quarantined + too long", columns, rows))
        says.append("Samples that are too long are counted only in complete epochs.")
    if run.quarantined:
        tables.append(
            table("Quarantined, by reason", ("reason", ">samples"), run.reasons.most_common())
        )
        rows = [
            (
                "from the start" if q.step is None else str(q.step + 1),
                q.key,
                q.reason,
                q.detail,
                q.shard,
            )
            for q in run.quarantined
        ]
        caption = f"Quarantined samples, first {len(rows)} of {run.reasons.total():,}"
        tables.append(
            table(caption, (">step", "sample", "reason", "details", "shard"), rows, folded=True)
        )
    return Section("samples", "Samples", says, tables=tables)


def faults(run: RunRecord) -> Section:
    says, tables = [], []
    if run.discarded:
        again = [
            f"{counted(n, 'step')} when the run went back to step {step:,}"
            for step, n in run.discarded.items()
        ]
        says.append(f"Discarded and repeated: {listed(again)}.")
    says += [f"{problem}." for problem in run.problems]
    if all(event.kind in ("begin", "end") for event in run.events):
        says.append(
            "No resume, no bad step, no quarantined sample and no failed checkpoint is recorded."
        )
    if run.events:
        rows = [(clock(event.at), event.step, event.kind, event.text) for event in run.events]
        tables.append(
            table(
                f"Events, at most the first {LISTED} of each kind",
                (">time", ">step", "event", "details"),
                rows,
            )
        )
    return Section("faults", "Faults and resumes", says, tables=tables)


def configuration(run: RunRecord) -> Section:
    tables = []
    if run.config:
        tables.append(table("config.yaml", ("key", "value"), run.config.items(), folded=True))
    if run.begin is not None:
        tables.append(
            table("Versions", ("library", "version"), run.begin.versions.items(), folded=True)
        )
    return Section("configuration", "Configuration", tables=tables)


# ---- parts


def _holdings(rank: RankPlan) -> list[str]:
    """`encoder blocks 0-1`, `front to llm.layers.7`: what a rank holds, one text a stage."""
    slices = [stage.encoder for stage in rank.stages if stage.encoder is not None]
    texts = [f"encoder blocks {first}-{last - 1}" for first, last in slices[:1] if last > first]
    layers = [stage.layers for stage in rank.stages if stage.layers]
    return texts + [
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in layers
    ]


def _score_row(name: str, scores: Evaluation) -> tuple:
    shares = percent(scores.exact_match), percent(scores.token_accuracy)
    return name, scores.step, number(scores.loss), *shares, scores.answers, scores.samples
