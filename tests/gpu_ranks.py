"""Runs a function on several real ranks that have a GPU each: the machine's, or fake ones where it has none.

CUDA must start in no process that was forked from one that uses torch, so each rank is a new Python process. The
function and its arguments go there as a pickle, its result comes back as one.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_cuda import build

CHILD = "from gpu_ranks import be_rank; be_rank()"


@functools.cache
def real_gpus() -> int:
    """Number of GPUs that torch can use on this machine."""
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True).stdout)


def no_real_gpus(count: int) -> str | None:
    """Return why a test that needs `count` real GPUs cannot run; None: it can."""
    return None if real_gpus() >= count else f"GPUs needed: {count}, visible: {real_gpus()}"


def why_no_gpus(count: int) -> str | None:
    """Return why a test that needs `count` GPUs has none, real or fake; None: it has."""
    visible, reason = no_real_gpus(count), build.why_not()
    return visible and reason and f"{visible}; no fake ones: {reason}"


def gpu_environment(count: int, *, seed: int = 0, **settings: object) -> dict[str, str]:
    """Return the environment of a program that uses `count` GPUs; `settings` are those of `build.environment`."""
    if real_gpus() >= count:
        return dict(os.environ)
    return build.environment(seed=seed, devices=count, **settings)


def run_gpu_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, seed: int = 0, **settings: object
) -> list[Any]:
    """Results of `function(*args)` from ranks 0 .. world - 1; AssertionError with the first failing traceback."""
    from ranks import free_port

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "path").write_bytes(pickle.dumps([*sys.path, str(Path(__file__).parent.parent)]))
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        environment = gpu_environment(world, seed=seed, **settings) | {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cuda",  # `ranks` sets cpu where nothing is set
        }
        processes = [_start(folder, rank, environment) for rank in range(world)]
        try:
            return _results(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(folder: Path, rank: int, environment: Mapping[str, str]) -> subprocess.Popen:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MMTRAIN_TEST_DEVICE": f"cuda:{rank}"}
    with (folder / f"output-{rank}").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {CHILD}", folder],
            env={**environment, **own},
            stdout=output,
            stderr=output,
        )


def _results(processes: list[subprocess.Popen], folder: Path, deadline: float) -> list[Any]:
    waiting = set(range(len(processes)))
    while waiting:
        for rank in sorted(waiting):
            ended = processes[rank].poll() is not None
            result = folder / f"result-{rank}"
            if result.exists():
                ok, value = pickle.loads(result.read_bytes())
                assert ok, f"rank {rank} of {len(processes)} failed:\n{value}\n{_outputs(folder)}"
                waiting.discard(rank)
            else:
                assert not ended, f"rank {rank} ended with {processes[rank].returncode}\n{_outputs(folder)}"
        assert time.monotonic() < deadline, f"ranks {sorted(waiting)} did not end\n{_outputs(folder)}"
        time.sleep(0.05)
    return [pickle.loads((folder / f"result-{rank}").read_bytes())[1] for rank in range(len(processes))]


def _outputs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("output-*")))


def be_rank() -> None:
    """Call the function in the folder that the command line names, and write what it returns there."""
    import faulthandler
    import signal

    faulthandler.register(signal.SIGTERM, all_threads=True)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    sys.path[:] = [*dict.fromkeys([*sys.path, *pickle.loads((folder / "path").read_bytes())])]
    try:
        import torch

        torch.set_num_threads(1)
        function, args = pickle.loads((folder / "call").read_bytes())
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    written = folder / f"written-{rank}"
    written.write_bytes(pickle.dumps(result))
    written.rename(folder / f"result-{rank}")
    sys.stdout.flush()
    os._exit(0)  # a failing peer would leave this rank in a collective at exit
