"""Headline of a page: answers to six questions about the run."""

import math
from datetime import UTC, datetime

from mmtrain.base.printing import counted, first_few, percent
from mmtrain.base.progress import clock
from mmtrain.report.elements import NOT_EVALUATED, NOT_YET, Finding, Tone, listed, number
from mmtrain.report.records import Evaluation, RunRecord

SHOWN = 4  # names in a sentence
NO_PLAN = "plan.json is missing or not readable."
NORMAL_95 = 1.959964  # standard deviations on each side hold 95% of a normal distribution
MIN_LOSS_DIFFERENCE = 0.02  # relative; counts where exact answers do not tell
FEW_EXACT = 0.05  # below this share exact answers say nothing: answers are long


def headline(run: RunRecord) -> dict[str, Finding]:
    """Answer six questions from the records."""
    return {
        "What was trained?": _trained(run),
        "On which data?": _data(run),
        "How long did it take?": _took(run),
        "Did it work?": _worked(run),
        "Did it look at the images?": _looked(run),
        "What went wrong?": _wrong(run),
    }


def status(run: RunRecord) -> str:
    if run.final_step is not None:
        return f"Finished: {counted(run.final_step, 'step')} done."
    if run.begun is None or not run.steps:
        return NOT_YET
    of_all = run.config.get("train.max_steps", "?")
    return (
        f"No end is recorded: the last step is {run.steps_done:,} of {of_all}, at "
        f"{_moment(run.begun + run.elapsed)}. The run is still going, was stopped or failed."
    )


def models(run: RunRecord) -> str:
    """Return `encoder → projector → LLM`."""
    if run.plan is None:
        return run.config.get("model.llm.path", "")
    if run.plan.vision is None:
        return f"text → {run.plan.llm}"
    return f"{run.plan.vision} → projector → {run.plan.llm}"


def data_source(run: RunRecord) -> str:
    """Name the training data as the configuration does."""
    for key in ("data.shards", "data.sets"):
        source = run.config.get(key, "null")
        if source != "null":
            return source
    return "data that config.yaml does not name"


def audit_sentence(run: RunRecord) -> str:
    if run.audit is None:
        return (
            "No audit yet: a run checks at its end that frozen weights are unchanged and "
            "trained weights changed."
        )
    if not run.audit.passed:
        why = first_few(run.audit.failures, SHOWN) or "audit.json does not say why"
        return f"The audit failed: {why}."
    ranks = counted(len(run.audit.ranks), "rank")
    return f"The audit passed on {ranks}: {run.audit.result}."


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _trained(run: RunRecord) -> Finding:
    if run.plan is None:
        return Finding(run.config.get("model.trainable", "unknown"), NO_PLAN)
    parameters = sum(rank.trainable for rank in run.plan.ranks if rank.data == 0)
    answer = f"{first_few(run.plan.trainable, SHOWN)}: {counted(parameters, 'parameter')}"
    return Finding(answer, f"{models(run)}; everything else is frozen. {audit_sentence(run)}")


def _data(run: RunRecord) -> Finding:
    totals = run.totals
    if not run.steps:
        return Finding(data_source(run), NOT_YET)
    images = counted(totals["images"], "image")
    if totals["tiles"] != totals["images"]:
        part = "cell" if run.config.get("model.vision.layout") == "native" else "tile"
        images += f" in {counted(totals['tiles'], part)}"
    text = (
        f"from {data_source(run)}: {images}, {counted(totals['tokens'], 'token')} "
        f"({totals['supervised_tokens']:,} supervised), in {counted(run.steps, 'step')}."
    )
    return Finding(counted(totals["samples"], "sample"), text)


def _took(run: RunRecord) -> Finding:
    speed = run.curves["tokens_per_second"].means(1)
    if not speed or run.begun is None:
        return Finding("unknown", NOT_YET)
    ranks = ""
    if run.begin is not None:
        ranks = f"{counted(run.begin.ranks, 'rank')} on {run.begin.device}; "
    text = (
        f"{clock(run.seconds)} for steps and evaluations. {ranks}"
        f"{number(speed[0].y)} tokens a second in training. Started {_moment(run.begun)}."
    )
    return Finding(f"{clock(run.elapsed)} from start to end", text)


def _worked(run: RunRecord) -> Finding:
    if not run.evaluations:
        return _worked_in_training(run)
    first = run.evaluations[0]
    last = run.evaluations[-1]
    if first is last:
        return Finding("one evaluation so far", f"After step {last.step:,}: {_scores(last)}.")
    text = (
        f"On {counted(last.samples, 'held-out sample')}, from step {first.step:,} to step "
        f"{last.step:,}: {_scores(first)} → {_scores(last)}."
    )
    better, by_loss = _compare(last, first)
    lower, higher = ("lower loss", "higher loss") if by_loss else ("better", "worse")
    tone: Tone = "mixed"
    answer = "no clear change"
    if better < 0:
        answer = higher
        tone = "bad"
    elif better > 0:
        answer = lower
        if not _few(first, last):
            tone = "good"
    return Finding(f"{answer} on held-out samples", text, tone)


def _worked_in_training(run: RunRecord) -> Finding:
    ends = run.curves["loss"].means(10)
    if len(ends) < 2:
        return Finding("unknown", NOT_EVALUATED)
    first = ends[0].y
    last = ends[-1].y
    went = "fell" if last < first else "rose"
    text = f"Mean of a tenth of the steps: {number(first)} to {number(last)}. {NOT_EVALUATED}"
    return Finding(f"training loss {went}", text, "mixed")


def _looked(run: RunRecord) -> Finding:
    control = run.control
    if run.plan is not None and run.plan.vision is None:
        return Finding("no images", "The run trains on text alone.")
    if control is None or not run.evaluations:
        text = (
            "eval.permuted_control=true, with eval.shards or eval.fraction, evaluates with "
            "shuffled images at the end of a run."
        )
        return Finding("unknown", text)

    last = run.evaluations[-1]
    text = f"With shuffled images: {_scores(control)}; with the right images: {_scores(last)}."
    if gain := _gain(last, control):
        added, least, most = gain
        text += (
            f" The right images add {100 * added:.1f} points "
            f"(95% interval {100 * least:.1f} to {100 * most:.1f})."
        )
    if (kept := control.samples - control.permuted_samples) > 0:
        their = "its" if kept == 1 else "their"
        text += f" {counted(kept, 'sample')} kept {their} own images."

    better, by_loss = _compare(last, control)
    if better > 0:
        why = "by the loss: it is higher with wrong images"
        if not by_loss:
            why = "with wrong images it does worse"
        return Finding(f"yes, {why}", text, "good")
    if _few(last, control):
        return Finding("too few exact answers to tell", text, "mixed")
    text += " The model answers equally well without the right images."
    return Finding("no sign of it", text, "bad")


def _gain(first: Evaluation, second: Evaluation) -> tuple[float, float, float] | None:
    """Return the share of exact answers of `first` less that of `second`, with its 95% interval.

    By Newcombe's method 10, from Wilson's intervals of the shares: R. G. Newcombe, Statistics in
    Medicine 17 (1998), 873-890. It takes the answers for independent. None where there are none.
    """
    intervals = []
    for scores in (first, second):
        if scores.exact_match is None or not scores.answers:
            return None
        share = scores.exact_match
        part = NORMAL_95**2 / scores.answers
        middle = share + part / 2
        half = math.sqrt(part * (share * (1 - share) + part / 4))
        down = share - (middle - half) / (1 + part)
        up = (middle + half) / (1 + part) - share
        intervals.append((share, down, up))
    (share, down, up), (other, other_down, other_up) = intervals
    added = share - other
    return added, added - math.hypot(down, other_up), added + math.hypot(up, other_down)


def _scores(scores: Evaluation) -> str:
    loss = f"loss {number(scores.loss)}"
    if scores.exact_match is None:
        return loss
    return f"exact match {percent(scores.exact_match)}, {loss}"


def _few(first: Evaluation, second: Evaluation) -> bool:
    """Return whether too few answers are exact to say anything."""
    return max(first.exact_match or 0.0, second.exact_match or 0.0) < FEW_EXACT


def _compare(first: Evaluation, second: Evaluation) -> tuple[float, bool]:
    """Return a number above 0 if `first` is better, below 0 if worse, and whether loss decides.

    It is 0 where the difference is not clear.
    """
    if not _few(first, second) and (gain := _gain(first, second)) and not gain[1] <= 0 <= gain[2]:
        return gain[0], False
    if first.loss is None or second.loss is None:
        return 0, True
    difference = second.loss - first.loss
    is_clear = abs(difference) > MIN_LOSS_DIFFERENCE * max(abs(first.loss), abs(second.loss))
    if not is_clear or not math.isfinite(difference):
        difference = 0
    return difference, True


def _wrong(run: RunRecord) -> Finding:
    counts = run.counts
    failed = run.audit is not None and not run.audit.passed
    bad = counts["no update"] + counts["bad step"]
    quarantined = run.reasons.total()
    repeated = run.discarded.total()
    events = {
        "the audit failed": failed,
        f"{counted(bad, 'step')} without an update": bad,
        counted(quarantined, "quarantined sample"): quarantined,
        counted(counts["checkpoint failed"], "failed checkpoint"): counts["checkpoint failed"],
        counted(counts["resume"], "resume"): counts["resume"],
        f"{counted(repeated, 'step')} repeated": repeated,
    }
    happened = [event for event, count in events.items() if count]
    if not happened and not run.problems:
        return Finding("nothing recorded", "No bad step, no quarantined sample, no resume.", "good")
    texts = []
    if run.reasons:
        reasons = listed(f"{count:,} {reason}" for reason, count in run.reasons.most_common(SHOWN))
        texts.append(f"Quarantined because of: {reasons}.")
    if run.problems:
        texts.append(f"Unreadable records: {'; '.join(run.problems)}.")
    texts.append("See “Faults and resumes”.")
    answer = listed(happened or ["unreadable records"])
    return Finding(answer, " ".join(texts), "bad" if failed else "mixed")
