"""A run's data as its launcher sees them: there, of a known format, indexed, held out or not."""

import sys
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.detection import AUTO, refuse_useless_shards
from mmtrain.data.shards.index import MAKE
from mmtrain.data.shards.indexing import ensure_indexes, unready_shards
from mmtrain.data.shards.shard_list import refuse_empty_shards, refuse_unfinished_shards
from mmtrain.data.stream.catalog import data_sets, evaluated_set
from mmtrain.demo.data import make_demo_data
from mmtrain.facts.models import models_of

INDEXED_WHILE_OTHERS_WAIT = 1_000_000_000  # bytes of shards: seconds to a minute


def with_formats(config: RunConfig) -> RunConfig:
    """Return the configuration with the format of each data set; make the demo's data on first use.

    Raises what `data_sets` raises.
    """
    make_demo_data(config)
    data = config.data
    names = [one.form.name for one in data_sets(data)]
    changes: dict[str, Any] = {}
    if data.format == AUTO:
        changes["data.format"] = names[0]
    if data.sets is not None:
        changes["data.sets"] = tuple(
            section.changed({"format": name})
            for section, name in zip(data.sets, names, strict=True)
        )
    if (held_out := evaluated_set(config)) is not None:
        changes["eval.format"] = held_out.form.name
    return config.changed(changes)


def check_data(config: RunConfig, others_wait: bool) -> RunConfig:
    """Refuse unusable data before a rank starts, index the rest; return `with_formats(config)`.

    With `others_wait` other processes wait for this one, with a timeout: indexing that takes long
    is refused.
    """
    config = with_formats(config)
    found = {}
    trained: set[Path] = set()
    for one in data_sets(config.data):
        key = f"data.sets ({one.name})" if one.name else "data.shards"
        found[key] = one
        trained.update(map(Path.resolve, one.shards))
    if (held_out := evaluated_set(config)) is not None:
        found["eval.shards"] = held_out
    for key, one in found.items():
        refuse_empty_shards(one.shards, key)
        refuse_unfinished_shards(one.shards, key)
    if held_out and (both := trained.intersection(map(Path.resolve, held_out.shards))):
        raise UserError(
            f"eval.shards: {min(both)} is in data.shards too; scores on samples that are trained "
            "on say nothing of others. Leave some shards out of data.shards, or set eval.fraction "
            "instead"
        )
    layout = models_of(config).layout
    how = {}
    shards_of: dict[Tokenization, list[Path]] = {}
    for key, one in found.items():
        how[key] = Tokenization(config.model.llm.path, config.data.template, layout, one.form)
        shards_of.setdefault(how[key], []).extend(one.shards)
    for each, shards in shards_of.items():
        missing = unready_shards(shards, each.fingerprint)
        takes_long = sum(path.stat().st_size for path in missing) > INDEXED_WHILE_OTHERS_WAIT
        if others_wait and takes_long:
            raise UserError(
                f"{len(missing):,} of {len(shards):,} shards have no index for this tokenizer and "
                f"template yet, and other processes would wait for it. First run {MAKE}"
            )
    for each, shards in shards_of.items():
        ensure_indexes(shards, each, stream=sys.stdout)
    for key, one in found.items():
        refuse_useless_shards(one.shards, how[key], key)
    return config
