"""The algorithms that a configuration asks for: deterministic or not, TF32, compiled layers."""

import os

import torch

from mmtrain.base.cache import cache_folder
from mmtrain.config.schema import TrainSection
from mmtrain.model.llm.compiled import Compiler


def use_algorithms(section: TrainSection) -> None:
    """Set torch's deterministic algorithms and the precision of float32 products; call this before
    CUDA is used.

    A deterministic run raises RuntimeError at an operation without such a kernel; mmtrain uses
    none.
    """
    precision = "highest"
    if section.tf32:
        precision = "high"
    torch.set_float32_matmul_precision(precision)
    if section.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(section.deterministic)


def compiles(section: TrainSection, device: torch.device) -> bool:
    """Return whether layers are tried compiled: on a GPU with auto, anywhere with true."""
    return section.compile is True or (section.compile == "auto" and device.type == "cuda")


def compiler_of(section: TrainSection, device: torch.device) -> Compiler | None:
    """Return this rank's compiler of layers; None where `train.compile` leaves them eager."""
    if not compiles(section, device):
        return None
    return Compiler(
        section.compile,
        cache_folder("compiled"),
        deterministic=section.deterministic,
    )
