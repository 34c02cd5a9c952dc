"""Runs on samples as others write them: their formats are found before the run begins, and kept."""

import itertools
import json

import pytest
import webdataset
import yaml
from archives import picture
from rank_runs import train

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import find_start
from mmtrain.config.load import load_config
from mmtrain.launching.data import check_data, with_formats


def caption(number: int) -> dict:
    return {
        "jpg": picture(9, 7, "JPEG") if number != 3 else b"none",
        "txt": f"A red door, number {number}.",
    }


def messages(number: int) -> dict:
    turns = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": f"It is door {number}."},
    ]
    return {"png": picture(9, 7), "json": {"messages": turns, "images": ["a.png"]}}


def unlike(number: int) -> dict:
    return {"json": {"messages": [{"role": "user", "content": "What?"}]}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A folder with a folder of one tar of 24 samples for each way to write them."""
    folder = tmp_path_factory.mktemp("shards")
    for make in (caption, messages, unlike):
        (folder / make.__name__).mkdir()
        with webdataset.TarWriter(str(folder / make.__name__ / "s.tar")) as writer:
            for number in range(24):
                writer.write({"__key__": f"{number:04d}", **make(number)})
    return folder


def asked(tiny, shards, *overrides):
    """A configuration of several data sets, given as name=format (or name alone), and of other
    keys.
    """
    sets = [
        one.partition("=")
        for one in overrides
        if one.split("=")[0] in ("caption", "messages", "llava")
    ]
    listed = [
        {
            "name": name,
            "shards": str(shards / name if name != "llava" else tiny / "shards"),
            "format": form or None,
        }
        for name, _, form in sets
    ]
    others = [one for one in overrides if "." in one.split("=")[0]]
    named = ["data.shards=null", f"data.sets={json.dumps(listed)}"] if listed else []
    return load_config(tiny / "config.yaml", [*named, *others])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("caption", "messages", "llava"), ("caption", "caption", "sharegpt", "llava")),
        (("llava", "caption"), ("llava", "llava", "caption")),
        (("caption", "messages=sharegpt"), ("caption", "caption", "sharegpt")),
        (("messages=auto", "llava", "data.format=llava"), ("llava", "sharegpt", "llava")),
        (("messages", "data.format=sharegpt"), ("sharegpt", "sharegpt")),
        (("messages=sharegpt", "caption=caption"), ("sharegpt", "sharegpt", "caption")),
    ],
)
def test_formats_that_were_found_stand_in_the_configuration_beside_those_that_were_given(
    tiny, shards, given, found
):
    config = with_formats(asked(tiny, shards, *given))
    assert (config.data.format, *(one.format for one in config.data.sets)) == found
    assert with_formats(config) == config and config.eval.format == "auto"


def test_held_out_shards_have_a_format_of_their_own(tiny, shards, logged):
    config = with_formats(load_config(tiny / "config.yaml", [f"eval.shards={shards}/caption"]))
    assert (config.data.format, config.eval.format) == ("llava", "caption")
    assert logged == [
        "data.shards: format llava (KEY.json), as in 96 of the first 96 samples",
        "eval.shards: format caption (KEY.txt), as in 24 of the first 24 samples",
    ]


def test_a_data_set_without_a_sample_that_can_be_trained_on_ends_the_launch(tiny, shards):
    for form, said in (
        ("auto", "none of the first 24 samples"),
        ("sharegpt", r"no sample in 1 shards .* \(24 no_ans"),
    ):
        config = load_config(
            tiny / "config.yaml", [f"data.shards={shards}/unlike", f"data.format={form}"]
        )
        with pytest.raises(UserError, match=rf"^data\.shards: {said}"):
            check_data(config, others_wait=False)


def test_a_run_trains_on_all_that_others_wrote_and_goes_on_by_the_same_words(
    tiny, shards, tmp_path
):
    sets = [{"name": name, "shards": str(shards / name)} for name in ("caption", "messages")]
    words = [
        "data.shards=null",
        f"data.sets={json.dumps(sets)}",
        "data.ledger=true",
        "data.max_quarantine_rate=1",
    ]
    words += [
        f"run.dir={tmp_path}",
        "parallel.pipeline=1",
        "train.packs_per_step=4",
        "data.workers=0",
    ]
    first = train(tiny / "config.yaml", *words, "train.max_steps=2")
    kept = yaml.safe_load((first.folder / "config.yaml").read_text())["data"]
    assert (kept["format"], [one["format"] for one in kept["sets"]]) == (
        "caption",
        ["caption", "sharegpt"],
    )
    assert (
        "data.sets.1.shards: format sharegpt (KEY.json), as in 24 of the first 24 samples"
        in first.printed
    )
    again = train(tiny / "config.yaml", *words, "train.max_steps=4", allow=["train.max_steps"])
    assert "(step 2 of 4)" in again.printed and len(again.losses()) == 4
    keys = list(itertools.chain(*(line["keys"] for line in again.lines("samples.jsonl"))))
    everything = {
        f"{name}/{number:04d}" for name in ("caption", "messages") for number in range(24)
    }
    assert set(keys[:47]) == everything - {"caption/0003"}, "an epoch"
    (fault,) = again.lines("quarantine.jsonl")
    assert (fault["key"], fault["reason"]) == ("caption/0003", "undecodable_image")
    other = load_config(tiny / "config.yaml", [*words, "train.max_steps=4", "data.format=llava"])
    with pytest.raises(UserError, match=r'data\.format: was "caption", is now "llava"'):
        find_start(with_formats(other))
