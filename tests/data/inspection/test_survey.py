"""What indexes tell, against what was written into the tars; how full packs become, against packings made by hand."""

import numpy as np
import pytest
from archives import conversation, picture, write_tar

from mmtrain.data.inspection import survey as survey_module
from mmtrain.data.inspection.survey import Fill, best_nearby, epoch_fill, histogram, nearby_lengths, quantile, survey
from mmtrain.data.shards.index import TextLengths, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.order import Capacity, SampleSet
from mmtrain.models.layouts.square import Square


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
        indexed(tmp_path / "0.tar", first, one=[10, 20, 30]),
        indexed(tmp_path / "1.tar", broken, one=[0]),
    ]


def test_samples_images_and_lengths_are_those_of_the_shards(tars):
    found = survey(tars)
    assert found.shard_sizes.tolist() == [3, 1]
    assert found.bytes == sum(tar.stat().st_size for tar in tars)
    assert found.images.tolist() == [1, 0, 2, 1]
    assert found.image_sizes.tolist() == [[5, 7], [9, 2], [3, 3]]
    assert found.longer_sides.tolist() == [7, 9, 3]
    assert found.fingerprint == "one"
    assert found.text_tokens.tolist() == [10, 20, 30]
    assert found.reasons == {"undecodable_image": 1}


def test_planning_gets_each_images_tokens_and_no_unusable_sample(tars):
    one = survey(tars, layout=Square(100)).sample_set
    assert one.lengths.tolist() == [110, 20, 230, 0]
    assert one.tiles.tolist() == [1, 0, 2, 1]
    assert one.shard_sizes.tolist() == [3, 1]


def test_lengths_need_one_fingerprint_that_all_shards_have(tars, tmp_path):
    hi = [("h.json", conversation("Hi.", "Ho."))]
    both = indexed(tmp_path / "2.tar", hi, one=[4], other=[5])
    none = indexed(tmp_path / "3.tar", hi)
    for more in (both, none):
        found = survey([*tars, more])
        assert found.fingerprint is None and found.text_tokens is None
        assert found.reasons == {"undecodable_image": 1}
    assert survey([both]).fingerprint is None
    assert survey([both], "other").text_tokens.tolist() == [5]


def test_a_bin_is_a_round_number_wide_and_the_highest_percent_shares_one():
    assert histogram(np.array([3, 3, 4, 6]), 10) == ([3, 4, 5, 6, 7], [2, 1, 0, 1])
    assert histogram(np.array([64] * 5), 10) == ([64, 65], [5])
    values = np.array([*range(100, 200), *range(100, 200), 9000])
    assert histogram(values, 5) == ([100, 120, 140, 160, 180, 200, 9001], [40, 40, 40, 40, 40, 1])


def test_a_quantile_is_one_of_the_values():
    values = np.array([10, 40, 20, 30])
    assert [quantile(values, share) for share in (0.0, 0.25, 0.26, 0.5, 0.75, 0.99, 1.0)] == [
        10,
        10,
        20,
        20,
        30,
        40,
        40,
    ]


def one_set(lengths, images=None):
    lengths = np.asarray(lengths, np.int32)
    images = np.zeros(len(lengths), np.int32) if images is None else np.asarray(images, np.int32)
    return [SampleSet(1.0, np.array([len(lengths)]), lengths, images)]


def test_fill_is_the_share_of_the_packs_tokens_that_samples_take():
    # 60 + 40, 50 + 50, 30; 120 does not fit, 0 cannot be used
    found = epoch_fill(one_set([60, 40, 50, 120, 50, 0, 30]), Capacity(100))
    assert found == Fill(pack_length=100, packs=3, fill=230 / 300, overlong=1)


def test_an_image_cap_counts():
    found = epoch_fill(one_set([30, 30, 30, 30], images=[1, 1, 1, 3]), Capacity(100, tiles=2))
    assert found == Fill(pack_length=100, packs=2, fill=90 / 200, overlong=1)


def test_data_without_a_sample_that_fits_fills_nothing():
    assert epoch_fill(one_set([120, 130]), Capacity(100)) == Fill(pack_length=100, packs=0, fill=0.0, overlong=2)


@pytest.mark.parametrize(
    ("length", "near"),
    [
        (8192, list(range(7168, 9217, 64))),
        (4096, list(range(3584, 4609, 64))),
        (2048, list(range(1792, 2305, 32))),
        (100, [88, 96, 100, 104, 112]),
        (1, [1]),
    ],
)
def test_near_is_within_an_eighth(length, near):
    assert nearby_lengths(length) == near


def test_the_best_length_is_just_above_a_multiple_of_the_samples():
    # 1792 and 1824 are the candidates around 3 x 600: the first holds two, the second three
    sets = one_set([600] * 300)
    assert epoch_fill(sets, Capacity(2048)) == Fill(2048, packs=100, fill=1800 / 2048, overlong=0)
    assert best_nearby(sets, Capacity(2048)) == Fill(1824, packs=100, fill=1800 / 1824, overlong=0)


def test_a_length_that_would_skip_more_samples_is_not_proposed():
    sets = one_set([600] * 300 + [2040])
    assert best_nearby(sets, Capacity(2048)).pack_length == 2048


def test_among_equals_the_nearest_length_is_proposed():
    assert best_nearby(one_set([9999] * 5), Capacity(4000)) == Fill(4000, packs=0, fill=0.0, overlong=5)


def test_large_data_are_searched_in_part_and_planned_as_a_whole(monkeypatch):
    monkeypatch.setattr(survey_module, "SEARCHED_SAMPLES", 300)
    # 9,000 samples are 2 windows of 4,500, which three by three make 1,500 packs each
    assert best_nearby(one_set([600] * 9000), Capacity(2048)) == Fill(1824, packs=3000, fill=1800 / 1824, overlong=0)
