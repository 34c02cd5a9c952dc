"""The demo's shards: made once, in the cache, in LLaVA's form."""

import hashlib
import io
import json
import multiprocessing
from itertools import islice

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.data.shards.shard_list import demo_shards, expand_shards
from mmtrain.data.stream.images import image_transform
from mmtrain.demo.data import SAMPLES, draw_samples, make_demo_shards
from mmtrain.demo.pictures import SIZE
from mmtrain.layouts.tiles import Tiles


def made(name):
    """The demo's shards, made as a run makes them."""
    make_demo_shards(name, "data.shards")
    return expand_shards(name)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_shards_are_made_once_and_any_webdataset_reader_opens_them(cache, logged):
    paths = made("demo:held-out")
    assert "256 pictures" in logged[0] and "made demo:held-out in" in logged[1]
    samples = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    assert len(samples) == SAMPLES["held-out"]
    for sample in samples:
        record = json.loads(sample["json"])
        assert record["conversations"][0]["value"].startswith("<image>\n")
        assert Image.open(io.BytesIO(sample["png"])).size == (64, 64)
    changed = [path.stat().st_mtime_ns for path in paths]
    assert [path.stat().st_mtime_ns for path in made("demo:held-out")] == changed
    assert len(logged) == 2


def test_runs_that_start_together_make_the_same_shards_once(cache):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(made, ["demo:held-out"] * 2)
    folder = demo_shards("demo:held-out")
    assert first == second and list(folder.parent.iterdir()) == [folder]


def test_where_nothing_can_be_locked_the_faster_of_two_runs_makes_the_shards(cache, monkeypatch):
    def overtaken(split):
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        made("demo:held-out")
        yield from draw_samples(split)

    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    monkeypatch.setattr("mmtrain.demo.data.draw_samples", overtaken)
    assert len(made("demo:held-out")) == 1


@pytest.mark.parametrize("name", ["demo:held-out", "demo:next-held-out"])
def test_the_shards_are_the_same_bytes_wherever_they_are_made(cache, monkeypatch, name):
    first = [path.read_bytes() for path in made(name)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "elsewhere"))
    assert [path.read_bytes() for path in made(name)] == first


@pytest.mark.nightly
def test_what_comes_next_is_asked_about_the_same_pictures_none_of_which_is_held_out():
    pictures = {
        split: [images for _, _, images in islice(draw_samples(split), 300)] for split in SAMPLES
    }
    assert (
        pictures["next-train"] == pictures["train"]
        and pictures["next-held-out"] == pictures["held-out"]
    )
    assert (
        len({repr(images) for images in pictures["train"] + pictures["held-out"]})
        == 300 + SAMPLES["held-out"]
    )


def test_a_sheet_holds_a_picture_of_the_demo_in_one_of_its_tiles_and_nothing_else():
    places = set()
    for (_, _, pictures), (_, record, sheets) in islice(
        zip(draw_samples("train"), draw_samples("sheet-train"), strict=True), 40
    ):
        picture, sheet = (Image.open(io.BytesIO(found[0][1])) for found in (pictures, sheets))
        tiles = image_transform("demo:vision").cut(sheet, Tiles(16, SIZE).tiling(*sheet.size))
        held = [
            tile.equal(torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy()))
            for tile in tiles
        ]
        plain = [len(tile.flatten(1).unique(dim=1)[0]) == 1 for tile in tiles[:-1]]
        assert sum(held) == 1 and sum(plain) >= 3
        places.add(held.index(True))
        assert record["conversations"][0]["value"].startswith("<image>\n")
    assert places == {0, 1, 2, 3}


def test_shards_that_runs_have_begun_on_stay_the_same():
    """Reference: what was said before there was another kind of question, by draws that the
    pictures share.
    """
    said = repr([record for _, record, _ in draw_samples("held-out")])
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "6e0d9a1144aa755e"


def test_shards_that_nobody_has_made_are_named_with_the_way_to_get_them(cache):
    with pytest.raises(
        UserError,
        match=r"^eval\.shards: demo:held-out is not in \S+, where `mmtrain train` puts it",
    ):
        expand_shards(["demo:held-out"], "eval.shards")


def test_what_the_demo_does_not_have_is_refused(cache):
    with pytest.raises(
        UserError, match=r"data\.shards: demo:test: the demo has no such data, only demo:train"
    ):
        made("demo:test")


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(cache):
    (cache / "mmtrain").write_text("a file where the folder should be")
    with pytest.raises(
        UserError, match=r"cannot make demo:held-out in .*XDG_CACHE_HOME says where caches go"
    ):
        made("demo:held-out")


def test_a_cache_from_which_shards_were_deleted_is_made_again(cache, logged):
    paths = made("demo:held-out")
    content = paths[0].read_bytes()
    paths[0].unlink()
    logged.clear()
    assert made("demo:held-out") == paths and len(logged) == 2
    assert paths[0].read_bytes() == content


def test_without_scikit_learn_the_way_to_get_it_is_said(cache, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="scikit-learn, which is not installed"):
        made("demo:held-out")
    assert not list((cache / "mmtrain" / "demo").iterdir())
