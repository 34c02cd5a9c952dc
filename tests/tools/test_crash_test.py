"""tools/crash_test/crash_test.py: the short form with real runs, and that it would see what it
looks for.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import crash_test
import pytest
from crash_job import Kill, Killed, expected_message
from json_files import read_json
from step_states import state_of

from mmtrain.base.printing import message
from mmtrain.checkpoint.step_folder import new_step_folder, step_path


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiles", ["false", "true"])
def test_runs_that_are_killed_twice_end_like_the_one_that_was_not(tiny, tmp_path, capsys, compiles):
    overrides = [
        f"train.compile={compiles}",
        "parallel.pipeline=2",
        "parallel.threads_per_rank=1",
        "train.max_steps=20",
        "data.workers=0",
    ]
    overrides += ["checkpoint.every_steps=2", "checkpoint.keep_last=2"]
    options = [
        "--trials",
        "2",
        "--hang",
        "0",
        "--json",
        str(tmp_path / "found.json"),
        "--folder",
        str(tmp_path),
    ]
    assert crash_test.main([str(tiny / "config.yaml"), *overrides, *options]) == 0, (
        capsys.readouterr()
    )
    found = read_json(tmp_path / "found.json")
    first, second = found["trials"]
    assert [killed["kill"]["when"] for killed in first["kills"]] == ["save", "load"]
    assert [killed["kill"]["when"] for killed in second["kills"]] == ["step"]
    assert all(killed["seconds"] < 10 for trial in (first, second) for killed in trial["kills"])
    assert first["problems"] == second["problems"] == [] and found["summary"]["different"] == 0
    said = capsys.readouterr().out
    assert said.count("0 lost, 0 repeated: equal") == 2 and "samples repeated: 0" in said
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_run_that_fails_by_itself_is_an_error_with_its_message(tiny, tmp_path, capsys):
    options = ["data.shards=nowhere/*.tar", "train.max_steps=3", "--folder", str(tmp_path)]
    assert crash_test.main([str(tiny / "config.yaml"), *options]) == 2
    said = capsys.readouterr().err
    assert said == "error: the undisturbed run fails: data.shards: no file nowhere/*.tar\n"


# ---- it sees what it looks for


def make_run(folder: Path) -> Path:
    """What a run of four steps leaves, as far as it is compared."""
    folder.mkdir()
    for step in (2, 4):
        with new_step_folder(step_path(folder, step)) as unfinished:
            (unfinished / "projector.safetensors").write_text(f"weights {step}")
            (unfinished / "optimizer.safetensors").write_text(f"moments {step}")
            (unfinished / "state.json").write_text(json.dumps(state_of(step)))
    steps = range(4)
    ledger = [{"step": step, "keys": [f"{step}a", f"{step}b"]} for step in steps]
    metrics = [{"kind": "train", "step": step, "loss": 0.5, "seconds": 1.0} for step in steps]
    for name, lines in (("samples.jsonl", ledger), ("metrics.jsonl", metrics)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("metrics.jsonl", '"seconds": 1.0', '"seconds": 2.0', None),
        ("samples.jsonl", '"2a", ', "", "1 samples lost, 0 repeated"),
        ("samples.jsonl", '"2a"', '"2a", "1a"', "0 samples lost, 1 repeated"),
        ("samples.jsonl", '"2a", "2b"', '"2b", "2a"', "samples.jsonl differs"),
        (
            "metrics.jsonl",
            "0.5",
            "0.5000000000000001",
            "metrics.jsonl differs, the first time in {'kind'",
        ),
        (
            "checkpoints/step-00000004/projector.safetensors",
            "4",
            "5",
            "the final projector.safetensors differs",
        ),
        (
            "checkpoints/step-00000004/optimizer.safetensors",
            "4",
            "5",
            "the final optimizer.safetensors differs",
        ),
        (
            "checkpoints/step-00000002/optimizer.safetensors",
            "2",
            "3",
            "step-00000002: optimizer.safetensors is",
        ),
        ("checkpoints/step-00000002/state.json", None, None, "state.json is missing"),
        (
            "checkpoints/step-00000002",
            None,
            None,
            "checkpoints ['step-00000004'] are left instead of",
        ),
    ],
)
def test_whatever_differs_but_the_time_taken_is_a_problem(tmp_path, file, old, new, problem):
    reference = crash_test.Reference(make_run(tmp_path / "undisturbed"), 1.0)
    run, trial = make_run(tmp_path / "trial-1"), crash_test.Trial(1)
    if old is not None:
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new, 1))
    elif (run / file).is_dir():
        shutil.rmtree(run / file)
    else:
        (run / file).unlink()
    crash_test._compare(trial, run, reference)
    assert any(problem in found for found in trial.problems) if problem else trial.problems == []


GOOD = (
    "error: rank 2 (stage 2) was killed by SIGKILL (if nobody) in step 3 (counted from 0), at "
    "LOAD(x)\n  log: l\n"
)


@pytest.mark.parametrize(
    ("seconds", "message", "said"),
    [
        (1.0, GOOD, None),
        (10.5, GOOD, "10.5 s after the kill"),
        (1.0, "", "does not name what was killed"),
        (1.0, GOOD.replace("rank 2", "rank 1"), "does not name what was killed"),
        (
            1.0,
            GOOD.replace(" in step 3 (counted from 0), at LOAD(x)", ""),
            "does not name what was killed",
        ),
        (1.0, GOOD + GOOD, "does not name what was killed"),
    ],
)
def test_a_job_that_stays_or_does_not_say_what_died_is_a_problem(seconds, message, said):
    expected = expected_message(2, "rank")
    killed = Killed(Kill("step", "rank"), 3, "LOAD(x)", False, seconds, 1, message, expected)
    problems = killed.problems(10.0)
    assert len(problems) == (said is not None) and all(said in problem for problem in problems)


def test_the_message_of_a_job_with_a_stopped_rank_is_recognised_as_it_is_printed():
    at = "in step 2 (counted from 0), at BACKWARD(stage 0, micro-batch 0)"
    lines = [
        f"error: rank 0 (stage 0) lost its connection to another rank {at}: RuntimeError: "
        "Timed out waiting 10000ms",
        f"rank 0 (stage 0) was {at}",
        "rank 1 (stage 1) was in step 0 (counted from 0), at start-up",
        "log: runs/a/log.txt",
    ]
    said = message("\n".join(lines)) + "\n"
    assert re.search(expected_message(1, "stop"), said) and re.search(
        expected_message(0, "stop"), said
    )
    assert not re.search(expected_message(2, "stop"), said)
