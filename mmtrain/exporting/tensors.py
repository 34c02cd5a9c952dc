"""A new folder, and safetensors files in it whose tensors are read when their file is written.

names -> TensorSource --cast_to--> --write_shards, file by file--> model-00001-of-00003.safetensors,
    ..., and an index

Each file is read again after it was written. Cost: memory for the tensors of one file.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmtrain.base.durable import flush, whole_folder
from mmtrain.base.errors import UserError
from mmtrain.exporting.published_files import write_json
from mmtrain.facts.published import MXFP4_CODES, WHAT_IS_READ
from mmtrain.model.weights.files import Entry, open_tensors, read_stored
from mmtrain.model.weights.published import CodedWeight

INDEX = "model.safetensors.index.json"
SMALL_FILES = 64 << 20  # bytes that tokenizer, index and card take at most
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read when it is written: `read` returns it in this dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    codes: Mapping[str, TensorSource] = field(default_factory=dict)
    """Tensors to be written in its place, by what is added to its name; who changes what is read
    makes a new source, without them."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Sources = dict[str, TensorSource]  # by name
Tensors = dict[str, Tensor]
Progress = Callable[[str, int, int], None]  # gets (what, bytes done, bytes in all)


def in_memory(tensor: Tensor) -> TensorSource:
    return TensorSource(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def stored(entry: Entry) -> TensorSource:
    """Return a weight in safetensors files, with its codes where they are what is stored.

    Raises UserError for a dtype that cannot be cast.
    """
    with safe_open(entry.file, framework="pt") as opened:
        view = opened.get_slice(entry.name)
        dtype, shape = DTYPES.get(view.get_dtype()), tuple(view.get_shape())
    if dtype is None:
        raise UserError(
            f"{entry.file}: {entry.name} is stored as {view.get_dtype()}. {WHAT_IS_READ}"
        )
    source = TensorSource(dtype, shape, lambda: read_stored(entry))
    if entry.scales is None:
        return source

    codes = {}
    weight = entry.name.removesuffix(MXFP4_CODES)
    for part in (entry._replace(scales=None), entry.scales):
        codes[part.name.removeprefix(weight)] = stored(part)

    def coded() -> CodedWeight:
        # opened for each read: a system has room for some 65,000 open files
        return open_tensors({weight: entry})[weight]

    return TensorSource(torch.float32, tuple(coded().shape), lambda: coded()[...], codes)


def named(tensors: Sources, begin: str) -> Sources:
    """Return the tensors whose names begin so."""
    return {name: source for name, source in tensors.items() if name.startswith(begin)}


def cast_to(
    dtype: torch.dtype,
    tensors: Sources,
    keep: Collection[str] = (),
) -> Sources:
    """Return tensors as they are written: codes, and others cast to `dtype` when they are read.

    Those named in `keep`, and what are no floating-point numbers, stay as they are.

    Reading one raises UserError for values that float16 cannot hold.
    """

    def cast(name: str, source: TensorSource) -> TensorSource:
        if name in keep or not source.dtype.is_floating_point:
            return source

        def read() -> Tensor:
            tensor = source.read()
            result = tensor.to(dtype)
            if dtype == torch.float16 and not torch.equal(result.isfinite(), tensor.isfinite()):
                raise UserError(
                    f"{name} holds values up to {tensor[tensor.isfinite()].abs().max():.3g}, but "
                    "float16 ends at 65,504. Export with --dtype bfloat16 or float32"
                )
            return result

        return replace(source, dtype=dtype, read=read)

    result = {}
    for name, source in tensors.items():
        for added, codes in source.codes.items():
            result[name + added] = codes
        if not source.codes:
            result[name] = cast(name, source)
    return result


def write_tensors(
    file: Path,
    tensors: Sources,
    show: Callable[[int], None] = lambda size: None,
) -> None:
    """Write one file and compare it with what was to be written.

    `show` gets the bytes of each tensor. Raises OSError where the file reads back otherwise.
    """
    # Copied: safetensors refuses tensors that share memory, as tied ones do.
    content = {
        name: source.read().detach().clone(memory_format=torch.contiguous_format)
        for name, source in tensors.items()
    }
    save_file(content, file, metadata={"format": "pt"})
    flush(file)
    if hasattr(os, "posix_fadvise"):  # not on macOS; else the comparison reads memory, not the disk
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with safe_open(file, framework="pt") as opened:
        for name, tensor in content.items():
            if not torch.equal(_bytes(opened.get_tensor(name)), _bytes(tensor)):
                raise OSError(f"{file}: {name} does not read back as written. Check the disk")
            show(tensor.nbytes)


def write_shards(
    folder: Path,
    tensors: Sources,
    shard_bytes: int,
    progress: Progress = lambda *_: None,
) -> None:
    """Write a model's tensors as transformers names its files.

    They are one file, or several of `shard_bytes` at most and an index. A larger tensor gets a file
    of its own. Raises UserError where the disk is too small.
    """
    done = 0
    total = sum(source.nbytes for source in tensors.values())
    require_space(folder, total + SMALL_FILES)

    def show(size: int) -> None:
        nonlocal done
        done += size
        progress("written and read again", done, total)

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda source: source.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names}, show)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bits, in which NaN equals itself."""
    return tensor.flatten().view(torch.uint8)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder to write into, which becomes `out` at the end of the block.

    After an error nothing of it is left. Raises UserError where `out` is there already (an empty
    folder is taken), and for a full disk.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists and is not empty. Choose a new folder, or move that one away"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as unfinished:
            yield unfinished
    except Exception as error:
        # tokenizers and safetensors have exceptions of their own for a full disk
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(
            error
        ):
            raise UserError(
                f"{out}: no space is left on its disk, and nothing was written. "
                "Free space, or choose another disk"
            ) from error
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be written: {error}") from error
        raise


def require_space(folder: Path, size: int) -> None:
    """Raise UserError where `size` bytes do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{folder.parent}: {size / 1e9:.2f} GB are needed, but {free / 1e9:.2f} GB are free. "
            "Free space, or choose another disk or a smaller --dtype"
        )
