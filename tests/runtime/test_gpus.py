"""GPUs are asked about in a child, refused with a remedy, and nothing that forks starts CUDA on
their account.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
from gpu_ranks import gpu_environment
from processes import ran_python

from mmtrain.base.errors import UserError
from mmtrain.runtime import gpus
from mmtrain.runtime.gpus import Gpu, ask_machine, threads_of_rank, visible_gpus

H100 = {
    "name": "NVIDIA H100",
    "total_bytes": 80 << 30,
    "free_bytes": 79 << 30,
    "capability": [9, 0],
}
FACTS = {
    "gpus": [H100, H100 | {"free_bytes": 10 << 30}],
    "torch": "2.15.0+cu132",
    "built_for": "13.2",
    "architectures": ["sm_75", "sm_80", "sm_90a", "compute_120"],
    "driver_cuda": [13, 0],
    "error": None,
}


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """Sets what the child answers, as on a machine with NVIDIA's driver."""
    driver_file = tmp_path / "nvidiactl"
    driver_file.touch()
    monkeypatch.setattr(gpus, "DRIVER_FILES", (str(driver_file),))
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER_FILE", str(driver_file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_program(facts: dict | str) -> None:
        program = (
            facts
            if isinstance(facts, str)
            else f"print('a greeting'); print({json.dumps(facts)!r})"
        )
        monkeypatch.setattr(gpus, "CHILD", ("-c", program))

    return set_program


@pytest.mark.parametrize(
    ("chosen", "variable", "recorded", "expected"),
    [
        (3, "2", 7, 3),
        (None, "2", 7, 2),
        (None, " 6 ,2", None, 6),  # of nested regions
        (None, None, 7, 7),
        (None, None, None, 4),
        *(
            (None, wrong, None, 4)
            for wrong in ("", "0", "-1", "two", "2 threads", "99999999999999999999")
        ),
    ],
)
def test_a_rank_has_the_threads_that_the_user_asks_for_or_those_it_had_or_its_share(
    chosen, variable, recorded, expected, monkeypatch
):
    monkeypatch.setattr(gpus, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads_of_rank(chosen, 2, recorded) == expected


def test_gpus_come_with_names_memory_and_compute_capability(answer):
    answer(FACTS)
    first, second = visible_gpus()
    assert first == Gpu("NVIDIA H100", 80 << 30, 79 << 30, (9, 0))
    assert second.free_bytes == 10 << 30


def test_the_child_tells_what_torch_here_was_built_for():
    machine = ask_machine()
    assert (machine.torch, machine.built_for) == (torch.__version__, torch.version.cuda)
    assert list(machine.architectures) == torch.cuda.get_arch_list()
    assert len(machine.gpus) == torch.cuda.device_count()
    assert machine.gpus or machine.error


def test_without_a_driver_or_with_all_gpus_hidden_nothing_is_started(answer, monkeypatch):
    answer("raise SystemExit(1)")
    with pytest.raises(UserError):
        visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "DRIVER_FILES", ())
    assert visible_gpus() == ()


def gpu(name: str, *capability: int) -> dict:
    return {"gpus": [H100, H100 | {"name": name, "capability": capability}]}


@pytest.mark.parametrize(
    ("other", "chosen", "said"),
    [
        (
            {"gpus": [], "driver_cuda": [12, 2], "error": "driver too old"},
            None,
            [
                "driver supports CUDA 12.2",
                "has CUDA 13.2",
                "Update the driver",
                "torch for CUDA 12",
            ],
        ),
        (
            gpu("Tesla P100", 6, 0),
            None,
            ["GPU 1, Tesla P100, has compute capability 6.0", "that has sm_60"],
        ),
        (
            gpu("a Jetson", 10, 1),
            None,
            ["compute capability 10.1", "code only for sm_75, sm_80, sm_90a, compute_120."],
        ),
        (
            {"gpus": [], "error": "No CUDA GPUs are available"},
            None,
            ["sees no GPU (No CUDA GPUs", "--gpus all"],
        ),
        (
            {"gpus": []},
            "7",
            ["CUDA_VISIBLE_DEVICES=7 names no GPU of this machine", "nvidia-smi -L"],
        ),
        ({"gpus": [], "built_for": None}, None, ["built without CUDA", "Install its CUDA build"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_gpus_that_cannot_be_used_are_refused_in_one_line_with_the_remedy(
    answer, monkeypatch, other, chosen, said
):
    answer(FACTS | other)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    with pytest.raises(UserError) as refusal:
        visible_gpus()
    message = str(refusal.value)
    assert all(words in message for words in said), message
    assert "\n" not in message and "or set CUDA_VISIBLE_DEVICES= to run on the CPU" in message


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0), (12, 1), (13, 0)])
def test_a_gpu_that_torch_has_code_for_is_taken(answer, capability):
    answer(FACTS | gpu("some GPU", *capability))
    assert visible_gpus()[1].capability == capability


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "did not answer within 0.5 s"),
        ("import os; os.abort()", "exit code -6"),
        ("raise RuntimeError('CUDA unknown error')", "RuntimeError: CUDA unknown error"),
        ("print('nothing of use')", "listing the GPUs failed"),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_one_line_with_the_remedy(
    answer, program, said, monkeypatch
):
    answer(program)
    monkeypatch.setattr(gpus, "SECONDS", 0.5 if "sleep" in program else 60)
    with pytest.raises(UserError) as refusal:
        ask_machine()
    assert (
        said in str(refusal.value)
        and "nvidia-smi" in str(refusal.value)
        and "\n" not in str(refusal.value)
    )


# Python imports this first in every process of a run. Any process but a rank that starts CUDA is
# recorded.
MACHINE_WITH_GPUS = """
import importlib.util, os, runpy, sys, traceback
runpy.run_path({fake!r})
from mmtrain.runtime import gpus
gpus.DRIVER_FILES = (__file__,)
gpus.CHILD = ("-S", "-c", {answer!r})
begun = os.getpid()
class Watch:
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            start = module._lazy_init
            def tell():
                if "RANK" in os.environ and os.getpid() == begun:
                    return start()
                with open({told!r}, "a") as file:
                    traceback.print_stack(file=file)
                raise RuntimeError("CUDA was to be started")
            module._lazy_init = tell
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.nightly
@pytest.mark.gpu(fake=True)
def test_neither_the_launcher_nor_anything_it_or_a_rank_forks_starts_cuda(tiny, tmp_path):
    told = tmp_path / "told"
    environment = gpu_environment(2)
    site, *others = environment["PYTHONPATH"].split(os.pathsep)
    program = f"print({json.dumps(FACTS)!r})"
    (tmp_path / "sitecustomize.py").write_text(
        MACHINE_WITH_GPUS.format(answer=program, told=str(told), fake=f"{site}/sitecustomize.py")
    )
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *others]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # the family is probed
        "OMP_NUM_THREADS": "1",
    }

    def launch(*arguments: str) -> subprocess.CompletedProcess:
        return ran_python(
            "-m",
            "mmtrain.launch",
            tiny / "config.yaml",
            f"run.dir={tmp_path}",
            *arguments,
            cwd=tmp_path,
            env=environment,
        )

    planned = launch("--plan", "parallel.pipeline=2", "run.name=planned")
    assert planned.returncode == 0 and "80.0 GiB per rank" in " ".join(planned.stdout.split()), (
        planned.stderr
    )
    too_many = launch("parallel.pipeline=3")
    assert too_many.returncode == 2 and "has 2 GPUs" in too_many.stderr
    ran = launch("parallel.pipeline=2", "data.workers=1", "train.max_steps=1", "run.name=ran")
    assert ran.returncode == 0, ran.stderr
    assert ", cuda:1, " in (tmp_path / "ran" / "log.txt").read_text()
    assert list((tmp_path / "cache").rglob("probe/*.json"))
    assert not told.exists(), told.read_text()
