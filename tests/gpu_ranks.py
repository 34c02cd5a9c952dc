"""Run a function on several ranks, each with a GPU of its own: the machine's, or a fake one where
it has too few.

CUDA must start in no process that was forked from one that has used it, so ranks are not forked
from the tests' own, but from a Python process beside them that has only imported what takes
seconds. The function and its arguments go there as a pickle; so does each rank's result on its way
back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fake_cuda import build

if TYPE_CHECKING:
    import pytest

PRELOADED = ("torch._dynamo", "mmtrain.training.loop")
READ_AT_IMPORT = ("LD_PRELOAD", "FAKE_CUDA_RESULTS", "DS_ACCELERATOR")


@functools.cache
def real_gpus() -> int:
    """Number of GPUs that torch can use here. Asked in another process: asking may start CUDA in
    this one.
    """
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(
        subprocess.run(
            [sys.executable, "-c", count], capture_output=True, text=True, check=True
        ).stdout
    )


def no_real_gpus(count: int) -> str | None:
    """Return why a test that needs `count` real GPUs cannot run; None: it can."""
    return None if real_gpus() >= count else f"GPUs needed: {count}, visible: {real_gpus()}"


def why_no_gpus(count: int) -> str | None:
    """Return why a test that needs `count` GPUs has none, real or fake; None: it has."""
    visible, reason = no_real_gpus(count), build.why_not()
    return visible and reason and f"{visible}; no fake ones: {reason}"


def gpu_environment(count: int, *, seed: int = 0, **settings: object) -> dict[str, str]:
    """Return the environment of a program that uses `count` GPUs; `settings` are those of
    `build.environment`.
    """
    if real_gpus() >= count:
        return dict(os.environ)
    return build.environment(seed=seed, devices=count, **settings)


def let_programs_use_gpus(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let all that this test starts use `count` GPUs; this process itself does not."""
    environment = gpu_environment(count)
    for name in os.environ.keys() - environment.keys():
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)
    patch.syspath_prepend(build.HERE / "site")  # mmtrain hands sys.path on to its children


def fake_runtime() -> Any:
    """Return the fake CUDA's own functions (`fake_cuda_order_by`, ...) in a rank that uses it, else
    None.
    """
    if not hasattr(ctypes.CDLL(None), "fake_cuda_put"):  # not preloaded
        return None
    from fake_cuda.late import RUNTIME

    return RUNTIME


def run_gpu_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 240,
    seed: int = 0,
    **settings: object,
) -> list[Any]:
    """Results of `function(*args)` from ranks 0 .. world - 1; AssertionError with the first failing
    traceback.
    """
    from ranks import free_port

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = gpu_environment(world, seed=seed, **settings) | {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cuda",  # `ranks` sets cpu where nothing is set
        }
        (folder / "place").write_bytes(pickle.dumps((sys.path, environment)))
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        forker = _forker(environment)
        try:
            print(folder, file=forker.stdin, flush=True)
            return _results(forker, folder, world, time.monotonic() + timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forker.pid, signal.SIGKILL)  # and the ranks that have not ended
            forker.wait()
            raise


_forkers: dict[tuple[str | None, ...], subprocess.Popen[str]] = {}


def _forker(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Return the process of which ranks are forked, the leader of their group; it ends when its
    input does.
    """
    key = tuple(environment.get(name) for name in READ_AT_IMPORT)
    if key not in _forkers or _forkers[key].poll() is not None:
        paths = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parent.parent)]
        _forkers[key] = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path[:0] = {paths}; import gpu_ranks; gpu_ranks.fork_ranks()",
            ],
            env=environment,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    return _forkers[key]


def _results(forker: subprocess.Popen[str], folder: Path, world: int, deadline: float) -> list[Any]:
    waiting = set(range(world))
    while waiting or not (folder / "ended").exists():
        for rank in sorted(waiting):
            result = folder / f"result-{rank}"
            if result.exists():
                ok, value = pickle.loads(result.read_bytes())
                assert ok, f"rank {rank} of {world} failed:\n{value}\n{_outputs(folder)}"
                waiting.discard(rank)
        assert forker.poll() is None, f"ranks {sorted(waiting)} did not begin\n{_outputs(folder)}"
        if time.monotonic() >= deadline:
            os.killpg(forker.pid, signal.SIGTERM)  # each rank writes where its threads are
            time.sleep(1)
            raise AssertionError(f"ranks {sorted(waiting)} did not end\n{_outputs(folder)}")
        time.sleep(0.05)
    return [pickle.loads((folder / f"result-{rank}").read_bytes())[1] for rank in range(world)]


def _outputs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("output*"))
    )


def fork_ranks() -> None:
    """Fork the ranks of each folder that the input names, and write there which of them end without
    a result.
    """
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        folder = Path(line.strip())
        path, environment = pickle.loads((folder / "place").read_bytes())
        ranks = {}
        for rank in range(int(environment["WORLD_SIZE"])):
            process = os.fork()
            if process == 0:
                own = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "MMTRAIN_TEST_DEVICE": f"cuda:{rank}",
                }
                os.environ.clear()
                os.environ.update(environment | own)
                sys.path[:] = [*dict.fromkeys([*sys.path, *path])]
                _be_rank(folder, rank)
            ranks[process] = rank
        while ranks:
            process, status = os.wait()
            rank = ranks.pop(process)
            if not (folder / f"result-{rank}").exists():
                _write(folder, rank, (False, f"ended with {os.waitstatus_to_exitcode(status)}"))
        (folder / "ended").touch()


def _be_rank(folder: Path, rank: int) -> NoReturn:
    """Call the function of the folder, and write what it returns."""
    import faulthandler

    import torch

    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGTERM, all_threads=True)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads((folder / "call").read_bytes())
        result = (True, function(*args))
        if fake_runtime() is not None and torch.cuda.is_initialized():
            from fake_cuda.late import raise_failure

            torch.cuda.synchronize()
            raise_failure()
    except BaseException:
        result = (False, traceback.format_exc())
    _write(folder, rank, result)
    sys.stdout.flush()
    os._exit(0)  # a failing peer would leave this rank in a collective at exit


def _write(folder: Path, rank: int, result: tuple[bool, Any]) -> None:
    written = folder / f"written-{rank}"
    written.write_bytes(pickle.dumps(result))
    written.rename(folder / f"result-{rank}")
