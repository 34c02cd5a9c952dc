"""webdataset.WebDataset reads every kind of shard that is written or indexed here, with the same
keys and members.
"""

import itertools
import json
import random
import tarfile

import pytest
import webdataset
from archives import conversation, picture, write_tar

from mmtrain.data.prepare.sharding import write_shards
from mmtrain.data.samples.records import IMAGE_SUFFIXES
from mmtrain.data.shards.index import read_index, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.demo.data import draw_samples

ONE = picture(4, 3)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def record(images: int) -> dict:
    return json.loads(conversation("<image>" * images + "What?", "Things."))


def written(folder, kind: str) -> list:
    """Shards of this project: the demo's, and samples without image, with one of each suffix, and
    with several.
    """
    if kind == "demo":
        samples = itertools.islice(draw_samples("held-out"), 5)
    else:
        samples = [("text", record(0), []), ("x" * 90, record(0), [])]
        samples += [(f"one-{suffix}", record(1), [(suffix, ONE)]) for suffix in IMAGE_SUFFIXES]
        samples += [("eleven", record(11), [("png", ONE), ("jpg", ONE)] * 5 + [("webp", ONE)])]
    write_shards(samples, folder, 4)
    return sorted(folder.glob("*.tar"))


def foreign(folder, form: int) -> list:
    """Other people's shards: folders, dots, upper case, files that are no sample's, long names, any
    order.
    """
    draw, files = random.Random(form), []
    for number in range(40):
        stem = (
            draw.choice(["", "./", "a.b/c/", "é/", f"{'long/' * 30}"])
            + f"{draw.choice('xyz')}-{number}"
        )
        images = draw.choice([["jpg"], ["JPEG"], ["0.Png"], ["1.png", "0.webp"], []])
        members = [(f"{stem}.{suffix}", ONE) for suffix in images]
        members.append(
            (
                f"{stem}.{draw.choice(['json', 'JSON'])}",
                conversation("<image>" * len(images) + "Q", "A"),
            )
        )
        members += [
            (f"{stem}.seg.{end}", draw.randbytes(600))
            for end in draw.choice([[], ["txt"], ["npy", "cls"]])
        ]
        files += draw.sample(members, len(members))
    tar = write_tar(folder / "foreign.tar", files, form)
    write_index(tar, scan_shard(tar, lambda sample: None))
    return [tar]


@pytest.mark.parametrize("kind", ["own", "demo", *FORMATS])
def test_webdataset_reads_the_keys_and_members_that_the_index_holds(tmp_path, kind):
    tars = foreign(tmp_path, FORMATS[kind]) if kind in FORMATS else written(tmp_path, kind)
    read = list(webdataset.WebDataset([str(tar) for tar in tars], shardshuffle=False))
    places = [(tar, place) for tar in tars for place in range(len(read_index(tar).keys))]
    assert len(read) == len(places) >= 5
    for sample, (tar, place) in zip(read, places, strict=True):
        index, content = read_index(tar), tar.read_bytes()
        assert (sample.pop("__key__"), sample.pop("__url__")) == (index.keys[place], str(tar))
        members = {
            one.suffix: content[one.offset : one.offset + one.size] for one in index.members[place]
        }
        assert {
            name: value for name, value in sample.items() if not name.startswith("__")
        } == members
        assert place not in index.faults["llava"]
