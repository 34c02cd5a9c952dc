"""Count the samples of a data set once, on all cores, into files that every process maps.

tars and indexes --sizes, times--> CACHE/catalog/<data set>-<state>/, the catalogue:
    each table of `index.TABLES` over all shards, with each shard's own suffixes
    firsts    (tables, shards + 1) i8: number of each shard's first row of each table
    paths     (shards,) of the tars
catalogue, layout, tokenizer, ... --> <key>/ in it, a run's view:
    lengths   (samples,) i4 tokens, those of images included; UNUSABLE; negative: held out
    tiles     (samples,) i4 tiles of each sample
    shards    (shards,) SHARDS
    digest    of all that decides which samples there are, and how they are planned

A table is a file NAME.npy.
"""

import contextlib
import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy import ndarray

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held, whole_folder
from mmtrain.base.errors import UserError
from mmtrain.base.progress import ProgressBar
from mmtrain.base.version import VERSION
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.shards.index import (
    MAKE,
    MEND,
    TABLES,
    Faults,
    Tables,
    faults_of,
    index_path,
    read_tables,
    sums_of,
)
from mmtrain.data.shards.index import VERSION as INDEX_VERSION
from mmtrain.data.shards.indexing import index_headers, raise_all
from mmtrain.data.shards.pool import Advance, worker_pool
from mmtrain.data.stream.order import UNUSABLE, Capacity
from mmtrain.layouts.layout import ImageLayout, UnfitImage

CATALOGUE = (*TABLES, "firsts", "paths")
VIEW = ("lengths", "tiles", "shards", "digest")
# Samples that are not held out, fit a pack, are UNUSABLE, or fit none, held-out ones too; and the
# most tiles a token of those that fit.
SHARDS = np.dtype(
    [
        ("kept", "<i8"),
        ("fits", "<i8"),
        ("unusable", "<i8"),
        ("overlong", "<i8"),
        ("tiles_per_token", "<f8"),
    ]
)
# Of a process at a time: of 1,000 samples they take 10 ms, of 10,000 100 MB of memory.
_SHARDS_A_TASK = 64
_SHOWN_FROM = 1_000_000  # samples: they take a second
_SIZES_KEPT = 1 << 17  # of images; cutting one takes 4 to 30 us
_LONGEST = np.iinfo(np.int32).max

MakeIndexes = Callable[[Sequence[Path]], None]  # of shards that lack one


@dataclass(frozen=True)
class Measure:
    """The settings that decide how long samples are, and which of them a run trains on."""

    form: SampleFormat
    text: str  # fingerprint of the texts' lengths
    layout: ImageLayout
    max_image_pixels: int
    capacity: Capacity
    held_out_fraction: float | None = None

    def shard(self, tables: Tables) -> tuple[ndarray, ndarray, Faults]:
        """Return (samples,) int32 lengths and tiles of a shard, as a view has them, and the samples
        that can never be trained on.
        """
        samples = tables["samples"]
        counts = samples["images"]
        of_images, unfit = positions_and_tiles(tables, self.layout)
        # The first fault that a sample is found to have stays.
        faults = unfit | faults_of(tables, self.text, self.form.reading)
        if self.layout.takes_images:
            images = tables["images"]
            limit = self.max_image_pixels
            sample_of = np.repeat(np.arange(len(counts)), counts)
            pixels = images["width"].astype(np.int64) * images["height"]
            for image in np.flatnonzero(pixels > limit).tolist():
                width, height = images[image].tolist()
                detail = f"{width} x {height} pixels; data.max_image_pixels is {limit:,}"
                faults.setdefault(int(sample_of[image]), ("too_many_pixels", detail))
        elif not self.layout.strips:
            for place in np.flatnonzero(counts).tolist():
                faults.setdefault(place, ("no_encoder", f"{counts[place]} images"))

        # above 32 bits: too long for any pack in any case
        lengths = np.minimum(tables[self.text] + sums_of(of_images[:, 0], counts), _LONGEST)
        lengths = lengths.astype(np.int32)
        lengths[list(faults)] = UNUSABLE
        if self.held_out_fraction is not None:
            bound = math.ceil(self.held_out_fraction * 2**64)
            lengths[samples["key_hash"] < np.uint64(bound)] *= -1
        tiles = np.minimum(sums_of(of_images[:, 1], counts), _LONGEST)
        return lengths, tiles.astype(np.int32), faults


def positions_and_tiles(tables: Tables, layout: ImageLayout) -> tuple[ndarray, Faults]:
    """Return (images, 2) int64 positions and tiles of each image, and samples with unfit ones.

    Both are 0 where an image cannot be cut.
    """
    images = tables["images"]
    counts = tables["samples"]["images"]
    if not layout.is_sized:
        of_image = (layout.positions_per_tile, 1) if layout.takes_images else (0, 0)
        return np.tile(np.array(of_image, np.int64), (len(images), 1)), {}

    # Each size is cut once: data sets have few.
    places = np.repeat(np.arange(len(counts)), counts)
    columns = np.column_stack([images["width"], images["height"], counts[places] == 1])
    kinds, kind_of_image = np.unique(columns, axis=0, return_inverse=True)
    kind_of_image = kind_of_image.reshape(-1)
    of_kind = np.zeros((len(kinds), 2), np.int64)
    unfit = {}
    for kind, (width, height, is_alone) in enumerate(kinds.tolist()):
        of_kind[kind], fault = _cut(layout, width, height, 1 if is_alone else 2)
        if fault is not None:
            unfit[kind] = fault
    faults: Faults = {}
    for image in np.flatnonzero(np.isin(kind_of_image, list(unfit))).tolist():
        faults[int(places[image])] = unfit[int(kind_of_image[image])]
    return of_kind[kind_of_image], faults


@functools.lru_cache(_SIZES_KEPT)
def _cut(
    layout: ImageLayout, width: int, height: int, images: int
) -> tuple[tuple[int, int], tuple[str, str] | None]:
    """Return positions and tiles of an image, and why it cannot be cut."""
    if not (width and height):
        return (0, 0), ("undecodable_image", "its header does not contain its size")
    try:
        tiling = layout.tiling(width, height, images)
    except UnfitImage as error:
        return (0, 0), ("unfit_shape", str(error))
    return (tiling.positions, tiling.tiles), None


def mapped(folder: Path, names: Sequence[str]) -> Tables:
    """Map tables of the cache. Raises OSError, ValueError or EOFError for one that is not whole."""
    tables = {}
    for name in names:
        tables[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return tables


def _is_whole(folder: Path, names: Sequence[str]) -> bool:
    with contextlib.suppress(OSError, ValueError, EOFError):
        mapped(folder, names)
        return True
    return False


def count_samples(
    tars: Sequence[Path],
    measure: Measure,
    make: MakeIndexes | None = None,
    *,
    workers: int = 1,
    stream: TextIO | None = None,
) -> Path:
    """Return the view of a data set, in its catalogue in the cache; make both if need be.

    Shards without an index, or without such lengths, are given to `make`. Raises UserError for
    indexes that are stale or damaged, for missing ones without `make`, and for a cache that cannot
    be written. Cost: 0.5 us a sample of one of the cores.
    """
    folder = _catalogue(tars)
    key = hashlib.sha256(f"{VERSION} {measure}".encode()).hexdigest()[:24]
    if folder is not None and _is_whole(folder, CATALOGUE) and _is_whole(folder / key, VIEW):
        return folder / key
    rows = _rows(tars, measure)
    if None in rows and make is not None:
        make([tar for tar, of_shard in zip(tars, rows, strict=True) if of_shard is None])
        rows = _rows(tars, measure)
    if None in rows:
        tar = tars[rows.index(None)]
        raise UserError(
            f"{tar}: its index has no token lengths for this format, tokenizer and "
            f"template. Make them: {MAKE} {tar}"
        )
    folder = _catalogue(tars)
    assert folder is not None, "every shard has an index"
    firsts = np.cumsum([[0] * len(TABLES), *rows], axis=0, dtype=np.int64).T
    count = functools.partial(_count_all, tars, measure, firsts, workers, stream)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not _is_whole(folder, CATALOGUE):
                # with catalogues of shards or indexes that were replaced
                for other in folder.parent.glob(f"{folder.name.split('-')[0]}-*"):
                    shutil.rmtree(other)
                with whole_folder(folder) as unfinished:
                    (unfinished / key).mkdir()
                    count(unfinished, unfinished / key)
            elif not _is_whole(folder / key, VIEW):
                shutil.rmtree(folder / key, ignore_errors=True)
                with whole_folder(folder / key) as unfinished:
                    count(None, unfinished)
    except OSError as error:
        # else another process was faster, on a disk without locks
        if not _is_whole(folder / key, VIEW):
            raise UserError(
                f"{folder}: cannot be written ({error.strerror}). Free space, "
                "or set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return folder / key


def _catalogue(tars: Sequence[Path]) -> Path | None:
    """Return where a catalogue is kept while tars and indexes stay; None without all indexes."""
    data_set = hashlib.sha256(str(INDEX_VERSION).encode())
    state = hashlib.sha256()
    for tar in tars:
        data_set.update(os.fsencode(f"{tar}\0{tar.absolute()}\0"))
        try:
            for found in (tar.stat(), index_path(tar).stat()):
                state.update(f"{found.st_size} {found.st_mtime_ns} ".encode())
        except OSError:
            return None
    name = f"{data_set.hexdigest()[:24]}-{state.hexdigest()[:24]}"
    return cache_folder("catalog") / name


def _rows(tars: Sequence[Path], measure: Measure) -> list[tuple[int, ...] | None]:
    """Return the rows of each shard's tables; None without an index that can be measured."""
    rows: list[tuple[int, ...] | None] = []
    for header in index_headers(tars):
        of_shard = None
        if header and measure.text in header.texts and measure.form.reading in header.readings:
            of_shard = tuple(header.tables[name] for name in TABLES)
        rows.append(of_shard)
    return rows


def _count_all(
    tars: Sequence[Path],
    measure: Measure,
    firsts: ndarray,
    workers: int,
    stream: TextIO | None,
    catalogue: Path | None,
    view: Path,
) -> None:
    """Write a view, and a catalogue unless it is None."""
    folders = {"lengths": view, "tiles": view}
    if catalogue is not None:
        folders |= dict.fromkeys(TABLES, catalogue)
        np.save(catalogue / "firsts.npy", firsts)
        np.save(catalogue / "paths.npy", np.array(list(map(str, tars))))
    of_tables = dict(zip(TABLES, firsts, strict=True))
    of_tables |= {"lengths": firsts[0], "tiles": firsts[0]}
    for name, folder in folders.items():
        dtype = TABLES.get(name, np.dtype(np.int32))
        path = folder / f"{name}.npy"
        np.lib.format.open_memmap(path, "w+", dtype, (int(of_tables[name][-1]),))

    samples = int(firsts[0, -1])
    count = functools.partial(_count, tars, measure, of_tables, folders)
    tasks = range(0, len(tars), _SHARDS_A_TASK)
    digest = hashlib.sha256(f"{measure.text} {measure.layout.numbers}".encode())
    shards = []
    failures = []
    # A bar for what takes a second.
    shown = stream if samples > _SHOWN_FROM else None
    with (
        worker_pool(count, min(workers, len(tasks))) as run,
        ProgressBar("samples counted", samples, shown, is_brief=True) as progress,
    ):
        found = run(tasks, lambda through: progress.show(through, through))
        for _, (own, own_failures, own_digest) in found:
            shards += own
            failures += own_failures
            digest.update(own_digest)
    raise_all(failures, len(tars))
    np.save(view / "shards.npy", np.array(shards, SHARDS))
    np.save(view / "digest.npy", np.array(digest.hexdigest()))


def _count(
    tars: Sequence[Path],
    measure: Measure,
    firsts: Mapping[str, ndarray],
    folders: Mapping[str, Path],
    begin: int,
    advance: Advance,
) -> tuple[list[tuple], list[UserError], bytes]:
    """Write what concerns the shards from `begin` on, which are _SHARDS_A_TASK.

    Return their rows of SHARDS, what keeps them from being read, and a digest.
    """
    digest = hashlib.sha256()
    shards = []
    failures = []
    written: dict[str, list[ndarray]] = {name: [] for name in folders}
    for shard, tar in enumerate(tars[begin : begin + _SHARDS_A_TASK], begin):
        try:
            _, tables = read_tables(tar)
            for name in TABLES:
                rows = firsts[name][shard + 1] - firsts[name][shard]
                if len(tables[name]) != rows or measure.text not in tables:
                    raise UserError(f"{tar}: its index has changed while it was read. Start again")
            lengths, tiles, faults = measure.shard(tables)
            if np.count_nonzero(lengths == UNUSABLE) != len(faults):
                raise UserError(
                    f"{tar}: its index says neither length nor fault of a sample. "
                    f"Make it again: {MEND} {tar}"
                )
        except UserError as error:
            failures.append(error)
            continue
        tables |= {"lengths": lengths, "tiles": tiles}
        for name, parts in written.items():
            parts.append(tables[name])
        crc32 = tables["members"]["crc32"]
        for values in (tables["keys"], tables["samples"]["keys"], crc32, lengths):
            digest.update(values.tobytes())

        capacity = measure.capacity
        fits = capacity.fit(lengths, tiles)
        shards.append(
            (
                np.count_nonzero(lengths >= 0),
                np.count_nonzero(fits),
                len(faults),
                np.count_nonzero(lengths) - np.count_nonzero(capacity.fit(abs(lengths), tiles)),
                (tiles[fits] / lengths[fits]).max(initial=0.0),
            )
        )
        advance(len(lengths))
    if not failures:
        for name, parts in written.items():
            values = np.concatenate(parts)
            with (folders[name] / f"{name}.npy").open("r+b") as stream:
                behind = int(firsts[name][-1] - firsts[name][begin])
                stream.seek(-behind * values.itemsize, os.SEEK_END)
                values.tofile(stream)
    return shards, failures, digest.digest()
