"""A bad step in words; what it records and how ranks agree is tested on real ranks in
test_engine.
"""

from __future__ import annotations

import math

from mmtrain.engine.bad_steps import in_words


def record(step, *losses, keys=("a",), parameters=()):
    microbatches = [
        {"replica": 0, "microbatch": k, "loss": loss, "keys": keys} for k, loss in enumerate(losses)
    ]
    total = sum(losses)
    known = {"step": step, "loss_sum": total, "squared_gradient_norm": math.nan, "ranks": [0]}
    return {**known, "parameters": parameters, "microbatches": microbatches}


def test_the_words_name_the_first_few_of_each_kind_and_obey_no_text_of_the_data():
    said = in_words(record(0, *[math.nan] * 5, keys=("\x1b[2Ja", "b", "c", "d", "e")))
    assert said.startswith(
        "step 0: the loss sum is nan and the squared gradient norm nan, with values that are not "
        "finite on rank 0. No "
        "update was made. The loss is not finite in micro-batch 0 of replica 0 (samples \\x1b[2Ja, "
        "b, c and 2 more), "
    )
    assert (
        "2 of replica 0 (samples \\x1b[2Ja, b, c and 2 more) and 2 more. Look for damaged images"
        in said
    )


def test_the_learning_rate_is_suspected_once_there_was_an_update():
    assert in_words(record(4, 1.5, parameters=tuple(f"w{i}" for i in range(5)))).endswith(
        "The loss of each micro-batch is finite, but the gradient of w0, w1, w2 and 2 more is not. "
        "Lower optimizer.lr, or look for damaged images or text in this step's data"
    )
