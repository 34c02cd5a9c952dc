"""Account for every sample: counts per epoch, quarantine.jsonl, and the ledger samples.jsonl.

micro-batches that the engine takes --watch--> keys, faults, counts of this replica
--end_step: gathered over the replicas, in their order-->
    rank 0 writes samples.jsonl (keys in global pack order) and quarantine.jsonl;
    at each epoch's end its counts are compared with the plan's

Only what a step has used counts, not what workers or the encoder have prepared.
"""

import logging
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmtrain.base.collectives import gather_to_rank_0
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import escape
from mmtrain.data.samples.sample import QuarantinedSample
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.order import Epoch
from mmtrain.data.stream.packs import PackedBatch

_log = logging.getLogger(__name__)
# samples that the share of quarantined ones refers to at least: one of the first ten is no 10%
FEWEST_READ = 1000
LISTED = 5  # quarantined samples that a message lists


class CountError(RuntimeError):
    """Samples were lost or repeated between the plan and the engine: a fault of mmtrain."""


@dataclass
class _Taken:
    """Samples that one replica's engine took since the last gathering."""

    keys: list[str] = field(default_factory=list)
    faults: list[tuple[int, QuarantinedSample]] = field(default_factory=list)  # epoch, fault
    trained: Counter[int] = field(default_factory=Counter)  # by epoch


class SampleLog:
    """The account of one rank that reads data.

    Rank 0's writes the files. Collective over these ranks.

    `group` holds them, in the order of the replicas; None where there is only one.
    """

    def __init__(
        self,
        packed: PackedBatches,
        group: dist.ProcessGroup | None,
        folder: Path,
        held_out: Sequence[QuarantinedSample],
        state: Mapping[str, Any] | None,
    ) -> None:
        """Record the samples that are unusable from the start.

        Raises UserError if these are too many already.

        `held_out` are samples that are left out of the evaluation; `state` is the `state_dict`
        before the first step of `packed`.
        """
        self.config = packed.config
        self.packed = packed
        self.order = packed.order
        self.group = group
        self.writes = packed.replica == 0
        self.quarantine_file = folder / "quarantine.jsonl"
        self._quarantine: JsonLines | None = None
        # by the engine, without images, until a step has used them
        self._read_ahead: deque[PackedBatch] = deque()
        self._taken = _Taken()
        self._trained: Counter[int] = Counter()  # by epoch, over all replicas; kept by rank 0
        self._quarantined: Counter[int] = Counter()
        self._read = self._lost = 0  # samples, over all replicas
        # of the first epoch that is not complete: the first pack that is accounted for, and samples
        # in packs before it
        self._first_pack = packed.first_step * self.config.train.packs_per_step
        self._epoch = self.order.position(self._first_pack).epoch
        self._before = self.order.samples_before(self._first_pack)
        if state is not None:
            self._first_pack = state["first_pack"]
            self._epoch = state["epoch"]
            self._before = state["before"]
            self._read = state["read"]
            self._lost = state["lost"]
            if self.writes:
                self._trained = Counter(dict(state["trained"]))
                self._quarantined = Counter(dict(state["quarantined"]))
        # else it has them, or goes on without any
        if self.writes and (state is None or not self.quarantine_file.exists()):
            unusable = chain(packed.catalog.faults(), held_out)
            self._write_faults((None, self._epoch, fault) for fault in unusable)
        latest = list(islice(packed.catalog.faults(), FEWEST_READ))
        self._refuse_many(self._plan.unusable, self._plan.drawn, latest)
        has_ledger = self.writes and self.config.data.ledger
        self.ledger = JsonLines(folder / "samples.jsonl" if has_ledger else None)

    @property
    def _plan(self) -> Epoch:
        """The first epoch that is not complete."""
        return self.order.epoch(self._epoch)

    def watch(self, batches: Iterator[PackedBatch]) -> Generator[PackedBatch]:
        """Yield the micro-batches; each is counted at the end of the step that uses it."""
        for batch in batches:
            self._read_ahead.append(replace(batch, tiles=None))
            yield batch

    def end_step(self, step: int, samples: int, quarantined: int) -> list[dict]:
        """Close a step in which all replicas trained on `samples` and lost `quarantined`.

        Return, on rank 0, a record for metrics.jsonl for each epoch that is complete now: samples
        read = trained + quarantined + overlong. Raises UserError for too many quarantined samples,
        CountError for lost or repeated ones.
        """
        train = self.config.train
        taken = self._taken
        packs = self.packed.replicas * train.packs_per_microbatch
        for _ in range(train.packs_per_step // packs):
            batch = self._read_ahead.popleft()
            if self.config.data.ledger:
                taken.keys += batch.keys
            for epoch, trained in zip(batch.epochs, batch.samples_of_packs, strict=True):
                taken.trained[epoch] += trained
            for row, fault in batch.faults:
                taken.faults.append((batch.epochs[row], fault))
        self._read += samples + quarantined
        self._lost += quarantined
        taken_packs = (step + 1) * train.packs_per_step
        next_epoch = self.order.position(taken_packs).epoch
        if not (self.config.data.ledger or quarantined or next_epoch > self._epoch):
            return []

        taken = self._gather()
        if self.writes:
            self.ledger.write(step=step, keys=taken.keys)
            self._write_faults([(step, *fault) for fault in taken.faults])
            # What is unusable from the start is never read: it counts in proportion.
            read = round(self._read / (1 - self._plan.unusable / self._plan.drawn))
            latest = [fault for _, fault in taken.faults]
            self._refuse_many(self._lost + read - self._read, read, latest)

        records = []
        while self._epoch < next_epoch:
            end = self.order.first_pack(self._epoch + 1)
            if self.writes:
                records.append(self._close_epoch(end, self._plan.planned))
            self._epoch += 1
            self._first_pack = end
            self._before = 0
        return records

    def state_dict(self) -> dict:
        """Return the counts so far for a checkpoint, on rank 0 those of all replicas.

        Collective.
        """
        self._gather()
        return {
            "first_pack": self._first_pack,
            "epoch": self._epoch,
            "before": self._before,
            "read": self._read,
            "lost": self._lost,
            "trained": list(self._trained.items()),  # epochs are no keys of JSON
            "quarantined": list(self._quarantined.items()),
        }

    def finish(self, steps: int) -> list[dict]:
        """Close the files, and the epoch that the last of `steps` left incomplete.

        Return records as end_step does.
        """
        self._gather()
        end = steps * self.config.train.packs_per_step
        self.ledger.close()
        if self._quarantine is not None:
            self._quarantine.close()
        if not self.writes or end == self._first_pack:
            return []
        return [self._close_epoch(end, self.order.samples_before(end))]

    def _gather(self) -> _Taken:
        """Return what all replicas took since the last time, in their order, on rank 0; nothing on
        the others.

        Collective.
        """
        replicas = [self._taken]
        if self.group is not None:
            replicas = gather_to_rank_0(self._taken, self.group) or []
        self._taken = _Taken()
        together = _Taken()
        for replica in replicas:
            together.keys += replica.keys
            together.faults += replica.faults
            self._trained += replica.trained
        self._quarantined.update(epoch for epoch, _ in together.faults)
        return together

    def _close_epoch(self, end: int, through: int) -> dict:
        """Return the record of the epoch up to pack `end`, with `through` samples up to there.

        Raises CountError if it does not add up.
        """
        epoch = self._epoch
        plan = self._plan
        packs = end - self._first_pack
        complete = self._before == 0 and through == plan.planned
        trained = self._trained.pop(epoch, 0)
        damaged = self._quarantined.pop(epoch, 0)
        planned = through - self._before
        if trained + damaged != planned:
            raise CountError(
                f"epoch {epoch}: {planned} samples were planned in {packs} packs, "
                f"{trained} were trained on and {damaged} "
                f"quarantined: {trained + damaged - planned:+d}"
            )

        counts = {"trained": trained, "quarantined": damaged, "overlong": 0}
        if complete:  # what was never read counts once all others are
            counts["quarantined"] += plan.unusable
            counts["overlong"] = plan.overlong
        read = sum(counts.values())
        if complete and read != plan.drawn:
            raise CountError(
                f"epoch {epoch}: {plan.drawn} samples were drawn, but {read} are accounted for"
            )
        if complete:
            listed = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
            _log.info(f"epoch {epoch} is complete: {read:,} samples read: {listed}")
        return {
            "kind": "epoch",
            "epoch": epoch,
            "complete": complete,
            "packs": packs,
            "read": read,
            **counts,
        }

    def _write_faults(self, faults: Iterable[tuple[int | None, int, QuarantinedSample]]) -> None:
        """Append to quarantine.jsonl; a sample that is unusable from the start has no step."""
        first = None
        others = -1
        for step, epoch, fault in faults:
            first = first or fault
            others += 1
            if self._quarantine is None:
                self._quarantine = JsonLines(self.quarantine_file)
            self._quarantine.write(step=step, epoch=epoch, **asdict(fault))
        if first is None:
            return
        more = f", and {others:,} more" if others else ""
        _log.warning(
            f"quarantined {escape(first.key)} ({first.reason}: {escape(first.detail)}){more}; "
            f"see {self.quarantine_file}"
        )

    def _refuse_many(self, lost: int, read: int, latest: list[QuarantinedSample]) -> None:
        """Raise UserError if more samples are quarantined than allowed, `latest` among them."""
        rate = self.config.data.max_quarantine_rate
        least = min(FEWEST_READ, self._plan.drawn)
        if not lost or lost <= rate * max(read, least):
            return
        listed = "".join(f"\n  {fault.where}" for fault in latest[:LISTED])
        remedy = "repair or replace the shards"
        reasons = Counter(fault.reason for fault in latest)
        if reasons["no_encoder"] * 2 > len(latest):
            remedy = (
                "model.vision is null, and most have images: "
                "set data.images=strip to train on their text"
            )
        raise UserError(
            f"{lost:,} of {read:,} samples read are quarantined, more than "
            f"data.max_quarantine_rate={rate:g} allows (counted from {least:,} samples); {remedy}, "
            f"or raise the rate. {self.quarantine_file} lists all; the latest are:{listed}"
        )
