"""Compute CUDA's operations on the CPU, late, over the bytes of the GPU's tensors.

an operation on CUDA tensors --Late--> torch's own CUDA code (checks, shapes, memory, streams; its
    kernels do nothing)
and, on the current stream's queue --the device thread, when the seed's order says so--> the CPU's
    operation, whose
result goes to the bytes of the output

A queued operation keeps addresses, not tensors. So memory that was let go of too early may hold
something else by then, as on a GPU. What the host must know at once (a number, a shape that depends
on data) waits for the stream.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import threading
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda.kernels import KERNELS

RUNTIME = ctypes.CDLL(None)
WORK = ctypes.CFUNCTYPE(None, ctypes.c_long)
RUNTIME.fake_cuda_put.argtypes = [ctypes.c_void_p, WORK, ctypes.c_long]
RUNTIME.fake_cuda_host_waits.restype = ctypes.c_long
RUNTIME.fake_cuda_device_peak.restype = RUNTIME.fake_cuda_page_locked.restype = ctypes.c_size_t

CPU = torch.device("cpu")
COMPUTED = ("aten", "bitsandbytes", "torch_attn", "torchvision")  # namespaces
PASSED = ("c10d", "profiler")  # NCCL's operations move bytes themselves
aten = torch.ops.aten
# Change no byte, or are done by the runtime.
SILENT = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
    aten.record_stream,
    aten.resize_,
    aten.set_,
    aten._local_scalar_dense,
    aten.is_pinned,
    aten._pin_memory,
    aten._fused_sdp_choice,
    aten._has_compatible_shallow_copy_type,
}
# Results that the host must know, or whose shape depends on data, so that the host waits.
KNOWN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class Late(TorchDispatchMode):
    """While it is on, operations on CUDA tensors are computed late. On in Python's threads after
    `start`.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in COMPUTED:
            assert func.namespace in PASSED or not _on_gpu(args, kwargs), (
                f"the fake CUDA does not compute {func}"
            )
            return func(*args, **kwargs)
        of_gpu = _on_gpu(args, kwargs)
        target = kwargs.get("device")
        goes_to_gpu = target is not None and torch.device(target).type == "cuda"
        if not of_gpu and not goes_to_gpu:
            return func(*args, **kwargs)
        raise_failure()
        packet = func.overloadpacket
        if packet is aten.copy_ and args[0].is_cuda != args[1].is_cuda:
            return self._copy(*args, **kwargs)
        if packet is aten._to_copy and _moves(args[0], target):
            return self._moved(*args, **kwargs)
        if packet in INDEXED:
            if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
                return self._indexed(func, args, kwargs)
        elif packet not in SILENT and KNOWN.intersection(func.tags):
            return self._known(func, args, kwargs)
        if func.is_view:  # or copies, where an operation is made of others, as `contiguous` is
            with self:
                output = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        device = of_gpu[0].device if of_gpu else torch.device(target)
        generator = (
            _generator(args, kwargs, device)
            if torch.Tag.nondeterministic_seeded in func.tags
            else None
        )
        output = func(*args, **kwargs)
        if packet is aten._local_scalar_dense:
            raise_failure()
        if packet not in SILENT:
            put(device, _job(func, args, kwargs, output, generator))
        return output

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy between host and device in the steps of torch's `copy_`, which converts on the GPU
        unless it blocks.
        """
        converts_first = source.is_cuda == non_blocking
        with self if source.is_cuda else nullcontext():
            value = (source.to(to.dtype) if converts_first else source).expand_as(to)
            value = (
                value
                if value.is_contiguous()
                else value.clone(memory_format=torch.contiguous_format)
            )
        if to.is_contiguous() and to.dtype == value.dtype:
            to.copy_(value, non_blocking)
        else:
            room = torch.empty(to.shape, dtype=value.dtype, device=to.device).copy_(
                value, non_blocking
            )
            with self if to.is_cuda else nullcontext():
                to.copy_(room, non_blocking)
        raise_failure()
        return to

    def _moved(self, source: torch.Tensor, **options: Any) -> torch.Tensor:
        device, dtype = (
            torch.device(options.get("device") or source.device),
            options.get("dtype") or source.dtype,
        )
        non_blocking = options.get("non_blocking", False)
        pinned = options.get("pin_memory") or (
            non_blocking and source.is_cuda and device.type == "cpu"
        )
        layout = options.get("memory_format") or torch.preserve_format
        output = torch.empty_like(
            source, dtype=dtype, device=device, pin_memory=bool(pinned), memory_format=layout
        )
        return self._copy(output, source, non_blocking)

    def _known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Wait, and compute at once."""
        device = _on_gpu(args, kwargs)[0].device
        torch.cuda.current_stream(device).synchronize()
        raise_failure()
        result = func(*_mapped(on_cpu, args), **{name: on_cpu(x) for name, x in kwargs.items()})
        return _mapped(
            lambda x: _given_back(x, device) if isinstance(x, torch.Tensor) else x, result
        )

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Index by the places of masks, as torch does."""
        places: list[torch.Tensor | None] = []
        with self:
            for index in args[1]:
                is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                places += index.nonzero().unbind(1) if is_mask else [index]
            return func(args[0], places, *args[2:], **kwargs)


def _given_back(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a result on the device, whose current stream has nothing to do."""
    output = torch.empty_like(result, device=device)
    on_cpu(output).copy_(result)
    return output


def _on_gpu(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in _flat((args, *kwargs.values())) if isinstance(x, torch.Tensor) and x.is_cuda]


def _moves(source: torch.Tensor, target: Any) -> bool:
    return target is not None and torch.device(target).type != source.device.type


def on_cpu(x: Any) -> Any:
    """Return a CPU tensor over the bytes of a CUDA tensor; anything else as it is."""
    if not isinstance(x, torch.Tensor) or not x.is_cuda:
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    length = x.element_size() * (last + 1) if x.numel() else 0
    storage = torch._C._construct_storage_from_data_pointer(x.data_ptr(), CPU, length)
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride())


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to what is in the arguments or results of an operation."""
    if isinstance(x, (tuple, list)):
        return [_mapped(function, part) for part in x]
    return function(x)


def _flat(x: Any) -> list[Any]:
    """Return what is in the arguments or results of an operation, in order."""
    return (
        [part for element in x for part in _flat(element)] if isinstance(x, (tuple, list)) else [x]
    )


def _as_argument(x: Any) -> Any:
    """What a kernel gets when it is launched: addresses of the device, values of the host."""
    if isinstance(x, torch.Tensor) and not x.is_cuda:
        return x.clone()
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return on_cpu(x)


def _generator(args: Any, kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    """Return a generator for one operation: as on a GPU, its numbers follow from a generator's
    state at its launch.
    """
    given = [x for x in _flat((args, *kwargs.values())) if isinstance(x, torch.Generator)]
    state = given[0].get_state() if given else torch.cuda.get_rng_state(device)
    return torch.Generator().manual_seed(zlib.crc32(bytes(state.tolist())))


def _drawing(func: Any) -> Any:
    """Return the overload of an operation that takes a generator; None where it has none, as
    dropout.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, name, None)


def _job(
    func: Any, args: Any, kwargs: Any, output: Any, generator: torch.Generator | None
) -> Callable[[], None]:
    args = _mapped(_as_argument, args)
    kwargs = {name: _mapped(_as_argument, x) for name, x in kwargs.items() if name != "pin_memory"}
    outputs = [on_cpu(x) for x in _flat(output)]
    kernel = KERNELS.get(func.overloadpacket)
    compute = kernel or func
    if generator is not None and kernel is None and (drawing := _drawing(func)) is not None:
        compute, kwargs = drawing, kwargs | {"generator": generator}

    def job() -> None:
        results = _flat(compute(*args, **kwargs))
        for room, result in zip(outputs, results, strict=kernel is None):
            if isinstance(room, torch.Tensor):
                assert result.shape == room.shape, (
                    f"{tuple(result.shape)} on the CPU, {tuple(room.shape)} on the GPU"
                )
                if result.data_ptr() != room.data_ptr():
                    room.copy_(result)

    job.__name__ = str(func)
    return job


_jobs: dict[int, Callable[[], None]] = {}
_numbers = iter(range(1, 1 << 62))
_failure: list[str] = []


@WORK
def _run(number: int) -> None:
    job = _jobs.pop(number)
    collects = gc.isenabled()
    gc.disable()  # what is collected may free memory, for which this thread would wait for itself
    try:
        with torch.no_grad():
            job()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        _failure.append(f"{job.__name__} failed when the fake CUDA computed it: {text}")
    finally:
        if collects:
            gc.enable()


def raise_failure() -> None:
    """Raise AssertionError if an operation could not be computed."""
    if _failure:
        raise AssertionError(_failure[0])


def put(device: torch.device, job: Callable[[], None]) -> None:
    """Queue a job on the current stream of a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    number = next(_numbers)
    _jobs[number] = job
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch.cuda.current_device():
        RUNTIME.fake_cuda_put(stream, _run, number)
    else:
        with torch.cuda.device(index):
            RUNTIME.fake_cuda_put(stream, _run, number)


def start() -> None:
    """Compute late in this thread and in all that begin later, until the process ends."""
    RUNTIME.fake_cuda_compute()
    Late().__enter__()
    run = threading.Thread.run

    def run_late(thread: threading.Thread) -> None:
        with Late():
            run(thread)

    threading.Thread.run = run_late  # type: ignore[method-assign]
    atexit.register(RUNTIME.fake_cuda_stop)
