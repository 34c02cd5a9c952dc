"""Who is asked to save and end, and whom a SIGTERM ends at once, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ran_python, wait_for

from mmtrain.runtime.stop import SECONDS_TOGETHER, Asked, StopFile, StopRequest

# A rank: it says what it is asked, and waits, if told to, where Python runs no handler.
RANK = """
import sys, time
from pathlib import Path
from mmtrain.runtime.stop import StopRequest
stop = StopRequest(Path(sys.argv[1]) if sys.argv[1] else None)
stop.listen()
print("listening", flush=True)
if sys.argv[2] == "deaf":
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, whatever signals come
while not stop.asked:
    time.sleep(0.01)
print("asked", flush=True)
time.sleep(300)
"""


class Rank:
    """The process."""

    def __init__(self, file: Path | None, how: str = "listens") -> None:
        command = [sys.executable, "-c", RANK, str(file or ""), how]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "listening\n"

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def is_asked(self) -> bool:
        return self.process.stdout.readline() == "asked\n"

    def lives_on(self) -> bool:
        time.sleep(SECONDS_TOGETHER + 0.5)
        return self.process.poll() is None


@pytest.fixture
def start():
    """Starts ranks, and kills them at the end."""
    ranks: list[Rank] = []

    def start(*arguments: object) -> Rank:
        ranks.append(Rank(*arguments))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


@pytest.fixture
def file(tmp_path) -> Path:
    StopFile(tmp_path / "stop")
    return tmp_path / "stop"


def test_a_launchers_wish_is_read_by_every_process_that_maps_the_file(file, start):
    launcher, here, rank = StopFile(file), StopRequest(file), start(file)
    assert launcher.read()[0] is Asked.NOTHING and not here.asked
    launcher.ask(Asked.SAVE_AND_END)
    assert rank.is_asked() and here.asked
    asked, seconds = StopFile(file).read()
    assert asked is Asked.SAVE_AND_END and 0 <= seconds < 60


def test_without_a_launcher_the_first_sigterm_asks_and_the_second_ends(start):
    rank = start(None)
    rank.signal(signal.SIGTERM)
    assert rank.is_asked() and rank.lives_on()
    rank.signal(signal.SIGTERM)
    assert rank.process.wait(10) == 128 + signal.SIGTERM


def test_sigusr1_asks_however_often_it_comes(file, start):
    alone, launched = ranks = (start(None), start(file))
    for rank in ranks:
        rank.signal(signal.SIGUSR1)
        assert rank.is_asked()
        rank.signal(signal.SIGUSR1)
    assert alone.lives_on() and launched.process.poll() is None


@pytest.mark.parametrize("how", ["listens", "deaf"])
def test_a_sigterm_that_comes_alone_is_of_an_agent_that_ends_its_ranks(file, start, how):
    """torch's agent, when another rank has failed; a rank that waits for that one in C++ must end,
    too.
    """
    rank = start(file, how)
    rank.signal(signal.SIGTERM)
    assert rank.process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("launcher_first", [False, True])
def test_a_sigterm_to_rank_and_launcher_at_once_asks(file, start, launcher_first):
    """As Slurm sends it, to every process of a job, in any order."""
    rank = start(file)
    if launcher_first:
        StopFile(file).ask(Asked.SAVE_AND_END)
    rank.signal(signal.SIGTERM)
    if not launcher_first:
        time.sleep(SECONDS_TOGETHER / 4)
        StopFile(file).ask(Asked.SAVE_AND_END)
    assert rank.is_asked() and rank.lives_on()


def test_a_sigterm_long_after_the_launcher_has_asked_ends(file, start):
    """The agent, which ends the rank after a failure in the last steps; or somebody who has lost
    patience.
    """
    rank = start(file)
    StopFile(file).ask(Asked.SAVE_AND_END)
    assert rank.is_asked() and rank.lives_on()
    rank.signal(signal.SIGTERM)
    assert rank.process.wait(10) == 128 + signal.SIGTERM


def test_a_launcher_that_does_not_wait_makes_every_sigterm_end_at_once(file, start):
    rank = start(file)
    StopFile(file).ask(Asked.END_NOW)
    began = time.monotonic()
    rank.signal(signal.SIGTERM)
    assert rank.process.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began < SECONDS_TOGETHER


def test_signals_do_not_reach_what_a_rank_has_forked():
    """Data workers: the rank ends them when it has what it needs of them."""
    code = (
        "import os, signal, sys, time\n"
        "from mmtrain.runtime.stop import StopRequest, ignore_in_worker\n"
        "stop = StopRequest(); stop.listen()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ignore_in_worker()\n"
        "    [os.kill(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGUSR1)]\n"
        "    time.sleep(0.5); os._exit(7)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(status, stop.asked)\n"
    )
    ran = ran_python("-c", code)
    assert ran.stdout == "7 False\n", ran.stderr


def test_a_signal_wakes_the_thread_that_answers_it_in_this_process():
    stop, before = (
        StopRequest(),
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)],
    )
    try:
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: stop.asked, 10, "the thread")
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)
