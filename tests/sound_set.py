"""A sound data set, an epoch of it, and what an epoch must be once one of its shards is broken.

tars --by hand: tarfile, json, stock tokenizer--> rows, against which every batch is compared, sample by sample
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from broken_shards import BEFORE, BETWEEN, Broken, SoundShard, key
from PIL import Image

from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.samples.templates import load_tokenizer
from mmtrain.data.shards.index import read_index, write_index
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch

PACK = 64  # tokens; some samples of two images are longer
TOKENS_PER_IMAGE = 16  # of the tiny vision encoder


@dataclass(frozen=True)
class Row:
    """What a sample must be wherever it lies in a batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    images: list[torch.Tensor]


@dataclass(frozen=True)
class SoundSet:
    """Two sound shards, what an epoch of them is, and each sample as it must be."""

    tiny: Path
    folder: Path
    shards: tuple[SoundShard, SoundShard]
    foreign_indexes: tuple[bytes, bytes]  # with lengths for another tokenizer only
    rows: dict[str, Row]  # all samples, longer ones than a pack too
    overlong: frozenset[str]
    batches: list[PackedBatch]


def open_epoch(tiny: Path, folder: Path, *overrides: str) -> PackedBatches:
    options = [f"data.shards={folder}/*.tar", f"data.pack_length={PACK}", "data.workers=0", "data.io_retry_seconds=0"]
    one = ["train.packs_per_step=1", "train.packs_per_microbatch=1", "data.format=llava"]  # auto may read more
    return PackedBatches(load_config(tiny / "config.yaml", [*options, *one, *overrides]), 0, 1)


def whole_epoch(packed: PackedBatches) -> list[PackedBatch]:
    return list(itertools.islice(packed, len(packed.order.epoch_plan(0))))


def rows_by_hand(tiny: Path, tars: list[Path]) -> dict[str, Row]:
    """Each sample's row from tarfile, json, the stock tokenizer: images, the caption, EOS, labels shifted by one."""
    tokenizer, transform = load_tokenizer(str(tiny / "llm")), image_transform(str(tiny / "vision"))
    rows = {}
    for tar in tars:
        with tarfile.open(tar) as archive:
            contents = {file.name: archive.extractfile(file).read() for file in archive}
        for name, content in contents.items():
            if name.endswith(".json"):
                images = [contents[each] for each in sorted(contents) if each[:6] == name[:6] and each != name]
                caption = [
                    *tokenizer(json.loads(content)["conversations"][1]["value"], add_special_tokens=False).input_ids,
                    tokenizer.eos_token_id,
                ]
                before = [tokenizer.bos_token_id] + [IMAGE_POSITION] * (TOKENS_PER_IMAGE * len(images))
                labels = [IGNORE] * (len(before) - 1) + caption + [IGNORE]
                pixels = [transform.fitted(Image.open(io.BytesIO(image))) for image in images]
                rows[name[:6]] = Row(torch.tensor(before + caption), torch.tensor(labels), pixels)
    return rows


def make_sound_set(tiny: Path, folder: Path, make_tiny_shards: Callable[..., list[Path]]) -> SoundSet:
    """Shards of tiny_models for the model in `tiny`, indexed."""
    tars = make_tiny_shards(folder, samples=24, shards=2, two_image_fraction=0.25)
    rows = rows_by_hand(tiny, tars)
    overlong = frozenset(name for name, row in rows.items() if len(row.input_ids) > PACK)
    batches = whole_epoch(open_epoch(tiny, folder))
    shards, foreign = [], []
    for tar in tars:
        with tarfile.open(tar) as archive:
            files = tuple(archive)
        index = Path(f"{tar}.index").read_bytes()
        shards.append(SoundShard(tar.read_bytes(), index, files, frozenset(map(key, files)) - overlong))
        parsed = read_index(tar)
        (text,) = parsed.texts.values()
        parsed.texts = {"0" * 16: text}
        write_index(tar, parsed)
        foreign.append(Path(f"{tar}.index").read_bytes())
        Path(f"{tar}.index").write_bytes(index)
    return SoundSet(tiny, folder, tuple(shards), tuple(foreign), rows, overlong, batches)


def documents_of(batch: PackedBatch) -> list[tuple[int, int, int]]:
    """Row, start and end of each document, gap or padding."""
    found = []
    for row, positions in enumerate(batch.position_ids):
        starts = (positions == 0).nonzero().flatten().tolist()
        found += [(row, start, end) for start, end in itertools.pairwise([*starts, len(positions)])]
    return found


def check_rows(batch: PackedBatch, sound: SoundSet, padding: int) -> None:
    """Each labelled document is its key's, each other one is blank, and the images are those of the keys."""
    keys, images = iter(batch.keys), []
    for row, start, end in documents_of(batch):
        ids, labels = batch.input_ids[row, start:end], batch.labels[row, start:end]
        if (labels == IGNORE).all():
            assert (ids == padding).all()
            continue
        expected = sound.rows[next(keys)]
        assert torch.equal(ids, expected.input_ids) and torch.equal(labels, expected.labels)
        images += expected.images
    assert next(keys, None) is None
    assert torch.equal(batch.tiles, torch.stack(images)) if images else batch.tiles is None


def blanked(batch: PackedBatch, lost: set[str], sound: SoundSet, padding: int) -> PackedBatch:
    """A sound batch as it must be once these samples are lost when they are read."""
    result = replace(batch, input_ids=batch.input_ids.clone(), labels=batch.labels.clone())
    for name, (row, start, end) in zip(batch.keys, documents_of(batch), strict=False):
        if name in lost:
            result.input_ids[row, start:end], result.labels[row, start:end] = padding, IGNORE
            result.tokens -= end - start
    result.keys = tuple(name for name in batch.keys if name not in lost)
    result.samples_of_packs = (len(result.keys),)
    images = [image for name in result.keys for image in sound.rows[name].images]
    result.tiles = torch.stack(images) if images else None
    result.tilings = batch.tilings[: len(images)]  # all alike: each is one square
    return result


def check_epoch(packed: PackedBatches, batches: list[PackedBatch], broken: Broken, sound: SoundSet) -> None:
    """What was trained, what was not and why, and that this is all."""
    plan, padding = packed.order.epoch_plan(0), packed.processor.padding_id
    for batch in batches:
        check_rows(batch, sound, padding)
    gaps = {fault.key: fault for batch in batches for _, fault in batch.faults}
    unusable = {fault.key: fault for fault in packed.catalog.faults.values()}
    quarantined = {name: reason for name, reason in broken.quarantined.items() if name not in sound.overlong}
    for found, expected in ((gaps, quarantined), (unusable, broken.unusable)):
        assert found.keys() == expected.keys()
        for name, fault in found.items():
            assert fault.reason in expected[name].split("|"), fault
            assert Path(fault.shard).is_file() and fault.detail
    trained = Counter(name for batch in batches for name in batch.keys)
    skipped = {*sound.overlong, *quarantined, *broken.unusable}
    assert trained == Counter(sound.rows.keys() - skipped) + Counter(broken.repeated)
    lost = sum(len(batch.faults) for batch in batches)
    assert plan.drawn == len(sound.rows) + broken.added
    assert plan.drawn == trained.total() + lost + plan.overlong + plan.unusable
    assert plan.overlong == len(sound.overlong - broken.unusable.keys())
    if not broken.unusable and not broken.added:  # nothing has moved
        for batch, before in zip(batches, sound.batches, strict=True):
            expected = blanked(before, set(quarantined), sound, padding)
            for name in ("input_ids", "labels", "position_ids", "tiles"):
                one, other = getattr(batch, name), getattr(expected, name)
                assert (one is None and other is None) or torch.equal(one, other), name
            for name in ("keys", "tilings", "tokens", "epochs", "samples_of_packs"):
                assert getattr(batch, name) == getattr(expected, name), name


def lay_out(folder: Path, sound: SoundSet, regime: str, damaged: int, broken: Broken) -> Path:
    """Both shards in a folder, one of them broken; returns that one."""
    folder.mkdir()
    for number, tar in enumerate(sorted(sound.folder.glob("*.tar"))):
        if number == damaged:
            (folder / tar.name).write_bytes(broken.tar)
            index = sound.foreign_indexes[number] if regime == BETWEEN else sound.shards[number].index
            if regime != BEFORE:
                (folder / f"{tar.name}.index").write_bytes(broken.index if broken.index is not None else index)
        else:
            shutil.copy(tar, folder)
            shutil.copy(f"{tar}.index", folder)
    return sorted(folder.glob("*.tar"))[damaged]
