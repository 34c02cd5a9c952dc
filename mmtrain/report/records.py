"""What a run's folder says of it, as one plain value. Its files may be a stranger's.

metrics.jsonl, quarantine.jsonl, bad_steps.jsonl, discarded.jsonl, answers.jsonl --a line at a time--> lines.py
config.yaml, plan.json, audit.json ------------------------------------------------> RunRecord

Memory does not grow with the run: curves keep extremes, lists their first entries and how many there were.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless
from mmtrain.base.small_files import MAX_JSON_BYTES, open_file, read_limited
from mmtrain.checkpoint.run_folder import ANSWERS, AUDIT, BAD_STEPS, CONFIG, DISCARDED, METRICS, PLAN, QUARANTINE
from mmtrain.config.disclosed import disclosed
from mmtrain.config.strict_yaml import read_yaml
from mmtrain.report.curves import MOST_POINTS, Curve
from mmtrain.report.lines import (
    Answer,
    Audit,
    BadStep,
    Begin,
    Checkpoint,
    CheckpointFailed,
    Discarded,
    End,
    Epoch,
    Evaluation,
    Line,
    Lost,
    Plan,
    Quarantined,
    Resume,
    Train,
    shown,
)
from mmtrain.report.parts import Event, Question, RankTime

LISTED = 50  # of each kind of what can be many
MOST_KEYS = 1000  # of a configuration
MOST_QUESTIONS = 100
LONGEST_LINE = MAX_JSON_BYTES
T = TypeVar("T")


@dataclass
class RunRecord:
    """What is known of a run; what its folder does not say is None or empty."""

    name: str
    folder: Path
    most_points: int = MOST_POINTS
    config: dict[str, str] = field(default_factory=dict)  # key -> value, on one line
    plan: Plan | None = None
    audit: Audit | None = None
    begins: list[Begin] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    end: End | None = None
    last_step: Train | None = None
    steps: int = 0  # recorded
    curves: dict[str, Curve] = field(default_factory=dict)  # of steps, by name
    rates: dict[str, Curve] = field(default_factory=dict)  # of groups, by their patterns
    first_evaluation: Evaluation | None = None
    last_evaluation: Evaluation | None = None
    control: Evaluation | None = None
    ranks: list[RankTime] = field(default_factory=list)
    timed_steps: int = 0
    seconds: float = 0.0  # that steps and evaluations took
    totals: Counter[str] = field(default_factory=Counter)  # samples, images, tiles, tokens, quarantined, ...
    epochs: list[Epoch] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)  # the first
    reasons: Counter[str] = field(default_factory=Counter)  # of quarantine
    bad_steps: list[BadStep] = field(default_factory=list)  # the first
    discarded: Counter[int] = field(default_factory=Counter)  # steps made twice, by the step gone back to
    lost_work: Curve = field(default_factory=Curve)  # (seconds from the begin, step) of those
    progress: Curve = field(default_factory=Curve)  # (seconds from the begin, steps done)
    lasted: float = 0.0  # seconds from the begin to the last record
    starts: list[float] = field(default_factory=list)  # of processes after the first, in seconds from the begin
    begun: float | None = None  # Unix seconds; None: the records have no times, and `progress` adds up seconds
    events: list[Event] = field(default_factory=list)  # the first of each kind
    counts: Counter[str] = field(default_factory=Counter)  # of what is listed in part
    questions: list[Question] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # with the files themselves

    @property
    def max_steps(self) -> int | None:
        """Steps that it is to make, if the folder says so."""
        configured = self.config.get("train.max_steps", "")
        return int(configured) if configured.isdecimal() else None if self.end is None else self.end.step

    @property
    def is_evaluated(self) -> bool:
        """Whether its configuration holds samples out."""
        return any(self.config.get(key, "null") != "null" for key in ("eval.shards", "eval.fraction"))

    @property
    def steps_done(self) -> int:
        """Updates after which the records end."""
        return 0 if self.last_step is None else self.last_step.step + 1

    def curve(self, name: str) -> Curve:
        """The curve of this name, empty where nothing was recorded."""
        return self.curves.get(name, Curve())


def read_run(folder: Path, most_points: int = MOST_POINTS) -> RunRecord:
    """Read the records of a run, which may be under way; raises UserError where there is none."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no run, which has a {CONFIG}; needed is run.dir/run.name of one")
    run = RunRecord(harmless(folder.resolve().name), folder, most_points)
    _read_config(run)
    run.plan = _read_whole(run, PLAN, Plan)
    run.audit = _read_whole(run, AUDIT, Audit)
    _read_metrics(run)
    _read_faults(run)
    _read_answers(run)
    run.events.sort(key=lambda event: (event.step, event.at or 0))
    return run


# ---- files


def inside(folder: Path, name: str) -> Path:
    """A file of a run's folder; raises UserError for a link out of it, whose content is nobody's to show."""
    folder = folder.resolve()
    try:
        file = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: cannot be read ({error})") from error
    if not file.is_relative_to(folder):
        raise UserError(f"{name}: a link out of the run's folder, which is not followed; put the file itself there")
    return file


def _read_config(run: RunRecord) -> None:
    try:
        content = read_yaml(inside(run.folder, CONFIG))
    except UserError as error:
        run.problems.append(shown(str(error)))
        return
    run.config = dict(itertools.islice(_flat("", disclosed(content)), MOST_KEYS))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, value as text) of nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    elif prefix:
        yield harmless(prefix), harmless(value if isinstance(value, str) else json.dumps(value, default=str))


def _read_whole(run: RunRecord, name: str, kind: type[T]) -> T | None:
    try:
        file = inside(run.folder, name)
        return TypeAdapter(kind).validate_json(read_limited(file, MAX_JSON_BYTES, f"the {name} of a run"))
    except FileNotFoundError:
        return None
    except UserError as error:
        run.problems.append(shown(str(error)))
    except ValidationError as error:
        run.problems.append(f"{name} is not understood: {_first_problem(error)}")
    return None


def _read_lines(run: RunRecord, name: str, kind: Any) -> Iterator[Any]:
    """Valid lines of a file, if there is one; how many others there are goes into `problems`."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    wrong, first = 0, ""
    try:
        with open_file(inside(run.folder, name)) as stream:
            while line := stream.readline(LONGEST_LINE):
                try:
                    yield adapter.validate_json(line)
                except ValidationError as error:
                    if line.endswith(b"\n"):  # else it is being written
                        wrong += 1
                        first = first or _first_problem(error)
    except FileNotFoundError:
        return
    except (OSError, UserError) as error:
        run.problems.append(shown(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"))
    if wrong:
        run.problems.append(f"{name}: {wrong:,} {'lines are' if wrong > 1 else 'line is'} not understood ({first})")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return shown(f"{where}: {problem['msg']}" if where else problem["msg"])


# ---- metrics


def _read_metrics(run: RunRecord) -> None:
    clock = _Clock(run)
    warm_up = True  # the first step of a process pays for it
    for line in _read_lines(run, METRICS, Line):
        clock.see(line)
        match line:
            case Train():
                _add_step(run, line, clock, counts=not warm_up)
                warm_up = False
            case Evaluation(kind="eval"):
                _add_evaluation(run, line)
            case Evaluation():
                run.control = line
            case Epoch():
                _list(run, run.epochs, line, "epochs")
            case Begin() | Resume():
                warm_up = True
                if clock.now is not None and run.steps and len(run.starts) < LISTED:
                    run.starts.append(clock.now)
                if isinstance(line, Begin):
                    _list(run, run.begins, line, "begins")
                else:
                    _list(run, run.resumes, line, "resumes")
                if line.kind == "resume" or not line.step:
                    _add_event(run, Event(line.kind, line.step, clock.now))
            case CheckpointFailed():
                _add_event(run, Event("checkpoint not saved", line.step, clock.now, line.error))
            case Checkpoint():
                run.counts["checkpoints"] += 1
            case End():
                run.end = line
                _add_event(run, Event("end", line.step, clock.now))


class _Clock:
    """Seconds from a run's begin: by the lines' times or, where the first ones have none, by what steps took."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._is_first = True
        self.now: float | None = 0.0

    def see(self, line: Line) -> None:
        run, took = self._run, 0.0
        if isinstance(line, Train | Evaluation):
            took = line.seconds or 0.0
            run.seconds += took
        if self._is_first and line.time is not None:
            run.begun = max(0.0, line.time - took)
        self._is_first = False
        if run.begun is None:
            self.now = run.seconds
        else:
            self.now = None if line.time is None else max(0.0, line.time - run.begun)
        run.lasted = max(run.lasted, self.now or 0.0)


def _add_step(run: RunRecord, line: Train, clock: _Clock, *, counts: bool) -> None:
    run.steps += 1
    run.last_step = line
    done = line.step + 1
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "pack_fill", "model_flops_utilization"):
        _curve(run, run.curves, name).add(done, getattr(line, name))
    for patterns, rate in line.lr_groups.items():
        if patterns in run.rates or len(run.rates) < LISTED:
            _curve(run, run.rates, patterns).add(done, rate)
    if clock.now is not None:
        run.progress.add(clock.now, done)
    run.totals.update({name: getattr(line, name) for name in ("samples", "images", "tokens", "supervised_tokens")})
    run.totals["tiles"] += line.images if line.tiles is None else line.tiles
    run.totals["quarantined"] += line.quarantined
    if line.no_update is not None:
        _add_event(run, Event("no update", done, clock.now, line.no_update))
    if line.quarantined:
        _add_quarantine(run, done, clock.now, line.quarantined)
    _add_times(run, line, counts=counts)


def _add_times(run: RunRecord, line: Train, *, counts: bool) -> None:
    """What each rank did; the first step of a process, which pays for warm-up, counts only if it is the only one."""
    size = len(line.peak_memory_bytes)
    run.ranks += [RankTime() for _ in range(len(run.ranks), size)]
    for rank, peak in zip(run.ranks, line.peak_memory_bytes, strict=False):
        rank.peak_bytes = max(rank.peak_bytes, peak if math.isfinite(peak) else 0.0)
    if not counts and run.steps > 1:
        return
    if run.timed_steps == 1 and run.steps == 2:  # the first, which is not the only one
        run.ranks = [RankTime(peak_bytes=rank.peak_bytes) for rank in run.ranks]
        run.timed_steps = 0
    run.timed_steps += 1
    fetching_seconds = line.fetching_seconds or [0.0] * len(line.compute_seconds)
    busy_with = (line.compute_seconds, line.communication_seconds, line.data_seconds, fetching_seconds)
    measured = zip(*busy_with, line.idle_fraction, strict=False)
    for rank, (compute, communication, data, fetching, idle) in zip(run.ranks, measured, strict=False):
        busy = compute + communication + data + fetching
        if math.isfinite(busy) and 0 <= idle < 1:
            rank.compute += compute
            rank.communication += communication
            rank.data += data
            rank.fetching += fetching
            rank.idle += busy * idle / (1 - idle)


def _add_evaluation(run: RunRecord, line: Evaluation) -> None:
    run.first_evaluation = run.first_evaluation or line
    run.last_evaluation = line
    for name in ("loss", "exact_match", "token_accuracy"):
        _curve(run, run.curves, f"eval_{name}").add(line.step, getattr(line, name))


# ---- other records


def _read_faults(run: RunRecord) -> None:
    for fault in _read_lines(run, QUARANTINE, Quarantined):
        _list(run, run.quarantined, fault, "quarantined")
        if fault.reason in run.reasons or len(run.reasons) < LISTED:
            run.reasons[fault.reason] += 1
    for bad in _read_lines(run, BAD_STEPS, BadStep):
        _list(run, run.bad_steps, bad, "bad_steps")
        if not any(event.kind == "no update" and event.step == bad.step + 1 for event in run.events):
            _add_event(run, Event("bad step", bad.step + 1, None, "the run ended with it"))
    for lost in _read_lines(run, DISCARDED, Discarded):
        record = lost.record
        if lost.file != METRICS or not isinstance(record, Lost) or record.kind != "train":
            continue
        if lost.back_to_step in run.discarded or len(run.discarded) < LISTED:
            run.discarded[lost.back_to_step] += 1
        if record.time is not None and run.begun is not None:
            run.lost_work.add(record.time - run.begun, record.step + 1)


def _read_answers(run: RunRecord) -> None:
    by_question: dict[tuple[str, str], tuple[Answer, Answer]] = {}
    for answer in _read_lines(run, ANSWERS, Answer):
        question = answer.key, answer.question
        if question in by_question or len(by_question) < MOST_QUESTIONS:
            first, _ = by_question.setdefault(question, (answer, answer))
            by_question[question] = first, answer
    for first, last in by_question.values():
        run.questions.append(Question(None if first.step else first, last if last.step else None))


def _add_event(run: RunRecord, event: Event) -> None:
    run.counts[event.kind] += 1
    if run.counts[event.kind] <= LISTED:
        run.events.append(event)


def _add_quarantine(run: RunRecord, step: int, at: float | None, samples: int) -> None:
    """One event for a stretch of consecutive steps."""
    for place in reversed(range(len(run.events))):
        event = run.events[place]
        if event.kind == "quarantine":
            if event.last == step - 1:
                run.events[place] = replace(event, last=step, samples=event.samples + samples)
                return
            break
    _add_event(run, Event("quarantine", step, at, last=step, samples=samples))


def _curve(run: RunRecord, curves: dict[str, Curve], name: str) -> Curve:
    if name not in curves:
        curves[name] = Curve(run.most_points)
    return curves[name]


def _list(run: RunRecord, known: list[T], new: T, name: str) -> None:
    run.counts[name] += 1
    if len(known) < LISTED:
        known.append(new)
