"""pack_counts.py: the packs of all groups are those of the order, and are counted once."""

import os

import numpy as np
import pytest

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.stream import pack_counts
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.pack_counts import with_packs
from mmtrain.data.stream.stored import stored_data

pytestmark = pytest.mark.usefixtures("own_cache")


def config_of(tiny, *overrides):
    groups = ("data.pack_window=16", "data.shuffle_shards=1", "data.workers=0")
    return load_config(tiny / "config.yaml", [*groups, *overrides])


@pytest.mark.parametrize("workers", [1, 2])
def test_whole_epochs_are_counted_once_and_give_steps_and_packs(
    tiny, tmp_path, monkeypatch, workers
):
    config = config_of(tiny, "train.max_steps=null", "train.epochs=3")
    data = with_packs(config, stored_data(config), workers, None)
    walked = PackedBatches(config, 0, 1, data=stored_data(config))
    counted = PackedBatches(config, 0, 1, data=data)
    assert counted.max_steps == walked.max_steps
    epochs = [counted.order.first_pack(epoch) for epoch in range(4)]
    assert epochs == [walked.order.first_pack(epoch) for epoch in range(4)]
    assert len(data.pack_counts) == sum(walked.order.epoch(epoch).groups for epoch in range(3)) == 6
    assert f" in {epochs[1]} packs of " in counted.summary and "about" not in counted.summary

    with monkeypatch.context() as patch:
        patch.setattr(pack_counts, "_count", None)  # the file says it
        again = with_packs(config, stored_data(config), workers, None)
    assert np.array_equal(again.pack_counts, data.pack_counts)
    (file,) = (tmp_path / "cache").rglob("*-3.npy")
    os.truncate(file, 130)
    assert np.array_equal(
        with_packs(config, stored_data(config), 1, None).pack_counts, data.pack_counts
    )
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=r"-3\.npy: cannot be written .*XDG_CACHE_HOME"):
        with_packs(config, stored_data(config), 1, None)


def test_a_number_of_steps_needs_no_count_and_packs_of_an_epoch_are_an_estimate(tiny):
    config = config_of(tiny)
    data = stored_data(config)
    assert with_packs(config, data) is data
    packed = PackedBatches(config, 0, 1, data=data)
    assert "an epoch: 96 samples in about " in packed.summary
    one_group = load_config(tiny / "config.yaml", [])
    assert "about" not in PackedBatches(one_group, 0, 1).summary
