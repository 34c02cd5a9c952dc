"""The command line as users meet it, and real training runs that are killed in every way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import (
    Command,
    last_given,
    listeners,
    ran_python,
    ranks_of,
    running,
    steps_of,
    wait_for,
)
from ranks import free_port, run_ranks
from tiers import nightly
from torch.distributed import DistNetworkError

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.shards import indexing
from mmtrain.launch import main as launch_command
from mmtrain.launching import data, training
from mmtrain.plan.planner import make_plan
from mmtrain.runtime import rendezvous
from mmtrain.runtime.gpus import Gpu

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
LAUNCH = ("-m", "mmtrain.launch")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
ENDLESS = ("train.max_steps=100000", "parallel.pipeline=2", "parallel.threads_per_rank=1")


def launch(*arguments: str | Path) -> int:
    """Exit code of the command, called in this process: wrong input ends it before anything is
    started.
    """
    try:
        return launch_command([str(argument) for argument in arguments])
    except SystemExit as ended:  # argparse's
        return ended.code


def under_torchrun(patch: pytest.MonkeyPatch, rank: int, **more: str) -> None:
    """Make this process one of two ranks that torchrun has started."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in {**environment, "MASTER_PORT": "1", **more}.items():
        patch.setenv(name, value)


def test_many_shards_are_not_indexed_while_other_processes_wait(
    tiny, tmp_path, monkeypatch, make_tiny
):
    make_tiny.make_tiny_shards(tmp_path, samples=8, shards=2)
    config = load_config(tiny / "config.yaml", [f"data.shards={tmp_path}/*.tar"])
    monkeypatch.setattr(indexing, "INDEXED_WHILE_OTHERS_WAIT", 1000)
    with pytest.raises(UserError, match=r"2 of 2 shards .*mmtrain index CONFIG$"):
        data.check_data(config, others_wait=True)
    data.check_data(config, others_wait=False)
    data.check_data(config, others_wait=True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "(PMI_RANK=0, PMI_SIZE=2: mpirun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, None),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}, None),
    ],
)
def test_left_overs_in_the_environment_do_not_matter(
    tiny, tmp_path, monkeypatch, capsys, environment, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (
        launch(tiny / "config.yaml", "data.shards=nowhere/*.tar", f"run.dir={tmp_path / 'runs'}")
        == 2
    )
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1 and (message or "data.shards: no file nowhere/*.tar") in refused


def test_help_shows_examples_with_configs_that_exist_and_what_exit_codes_mean(capsys):
    assert launch("--help") == 0
    said = capsys.readouterr().out
    assert "mmtrain train example:llava_pp4" in said and "exit codes:" in said
    named = set(re.findall(r"configs/\S+\.yaml", said))
    assert named and named <= {f"configs/{path.name}" for path in CONFIGS}


# ---- --plan


@pytest.mark.nightly
def test_a_reader_that_leaves_early_is_no_error(tiny):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *LAUNCH, str(tiny / "config.yaml"), "--plan"]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert ran.returncode == 0 and ran.stderr == ""


def test_a_plan_that_cannot_be_printed_is_an_error(tiny, tmp_path):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "mmtrain.launch", tiny / "config.yaml", "--plan"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: standard output cannot be used: No space left on device\n",
    )


@pytest.mark.parametrize("configs", [CONFIGS[::12], nightly(CONFIGS)], ids=len)
def test_a_plan_of_any_shipped_config_needs_no_torch_and_leaves_nothing_behind(tmp_path, configs):
    code = (
        "import sys; from mmtrain.launch import main;"
        "codes = [main([path, '--plan', sys.argv[1]]) for path in sys.argv[2:]];"
        "print(codes, sorted({'torch', 'transformers', 'timm', 'deepspeed'} & set(sys.modules)))"
    )
    ran = ran_python("-c", code, f"run.dir={tmp_path / 'runs'}", *configs, cwd=tmp_path)
    assert ran.stdout.splitlines()[-1] == f"{[0] * len(configs)} []", ran.stderr
    assert list(tmp_path.iterdir()) == []


# ---- real runs


def started(tiny: Path, folder: Path, *arguments: str) -> tuple[list[str | Path], Path]:
    command = [
        *LAUNCH,
        tiny / "config.yaml",
        *last_given(f"run.dir={folder}", *ENDLESS, *arguments),
    ]
    return command, folder / "tiny"


def wait_until_it_trains(command: Command, folder: Path) -> None:
    wait_for(lambda: steps_of(folder) >= 2 or command.process.poll() is not None, 120, "two steps")
    assert command.process.poll() is None, command.stderr


@pytest.mark.nightly
def test_kill_9_of_a_rank_ends_all_within_10_seconds_and_names_rank_stage_and_step(tiny, tmp_path):
    arguments, folder = started(tiny, tmp_path)
    with running(arguments, tmp_path) as command:
        wait_until_it_trains(command, folder)
        assert len(command.family()) >= 5  # launcher, fork server, two ranks, a data worker
        before = steps_of(folder)
        os.kill(ranks_of(folder)[1], signal.SIGKILL)
        assert command.seconds_until_gone(timeout=20) < 10
        assert command.wait() == 1
    said = re.fullmatch(
        r"error: rank 1 \(stage 1\) was killed by SIGKILL \(.*\) in step (\d+) \(counted from "
        r"0\), at [A-Z].*\n"
        r"  log: (.*)\n",
        command.stderr,
    )
    assert said, command.stderr
    # Rank 0 may have recorded a step of which rank 1 has not done all: it may not even have
    # updated.
    assert before - 1 <= int(said[1]) <= steps_of(folder)
    assert said[2] == str(folder / "log.txt")


def test_a_running_run_keeps_its_folder_and_ctrl_c_ends_all_within_10_seconds(
    tiny, tmp_path, capsys
):
    arguments, folder = started(tiny, tmp_path)
    with running([*arguments, "checkpoint.every_steps=2"], tmp_path) as command:
        wait_until_it_trains(command, folder)
        assert launch(*arguments[2:], "run.overwrite=true") == 2
        assert "in use by a run that is still going" in capsys.readouterr().err
        assert steps_of(folder) >= 2, "the running one keeps its files"
        wait_for(lambda: "saved " in command.stdout, 60, "a checkpoint")
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: to every process
        assert command.seconds_until_gone(timeout=20) < 10
        assert command.wait() == 130
    said = re.fullmatch(
        r"error: stopped by Ctrl-C; rank 0 \(stage 0\) was in step \d+ .*\n  log: .*\n"
        r"nothing was saved since step (\d+). The same command goes on from there\n",
        command.stderr,
    )
    assert said and (folder / f"checkpoints/step-{int(said[1]):08d}").is_dir(), command.stderr


@pytest.mark.nightly
def test_kill_9_of_a_launcher_leaves_no_orphan(tiny, tmp_path):
    arguments, folder = started(tiny, tmp_path)
    with running(arguments, tmp_path) as command:
        wait_until_it_trains(command, folder)
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait()
        assert command.seconds_until_gone(timeout=20) < 10


@pytest.mark.parametrize("ranks", [1, nightly(2)])
def test_ranks_that_torchrun_started_are_joined(tiny, tmp_path, ranks):
    overrides = (
        f"run.dir={tmp_path}",
        "parallel.pipeline=1",
        f"parallel.data={ranks}",
        "train.max_steps=2",
    )
    arguments = (*TORCHRUN, str(ranks), *LAUNCH, tiny / "config.yaml", *overrides)
    with running(arguments, tmp_path) as command:
        assert command.wait() == 0, command.stderr
    folder = tmp_path / "tiny"
    assert steps_of(folder) == 2
    assert (folder / "audit.json").exists() and (folder / "config.yaml").exists()
    assert len(set(ranks_of(folder).values())) == ranks


def test_a_wrong_number_of_ranks_from_torchrun_is_refused(tiny, tmp_path, monkeypatch, capsys):
    under_torchrun(monkeypatch, 0)
    assert launch(tiny / "config.yaml", f"run.dir={tmp_path}") == 2
    refused = capsys.readouterr().err
    assert "torchrun started 2 ranks; parallel.pipeline 4 x parallel.data 1 needs 4" in refused
    assert not (tmp_path / "tiny").exists()


@pytest.mark.nightly
def test_torchruns_ranks_refuse_their_wrong_number_once(tiny, tmp_path):
    with running(
        (*TORCHRUN, "2", *LAUNCH, tiny / "config.yaml", f"run.dir={tmp_path}"), tmp_path
    ) as command:
        assert command.wait() != 0
    assert (
        command.stderr.count(
            "torchrun started 2 ranks; parallel.pipeline 4 x parallel.data 1 needs 4"
        )
        == 1
    )
    assert not (tmp_path / "tiny").exists()


@pytest.mark.nightly
def test_two_nodes_share_a_run(tiny, tmp_path):
    common = [
        *LAUNCH,
        tiny / "config.yaml",
        f"run.dir={tmp_path}",
        "parallel.pipeline=2",
        "train.max_steps=2",
    ]
    port = free_port()
    common += ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank"]
    with running([*common, "0"], tmp_path) as node_0, running([*common, "1"], tmp_path) as node_1:
        wait_for(
            lambda: listeners([node_0.process.pid]) or node_0.process.poll() is not None,
            60,
            "the store",
        )
        assert listeners([node_0.process.pid]) == {("127.0.0.1", port)}
        assert (node_0.wait(), node_1.wait()) == (0, 0), node_0.stderr + node_1.stderr
    assert "listening for the other machines on 127.0.0.1\n" in node_0.stdout
    folder = tmp_path / "tiny"
    assert steps_of(folder) == 2 and (folder / "audit.json").exists()
    assert "[rank 1]" in (folder / "log-node1.txt").read_text()
    assert "loss" in node_0.stdout and "loss" not in node_1.stdout


DIFFERENT = (
    "optimizer.lr=0.{0}",
    "data.caption_prompt=https://me:secret{0}@host/{0}",
    "parallel.pipeline=2",
)


def assert_tells_what_differs(error: str) -> None:
    assert error.startswith("rank 1 planned a different run than rank 0: ")
    said = " ".join(error.split())
    assert "optimizer.lr is 0.0 on rank 0 and 0.1 on rank 1" in said, said
    assert 'data.caption_prompt is "https://host/0" on rank 0' in said and "secret" not in said, (
        said
    )


def disagree(file: Path) -> str:
    """Return the error of a rank that has another configuration than the other one."""
    rank = int(os.environ["RANK"])
    config = load_config(file, [setting.format(rank) for setting in DIFFERENT])
    with pytest.raises(UserError) as refused:
        rendezvous.agree(training.agreement(config, make_plan(config), trace_steps=0), rank, 60)
    return str(refused.value)


def test_ranks_with_different_configs_learn_what_differs(tiny):
    for error in run_ranks(2, disagree, tiny / "config.yaml"):
        assert_tells_what_differs(error)


@pytest.mark.nightly
def test_ranks_with_different_configs_are_refused_on_all(tiny, tmp_path, monkeypatch):
    common = [*LAUNCH, tiny / "config.yaml", f"run.dir={tmp_path}"]
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            under_torchrun(monkeypatch, rank, LOCAL_RANK=str(rank), MASTER_PORT=port)
            different = [setting.format(rank) for setting in DIFFERENT]
            ranks.append(stack.enter_context(running([*common, *different], tmp_path)))
        for rank in ranks:
            assert rank.wait() == 2, rank.stderr
            assert rank.stderr.startswith("error: ")
            assert_tells_what_differs(rank.stderr.removeprefix("error: "))


GPU = Gpu("NVIDIA A10", 24 * 2**30, 23 * 2**30, (8, 6))  # no run here may get so far as to use it


@pytest.mark.parametrize("by_torchrun", [False, True])
@pytest.mark.parametrize("setting", ["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_a_setting_with_which_a_pipeline_on_gpus_can_hang_ends_it_at_once(
    tiny, tmp_path, monkeypatch, capsys, setting, by_torchrun
):
    monkeypatch.setattr(training, "visible_gpus", lambda: (GPU, GPU))
    monkeypatch.setenv(setting, "1")
    if by_torchrun:
        under_torchrun(monkeypatch, 0, LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="none")
    command = [str(tiny / "config.yaml"), "parallel.pipeline=2", f"run.dir={tmp_path}"]
    assert launch_command(command) == 2
    assert re.match(
        rf"error: {setting}=1 in the environment: .*\. Unset it", capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_torchrun_on_another_machine_makes_the_demos_data_there(
    tiny, tmp_path, monkeypatch, capsys
):
    def make(config):
        raise UserError(f"made {config.run.name}")

    monkeypatch.setattr(data, "make_demo_data", make)
    under_torchrun(monkeypatch, 1, LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none")
    layout = [
        "parallel.pipeline=1",
        "parallel.data=2",
        "train.packs_per_step=8",
        "train.packs_per_microbatch=1",
    ]
    assert (
        launch_command(
            [str(tiny / "config.yaml"), *layout, f"run.dir={tmp_path}", "run.name=there"]
        )
        == 2
    )
    assert capsys.readouterr().err == "error: made there\n"


def test_a_rank_of_torchrun_that_finds_no_other_ends_with_a_message(
    tiny, tmp_path, monkeypatch, capsys
):
    def agree(*_):
        raise DistNetworkError(
            "The client socket has timed out\nException raised from throwTimeoutError\nframe #0"
        )

    monkeypatch.setattr(rendezvous, "agree", agree)
    monkeypatch.setattr(training, "set_rank_environment", lambda *_, **__: None)
    under_torchrun(monkeypatch, 1, LOCAL_WORLD_SIZE="1")
    assert (
        launch_command([str(tiny / "config.yaml"), "parallel.pipeline=2", f"run.dir={tmp_path}"])
        == 1
    )
    said = capsys.readouterr().err
    assert said.startswith("error: rank 1 did not meet the other ranks")
    assert said.endswith(": The client socket has timed out\n")


def test_a_gpu_that_is_full_already_ends_the_run_before_it_starts(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        training, "visible_gpus", lambda: (GPU, dataclasses.replace(GPU, free_bytes=2**20))
    )
    command = [str(tiny / "config.yaml"), "parallel.pipeline=2", f"run.dir={tmp_path}"]
    assert launch_command(command) == 2
    said = (
        "error: rank 1 (stage 1) does not fit on GPU 1 (NVIDIA A10): "
        "1.0 MiB of 24.0 GiB are free, but the plan"
    )
    assert capsys.readouterr().err.startswith(said)
    assert list(tmp_path.iterdir()) == []
