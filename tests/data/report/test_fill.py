"""data/fill.py: how full packs become, against packings made by hand."""

import numpy as np
import pytest

from mmtrain.data.report import survey as fill_module
from mmtrain.data.report.survey import Fill, best_nearby, epoch_fill, nearby_lengths
from mmtrain.data.stream.order import Capacity, SampleSet


def one_set(lengths, images=None):
    lengths = np.asarray(lengths, np.int32)
    images = np.zeros(len(lengths), np.int32) if images is None else np.asarray(images, np.int32)
    return [SampleSet(1.0, np.array([len(lengths)]), lengths, images)]


def test_fill_is_the_share_of_the_packs_tokens_that_samples_take():
    # 60 + 40, 50 + 50, 30; 120 does not fit, 0 cannot be used
    found = epoch_fill(one_set([60, 40, 50, 120, 50, 0, 30]), Capacity(100))
    assert found == Fill(pack_length=100, packs=3, fill=230 / 300, overlong=1)


def test_an_image_cap_counts():
    found = epoch_fill(one_set([30, 30, 30, 30], images=[1, 1, 1, 3]), Capacity(100, images=2))
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
    monkeypatch.setattr(fill_module, "SEARCHED_SAMPLES", 300)
    # 9,000 samples are 2 windows of 4,500, which three by three make 1,500 packs each
    assert best_nearby(one_set([600] * 9000), Capacity(2048)) == Fill(1824, packs=3000, fill=1800 / 1824, overlong=0)
