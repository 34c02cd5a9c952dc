"""Show a sample as the model will see it, token by token.

key --indexes--> every sample of this key --Reader--> Sample
    --template--> rows: position, token, its text, its label
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.data.samples.records import BadSample, Turns
from mmtrain.data.samples.sample import IMAGE_POSITION, Document, QuarantinedSample, Sample, Sizes
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.shards.index import Member, ShardIndex, read_index
from mmtrain.data.shards.remote import Tar
from mmtrain.data.stream.catalog import Catalog, Reader
from mmtrain.data.stream.stored import Measure, count_samples
from mmtrain.inspection.reading import Reading
from mmtrain.layouts.layout import ImageLayout

# tokens before one that decide its text: a first one loses its space, a letter takes up to 4
_CONTEXT = 4
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_KEYS_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """A text token, or a run of an image's positions.

    `label`: what the (last) position must predict, or IGNORE.
    """

    first: int  # position in the document
    positions: int
    token: int  # IMAGE_POSITION for an image
    text: str  # of a token as it stands in the text; of an image: "image 0, 640x480 px", which tile
    label: int


@dataclass(frozen=True)
class TokenizedSample:
    """A sample of a shard.

    Without rows where it cannot be trained on, without turns where it cannot be read.
    """

    key: str
    shard: str
    members: tuple[Member, ...]
    image_sizes: Sizes
    turns: Turns
    rows: tuple[Row, ...]
    fault: QuarantinedSample | None


def tokenize_samples(tars: Sequence[Tar], key: str, reading: Reading) -> list[TokenizedSample]:
    """Return every sample of this key in indexed shards, in order, read as training reads it.

    Raises UserError.
    """
    places = _find(tars, key)
    shards = list(dict.fromkeys(tar for tar, *_ in places))
    measure = Measure(reading.form, reading.fingerprint, reading.layout)
    catalog = Catalog([count_samples(shards, measure)])
    tokenizer = load_tokenizer(reading.tokenizer)
    # No embedding is asked how many rows it has: this shows tokens, and training refuses those
    # without one.
    write = make_template(reading.template, tokenizer, reading.layout, sys.maxsize)
    reader = Reader(catalog, retry_seconds=0)
    tokenized = []
    for tar, place, index in places:
        number = int(catalog.sample_sets[0].firsts[shards.index(tar)]) + place
        members = index.members[place]
        sizes = index.image_sizes[place]
        fault = catalog.fault(number)
        sample = reader.read(number)  # one with a fault too, for its turns
        if fault is None and isinstance(sample, QuarantinedSample):
            fault = sample
        rows = ()
        if fault is None:
            try:
                rows = _rows(write(sample), sizes, reading.layout, tokenizer)
            except BadSample as error:
                fault = sample.quarantined(error)
        turns = sample.turns if isinstance(sample, Sample) else ()
        tokenized.append(TokenizedSample(key, str(tar), members, sizes, turns, rows, fault))
    return tokenized


def _find(tars: Sequence[Tar], key: str) -> list[tuple[Tar, int, ShardIndex]]:
    """Return shard, place and index of each sample of a key."""
    places = []
    like = []
    for tar in tars:
        index = read_index(tar)
        for place, sample_key in enumerate(index.keys):
            if sample_key == key:
                places.append((tar, place, index))
            elif key in sample_key and len(like) < _KEYS_SHOWN:
                like.append(escape(sample_key))
    if places:
        return places
    hint = f"similar keys: {', '.join(like)}"
    if not like:
        first = read_index(tars[0]).keys[:_KEYS_SHOWN]
        hint = f"the first keys are {', '.join(map(escape, first))}"
    raise UserError(f"--show {key}: no sample has this key in {len(tars):,} shards; {hint}")


def _rows(
    document: Document,
    sizes: Sizes,
    layout: ImageLayout,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Row, ...]:
    ids = [token for token in document.input_ids if token != IMAGE_POSITION]
    texts = iter(_texts(ids, tokenizer))
    runs = _runs(document, sizes, layout)
    rows = []
    at = 0
    while at < len(document.input_ids):
        token = document.input_ids[at]
        if token == IMAGE_POSITION:
            text, positions = next(runs)
        else:
            text = next(texts)
            positions = 1
        rows.append(Row(at, positions, token, text, document.labels[at + positions - 1]))
        at += positions
    return tuple(rows)


def _runs(
    document: Document,
    sizes: Sizes,
    layout: ImageLayout,
) -> Iterator[tuple[str, int]]:
    """Yield what each run of image positions shows, and its length."""
    for number, (tiling, (width, height)) in enumerate(zip(document.tilings, sizes, strict=True)):
        image = f"image {number}, {width}x{height} px"
        runs = [piece for piece in layout.pieces(tiling) if isinstance(piece, int)]
        grid = f"{tiling.rows} x {tiling.columns} tiles"
        if len(runs) > 1:  # a tile each
            shows = [f"{image}, tile {tile} of {grid}" for tile in range(1, len(runs) + 1)]
            if tiling.overview == "last":
                shows[-1] = f"{image}, whole image"
            yield from zip(shows, runs, strict=True)
        elif (shown := tiling.shown) is not None:
            lines = f"{shown.lines} lines of {shown.length}"
            yield f"{image}, whole image, then {lines} of {grid}", *runs
        else:
            yield image, *runs


def _texts(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what each token adds to the text.

    For a part of a character, its name in the vocabulary.
    """
    texts = []
    for number, token in enumerate(ids):
        context = ids[max(number - _CONTEXT, 0) : number]
        before = tokenizer.decode(context, clean_up_tokenization_spaces=False)
        after = tokenizer.decode([*context, token], clean_up_tokenization_spaces=False)
        text = after.removeprefix(before)
        if not after.startswith(before) or not text or _UNDECODED in text:
            text = tokenizer.convert_ids_to_tokens(token)
        texts.append(text)
    return texts
