"""A run's data as its launcher sees them: there, of a known format, indexed, held out or not."""

from __future__ import annotations

import sys
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.detection import AUTO, refuse_useless_shards
from mmtrain.data.shards.index import MAKE
from mmtrain.data.shards.indexing import ensure_indexes, unready_shards
from mmtrain.data.shards.shard_list import refuse_empty_shards, refuse_unfinished_shards
from mmtrain.data.stream.catalog import data_sets, evaluated_set, shards_by_form
from mmtrain.demo.data import make_demo_data
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.models import models_of
from mmtrain.facts.tokenizer_files import text_fingerprint

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
    for one in data_sets(config.data):
        key = f"data.sets ({one.name})" if one.name else "data.shards"
        found[key] = one
    trained = set()
    for one in found.values():
        trained.update(path.resolve() for path in one.shards)
    if (held_out := evaluated_set(config)) is not None:
        found["eval.shards"] = held_out
    for key, one in found.items():
        refuse_empty_shards(one.shards, key)
        refuse_unfinished_shards(one.shards, key)
    if held_out is not None and (both := trained & {path.resolve() for path in held_out.shards}):
        raise UserError(
            f"eval.shards: {min(both)} is in data.shards too; scores on samples that are trained "
            "on say nothing of others. Leave some shards out of data.shards, or set eval.fraction "
            "instead"
        )
    template, llm, layout = config.data.template, config.model.llm.path, models_of(config).layout
    folder = model_folder(llm)
    by_form = shards_by_form(found.values())
    texts = {
        form: text_fingerprint(folder, template, layout.texts, form.wording) for form in by_form
    }
    for form, shards in by_form.items():
        missing = unready_shards(shards, texts[form])
        takes_long = sum(path.stat().st_size for path in missing) > INDEXED_WHILE_OTHERS_WAIT
        if others_wait and takes_long:
            raise UserError(
                f"{len(missing):,} of {len(shards):,} shards have no index for this tokenizer and "
                f"template yet, and other processes would wait for it. First run {MAKE}"
            )
    for form, shards in by_form.items():
        ensure_indexes(shards, llm, template, layout, form, stream=sys.stdout)
    for key, one in found.items():
        refuse_useless_shards(one.shards, texts[one.form], one.form, key)
    return config
