"""Real runs that are stopped, damaged, branched and given again, through the command line.

One run is left alone; every other must end as that one did, to the last bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from crash_job import MEASURED
from json_files import read_lines
from processes import last_given, running, wait_for
from rank_runs import train
from small_disk import small_disk
from tiers import nightly

from mmtrain import launch
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import AUTO, find_start
from mmtrain.checkpoint.step_folder import step_path, why_damaged
from mmtrain.config.load import load_config

LAST = 16
LAUNCH = ("-m", "mmtrain.launch")
SETTINGS = (
    *(
        "parallel.pipeline=2",
        "parallel.threads_per_rank=1",
        f"train.max_steps={LAST}",
        "data.ledger=true",
    ),
    *("checkpoint.every_steps=4", "checkpoint.every_minutes=null", "checkpoint.keep_last=null"),
    *(
        "eval.fraction=0.2",
        "eval.every_steps=8",
        "eval.show_answers=0",
        "eval.permuted_control=false",
    ),
)


def command(tiny: Path, runs: Path, *more: str | Path) -> list[str | Path]:
    return last_given(tiny / "config.yaml", *SETTINGS, f"run.dir={runs}", *more)


def resumed(
    tiny: Path, runs: Path, *more: str, resume: str | Path = AUTO, allow: tuple[str, ...] = ()
) -> str:
    """What the command would print, run to its end without a launcher; AssertionError with what a
    rank refuses.
    """
    file, *overrides = command(tiny, runs, *more)
    return train(file, *overrides, resume=resume, allow=allow).printed


def refused(capsys: pytest.CaptureFixture, tiny: Path, runs: Path, *more: str | Path) -> str:
    """What the command says to a user whom it tells to mend something, before ranks are started."""
    capsys.readouterr()
    assert launch.main([str(argument) for argument in command(tiny, runs, *more)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def records(folder: Path, kind: str) -> list[dict]:
    """Records of metrics.jsonl, without what measures the machine."""
    found = read_lines(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in found
        if record["kind"] == kind
    ]


def steps_done(folder: Path) -> list[int]:
    return (
        [record["step"] for record in records(folder, "train")]
        if (folder / "metrics.jsonl").exists()
        else []
    )


def saved_steps(folder: Path) -> list[int]:
    return sorted(
        int(path.name[5:]) for path in (folder / "checkpoints").iterdir() if path.name[5:].isdigit()
    )


def assert_ended_alike(folder: Path, undisturbed: Path, ledger: bool = True) -> None:
    if ledger:
        assert (folder / "samples.jsonl").read_bytes() == (
            undisturbed / "samples.jsonl"
        ).read_bytes()
    for kind in ("train", "eval", "epoch", "end"):
        assert records(folder, kind) == records(undisturbed, kind)
    for name in ("projector.safetensors", "optimizer.safetensors"):
        assert (step_path(folder, LAST) / name).read_bytes() == (
            step_path(undisturbed, LAST) / name
        ).read_bytes()
    assert all(
        why_damaged(path) is None for path in (folder / "checkpoints").glob(f"step-{'[0-9]' * 8}")
    )


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> Path:
    """The folder of a run that nobody touched; to be read."""
    runs = tmp_path_factory.mktemp("undisturbed")
    resumed(tiny, runs)
    return runs / "tiny"


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(undisturbed, tmp_path / "tiny"))


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


# ---- which checkpoint


def test_damaged_checkpoints_are_passed_over_and_named_and_the_run_ends_as_undisturbed(
    tiny, copied, undisturbed, tmp_path
):
    flip_a_bit(step_path(copied, 16) / "optimizer.safetensors")
    (step_path(copied, 12) / "state.json").unlink()
    step_path(copied, 8).with_name(".step-00000025.0123abcd.tmp").mkdir()
    (
        step_path(copied, 8).with_name(".step-00000025.0123abcd.tmp") / "projector.safetensors"
    ).write_bytes(b"half")
    said = resumed(tiny, tmp_path)
    for words in (
        f"{step_path(copied, 16)}: optimizer.safetensors is damaged: its SHA-256",
        f"{step_path(copied, 12)}: state.json is missing",
        f"resuming from {step_path(copied, 8)} (step 8 of {LAST})",
    ):
        assert words in said
    assert_ended_alike(copied, undisturbed)
    names = [path.name for path in (copied / "checkpoints").iterdir()]
    assert {"step-00000012.discarded", "step-00000016.discarded"} < set(names)
    assert not [name for name in names if name.endswith(".tmp")]
    assert records(copied, "resume") == [
        {"kind": "resume", "step": 8, "checkpoint": str(step_path(copied, 8)), "changed": []}
    ]


def test_a_run_can_branch_from_a_checkpoint_of_another_with_another_learning_rate(
    tiny, undisturbed, tmp_path, capsys
):
    branch = ("run.name=branch", "optimizer.lr=5e-4", "--resume", step_path(undisturbed, 8))
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert "optimizer.lr: was 0.001, is now 0.0005" in refused(capsys, tiny, tmp_path, *branch)
    folder = tmp_path / "branch"
    # killed as it saved where it begins
    (folder / "checkpoints" / ".step-00000008.0123abcd.tmp").mkdir(parents=True)
    for name in ("config.yaml", "plan.json"):
        shutil.copy(undisturbed / name, folder)
    (folder / "metrics.jsonl").write_text('{"kind": "begin", "step": 8}\n')
    resumed(tiny, tmp_path, *branch[:2], resume=branch[-1], allow=("optimizer.lr",))
    assert len(records(folder, "begin")) == 1 and not list((folder / "checkpoints").glob(".*"))
    assert steps_done(folder) == list(range(8, 16)) and saved_steps(folder) == [8, 12, 16]
    ours, theirs = records(folder, "train"), records(undisturbed, "train")[8:]
    assert ours[0]["loss"] == theirs[0]["loss"]  # the same weights and samples
    assert ours[0]["lr"] == theirs[0]["lr"] / 2 and ours[-1]["loss"] != theirs[-1]["loss"]
    ledgers = [(path / "samples.jsonl").read_text().splitlines() for path in (folder, undisturbed)]
    assert ledgers[0] == ledgers[1][8:]
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before
    capsys.readouterr()
    again = command(tiny, tmp_path, *branch, "--allow-change", "optimizer.lr")
    assert launch.main([str(argument) for argument in again]) == 0
    assert f"has already branched from {step_path(undisturbed, 8)}" in capsys.readouterr().out


def test_a_complete_run_is_left_as_it_is_and_is_no_error(tiny, undisturbed, capsys):
    before = {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()}
    assert launch.main([str(argument) for argument in command(tiny, undisturbed.parent)]) == 0
    assert f"complete: {undisturbed} has made all its {LAST} steps" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()} == before


# ---- what may change


@pytest.mark.parametrize(
    ("override", "was", "now"),
    [
        ("optimizer.lr=0.5", "0.001", "0.5"),
        ("optimizer.betas=[0.9,0.95]", "[0.9, 0.999]", "[0.9, 0.95]"),
        ("optimizer.groups=[{match: [projector], lr: 0.5}]", "null", "0.5"),
        ("run.seed=1", "0", "1"),
        ("data.pack_length=192", "128", "192"),
        ("data.image_fit=resize", '"pad"', '"resize"'),
        ("eval.fraction=0.3", "0.2", "0.3"),
        ("train.max_steps=30", "16", "30"),
        ("model.vision.select_layer=-1", "-2", "-1"),
    ],
)
def test_a_change_of_meaning_is_refused_with_both_values_and_allowed_by_name(
    tiny, undisturbed, override, was, now
):
    key = override.partition("=")[0]
    config = load_config(*config_of(tiny, undisturbed, override))
    with pytest.raises(UserError) as refused:
        find_start(config, allowed=["data.template"])
    value = "optimizer.groups.0.lr" if key == "optimizer.groups" else key
    assert f"\n  {value}: was {was}, is now {now}\n" in str(refused.value)
    assert f"--allow-change {key}" in str(refused.value)
    for allowed in (key, key.partition(".")[0]):
        start = find_start(config, allowed=[allowed])
        assert start is not None and start.checkpoint.step == LAST


def config_of(tiny: Path, folder: Path, *more: str) -> tuple[Path, list[str]]:
    """As the launcher has it when it looks for a checkpoint: with the format that it has found in
    the data.
    """
    path, *overrides = command(tiny, folder.parent, *more)
    return path, ["data.format=llava", *overrides]


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.packs_per_step=4",),
        ("model.trainable=[projector,llm.layers.0]",),
        ("model.projector.type=linear",),
        ("data.resize=torchvision",),
        ("model.vision.layout=anyres", "data.image_fit=null", "data.pack_length=512"),
        ("model.vision=null", "model.trainable=[llm.head]", "data.template=chat"),
    ],
)
def test_what_gives_a_checkpoint_its_meaning_cannot_be_allowed_to_change(
    tiny, undisturbed, overrides
):
    key = overrides[0].partition("=")[0]
    with pytest.raises(UserError) as refused:
        find_start(
            load_config(*config_of(tiny, undisturbed, *overrides)),
            allowed=["model", "train", "data"],
        )
    assert f"\n  {key}: was " in str(refused.value) and "--allow-change" not in str(refused.value)
    assert f"model.init_from={step_path(undisturbed, LAST)}" in str(refused.value)


def test_how_a_run_runs_may_change_without_being_named(tiny, undisturbed):
    free = (
        "parallel.pipeline=4",
        "parallel.data=2",
        "parallel.timeout_seconds=99",
        "data.workers=0",
    )
    free += (
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=loss",
        "eval.every_steps=5",
        "data.ledger=false",
    )
    free += (
        "train.packs_per_microbatch=2",
        "train.max_bad_steps=3",
        "train.deterministic=true",
        f"data.shards={tiny}/shards/*.tar",
    )
    start = find_start(load_config(*config_of(tiny, undisturbed, *free)))
    assert start is not None and start.checkpoint.step == LAST and start.is_own


def test_other_data_and_other_weights_are_refused_by_their_content(
    tiny, copied, tmp_path, make_tiny
):
    step_path(copied, LAST).rename(tmp_path / "away")  # else the run is complete
    before = (copied / "metrics.jsonl").read_text().splitlines()
    make_tiny.make_tiny_shards(tmp_path / "shards", seed=1, two_image_fraction=0.125)
    make_tiny.make_tiny_llm(tmp_path / "llm", seed=1)
    others = (f"data.shards={tmp_path}/shards/*.tar", f"model.llm.path={tmp_path}/llm")
    with pytest.raises(
        AssertionError, match=r"UserError: .* the data are not those .*--allow-change data.shards"
    ):
        resumed(tiny, tmp_path, *others)
    with pytest.raises(
        AssertionError, match=r"the frozen weights are not those .*--allow-change model.llm.path"
    ):
        resumed(tiny, tmp_path, *others, allow=("data.shards",))
    kept = (copied / "metrics.jsonl").read_text().splitlines()
    assert kept == before[: len(kept)] and saved_steps(copied) == [4, 8, 12]


def test_another_order_that_is_allowed_begins_another_account_of_the_samples(
    tiny, copied, tmp_path
):
    step_path(copied, LAST).rename(tmp_path / "away")  # else the run is complete
    other = ("data.pack_window=8", "data.shuffle_shards=1")
    resumed(tiny, tmp_path, *other, allow=("data",))
    assert saved_steps(copied)[-1] == LAST


# ---- signals


def is_training(folder: Path) -> bool:
    return len(steps_done(folder)) > 4  # the first save is after 4 steps


def is_answering(folder: Path) -> bool:
    log = folder / "log.txt"
    return log.exists() and "answering held-out" in log.read_text()


@pytest.mark.parametrize(
    ("number", "ready", "shown"),
    [
        (signal.SIGUSR1, is_training, 2),
        nightly(signal.SIGTERM, is_answering, 100),
        nightly(signal.SIGKILL, is_training, 2),
    ],
)
def test_a_run_that_is_stopped_or_killed_ends_as_undisturbed(
    tiny, undisturbed, tmp_path, number, ready, shown
):
    folder = tmp_path / "tiny"
    with running(
        [*LAUNCH, *command(tiny, tmp_path, f"eval.show_answers={shown}")], tmp_path
    ) as started:
        wait_for(lambda: ready(folder) or started.process.poll() is not None, 150, "the moment")
        assert started.process.poll() is None, started.stderr
        os.killpg(started.process.pid, number)  # to all of its processes, as Slurm does
        assert started.seconds_until_gone(timeout=60) < 10
        code = started.wait()
    done, saved = len(steps_done(folder)), saved_steps(folder)[-1]
    assert (
        done < LAST
        and why_damaged(step_path(folder, saved)) is None
        and not (folder / "audit.json").exists()
    )
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 3 and started.stderr == "" and saved == done
        assert f"{number.name}: the run saves after the current step, and ends" in started.stdout
        assert f"stopped after step {done} of {LAST}; it is saved" in started.stdout
        assert "The same command goes on from there" in started.stdout
        assert len(started.stdout.splitlines()) < 60, "library chatter belongs into log.txt"
    if ready is is_answering:
        assert (
            done == 0
            and records(folder, "eval") == []
            and (folder / "answers.jsonl").read_text() == ""
        )
    assert f"(step {saved} of {LAST})" in resumed(tiny, tmp_path, "eval.show_answers=2")
    assert_ended_alike(folder, undisturbed)
    answers = read_lines(folder / "answers.jsonl")
    assert [answer["step"] for answer in answers] == [0, 0, LAST, LAST]
    assert (folder / "audit.json").exists()


# ---- a full disk


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_disk_too_full_for_a_checkpoint_keeps_the_one_before_and_with_more_room_the_run_goes_on(
    tiny, undisturbed, tmp_path
):
    one = sum(path.stat().st_size for path in step_path(undisturbed, 4).iterdir())
    with small_disk(tmp_path / "disk", kilobytes=one * 3 // 2 // 1024 + 100) as disk:
        folder = disk / "tiny"
        with running([*LAUNCH, *command(tiny, disk)], disk) as ended:
            assert ended.wait(150) == 2
        saved = saved_steps(folder)
        assert (
            saved
            and saved[-1] < 12
            and all(why_damaged(step_path(folder, step)) is None for step in saved)
        )
        assert [path.name for path in (folder / "checkpoints").glob("*.tmp")] == []
        failed = records(folder, "checkpoint_failed")
        assert [record["step"] for record in failed] == [
            saved[-1] + 4,
            saved[-1] + 8,
            saved[-1] + 12,
        ]
        assert (
            "No space left" in failed[0]["error"]
            and f"not saved: {failed[0]['error']}" in ended.stdout
        )
        no_page, _, error = ended.stderr.partition("\n")
        assert no_page.startswith("the run's page was not made; ") and "No space left" in no_page
        assert error.startswith("error: 3 saves in a row have failed: ")
        assert (
            "No space left" in ended.stderr
            and f"newest complete checkpoint is {step_path(folder, saved[-1])}" in ended.stderr
        )
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        assert f"(step {saved[-1]} of {LAST})" in resumed(tiny, disk)
        assert_ended_alike(folder, undisturbed)
