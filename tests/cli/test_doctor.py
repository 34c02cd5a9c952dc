"""mmtrain doctor: no check takes another one down, what fails says what to do, and wrong results
are seen.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
from conftest import MAIN_JOB
from json_files import read_json
from processes import running, wait_for
from rank_runs import train

from mmtrain.doctor import attention as doctor_attention
from mmtrain.doctor.check import COMPARE, Check, FailedError, SkippedError, run_check
from mmtrain.doctor.compiling import compiled_layer
from mmtrain.doctor.machine import traps
from mmtrain.doctor.runs import RECORD, SETTINGS, STEPS, demo, pipeline

LOSSES = read_json(RECORD)["losses"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the doctor makes its folders, with a short path: sockets lie below it."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def doctor(folder, *arguments, seconds=280):
    """(exit code, words of stdout, stderr) of the command, which leaves no process behind."""
    with running(["-m", "mmtrain", "doctor", *arguments], folder) as command:
        code = command.wait(seconds)
        assert command.family() == []
        assert [
            line for line in command.stdout.splitlines() if len(line) > 80 and "kept: " not in line
        ] == []
        return code, " ".join(command.stdout.split()), command.stderr


@pytest.mark.parametrize(
    ("how", "state", "text", "remedy"),
    [
        ("passes", "ok", "all is well", ""),
        ("skips", "skipped", "needs 2 GPUs", ""),
        ("fails", "failed", "1 GiB free; 4 GiB are needed", "end other programs"),
        ("is_refused", "failed", "use a newer driver", ""),
        ("raises", "failed", "RuntimeError: CUDA error: an illegal memory access", COMPARE),
        (
            "crashes",
            "failed",
            "was killed by SIGSEGV, without a result; its last output: before the crash",
            COMPARE,
        ),
        (
            "hangs",
            "failed",
            "did not end within 3 s, without a result; its last output: none",
            COMPARE,
        ),
    ],
)
def test_however_a_check_ends_its_outcome_says_so_and_no_process_is_left(
    tmp_path, how, state, text, remedy
):
    seconds = 3 if how == "hangs" else 60
    outcome = run_check(Check(how, f"broken_checks:{how}", ""), tmp_path, seconds)
    assert (outcome.state, outcome.remedy) == (state, remedy) and outcome.text.endswith(text)
    if how == "hangs":
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    if how == "raises":
        assert "Traceback" in (tmp_path / "raises.log").read_text()


@pytest.mark.nightly
@without_gpu
def test_without_a_gpu_its_checks_are_skipped_and_the_demo_computes_the_losses_on_record(
    tmp_path, temporary
):
    code, printed, _ = doctor(tmp_path, "--only", "environment", "driver", "demo")
    assert code == 0, printed
    assert re.search(
        r"skipped driver [\d.]+ s no GPU driver, .* ok environment [\d.]+ s no variable", printed
    )
    first, *_, last = LOSSES["float32"]
    assert f"float32: loss {first:.4f} to {last:.4f}" in printed and "bfloat16: loss" in printed
    assert printed.endswith("2 ok, 0 failed, 1 skipped")
    assert not list(temporary.glob("doctor-*"))


def test_a_failed_check_ends_the_doctor_with_1_its_remedy_and_its_log(
    tmp_path, temporary, monkeypatch
):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    code, printed, _ = doctor(tmp_path, "--only", "memory", "environment")
    assert code == 1 and "ok memory" in printed
    line = (
        r"FAILED environment [\d.]+ s TORCH_NCCL_ASYNC_ERROR_HANDLING=0: .*; "
        r"unset it what to do: change these var"
    )
    assert re.search(line, printed)
    (kept,) = temporary.iterdir()
    assert (
        f"kept: {kept}, with the logs of environment" in printed
        and (kept / "environment.log").exists()
    )


@pytest.mark.nightly
def test_ctrl_c_ends_the_check_that_runs_and_leaves_nothing(tmp_path, temporary):
    with running(["-m", "mmtrain", "doctor", "--only", "demo"], tmp_path) as command:
        # the doctor, the check, a run
        wait_for(lambda: len(command.family()) >= 3, 60, "the launcher of the check")
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait(20) == 130 and command.stderr == "stopped\n"
        assert command.family() == []
    assert not list(temporary.glob("doctor-*"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_check_fails_where_training_works(tmp_path, temporary):
    code, printed, _ = doctor(tmp_path, seconds=880)
    assert code == 0, printed
    assert printed.count(f"{STEPS} steps, losses") == 2 and " 0 failed, " in printed


def made_runs(folder: Path, **losses: list[float]) -> Path:
    """A folder in which checks have already made runs with these losses."""
    for name, values in losses.items():
        (folder / name).mkdir(parents=True)
        lines = [{"kind": "train", "loss": loss} for loss in values]
        (folder / name / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(v)}\n" for v in (*lines, {"kind": "end"}))
        )
    return folder


@pytest.mark.nightly
@without_gpu
def test_the_demo_trains_with_the_losses_on_record(tmp_path):
    overrides = (
        "parallel.pipeline=1",
        f"run.dir={tmp_path}",
        "run.name=float32",
        "model.llm.dtype=float32",
    )
    train(MAIN_JOB, *SETTINGS, *overrides)
    made_runs(tmp_path, bfloat16=LOSSES["bfloat16"])
    assert "float32: loss" in demo(tmp_path)


@pytest.mark.parametrize(
    "wrong", [[*LOSSES["float32"][:-1], 1.107], [math.nan] * STEPS, LOSSES["float32"][:-1]]
)
def test_losses_off_the_record_or_off_one_process_are_seen(tmp_path, wrong):
    right = made_runs(tmp_path / "right", **LOSSES, pipeline=LOSSES["float32"])
    assert demo(right).count(
        "0.0e+00 off the record"
    ) == 2 and "0.0e+00 off those of one process" in pipeline(right)
    with pytest.raises(
        FailedError, match=r"float32: .* off the record; at most 0\.0001 is rounding"
    ):
        demo(made_runs(tmp_path / "demo", **LOSSES | {"float32": wrong}))
    with pytest.raises(FailedError, match="off those of one process"):
        pipeline(made_runs(tmp_path / "pipeline", **LOSSES, pipeline=wrong))


def test_attention_that_sees_the_next_document_or_has_wrong_gradients_is_seen(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(doctor_attention, "TOKENS", 128)
    right = doctor_attention.packed
    assert (
        "documents one by one (flash attention needs a GPU); in float32"
        in doctor_attention.attention(tmp_path)
    )

    def leaking(borders, *states):
        return right([0, borders[-1]], *states)

    def without_gradient_of_keys(borders, *states):
        output, query, key, value = right(borders, *states)
        return output, query, 0 * key, value

    for wrong in (leaking, without_gradient_of_keys):
        monkeypatch.setattr(doctor_attention, "packed", wrong)
        with pytest.raises(
            FailedError, match=r"off separate documents, at most 0\.0001 is rounding"
        ):
            doctor_attention.attention(tmp_path)


def test_a_machine_that_cannot_compile_layers_is_told_what_is_missing(tmp_path, monkeypatch):
    def without_compiler(forward, *, dynamic):
        def compiled(*arguments, **options):
            raise RuntimeError("Failed to find C compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", without_compiler)
    message = r"LlamaDecoderLayer: not compiled, .*Failed to find C compiler.*gcc"
    with pytest.raises(SkippedError, match=message):
        compiled_layer(tmp_path)


def test_variables_that_break_what_runs_rely_on_are_named_and_others_are_not():
    harmless = {
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "0",
    }
    assert list(traps(harmless)) == []
    bad = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    torchrun = dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "0"
    )
    named = [re.split("[=,]", text)[0] for text in traps(bad | torchrun)]
    assert named == [
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_P2P_DISABLE",
        "RANK",
    ]
