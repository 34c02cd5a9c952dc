"""Real ranks that fail in every way, without a model: who is blamed, and what is left."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_ranks import let_programs_use_gpus
from processes import Command, ranks_of, running, wait_for
from sweeps import sweep

from mmtrain.runtime.child import python_child

SCRIPT = Path(__file__).parents[1] / "failing_ranks.py"
WATCHDOGS = {
    "watchdog": "Watchdog caught collective operation timeout: WorkNCCL(",
    "watchdog of NCCL2": "Operation timed out after 4000 ms\n",
}
WAYS = sweep(
    ("children left", "raise", "wrong input", "exit", "hang", *WATCHDOGS),
    ("children left", "raise"),
)


class Outcome:
    """How a run of failing_ranks.py ended."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.exit_code = command.wait()
        self.seconds_until_gone = command.seconds_until_gone(timeout=20)
        self.stdout, self.stderr = command.stdout, command.stderr
        self.log = (folder / "log.txt").read_text()
        self.folder = folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Callable[[str], Outcome]:
    """Run failing_ranks.py once for each way that tests ask about."""

    @functools.cache
    def ended(how: str) -> Outcome:
        folder = tmp_path_factory.mktemp("supervise")
        with running([SCRIPT, how, folder / "run"], folder) as command:
            return Outcome(command, folder / "run")

    return ended


def test_a_good_run_prints_only_what_rank_0_writes_to_the_console(ended):
    good = ended("children left")
    assert good.exit_code == 0
    assert (good.stdout, good.stderr) == ("to the console\nshown\n", "")
    assert "[rank 1] shown" in good.log.splitlines(), (
        "what mmtrain's libraries log elsewhere than on rank 0"
    )


@pytest.mark.gpu(fake=True)
@pytest.mark.nightly
def test_ranks_compute_where_their_launcher_says_whatever_torch_finds(tmp_path, monkeypatch):
    """The launcher tells DeepSpeed CPU here. A rank that took a GPU would have its parameters moved
    away from it.
    """
    let_programs_use_gpus(2, monkeypatch)
    outcome = Outcome(Command([SCRIPT, "raise", tmp_path / "run"], tmp_path), tmp_path / "run")
    assert outcome.log.count(", cpu, threads 1") == 2, outcome.log


IDLE_TEAM = """
import contextlib, ctypes, sys, time

with contextlib.suppress(SystemExit):
    exec(sys.argv[2])
openmp, begin = ctypes.CDLL(sys.argv[1]), time.process_time()
for _ in range(50):  # a parallel region of two threads, and then none
    openmp.GOMP_parallel(openmp.omp_get_thread_num, None, 0, 0)
    time.sleep(0.02)
print("seconds", time.process_time() - begin)
"""


@pytest.mark.parametrize(
    "begin",
    [
        "from mmtrain.runtime.supervise import set_rank_environment; "
        "set_rank_environment(2, on_gpus=False)",
        pytest.param(
            "from mmtrain.__main__ import main; main(['plan', '--help'])", marks=pytest.mark.nightly
        ),
    ],
)
def test_threads_that_wait_for_the_next_parallel_region_leave_their_core_to_others(
    monkeypatch, begin
):
    libraries = [*Path(find_spec("torch").origin).with_name("lib").glob("libgomp*")]
    if not libraries:
        pytest.skip("torch has another OpenMP here")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    child = python_child("-c", IDLE_TEAM, libraries[0], begin, OMP_NUM_THREADS="2")
    ran = subprocess.run(**child, capture_output=True, text=True, check=True)
    # seconds of a core; those that spin take 0.3 and more
    assert float(ran.stdout.split()[-1]) < 0.05


def test_everything_else_is_in_the_log_with_its_rank_in_front(ended):
    lines = ended("children left").log.splitlines()
    for rank in (0, 1):
        assert f"[rank {rank}] printed" in lines
        assert f"[rank {rank}] logged" in lines
        assert lines.count(f"[rank {rank}] logged by dill") == 1
        assert lines.count(f"[rank {rank}] logged by a handler on stderr") == 1
        assert any(
            line.startswith(f"[rank {rank}] ") and "UserWarning: warned" in line for line in lines
        )
    assert lines.count("said by another program") == 2


@pytest.mark.parametrize("how", WAYS)
def test_no_process_is_left(ended, how):
    assert ended(how).seconds_until_gone < 5


def test_an_exception_names_the_rank_that_raised_it_and_not_its_victim(ended):
    failed = ended("raise")
    assert failed.exit_code == 1
    assert failed.stderr == (
        "rank 1 (stage 1) failed in step 5 (counted from 0), at ALL_REDUCE: ValueError: "
        "a bad value "
        f"(failing_ranks.py:{line_of('a bad value')} in end)\nlog: {failed.folder / 'log.txt'}\n"
    )
    assert "[rank 1] ValueError: a bad value" in failed.log.splitlines()


def line_of(text: str) -> int:
    return next(
        i for i, line in enumerate(SCRIPT.read_text().splitlines(), start=1) if text in line
    )


@pytest.mark.nightly
def test_wrong_input_found_by_a_rank_is_exit_code_2_and_its_message_alone(ended):
    failed = ended("wrong input")
    assert (failed.exit_code, failed.stderr) == (2, "this file is damaged: make it anew\n")


@pytest.mark.nightly
def test_a_rank_that_leaves_without_a_word_is_named_with_its_exit_code(ended):
    failed = ended("exit")
    assert failed.exit_code == 1
    assert failed.stderr.startswith(
        "rank 1 (stage 1) ended with exit code 7 in step 5 (counted from 0), at ALL_REDUCE\n"
    )


@pytest.mark.nightly
def test_a_hanging_rank_is_shown_beside_the_one_that_waited_for_it(ended):
    failed = ended("hang")
    assert failed.exit_code == 1
    assert failed.stderr.startswith(
        "rank 0 (stage 0) lost its connection to another rank in step 5"
    )
    assert "rank 1 (stage 1) was in step 5 (counted from 0), at ALL_REDUCE\n" in failed.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("how", WATCHDOGS)
def test_a_rank_that_nccls_watchdog_ended_is_not_blamed_for_what_it_waited_for(ended, how):
    failed = ended(how)
    assert failed.exit_code == 1
    assert failed.stderr.startswith(
        "rank 0 (stage 0) lost its connection to another rank in step 5 (counted from 0), "
        "at ALL_REDUCE: " + WATCHDOGS[how]
    )
    assert "rank 1 (stage 1) was in step 5 (counted from 0), at ALL_REDUCE\n" in failed.stderr


@pytest.mark.nightly
def test_a_dead_rank_is_written_down_without_importing_half_of_torch(ended):
    """torch's formatter would; the job would end seconds later."""
    assert (
        "[launcher] ERROR torch.distributed.elastic.multiprocessing.api: failed (exitcode"
        in ended("exit").log
    )


def test_kill_9_of_a_rank_ends_all_within_10_seconds_and_names_it(tmp_path):
    with running([SCRIPT, "stuck", tmp_path / "run"], tmp_path) as command:
        wait_for(lambda: command.stdout, 60, "the first step")
        os.kill(ranks_of(tmp_path / "run")[1], signal.SIGKILL)
        assert command.seconds_until_gone(timeout=20) < 10
        assert command.wait() == 1
    assert command.stderr.startswith("rank 1 (stage 1) was killed by SIGKILL (")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "number", "name"),
    [
        ("stuck", signal.SIGTERM, "SIGTERM"),
        ("stuck", signal.SIGINT, "Ctrl-C"),
        # tools/bench/bench.py: the first one is enough
        ("stuck with nothing to save", signal.SIGTERM, "SIGTERM"),
    ],
)
def test_a_signal_ends_deadlocked_ranks_within_10_seconds(tmp_path, how, number, name):
    with running([SCRIPT, how, tmp_path / "run"], tmp_path) as command:
        wait_for(lambda: command.stdout, 60, "the first step")
        time.sleep(1)  # by now both wait for each other, where Python runs no signal handler
        assert len(command.family()) >= 4  # launcher, fork server, two ranks
        # the first one asks them to save, which these cannot
        if number == signal.SIGTERM and how == "stuck":
            os.kill(command.process.pid, signal.SIGTERM)
            wait_for(lambda: "SIGTERM: the run saves" in command.stdout, 10, "the answer")
            time.sleep(1.5)
            assert command.process.poll() is None and len(command.family()) >= 4
        os.kill(command.process.pid, number)
        assert command.seconds_until_gone(timeout=20) < 10
        assert command.wait() == 128 + number
        assert command.stderr.startswith(f"stopped by {name}; rank 0 (stage 0) was in step 5 ")
