"""A run's data as its launcher sees them: there, finished, indexed, and not trained on where they are held out."""

from __future__ import annotations

import sys

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import template_name
from mmtrain.data.shards.indexing import ensure_indexes, unready_shards
from mmtrain.data.shards.shard_list import expand_shards, refuse_empty_shards, refuse_unfinished_shards
from mmtrain.data.stream.catalog import data_sets
from mmtrain.demo.data import make_demo_data
from mmtrain.pretrained.layouts import layout_argument, layout_name
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.tokenizer_files import refuse_missing_chat_template, text_fingerprint

INDEXED_WHILE_OTHERS_WAIT = 1_000_000_000  # bytes of shards: seconds to a minute


def check_data(config: RunConfig, others_wait: bool) -> None:
    """Refuse data that cannot be there before a rank starts; index what is not, and make the demo's on first use.

    `others_wait` says that other processes are about to wait for this one, with a timeout: indexing is theirs to see
    done before, unless it takes moments.
    """
    refuse_missing_chat_template(config)
    make_demo_data(config)
    found = {f"data.sets ({one.name})" if one.name else "data.shards": one.shards for one in data_sets(config.data)}
    if config.eval.shards is not None:
        found["eval.shards"] = expand_shards(config.eval.shards, "eval.shards", config.data.allow_pipe)
    for key, paths in found.items():
        refuse_empty_shards(paths, key)
        refuse_unfinished_shards(paths, key)
    trained = {path.resolve() for key, paths in found.items() if key != "eval.shards" for path in paths}
    both = trained & {path.resolve() for path in found.get("eval.shards", ())}
    if both:
        raise UserError(
            f"eval.shards: {min(both)} is in data.shards too; scores on samples that are trained on say nothing of "
            "others; leave some shards out of data.shards, or set eval.fraction instead"
        )
    shards = [path for paths in found.values() for path in paths]
    template, llm, layout = config.data.template, config.model.llm.path, layout_name(config)
    seconds = config.data.io_retry_seconds
    fingerprint = text_fingerprint(model_folder(llm), template, layout)
    missing = unready_shards(shards, fingerprint, seconds) if others_wait else []
    if sum(path.stat().st_size for path in missing) > INDEXED_WHILE_OTHERS_WAIT:
        raise UserError(
            f"{len(missing):,} of {len(shards):,} shards have no index for this tokenizer and template yet, and other "
            f"processes would wait for it; first run mmtrain index {' '.join(map(str, missing[:3]))}"
            f"{' ...' if len(missing) > 3 else ''} --tokenizer {llm} --template {template_name(template)}"
            f"{layout_argument(layout)}"
        )
    ensure_indexes(shards, llm, template, layout, stream=sys.stdout, retry_seconds=seconds)
