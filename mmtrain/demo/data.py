"""The demo's data set: conversations about pictures, in LLaVA's form, as webdataset shards in the user's cache.

split --draw scenes--> picture (PNG) + conversation --data/sharding--> CACHE/demo/<split>-<fingerprint>/shard-*.tar

Made on first use, in seconds, from the scans that belong to the split; the same wherever Pillow compresses alike.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held, whole_folder
from mmtrain.base.errors import UserError
from mmtrain.data.prepare import sharding
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.demo.pictures import Scans, Use, paint
from mmtrain.demo.scene import draw_scene
from mmtrain.demo.text import converse
from mmtrain.pretrained.model_files import PREFIX

Split = Literal["train", "held-out"]
SAMPLES: dict[Split, int] = {"train": 6400, "held-out": 256}
USES: dict[Split, Use] = {"train": "projector", "held-out": "held-out"}
SAMPLES_PER_SHARD = 800


def demo_shards(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of the shards that `demo:train` or `demo:held-out` names, made if it is not there yet.

    `say` is told when that takes time. Raises UserError for another name, without scikit-learn, and for a cache that
    cannot be written.
    """
    split = name.removeprefix(PREFIX)
    if split not in SAMPLES:
        raise UserError(f"{name}: the demo has no such data; it has {', '.join(PREFIX + known for known in SAMPLES)}")
    folder = cache_folder("demo") / f"{split}-{fingerprint()}"
    if _is_whole(folder, split):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(folder.with_name(f".{folder.name}.lock"), wait=True):
            if not _is_whole(folder, split):
                _make(folder, name, split, say)
    except (OSError, UserError) as error:
        raise UserError(f"cannot make {name} in {folder}: {error}; XDG_CACHE_HOME says where caches go") from error
    return folder


def _is_whole(folder: Path, split: Split) -> bool:
    """Whether all shards are there; a cleaner of caches may have been here."""
    return len(list(folder.glob("*.tar"))) == math.ceil(SAMPLES[split] / SAMPLES_PER_SHARD)


def _make(folder: Path, name: str, split: Split, say: Callable[[str], None]) -> None:
    say(f"making {name}: {SAMPLES[split]:,} pictures of handwritten digits with conversations, in {folder}")
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    with whole_folder(folder) as unfinished:
        sharding.write_shards(draw_samples(split), unfinished, SAMPLES_PER_SHARD)
    say(f"made {name} in {time.perf_counter() - start:.1f} s")


def draw_samples(split: Split) -> Iterator[tuple[str, dict, list[tuple[str, bytes]]]]:
    """Every sample of a split: key, record in LLaVA's form, its picture as (suffix, bytes)."""
    draw = random.Random(f"demo {split}")
    scans = Scans(USES[split])
    for number in range(SAMPLES[split]):
        key = f"{split}-{number:06d}"
        scene = draw_scene(draw)
        stream = io.BytesIO()
        paint(scene, scans, draw).save(stream, "PNG")
        turns = [{"from": speaker, "value": text} for speaker, text in converse(scene, draw)]
        turns[0]["value"] = f"{IMAGE_MARK}\n{turns[0]['value']}"
        yield key, {"id": key, "image": f"{key}.png", "conversations": turns}, [("png", stream.getvalue())]


def fingerprint() -> str:
    """Changes with the code that makes the data, so that a cache never outlives it."""
    digest = hashlib.sha256(Path(sharding.__file__).read_bytes())
    for name in ("data", "pictures", "scene", "text"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]
