"""What became of the records that were turned into shards: rejected.jsonl, and dataset.json at the end."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.data.prepare.intake import Intake
from mmtrain.data.prepare.shard_resume import SUMMARY
from mmtrain.data.prepare.sharding import FinishedShard, Rejection, ShardJob, WrittenShard
from mmtrain.data.prepare.sources import place


class Tally:
    """What became of the records, in their order: counts, and a line in rejected.jsonl for each that is left out."""

    def __init__(self, intake: Intake, rejected: JsonLines, total: int) -> None:
        self.intake = intake
        self.rejected = rejected
        self.total = total
        self.reasons: Counter[str] = Counter()
        self.shards: list[WrittenShard] = []

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def add(self, job: ShardJob, finished: FinishedShard) -> None:
        """Take a job's result; raises UserError once more records are bad than are allowed."""
        for rejection in sorted(job.rejected + finished.rejected, key=lambda rejection: rejection.record):
            self._reject(rejection)
        self.shards.append(finished.shard)

    def _reject(self, rejection: Rejection) -> None:
        source, number = place(self.intake.sources, rejection.record)
        self.rejected.write(
            file=source.name, record=number, id=rejection.id, reason=rejection.reason, detail=rejection.detail
        )
        self.reasons[rejection.reason] += 1
        if self.reasons.total() > self.intake.allowed_rejections:
            hint = ""
            if self.reasons.most_common(1)[0][0] == "duplicate_id":
                hint = "; if equal ids stand over different conversations, --duplicate-ids keep"
            raise UserError(
                f"too many bad records: {self.reasons.total():,} of the first {rejection.record + 1:,} "
                f"({by_reason(self.reasons)}), where {self.intake.allowed_rejections:,} of {self.total:,} are "
                f"allowed; the last is {rejection.reason}: {rejection.detail}. Mend them, or raise "
                f"--max-reject-rate{hint}"
            )


def by_reason(reasons: Counter[str]) -> str:
    """How often each reason was given, the commonest first."""
    return ", ".join(f"{count:,} {code}" for code, count in reasons.most_common())


def write_summary(out: Path, run: dict, tally: Tally) -> None:
    """Write dataset.json into the folder of finished shards; `run` says what made them. Raises OSError."""
    shards = tally.shards
    content = {
        "format_version": 1,
        "records": tally.total,
        "samples": tally.samples,
        "images": sum(shard.images for shard in shards),
        "image_pixels": sum(shard.image_pixels for shard in shards),
        "text_tokens": None if shards[0].text_tokens is None else sum(shard.text_tokens or 0 for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "rejected": dict(sorted(tally.reasons.items())),
        **run,
        "sha256": hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest(),  # of those of shards
        "shards": [asdict(shard) for shard in shards],
    }
    try:
        write_whole(out / SUMMARY, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out / SUMMARY)) from error
