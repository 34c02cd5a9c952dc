"""The demo's data set: conversations about pictures, in LLaVA's form, as webdataset shards in the
user's cache.

split --draw scenes--> picture (PNG) + conversation --sharding-->
    CACHE/demo/<split>-<fingerprint>/shard-*.tar

Made on first use, in seconds, from the scans that belong to the split; the same wherever Pillow
compresses alike. `demo:next-train` and `demo:next-held-out` are the same pictures with other
questions, for what is trained afterwards; `demo:text-train` and `demo:text-held-out` have no
pictures. `demo:sheet-train` and `demo:sheet-held-out` are the pictures and questions of the first
two, each picture a note on a sheet of four times its width.
"""

import io
import logging
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmtrain.base.durable import held, whole_folder
from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.prepare.sharding import KeyedSample, write_shards
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.shards.shard_list import SPLITS, demo_shards
from mmtrain.demo.pictures import Scans, Use, lay, paint
from mmtrain.demo.scene import draw_scene
from mmtrain.demo.text import Turns, ask_next, ask_reversed, converse
from mmtrain.facts.model_files import PREFIX, is_demo

_log = logging.getLogger(__name__)
SAMPLES = {split: 6400 if split.endswith("train") else 256 for split in SPLITS}
USES: dict[str, Use] = {"train": "projector", "held-out": "held-out"}
TEXT = "text-"  # before the name of a split without pictures
NEXT = "next-"  # before the name of the split whose pictures they are
SHEET = "sheet-"  # the same, laid on sheets
SAMPLES_PER_SHARD = 800


def make_demo_data(config: RunConfig) -> None:
    """Make the demo's shards that a configuration names; raises what `make_demo_shards` raises."""
    make_demo_shards(config.data.shards, "data.shards")
    for number, section in enumerate(config.data.sets or ()):
        make_demo_shards(section.shards, f"data.sets.{number}.shards")
    make_demo_shards(config.eval.shards, "eval.shards")


def make_demo_shards(shards: str | Sequence[str] | None, key: str) -> None:
    """Make the demo's data that `shards` names (`demo:train` ...), unless they are there.

    Raises UserError, naming `key`.
    """
    if isinstance(shards, str):
        shards = (shards,)
    for name in shards or ():
        if is_demo(name):
            try:
                _ensure(name)
            except UserError as error:
                raise UserError(f"{key}: {error}") from error


def _ensure(name: str) -> None:
    folder = demo_shards(name)
    split = name.removeprefix(PREFIX)
    if _is_whole(folder, split):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not _is_whole(folder, split):
                content = "" if split.startswith(TEXT) else "pictures of handwritten digits with "
                _log.info(f"making {name}: {SAMPLES[split]:,} {content}conversations, in {folder}")
                start = time.perf_counter()
                shutil.rmtree(folder, ignore_errors=True)
                with whole_folder(folder) as unfinished:
                    write_shards(draw_samples(split), unfinished, SAMPLES_PER_SHARD)
                _log.info(f"made {name} in {time.perf_counter() - start:.1f} s")
    except (OSError, UserError) as error:
        if _is_whole(folder, split):  # another process was faster, on a disk without locks
            return
        raise UserError(
            f"cannot make {name} in {folder}: {error}; XDG_CACHE_HOME says where caches go"
        ) from error


def _is_whole(folder: Path, split: str) -> bool:
    """Tell whether all shards are there: caches are cleaned file by file."""
    return len(list(folder.glob("*.tar"))) == math.ceil(SAMPLES[split] / SAMPLES_PER_SHARD)


def draw_samples(split: str) -> Iterator[KeyedSample]:
    """Yield every sample of a split: key, record in LLaVA's form, its picture, if it has one, as
    (suffix, bytes).
    """
    if split.startswith(TEXT):
        for number in range(SAMPLES[split]):
            key = f"{split}-{number:06d}"
            yield (
                key,
                {"id": key, "conversations": _turns(ask_reversed(random.Random(f"demo {key}")))},
                [],
            )
        return
    pictures = split.removeprefix(NEXT).removeprefix(SHEET)
    draw = random.Random(f"demo {pictures}")
    scans = Scans(USES[pictures])
    for number in range(SAMPLES[split]):
        key = f"{split}-{number:06d}"
        scene = draw_scene(draw)
        stream = io.BytesIO()
        picture = paint(scene, scans, draw)
        # drawn in any case, else the pictures that follow would be others
        spoken = converse(scene, draw)
        if split.startswith(NEXT):
            spoken = ask_next(scene, random.Random(f"demo {key}"))
        if split.startswith(SHEET):
            picture, _ = lay(picture, random.Random(f"demo {key}"))
        picture.save(stream, "PNG")
        turns = _turns(spoken)
        turns[0]["value"] = f"{IMAGE_MARK}\n{turns[0]['value']}"
        yield (
            key,
            {"id": key, "image": f"{key}.png", "conversations": turns},
            [("png", stream.getvalue())],
        )


def _turns(spoken: Turns) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in spoken]
