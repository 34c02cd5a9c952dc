"""Fetch ranges of remote shards into sparse copies: the process that `fetching` starts.

held-out samples, then one group of packs after the other --`Fetcher.windows`--> samples
    --`Fetcher.pieces`: members that readers read, merged over small gaps--> pieces of shards
    --`Fetcher.fetch`: GET by threads, by first need; checksums compared--> copies

Copies take at most the task's bound. To make room, whole shards go that all readers have passed,
the one needed longest ago first.
"""

import contextlib
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import bytes_text
from mmtrain.data.samples.formats import TEXT_SUFFIXES
from mmtrain.data.samples.sample import image_number
from mmtrain.data.shards.index import suffix_texts
from mmtrain.data.shards.remote import is_remote
from mmtrain.data.shards.store import THREADS, StoreError, read_range
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.copies import NOT_BEGUN, Copies, FetchTask
from mmtrain.data.stream.pack_counts import pack_order
from mmtrain.data.stream.stored import writing

# Bytes between two members that are fetched, too, to save a request. With 64 KiB each of 8 machines
# fetches 1.06 times what it needs. The hub allows few requests.
GAP = 64 << 10
GAP_OF_HUB = 4 << 20
PIECE = 8 << 20
_PAGE = 4096  # bytes; a sparse file takes whole pages of the disk
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_STATS = 1.0


class _Piece(NamedTuple):
    """Members of a shard that are fetched by one request."""

    need: int  # the first pack that needs one of them; pieces sort by it
    url: str
    begin: int
    end: int
    members: list[tuple[int, int, int]]  # offset, size, CRC32

    @property
    def room(self) -> int:
        """Bytes on the disk: whole pages, and one page for the file system's list of them."""
        return (self.end // _PAGE - self.begin // _PAGE + 2) * _PAGE


class _Window(NamedTuple):
    """Samples that are fetched in one go: the held-out ones, or those of a group of packs."""

    catalog: Catalog
    numbers: ndarray  # (samples,)
    packs: ndarray  # (samples,) the pack that needs each


class Fetcher:
    """Fetches a task's bytes into its folder of copies."""

    def __init__(self, folder: Path, task: FetchTask) -> None:
        self.task = task
        self.copies = Copies(folder)
        # A fetcher that was killed left copies, whose bytes are not counted here.
        for copy in folder.glob("*.tar"):
            _remove(copy)
        # By URL of a shard; bytes and samples are those that are there or on their way.
        self.used: dict[str, int] = {}  # bytes of the disk
        self.there: dict[str, ndarray] = {}  # (samples,) bool
        self.needed_until: dict[str, int] = {}  # the last pack known to need it
        self.on_way: defaultdict[str, list[Future]] = defaultdict(list)  # its pieces, done or not
        self.failure: Exception | None = None  # of a thread
        self.free_threads = threading.Semaphore(2 * THREADS)
        self.fetched = {"fetched_bytes": 0, "requests": 0}
        self.counting = threading.Lock()
        self.started = time.monotonic()  # moved on by each wait for room
        self.stats_written = 0.0
        self.write_stats()

    def run(self) -> None:
        """Fetch all windows in order. Raises OSError or UserError if that is not possible."""
        before: set[str] = set()
        with ThreadPoolExecutor(THREADS) as pool:
            for window in self.windows():
                pieces, shards = self.pieces(window)
                self.refuse_small_bound(pieces, shards | before)
                before = shards
                for piece in sorted(pieces):
                    self.make_room(piece)
                    self.free_threads.acquire()
                    self.check()
                    self.on_way[piece.url].append(pool.submit(self.fetch, piece))
        self.check()
        self.write_stats()

    def windows(self) -> Iterator[_Window]:
        """Yield the held-out samples, then each group of packs from the slowest reader's on."""
        task = self.task
        train = task.config.train
        sets, numbers = task.held_out
        slowest = self.slowest
        if slowest == NOT_BEGUN and len(numbers):
            yield _Window(Catalog(sets), numbers, np.full(len(numbers), NOT_BEGUN))

        catalog = Catalog(task.data.train)
        order = pack_order(task.config, catalog, task.data.pack_counts, task.start)
        first = max(slowest, task.first_step * train.packs_per_step)
        end = task.max_steps * train.packs_per_step
        while first < end:
            epoch, number, first_pack = order.position(first)
            group = order.group(epoch, number)
            packs = np.arange(first_pack, first_pack + len(group))
            # Only packs of this run's steps that this machine's replicas read.
            replicas = packs % train.packs_per_step // task.share
            is_read = (packs >= first) & (packs < end) & np.isin(replicas, task.replicas)
            sizes = np.diff(group.starts)
            of_pack = np.repeat(is_read, sizes)
            yield _Window(catalog, group.samples[of_pack], np.repeat(packs, sizes)[of_pack])
            first = first_pack + len(group)

    @property
    def slowest(self) -> int:
        """Pack that the slowest reader reads."""
        return int(self.copies.readers()[:, 0].min())

    def pieces(self, window: _Window) -> tuple[list[_Piece], set[str]]:
        """Return pieces of what the copies lack for a window, and the window's remote shards.

        From now on the samples count as there, and the shards are kept until readers have passed
        the window.
        """
        pieces: list[_Piece] = []
        shards = set()
        for url, tables, own, places in window.catalog.by_shard(window.numbers):
            if not is_remote(url):
                continue
            packs = window.packs[own]
            shards.add(url)
            self.needed_until[url] = max(self.needed_until.get(url, NOT_BEGUN), int(packs.max()))

            # The first pack that needs each sample of the shard, `never` where none is lacking.
            samples = tables["samples"]
            there = self.there.setdefault(url, np.zeros(len(samples), bool))
            never = np.iinfo(np.int64).max
            need = np.full(len(samples), never)
            lacks = ~there[places]
            np.minimum.at(need, places[lacks], packs[lacks])
            there[places] = True

            # Of their members, those with a text or an image that a run reads.
            is_read = []
            for suffix in suffix_texts(tables):
                is_image = image_number(suffix) is not None
                reads_image = is_image and not window.catalog.layout.strips
                is_read.append(reads_image or suffix in TEXT_SUFFIXES)
            members = tables["members"]
            need = np.repeat(need, samples["members"])
            wanted = np.array(is_read)[members["suffix"]] & (members["size"] > 0) & (need < never)
            rows = members[wanted][["offset", "size", "crc32"]].tolist()
            pieces += merged(url, rows, need[wanted].tolist())
        return pieces, shards

    def refuse_small_bound(self, pieces: list[_Piece], shards: set[str]) -> None:
        """Raise UserError if the bound is less than the shards of two windows take.

        `pieces` are those to come, `shards` those of this window and of the one before, which
        readers may still read.
        """
        needed = sum(piece.room for piece in pieces) + sum(self.used.get(url, 0) for url in shards)
        if needed <= self.task.bound:
            return
        number = self.task.config.data.shuffle_shards
        what, remedy = f"two groups of data.shuffle_shards={number} shards", "data.shuffle_shards"
        if all(piece.need == NOT_BEGUN for piece in pieces):
            what, remedy = "the held-out samples", "eval.max_samples"
        raise UserError(
            f"data.cache_gib: copies of remote shards may take {bytes_text(self.task.bound)}, "
            f"but {what} need {bytes_text(needed)}. Raise it, or lower {remedy}"
        )

    def make_room(self, piece: _Piece) -> None:
        """Reserve room for a piece. Remove shards that all readers have passed, or wait for one."""
        while sum(self.used.values()) + piece.room > self.task.bound:
            slowest = self.slowest
            passed = [url for url in self.used if self.needed_until[url] < slowest]
            url = min(passed, key=self.needed_until.get, default="")
            # Bytes may still be on their way to a shard that readers have passed: they skip the
            # rest of a damaged sample.
            if passed and all(future.done() for future in self.on_way[url]):
                _remove(self.copies.path(url))
                del self.used[url], self.there[url], self.on_way[url]
                continue
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self.started += _SECONDS_BETWEEN_LOOKS
            self.check()
        self.used[piece.url] = self.used.get(piece.url, 0) + piece.room

    def check(self) -> None:
        """Raise a thread's failure; write the stats once a second."""
        if self.failure is not None:
            raise self.failure
        if time.monotonic() - self.stats_written > _SECONDS_BETWEEN_STATS:
            self.stats_written = time.monotonic()
            self.write_stats()

    def write_stats(self) -> None:
        stats = {
            **self.fetched,
            "seconds": time.monotonic() - self.started,
            "cache_bytes": sum(self.used.values()),
        }
        with writing(self.copies.folder):
            write_whole(self.copies.folder / "stats", compact_json(stats))

    def fetch(self, piece: _Piece) -> None:
        """Fetch a piece into its copy, in a thread; note members that are wrong, or a failure."""
        try:
            retry_seconds = self.task.config.data.io_retry_seconds
            # Bytes that are wrong twice are wrong in the store.
            for _ in range(2):
                content = read_range(piece.url, piece.begin, piece.end, retry_seconds)
                with self.counting:
                    self.fetched["fetched_bytes"] += len(content)
                    self.fetched["requests"] += 1
                wrong = []
                for offset, size, crc32 in piece.members:
                    begin = offset - piece.begin
                    if zlib.crc32(content[begin : begin + size]) != crc32:
                        wrong.append(f"{offset} {piece.url}\n")
                if not wrong:
                    break
            copy = self.copies.path(piece.url)
            with writing(self.copies.folder):
                copy.touch()
                with copy.open("r+b") as file:
                    file.seek(piece.begin)
                    file.write(content)
                if wrong:
                    with (self.copies.folder / "damaged").open("a") as file:
                        file.write("".join(wrong))
        except UserError as error:
            # Readers are told at once: `check` may wait for threads that still try again.
            self.failure = error
            why = str(error)
            if isinstance(error, StoreError) and error.code // 100 != 4:  # it may answer later
                why += (
                    f"; data.io_retry_seconds is {retry_seconds:g}. Start "
                    "again when the store answers: a run resumes from its newest checkpoint"
                )
            self.copies.give_up(why)
        finally:
            self.free_threads.release()


def _remove(copy: Path) -> None:
    """Remove a copy, emptied first: readers that have it open would keep its bytes on the disk."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(copy, 0)
        copy.unlink()


def merged(url: str, members: list[tuple[int, int, int]], needs: list[int]) -> list[_Piece]:
    """Return pieces that cover all members: of at most PIECE bytes, or of one larger member.

    `members` are offset, size and CRC32; `needs` the first pack that needs each.
    """
    gap = GAP
    if url.startswith("hf:"):
        gap = GAP_OF_HUB
    pieces: list[_Piece] = []
    for (offset, size, crc32), need in sorted(zip(members, needs, strict=True)):
        own = _Piece(need, url, offset, offset + size, [(offset, size, crc32)])
        last = pieces[-1] if pieces else None
        if last and offset - last.end <= gap and own.end - last.begin <= PIECE:
            last.members.extend(own.members)
            pieces[-1] = last._replace(need=min(last.need, need), end=own.end)
        else:
            pieces.append(own)
    return pieces
