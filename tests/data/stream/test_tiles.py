"""Images in tiles on their way from shards to micro-batches: what is planned is what comes,
whatever reads it.
"""

import io
import itertools
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from archives import conversation, write_tar
from PIL import Image
from sweeps import sweep

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.shards.index import read_index, write_index
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.registry import LAYOUTS

pytestmark = pytest.mark.slow

SIZED = ["tiles", "anyres", "anyres_max_9"]
SIDE, POSITIONS = 32, 16  # of the tiny encoder's square
LONGEST = 1000  # tokens of a pack: 37 tiles of anyres_max_9 take 400


def noise(width: int, height: int, orientation: int = 1) -> bytes:
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    pixels = (
        np.random.RandomState(width * 1000 + height)
        .randint(0, 256, (height, width, 3))
        .astype(np.uint8)
    )
    Image.fromarray(pixels).save(stream, "PNG", exif=exif)
    return stream.getvalue()


@pytest.fixture(scope="module")
def mixed(tiny, tmp_path_factory):
    """Two shards of 30 samples: an image of its own size each, but every fifth two, and every sixth
    none.
    """
    folder, draw = tmp_path_factory.mktemp("mixed"), np.random.RandomState(3)
    sizes = {}
    for shard in range(2):
        files = []
        for number in range(30 * shard, 30 * (shard + 1)):
            key, images = f"{number:04d}", 0 if number % 6 == 0 else 2 if number % 5 == 0 else 1
            sizes[key] = [tuple(map(int, draw.randint(8, 240, 2))) for _ in range(images)]
            files.append(
                (f"{key}.json", conversation("<image>" * images + "Say.", f"a circle {number}"))
            )
            files += [(f"{key}.{at}.png", noise(*size)) for at, size in enumerate(sizes[key])]
        write_tar(folder / f"{shard}.tar", files)
    open_batches(tiny, folder, "square")  # indexes them
    return folder, sizes


def open_batches(tiny, folder, layout, *overrides, replica=0, replicas=1, first_step=0, workers=0):
    fit = "pad" if layout == "square" else "null"
    keys = [f"model.vision.layout={layout}", f"data.image_fit={fit}", f"data.shards={folder}/*.tar"]
    keys += [
        f"data.pack_length={LONGEST}",
        "train.packs_per_step=4",
        "train.packs_per_microbatch=2",
    ]
    config = load_config(tiny / "config.yaml", [*keys, f"data.workers={workers}", *overrides])
    return PackedBatches(config, replica, replicas, first_step)


def epoch_of(batches):
    return list(itertools.takewhile(lambda batch: batch.epochs[0] == 0, batches))


def taken(batches, count):
    return list(itertools.islice(batches, count))


def same(one, other):
    for name in ("input_ids", "position_ids", "labels", "tiles"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
    assert (one.keys, one.tilings, one.epochs) == (other.keys, other.tilings, other.epochs)


def layout_of(name: str) -> ImageLayout:
    return LAYOUTS[name](POSITIONS, SIDE)


@pytest.mark.parametrize("name", ["tiles", "anyres_max_9"])
def test_every_sample_comes_with_the_tiles_and_positions_of_its_images_sizes(tiny, mixed, name):
    folder, sizes = mixed
    packed, layout = open_batches(tiny, folder, name), layout_of(name)
    seen = Counter()
    for batch in epoch_of(packed):
        of_keys = [
            [layout.tiling(*size, len(sizes[key])) for size in sizes[key]] for key in batch.keys
        ]
        assert batch.tilings == tuple(itertools.chain.from_iterable(of_keys))
        assert int((batch.input_ids == IMAGE_POSITION).sum()) == sum(
            tiling.positions for tiling in batch.tilings
        )
        pixels = [
            packed.processor.transform.cut(Image.open(io.BytesIO(noise(*size))), tiling)
            for key, tilings in zip(batch.keys, of_keys, strict=True)
            for size, tiling in zip(sizes[key], tilings, strict=True)
        ]
        assert torch.equal(batch.tiles, torch.cat(pixels)) and not batch.faults
        seen.update(key for key in batch.keys if batch.epochs == (0, 0))
    assert len(seen) > 45 and set(seen.values()) == {1}


def test_order_and_pixels_depend_on_neither_replicas_nor_workers_nor_where_a_run_goes_on(
    tiny, mixed
):
    name = "anyres_max_9"
    whole = taken(open_batches(tiny, mixed[0], name), 8)  # two a step
    for one, other in zip(
        whole, taken(open_batches(tiny, mixed[0], name, workers=2), 8), strict=True
    ):
        same(one, other)
    for replica in range(2):
        share = taken(open_batches(tiny, mixed[0], name, replica=replica, replicas=2), 4)
        for one, other in zip(whole[replica::2], share, strict=True):
            same(one, other)
    for one, other in zip(
        whole[6:], taken(open_batches(tiny, mixed[0], name, first_step=3), 2), strict=True
    ):
        same(one, other)


@pytest.mark.parametrize("workers", sweep((0, 2), (0,)))
def test_a_lost_image_leaves_a_gap_as_long_as_its_tiles_and_nothing_else_moves(
    tiny, mixed, tmp_path, workers
):
    """One cannot be decoded, another has not the size that its index says."""
    for file in mixed[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sound = epoch_of(open_batches(tiny, tmp_path, "anyres_max_9"))
    tar, layout = tmp_path / "0.tar", layout_of("anyres_max_9")
    index, content = read_index(tar), bytearray(tar.read_bytes())
    text, image = index.members[1]
    end = image.offset + image.size
    content[end - 40 : end] = bytes(40)
    tar.write_bytes(content)
    index.members[1] = (text, image._replace(crc32=zlib.crc32(content[image.offset : end])))
    (size,) = index.image_sizes[2]
    near = (
        (size[0] + wider, size[1] + higher)
        for wider, higher in itertools.product(range(9), range(9))
    )
    wrong = next(
        s for s in near if s != size and layout.tiling(*s).shown == layout.tiling(*size).shown
    )
    index.image_sizes[2] = (wrong,)
    write_index(tar, index)
    lost = {}
    damaged = epoch_of(open_batches(tiny, tmp_path, "anyres_max_9", workers=workers))
    for before, after in zip(sound, damaged, strict=True):
        lost |= {fault.key: fault for _, fault in after.faults}
        assert after.keys == tuple(key for key in before.keys if key not in lost)
        assert torch.equal(after.position_ids, before.position_ids), (
            "gaps are as long as what they stand for"
        )
        kept = after.labels != IGNORE
        assert torch.equal(after.labels[kept], before.labels[kept])
        assert int((after.input_ids == IMAGE_POSITION).sum()) == sum(
            tiling.positions for tiling in after.tilings
        )
        assert (0 if after.tiles is None else len(after.tiles)) == sum(
            tiling.tiles for tiling in after.tilings
        )
    assert {key: fault.reason for key, fault in lost.items()} == {
        "0001": "undecodable_image",
        "0002": "other_size",
    }
    said = (
        "image 0: {} x {} pixels, but its index says {} x {}; index its shard again: "
        "mmtrain index CONFIG --rebuild"
    )
    assert lost["0002"].detail.startswith(said.format(*size, *wrong))


def test_tiles_follow_from_sizes_as_exif_turns_them(tiny, tmp_path):
    """Images of 9 x 5 and 7 x 3, as stored, are turned on their sides; 4 x 4 is not."""
    files = []
    for key, (width, height, orientation) in {
        "a": (9, 5, 6),
        "b": (7, 3, 8),
        "c": (4, 4, 1),
    }.items():
        files += [(f"{key}.json", conversation("<image>Say.", "a circle"))]
        files += [(f"{key}.png", noise(width, height, orientation))]
    write_tar(tmp_path / "s.tar", files)
    batches = epoch_of(open_batches(tiny, tmp_path, "anyres", "data.pack_length=4000"))
    assert not any(batch.faults for batch in batches)
    sizes = {(tiling.width, tiling.height) for batch in batches for tiling in batch.tilings}
    assert sizes == {(5, 9), (3, 7), (4, 4)}


def test_an_image_too_thin_for_its_grid_is_told_before_the_run_and_costs_its_sample_alone(
    tiny, tmp_path
):
    thin = [("a.json", conversation("<image>Say.", "a circle")), ("a.png", noise(10, 2100))]
    both = [
        ("b.json", conversation("<image><image>Say.", "a circle")),
        ("b.0.png", noise(10, 2100)),
    ]
    rest = [("b.1.png", noise(40, 40)), ("c.json", conversation("Say.", "a circle"))]
    write_tar(tmp_path / "s.tar", [*thin, *both, *rest])
    packed = open_batches(tiny, tmp_path, "anyres_max_9", "model.vision.pinpoints=[[3200, 32]]")
    (fault,) = packed.catalog.faults()
    assert (fault.key, fault.reason) == ("a", "unfit_shape") and "10 x 2100 pixels" in fault.detail
    assert packed.order.epoch(0).unusable == 1
    batch = taken(packed, 1)[0]
    assert set(batch.keys) == {"b", "c"} and {tiling.tiles for tiling in batch.tilings} == {1}, (
        "of several, squares"
    )


def test_a_worker_has_room_for_every_pack_and_not_for_many_more(tiny, mixed):
    for name in SIZED:
        packed = open_batches(tiny, mixed[0], name, "train.packs_per_microbatch=1")
        seen = max(0 if batch.tiles is None else len(batch.tiles) for batch in epoch_of(packed))
        assert seen <= packed.most_tiles <= 3 * seen, name


def test_memory_that_the_system_refuses_for_workers_is_told_with_what_to_lower(tiny, mixed):
    vast = (
        "data.pack_length=10000000",
        "train.packs_per_step=100000",
        "train.packs_per_microbatch=100000",
    )
    packed = open_batches(tiny, mixed[0], "tiles", *vast, workers=2)
    with pytest.raises(
        UserError,
        match=r"^data\.workers: 2 workers need .* GiB .* Lower data\.workers or "
        r"data\.max_tiles_per_pack",
    ):
        next(iter(packed))
