"""The trained tensors of all ranks end in one step folder, and come back to whoever trains them
then.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from json_files import read_json
from ranks import run_ranks
from safetensors.torch import load_file
from step_states import run_state
from tiers import nightly

from mmtrain.base.errors import NonFiniteError, UserError
from mmtrain.checkpoint import write as write_module
from mmtrain.checkpoint.load import differences, load
from mmtrain.checkpoint.step_folder import StepFolder, find, step_folders, step_path, why_damaged
from mmtrain.checkpoint.write import Checkpointer, SaveResult
from mmtrain.config.schema import CheckpointSection

STATE = run_state()


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def tensors_of(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a rank trains, and AdamW's state of it; not contiguous, as a transposed weight."""
    names = [f"llm.layers.{rank}.{i}.weight" for i in range(2)]
    weights = {name: torch.full((2, 3), 10.0 * rank + i).T for i, name in enumerate(names)}
    state = {
        f"{name}/{key}": torch.full((3, 2), value) if key != "step" else torch.tensor(7.0)
        for name in names
        for key, value in (("exp_avg", rank + 0.25), ("exp_avg_sq", rank + 0.5), ("step", 0.0))
    }
    return weights, state


def notes_of(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: {"begin": "b", "had_gradient": True} for name in weights}


# ---- several ranks


def save_on_each(folder: Path, contributing: tuple[int, ...]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights, optimizer = tensors_of(rank)
    reported: list[SaveResult] = []
    with Checkpointer(folder, CheckpointSection(), rank in contributing, reported.append) as saver:
        saver.save(7, weights, optimizer, notes_of(weights), STATE)
        for tensor in (*weights.values(), *optimizer.values()):
            tensor.fill_(-1)  # the next step changes them while they are being written
        saver.finish()
    dist.barrier()
    return [saved.record() for saved in reported]


@pytest.mark.parametrize("contributing", [(0, 2), (1,)])
def test_one_folder_holds_what_every_rank_trains_as_it_was_when_save_was_called(
    tmp_path, contributing
):
    reported = run_ranks(3, save_on_each, tmp_path, contributing)
    assert [len(records) for records in reported] == [1, 0, 0]
    saved = find(tmp_path)
    assert saved.step == 7 and why_damaged(saved.path) is None
    weights, optimizer = load_file(saved.tensors_file), load_file(saved.optimizer_file)
    # rank 0 gathers from the others those alone that contribute
    expected = [tensors_of(rank) for rank in contributing]
    for found, parts in (
        (weights, [w for w, _ in expected]),
        (optimizer, [o for _, o in expected]),
    ):
        assert sorted(found) == sorted(name for part in parts for name in part)
        for part in parts:
            assert all(torch.equal(found[name], tensor) for name, tensor in part.items())
    size = sum(file.stat().st_size for file in saved.path.iterdir() if file.name != "manifest.json")
    assert reported[0][0] == {
        "kind": "checkpoint",
        "step": 7,
        "bytes": size,
        "seconds": reported[0][0]["seconds"],
    }


def load_on_each(folder: Path, wanted: list[list[str]]) -> list[dict[str, list]]:
    dist.init_process_group("gloo")
    parts = load(StepFolder(step_path(folder, 7)), wanted[dist.get_rank()])
    return [{name: tensor.tolist() for name, tensor in part.items()} for part in parts]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run in whose checkpoint three ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(3, save_on_each, folder, (0, 1, 2))
    return folder


def test_another_layout_loads_what_each_of_its_ranks_trains(saved):
    parts = [tensors_of(rank) for rank in range(3)]
    weights = {name: tensor for part, _ in parts for name, tensor in part.items()}
    optimizer = {name: tensor for _, part in parts for name, tensor in part.items()}
    names = sorted(weights)
    # two ranks share them otherwise; one of three trains nothing; two replicas have the same
    for layout in ([names[:1], names[1:]], [names[:3], [], names[3:]], [names, names]):
        for mine, (loaded, state) in zip(
            layout, run_ranks(len(layout), load_on_each, saved, layout), strict=True
        ):
            assert loaded == {name: weights[name].tolist() for name in mine}
            assert state == {
                key: value.tolist()
                for key, value in optimizer.items()
                if key.rpartition("/")[0] in mine
            }


def save_slowly(folder: Path, then: str) -> list[dict[str, Any]]:
    """Save on a disk that takes longer than a collective may."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    write = write_module.new_step_folder

    def slow(path: Path) -> AbstractContextManager[Path]:
        time.sleep(3)
        return write(path)

    write_module.new_step_folder = slow
    reported: list[SaveResult] = []
    saver = Checkpointer(folder, CheckpointSection(), dist.get_rank() == 0, reported.append)
    weights = {"w": torch.ones(1)}
    with contextlib.suppress(NonFiniteError), saver:
        saver.save(1, weights, {}, {}, STATE)
        if then == "NaN":
            raise NonFiniteError("on all ranks")
        saver.save(2, weights, {}, {}, STATE)
        saver.finish()
    dist.barrier()
    return [saved.record() for saved in reported]


@pytest.mark.parametrize(("then", "steps"), [("NaN", [1]), nightly("the next save", [1, 2])])
def test_a_disk_slower_than_the_timeout_loses_no_save_and_no_rank(tmp_path, then, steps):
    reported, nothing = run_ranks(2, save_slowly, tmp_path, then)
    assert [(record["kind"], record["step"]) for record in reported] == [
        ("checkpoint", step) for step in steps
    ]
    assert nothing == [] and len(step_folders(tmp_path)) == len(steps)
    assert find(tmp_path).step == steps[-1]


NAMES = [f"llm.layers.{rank}.{i}.weight" for rank in range(3) for i in range(2)]


def forget_a_tensor(folder: Path) -> None:
    state = read_json(folder / "state.json")
    del state["trained"][NAMES[1]]
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "wanted", "error"),
    [
        (None, NAMES[1:], f"{NAMES[0]} is not trained by this run"),
        (None, [*NAMES, "projector.w"], "projector.w is not in it"),
        (forget_a_tensor, NAMES, f"{NAMES[1]} is not in it"),
        (
            lambda folder: (folder / "optimizer.safetensors").write_bytes(b"\xff" * 100),
            NAMES,
            "optimizer.safetensors: cannot be read as safetensors",
        ),
    ],
)
def test_a_checkpoint_of_other_tensors_is_refused_by_their_names(
    saved, tmp_path, one_rank, damage, wanted, error
):
    shutil.copytree(saved, tmp_path / "run")
    folder = step_path(tmp_path / "run", 7)
    if damage is not None:
        damage(folder)
    with pytest.raises(UserError) as refused:
        load(StepFolder(folder), wanted)
    assert str(folder) in str(refused.value) and error in str(refused.value)


# ---- one rank


class Run:
    """Saves into a folder, and notes what is reported."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.records: list[dict[str, Any]] = []
        self.saver = Checkpointer(
            folder, CheckpointSection(**section), True, lambda s: self.records.append(s.record())
        )

    def save(self, step: int, value: float = 0.0) -> None:
        """Save, and wait for it."""
        weight = torch.tensor([value])
        state = {f"w/{key}": torch.zeros(1) for key in ("exp_avg", "exp_avg_sq", "step")}
        self.saver.save(step, {"w": weight}, state, {}, STATE)
        if self.saver._pending is not None:
            self.saver._pending.result()

    @property
    def steps(self) -> list[int]:
        return [
            int(path.name.removeprefix("step-")) for path in reversed(step_folders(self.folder))
        ]


@pytest.fixture
def run(tmp_path, one_rank) -> Run:
    return Run(tmp_path / "run")


def test_the_state_says_what_the_run_gave_and_how_long_its_records_are(tmp_path, one_rank):
    (tmp_path / "metrics.jsonl").write_text("12345678\n")
    run = Run(tmp_path)
    with run.saver as saver:
        weights, optimizer = tensors_of(0)
        state = STATE | {"loss": float("nan"), "config": {"a": 1}}
        saver.save(4, weights, optimizer, notes_of(weights), state)
        saver.finish()
    assert find(tmp_path).state == STATE | {
        "format": 2,
        "step": 4,
        "loss": "nan",
        "config": {"a": 1},
        "trained": notes_of(weights),
        "files": {"metrics.jsonl": 9},
    }


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [-math.inf, 0.0], [0.0, math.nan]])
def test_a_tensor_that_is_not_finite_is_not_saved(run, values):
    weights, odd = {"w": torch.zeros(2)}, {"w/exp_avg": torch.tensor(values)}
    with pytest.raises(
        ValueError, match=r"w/exp_avg is not finite after 1 updates.*No checkpoint was saved before"
    ):
        run.saver.save(1, weights, odd, {}, STATE)
    # finite values whose sum is not
    run.saver.save(2, {"w": torch.tensor([3e38, 3e38])}, {}, {}, STATE)
    with pytest.raises(ValueError, match=r"newest complete checkpoint is .*step-00000002"):
        run.saver.save(3, weights, odd, {}, STATE)
    assert run.steps == [2]


def test_saving_in_the_background_keeps_no_step_waiting_but_one_that_saves(
    tmp_path, one_rank, monkeypatch
):
    allowed, written = threading.Event(), write_module.new_step_folder

    def slow(path: Path) -> AbstractContextManager[Path]:
        assert allowed.wait(30)
        return written(path)

    monkeypatch.setattr(write_module, "new_step_folder", slow)
    run = Run(tmp_path / "run")
    weights = {"w": torch.zeros(1)}
    with run.saver as saver:
        saver.save(1, weights, {}, {}, STATE)
        saver.poll()
        # it is still on its way, and this line is reached
        assert run.steps == [] and run.records == []
        second = threading.Thread(target=saver.save, args=(2, weights, {}, {}, STATE))
        second.start()
        second.join(0.3)
        assert second.is_alive()  # waits for the first
        allowed.set()
        second.join(30)
        saver.finish()
    assert run.steps == [1, 2] and [record["step"] for record in run.records] == [1, 2]


@pytest.mark.parametrize(("keep_last", "kept"), [(2, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_keep_last_are_kept(tmp_path, one_rank, keep_last, kept):
    run = Run(tmp_path, keep_last=keep_last)
    for step in range(1, 6):
        run.save(step)
    assert run.steps == kept and len(list((tmp_path / "checkpoints").iterdir())) == len(kept)


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path, one_rank):
    run = Run(tmp_path, keep_last=2)
    for step in (1, 2):
        run.save(step)
    (step_path(tmp_path, 2) / "optimizer.safetensors").write_bytes(b"")
    # a run that goes on knows nothing of these but what is on the disk
    later = Run(tmp_path, keep_last=2)
    later.save(3)
    assert later.steps == [1, 2, 3]
    later.save(4)
    assert later.steps == [2, 3, 4]


def test_a_checkpoint_that_is_being_read_stays_until_a_later_save(tmp_path, one_rank):
    run = Run(tmp_path, keep_last=1)
    run.save(1)
    reader = find(tmp_path)
    run.save(2)
    assert run.steps == [1, 2]
    del reader
    run.save(3)
    assert run.steps == [3]


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [
        ("exact_match", [0.5, 0.1, 0.9, 0.3], (3, 0.9)),
        ("loss", [0.5, 0.1, 0.9, 0.3], (2, 0.1)),
        ("exact_match", [0.5, 0.5, None, 0.1], (2, 0.5)),  # of equally good ones the latest
        ("loss", [0.5, float("nan"), 0.7, 0.8], (1, 0.5)),
    ],
)
def test_the_best_one_is_kept_too(tmp_path, one_rank, metric, scores, best):
    run = Run(tmp_path, keep_last=1, keep_best=metric)
    for step, value in enumerate(scores, start=1):
        run.save(step)
        run.saver.scored(step, {metric: value})
    run.save(5)
    assert run.steps == [best[0], 5] and run.saver.best == best


def test_a_run_that_goes_on_knows_the_scores_that_it_has_recorded(tmp_path, one_rank):
    run = Run(tmp_path, keep_last=1, keep_best="loss")
    run.save(1)
    lines = [{"kind": "train", "loss": 0}, {"kind": "eval", "step": 1, "loss": 0.5}]
    lines += [
        {"kind": "eval", "step": 2, "loss": "nan"},
        {"kind": "eval_permuted", "step": 2, "loss": 0.1},
    ]
    no_records = [
        "[" * 200_000 + '"eval"',
        '["eval"]',
        '{"kind": "eval"}',
        '{"kind": "eval", "step": []}',
    ]
    texts = [*no_records, *map(json.dumps, lines), '{"kind": "eval", "ste']
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts))
    later = Run(tmp_path, keep_last=1, keep_best="loss")
    for step in (2, 3):
        later.save(step)
    assert later.steps == [1, 3]


@pytest.mark.parametrize(
    ("section", "due"),
    [
        ({"every_steps": 4}, [False, False, True]),
        ({"every_steps": 4, "keep_best": "loss"}, [False, True, True]),
        ({}, [False, False, False]),
    ],
)
def test_a_save_is_due_by_steps_and_before_an_evaluation_whose_score_counts(
    tmp_path, one_rank, section, due
):
    saver = Run(tmp_path, **section).saver
    assert [saver.is_due(3, False), saver.is_due(6, True), saver.is_due(8, False)] == due


def test_a_save_is_due_by_the_clock(tmp_path, one_rank, monkeypatch):
    run = Run(tmp_path, every_minutes=10)
    now = run.saver._saved_at
    monkeypatch.setattr(write_module.time, "monotonic", lambda: now)
    assert not run.saver.time_is_up
    now += 601
    assert run.saver.time_is_up
    run.save(1)
    assert not run.saver.time_is_up
    assert not Run(tmp_path / "other", every_minutes=None).saver.time_is_up


# ---- saves that fail


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_failed_save_is_reported_and_three_in_a_row_end_the_run(tmp_path, one_rank, at_the_end):
    (tmp_path / "checkpoints").write_text("in the way")
    run = Run(tmp_path)
    run.save(1)
    with pytest.raises(
        UserError, match=r"^3 saves in a row have failed: .*checkpoints.*No checkpoint was saved"
    ):
        if at_the_end:
            run.saver.finish()
        for step in (2, 3):
            run.save(step)
        run.saver.poll()
    assert [record["kind"] for record in run.records] == ["checkpoint_failed"] * 3
    assert run.records[0]["step"] == 1 and "checkpoints" in run.records[0]["error"]


def test_a_last_save_that_fails_once_is_made_after_all(tmp_path, one_rank, monkeypatch):
    written, tries = write_module.new_step_folder, []

    def fails_once(path: Path) -> AbstractContextManager[Path]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return written(path)

    monkeypatch.setattr(write_module, "new_step_folder", fails_once)
    run = Run(tmp_path)
    run.save(1, value=3.0)
    run.saver.finish()
    assert load_file(find(tmp_path).tensors_file)["w"].item() == 3.0
    assert [record["kind"] for record in run.records] == ["checkpoint_failed", "checkpoint"]


def test_versions_and_topology_that_are_not_those_of_the_checkpoint_are_listed():
    saved = {
        "versions": {"torch": "2.11.0", "timm": "1.0"},
        "topology": {"pipeline": 4, "threads": 1},
    }
    now = {
        "versions": {"torch": "2.15.0", "timm": "1.0"},
        "topology": {"pipeline": 2, "threads": 1},
    }
    assert differences(saved, now) == ["torch 2.11.0 -> 2.15.0", "pipeline 4 -> 2"]
    assert differences(now, now) == []
