"""The sections of one run's page, each from its RunRecord; one without data says which key, or what, would give it."""

from __future__ import annotations

from collections.abc import Sequence

from mmtrain.base.printing import first_few
from mmtrain.report.curves import Curve
from mmtrain.report.elements import (
    NOT_YET,
    SHOWN_NAMES,
    SHOWN_RANKS,
    LineChart,
    Section,
    Series,
    counted,
    lines_of,
    listed,
    number,
    percent,
    table,
)
from mmtrain.report.faults import faults, samples
from mmtrain.report.headline import audit_sentence, data_source, models
from mmtrain.report.lines import Evaluation, RankPlan
from mmtrain.report.machine import memory, rank_times
from mmtrain.report.pictures import shown_questions
from mmtrain.report.records import RunRecord

WORDS = (
    ("sample", "one conversation with its images"),
    ("tile", "a square of pixels that the encoder sees at once: an image is one, or several"),
    ("pack", "a token sequence of fixed length, which holds samples one after another"),
    ("micro-batch", "what one pipeline forward handles: one or several packs"),
    ("step", "one optimizer step, a global number that no layout changes"),
    ("front", "connector, embedding and, unless it is in slices, encoder, on stage 0; of a text run the embedding"),
    ("slice", "whole blocks of the frozen encoder, which a rank runs ahead of need in time in which it would wait"),
    ("layer", "the front, a decoder layer or the head"),
    ("stage", "a position in the pipeline, whose contents run as one call"),
    ("rank", "one process, which holds one or several stages"),
    ("NoOp", "the optimizer of a rank that holds nothing trainable: it has nothing to do at a step"),
    ("nats", "the unit of the loss, by natural logarithms: 0 where every supervised token is certain"),
    ("right tokens", "the share of supervised tokens that are the likeliest one after the true ones before them"),
    ("exact answers", "the share of answers of which every token, end mark included, is right in that sense"),
    ("control", "an evaluation whose images are permuted among the questions: what it scores needs no looking"),
    ("quarantined", "a sample that could not be read or used; it is left out, and the run goes on"),
)


def sections(run: RunRecord) -> tuple[Section, ...]:
    """All of them, in the order of the page."""
    makers = (trained, learning, evaluations, answers, rank_times, memory, samples, faults, configuration, words)
    return tuple(make(run) for make in makers)


def trained(run: RunRecord) -> Section:
    """The plan, the data, what trains, the audit."""
    plan, says = run.plan, [f"Trained on {data_source(run)}."]
    if plan is None:
        return Section(
            "trained", "What was trained", (*says, "There is no plan.json that could be read.", audit_sentence(run))
        )
    packs = counted(plan.packs_per_microbatch, "pack")
    says += [
        f"{models(run)}; {first_few(plan.trainable, SHOWN_NAMES)} trains, all else is frozen.",
        f"Pipeline {plan.pipeline} x data {plan.data}: {counted(len(plan.ranks), 'rank')}; per step and replica "
        f"{counted(plan.microbatches_per_step, 'micro-batch', 'micro-batches')} of {packs} of "
        f"{counted(plan.pack_length, 'token')}.",
        audit_sentence(run),
    ]
    rows = [
        (
            str(rank.rank),
            "; ".join([*_slice(rank), *(first_few(_ranges(stage.layers), SHOWN_NAMES) for stage in rank.stages)]),
            rank.trainable,
            rank.optimizer,
            rank.reason,
        )
        for rank in plan.ranks[:SHOWN_RANKS]
    ]
    held = table("Who holds and trains what", (">rank", "layers", ">trainable", "optimizer", "why"), rows)
    return Section("trained", "What was trained", tuple(says), tables=(held,))


def learning(run: RunRecord) -> Section:
    """Loss, rates, gradient norm, speed."""
    if not run.steps:
        return Section("learning", "Loss and speed", (NOT_YET,))
    loss, speed, norm = run.curve("loss"), run.curve("tokens_per_second"), run.curve("grad_norm")
    held_out = Series("held-out samples", tuple(run.curve("eval_loss").points()), "dots", 1)
    shown = (*lines_of("training", loss), *((held_out,) if held_out.points else ()))
    rates = [Series(name, tuple(curve.points()), colour=i % 8, dash=i // 8) for i, (name, curve) in _rates(run)]
    charts = (
        LineChart("loss", "Loss", _from_to("Loss", shown), shown, "nats per supervised token", log=True),
        LineChart("rates", "Learning rates", _from_to("The rate", rates), tuple(rates), "learning rate"),
        _one_line("norm", "Gradient norm", norm, "L2, before clipping", log=True),
        _one_line("speed", "Tokens a second", speed, "tokens a second, without padding"),
    )
    says = [] if loss.is_whole else [f"Of {loss.count:,} steps each stretch's lowest and highest value is shown."]
    if (left_out := run.steps - loss.count) > 0:
        says.append(f"{counted(left_out, 'step')} had no finite loss: see “Faults and resumes”.")
    utilization = run.curve("model_flops_utilization").means(1)
    if utilization:
        says.append(f"{percent(utilization[0].y)} of the devices' arithmetic went into what any training must compute.")
    return Section("learning", "Loss and speed", tuple(says), tuple(chart for chart in charts if chart.series))


def evaluations(run: RunRecord) -> Section:
    """Scores over the steps, and the control."""
    title = "Evaluations and control"
    last, control = run.last_evaluation, run.control
    if last is None:
        why = "Nothing is held out: set eval.shards, or eval.fraction."
        return Section("evaluations", title, ("No evaluation is recorded yet." if run.is_evaluated else why,))
    curves = {"exact answers": "eval_exact_match", "right tokens": "eval_token_accuracy"}
    shown = [Series(name, tuple(run.curve(key).points()), colour=i) for i, (name, key) in enumerate(curves.items())]
    rows = [] if run.first_evaluation in (None, last) else [_score_row("first", run.first_evaluation)]
    rows.append(_score_row("last", last))
    says = [
        "An answer is exact if each of its tokens, end mark included, is the likeliest one after the true ones before "
        "it."
    ]
    if control is None:
        says.append(
            "There is no control: eval.permuted_control=true evaluates at the end with images permuted among the "
            "questions, for runs with images."
        )
    else:
        rows.append(_score_row("control, images permuted", control))
        says.append(
            f"In the control {control.permuted_samples:,} of {control.samples:,} samples got another sample's images: "
            "what it scores needs no looking."
        )
    columns = ("evaluation", ">step", ">loss", ">exact answers", ">right tokens", ">answers", ">samples")
    charts = (
        LineChart(
            "scores", "Scores on held-out samples", _from_to("The share", shown), tuple(shown), "share", y_unit="share"
        ),
    )
    return Section("evaluations", title, tuple(says), charts, (table("Scores", columns, rows),))


def answers(run: RunRecord) -> Section:
    """Held-out questions with pictures, before and after."""
    title = "Questions and answers"
    if not run.questions:
        if run.config.get("eval.show_answers") == "0":
            why = "eval.show_answers is 0: set it to a number of held-out questions to be answered."
        elif run.last_evaluation is None:
            why = "Nothing was asked: eval.shards or eval.fraction, and eval.show_answers, give questions."
        else:
            why = "There is no answers.jsonl: questions are answered before the first step and after the last."
        return Section("answers", title, (why,))
    after = [question.after for question in run.questions if question.after is not None]
    before = [question.before for question in run.questions if question.before is not None]
    counts = [
        f"{sum(answer.right for answer in given)} of {len(given)} right {when}"
        for when, given in (("before training", before), ("after it", after))
        if given
    ]
    says = f"Held-out questions, answered one token at a time: {listed(counts)}. One is right if all its tokens are."
    return Section("answers", title, (says,), questions=shown_questions(run))


def configuration(run: RunRecord) -> Section:
    """Every key, and versions."""
    tables = []
    if run.config:
        tables.append(table("config.yaml", ("key", "value"), run.config.items(), folded=True))
    if run.begins and run.begins[-1].versions:
        tables.append(table("Versions", ("library", "version"), run.begins[-1].versions.items(), folded=True))
    says = () if run.config else ("config.yaml could not be read.",)
    return Section("configuration", "Configuration", says, tables=tuple(tables))


def words(run: RunRecord) -> Section:
    """What the page's words mean, whatever the run."""
    return Section("words", "Words", tables=(table("What the words mean", ("word", "meaning"), WORDS, folded=True),))


# ---- parts


def _slice(rank: RankPlan) -> list[str]:
    """What it holds of an encoder in slices, if anything."""
    held = [stage.encoder for stage in rank.stages if stage.encoder is not None]
    return [_numbers("encoder block", first, last - 1) for first, last in held[:1] if last > first]


def _ranges(layers: Sequence[str]) -> list[str]:
    """`llm.layers.0`, `llm.layers.1`, ... as `layers 0-1`."""
    numbers = [int(tail) for layer in layers if (tail := layer.removeprefix("llm.layers.")).isdecimal()]
    others = [layer for layer in layers if not layer.removeprefix("llm.layers.").isdecimal()]
    if not numbers:
        return others
    first, last = min(numbers), max(numbers)
    held = _numbers("layer", first, last)
    return [*(name for name in others if name != "head"), held, *(name for name in others if name == "head")]


def _numbers(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _rates(run: RunRecord) -> list[tuple[int, tuple[str, Curve]]]:
    main = {("lr" if not run.rates else "what is in no group"): run.curve("lr")}
    return list(enumerate((name, curve) for name, curve in (main | run.rates).items() if curve.count))


def _one_line(id: str, title: str, curve: Curve, y_name: str, *, log: bool = False) -> LineChart:
    shown = lines_of(title.lower(), curve)
    return LineChart(id, title, _from_to(title, shown), shown, y_name, log=log)


def _from_to(what: str, series: Sequence[Series]) -> str:
    """What a chart shows, in a sentence."""
    said = []
    for one in series:
        if one.points and not one.derived:
            (first_x, first), (last_x, last) = one.points[0], one.points[-1]
            said.append(
                f"{one.name} from {number(first)} at step {first_x:,.0f} to {number(last)} at step {last_x:,.0f}"
            )
    return f"{what}: {'; '.join(said)}." if said else f"{what}: nothing is recorded."


def _score_row(name: str, scores: Evaluation) -> tuple:
    return (
        *(name, scores.step, number(scores.loss), percent(scores.exact_match), percent(scores.token_accuracy)),
        *(scores.answers, scores.samples),
    )
