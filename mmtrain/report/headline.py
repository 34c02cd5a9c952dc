"""What a stranger must know of a run within a minute: what was trained, on what, whether it worked, what went wrong."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from mmtrain.base.printing import bytes_text, first_few
from mmtrain.report.elements import Finding, Tone, counted, duration, listed, number, percent
from mmtrain.report.lines import Evaluation
from mmtrain.report.records import RunRecord

SHOWN = 4  # names in a sentence
SIGNIFICANT = 2  # standard errors
LEAST_LOSS = 0.02  # by which share the control's loss must be higher to count, where no answer is exact
FEW_EXACT = 0.05  # below it exact matches say nothing: answers are long


def headline(run: RunRecord) -> tuple[Finding, ...]:
    """Six questions and what the records answer."""
    return _trained(run), _data(run), _took(run), _worked(run), _looked(run), _wrong(run)


def status(run: RunRecord) -> str:
    """How far it came, in a sentence."""
    of_all = "" if run.max_steps is None else f" of {run.max_steps:,}"
    if run.end is not None:
        return f"Finished: all {counted(run.end.step, 'step')} are made."
    if not run.steps:
        return "No step is recorded yet."
    last = run.last_step.time if run.last_step else None
    at = "" if last is None else f", at {moment(last)}"
    return f"No end is recorded: the last step is {run.steps_done:,}{of_all}{at}. It goes on, was stopped or failed."


def moment(seconds: float) -> str:
    """A time of day, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def models(run: RunRecord) -> str:
    """`encoder -> projector -> LLM`, of which some train."""
    if run.plan is None:
        return run.config.get("model.llm.path", "")
    begins = "text" if run.plan.vision is None else f"{run.plan.vision} → projector"
    return f"{begins} → {run.plan.llm}"


def data_source(run: RunRecord) -> str:
    """What was trained on, as the configuration names it."""
    shards, sets = run.config.get("data.shards", "null"), run.config.get("data.sets", "null")
    return shards if shards != "null" else sets if sets != "null" else "data that config.yaml does not name"


def audit_sentence(run: RunRecord) -> str:
    """The verdict of the audit."""
    audit = run.audit
    if audit is None:
        return "No audit: a run proves at its end that frozen weights are unchanged and that what trains has moved."
    tensors = [tensor for rank in audit.ranks if rank.data == 0 for tensor in rank.trainable]
    moved = sum(tensor.moved for tensor in tensors)
    if not audit.passed:
        return f"The audit failed: {first_few(audit.failures, SHOWN) or 'audit.json does not say why'}."
    frozen = sum(rank.frozen.bytes for rank in audit.ranks if rank.data == 0)
    return (
        f"The audit passed: {moved:,} of {len(tensors):,} trainable tensors moved, and all frozen weights "
        f"({bytes_text(frozen)}) are unchanged on {counted(len(audit.ranks), 'rank')}."
    )


def _trained(run: RunRecord) -> Finding:
    question = "What was trained?"
    if run.plan is None:
        return Finding(question, run.config.get("model.trainable", "unknown"), "There is no plan.json that says more.")
    parameters = sum(rank.trainable for rank in run.plan.ranks if rank.data == 0)
    names = first_few(run.plan.trainable, SHOWN)
    answer = f"{names}: {counted(parameters, 'parameter')}"
    return Finding(question, answer, f"{models(run)}; all else is frozen. {audit_sentence(run)}")


def _data(run: RunRecord) -> Finding:
    totals, question = run.totals, "On which data?"
    if not run.steps:
        return Finding(question, data_source(run), "No step is recorded yet.")
    tiles = "" if totals["tiles"] == totals["images"] else f" in {counted(totals['tiles'], 'tile')}"
    return Finding(
        question,
        counted(totals["samples"], "sample"),
        f"of {data_source(run)}: {counted(totals['images'], 'image')}{tiles}, {counted(totals['tokens'], 'token')}, "
        f"of which {totals['supervised_tokens']:,} are supervised, in {counted(run.steps, 'step')}.",
    )


def _took(run: RunRecord) -> Finding:
    question, speed = "How long did it take?", run.curve("tokens_per_second").means(1)
    if not speed:
        return Finding(question, "not known", "No step is recorded yet.")
    busy = "" if run.begun is None else f"{duration(run.seconds)} of it are steps and evaluations. "
    began = "" if run.begun is None else f" Begun {moment(run.begun)}."
    device = f" on {run.begins[-1].device}" if run.begins and run.begins[-1].device else ""
    ranks = f"{counted(len(run.ranks), 'rank')}{device}"
    text = f"{busy}{ranks}; {number(speed[0].y)} tokens a second while it trains.{began}"
    if run.begun is None:
        return Finding(question, f"{duration(run.seconds)} of steps and evaluations", text)
    return Finding(question, f"{duration(run.lasted)} from begin to end", text)


def _worked(run: RunRecord) -> Finding:
    first, last, question = run.first_evaluation, run.last_evaluation, "Did it work?"
    if first is None or last is None:
        return _worked_in_training(run)
    if first is last:
        return Finding(question, "one evaluation so far", f"After step {last.step:,}: {_scores(last)}.", "plain")
    better, by_loss = _compare(last, first)
    changes = []
    for name, what in (("exact_match", "exact answers"), ("token_accuracy", "right tokens")):
        before, after = getattr(first, name), getattr(last, name)
        if before is not None and after is not None:
            changes.append(f"{what} {percent(before)} → {percent(after)}")
    if first.loss is not None and last.loss is not None:
        changes.append(f"loss {number(first.loss)} → {number(last.loss)}")
    verdicts: dict[int, tuple[str, Tone]] = {
        1: ("lower loss" if by_loss else "better", "mixed" if _few(first, last) else "good"),
        0: ("no clear change", "mixed"),
        -1: ("higher loss" if by_loss else "worse", "bad"),
    }
    answer, tone = verdicts[better]
    span = f"On {counted(last.samples, 'held-out sample')}, from step {first.step:,} to step {last.step:,}"
    return Finding(question, f"{answer} on held-out samples", f"{span}: {', '.join(changes)}.", tone)


def _worked_in_training(run: RunRecord) -> Finding:
    question = "Did it work?"
    ends = run.curve("loss").means(10)
    why = "Nothing was held out to tell: set eval.shards or eval.fraction."
    if run.is_evaluated:
        why = "No evaluation is recorded yet."
    if len(ends) < 2:
        return Finding(question, "not known", why)
    fell = "fell" if ends[-1].y < ends[0].y else "rose"
    return Finding(
        question, f"training loss {fell}", f"From {number(ends[0].y)} to {number(ends[-1].y)}, in means. {why}", "mixed"
    )


def _looked(run: RunRecord) -> Finding:
    question, control, last = "Did it look at the images?", run.control, run.last_evaluation
    if run.plan is not None and run.plan.vision is None:
        return Finding(question, "there are none", "The run is on text alone.")
    if control is None or last is None:
        why = "eval.permuted_control=true, with eval.shards or eval.fraction, evaluates once more at a run's end, with "
        return Finding(question, "not known", f"{why}images permuted among the questions.")
    kept = max(0, control.samples - control.permuted_samples)
    text = f"With other samples' images: {_scores(control)}; with their own: {_scores(last)}."
    text += f" {counted(kept, 'sample')} kept {'its' if kept == 1 else 'their'} own images." if kept else ""
    better, by_loss = _compare(last, control)
    if better > 0:
        said = "yes, by the loss: with wrong images it is higher" if by_loss else "yes: with wrong images it does worse"
        return Finding(question, said, text, "good")
    if _few(last, control):
        return Finding(question, "it answers too little to tell", text, "mixed")
    return Finding(question, "no sign of it", f"{text} The questions can be answered as well without looking.", "bad")


def _scores(scores: Evaluation) -> str:
    exact = "" if scores.exact_match is None else f"{percent(scores.exact_match)} exact answers, "
    return f"{exact}loss {number(scores.loss)}"


def _few(*scores: Evaluation) -> bool:
    """Whether too few answers are exact to say anything."""
    return max(one.exact_match or 0.0 for one in scores) < FEW_EXACT


def _compare(one: Evaluation, other: Evaluation) -> tuple[int, bool]:
    """1: `one` is better, -1: worse, 0: not clearly either; by exact answers, or (True) by loss."""
    shares = [scores.exact_match or 0.0 for scores in (one, other)]
    if not _few(one, other):
        variances = (p * (1 - p) / max(1, s.answers) for p, s in zip(shares, (one, other), strict=True))
        if abs(shares[0] - shares[1]) > SIGNIFICANT * math.sqrt(sum(variances)):
            return (1 if shares[0] > shares[1] else -1), False
    if one.loss is None or other.loss is None or not math.isfinite(one.loss - other.loss):
        return 0, True
    if abs(one.loss - other.loss) <= LEAST_LOSS * max(abs(one.loss), abs(other.loss)):
        return 0, True
    return (1 if one.loss < other.loss else -1), True


def _wrong(run: RunRecord) -> Finding:
    question, found, grave = "What went wrong?", [], False
    if run.audit is not None and not run.audit.passed:
        found, grave = ["the audit failed"], True
    counts = {
        "step without an update": run.counts["no update"] + run.counts["bad step"],
        "quarantined sample": run.counts["quarantined"],
        "checkpoint not saved": run.counts["checkpoint not saved"],
        "resume": run.counts["resume"],
    }
    plurals = {"step without an update": "steps without an update", "checkpoint not saved": "checkpoints not saved"}
    found += [counted(count, what, plurals.get(what, "")) for what, count in counts.items() if count]
    if lost := sum(run.discarded.values()):
        found.append(f"{counted(lost, 'step')} made twice")
    texts = []
    if run.reasons:
        reasons = listed(f"{count:,} {reason}" for reason, count in run.reasons.most_common(SHOWN))
        texts.append(f"Reasons of quarantine: {reasons}.")
    if run.problems:
        texts.append(f"Of the records themselves: {'; '.join(run.problems)}.")
    if not found and not run.problems:
        return Finding(question, "nothing on record", "No bad step, no quarantined sample, no resume.", "good")
    texts.append("See “Faults and resumes”.")
    return Finding(
        question, listed(found) if found else "records not read", " ".join(texts), "bad" if grave else "mixed"
    )
