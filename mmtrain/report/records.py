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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import whole_lines
from mmtrain.base.printing import disclosed, escape, first_few
from mmtrain.base.small_files import MAX_JSON_BYTES, open_file, parse_json, read_limited
from mmtrain.checkpoint import run_folder as files
from mmtrain.config.strict_yaml import read_yaml

LISTED = 50  # entries kept of each list
MAX_QUESTIONS = 100
MAX_CHARACTERS = 2000
MAX_ENTRIES = 50_000  # of a list in a record
MAX_POINTS = 2000  # of a curve in a chart
# fields of a step that are drawn, and those that are added up
CURVES = ["loss", "grad_norm", "lr", "tokens_per_second", "model_flops_utilization"]
TOTALS = ["samples", "images", "tiles", "tokens", "supervised_tokens", "quarantined"]
BUSY = ["compute", "communication", "data", "fetching"]  # kinds of a rank's time
LARGEST = 1e30  # a larger number comes from a damaged record, and would make sums infinite
WRONG = (ValueError, TypeError, AttributeError, KeyError)  # raised by readers of values
Record = SimpleNamespace  # an object of a file, with those of its fields that are shown
Reader = Callable[[Any], Any]  # checks a JSON value and makes it safe; raises one of WRONG


# ---- readers of values


def shown(text: str) -> str:
    """Return text without terminal escapes, logins or arguments of programs, at most MAX_CHARACTERS
    long.
    """
    return escape(disclosed(text), MAX_CHARACTERS)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return shown(value)


def _within(most: float, value: Any) -> Any:
    if not 0 <= value <= most:
        raise ValueError(value)
    return value


def _score(value: Any) -> tuple[float, float | None]:
    score, error = value
    return float(score), None if error is None else float(error)


def _kind(value: Any) -> Any:
    return isinstance(value, dict) and value.get("kind")


TYPES: dict[str, Reader] = {
    "count": partial(_within, 2**53),
    "flag": bool,
    "kind": _kind,  # of a whole record
    "length": len,
    "measure": partial(_within, LARGEST),  # seconds, bytes
    "number": float,  # reads the "nan" and "inf" of a bad step, too
    "score": _score,  # with its standard error
    "share": partial(_within, 1),
    "text": _text,
    "unix": partial(_within, 1e11),  # seconds since 1970
}


def _list(reader: Reader, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise ValueError(value)
    return list(map(reader, value))


def _typed(kind: str) -> Reader:
    """Return the reader of `count`, `count?` (or null), `count[]` (a list), `count{}` (by name)."""
    if kind in TYPES:
        return TYPES[kind]
    if kind.endswith("?"):
        reader = _typed(kind[:-1])
        return lambda value: None if value is None else reader(value)
    reader = _typed(kind[:-2])
    if kind.endswith("[]"):
        return partial(_list, reader)
    return lambda value: {shown(name): reader(part) for name, part in value.items()}


def _record(*lines: str) -> Reader:
    """Return a reader of objects; a line is a type and the names of the fields that have it.

    Its ValueError names a field that is missing or wrong.
    """
    fields: dict[str, Reader] = {}
    for line in lines:
        kind, *names = line.split()
        fields |= dict.fromkeys(names, _typed(kind))

    def read(value: Any) -> Record:
        known = OLDER | value
        record = Record()
        for name, reader in fields.items():
            try:
                setattr(record, name, reader(known.get(name)))
            except WRONG as error:
                raise ValueError(f"field {name}") from error
        return record

    return read


# ---- fields of the records

# values of fields that only some records of a kind have, or that older versions did not write
OLDER = {
    "error": "",
    "lr_groups": {},
    "permuted_samples": 0,
    "result": "frozen weights unchanged on all ranks",
}
STEP = "count step", "unix time", "text kind"
# scores on held-out samples after `step` updates
EVALUATION = _record(
    *STEP,
    "number? loss",
    "share? token_accuracy exact_match",
    "count answers samples permuted_samples",
    "measure seconds",
)
EVENT = _record(*STEP, "text error")
METRICS = {
    # one step, counted from 0
    "train": _record(
        *STEP,
        "number grad_norm lr tokens_per_second",
        "number? loss model_flops_utilization",
        f"count {' '.join(TOTALS)}",
        "text? no_update",
        "measure seconds",
        "measure[] compute_seconds communication_seconds data_seconds fetching_seconds",
        "measure[] idle_fraction peak_memory_bytes",
        "number{} lr_groups",  # only with optimizer.groups
    ),
    "eval": EVALUATION,
    "eval_permuted": EVALUATION,  # the control
    "begin": _record(*STEP, "text device", "text{} versions"),
    "epoch": _record(*STEP, "count epoch packs read trained quarantined overlong", "flag complete"),
    **dict.fromkeys(("resume", "end", "checkpoint_failed"), EVENT),
    **dict.fromkeys(("checkpoint", "attention"), _record(*STEP)),  # are not shown
}
# a sample that could not be used; without a step it was left out from the start
QUARANTINED = _record("count? step", "text key shard reason detail")
# a step without an update, because of NaN or infinity
BAD_STEP = _record("count step", "count[] ranks", "text[] parameters")
# a record behind the checkpoint that the run went back to
DISCARDED = _record("count back_to_step", "kind record")
# a held-out question that the model answered after `step` updates
ANSWER = _record("count step", "text key question given truth", "flag right", "text[] pictures")
# scores by `mmtrain benchmark` after `step` updates: of each metric (value, standard error)
BENCHMARK = _record(
    "count step",
    "text task",
    "count? limit answers",
    "score{} scores",
    "text{} versions",
)
TYPES["stage"] = _record("text[] layers", "count[]? encoder")
# a process, as planned; bytes are those of its fullest moment
TYPES["rank"] = _record(
    "count rank data trainable total_bytes",
    "count weight_bytes optimizer_bytes activation_bytes workspace_bytes",
    "stage[] stages",
    "text optimizer reason",
    "share idle_share",
)
# who holds, trains and runs what
PLAN = _record(
    "text llm",
    "text? vision",
    "text[] trainable",
    "count pipeline data microbatches_per_step packs_per_microbatch pack_length",
    "count? memory_limit_bytes",
    "measure? step_seconds",
    "share idle_share",
    "rank[] ranks",
)
# the proof that what should train did, and nothing else; `ranks` is their number
AUDIT = _record("flag passed", "text[] failures", "text result", "length ranks")


def _metric(value: Any) -> Record:
    return METRICS[value["kind"]](value)


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
        self.plan: Record | None = None
        self.audit: Record | None = None
        self.begin: Record | None = None  # of the latest process
        self.final_step: int | None = None
        self.steps = 0  # recorded
        self.steps_done = 0  # updates after which the records end
        # over steps
        self.curves: dict[str, Curve] = defaultdict(Curve)
        self.rates: dict[str, Curve] = defaultdict(Curve)  # of optimizer.groups
        self.evaluations: list[Record] = []
        self.control: Record | None = None
        # kind of time -> rank -> seconds
        self.times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.timed_steps = 0  # all but the first of each process, which pays for warm-up
        self.peaks: dict[int, float] = {}  # bytes of memory, by rank
        self.seconds = 0.0  # of steps and evaluations
        self.totals: Counter[str] = Counter()  # samples, images, tiles, tokens, quarantined, ...
        self.epochs: list[Record] = []
        self.quarantined: list[Record] = []  # the first ones
        self.reasons: Counter[str] = Counter()  # of quarantine
        self.discarded: Counter[int] = Counter()  # steps made twice, by the step gone back to
        self.begun: float | None = None  # Unix seconds of the first record
        self.elapsed = 0.0  # seconds from the begin to the last record
        self.events: list[Event] = []  # the first ones of each kind
        self.counts: Counter[str] = Counter()  # of all events, by kind
        # key and question -> when -> answer
        self.questions: dict[tuple[str, str], dict[str, Record]] = {}
        # task, step and limit -> the last record
        self.benchmarks: dict[tuple[Any, ...], Record] = {}
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
    run.plan = _read_json(run, files.PLAN, PLAN)
    run.audit = _read_json(run, files.AUDIT, AUDIT)
    _read_metrics(run)
    _read_faults(run)
    _read_answers(run)
    for record in _read_lines(run, files.BENCHMARKS, BENCHMARK):
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
    except UserError as error:
        run.problems.append(shown(str(error)))
    except OSError as error:
        run.problems.append(shown(f"{name} cannot be read: {error.strerror}"))
    except WRONG as error:
        run.problems.append(shown(f"{name} has wrong content: {error}"))


def _read_json(
    run: RunRecord,
    name: str,
    reader: Reader,
) -> Record | None:
    with _noting(run, name):
        file = inside(run.folder, name)
        return reader(parse_json(read_limited(file, MAX_JSON_BYTES, f"the {name} of a run")))
    return None


def _read_lines(
    run: RunRecord,
    name: str,
    reader: Reader,
) -> Iterator[Record]:
    """Yield the valid records of a file; `problems` says how many others are left out."""
    left_out, first = 0, ""
    with _noting(run, name), open_file(inside(run.folder, name)) as stream:
        for line in whole_lines(stream):
            try:
                record = reader(parse_json(line))
            except WRONG as error:
                left_out += 1
                first = first or shown(str(error))
            else:
                yield record
    if left_out:
        run.problems.append(
            f"{name}: {left_out:,} line(s) left out, since they are not valid records ({first})"
        )


def _read_metrics(run: RunRecord) -> None:
    is_first_step = True
    for record in _read_lines(run, files.METRICS, _metric):
        kind = record.kind
        if run.begun is None:
            run.begun = record.time
        now = max(0.0, record.time - run.begun)
        run.elapsed = max(run.elapsed, now)
        if kind == "train":
            _add_step(run, record, now)
            if not is_first_step:
                _add_times(run, record)
            is_first_step = False
        elif kind == "begin":
            is_first_step = True
            run.begin = record
            if not record.step:
                _add_event(run, Event(kind, 0, now))
        elif kind == "epoch":
            run.epochs.append(record)
        elif METRICS[kind] is EVALUATION:
            _add_evaluation(run, record)
        elif METRICS[kind] is EVENT:
            _add_event(run, Event(kind.replace("_", " "), record.step, now, record.error))
            if kind == "end":
                run.final_step = record.step


def _add_step(run: RunRecord, record: Record, now: float) -> None:
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
    for rank, peak in enumerate(record.peak_memory_bytes):
        run.peaks[rank] = max(peak, run.peaks.get(rank, 0.0))


def _add_times(run: RunRecord, record: Record) -> None:
    run.timed_steps += 1
    seconds = [getattr(record, f"{kind}_seconds") for kind in BUSY]
    by_rank = zip(record.idle_fraction, *seconds, strict=False)
    for rank, (idle, *busy) in enumerate(by_rank):
        for kind, spent in zip(BUSY, busy, strict=True):
            run.times[kind][rank] += spent
        if idle < 1:
            run.times["idle"][rank] += sum(busy) * idle / (1 - idle)


def _add_evaluation(run: RunRecord, record: Record) -> None:
    run.seconds += record.seconds
    if record.kind == "eval_permuted":
        run.control = record
        return
    run.evaluations.append(record)
    for name in ("loss", "exact_match", "token_accuracy"):
        run.curves[f"eval_{name}"].add(record.step, getattr(record, name))


def _read_faults(run: RunRecord) -> None:
    for sample in _read_lines(run, files.QUARANTINE, QUARANTINED):
        if len(run.quarantined) < LISTED:
            run.quarantined.append(sample)
        run.reasons[sample.reason] += 1
    not_updated = {event.step: event for event in run.events if event.kind == "no update"}
    for bad in _read_lines(run, files.BAD_STEPS, BAD_STEP):
        ranks = first_few(list(map(str, bad.ranks)), 4)
        where = f"rank {ranks}, {first_few(bad.parameters, 3) or 'no gradient'}"
        text = f"NaN or infinity on {where}; {files.BAD_STEPS} lists its samples"
        if bad.step + 1 in not_updated:
            not_updated[bad.step + 1].text = text
        elif bad.step >= run.steps_done:
            _add_event(run, Event("bad step", bad.step + 1, None, f"this ended the run: {text}"))
    for lost in _read_lines(run, files.DISCARDED, DISCARDED):
        if lost.record == "train":
            run.discarded[lost.back_to_step] += 1


def _read_answers(run: RunRecord) -> None:
    for answer in _read_lines(run, files.ANSWERS, ANSWER):
        question = answer.key, answer.question
        if question in run.questions or len(run.questions) < MAX_QUESTIONS:
            when = "after training" if answer.step else "before training"
            run.questions.setdefault(question, {})[when] = answer


def _add_event(run: RunRecord, event: Event) -> None:
    run.counts[event.kind] += 1
    if run.counts[event.kind] <= LISTED:
        run.events.append(event)
