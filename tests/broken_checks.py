"""Checks of a doctor that crash, hang and raise; tests/cli/test_doctor.py runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.doctor.check import FailedError, SkippedError


def passes(folder: Path) -> str:
    return "all is well"


def skips(folder: Path) -> str:
    raise SkippedError("needs 2 GPUs")


def fails(folder: Path) -> str:
    raise FailedError("1 GiB free; 4 GiB are needed", "end other programs")


def is_refused(folder: Path) -> str:
    raise UserError("use a newer driver")


def raises(folder: Path) -> str:
    raise RuntimeError("CUDA error: an illegal memory access")


def crashes(folder: Path) -> str:
    print("before the crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return "unreachable"


def hangs(folder: Path) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / "pid").write_text(str(child.pid))
    time.sleep(1000)
    return "unreachable"
