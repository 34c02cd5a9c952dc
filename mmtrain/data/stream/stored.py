"""The data sets of a run, counted once, on all cores, into files that every process maps.

configuration --data_sets--> DataSet: tars, weight, format
    --store_set: indexes made, samples counted--> StoredSet

tars and indexes --sizes, times--> CACHE/catalog/<data set>/<state>/, the catalogue:
    each table of `index.TABLES` over all shards, with each shard's own suffixes
    firsts    (tables, shards + 1) i8: number of each shard's first row of each table
    paths     (shards,) of the tars
catalogue, layout, tokenizer, ... --> <key>/ in it, a run's view:
    lengths   (samples,) i4 tokens, those of images included; UNUSABLE; negative: held out
    tiles     (samples,) i4 tiles of each sample
    shards    (shards,) SHARDS
    <order>-<epochs>   by `pack_counts`

A table is a file NAME.npy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple, TextIO

import numpy as np
from numpy import ndarray

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import A_DAY, held, leftovers, whole_file
from mmtrain.base.errors import UserError
from mmtrain.base.version import VERSION
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.config.schema import DataSection, RunConfig, SampleFormatName, Shards
from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.detection import sample_format
from mmtrain.data.shards.index import (
    MAKE,
    MEND,
    TABLES,
    Faults,
    Header,
    Tables,
    faults_of,
    index_path,
    other_reading,
    read_tables,
    sums_of,
)
from mmtrain.data.shards.indexing import ensure_indexes, index_headers, raise_all
from mmtrain.data.shards.pool import Advance, results_of
from mmtrain.data.shards.remote import Tar
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.order import ANY_SIZE, UNUSABLE, Capacity
from mmtrain.facts.models import models_of
from mmtrain.layouts.layout import ImageLayout, UnfitImage

# Samples that are not held out, fit a pack, are UNUSABLE, or fit none, held-out ones too; the most
# tiles a token of those that fit; and a digest of samples, bytes included, and lengths.
SHARDS = np.dtype(
    [
        ("kept", "<i8"),
        ("fits", "<i8"),
        ("unusable", "<i8"),
        ("tiles_per_token", "<f8"),
        ("digest", "V32"),
    ]
)
# They take 0.6 s and 65 MB at 1,000 samples each.
_SHARDS_A_TASK = 64
UNREADABLE = (OSError, ValueError, TokenError)  # of a .npy file that is missing or damaged
_SIZES_KEPT = 1 << 17  # of images; cutting one takes 4 to 30 us


class DataSet(NamedTuple):
    """Shards that are drawn from together."""

    shards: tuple[Tar, ...]
    weight: float = 1.0
    name: str = ""  # where there are several
    form: SampleFormat = LLAVA
    key: str = ""  # the configuration's


class StoredSet(NamedTuple):
    """A data set whose samples are counted: what a process needs to open it."""

    view: Path  # it lies in its catalogue
    measure: Measure
    weight: float = 1.0
    name: str = ""  # where there are several


class StoredData(NamedTuple):
    """All data of a run."""

    train: tuple[StoredSet, ...]
    held_out: StoredSet | None  # of eval.shards
    pack_counts: Sequence[int] = ()  # of each group, for a run of whole epochs


@dataclass(frozen=True)
class Measure:
    """The settings that decide how long samples are, and which of them a run trains on."""

    form: SampleFormat
    text: str  # fingerprint of the texts' lengths
    layout: ImageLayout
    max_image_pixels: int = MAX_IMAGE_PIXELS
    capacity: Capacity = ANY_SIZE
    held_out_fraction: float | None = None

    def shard(self, tables: Tables) -> tuple[ndarray, ndarray, Faults]:
        """Return (samples,) int32 lengths and tiles of a shard, as a view has them, and the samples
        that can never be trained on.
        """
        samples = tables["samples"]
        counts = samples["images"]
        of_images, unfit = positions_and_tiles(tables, self.layout)
        # Of a sample with several faults the format's counts, then the text's, then the layout's.
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

        lengths = _int32(tables[self.text] + sums_of(of_images[:, 0], counts))
        lengths[list(faults)] = UNUSABLE
        if self.held_out_fraction is not None:
            bound = math.ceil(self.held_out_fraction * 2**64)
            lengths[samples["key_hash"] < np.uint64(bound)] *= -1
        return lengths, _int32(sums_of(of_images[:, 1], counts)), faults


def _int32(values: ndarray) -> ndarray:
    """Return values as int32; what is larger is too long for any pack in any case."""
    return np.minimum(values, np.iinfo(np.int32).max).astype(np.int32)


def positions_and_tiles(tables: Tables, layout: ImageLayout) -> tuple[ndarray, Faults]:
    """Return (images, 2) int64 positions and tiles of each image, and samples with unfit ones.

    Both are 0 where an image cannot be cut.
    """
    images = tables["images"]
    if not layout.is_sized:
        of_image = (layout.positions_per_tile, 1) if layout.takes_images else (0, 0)
        return np.full((len(images), 2), of_image), {}

    # Each size is cut once: data sets have few.
    counts = tables["samples"]["images"]
    places = np.repeat(np.arange(len(counts)), counts)
    several = np.minimum(counts, 2)[places]
    columns = np.column_stack([images["width"], images["height"], several])
    kinds, kind_of_image = np.unique(columns, axis=0, return_inverse=True)
    kind_of_image = kind_of_image.reshape(-1)  # numpy 2.0.0 returns (images, 1)
    of_kind = np.zeros((len(kinds), 2), np.int64)
    faults: Faults = {}
    for kind, size in enumerate(kinds.tolist()):
        of_kind[kind], fault = _cut(layout, *size)
        if fault is not None:
            faults |= dict.fromkeys(places[kind_of_image == kind].tolist(), fault)
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


def mapped(view: Path) -> Tables:
    """Map the tables of a view and its catalogue.

    Raises UNREADABLE for one that is not whole.
    """
    return {name: _mapped(path) for name, path in _paths(view).items()}


def _mapped(path: Path) -> ndarray:
    return np.asarray(np.lib.format.open_memmap(path, "r"))


def _paths(view: Path) -> dict[str, Path]:
    paths = {}
    for name in (*TABLES, "firsts", "paths"):
        paths[name] = view.parent / f"{name}.npy"
    for name in ("lengths", "tiles", "shards"):
        paths[name] = view / f"{name}.npy"
    return paths


def _missing(view: Path) -> dict[str, Path]:
    """Return the files of a view and its catalogue that are not whole."""
    missing = {}
    for name, path in _paths(view).items():
        try:
            _mapped(path)
        except UNREADABLE:
            missing[name] = path
    return missing


def data_sets(data: DataSection) -> list[DataSet]:
    """Return the data sets that a configuration names.

    Raises what `expand_shards` and `sample_format` raise.
    """
    if data.sets is None:
        return [_data_set(data, data.shards, "data.shards", data.format)]
    sets = []
    for number, one in enumerate(data.sets):
        key = f"data.sets.{number}.shards"
        form = one.format or data.format
        made = _data_set(data, one.shards, key, form)
        sets.append(made._replace(weight=one.weight, name=one.name))
    return sets


def evaluated_set(config: RunConfig) -> DataSet | None:
    """Return the data set of `eval.shards`, if any.

    Raises what `expand_shards` and `sample_format` raise.
    """
    if config.eval.shards is None:
        return None
    return _data_set(config.data, config.eval.shards, "eval.shards", config.eval.format)


def _data_set(
    data: DataSection,
    shards: Shards,
    key: str,
    form: SampleFormatName,
) -> DataSet:
    tars = expand_shards(shards, key, data.allow_pipe, data.cache_gib)
    asked = SampleFormat(form, data.caption_key, data.caption_prompt)
    return DataSet(tars, form=sample_format(asked, tars, key), key=key)


def store_set(
    config: RunConfig,
    one: DataSet,
    workers: int = 1,
    stream: TextIO | None = None,
    others_wait: bool = False,
) -> StoredSet:
    """Count the samples of a run's data set, unless the cache has them; missing indexes are made.

    With `others_wait` other processes wait for this one, with a timeout: indexing that takes long
    is refused.
    """
    data = config.data
    layout = models_of(config).layout
    how = Tokenization(config.model.llm.path, data.template, layout, one.form)
    measure = Measure(
        one.form,
        how.fingerprint,
        layout,
        data.max_image_pixels,
        Capacity(data.pack_length, data.max_tiles_per_pack),
        config.eval.fraction,
    )
    make = functools.partial(
        ensure_indexes,
        one.shards,
        how,
        workers=workers,
        stream=stream,
        others_wait=others_wait,
    )
    stored = count_samples(one.shards, measure, make, workers, stream)
    return stored._replace(weight=one.weight, name=one.name)


def stored_data(config: RunConfig) -> StoredData:
    """Count all data of a run in this process, which may share its cores. Raises UserError."""
    train = [store_set(config, one) for one in data_sets(config.data)]
    held_out = evaluated_set(config)
    return StoredData(tuple(train), held_out and store_set(config, held_out))


def count_samples(
    tars: Sequence[Tar],
    measure: Measure,
    make: Callable[[], None] | None = None,
    workers: int = 1,
    stream: TextIO | None = None,
) -> StoredSet:
    """Count a data set into its view in the cache; make that and its catalogue if need be.

    `make` makes indexes or lengths that are missing. Raises UserError for indexes that are stale or
    damaged, for missing ones without `make`, and for a cache that cannot be written. Cost: 1 us a
    sample of one of the cores.
    """
    view = _view(tars, measure)
    if not _missing(view):
        return StoredSet(view, measure)
    headers, missing = index_headers(tars, measure.text)
    if missing and make is not None:
        make()
        headers, missing = index_headers(tars, measure.text)
        view = _view(tars, measure)
    if missing:
        raise UserError(
            f"{missing[0]}: its index has no token lengths for this format, tokenizer and "
            f"template. Make them: {MAKE} {missing[0]}"
        )
    catalogue = view.parent
    with writing(view), contextlib.ExitStack() as written:
        view.mkdir(parents=True, exist_ok=True)
        written.enter_context(held(catalogue.parent / ".lock", wait=True))
        for leftover in catalogue.rglob(leftovers("*")):  # of killed processes
            if time.time() - leftover.stat().st_mtime > A_DAY:
                leftover.unlink()
        # Shards or indexes were replaced. Ranks may still be about to open a younger catalogue.
        for other in catalogue.parent.iterdir():
            if other != catalogue and time.time() - other.stat().st_mtime > A_DAY:
                shutil.rmtree(other, ignore_errors=True)
        files = {}
        for name, path in _missing(view).items():
            files[name] = written.enter_context(whole_file(path))
        if files:
            _count_all(tars, measure, headers, files, workers, stream)
    return StoredSet(view, measure)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError where the cache refuses to keep a file or a folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}). Free space, "
            "or set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _view(tars: Sequence[Tar], measure: Measure) -> Path:
    """Return where a view is kept while tars and indexes stay."""
    data_set = hashlib.sha256()
    state = hashlib.sha256()
    for tar in tars:
        data_set.update(os.fsencode(f"{tar}\0{tar.absolute()}\0"))
        for path in (tar, index_path(tar)):
            with contextlib.suppress(OSError):  # without an index there is no view yet
                found = path.stat()
                state.update(f"{found.st_size} {found.st_mtime_ns} ".encode())
    key = hashlib.sha256(f"{VERSION} {measure}".encode())
    names = [digest.hexdigest()[:24] for digest in (data_set, state, key)]
    return cache_folder("catalog").joinpath(*names)


def _count_all(
    tars: Sequence[Tar],
    measure: Measure,
    headers: Sequence[Header],
    files: Mapping[str, Path],
    workers: int,
    stream: TextIO | None,
) -> None:
    """Write tables of a view and its catalogue."""
    firsts = {}
    for name in TABLES:
        firsts[name] = np.cumsum([0, *(header.tables[name] for header in headers)])
    small = {
        "firsts": np.array(list(firsts.values())),
        "paths": np.array(list(map(str, tars))),
    }
    firsts |= dict.fromkeys(("lengths", "tiles"), firsts["samples"])
    # The files have their whole size at once: each task fills its part.
    for name in files.keys() & firsts.keys():
        dtype = TABLES.get(name, np.dtype(np.int32))
        np.lib.format.open_memmap(files[name], "w+", dtype, (int(firsts[name][-1]),))

    samples = int(firsts["samples"][-1])
    count = functools.partial(_count, tars, measure, headers, firsts, files)
    tasks = range(0, len(tars), _SHARDS_A_TASK)
    shards = []
    failures = []
    for own, own_failures in results_of(count, tasks, workers, "samples counted", samples, stream):
        shards += own
        failures += own_failures
    raise_all(failures, len(tars))
    small["shards"] = np.array(shards, SHARDS)
    for name in files.keys() & small.keys():
        with files[name].open("wb") as file:
            np.save(file, small[name])


def _count(
    tars: Sequence[Tar],
    measure: Measure,
    headers: Sequence[Header],
    firsts: Mapping[str, ndarray],
    files: Mapping[str, Path],
    begin: int,
    advance: Advance,
) -> tuple[list[tuple], list[UserError]]:
    """Write what concerns the shards from `begin` on, which are _SHARDS_A_TASK.

    Return their rows of SHARDS, and what keeps them from being read.
    """
    shards = []
    failures = []
    written: dict[str, list[ndarray]] = {name: [] for name in files.keys() & firsts.keys()}
    for shard, tar in enumerate(tars[begin : begin + _SHARDS_A_TASK], begin):
        try:
            header, tables = read_tables(tar)
            if header != headers[shard]:
                raise UserError(f"{tar}: its index has changed while it was read. Start again")
            if measure.form.reading not in header.readings:
                raise other_reading(tar, header)
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
        digest = hashlib.sha256()
        crc32 = tables["members"]["crc32"]
        for values in (tables["keys"], tables["samples"]["keys"], crc32, lengths):
            digest.update(values.tobytes())

        fits = measure.capacity.fit(lengths, tiles)
        shards.append(
            (
                np.count_nonzero(lengths >= 0),
                np.count_nonzero(fits),
                len(faults),
                (tiles[fits] / lengths[fits]).max(initial=0.0),
                digest.digest(),
            )
        )
        advance(len(lengths))
    if not failures:
        for name, parts in written.items():
            values = np.concatenate(parts)
            with files[name].open("r+b") as stream:
                # Written, not mapped: a full disk would kill a process that writes to a map.
                behind = int(firsts[name][-1] - firsts[name][begin])
                stream.seek(-behind * values.itemsize, os.SEEK_END)
                values.tofile(stream)
    return shards, failures
