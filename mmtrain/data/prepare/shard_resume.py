"""The state of an unfinished run, by which --resume continues it.

unfinished.jsonl in the output folder: the run's description, then a line for each finished shard.

A run locks the folder: two would write over each other.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, astuple
from pathlib import Path

from mmtrain.base.durable import held, leftovers
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines, recorded
from mmtrain.data.prepare.sharding import BadRecord, FinishedShard, WrittenShard
from mmtrain.data.shards.index_file import index_path

STATE = "unfinished.jsonl"
SUMMARY = "dataset.json"


def refuse_used_folder(out: Path, resume: bool) -> None:
    """Raise UserError for an output folder that holds shards, unless `resume` continues their run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")
    used = sorted(path.name for name in ("*.tar", SUMMARY) for path in out.glob(name))
    unfinished = (out / STATE).is_file()
    if not used or (resume and (unfinished or SUMMARY in used)):
        return
    seen = f"--out {out}: holds shards already ({', '.join(used[:3])}{', ...' if len(used) > 3 else ''})"
    if unfinished:
        raise UserError(f"{seen}, of a run that was stopped: go on with --resume, or delete the folder")
    raise UserError(f"{seen}; a run would read old and new ones together. Choose a new folder, or delete it")


def is_finished(out: Path, run: dict) -> bool:
    """Tell whether a folder holds the finished shards of this run; raises UserError for those of another one."""
    file = out / SUMMARY
    if not file.is_file():
        return False
    try:
        summary = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        summary = {}
    _refuse_another_run(run, summary if isinstance(summary, dict) else {}, file)
    (out / STATE).unlink(missing_ok=True)  # the run was killed between its last two acts
    return True


def _refuse_another_run(run: dict, earlier: dict, file: Path) -> None:
    """Raise UserError unless `file` describes an `earlier` run with the options and inputs of `run`."""
    options = earlier.get("options")
    was = (options if isinstance(options, dict) else {}) | {"inputs": earlier.get("inputs")}
    now = run["options"] | {"inputs": run["inputs"]}
    differ = [
        f"{name} was {json.dumps(was.get(name))} and is {json.dumps(value)}"
        for name, value in now.items()
        if was.get(name) != value
    ]
    if differ:
        raise UserError(
            f"--resume: {file} is of another run: {'; '.join(differ)}. Its shards and new ones would not make one data "
            f"set: use the same options and files, or delete {file.parent} and start again"
        )


class UnfinishedRun:
    """The state of a folder's run, while it holds the folder's lock."""

    def __init__(self, out: Path, run: dict, resume: bool) -> None:
        """Lock the folder and take over the finished shards of an earlier run with an equal description.

        `run` is {"options": {...}, "inputs": [...]}. Raises UserError if another run holds the folder, or if the
        earlier one had another description.
        """
        self.out = out
        self.path = out / STATE
        out.mkdir(parents=True, exist_ok=True)
        self.finished: dict[int, FinishedShard] = {}
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(held(out / ".lock", wait=False))
            except BlockingIOError:
                raise UserError(
                    f"--out {out}: another run writes into this folder; wait for its end, or stop it"
                ) from None
            if (out / SUMMARY).exists():
                raise UserError(f"--out {out}: another run has just ended here")
            earlier = list(recorded(self.path)) if resume else []
            if earlier:
                _refuse_another_run(run, earlier[0], self.path)
                self._take_over(earlier[1:])
            else:
                self.path.unlink(missing_ok=True)
            self._remove_all_but_finished()
            self.lines = opened.enter_context(JsonLines(self.path))
            if not earlier:
                self.lines.write(**run)
            self._open = opened.pop_all()

    def _take_over(self, lines: list[dict]) -> None:
        """Keep the shards whose tar and index are there still."""
        for line in lines:
            shard = WrittenShard(**line["written"])
            tar = self.out / shard.file
            if tar.is_file() and tar.stat().st_size == shard.bytes and index_path(tar).is_file():
                rejected = tuple(BadRecord(*entry) for entry in line["rejected"])
                self.finished[line["shard"]] = FinishedShard(shard, rejected)

    def _remove_all_but_finished(self) -> None:
        kept = {finished.shard.file for finished in self.finished.values()}
        for pattern in ("shard-*.tar", "shard-*.tar.index", leftovers("*")):
            for path in self.out.glob(pattern):
                if path.name.removesuffix(".index") not in kept:
                    path.unlink()

    def add(self, number: int, shard: FinishedShard) -> None:
        """Record a finished shard."""
        if number not in self.finished:
            rejected = [astuple(entry) for entry in shard.rejected]
            self.lines.write(shard=number, written=asdict(shard.shard), rejected=rejected)

    def end(self) -> None:
        """Remove the state of a run that is complete."""
        self.path.unlink()

    def discard(self) -> None:
        """Remove all shards and the state."""
        self.finished.clear()
        self._remove_all_but_finished()
        self.end()

    def close(self) -> None:
        """Release the folder."""
        self._open.close()
