"""Build the fake CUDA runtime for the torch that is installed, once, and say how a process is
started with it.

runtime/*.cpp --g++, with headers of installed packages--> libfakecuda.so, preloaded before torch's
    own libraries

Functions that torch wants of CUDA's libraries and the runtime does not have return 0; those that
would make, move or compute data return an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "runtime").glob("*"))
LIBRARY = "libfakecuda.so"
ALIASES = ("libcuda.so.1", "libnvidia-ml.so.1")  # which programs open by name
WANTED = r"^(_*cuda[A-Z]|cublas|nccl[A-Z]|cu[A-Z]|curand|nvml)"
# functions that torch looks up when it first needs them
BY_NAME = rb"\0((?:nvml|cu)[A-Z]\w+)(?=\0)"
TORCH_LIBRARIES = (
    "libtorch_cuda.so",
    "libtorch_python.so",
    "libc10_cuda.so",
    "libtorch_cuda_linalg.so",
)
REFUSED = r"cudaM(alloc|em(cpy|set|Pool))|cudaGraph|cudaIpc|cudaStreamBeginCapture|cuMem|cuLaunch"
REFUSED += r"|nccl(Alltoa|Gather|Scatter|RedOp)"
# cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED; any number but 0 is an error of NCCL
NOT_SUPPORTED = 801
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Wno-missing-field-initializers")


def why_not() -> str | None:
    """Return why the runtime cannot be built here; None: it can."""
    import torch

    if torch.version.cuda is None:
        return "torch is built without CUDA"
    if missing := [program for program in ("g++", "gcc", "nm") if shutil.which(program) is None]:
        return f"{missing[0]} is not installed"
    if missing := [
        header
        for header in ("cuda_runtime_api.h", "crt/host_defines.h", "nccl.h")
        if _folder(header) is None
    ]:
        return f"{missing[0]} is in no installed package: install mmtrain[test]"
    return None


def built() -> Path:
    """Return the folder of the library, built in the temporary folder if this source and torch have
    none there.
    """
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for source in (*SOURCES, Path(__file__)):
        digest.update(source.read_bytes())
    for package in ("bitsandbytes", "nvidia-cuda-crt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(package).encode())
    folder = (
        Path(tempfile.gettempdir()) / f"mmtrain-fake-cuda-{os.getuid()}" / digest.hexdigest()[:16]
    )
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    owner = folder.parent.lstat()
    is_ours = (
        stat.S_ISDIR(owner.st_mode) and owner.st_uid == os.getuid() and not owner.st_mode & 0o022
    )
    assert is_ours, f"others may write to {folder.parent}: remove it"
    if not (folder / LIBRARY).exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _build(made)
            made.rename(folder)
        except OSError:
            if not (folder / LIBRARY).exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def environment(*, seed: int = 0, devices: int = 2, **settings: object) -> dict[str, str]:
    """Return the environment of a process that sees `devices` fake GPUs, whose orders of work
    `seed` sets.

    `settings`: MIB (memory of a device), CAPABILITY (80 means 8.0), RESULTS (0 computes nothing).
    """
    folder = built()
    paths = [
        str(HERE / "site"),
        str(HERE.parent.parent),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    named = {f"FAKE_CUDA_{name}": str(value) for name, value in settings.items()}
    ours = {
        "LD_PRELOAD": str(folder / LIBRARY),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])
        ),
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_CUDA_SEED": str(seed),
        "FAKE_CUDA_DEVICES": str(devices),
    }
    without = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")
    return {name: value for name, value in os.environ.items() if name not in without} | ours | named


def _include_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(place).glob("*/include"))


def _folder(header: str) -> Path | None:
    return next((folder for folder in _include_folders() if (folder / header).exists()), None)


def _build(folder: Path) -> None:
    spec = importlib.util.find_spec("torch")
    libraries = [Path(spec.origin).parent / "lib" / name for name in TORCH_LIBRARIES]
    if (spec := importlib.util.find_spec("bitsandbytes")) is not None:
        libraries += Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so")
    libraries = [library for library in libraries if library.exists()]
    wanted = _symbols("--undefined-only", *libraries)
    for library in (library for library in libraries if library.name in TORCH_LIBRARIES):
        wanted |= {name.decode() for name in re.findall(BY_NAME, library.read_bytes())}
    includes = [f"-I{folder}" for folder in _include_folders()]
    objects = []
    for source in (source for source in SOURCES if source.suffix == ".cpp"):
        objects.append(folder / f"{source.stem}.o")
        _run("g++", *FLAGS, *includes, "-c", str(source), "-o", str(objects[-1]))
    present = _symbols("--defined-only", *objects, dynamic=False)
    rest = folder / "rest.c"
    numbers = {
        name: NOT_SUPPORTED if re.match(REFUSED, name) else 0 for name in sorted(wanted - present)
    }
    rest.write_text(
        "".join(f"int {name}() {{ return {number}; }}\n" for name, number in numbers.items())
    )
    objects.append(folder / "rest.o")
    _run("gcc", "-O1", "-fPIC", "-w", "-c", str(rest), "-o", str(objects[-1]))
    made = folder / LIBRARY
    _run(
        "g++",
        "-shared",
        "-o",
        str(made),
        *map(str, objects),
        "-ldl",
        "-lpthread",
        f"-Wl,-soname,{LIBRARY}",
    )
    for alias in ALIASES:
        (folder / alias).symlink_to(LIBRARY)


def _symbols(kind: str, *files: Path, dynamic: bool = True) -> set[str]:
    listed = _run("nm", *(["-D"] if dynamic else ["-g"]), kind, *map(str, files))
    names = (
        line.split()[-1].split("@")[0]
        for line in listed.splitlines()
        if line.strip() and not line.endswith(":")
    )
    return {name for name in names if not dynamic or re.match(WANTED, name)}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command[:3])}: {done.stderr[-4000:]}"
    return done.stdout
