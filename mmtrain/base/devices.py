"""Copies of tensors between the host and a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device`, from page-locked memory, so that only the kernels that use it wait."""
    import torch

    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
