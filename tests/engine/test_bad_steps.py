"""A bad step in words; what it records and how ranks agree is tested on real ranks in test_engine."""

from __future__ import annotations

import math

from mmtrain.engine.bad_steps import RankReport, in_words, make_record

NAN = math.nan


def report(rank, replica=0, parameters=(), losses=None, keys=None):
    return RankReport(rank, replica, parameters, losses or {}, keys or {})


def test_a_record_joins_what_first_and_last_stages_know_of_each_micro_batch():
    reports = [
        report(0, 0, ("p",), keys={0: ("a", "b"), 1: ()}),
        report(1, 1, ("p",), keys={0: ("c",), 1: ("d",)}),
        report(2, 0, losses={0: (6.0, 3), 1: (0.0, 0)}),
        report(3, 1, losses={1: (8.0, 2), 0: (math.inf, 2)}),
    ]
    record = make_record(7, math.inf, 2.5, reports)
    places = [tuple(m.values()) for m in record.pop("microbatches")]
    assert places == [
        (0, 0, 2.0, 3, ["a", "b"]),
        (0, 1, None, 0, []),
        (1, 0, math.inf, 2, ["c"]),
        (1, 1, 4.0, 2, ["d"]),
    ]
    expected = {"step": 7, "loss_sum": math.inf, "squared_gradient_norm": 2.5, "ranks": [0, 1, 3], "parameters": ["p"]}
    assert record == expected


def test_the_words_name_the_first_few_of_each_kind_and_obey_no_text_of_the_data():
    keys = {k: (f"{k}\x1b[2Ja", "b", "c", "d", "e") for k in range(5)}
    record = make_record(0, NAN, NAN, [report(0, keys=keys, losses=dict.fromkeys(range(5), (NAN, 1)))])
    said = in_words(record)
    assert said.startswith(
        "step 0: the loss sum is nan and the squared gradient norm nan, with values that are not finite on rank 0; no "
        "update was made. The loss is not finite in micro-batch 0 of replica 0 (samples 0\\x1b[2Ja, b, c and 2 more), "
    )
    assert "2 of replica 0 (samples 2\\x1b[2Ja, b, c and 2 more) and 2 more. Look for damaged images" in said


def test_the_learning_rate_is_suspected_once_there_was_an_update():
    names = tuple(f"w{i}" for i in range(5))
    record = make_record(4, 1.5, math.inf, [report(0, parameters=names, losses={0: (1.5, 1)}, keys={0: ("a",)})])
    assert in_words(record).endswith(
        "The loss of each micro-batch is finite, the gradient of w0, w1, w2 and 2 more is not. Lower optimizer.lr, or "
        "look for damaged images or text in this step's data"
    )
