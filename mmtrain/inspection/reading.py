"""The words of commands that read shards, and how a run reads these.

words --parse_words--> CONFIG, its changes, SHARDS --reading_of--> Reading: tokenizer, template,
    format, image layout, pack length
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.config.load import KEY_AND_VALUE, example_name, refuse_repeated_keys
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.detection import sample_format
from mmtrain.data.shards.remote import Tar
from mmtrain.facts.models import models_of

WORDS_HELP = (
    "a run's configuration, FILE.yaml or example:NAME, which says how samples become tokens; "
    "key=value changes it; SHARDS are read instead of those that it names: "
    "paths, URLs (s3://, gs://, az://, https://, hf://datasets/), folders, globs (*, ?), "
    "brace ranges ({00..99})"
)


@dataclass(frozen=True, kw_only=True)
class Reading(Tokenization):
    """The settings by which a run reads shards and makes tokens of their samples."""

    pack_length: int
    max_tiles_per_pack: int | None
    packs_per_step: int


def parse_words(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[str | None, list[str], list[str]]:
    """Return the configuration among the words, if any, the words key=value, and the others.

    Exits, as argparse does, for keys that are set twice.
    """
    config = None
    changes = []
    others = []
    for word in words:
        is_config = example_name(word) or word.endswith((".yaml", ".yml"))
        if is_config and config is None:
            config = word
        elif KEY_AND_VALUE.match(word):
            changes.append(word)
        else:
            others.append(word)
    refuse_repeated_keys(parser, changes)
    return config, changes, others


def reading_of(config: RunConfig, tars: Sequence[Tar]) -> Reading:
    """Return how a run reads these shards. Raises UserError."""
    data = config.data
    asked = SampleFormat(data.format, data.caption_key, data.caption_prompt)
    return Reading(
        tokenizer=config.model.llm.path,
        template=data.template,
        form=sample_format(asked, tars, "SHARDS"),
        layout=models_of(config).layout,
        pack_length=data.pack_length,
        max_tiles_per_pack=data.max_tiles_per_pack,
        packs_per_step=config.train.packs_per_step,
    )
