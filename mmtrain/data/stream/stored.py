"""The data sets of a run, counted once and kept in the cache for all its processes.

configuration --data_sets--> DataSet: tars, weight, format
    --store_set: indexes made, samples counted--> StoredSet: files that every process maps
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from numpy import ndarray

from mmtrain.config.schema import DataSection, RunConfig, SampleFormatName, Shards
from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.detection import sample_format
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.counting import Measure, StoredSet, count_samples
from mmtrain.data.stream.order import Capacity
from mmtrain.facts.models import models_of


class DataSet(NamedTuple):
    """Shards that are drawn from together."""

    shards: tuple[Path, ...]
    weight: float = 1.0
    name: str = ""  # where there are several
    form: SampleFormat = LLAVA


class StoredData(NamedTuple):
    """All data of a run."""

    train: tuple[StoredSet, ...]
    held_out: StoredSet | None  # of eval.shards
    packs: Sequence[int] | ndarray = ()  # of each group, for a run of whole epochs


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
        sets.append(_data_set(data, one.shards, key, form, one.weight, one.name))
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
    weight: float = 1.0,
    name: str = "",
) -> DataSet:
    tars = expand_shards(shards, key, data.allow_pipe)
    asked = SampleFormat(form, data.caption_key, data.caption_prompt)
    return DataSet(tars, weight, name, sample_format(asked, tars, key))


def store_set(
    config: RunConfig,
    one: DataSet,
    held_out_fraction: float | None = None,
    *,
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
        held_out_fraction,
    )
    make = functools.partial(
        ensure_indexes,
        one.shards,
        how,
        workers=workers,
        stream=stream,
        others_wait=others_wait,
    )
    stored = count_samples(one.shards, measure, make, workers=workers, stream=stream)
    return stored._replace(weight=one.weight, name=one.name)


def stored_data(config: RunConfig) -> StoredData:
    """Count all data of a run in this process, which may share its cores. Raises UserError."""
    fraction = config.eval.fraction
    train = [store_set(config, one, fraction) for one in data_sets(config.data)]
    held_out = evaluated_set(config)
    return StoredData(tuple(train), held_out and store_set(config, held_out))
