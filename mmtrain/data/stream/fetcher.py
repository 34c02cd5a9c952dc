"""Fetch ranges of remote shards into sparse copies: the process that `fetching` starts.

held-out samples, then the groups of packs --members that readers read--> ranges of each shard
    --merged over small gaps, cut into pieces--> GETs by threads, by first need
    --checksums compared--> pwrite

Room is made by removing whole shards that all readers have passed, those needed longest ago first.
"""

import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

# Bytes that are fetched to save a request: of 8 machines each fetches 1.06 times what it needs with
# 64 KiB. The hub allows few requests.
GAP = 64 << 10
GAP_OF_HUB = 4 << 20
PIECE = 8 << 20
_PAGE = 4096  # of a file: a sparse one takes whole ones
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_STATS = 1.0


class _Piece(NamedTuple):
    """Members of a shard that are fetched together."""

    need: int  # the first pack that needs one
    url: str
    begin: int
    end: int
    members: list[tuple[int, int, int]]  # offset, size, CRC32

    @property
    def room(self) -> int:
        """Bytes on the disk: whole pages, and one for a file system's list of them."""
        return (self.end // _PAGE - self.begin // _PAGE + 2) * _PAGE


class _Window(NamedTuple):
    """Samples that are needed at about one time."""

    catalog: Catalog
    numbers: ndarray  # (samples,)
    packs: ndarray  # (samples,) that need them


class Fetcher:
    """Fetches a task's bytes into its folder of copies."""

    def __init__(self, folder: Path, task: FetchTask) -> None:
        self.task = task
        self.copies = Copies(folder)
        for copy in folder.glob("*.tar"):  # of a fetcher that was killed: not counted here
            copy.unlink()
        self.used: dict[str, int] = {}  # bytes of each shard that are there or on their way
        self.needed_until: dict[str, int] = {}  # last pack that is known to need a shard
        self.there: dict[str, ndarray] = {}  # samples of a shard that are there or on their way
        self.failure: Exception | None = None
        self.free_threads = threading.Semaphore(2 * THREADS)
        self.fetched = {"fetched_bytes": 0, "requests": 0}
        self.started = time.monotonic()  # later by what it has waited for room
        self.looked = 0.0
        self.write_stats()

    def run(self) -> None:
        before: set[str] = set()
        with ThreadPoolExecutor(THREADS) as pool:
            for window in self.windows():
                pieces, shards = self.pieces(window)
                self.refuse_small_bound(pieces, shards | before)
                before = shards
                for piece in sorted(pieces):
                    self.make_room(piece)
                    self.free_threads.acquire()
                    self.look()
                    pool.submit(self.fetch, piece)
        self.look()
        self.write_stats()

    def windows(self) -> Iterator[_Window]:
        """Yield the held-out samples, then the groups from where the readers are."""
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
            replicas = packs % train.packs_per_step // task.share
            is_read = (packs >= first) & (packs < end) & np.isin(replicas, task.replicas)
            sizes = np.diff(group.starts)
            of_pack = np.repeat(is_read, sizes)
            yield _Window(catalog, group.samples[of_pack], np.repeat(packs, sizes)[of_pack])
            first = first_pack + len(group)

    @property
    def slowest(self) -> int:
        """The pack of the reader that is least far."""
        return int(self.copies.readers()[:, 0].min())

    def pieces(self, window: _Window) -> tuple[list[_Piece], set[str]]:
        """Return what a window lacks, and its remote shards, which are kept until it has passed."""
        pieces: list[_Piece] = []
        shards = set()
        for url, tables, own, places in window.catalog.by_shard(window.numbers):
            if not is_remote(url):
                continue
            packs = window.packs[own]
            shards.add(url)
            self.needed_until[url] = max(self.needed_until.get(url, NOT_BEGUN), int(packs.max()))
            there = self.there.setdefault(url, np.zeros(len(tables["samples"]), bool))
            lacks = ~there[places]
            need = np.full(len(there), np.iinfo(np.int64).max)
            np.minimum.at(need, places[lacks], packs[lacks])
            there[places] = True

            members = tables["members"]
            read_suffixes = []
            for suffix in suffix_texts(tables):
                is_image = image_number(suffix) is not None
                is_read = is_image and not window.catalog.layout.strips
                read_suffixes.append(is_read or suffix in TEXT_SUFFIXES)
            need = np.repeat(need, tables["samples"]["members"])
            wanted = np.array(read_suffixes)[members["suffix"]] & (members["size"] > 0)
            wanted &= need < np.iinfo(np.int64).max
            rows = members[wanted][["offset", "size", "crc32"]].tolist()
            pieces += merged(url, rows, need[wanted].tolist())
        return pieces, shards

    def refuse_small_bound(self, pieces: list[_Piece], shards: set[str]) -> None:
        """Raise UserError where a window and the one before it may not be there together."""
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
        """Wait until a piece fits; shards that all readers have passed go."""
        while sum(self.used.values()) + piece.room > self.task.bound:
            slowest = self.slowest
            passed = [url for url in self.used if self.needed_until[url] < slowest]
            if passed:
                url = min(passed, key=self.needed_until.get)
                self.copies.path(url).unlink(missing_ok=True)
                del self.used[url], self.there[url]
                continue
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            self.started += _SECONDS_BETWEEN_LOOKS
            self.look()
        self.used[piece.url] = self.used.get(piece.url, 0) + piece.room

    def look(self) -> None:
        """Raise what has failed, and write what was fetched."""
        if self.failure is not None:
            raise self.failure
        if time.monotonic() - self.looked > _SECONDS_BETWEEN_STATS:
            self.looked = time.monotonic()
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
        try:
            # What is wrong twice is wrong in the store.
            for _ in range(2):
                retry_seconds = self.task.config.data.io_retry_seconds
                content = read_range(piece.url, piece.begin, piece.end, retry_seconds)
                self.fetched["fetched_bytes"] += len(content)
                self.fetched["requests"] += 1
                wrong = []
                for offset, size, crc32 in piece.members:
                    begin = offset - piece.begin
                    if zlib.crc32(content[begin : begin + size]) != crc32:
                        wrong.append(f"{offset} {piece.url}\n")
                if not wrong:
                    break
            with writing(self.copies.folder):
                with self.copies.path(piece.url).open("ab"):
                    pass
                # os.pwrite would write a part onto a disk that is nearly full
                with self.copies.path(piece.url).open("r+b") as copy:
                    copy.seek(piece.begin)
                    copy.write(content)
                if wrong:
                    with (self.copies.folder / "damaged").open("a") as file:
                        file.write("".join(wrong))
        except UserError as error:
            self.failure = error
            why = str(error)
            if isinstance(error, StoreError) and not error.is_refusal:
                why += (
                    f"; data.io_retry_seconds is {self.task.config.data.io_retry_seconds:g}. Start "
                    "again when the store answers: a run resumes from its newest checkpoint"
                )
            self.copies.give_up(why)  # at once: other threads may still try again
        finally:
            self.free_threads.release()


def merged(url: str, members: list[tuple[int, int, int]], needs: list[int]) -> list[_Piece]:
    """Return pieces of at most PIECE bytes, or one larger member, that cover all members."""
    gap = GAP_OF_HUB if url.startswith("hf:") else GAP
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
