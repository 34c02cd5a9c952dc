"""A child process that runs this Python, and imports what this process imports, from the same
places.

No orphans: a process asks the kernel to be killed when the one that started it ends.
"""

import contextlib
import ctypes
import multiprocessing.util
import os
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

# goes first: a child runs this package, however its parent found it
ROOT = str(Path(__file__).parents[2])


def python_child(
    *arguments: object, interpreter: object = sys.executable, **variables: str
) -> dict[str, Any]:
    """Return keywords for subprocess.run or Popen: `interpreter ARGUMENTS`, without input, with
    these variables.

    It imports nothing from the folder that it runs in (-P), which may hold a file called torch.py.
    It gets the folders of sys.path that Python does not know by itself: none of site-packages,
    which would hide those of an `interpreter`.
    """
    known = {
        "",
        sysconfig.get_path("stdlib"),
        sysconfig.get_config_var("DESTSHARED"),
        *site.getsitepackages(),
    }
    if site.ENABLE_USER_SITE:
        known.add(site.getusersitepackages())
    entries = [entry for entry in (ROOT, *sys.path) if isinstance(entry, str)]
    path = os.pathsep.join(
        entry for entry in entries if entry not in known and Path(entry).exists()
    )
    return {
        "args": [str(interpreter), "-P", *map(str, arguments)],
        "env": {**os.environ, "PYTHONPATH": path, **variables},
        "stdin": subprocess.DEVNULL,
    }


def shield_multiprocessing() -> None:
    """Let interpreters that multiprocessing starts import nothing from the current folder either
    (-P).
    """
    multiprocessing.util._args_from_interpreter_flags = lambda: [
        "-P",
        *subprocess._args_from_interpreter_flags(),
    ]


def leave_out_gpu_kernels() -> None:
    """Let transformers compute recurrent layers by its own code: the libraries left out here
    compute on GPUs only.
    """
    sys.modules.update(dict.fromkeys(("causal_conv1d", "fla", "mamba_ssm")))


PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); end now if `parent` has
    ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def wake_stopped(processes: Iterable[psutil.Process]) -> None:
    """Continue processes that SIGSTOP or a debugger has stopped: until then none of them ends when
    SIGTERM asks it to.

    torch's agent would wait 30 s for each such rank.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()
