"""A run of `mmtrain shard`: contents of each shard, fate of each record, --resume.

rows of all sources --Validator: text checked, keys assigned--> candidates
    --N, or as many as fit a size--> ShardJob
ShardJob, FinishedShard
    --ShardStats--> rejected.jsonl, and dataset.json at the end
    --UnfinishedRun--> unfinished.jsonl: options and inputs, then a line for each finished shard

The jobs are a function of the sources (and, for shards of a size, of the image files' sizes): so
any number of workers, and a run that was interrupted, make the same shards. A run locks the folder:
two would write over each other.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE

from mmtrain.base.durable import held, leftovers, write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines, recorded
from mmtrain.data.prepare.sharding import (
    BadRecord,
    Candidate,
    FinishedShard,
    ShardJob,
    WrittenShard,
    sample_key,
    tar_bytes,
)
from mmtrain.data.prepare.sources import RowImage, Source, place
from mmtrain.data.samples.records import BadSample, Record, image_file, record_json
from mmtrain.data.shards.index import index_path

STATE = "unfinished.jsonl"
SUMMARY = "dataset.json"


@dataclass(eq=False)
class Validator:
    """The jobs of all shards, in the files' order.

    A shard is full at `samples_per_shard` or `shard_bytes`.
    """

    sources: Sequence[Source]
    images: Path | None  # their folder; None: no record has any
    samples_per_shard: int | None  # candidates: records with sound text
    shard_bytes: int | None  # of the tar; a larger sample is alone in its tar
    keep_duplicates: bool  # a repeated id gets a key of its own
    allowed_rejections: int  # for the text; reading ends early, after more
    # of candidates -> the record's number in all files
    keys: dict[str, int] = field(default_factory=dict)
    repeats: Counter[str] = field(default_factory=Counter)  # of a key, so far

    def __iter__(self) -> Iterator[ShardJob]:
        full = self.samples_per_shard
        if self.shard_bytes is not None:
            full = self.shard_bytes // RECORDSIZE * RECORDSIZE - 2 * BLOCKSIZE  # the archive's end
        number = filled = text_rejections = 0
        candidates = []
        rejected = []
        for record, (source, value) in enumerate(self._rows()):
            try:
                adapted = source.adapter.adapt(value)
                key = self._key(adapted.record, record)
            except BadSample as error:
                identifier = value.get("id") if isinstance(value, dict) else None
                if not isinstance(identifier, str | int):
                    identifier = None
                rejected.append(
                    BadRecord(
                        record,
                        identifier,
                        error.reason,
                        error.detail,
                    )
                )
                text_rejections += 1
                if text_rejections > self.allowed_rejections:
                    break
                continue

            self.keys[key] = record
            named = adapted.named(key)
            holds_images = any(image.content is not None for image in adapted.images)
            candidate = Candidate(
                record,
                key,
                named.content,
                named.images,
                holds_images,
            )
            size = 1  # of the candidate, in the limit's unit
            if self.shard_bytes is not None:
                text = len(record_json(candidate.content))
                size = tar_bytes([text, *map(self._image_size, adapted.images)])

            if candidates and filled + size > full:
                yield ShardJob(number, tuple(candidates), tuple(rejected))
                number += 1
                filled = 0
                candidates = []
                rejected = []
            candidates.append(candidate)
            filled += size
        if candidates or rejected:
            yield ShardJob(number, tuple(candidates), tuple(rejected))

    def _rows(self) -> Iterator[tuple[Source, object]]:
        for source in self.sources:
            count = 0
            for value in source.rows():
                yield source, value
                count += 1
            if count != source.records:
                raise UserError(f"{source.path}: has changed while it was read. Start again")

    def _image_size(self, image: RowImage) -> int:
        if image.content is not None:
            return image.content.nbytes
        if self.images is None or image.name is None:
            return 0
        try:
            return image_file(self.images, image.name).stat().st_size
        except (OSError, ValueError):  # the job that reads it reports why
            return 0

    def _key(self, record: Record, number: int) -> str:
        key = sample_key(record.id or f"record-{number:08d}")
        if key not in self.keys:
            return key
        if not self.keep_duplicates:
            source, first = place(self.sources, self.keys[key])
            raise BadSample(
                "duplicate_id",
                f"record {first} of {source.name} has it too; "
                "--duplicate-ids keep gives each its own key",
            )
        while True:
            self.repeats[key] += 1
            numbered = f"{key}-{self.repeats[key] + 1}"
            if numbered not in self.keys:  # else it is an id of its own
                return numbered


@dataclass(eq=False)
class ShardStats:
    """Counts samples and rejected records, in the records' order.

    Each rejected record becomes a line of rejected.jsonl.
    """

    validator: Validator
    rejected: JsonLines
    total: int  # records
    reasons: Counter[str] = field(default_factory=Counter)
    shards: list[WrittenShard] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(self._each("samples"))

    @property
    def images(self) -> int:
        return sum(self._each("images"))

    def _each(self, name: str) -> list:
        return [getattr(shard, name) for shard in self.shards]

    def add(self, job: ShardJob, finished: FinishedShard) -> None:
        """Take a job's result; raises UserError once more records are bad than are allowed."""
        allowed = self.validator.allowed_rejections
        for rejection in sorted(job.rejected + finished.rejected, key=lambda bad: bad.record):
            source, number = place(self.validator.sources, rejection.record)
            self.rejected.write(
                file=source.name,
                record=number,
                id=rejection.id,
                reason=rejection.reason,
                detail=rejection.detail,
            )
            self.reasons[rejection.reason] += 1
            read = rejection.record + 1
            if self.reasons["missing_image"] == read > allowed:
                raise UserError(
                    f"the first {read:,} images are not where --images says, the last is "
                    f"{rejection.detail}. Name the folder that the records' names are relative to"
                )
            if self.reasons.total() > allowed:
                counts = ", ".join(f"{n:,} {code}" for code, n in self.reasons.most_common())
                raise UserError(
                    f"too many bad records: {self.reasons.total():,} of the first {read:,} "
                    f"({counts}), but {allowed:,} of {self.total:,} are allowed; the last is "
                    f"{rejection.reason}: {rejection.detail}. Fix them, give rows that are not "
                    "LLaVA's by --from, not --json, or raise --max-reject-rate"
                )
        self.shards.append(finished.shard)

    def write_summary(self, out: Path, run: dict) -> None:
        """Write dataset.json beside finished shards, with the options and inputs of `run`.

        Raises OSError.
        """
        tokens = self._each("text_tokens")
        content = {
            "format_version": 1,
            "records": self.total,
            "samples": self.samples,
            "images": self.images,
            "image_pixels": sum(self._each("image_pixels")),
            "text_tokens": None if None in tokens else sum(tokens),
            "bytes": sum(self._each("bytes")),
            "rejected": dict(sorted(self.reasons.items())),
            **run,
            "sha256": hashlib.sha256("".join(self._each("sha256")).encode()).hexdigest(),
            "shards": list(map(WrittenShard._asdict, self.shards)),
        }
        write_whole(out / SUMMARY, json.dumps(content, indent=1) + "\n")


def refuse_used_folder(out: Path, resume: bool) -> None:
    """Raise UserError for a folder that holds shards, unless `resume` continues their run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file. Name a folder")
    used = sorted(path.name for path in [*out.glob("*.tar"), *out.glob(SUMMARY)])
    can_resume = (out / STATE).is_file() or SUMMARY in used
    if used and not (resume and can_resume):
        mend = "Continue with --resume" if can_resume else "Choose a new folder"
        raise UserError(
            f"--out {out}: already holds shards ({', '.join(used)[:80]}). "
            f"{mend}, or delete the folder"
        )


def is_finished(out: Path, run: dict) -> bool:
    """Tell whether a folder holds the finished shards of this run.

    Raises UserError for those of another one.
    """
    file = out / SUMMARY
    if not file.is_file():
        return False
    try:
        summary = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        summary = {}
    _refuse_another_run(run, summary, file)
    (out / STATE).unlink(missing_ok=True)  # the run was killed between its last two acts
    return True


def _refuse_another_run(run: dict, earlier: dict, file: Path) -> None:
    """Raise UserError unless `file` describes an `earlier` run with `run`'s options and inputs."""
    try:
        was = earlier["options"] | {"inputs": earlier["inputs"]}
    except (LookupError, TypeError):  # another program's dataset.json
        was = {}
    differ = []
    for name, value in {**run["options"], "inputs": run["inputs"]}.items():
        if was.get(name) != value:
            differ.append(f"{name} was {json.dumps(was.get(name))} and is {json.dumps(value)}")
    if differ:
        raise UserError(
            f"--resume: {file} is from another run: {'; '.join(differ)}. "
            "Old and new shards would not form one data set. "
            f"Use that run's options and files, or delete {file.parent} and start again"
        )


@dataclass
class UnfinishedRun:
    """The finished shards of a run; the rest of its folder is empty."""

    out: Path
    finished: dict[int, FinishedShard]  # by an earlier run
    lines: JsonLines

    def add(self, number: int, finished: FinishedShard) -> None:
        if number not in self.finished:
            written = finished.shard._asdict()
            self.lines.write(shard=number, written=written, rejected=finished.rejected)

    def discard(self) -> None:
        _remove_all_but(self.out, {})
        (self.out / STATE).unlink()


@contextlib.contextmanager
def unfinished_run(out: Path, run: dict, resume: bool) -> Iterator[UnfinishedRun]:
    """Lock the folder and take over the finished shards of an earlier run.

    Raises UserError if there is another run.

    When the block ends without error, the state is removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = out / STATE
    with contextlib.ExitStack() as opened:
        try:
            opened.enter_context(held(out / ".lock", wait=False))
        except BlockingIOError:
            raise UserError(
                f"--out {out}: another run writes into this folder. Wait for its end, or stop it"
            ) from None
        if (out / SUMMARY).exists():
            raise UserError(f"--out {out}: another run has just ended here")
        earlier = list(recorded(state)) if resume else []
        if earlier:
            _refuse_another_run(run, earlier[0], state)
        else:
            state.unlink(missing_ok=True)

        # the shards whose tar and index are there still
        finished = {}
        for line in earlier[1:]:
            shard = WrittenShard(**line["written"])
            tar = out / shard.file
            if tar.is_file() and tar.stat().st_size == shard.bytes and index_path(tar).is_file():
                rejected = tuple(map(BadRecord._make, line["rejected"]))
                finished[line["shard"]] = FinishedShard(shard, rejected)
        _remove_all_but(out, finished)
        lines = opened.enter_context(JsonLines(state))
        if not earlier:
            lines.write(**run)
        opened.callback(_remove_leftovers, out)
        yield UnfinishedRun(out, finished, lines)
        state.unlink()


def _remove_all_but(out: Path, kept: Mapping[int, FinishedShard]) -> None:
    names = {finished.shard.file for finished in kept.values()}
    for path in [*out.glob("shard-*.tar"), *out.glob("shard-*.tar.index")]:
        if path.name.removesuffix(".index") not in names:
            path.unlink()
    _remove_leftovers(out)


def _remove_leftovers(out: Path) -> None:
    for path in out.glob(leftovers("*")):  # of processes that were killed
        path.unlink()
