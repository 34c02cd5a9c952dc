"""Show a sample as the model will see it, token by token.

key --indexes--> every sample of this key --Reader--> Sample --template--> rows: position, token,
    its text, its label
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IMAGE_POSITION, Document, QuarantinedSample, Sample
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.shards.index import Member, read_index
from mmtrain.data.stream.catalog import Catalog, DataSet, Reader
from mmtrain.inspection.reading import Reading
from mmtrain.layouts.layout import ImageLayout

# tokens before one that decide its text: a first one loses its space, a letter takes up to 4
_CONTEXT = 4
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_KEYS_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """A text token, or a run of an image's positions; `label`: what the (last) position must
    predict, or IGNORE.
    """

    first: int  # position in the document
    positions: int
    token: int  # IMAGE_POSITION for an image
    text: str  # of a token as it stands in the text; of an image: "image 0, 640x480 px", which tile
    label: int


@dataclass(frozen=True)
class TokenizedSample:
    """A sample of a shard; without rows where it cannot be trained on, without turns where it
    cannot be read.
    """

    key: str
    shard: str
    members: tuple[Member, ...]
    image_sizes: tuple[tuple[int, int], ...]  # (width, height) in pixels
    turns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    fault: QuarantinedSample | None


def tokenize_samples(tars: Sequence[Path], key: str, reading: Reading) -> list[TokenizedSample]:
    """Return every sample of this key in indexed shards, in order, read as training reads it;
    raises UserError.
    """
    assert (
        reading.tokenizer is not None
        and reading.template is not None
        and reading.fingerprint is not None
    )
    places = _find(tars, key)
    shards = tuple(dict.fromkeys(tar for tar, _ in places))
    catalog = Catalog(
        [DataSet(shards, form=reading.form)],
        [reading.fingerprint],
        reading.layout,
        MAX_IMAGE_PIXELS,
    )
    tokenizer = load_tokenizer(reading.tokenizer)
    # No embedding is asked how many rows it has: this shows tokens, and training refuses those
    # without one.
    write = make_template(reading.template, tokenizer, reading.layout, sys.maxsize)
    reader = Reader(catalog, retry_seconds=0)
    indexes = {tar: read_index(tar) for tar in shards}
    tokenized = []
    for tar, place in places:
        number = catalog.firsts[shards.index(tar)] + place
        members = indexes[tar].members[place]
        sizes = indexes[tar].image_sizes[place]
        if sizes and reading.missing_positions:
            raise UserError(
                f"{tar}: sample {key} has {len(sizes)} "
                f"image{'s' * (len(sizes) > 1)}; {reading.missing_positions}"
            )
        fault = catalog.faults.get(number)
        sample = reader.read(number)  # one with a fault too, for its turns
        if fault is None and isinstance(sample, QuarantinedSample):
            fault = sample
        rows: tuple[Row, ...] = ()
        if fault is None:
            try:
                rows = _rows(write(sample), sizes, reading.layout, tokenizer)
            except BadSample as error:
                fault = QuarantinedSample(
                    key, str(tar), members[0].offset, error.reason, error.detail
                )
        turns = sample.turns if isinstance(sample, Sample) else ()
        tokenized.append(TokenizedSample(key, str(tar), members, sizes, turns, rows, fault))
    return tokenized


def _find(tars: Sequence[Path], key: str) -> list[tuple[Path, int]]:
    places: list[tuple[Path, int]] = []
    like: list[str] = []
    for tar in tars:
        keys = read_index(tar).keys
        places += [(tar, place) for place, sample_key in enumerate(keys) if sample_key == key]
        if len(like) < _KEYS_SHOWN:
            like += itertools.islice(
                (sample_key for sample_key in keys if key in sample_key), _KEYS_SHOWN - len(like)
            )
    if places:
        return places
    hint = f"similar keys: {', '.join(map(escape, like))}"
    if not like:
        hint = (
            f"the first keys are {', '.join(map(escape, read_index(tars[0]).keys[:_KEYS_SHOWN]))}"
        )
    raise UserError(f"--show {key}: no sample has this key in {len(tars):,} shards; {hint}")


def _rows(
    document: Document,
    sizes: Sequence[tuple[int, int]],
    layout: ImageLayout,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Row, ...]:
    ids = [token for token in document.input_ids if token != IMAGE_POSITION]
    texts = iter(_texts(ids, tokenizer))
    runs = _runs(document, sizes, layout)
    rows: list[Row] = []
    at = 0
    while at < len(document.input_ids):
        token = document.input_ids[at]
        text, positions = next(runs) if token == IMAGE_POSITION else (next(texts), 1)
        rows.append(Row(at, positions, token, text, document.labels[at + positions - 1]))
        at += positions
    return tuple(rows)


def _runs(
    document: Document, sizes: Sequence[tuple[int, int]], layout: ImageLayout
) -> Iterator[tuple[str, int]]:
    """Yield what each run of image positions shows, and its length."""
    for number, (tiling, (width, height)) in enumerate(zip(document.tilings, sizes, strict=True)):
        image = f"image {number}, {width}x{height} px"
        runs = [piece for piece in layout.pieces(tiling) if isinstance(piece, int)]
        grid = f"{tiling.rows} x {tiling.columns} tiles"
        if len(runs) > 1:  # a tile each
            for tile, positions in enumerate(runs, 1):
                is_whole = tiling.overview == "last" and tile == len(runs)
                yield (
                    f"{image}, {'whole image' if is_whole else f'tile {tile} of {grid}'}",
                    positions,
                )
        elif tiling.shown is not None:
            shown = tiling.shown
            yield (
                f"{image}, whole image, then {shown.lines} lines of {shown.length} of {grid}",
                *runs,
            )
        else:
            yield image, *runs


def _texts(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what each token adds to the text; for a part of a character, its name in the
    vocabulary.
    """
    texts = []
    for number, token in enumerate(ids):
        context = ids[max(number - _CONTEXT, 0) : number]
        before = tokenizer.decode(context, clean_up_tokenization_spaces=False)
        after = tokenizer.decode([*context, token], clean_up_tokenization_spaces=False)
        text = after.removeprefix(before) if after.startswith(before) else _UNDECODED
        texts.append(
            tokenizer.convert_ids_to_tokens(token) if _UNDECODED in text or not text else text
        )
    return texts
