"""A run's folder read into one plain value, for its page. Its files may be a stranger's.

metrics.jsonl, quarantine.jsonl, bad_steps.jsonl, discarded.jsonl, answers.jsonl --line by line-->
config.yaml, plan.json, audit.json -------------------------------------------------> RunRecord

A line without the fields below is left out and counted. All text passes `shown`, which makes it
safe to show; numbers have bounds. Memory grows by 16 bytes a value of a curve; lists keep their
first entries and the number of all.
"""

import contextlib
import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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
MAX_POINTS = 2000  # of a curve in a chart
# fields of a step that are drawn, and those that are added up
CURVES = ["loss", "grad_norm", "lr", "tokens_per_second", "model_flops_utilization"]
TOTALS = ["samples", "images", "tiles", "tokens", "supervised_tokens", "quarantined"]
EVENTS = ["resume", "end", "checkpoint_failed"]  # kinds of records that are events
TIMES = ["compute", "communication", "data", "fetching", "idle"]  # kinds of a rank's time
MAX_RANKS = 4096
LARGEST = 1e30  # a larger number comes from a damaged record, and would make sums infinite
T = TypeVar("T")


# ---- records, as files hold them


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
    model_flops_utilization: Number | None


class Ranks(_Metric):
    """Sums over `steps` steps, and peaks of memory, by global rank."""

    kind: Literal["ranks"]
    steps: Count
    compute_seconds: PerRank
    communication_seconds: PerRank
    data_seconds: PerRank
    fetching_seconds: PerRank
    idle_seconds: PerRank
    peak_memory_bytes: PerRank


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
    ranks: Count
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


class Copies(_Metric):
    """Copies of remote shards on rank 0's machine: sums since its process began."""

    kind: Literal["copies"]
    fetched_bytes: Measure
    requests: Count
    seconds: Measure
    waited_seconds: Measure
    cache_bytes: Measure


class Other(_Metric):
    """A record that is an event, or is not shown."""

    kind: Literal["resume", "end", "checkpoint_failed", "kernels", "checkpoint"]
    error: Text = ""  # only of a failed checkpoint


Metric = Annotated[
    Train | Ranks | Evaluation | Begin | Epoch | Copies | Other, Field(discriminator="kind")
]


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


# ---- what a folder's files are read into


class Point(NamedTuple):
    x: float
    y: float


class Curve:
    """Points in the order of their x, 16 bytes each; a chart gets the extremes of each stretch."""

    def __init__(self) -> None:
        self._x = array("d")
        self._y = array("d")

    def __len__(self) -> int:
        return len(self._x)

    def add(self, x: float, y: float | None) -> None:
        """Add a point, unless y is None, NaN or absurdly large."""
        if y is not None and abs(y) <= LARGEST:
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
            lowest = min(stretch, key=self._y.__getitem__)
            highest = max(stretch, key=self._y.__getitem__)
            points += [Point(self._x[place], self._y[place]) for place in sorted({lowest, highest})]
        return points

    def means(self, count: int) -> list[Point]:
        """Return the mean of each of `count` stretches, at its middle; fewer where there are fewer
        points.
        """
        means = []
        for stretch in self._stretches(count):
            places = slice(stretch.start, stretch.stop)
            means.append(Point(fmean(self._x[places]), fmean(self._y[places])))
        return means

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


class RunRecord:
    """The records of a run's folder; a missing one is None or empty."""

    def __init__(self, folder: Path) -> None:
        self.name = escape(folder.resolve().name)
        self.folder = folder
        self.config: dict[str, str] = {}  # dotted key -> value as text
        self.plan: Plan | None = None
        self.audit: Audit | None = None
        self.begin: Begin | None = None  # of the latest process
        self.copies: Copies | None = None  # as last recorded
        self.final_step: int | None = None
        self.steps = 0  # recorded
        self.steps_done = 0  # updates after which the records end
        # over steps
        self.curves: dict[str, Curve] = defaultdict(Curve)
        self.rates: dict[str, Curve] = defaultdict(Curve)  # of optimizer.groups
        self.evaluations: list[Evaluation] = []
        self.control: Evaluation | None = None
        # kind of time -> rank -> seconds
        self.times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.timed_steps = 0  # all but the first of each process, which pays for warm-up
        self.peaks: dict[int, float] = {}  # bytes of memory, by rank
        self.seconds = 0.0  # of steps and evaluations
        self.totals: Counter[str] = Counter()  # samples, images, tiles, tokens, quarantined, ...
        self.epochs: list[Epoch] = []
        self.quarantined: list[Quarantined] = []  # the first ones
        self.reasons: Counter[str] = Counter()  # of quarantine
        self.discarded: Counter[int] = Counter()  # steps made twice, by the step gone back to
        self.begun: float | None = None  # Unix seconds of the first record
        self.elapsed = 0.0  # seconds from the begin to the last record
        self.events: list[Event] = []  # the first ones of each kind
        self.counts: Counter[str] = Counter()  # of all events, by kind
        # key and question -> when -> answer
        self.questions: dict[tuple[str, str], dict[str, Answer]] = {}
        # task, step and limit -> the last record
        self.benchmarks: dict[tuple[Any, ...], Benchmark] = {}
        self.problems: list[str] = []  # with the files


def read_run(folder: Path) -> RunRecord:
    """Read the records of a run, which may be under way; raises UserError for a folder that is
    none.
    """
    if not (folder / files.CONFIG).is_file():
        raise UserError(
            f"{folder} has no {files.CONFIG}, so it is not a run. "
            "Give the folder run.dir/run.name of a run."
        )
    run = RunRecord(folder)
    with _noting(run, files.CONFIG):
        run.config = dict(_flat("", disclosed(read_yaml(inside(folder, files.CONFIG)))))
    run.plan = _read_json(run, files.PLAN, Plan)
    run.audit = _read_json(run, files.AUDIT, Audit)
    _read_metrics(run)
    _read_faults(run)
    _read_answers(run)
    for record in _read_lines(run, files.BENCHMARKS, Benchmark):
        run.benchmarks[record.task, record.step, record.limit] = record
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
    """Yield (dotted key, value as text) of nested mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), inner)
    elif prefix:
        if not isinstance(value, str):
            value = json.dumps(value, default=str)
        yield escape(prefix), escape(value, MAX_CHARACTERS)


@contextlib.contextmanager
def _noting(run: RunRecord, name: str) -> Iterator[None]:
    """Note why a file of the run cannot be read; that it is missing is no problem."""
    try:
        yield
    except FileNotFoundError:
        return
    except ValidationError as error:
        run.problems.append(f"{name} has wrong content: {_first_problem(error)}")
    except UserError as error:
        run.problems.append(shown(str(error)))
    except OSError as error:
        run.problems.append(shown(f"{name} cannot be read: {error.strerror}"))


def _read_json(run: RunRecord, name: str, kind: type[T]) -> T | None:
    with _noting(run, name):
        text = read_limited(inside(run.folder, name), MAX_JSON_BYTES, f"the {name} of a run")
        return TypeAdapter(kind).validate_json(text)
    return None


def _read_lines(run: RunRecord, name: str, kind: Any) -> Iterator[Any]:
    """Yield the valid records of a file; `problems` says how many others are left out."""
    adapter = TypeAdapter(kind)
    left_out, first = 0, ""
    with _noting(run, name), open_file(inside(run.folder, name)) as stream:
        for line in whole_lines(stream):
            try:
                record = adapter.validate_json(line)
            except ValidationError as error:
                left_out += 1
                first = first or _first_problem(error)
            else:
                yield record
    if left_out:
        run.problems.append(
            f"{name}: {left_out:,} line(s) left out, since they are not valid records ({first})"
        )


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return shown(f"{where}: {problem['msg']}".removeprefix(": "))


def _read_metrics(run: RunRecord) -> None:
    for record in _read_lines(run, files.METRICS, Metric):
        kind = record.kind
        if run.begun is None:
            run.begun = record.time
        now = max(0.0, record.time - run.begun)
        run.elapsed = max(run.elapsed, now)
        if kind == "train":
            _add_step(run, record, now)
        elif kind == "ranks":
            _add_ranks(run, record)
        elif kind == "copies":
            run.copies = record
        elif kind == "begin":
            run.begin = record
            if not record.step:
                _add_event(run, Event(kind, 0, now))
        elif kind == "epoch":
            run.epochs.append(record)
        elif isinstance(record, Evaluation):
            _add_evaluation(run, record)
        elif kind in EVENTS:
            _add_event(run, Event(kind.replace("_", " "), record.step, now, record.error))
            if kind == "end":
                run.final_step = record.step


def _add_step(run: RunRecord, record: Train, now: float) -> None:
    run.steps += 1
    run.steps_done = done = record.step + 1
    run.seconds += record.seconds
    for name in CURVES:
        run.curves[name].add(done, getattr(record, name))
    for pattern, rate in record.lr_groups.items():
        run.rates[pattern].add(done, rate)
    for name in TOTALS:
        run.totals[name] += getattr(record, name)
    if record.no_update is not None:
        _add_event(run, Event("no update", done, now, record.no_update))
    if record.quarantined:
        _add_event(run, Event("quarantine", done, now, f"samples: {record.quarantined:,}"))


def _add_ranks(run: RunRecord, record: Ranks) -> None:
    run.timed_steps += record.steps
    for kind in TIMES:
        for rank, seconds in enumerate(getattr(record, f"{kind}_seconds")):
            run.times[kind][rank] += seconds
    for rank, peak in enumerate(record.peak_memory_bytes):
        run.peaks[rank] = max(peak, run.peaks.get(rank, 0.0))


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
        ranks = first_few(list(map(str, bad.ranks)), 4)
        text = (
            f"NaN or infinity on rank {ranks}, {first_few(bad.parameters, 3) or 'no gradient'}; "
            f"{files.BAD_STEPS} lists its samples"
        )
        if bad.step + 1 in not_updated:
            not_updated[bad.step + 1].text = text
        elif bad.step >= run.steps_done:
            _add_event(run, Event("bad step", bad.step + 1, None, f"this ended the run: {text}"))
    for lost in _read_lines(run, files.DISCARDED, Discarded):
        if isinstance(lost.record, Train):
            run.discarded[lost.back_to_step] += 1


def _read_answers(run: RunRecord) -> None:
    for answer in _read_lines(run, files.ANSWERS, Answer):
        question = answer.key, answer.question
        if question in run.questions or len(run.questions) < MAX_QUESTIONS:
            when = "after training" if answer.step else "before training"
            run.questions.setdefault(question, {})[when] = answer


def _add_event(run: RunRecord, event: Event) -> None:
    run.counts[event.kind] += 1
    if run.counts[event.kind] <= LISTED:
        run.events.append(event)
