"""mmtrain doctor: a check's end never is the others' end, what fails says what to do, and what is wrong is seen."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import TOOLS
from processes import running, wait_for
from ranks import run_ranks

from mmtrain.__main__ import main
from mmtrain.doctor import attention as doctor_attention
from mmtrain.doctor import fetching as doctor_fetching
from mmtrain.doctor import measures as doctor_measures
from mmtrain.doctor import numbers as doctor_numbers
from mmtrain.doctor.check import FailedError, Here
from mmtrain.doctor.layouts import layout
from mmtrain.doctor.machine import gpu_links, traps
from mmtrain.doctor.runs import STEPS, demo_config

DOCTOR = TOOLS / "doctor.py"
RECORD = TOOLS.parent / "mmtrain" / "doctor" / "record.json"
LOSSES = json.loads(RECORD.read_text())["losses"]["float32"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the doctor makes its folders, with a short path: sockets lie below it."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def doctor(folder, *arguments):
    """(exit code, words of stdout, stderr) of the command, which leaves no process behind."""
    with running([DOCTOR, *arguments], folder) as command:
        code = command.wait()
        assert command.family() == []
        assert [line for line in command.stdout.splitlines() if len(line) > 80 and "kept: " not in line] == []
        return code, " ".join(command.stdout.split()), command.stderr


def here_with_runs(folder, **losses):
    """What a check sees when checks before it have made runs with these losses."""
    for name, values in losses.items():
        run = folder / "runs" / name.replace("_", "-")
        run.mkdir(parents=True)
        lines = [{"kind": "train", "loss": loss} for loss in values]
        text = "\n".join(json.dumps(line) for line in (*lines, {"kind": "end"}))
        (run / "metrics.jsonl").write_text(text)
        (run / "plan.json").write_text('{"boundaries": [2]}')
    return Here(folder, folder / "runs", RECORD)


@without_gpu
def test_without_a_gpu_checks_that_need_none_run_and_the_others_say_what_they_need(tmp_path, temporary):
    code, said, _ = doctor(tmp_path, "--only", "stage", "environment", "driver", "--json", "seen.json")
    assert code == 0, said
    assert "left out driver this machine has no GPU driver ok environment" in said
    assert "left out stage needs 1 GPU; here: 0 1 ok, 0 failed, 2 left out;" in said
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [(check["name"], check["outcome"]) for check in seen["checks"]] == [
        ("driver", "left out"),
        ("environment", "ok"),
        ("stage", "left out"),
    ]
    assert seen["checks"][1]["facts"]["tmpdir"] == str(temporary) and seen["machine"]["versions"]["torch"]
    assert list(temporary.iterdir()) == [], "nothing is left where all is well"


def test_a_check_that_fails_ends_the_doctor_with_1_its_remedy_and_its_log(tmp_path, temporary, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    code, said, _ = doctor(tmp_path, "--only", "environment", "shared-memory")
    assert code == 1
    assert re.search(
        r"FAILED environment [\d.]+ s TORCH_NCCL_ASYNC_ERROR_HANDLING=0: .*; unset it what to do: mend each of them",
        said,
    )
    (kept,) = temporary.iterdir()
    assert f"kept: {kept}" in said and (kept / "environment" / "log.txt").exists()


def test_a_check_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, temporary):
    code, said, _ = doctor(tmp_path, "--only", "demo", "environment", "--timeout", "5")
    assert code == 1
    assert "FAILED demo" in said and "did not end within 5 s" in said and "--timeout gives more time" in said
    assert "ok environment" in said, "checks before and behind it are not its victims"


def test_ctrl_c_ends_the_check_that_runs_and_leaves_nothing(tmp_path, temporary):
    with running([DOCTOR, "--only", "demo"], tmp_path) as command:
        wait_for(lambda: len(command.family()) >= 3, 60, "the launcher of the check")  # the doctor, the check, a run
        os.kill(command.process.pid, signal.SIGINT)
        assert command.wait(20) == 130 and command.stderr == "stopped\n"
        assert command.family() == []
    assert not [path for path in temporary.iterdir() if path.name.startswith("doctor-")]


def test_names_that_are_not_known_are_refused_with_those_that_are(tmp_path):
    code, _, said = doctor(tmp_path, "--only", "chanels")
    assert code == 2 and "no such check (did you mean channels?)" in said and "environment" in said


def test_the_list_of_checks_fits_80_columns(capsys):
    assert main(["doctor", "--list"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "data-8 8 ranks eight replicas do" in " ".join(said.split())


def test_a_result_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    code, said, error = doctor(tmp_path, "--only", "environment", "--json", "no/such/folder.json")
    assert (code, said) == (2, "")
    assert error == "error: no/such/folder.json cannot be used: No such file or directory\n"


def test_the_demo_computes_the_losses_on_record_and_messages_between_ranks_arrive(tmp_path, temporary):
    code, said, _ = doctor(tmp_path, "--cpu", "--only", "demo", "channels", "fetching", "--timeout", "140")
    assert code == 0, said
    assert "ok fetching" in said and "GB/s alone" in said
    assert "ok demo" in said and f"{STEPS} steps, loss {LOSSES[0]:.4f} to" in said
    assert "ok channels" in said and "4 among 2 ranks on the CPU, by torch's ProcessGroupGloo: all in order" in said


def test_streamed_layers_that_train_otherwise_or_are_never_fetched_are_seen(tmp_path):
    for name, losses, fetches in (("well", LOSSES, 6), ("other", [*LOSSES[:-1], 1.0], 6), ("resident", LOSSES, 0)):
        here = here_with_runs(tmp_path / name, pp1=LOSSES, streamed_host=losses)
        audit = {"ranks": [{"frozen": {"fetches": fetches}}]}
        (here.runs / "streamed-host" / "audit.json").write_text(json.dumps(audit))
        if name == "well":
            assert "6 fetches: 0.0e+00 off" in doctor_fetching.streamed(here, "host").text
            continue
        with pytest.raises(FailedError, match="off resident layers"):
            doctor_fetching.streamed(here, "host")


@pytest.mark.parametrize("planted", [1.001, math.nan])
def test_losses_that_are_not_those_on_record_or_of_pipeline_1_are_seen(tmp_path, planted):
    wrong = [*LOSSES[:-1], LOSSES[-1] * planted]
    well = here_with_runs(tmp_path / "well", pp1=LOSSES, pp2x1_dp1=LOSSES)
    assert "0.0e+00 off" in doctor_numbers.recorded(well, "float32").text
    assert "0.0e+00 off" in layout(well, *"211").text
    with pytest.raises(FailedError, match="off the record"):
        doctor_numbers.recorded(here_with_runs(tmp_path / "record", pp1=wrong), "float32")
    with pytest.raises(FailedError, match="off pipeline 1"):
        layout(here_with_runs(tmp_path / "layout", pp1=LOSSES, pp2x1_dp1=wrong), *"211")
    with pytest.raises(FailedError, match="inf off"):
        layout(here_with_runs(tmp_path / "short", pp1=LOSSES, pp2x1_dp1=LOSSES[:-1]), *"211")


def test_attention_that_looks_into_the_next_document_or_has_wrong_gradients_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_attention, "TOKENS", 128)
    here, right = Here(tmp_path, tmp_path, RECORD), doctor_attention._packed
    assert doctor_attention.attention(here).facts["backward"] < 1e-5

    def leaking(borders, query, key, value):
        return right([0, borders[-1]], query, key, value)

    def without_gradient_of_keys(borders, query, key, value):
        return right(borders, query, key.detach() + 0 * key, value)

    for wrong in (leaking, without_gradient_of_keys):
        monkeypatch.setattr(doctor_attention, "_packed", wrong)
        with pytest.raises(FailedError):
            doctor_attention.attention(here)


def test_a_stage_that_computes_something_else_on_the_other_device_is_seen(tmp_path, monkeypatch):
    slices = "parallel.encoder_ranks=[0,1]"  # which here nobody would pass on
    config = demo_config(Here(tmp_path, tmp_path, RECORD), "stages", "parallel.pipeline=2", slices)
    seen = doctor_numbers.compare_stages(config, "cpu")
    assert {name.split(":")[0] for name in seen.facts} == {"stage 0", "stage 1"} and set(seen.facts.values()) == {0.0}
    assert {"stage 0: output", "stage 1: loss", "stage 1: gradient of its input"} < set(seen.facts)
    assert "stage 0: projector.linear_1.weight" in seen.facts
    right, calls = doctor_numbers.run_stage, iter(range(4))

    def wrong(*arguments):
        found = right(*arguments)
        if next(calls) == 3:  # the second stage, on the other device
            found["loss"] = found["loss"] * 1.01
        return found

    monkeypatch.setattr(doctor_numbers, "run_stage", wrong)
    with pytest.raises(FailedError, match="stage 1: loss"):
        doctor_numbers.compare_stages(config, "cpu")


def test_bytes_of_a_step_that_are_not_those_planned_are_seen(tmp_path, monkeypatch):
    def on_ranks(here, ranks, target):
        run_ranks(ranks, target, SimpleNamespace(device="cpu"))

    monkeypatch.setattr(doctor_measures, "on_ranks", on_ranks)
    here = Here(tmp_path, tmp_path, RECORD)
    facts = doctor_measures.memory(here).facts
    for found in ({"allocated_bytes": facts["planned_bytes"] * 1.15}, {"allocated_bytes": 0}):
        (tmp_path / "memory.json").write_text(json.dumps(facts | found))
        monkeypatch.setattr(doctor_measures, "on_ranks", lambda *arguments: None)
        with pytest.raises(FailedError, match="allocated"):
            doctor_measures.memory(here)


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-51\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:
  X    = Self
"""


def test_links_between_gpus_are_read_from_nvidia_smis_matrix():
    assert gpu_links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}


def test_variables_that_break_what_runs_rely_on_are_named_and_others_are_not():
    harmless = {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "RANK": "0"}
    assert list(traps(harmless)) == []
    bad = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    torchrun = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "0")
    named = [text.split("=")[0].split(",")[0] for text in traps(bad | torchrun)]
    assert named == [
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_P2P_DISABLE",
        "RANK",
    ]
