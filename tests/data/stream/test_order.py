import itertools
import os
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import catalogs
import numpy as np
import pytest
from processes import ran_python

from mmtrain.base.errors import UserError
from mmtrain.data.stream.order import (
    UNUSABLE,
    Capacity,
    PackOrder,
    pack_best_fit,
)

HELD_OUT = -1  # the length, negative, of a sample that is kept for evaluation

PLAN_OF_A_FRESH_PROCESS = """
import hashlib
import numpy as np
from catalogs import sample_set
from mmtrain.data.stream.order import Capacity, PackOrder

numbers = np.arange(700)
room = Capacity(200, 6)
captions = sample_set(20 + numbers * 7919 % 41, [100] * 7, 1.5, np.ones(700), room)
lengths = (8 * (numbers[:90] * 7 % 30 - 1)).clip(-1)
long = sample_set(lengths, [30, 0, 60], 1.0, numbers[:90] % 3, room)
order = PackOrder([captions, long], 17, room, shuffle_shards=4, pack_window=64)
epoch = order.epoch(3)
digest = hashlib.sha256()
for group in range(epoch.groups):
    made = order.group(3, group)
    digest.update(made.samples.astype("<i8").tobytes() + made.starts.astype("<i8").tobytes())
print(digest.hexdigest(), epoch.groups, epoch.drawn, epoch.overlong, epoch.unusable)
"""


def sample_set(lengths, shards=1, weight=1.0, images=None):
    """A set whose samples lie in shards of equal size, in packs of any capacity."""
    assert len(lengths) % shards == 0
    return catalogs.sample_set(lengths, [len(lengths) // shards] * shards, weight, images)


def fitted(sets, capacity):
    """The sets with the numbers of samples that fit a pack of this capacity."""
    made = []
    for one in sets:
        sizes = np.diff(one.firsts)
        made.append(catalogs.sample_set(one.lengths, sizes, one.weight, one.tiles, capacity))
    return made


@dataclass
class Plan:
    """A whole epoch, its groups one after the other."""

    samples: np.ndarray
    starts: np.ndarray
    drawn: int
    overlong: int
    unusable: int
    groups: list

    def __len__(self):
        return len(self.starts) - 1


def plan(sets, seed=0, epoch=0, tokens=100, images=None, shuffle_shards=4, pack_window=64):
    capacity = Capacity(tokens, images)
    order = PackOrder(fitted(sets, capacity), seed, capacity, shuffle_shards, pack_window)
    made = order.epoch(epoch)
    groups = [order.group(epoch, number) for number in range(made.groups)]
    sizes = np.concatenate([np.diff(group.starts) for group in groups])
    return Plan(
        np.concatenate([group.samples for group in groups]),
        np.concatenate([[0], np.cumsum(sizes)]),
        made.drawn,
        made.overlong,
        made.unusable,
        groups,
    )


def packs_of(epoch_plan):
    return [
        epoch_plan.samples[start:end].tolist()
        for start, end in itertools.pairwise(epoch_plan.starts)
    ]


def varied_sets():
    """Two sets with all there is: weights, several images, held-out, unusable and overlong
    samples.
    """
    draw = np.random.RandomState(5)
    first = sample_set(
        draw.randint(10, 60, 600), shards=6, weight=1.5, images=draw.randint(0, 3, 600)
    )
    lengths = draw.randint(1, 130, 80)
    lengths[::7], lengths[::11] = HELD_OUT, UNUSABLE
    return [first, sample_set(lengths, shards=4, weight=2.25, images=draw.randint(0, 7, 80))]


def best_fit_by_definition(lengths, tokens, images, cap):
    """Best-fit decreasing as the textbook says it: for each document look at every open pack."""
    packs = []  # [free tokens, images still allowed, members]
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = [p for p in packs if p[0] >= lengths[position] and p[1] >= images[position]]
        if room:
            pack = min(room, key=lambda p: p[0])  # of equal ones the first, which was opened first
        else:
            pack = [tokens, cap, []]
            packs.append(pack)
        pack[0] -= lengths[position]
        pack[1] -= images[position]
        pack[2].append(position)
    return [pack[2] for pack in packs]


@pytest.mark.parametrize("seed", range(12))
def test_best_fit_is_the_textbooks_with_and_without_an_image_cap(seed):
    draw = np.random.RandomState(seed)
    count, tokens = int(draw.randint(1, 200)), int(draw.choice([20, 100, 1000]))
    lengths = draw.randint(1, tokens + 1, count) // draw.choice([1, 3, 8], count) + 1
    lengths = lengths.clip(max=tokens)
    images = draw.randint(0, 4, count)
    for cap in (3, 4, 7, 33, 40, 500, None):
        expected = best_fit_by_definition(
            lengths.tolist(), tokens, images.tolist(), 10**6 if cap is None else cap
        )
        assert pack_best_fit(lengths, Capacity(tokens, cap), images) == expected
    assert pack_best_fit(lengths, Capacity(tokens)) == expected


@pytest.mark.parametrize("cap", [2, 3, 6, None])
def test_packs_hold_all_that_fit_and_never_exceed_their_capacity(cap):
    sets = varied_sets()
    lengths = np.concatenate([one.lengths for one in sets])
    images = np.concatenate([one.tiles for one in sets])
    made = plan(sets, images=cap)
    assert made.starts[0] == 0
    assert made.starts[-1] == len(made.samples) == made.drawn - made.overlong - made.unusable
    for pack in packs_of(made):
        assert len(pack) > 0
        assert lengths[pack].sum() <= 100
        assert min(lengths[pack]) > 0
        assert cap is None or images[pack].sum() <= cap


def test_held_out_samples_are_not_drawn_unusable_and_overlong_ones_are_counted_and_not_packed():
    lengths = [50, HELD_OUT, UNUSABLE, 101, 100, UNUSABLE, 30, HELD_OUT]
    images = [0, 0, 9, 9, 0, 0, 4, 0]
    made = plan([sample_set(lengths, weight=2.0, images=images)], images=3)
    assert Counter(made.samples.tolist()) == {0: 2, 4: 2}
    assert (made.drawn, made.overlong, made.unusable) == (2 * 6, 2 * 2, 2 * 2)


def test_an_epoch_of_weight_one_holds_every_sample_once_in_an_order_of_its_own():
    sets = [sample_set([10] * 120, shards=6), sample_set([7] * 30)]
    orders = [
        plan(sets, seed=seed, epoch=epoch).samples.tolist()
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    assert all(sorted(order) == list(range(150)) for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)


@pytest.mark.parametrize(
    ("lengths", "weight", "times"),
    [
        ([10] * 60, 2.5, {2: 30, 3: 30}),
        ([10] * 40, 0.27, {0: 29, 1: 11}),  # 10.8
        ([10, HELD_OUT] * 20, 0.5, {0: 30, 1: 10}),
        ([10] * 40, 0.01, {0: 40}),
    ],
)
def test_a_weight_is_passes_over_the_set_and_the_rest_a_part_of_one_more(lengths, weight, times):
    made = plan([sample_set(lengths, shards=2, weight=weight), sample_set([10] * 20)])
    drawn = Counter(made.samples.tolist())
    assert Counter(drawn[number] for number in range(len(lengths))) == times
    assert made.drawn == sum(count * samples for count, samples in times.items()) + 20


def test_the_partial_pass_of_a_set_of_one_shard_moves_over_the_epochs():
    sets = [sample_set([10] * 20, weight=0.25)]
    epochs = [set(plan(sets, epoch=epoch).samples.tolist()) for epoch in range(40)]
    assert all(len(epoch) == 5 for epoch in epochs)
    assert set.union(*epochs) == set(range(20))


def test_every_group_holds_each_set_in_proportion_and_few_shards():
    # 8 + 3 * 8 = 32 visits of shards in groups of 4: 8 groups of 1 shard of the first set and 3 of
    # the second
    sets = [sample_set([100] * 80, shards=8), sample_set([100] * 80, shards=8, weight=3.0)]
    samples = plan(sets, pack_window=16).samples  # a sample fills a pack
    assert len(samples) == 320
    for group in samples.reshape(8, 40):
        first, second = group[group < 80], group[group >= 80]
        assert (len(first), len(set(first // 10))) == (10, 1)
        assert (len(second), len(set(second // 10))) == (30, 3)
        # the sets are mixed, not one after the other
        assert len(np.unique(np.flatnonzero(group < 80) // 20)) == 2


def test_no_pack_spans_two_groups():
    sets = [sample_set([10, 20, 30, 15, 25] * 8, shards=5)]  # 8 samples a shard
    made = plan(sets, shuffle_shards=1, pack_window=8)
    shards = [{sample // 8 for sample in pack} for pack in packs_of(made)]
    assert all(len(shard) == 1 for shard in shards)
    visits = [min(shard) for shard, _ in itertools.groupby(shards)]
    assert sorted(visits) == [0, 1, 2, 3, 4]
    assert visits != sorted(visits)


def test_a_group_of_small_shards_is_large_enough_for_a_window():
    lengths = list(range(1, 91))
    made = plan([sample_set(lengths, shards=90)], shuffle_shards=2, pack_window=45)
    assert len(made) < 48, (
        "4,095 tokens in packs of 100; in groups of two shards, two samples, about 60 packs"
    )
    first_group = made.samples[:45]
    assert (
        len(set(range(90)) - set(first_group.tolist())) == 45
        and first_group.max() - first_group.min() > 60
    )


def test_windows_are_as_equal_as_possible_and_packed_one_by_one():
    # 4.7 windows; 5 samples fill a pack
    made = plan([sample_set([20] * 112, shards=2)], pack_window=24)
    sizes = np.diff(made.starts).tolist()
    assert [sum(sizes[first : first + 5]) for first in range(0, 25, 5)] == [23, 23, 22, 22, 22]
    assert Counter(sizes) == {5: 20, 3: 2, 2: 3}


def test_a_windows_packs_are_those_of_best_fit_in_another_order():
    lengths = list(range(1, 91))
    made = packs_of(plan([sample_set(lengths, shards=3)], pack_window=90))
    expected = best_fit_by_definition(lengths, 100, [0] * 90, 0)
    assert sorted(made) == sorted(expected)
    assert made != expected


def test_the_order_is_frozen_and_does_not_depend_on_the_process():
    expected = "d13c6bbcb8f59df6031ab302fdfc6a89c586de72ab880e74d9e87359762373e7 3 1137 9 3"
    for hash_seed in ("1", "2"):
        ran = ran_python(
            "-c",
            PLAN_OF_A_FRESH_PROCESS,
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:4])),
            },
            check=True,
        )
        assert ran.stdout.strip() == expected, (
            "resumed runs would train other samples than they claim"
        )


def pack_order(sets, **more):
    capacity = Capacity(100, tiles=6)
    return PackOrder(fitted(sets, capacity), 0, capacity, 4, 64, **more)


def test_packs_run_over_the_borders_of_epochs():
    order = pack_order(varied_sets())
    plans = [plan(varied_sets(), epoch=epoch, images=6) for epoch in range(4)]
    expected = [(epoch, tuple(pack)) for epoch, made in enumerate(plans) for pack in packs_of(made)]
    counts = [len(made) for made in plans]
    assert len(set(counts)) > 1  # an epoch's number of packs is its own
    total = sum(counts)
    assert [(pack.epoch, pack.samples) for pack in order.packs(0, total)] == expected
    for first, count in [
        (0, 1),
        (counts[0] - 1, 2),
        (counts[0], 1),
        (5, counts[0] + counts[1]),
        (total - 3, 3),
    ]:
        assert [(pack.epoch, pack.samples) for pack in order.packs(first, count)] == expected[
            first : first + count
        ]
    assert [order.first_pack(epoch) for epoch in range(5)] == [0, *itertools.accumulate(counts)]


def test_what_was_asked_before_does_not_change_the_packs():
    ahead, back, far = (
        pack_order(varied_sets()),
        pack_order(varied_sets()),
        pack_order(varied_sets()),
    )
    stretches = [(first, 37) for first in range(0, 1000, 37)]
    expected = [ahead.packs(*stretch) for stretch in stretches]
    assert [back.packs(*stretch) for stretch in reversed(stretches)] == expected[::-1]
    groups = [far.group(epoch, group).samples.tolist() for epoch, group in ((3, 1), (0, 0), (3, 1))]
    assert groups[0] == groups[2] == ahead.group(3, 1).samples.tolist()


def test_an_order_that_begins_at_a_group_gives_the_rest_of_the_packs():
    whole = pack_order(varied_sets())
    for pack in (0, 1, 40, 300, 700):
        start = whole.position(pack)
        resumed = pack_order(varied_sets(), start=start)
        assert resumed.packs(pack, 90) == whole.packs(pack, 90)
        assert resumed.position(pack) == start
        assert resumed.samples_before(pack) == whole.samples_before(pack)


def test_packs_that_are_counted_before_give_the_positions_and_the_steps():
    computed = pack_order(varied_sets())
    steps = computed.steps(3, 7)
    pack_counts = []
    for epoch in range(3):
        for group in range(computed.epoch(epoch).groups):
            pack_counts.append(len(computed.group(epoch, group)))
    counted = pack_order(varied_sets(), pack_counts=pack_counts)
    counted.group = None  # none is computed
    assert counted.steps(3, 7) == steps
    assert counted.position(500) == computed.position(500)
    counted = pack_order(varied_sets(), pack_counts=pack_counts)
    assert counted.packs(7 * steps - 3, 40) == computed.packs(7 * steps - 3, 40)


def test_no_group_is_empty_where_each_set_has_fewer_samples_than_there_are_groups():
    sets = [sample_set([10] * 6, 3) for _ in range(4)]
    order = PackOrder(fitted(sets, Capacity(100)), 0, Capacity(100), 1, 2)
    epoch = order.epoch(0)
    assert epoch.groups == 6
    groups = [order.group(0, group).samples for group in range(epoch.groups)]
    assert sorted(np.concatenate(groups).tolist()) == list(range(24))


def test_an_order_reaches_a_spawned_process():
    order = pack_order(varied_sets())
    order.epoch(0)
    assert pickle.loads(pickle.dumps(order)).packs(0, 40) == order.packs(0, 40)


def test_samples_before_a_pack_are_those_of_its_epoch():
    order = pack_order(varied_sets())
    packs = order.packs(0, 700)
    for number in (0, 1, 63, 350, 699):
        before = [pack for pack in packs[:number] if pack.epoch == packs[number].epoch]
        assert order.samples_before(number) == sum(len(pack.samples) for pack in before)


def test_a_group_is_drawn_from_its_own_shards_and_does_not_look_at_others():
    lengths = np.arange(6000) % 50 + 10
    sets = [sample_set(lengths, shards=60)]
    capacity = Capacity(100)
    order = PackOrder(fitted(sets, capacity), 0, capacity, shuffle_shards=4, pack_window=64)
    shards = {sample // 100 for sample in order.group(2, 7).samples.tolist()}
    assert order.epoch(2).groups == 15 and len(shards) == 4


def test_shards_without_samples_and_one_shard_and_very_many_small_ones():
    empty_between = catalogs.sample_set([10] * 30, [0, 0, 10, 0, 20, 0], capacity=Capacity(100))
    order = PackOrder([empty_between], 0, Capacity(100), 1, 8)
    packs = order.packs(0, order.first_pack(1))
    assert sorted(sample for pack in packs for sample in pack.samples) == list(range(30))
    small = catalogs.sample_set([50] * 100_000, [10] * 10_000, capacity=Capacity(100))
    order = PackOrder([small], 0, Capacity(100), 8, 4096)
    epoch = order.epoch(0)
    seen = np.concatenate([order.group(0, number).samples for number in range(epoch.groups)])
    assert (epoch.groups, epoch.planned) == (24, 100_000)
    assert np.array_equal(np.sort(seen), np.arange(100_000))


def test_steps_train_every_sample_and_fill_the_last_step_from_the_next_epoch():
    order = pack_order([sample_set([100] * 10)])  # 10 packs an epoch
    assert order.steps(1, 10) == 1
    assert order.steps(3, 4) == 8
    assert order.steps(2, 5) == 4
    assert order.steps(1, 64) == 1
    assert [pack.epoch for pack in order.packs(7 * 4, 4)] == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("lengths", "weight", "message"),
    [
        ([], 1.0, "no sample in 1 shards fits into a pack: they are empty"),
        ([HELD_OUT] * 3, 1.0, "they are empty, or held out"),
        ([10] * 3, 0.1, "the weight of their data set is too small for epoch 0 to draw one"),
        (
            [101, 102, UNUSABLE],
            1.0,
            r"of 3 drawn in epoch 0, 2 are longer than data\.pack_length=100 tokens, or .* 6 tiles "
            r".*, and 1 cannot",
        ),
    ],
)
def test_an_epoch_without_a_pack_is_refused_with_the_reason(lengths, weight, message):
    order = pack_order([sample_set(lengths, weight=weight)])
    for ask in (lambda: order.packs(0, 1), lambda: order.steps(1, 4), lambda: order.epoch(0)):
        with pytest.raises(UserError, match=message):
            ask()


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_windows_of_4096_fill_packs_as_well_as_the_whole_epoch_within_half_a_percent(tokens):
    draw, count = np.random.RandomState(1), 48_000
    captions = 576 + np.exp(draw.normal(np.log(20), 0.5, count)).round().clip(1)
    answers, text = (
        576 + draw.randint(100, 901, count),
        np.exp(draw.normal(np.log(300), 1, count)).clip(5, 2500),
    )
    share = draw.random_sample(count)
    mixed = np.where(share < 0.6, captions, np.where(share < 0.9, answers, text))
    lengths = mixed.astype(np.int32)
    made = plan(
        [sample_set(lengths, shards=48)], tokens=tokens, shuffle_shards=16, pack_window=4096
    )
    whole = pack_best_fit(lengths[lengths <= tokens], Capacity(tokens))
    assert len(whole) / len(made) > 0.995
