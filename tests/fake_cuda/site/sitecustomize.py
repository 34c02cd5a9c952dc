"""Imported by every Python process that starts with the fake CUDA (`fake_cuda.build.environment`).

Once torch is imported, CUDA's operations are computed late (`fake_cuda.late`). mmtrain looks for a
driver's file in /dev, and is given /dev/null. This module hides any other sitecustomize.
"""

import importlib.machinery
import os
import sys
from pathlib import Path


def _compute_late(torch):
    torch.backends.cudnn.enabled = False  # cuDNN's own library is real, and asks for a device
    if os.environ.get("FAKE_CUDA_RESULTS") != "0":
        from fake_cuda import late

        late.start()


def _have_driver(gpus):
    gpus.NVIDIA_DRIVER_FILE = "/dev/null"
    gpus.DRIVER_FILES = ("/dev/null",)


def _register_varlen(varlen):
    from fake_cuda import kernels

    kernels.register_varlen()


def _register_bitsandbytes(operations):
    from fake_cuda import kernels

    kernels.register_bitsandbytes()


AFTER = {
    "bitsandbytes._ops": _register_bitsandbytes,
    "torch": _compute_late,
    "torch.nn.attention.varlen": _register_varlen,
    "mmtrain.runtime.gpus": _have_driver,
}


class _Finder:
    """Runs what is to happen after a module's import."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        after = AFTER.pop(name, None)
        if after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            AFTER[name] = after
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            after(module)

        spec.loader.exec_module = exec_module
        return spec


if "libfakecuda.so" in os.environ.get("LD_PRELOAD", ""):
    sys.path.insert(1, str(Path(__file__).parent.parent.parent))
    sys.meta_path.insert(0, _Finder)
