"""What indexes tell, against what was written into the tars; how full packs become, against
packings made by hand.
"""

import pytest
from archives import conversation, picture, write_tar
from catalogs import sample_set

from mmtrain.data.shards.index import TextLengths, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.order import Capacity
from mmtrain.inspection.survey import Fill, epoch_fill, survey
from mmtrain.layouts.square import Square


def indexed(path, files, **lengths):
    write_tar(path, files)
    index = scan_shard(path, lambda sample: None)
    index.texts = {name: TextLengths(tokens) for name, tokens in lengths.items()}
    write_index(path, index)
    return path


@pytest.fixture
def tars(tmp_path):
    """Samples with 1, 0 and 2 images, and one whose image is none; three and one in a tar."""
    ask = conversation("<image><image>What?", "Two.")
    first = [("a.json", conversation("<image>What?", "It.")), ("a.png", picture(5, 7))]
    first += [("b.json", conversation("Hi.", "Ho."))]
    first += [("c.json", ask), ("c.0.png", picture(9, 2)), ("c.1.png", picture(3, 3))]
    broken = [("d.json", conversation("<image>What?", "It.")), ("d.png", b"none")]
    return [
        indexed(tmp_path / "0.tar", first, a=[10, 20, 30]),
        indexed(tmp_path / "1.tar", broken, a=[0]),
    ]


def test_samples_images_and_lengths_are_those_of_the_shards(tars):
    found = survey(tars)
    assert found.shards == 2
    assert found.bytes == sum(tar.stat().st_size for tar in tars)
    assert found.images.tolist() == [1, 0, 2, 1]
    assert found.image_sizes.tolist() == [[5, 7], [9, 2], [3, 3]]
    assert found.longer_sides.tolist() == [7, 9, 3]
    assert found.fingerprint == "a"
    assert found.text_tokens.tolist() == [10, 20, 30]
    assert found.reasons == {"undecodable_image": 1}


def test_planning_gets_each_images_tokens_and_no_unusable_sample(tars):
    (one,) = survey(tars, layout=Square(100)).catalog.sample_sets
    assert one.lengths.tolist() == [110, 20, 230, 0]
    assert one.tiles.tolist() == [1, 0, 2, 1]
    assert one.firsts.tolist() == [0, 3, 4]


def test_lengths_need_one_fingerprint_that_all_shards_have(tars, tmp_path):
    hi = [("h.json", conversation("Hi.", "Ho."))]
    both = indexed(tmp_path / "2.tar", hi, a=[4], b=[5])
    none = indexed(tmp_path / "3.tar", hi)
    for more in (both, none):
        found = survey([*tars, more])
        assert found.fingerprint is None and found.text_tokens is None
        assert found.reasons == {"undecodable_image": 1}
    assert survey([both]).fingerprint is None
    assert survey([both], "b").text_tokens.tolist() == [5]


@pytest.mark.parametrize(
    ("lengths", "tiles", "capacity", "expected"),
    [
        # 60 + 40, 50 + 50, 30; 120 does not fit, 0 cannot be used
        (
            [60, 40, 50, 120, 50, 0, 30],
            [0] * 7,
            Capacity(100),
            Fill(100, packs=3, fill=230 / 300, overlong=1),
        ),
        (
            [30, 30, 30, 30],
            [1, 1, 1, 3],
            Capacity(100, tiles=2),
            Fill(100, packs=2, fill=90 / 200, overlong=1),
        ),
        ([120, 130], [0, 0], Capacity(100), Fill(100, packs=0, fill=0.0, overlong=2)),
    ],
)
def test_fill_is_the_share_of_the_packs_tokens_that_samples_take(
    lengths, tiles, capacity, expected
):
    one = sample_set(lengths, [len(lengths)], tiles=tiles)
    assert epoch_fill(one, capacity) == expected
