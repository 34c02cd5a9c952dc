"""Why mmtrain has an engine of its own: DeepSpeed's fails on frozen layouts.

When one of these tests fails, DeepSpeed has changed: look at what it does now and correct what README and design say.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def outcomes():
    """Per scenario of plain_deepspeed.py what each rank ended with; 25 s."""
    script = Path(__file__).parent / "plain_deepspeed.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def test_the_scenarios_train_when_nothing_is_frozen(outcomes):
    assert outcomes["all trained"] == {"0": ["returned", "trained"], "1": ["returned", "trained"]}


@pytest.mark.parametrize(
    ("scenario", "rank", "error", "message"),
    [
        ("empty optimizer", "1", "ValueError", "optimizer got an empty parameter list"),
        ("backward upstream", "0", "RuntimeError", "element 0 of tensors does not require grad"),
        ("default clipping", "1", "IndexError", "list index out of range"),
        ("bf16", "1", "RuntimeError", "expects a non-empty TensorList"),
        ("zero 1", "1", "IndexError", "list index out of range"),
    ],
)
def test_plain_deepspeed_dies_on_the_frozen_rank(outcomes, scenario, rank, error, message):
    seen = outcomes[scenario]
    assert seen[rank][0] == error and message in seen[rank][1]
    assert ["returned", "trained"] not in seen.values()


def test_the_default_partitioner_gives_nearly_all_of_a_frozen_llm_to_one_stage(outcomes):
    assert [seen[1] for seen in outcomes["partition"].values()] == [[33, 1, 1, 1]] * 4
