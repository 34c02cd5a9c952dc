"""A run's folder read into one plain value, for its page. Its files may be a stranger's.

metrics.jsonl, quarantine.jsonl, bad_steps.jsonl, discarded.jsonl, answers.jsonl --line by line-->
config.yaml, plan.json, audit.json -------------------------------------------------> RunRecord

A line without the fields below is left out and counted. All text passes `shown`, which makes it
safe to show. Memory grows by 16 bytes a value of a curve; lists keep their first entries and the
number of all.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import whole_lines
from mmtrain.base.printing import disclosed, escape, first_few
from mmtrain.base.small_files import MAX_JSON_BYTES, open_file, read_limited
from mmtrain.checkpoint import run_folder as files
from mmtrain.config.strict_yaml import read_yaml

LISTED = 50  # entries kept of each list
MAX_QUESTIONS = 100
MAX_CHARACTERS = 2000
MAX_RANKS = 4096
MAX_POINTS = 2000  # of a curve in a chart
LARGEST = 1e30  # a larger number comes from a damaged record, and would make sums infinite
T = TypeVar("T")
Times = defaultdict[str, defaultdict[int, float]]  # kind of time -> rank -> seconds


def shown(text: str) -> str:
    """Return text without terminal escapes, logins or arguments of programs, at most MAX_CHARACTERS
    long.
    """
    return escape(disclosed(text), MAX_CHARACTERS)


Text = Annotated[str, AfterValidator(shown)]
Number = float  # "nan" and "inf" in the file are numbers, too: a bad step has them
Count = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]
Measure = Annotated[float, Field(ge=0, le=1e30)]  # seconds, bytes
PerRank = Annotated[list[Measure], Field(max_length=MAX_RANKS)]


class _Metric(BaseModel):
    step: Count
    time: Annotated[float, Field(ge=0, le=1e11)]  # Unix seconds


class Train(_Metric):
    """One step, counted from 0."""

    kind: Literal["train"]
    loss: Number | None
    grad_norm: Number
    lr: Number
    lr_groups: dict[Text, Number] = {}  # only with optimizer.groups
    samples: Count
    images: Count
    tiles: Count
    tokens: Count
    supervised_tokens: Count
    quarantined: Count
    no_update: Text | None
    seconds: Measure
    tokens_per_second: Number
    idle_fraction: PerRank
    compute_seconds: PerRank
    communication_seconds: PerRank
    data_seconds: PerRank
    fetching_seconds: PerRank
    peak_memory_bytes: PerRank
    model_flops_utilization: Number | None


class Evaluation(_Metric):
    """Scores on held-out samples after `step` updates; `eval_permuted` is the control."""

    kind: Literal["eval", "eval_permuted"]
    loss: Number | None
    token_accuracy: Share | None
    exact_match: Share | None
    answers: Count
    samples: Count
    seconds: Measure
    permuted_samples: Count = 0  # only of the control


class Begin(_Metric):
    kind: Literal["begin"]
    device: Text
    versions: dict[Text, Text]


class Epoch(_Metric):
    kind: Literal["epoch"]
    step: Count = 0  # is not recorded
    epoch: Count
    complete: bool
    packs: Count
    read: Count
    trained: Count
    quarantined: Count
    overlong: Count


class Other(_Metric):
    """A record that is an event, or is not shown."""

    kind: Literal["resume", "end", "checkpoint_failed", "attention", "checkpoint"]
    error: Text = ""  # only of a failed checkpoint


Metric = Annotated[Train | Evaluation | Begin | Epoch | Other, Field(discriminator="kind")]


class Quarantined(BaseModel):
    """A sample that could not be used; without a step it was left out from the start."""

    step: Count | None
    key: Text
    shard: Text
    reason: Text
    detail: Text


class BadStep(BaseModel):
    """A step without an update, because of NaN or infinity."""

    step: Count
    ranks: list[Count]
    parameters: list[Text]


class Discarded(BaseModel):
    """A record behind the checkpoint that the run went back to."""

    back_to_step: Count
    record: Annotated[Train | Any, Field(union_mode="left_to_right")]


class Answer(BaseModel):
    """A held-out question that the model answered after `step` updates; `pictures` are checked when
    they are read.
    """

    step: Count
    key: Text
    question: Text
    given: Text
    truth: Text
    right: bool
    pictures: Annotated[list[str], Field(max_length=64)]


class Benchmark(BaseModel):
    """What `mmtrain benchmark` measured of the model after `step` updates: (value, standard error)
    of each metric.
    """

    step: Count
    task: Text
    limit: Count | None
    answers: Count | None
    scores: Annotated[dict[Text, tuple[Number, Number | None]], Field(max_length=1000)]
    versions: dict[Text, Text]


class Stage(BaseModel):
    encoder: tuple[Count, Count] | None
    layers: list[Text]


class RankPlan(BaseModel):
    """A process, as planned; bytes are those of its fullest moment."""

    rank: Count
    data: Count
    stages: list[Stage]
    trainable: Count
    optimizer: Text
    reason: Text
    weight_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count
    workspace_bytes: Count
    total_bytes: Count
    idle_share: Share


class Plan(BaseModel):
    """plan.json: who holds, trains and runs what."""

    llm: Text
    vision: Text | None
    trainable: list[Text]
    pipeline: Count
    data: Count
    microbatches_per_step: Count
    packs_per_microbatch: Count
    pack_length: Count
    memory_limit_bytes: Count | None
    step_seconds: Measure | None
    idle_share: Share
    ranks: Annotated[list[RankPlan], Field(min_length=1, max_length=MAX_RANKS)]


class Audit(BaseModel):
    """audit.json: the proof that what should train did, and nothing else."""

    passed: bool
    failures: list[Text]
    # runs of older versions do not say what moved
    result: Text = "frozen weights unchanged on all ranks"
    ranks: list[Any]


class Point(NamedTuple):
    x: float
    y: float


class Curve:
    """Points in the order of their x, 16 bytes each; a chart gets the extremes of each stretch."""

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._x)

    def add(self, x: float, y: float | None) -> None:
        """Add a point, unless y is None, NaN or absurdly large."""
        if y is not None and abs(y) <= LARGEST and abs(x) <= LARGEST:
            self._x.append(x)
            self._y.append(y)

    def points(self, limit: int = MAX_POINTS) -> list[Point]:
        """Return all points or, beyond the limit, the lowest and the highest of each of limit / 2
        stretches.
        """
        if len(self) <= limit:
            return list(map(Point, self._x, self._y))
        points = []
        for stretch in self._stretches(limit // 2):
            places = {min(stretch, key=self._y.__getitem__), max(stretch, key=self._y.__getitem__)}
            points += [Point(self._x[place], self._y[place]) for place in sorted(places)]
        return points

    def means(self, count: int) -> list[Point]:
        """Return the mean of each of `count` stretches, at its middle; fewer where there are fewer
        points.
        """
        return [
            Point(
                *(
                    sum(axis[stretch.start : stretch.stop]) / len(stretch)
                    for axis in (self._x, self._y)
                )
            )
            for stretch in self._stretches(count)
        ]

    def _stretches(self, count: int) -> Iterator[range]:
        """Split the places of all points into `count` ranges of nearly equal length, none of them
        empty.
        """
        size = max(1, math.ceil(len(self) / count))
        return (range(first, min(first + size, len(self))) for first in range(0, len(self), size))


@dataclass
class Event:
    """Something that happened after `step` updates; `at` is in seconds from the run's begin, None:
    not recorded.
    """

    kind: str  # begin, resume, checkpoint failed, bad step, no update, quarantine, end
    step: int
    at: float | None
    text: str = ""


@dataclass
class RunRecord:
    """What a run's folder records; what it lacks is None or empty."""

    name: str
    folder: Path
    config: dict[str, str] = field(default_factory=dict)  # dotted key -> value as text
    plan: Plan | None = None
    audit: Audit | None = None
    begin: Begin | None = None  # of the latest process
    final_step: int | None = None
    steps: int = 0  # recorded
    steps_done: int = 0  # updates after which the records end
    # over steps
    curves: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    # of optimizer.groups
    rates: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    evaluations: list[Evaluation] = field(default_factory=list)
    control: Evaluation | None = None
    times: Times = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    timed_steps: int = 0  # all but the first of each process, which pays for warm-up
    peaks: dict[int, float] = field(default_factory=dict)  # bytes of memory, by rank
    seconds: float = 0.0  # of steps and evaluations
    # samples, images, tiles, tokens, quarantined, ...
    totals: Counter[str] = field(default_factory=Counter)
    epochs: list[Epoch] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)  # the first ones
    reasons: Counter[str] = field(default_factory=Counter)  # of quarantine
    # steps made twice, by the step gone back to
    discarded: Counter[int] = field(default_factory=Counter)
    begun: float | None = None  # Unix seconds of the first record
    elapsed: float = 0.0  # seconds from the begin to the last record
    events: list[Event] = field(default_factory=list)  # the first ones of each kind
    counts: Counter[str] = field(default_factory=Counter)  # of all events, by kind
    # any, before, after
    questions: list[tuple[Answer, Answer | None, Answer | None]] = field(default_factory=list)
    # the last ones of each task, step and limit
    benchmarks: list[Benchmark] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # with the files


def read_run(folder: Path) -> RunRecord:
    """Read the records of a run, which may be under way; raises UserError for a folder that is
    none.
    """
    if not (folder / files.CONFIG).is_file():
        raise UserError(
            f"{folder} has no {files.CONFIG}, so it is not a run. "
            "Give the folder run.dir/run.name of a run."
        )
    run = RunRecord(escape(folder.resolve().name), folder)
    try:
        run.config = dict(_flat("", disclosed(read_yaml(inside(folder, files.CONFIG)))))
    except UserError as error:
        run.problems.append(shown(str(error)))
    run.plan = _read_json(run, files.PLAN, Plan)
    run.audit = _read_json(run, files.AUDIT, Audit)
    _read_metrics(run)
    _read_faults(run)
    _read_answers(run)
    scored = {
        (record.task, record.step, record.limit): record
        for record in _read_lines(run, files.BENCHMARKS, Benchmark)
    }
    run.benchmarks = list(scored.values())
    run.events.sort(key=lambda event: (event.step, event.at or 0))
    return run


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of a run's folder; raises UserError for a link to somewhere
    else.
    """
    folder = folder.resolve()
    try:
        file = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} cannot be read: {error}") from error
    if not file.is_relative_to(folder):
        raise UserError(
            f"{name} is a link out of the run's folder and is not followed. "
            "Put the file itself there"
        )
    return file


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted key, value as text) of nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    elif prefix:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield escape(prefix), escape(text, MAX_CHARACTERS)


def _read_json(run: RunRecord, name: str, kind: type[T]) -> T | None:
    try:
        file = inside(run.folder, name)
        return TypeAdapter(kind).validate_json(
            read_limited(file, MAX_JSON_BYTES, f"the {name} of a run")
        )
    except FileNotFoundError:
        return None
    except UserError as error:
        run.problems.append(shown(str(error)))
    except ValidationError as error:
        run.problems.append(f"{name} has wrong content: {_first_problem(error)}")
    return None


def _read_lines(run: RunRecord, name: str, kind: Any) -> Iterator[Any]:
    """Yield the valid records of a file, if there is one; `problems` says how many others are left
    out.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    left_out, first = 0, ""
    try:
        with open_file(inside(run.folder, name)) as stream:
            for line in whole_lines(stream):
                try:
                    yield adapter.validate_json(line)
                except ValidationError as error:
                    left_out += 1
                    first = first or _first_problem(error)
    except FileNotFoundError:
        return
    except (OSError, UserError) as error:
        run.problems.append(
            shown(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
        )
    if left_out:
        run.problems.append(
            f"{name}: {left_out:,} line(s) left out, since they are not valid records ({first})"
        )


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return shown(f"{where}: {problem['msg']}" if where else problem["msg"])


def _read_metrics(run: RunRecord) -> None:
    is_first_step = True
    for record in _read_lines(run, files.METRICS, Metric):
        if run.begun is None:
            run.begun = record.time
        now = max(0.0, record.time - run.begun)
        run.elapsed = max(run.elapsed, now)
        match record:
            case Train():
                _add_step(run, record, now)
                if not is_first_step:
                    _add_times(run, record)
                is_first_step = False
            case Evaluation():
                _add_evaluation(run, record)
            case Epoch():
                run.epochs.append(record)
            case Begin():
                is_first_step, run.begin = True, record
                if not record.step:
                    _add_event(run, Event("begin", 0, now))
            case Other(kind="resume" | "end" | "checkpoint_failed"):
                _add_event(
                    run, Event(record.kind.replace("_", " "), record.step, now, record.error)
                )
                run.final_step = record.step if record.kind == "end" else run.final_step


def _add_step(run: RunRecord, record: Train, now: float) -> None:
    run.steps += 1
    run.steps_done = done = record.step + 1
    run.seconds += record.seconds
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "model_flops_utilization"):
        run.curves[name].add(done, getattr(record, name))
    for pattern, rate in record.lr_groups.items():
        run.rates[pattern].add(done, rate)
    for name in ("samples", "images", "tiles", "tokens", "supervised_tokens", "quarantined"):
        run.totals[name] += getattr(record, name)
    if record.no_update is not None:
        _add_event(run, Event("no update", done, now, record.no_update))
    if record.quarantined:
        _add_event(run, Event("quarantine", done, now, f"samples: {record.quarantined:,}"))
    for rank, peak in enumerate(record.peak_memory_bytes):
        run.peaks[rank] = max(peak, run.peaks.get(rank, 0.0))


def _add_times(run: RunRecord, record: Train) -> None:
    run.timed_steps += 1
    seconds = {"compute": record.compute_seconds, "communication": record.communication_seconds}
    seconds |= {"data": record.data_seconds, "fetching": record.fetching_seconds}
    for rank, (idle, *busy) in enumerate(
        zip(record.idle_fraction, *seconds.values(), strict=False)
    ):
        for kind, spent in zip(seconds, busy, strict=True):
            run.times[kind][rank] += spent
        run.times["idle"][rank] += sum(busy) * idle / (1 - idle) if idle < 1 else 0.0


def _add_evaluation(run: RunRecord, record: Evaluation) -> None:
    run.seconds += record.seconds
    if record.kind == "eval_permuted":
        run.control = record
        return
    run.evaluations.append(record)
    for name in ("loss", "exact_match", "token_accuracy"):
        run.curves[f"eval_{name}"].add(record.step, getattr(record, name))


def _read_faults(run: RunRecord) -> None:
    for sample in _read_lines(run, files.QUARANTINE, Quarantined):
        if len(run.quarantined) < LISTED:
            run.quarantined.append(sample)
        run.reasons[sample.reason] += 1
    not_updated = {event.step: event for event in run.events if event.kind == "no update"}
    for bad in _read_lines(run, files.BAD_STEPS, BadStep):
        where = (
            f"rank {first_few(list(map(str, bad.ranks)), 4)}, "
            f"{first_few(bad.parameters, 3) or 'no gradient'}"
        )
        text = f"NaN or infinity on {where}; {files.BAD_STEPS} lists its samples"
        if bad.step + 1 in not_updated:
            not_updated[bad.step + 1].text = text
        elif bad.step >= run.steps_done:
            _add_event(run, Event("bad step", bad.step + 1, None, f"this ended the run: {text}"))
    for lost in _read_lines(run, files.DISCARDED, Discarded):
        if isinstance(lost.record, Train):
            run.discarded[lost.back_to_step] += 1


def _read_answers(run: RunRecord) -> None:
    questions: dict[tuple[str, str], tuple[Answer, Answer]] = {}
    for answer in _read_lines(run, files.ANSWERS, Answer):
        question = answer.key, answer.question
        if question in questions or len(questions) < MAX_QUESTIONS:
            first, _ = questions.get(question, (answer, answer))
            questions[question] = first, answer
    for first, last in questions.values():
        run.questions.append((last, None if first.step else first, last if last.step else None))


def _add_event(run: RunRecord, event: Event) -> None:
    run.counts[event.kind] += 1
    if run.counts[event.kind] <= LISTED:
        run.events.append(event)
