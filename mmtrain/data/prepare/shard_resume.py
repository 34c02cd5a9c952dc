"""The state of an unfinished run, by which --resume continues it.

unfinished.jsonl in the output folder: the run's description, then a line for each finished shard, in order.

A run locks the folder: two would write over each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, astuple
from pathlib import Path

from mmtrain.base.durable import UNFINISHED, held
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.data.prepare.sharding import BadRecord, FinishedShard, WrittenShard
from mmtrain.data.shards.index_file import index_path

STATE = "unfinished.jsonl"
SUMMARY = "dataset.json"
_OURS = re.compile(r"shard-\d{6,}\.tar(\.index)?|\.?(shard-\d{6,}\.tar(\.index)?|dataset\.json)(\.[0-9a-f]{8})?\.tmp")


def refuse_used_folder(out: Path, resume: bool) -> None:
    """Raise UserError for an output folder that holds shards, unless `resume` continues their run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")
    used = sorted(path.name for name in ("*.tar", f"*.tar*{UNFINISHED}", SUMMARY) for path in out.glob(name))
    unfinished = (out / STATE).is_file()
    if not used or (resume and (unfinished or SUMMARY in used)):
        return
    seen = f"--out {out}: holds shards already ({', '.join(used[:3])}{', ...' if len(used) > 3 else ''})"
    if unfinished:
        raise UserError(f"{seen}, of a run that was stopped: go on with --resume, or delete the folder")
    raise UserError(f"{seen}; a run would read old and new ones together. Choose a new folder, or delete it")


def read_summary(path: Path) -> dict:
    """Return the dataset.json of a finished run; raises UserError for a file that this tool did not write."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(summary["inputs"], list) and isinstance(summary["shards"], list) and "samples" in summary:
            return summary
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path}: is not of this tool, or damaged; choose a new folder, or delete this one")


def refuse_another_run(out: Path, run: dict, earlier: dict, file: Path) -> None:
    """Raise UserError unless `file` describes an `earlier` run with the options and inputs of `run`."""
    was, now = _settings(earlier), _settings(run)
    differ = [
        f"{name} was {json.dumps(was.get(name))} and is {json.dumps(now.get(name))}"
        for name in {**now, **was}
        if was.get(name) != now.get(name)
    ]
    if differ:
        raise UserError(
            f"--resume: {file} is of another run: {'; '.join(differ)}. Its shards and new ones would not make one data "
            f"set: use the same options and files, or delete {out} and start again"
        )


def _settings(run: dict) -> dict:
    return run.get("options", {}) | {f"input {number}": file for number, file in enumerate(run["inputs"])}


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
            if not resume or not self._read(run):
                self.path.unlink(missing_ok=True)
            self._remove_all_but_finished()
            self.lines = opened.enter_context(JsonLines(self.path))
            if self.path.stat().st_size == 0:
                self.lines.write(**run)
            self._open = opened.pop_all()

    def _read(self, run: dict) -> bool:
        """Take over the finished shards; return whether there is a description."""
        if not self.path.exists():
            return False
        lines, whole = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                lines.append(json.loads(line))
            except ValueError:  # a machine that lost its power may have left part of a line
                break
            whole += len(line)
        os.truncate(self.path, whole)
        if not lines:
            return False
        refuse_another_run(self.out, run, lines[0], self.path)
        for line in lines[1:]:
            shard = FinishedShard(
                line["first"],
                line["end"],
                WrittenShard(**line["written"]),
                tuple(BadRecord(*entry) for entry in line["rejected"]),
            )
            if self._is_whole(shard.shard):
                self.finished[line["shard"]] = shard
        return True

    def _is_whole(self, shard: WrittenShard) -> bool:
        """Tell whether a shard's tar and index are there; the index is written after the tar, before the state."""
        tar = self.out / shard.file
        return tar.is_file() and tar.stat().st_size == shard.bytes and index_path(tar).is_file()

    def _remove_all_but_finished(self) -> None:
        kept = {finished.shard.file for finished in self.finished.values()}
        for path in self.out.iterdir():
            if _OURS.fullmatch(path.name) and path.name.removesuffix(".index") not in kept:
                path.unlink()

    def add(self, number: int, shard: FinishedShard) -> None:
        """Record a finished shard."""
        if number not in self.finished:
            self.lines.write(
                shard=number,
                first=shard.first,
                end=shard.end,
                written=asdict(shard.shard),
                rejected=[astuple(entry) for entry in shard.rejected],
            )

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
