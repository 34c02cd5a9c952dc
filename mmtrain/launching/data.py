"""A run's data as its launcher sees them: there, of a known format, indexed, held out or not."""

import sys
from collections.abc import Sequence
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.detection import AUTO
from mmtrain.data.shards.remote import Tar
from mmtrain.data.shards.shard_list import refuse_empty_shards, refuse_unfinished_shards
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.pack_counts import with_packs
from mmtrain.data.stream.stored import (
    DataSet,
    StoredData,
    data_sets,
    evaluated_set,
    store_set,
)
from mmtrain.demo.data import make_demo_data
from mmtrain.runtime.gpus import usable_cores


def with_formats(config: RunConfig) -> RunConfig:
    """Return the configuration with the format of each data set; make the demo's data on first use.

    Raises what `data_sets` raises.
    """
    make_demo_data(config)
    return _with_formats(config, data_sets(config.data), evaluated_set(config))


def _with_formats(
    config: RunConfig, sets: Sequence[DataSet], held_out: DataSet | None
) -> RunConfig:
    data = config.data
    names = [one.form.name for one in sets]
    changes: dict[str, Any] = {}
    if data.format == AUTO:
        changes["data.format"] = names[0]
    if data.sets is not None:
        changes["data.sets"] = tuple(
            section.changed({"format": name})
            for section, name in zip(data.sets, names, strict=True)
        )
    if held_out is not None:
        changes["eval.format"] = held_out.form.name
    return config.changed(changes)


def check_data(config: RunConfig, others_wait: bool) -> tuple[RunConfig, StoredData]:
    """Refuse unusable data before a rank starts, index and count the rest on all cores.

    Returns `with_formats(config)`, and what the ranks open. With `others_wait` other processes wait
    for this one, with a timeout: indexing that takes long is refused.
    """
    make_demo_data(config)
    sets = data_sets(config.data)
    held_out = evaluated_set(config)
    config = _with_formats(config, sets, held_out)
    found = list(sets)
    if held_out is not None:
        _refuse_trained_on(held_out, sets)
        found.append(held_out)
    for one in found:
        refuse_empty_shards(one.shards, one.key)
        refuse_unfinished_shards(one.shards, one.key)
    stored = []
    for one in found:
        stored.append(store_set(config, one, usable_cores(), sys.stdout, others_wait))
        Catalog(stored[-1:]).refuse_useless_shards(one.key)
    of_evaluation = held_out and stored.pop()
    data = StoredData(tuple(stored), of_evaluation)
    return config, with_packs(config, data, usable_cores(), sys.stdout)


def _refuse_trained_on(held_out: DataSet, sets: Sequence[DataSet]) -> None:
    trained: set[Tar] = set()
    for one in sets:
        trained |= _resolved(one.shards)
    if both := trained & _resolved(held_out.shards):
        raise UserError(
            f"eval.shards: {min(map(str, both))} is in data.shards too; scores on samples that are "
            "trained on say nothing of others. Leave some shards out of data.shards, or set "
            "eval.fraction instead"
        )


def _resolved(tars: Sequence[Tar]) -> set[Tar]:
    return {tar.resolve() for tar in tars}
