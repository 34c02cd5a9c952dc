"""A pretend GPU: tensors that say they are on `meta` and hold real data on the CPU.

Every operation that CUDA would refuse because it mixes the two devices is recorded, and every one in which the host
would have to wait for the device, with the line of mmtrain that asked for it. Copies to the device count as waits
unless they are asked for as non-blocking.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

import mmtrain

DEVICE = torch.device("meta")
PACKAGE = str(Path(mmtrain.__file__).parent)
# Operations whose result, or its size, the host has to know.
ASKS_THE_DEVICE = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "item"}
TAKES_AN_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}


class _OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise AssertionError(f"{function} outside of `with Pretend()`")


class Pretend(TorchDispatchMode):
    """Within it `meta` is the pretend GPU. `waits` and `mixed` count (phase, operation, line of mmtrain)."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.mixed: Counter[tuple[str, str, str]] = Counter()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What runs in here counts for `phase`."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if isinstance(x, _OnDevice)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        self._judge(name, args, kwargs, tensors, on_device, target)

        inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, _OnDevice) else x, (args, kwargs))
        if target == DEVICE.type:
            inner_kwargs["device"] = torch.device("cpu")
        result = function(*inner_args, **inner_kwargs)
        if name == "copy_":
            return args[0]
        if target == "cpu" or not (on_device or target == DEVICE.type):
            return result
        given = {id(x.inner): x for x in on_device}  # an operation in place returns the tensor that it was given

        def wrap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return given[id(x)] if id(x) in given else _OnDevice(x)

        return tree_map(wrap, result)

    def _judge(self, name: str, args: tuple, kwargs: dict, tensors: list, on_device: list, target: str | None) -> None:
        indices = args[1] if name in TAKES_AN_INDEX else ()
        if on_device and name in ASKS_THE_DEVICE:
            self._count(self.waits, name)
        elif on_device and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            self._count(self.waits, f"{name} by a mask")
        elif on_device and any(i is not None and not isinstance(i, _OnDevice) for i in indices):
            self._count(self.waits, f"{name} by a tensor on the host")
        elif name in COPIES:
            source, to_device = args[0], target == DEVICE.type
            if name == "copy_":
                source, to_device = args[1], isinstance(args[0], _OnDevice)
            if isinstance(source, _OnDevice) and (target == "cpu" or (name == "copy_" and not to_device)):
                self._count(self.waits, "copy to the host")
            goes_on = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if to_device and not isinstance(source, _OnDevice) and source.dim() > 0 and not goes_on:
                self._count(self.waits, "copy to the device")
        elif on_device and any(not isinstance(x, _OnDevice) and x.dim() > 0 for x in tensors):
            self._count(self.mixed, name)

    def _count(self, counter: Counter, operation: str) -> None:
        lines = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
        where = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "?"
        counter[self.phase, operation, where] += 1

    def __enter__(self) -> Pretend:
        self._tensor = torch.tensor
        torch.tensor = self._make_tensor  # does not come by __torch_dispatch__
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.tensor = self._tensor
        super().__exit__(*error)

    def _make_tensor(self, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE.type:
            return self._tensor(data, *args, device=device, **kwargs)
        self._count(self.waits, "torch.tensor on the device")
        with _disable_current_modes():
            return _OnDevice(self._tensor(data, *args, **kwargs))
