"""Samples per second: mmtrain's loader, webdataset with Pillow doing the same work, and the images
alone.

shards --PackedBatches--------------------------------------------------> packs of (L,) tokens and
    images (N, 3, S, S)
       --webdataset, its Pillow decoder, tokenizer, plain_documents, plain_packs--> the same
image bytes in memory --a bare loop in each worker: decode, pad, resize--> the bound

The data are made-up photographs of some 55 kB, as in LLaVA's 558K, the same every time. Equal work
is checked first: of every sample both loaders must make the same tokens, labels and pixels, bit for
bit.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import multiprocessing
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from bench_tables import Times, alternate, finish, positive, print_table, rates, ratios
from PIL import Image
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from mmtrain.base.printing import print_info
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.samples.templates import load_tokenizer
from mmtrain.data.stream.images import ImageTransform, image_transform
from mmtrain.data.stream.loader import PREFETCH, PackedBatches
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.doctor.machine import describe_machine
from mmtrain.facts.shapes import vision_shape
from mmtrain.runtime.child import python_child

EXAMPLES = """\
examples:
  everything, some minutes; the numbers as JSON too:
    python tools/bench/bench.py loader --json loader.json
  with 4 and 8 workers, packs of 4096 tokens:
    python tools/bench/bench.py loader --workers 4 8 --pack-length 4096
"""
LLM = "demo:llm"
VISION = "vit_large_patch14_clip_quickgelu_336.openai"
MMTRAIN, WEBDATASET, BOUND = "mmtrain", "webdataset", "images alone"
SHARDS = 8  # every worker of webdataset needs one
SIZES = ((640, 480), (480, 640), (512, 512))  # width, height
WORDS = (
    "a",
    "red",
    "old",
    "street",
    "boat",
    "woman",
    "near",
    "wooden",
    "table",
    "under",
    "sky",
    "bridge",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")
    add("--images", type=positive, default=2000, metavar="N", help="photographs (%(default)s)")
    add("--pack-length", type=positive, default=2048, metavar="N", help="(%(default)s)")
    add(
        "--workers",
        type=int,
        nargs="+",
        choices=range(SHARDS + 1),
        default=[0, 1, 2],
        help="(0 1 2)",
    )
    add("--repetitions", type=positive, default=5, metavar="N", help="(%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Make photographs and shards, check that the loaders do equal work, race them, print a
    table.
    """
    torch.set_num_threads(1)  # as in the workers
    result: dict[str, Any] = {"machine": describe_machine(), "workers": {}}
    with tempfile.TemporaryDirectory(prefix="bench_loader-") as name:
        folder = Path(name)
        print_info(f"making {options.images:,} photographs")
        shards = make_shards(folder, options.images)
        print_info("comparing the tokens, labels and pixels of all samples")
        check_equal_work(shards, options.pack_length)
        rows = []
        for workers in options.workers:
            print_info(f"racing with {workers} workers")
            times = race(shards, options.pack_length, workers, options.repetitions)
            speed = rates(times, options.images)
            result["workers"][str(workers)] = {
                contestant: asdict(speed[contestant]) for contestant in times
            }
            rows.append(
                (f"{workers} workers", *(speed[contestant].text(",.1f") for contestant in times))
            )
            against = [ratios(times, MMTRAIN, rival).text(".3f") for rival in (WEBDATASET, BOUND)]
            rows.append((f"{MMTRAIN}, as a multiple", "1", *against))
    print_info(
        "", f"samples/s: {options.images:,} samples, packs of {options.pack_length:,} tokens"
    )
    print_table(("", *(f">{contestant}" for contestant in times)), rows)
    finish(result, options.json)
    return 0


# ---- data


def make_shards(folder: Path, count: int) -> Path:
    """Write a LLaVA data set of `count` photographs to `folder` and return a folder with its
    shards.
    """
    draw = np.random.RandomState(0)
    records = []
    for number in range(count):
        name = f"{number:09d}.jpg"
        _photograph(draw).save(folder / name, "JPEG", quality=88)
        turns = [
            ("human", "Describe the picture.\n<image>"),
            ("gpt", " ".join(draw.choice(WORDS, 10))),
        ]
        conversation = [{"from": speaker, "value": text} for speaker, text in turns]
        records.append({"id": f"{number:09d}", "image": name, "conversations": conversation})
    (folder / "llava.json").write_text(json.dumps(records), encoding="utf-8")
    shards = folder / "shards"
    arguments = [
        "--json",
        folder / "llava.json",
        "--images",
        folder,
        "--out",
        shards,
        "--samples-per-shard",
        -(-count // SHARDS),
    ]
    counting = ("example:llava_pp4", f"model.llm.path={LLM}", "data.template=plain")
    command = python_child("-m", "mmtrain", "shard", *counting, *arguments)
    subprocess.run(**command, check=True, stdout=subprocess.DEVNULL)
    return shards


def _photograph(draw: np.random.RandomState) -> Image.Image:
    """Draw soft shapes and grain, of which a JPEG takes some 55 kB, as a photograph of LLaVA's 558K
    does.
    """
    width, height = SIZES[draw.randint(len(SIZES))]
    shapes = Image.fromarray(draw.randint(0, 256, (18, 24, 3), np.uint8)).resize((width, height))
    pixels = np.asarray(shapes) + draw.normal(0, 3, (height, width, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


# ---- contestants


def race(folder: Path, pack_length: int, workers: int, repetitions: int) -> Times:
    """Seconds for every sample of a folder of shards, by contestant; with no workers, all work is
    in one process.
    """
    shards = sorted(map(str, folder.glob("*.tar")))
    images = read_images(shards)
    transform = image_transform(VISION)
    batches = PackedBatches(run_config(folder, pack_length, workers), 0, 1)
    plain = plain_loader(shards, pack_length, workers)
    contestants: dict[str, Callable[[], float]] = {
        MMTRAIN: lambda: _drain(_normalised(batches), len(images)),
        WEBDATASET: lambda: _drain(iter(plain), len(images)),
        BOUND: lambda: _bare_loop(transform, images, max(workers, 1)),
    }
    return alternate(contestants, repetitions)


def run_config(folder: Path, pack_length: int, workers: int) -> RunConfig:
    """One pack a step, with the defaults of a run for the rest."""
    return RunConfig.model_validate(
        {
            "run": {"name": "bench"},
            "model": {"llm": {"path": LLM}, "vision": {"name": VISION}},
            "data": {"shards": f"{folder}/*.tar", "pack_length": pack_length, "workers": workers},
            "train": {"packs_per_step": 1, "epochs": 1},
        }
    )


@dataclass
class PlainPack:
    """What a pack is for the rival, in the tensors of mmtrain's PackedBatch."""

    input_ids: torch.Tensor  # (1, L) int64
    position_ids: torch.Tensor  # (1, L) int64
    labels: torch.Tensor  # (1, L) int64
    tiles: torch.Tensor  # (N, 3, S, S) float32
    keys: list[str]


def plain_loader(shards: list[str], pack_length: int, workers: int) -> DataLoader:
    """webdataset and Pillow as one writes them by hand: no index, no checksums, shards in order."""
    dataset = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode("pilrgb")
    transform, tokenizer = image_transform(VISION), load_tokenizer(LLM)
    documents = lambda samples: plain_documents(samples, transform, tokenizer)  # noqa: E731 - a fork needs no name
    packs = dataset.compose(
        documents, lambda found: plain_packs(found, pack_length, tokenizer.eos_token_id)
    )
    ahead = {"prefetch_factor": PREFETCH, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(packs, batch_size=None, num_workers=workers, **ahead)


# key, input_ids, labels (shifted), image
PlainDocument = tuple[str, list[int], list[int], torch.Tensor]


def plain_documents(
    samples: Iterable[dict[str, Any]], transform: ImageTransform, tokenizer: PreTrainedTokenizerBase
) -> Iterator[PlainDocument]:
    """LLaVA's stage 1 sample by sample: BOS, the image's positions, the caption, EOS; the caption
    is supervised.
    """
    tokens_per_image = vision_shape(VISION, -2).patches_per_image
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
    bos = [tokenizer.bos_token_id] if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else []
    for sample in samples:
        square = plain_fit(sample["jpg"], transform)
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous().float()
        pixels.div_(255).sub_(mean).div_(std)
        caption = sample["json"]["conversations"][1]["value"]
        answer = [*tokenizer(caption, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        context = bos + [IMAGE_POSITION] * tokens_per_image
        labels = [IGNORE] * (len(context) - 1) + answer + [IGNORE]
        yield sample["__key__"], context + answer, labels, pixels


def plain_fit(image: Image.Image, transform: ImageTransform) -> Image.Image:
    """LLaVA's expand2square, then the encoder's size."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in transform.mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    size = (transform.image_size, transform.image_size)
    return square.resize(size, Image.Resampling[transform.interpolation.upper()])


def plain_packs(
    documents: Iterable[PlainDocument], pack_length: int, padding_id: int
) -> Iterator[PlainPack]:
    """Documents in the order in which they come; the first that does not fit begins the next
    pack.
    """
    pack: list[PlainDocument] = []
    used = 0
    for document in documents:
        if used + len(document[1]) > pack_length:
            yield _plain_pack(pack, pack_length, padding_id)
            pack, used = [], 0
        pack.append(document)
        used += len(document[1])
    if pack:
        yield _plain_pack(pack, pack_length, padding_id)


def _plain_pack(pack: list[PlainDocument], pack_length: int, padding_id: int) -> PlainPack:
    padding = pack_length - sum(len(input_ids) for _, input_ids, _, _ in pack)
    lengths = [len(input_ids) for _, input_ids, _, _ in pack] + [padding]
    rows = (
        [
            *itertools.chain.from_iterable(input_ids for _, input_ids, _, _ in pack),
            *[padding_id] * padding,
        ],
        [*itertools.chain.from_iterable(map(range, lengths))],
        [*itertools.chain.from_iterable(labels for _, _, labels, _ in pack), *[IGNORE] * padding],
    )
    tokens, positions, labels = (torch.tensor([row]) for row in rows)
    return PlainPack(
        tokens,
        positions,
        labels,
        torch.stack([image for *_, image in pack]),
        [key for key, *_ in pack],
    )


def check_equal_work(folder: Path, pack_length: int) -> None:
    """Assert that both loaders make the same of every sample."""
    shards = sorted(map(str, folder.glob("*.tar")))
    samples = len(read_images(shards))
    ours, theirs = (
        dict(itertools.islice(itertools.chain.from_iterable(map(_digests, batches)), samples))
        for batches in (
            _normalised(PackedBatches(run_config(folder, pack_length, 0), 0, 1)),
            plain_loader(shards, pack_length, 0),
        )
    )
    assert len(ours) == len(theirs) == samples, f"{len(ours)}, {len(theirs)} and {samples} samples"
    different = [key for key in ours if ours[key] != theirs.get(key)]
    assert not different, (
        f"{len(different)} of {samples} samples differ, the first is {different[0]}"
    )


def _digests(batch: Any) -> Iterator[tuple[str, bytes]]:
    """Yield key and digest of each sample of a pack: its tokens, labels and pixels."""
    starts = [
        *(batch.position_ids[0] == 0).nonzero().flatten().tolist(),
        batch.position_ids.shape[1],
    ]
    for key, image, start, end in zip(batch.keys, batch.tiles, starts, starts[1:], strict=False):
        parts = (batch.input_ids[0, start:end], batch.labels[0, start:end], image)
        yield key, hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).digest()


def read_images(shards: list[str]) -> list[bytes]:
    """All images of the shards, encoded; these fill the system's cache too."""
    images = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            images += [
                tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")
            ]
    return images


def _normalised(batches: PackedBatches) -> Iterator[PackedBatch]:
    """Return micro-batches with images in float32, as the rival's; in a run the encoder's rank does
    it.
    """
    return map(batches.processor.normalised, batches)


def _drain(batches: Iterator[Any], samples: int) -> float:
    """Seconds for `samples` samples, counted from the first micro-batch: processes stand ready, as
    in the bare loop.
    """
    first = len(next(batches).keys)
    started = time.perf_counter()
    seen = first
    while seen < samples:
        seen += len(next(batches).keys)
    seconds = time.perf_counter() - started
    assert seen == samples, f"{seen} of {samples} samples"
    return seconds * samples / (samples - first)


def _bare_loop(transform: ImageTransform, images: list[bytes], processes: int) -> float:
    """Seconds to decode and resize all images in processes that stand ready when the clock
    starts.
    """
    context = multiprocessing.get_context("fork")
    start, end = context.Barrier(processes + 1), context.Barrier(processes + 1)

    def work(share: list[bytes]) -> None:
        start.wait()
        for content in share:
            image = Image.open(io.BytesIO(content)).convert("RGB")
            transform.normalise(transform.fitted(image))
        end.wait()

    workers = [
        context.Process(target=work, args=(images[number::processes],))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    start.wait()
    started = time.perf_counter()
    end.wait()
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    return seconds
