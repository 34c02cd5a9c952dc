"""Make or complete the indexes of webdataset shards, as a run's configuration reads them.

An index says where each member of a tar lies, its checksum, and the length of each sample's text.
shard-000000.tar.index is written beside shard-000000.tar, or into the user's cache if that folder
cannot be written. The index of a URL is in the cache, too: it is copied from the store if the store
has URL.index, else made. The tars themselves are only read. What is done for each:

    no index                         the tar is read once, each sample judged
    no lengths for this tokenizer    only files with texts are read; other lengths stay
    all there                        nothing
    stale (the tar has another size) or damaged: an error. An index's checksums are the only record
                                     of what the tar should be, so it is replaced with --rebuild
                                     only, which believes the tar as it is now.

Training makes missing indexes itself; making them before saves time on the training machine. Text
lengths depend on the LLM's tokenizer, on data.template and, for layouts that write texts around
images, on model.vision.layout.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.printing import print_result
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import template_name
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.shards.indexing import build_indexes, index_headers
from mmtrain.data.shards.remote import Tar
from mmtrain.data.shards.shard_list import find_shards
from mmtrain.demo.data import make_demo_shards
from mmtrain.inspection.reading import WORDS_HELP, parse_words, reading_of
from mmtrain.inspection.survey import survey
from mmtrain.runtime.gpus import usable_cores
from mmtrain.stock.pretrained import expand_pretrained

EXAMPLES = """\
  a run's shards:
    mmtrain index mine.yaml
  other people's shards, for LLaVA's stage 1 with Vicuna:
    mmtrain index example:llava15_7b_pp4 '/data/cc3m/shard-{000000..000331}.tar'
  a folder of shards, for a chat model in a folder of its own, with 16 processes:
    mmtrain index example:siglip_384_qwen25_7b model.llm.path=models/qwen /data/mix --workers 16
  after shards were replaced by others of the same name:
    mmtrain index mine.yaml --rebuild
"""
EXITS = {
    0: "every shard has its index; samples that cannot be trained on are counted by reason",
    2: "wrong input, shards that cannot be indexed (the message lists them; all others are done), "
    "or not one sample that can be trained on",
    130: "stopped by Ctrl-C; no half index is left, and the same command continues",
}


def run(options: Namespace) -> None:
    """Index the shards and print what they hold; raises UserError."""
    config = expand_pretrained(load_config(options.config, options.changes))
    tars = shards_of(config, options.shards)
    reading = reading_of(config, tars)
    todo: Sequence[Tar] = tars
    if not options.rebuild:
        _, todo = index_headers(tars, reading.fingerprint)
    if len(todo) < len(tars):
        print_result(
            f"{len(tars) - len(todo):,} of {len(tars):,} shards are ready: left as they are"
        )
    if todo:
        build_indexes(
            todo,
            reading,
            workers=options.workers,
            rebuild=options.rebuild,
            stream=sys.stdout,
        )
    surveyed = survey(tars, reading.fingerprint, reading.layout, reading.form)
    # a fingerprint was given
    assert surveyed.text_tokens is not None and surveyed.catalog is not None
    longest = surveyed.text_tokens.max(initial=0)
    print_result(
        f"{len(tars):,} shards, {len(surveyed.images):,} samples, {surveyed.images.sum():,} images",
        f"longest text: {longest:,} tokens of {reading.tokenizer}, "
        f"{template_name(reading.template)}, without those of images",
        f"samples that cannot be trained on: {surveyed.reasons.total():,}",
        *reason_lines(surveyed.reasons),
    )
    surveyed.catalog.refuse_useless_shards("SHARDS")


def shards_of(config: RunConfig | None, names: Sequence[str]) -> tuple[Tar, ...]:
    """Return the shards that a command line names, else those of its configuration.

    Raises UserError. The demo's are made if need be.
    """
    names = list(names)
    allow_pipe: Sequence[str] = ()
    cache_gib = None
    if config is not None:
        data = config.data
        allow_pipe = data.allow_pipe
        cache_gib = data.cache_gib
        if not names:
            for one in data.sets or (data,):
                if isinstance(one.shards, str):
                    names.append(one.shards)
                else:
                    names.extend(one.shards or ())
    make_demo_shards(names, "SHARDS")
    return find_shards(names, allow_pipe, cache_gib)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser(
        "index",
        __doc__,
        EXAMPLES,
        EXITS,
        interrupted="stopped by Ctrl-C; finished indexes stay, the same command goes on",
        logs=print_result,
    )
    parser.add_argument("words", nargs="+", metavar="CONFIG|key=value|SHARDS", help=WORDS_HELP)
    cores = usable_cores()
    parser.add_argument(
        "--workers",
        type=positive(int),
        default=cores,
        metavar="N",
        help=f"processes, a shard at a time each ({cores})",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="make every index anew, from the tars as they are now",
    )
    options = parser.parse_intermixed_args(arguments)
    options.config, options.changes, options.shards = parse_words(parser, options.words)
    if options.config is None:
        parser.error(
            "lengths of texts depend on an LLM and a template, so a CONFIG is needed. Name one, "
            "e.g. example:llava15_7b_pp4"
        )
    return options
