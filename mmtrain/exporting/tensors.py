"""A new folder, the tensors that go to it, each read when it is written, and the safetensors files that hold them.

names -> TensorSource --cast and written block by block--> model-00001-of-00003.safetensors, ..., index, SHA-256 of each

Memory holds one tensor of the source and 64 MiB of the result, whatever the model's size. A file is 8 bytes of
little-endian header length, the header (JSON: dtype, shape and place of each tensor), then the tensors' bytes; the
header is padded so that these begin at a multiple of 8 (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open

from mmtrain.base.durable import whole_folder
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json

INDEX = "model.safetensors.index.json"
BLOCK = 1 << 26  # bytes that are cast, hashed and written at a time

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read when it is written: `read` gives it in this dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def in_memory(tensor: torch.Tensor) -> TensorSource:
    """A tensor that is there already."""
    return TensorSource(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def stored(name: str, file: Path) -> TensorSource:
    """A tensor of a safetensors file; raises UserError for a dtype that cannot be written (8-bit floats, say)."""
    with safe_open(file, framework="pt") as opened:
        view = opened.get_slice(name)
        dtype, shape = DTYPES.get(view.get_dtype()), tuple(view.get_shape())
    if dtype is None:
        raise UserError(f"{file}: {name} is stored as {view.get_dtype()}; use a release in bf16, fp16 or fp32")

    def read() -> torch.Tensor:
        # Opened for each tensor: an open file's map keeps every page that was read, in the end the whole model.
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)

    return TensorSource(dtype, shape, read)


class TensorWriter:
    """Writes tensors in `dtype` (whole numbers, and the names in `keep`, in their own; None: all in their own)."""

    def __init__(
        self, dtype: torch.dtype | None, keep: Collection[str] = (), show: Callable[[int], None] = lambda size: None
    ) -> None:
        """`show` is called with the bytes written so far."""
        self.dtype = dtype
        self.keep = frozenset(keep)
        self.show = show
        self.done = 0

    def dtype_of(self, name: str, source: TensorSource) -> torch.dtype:
        """The dtype in which a tensor is written."""
        fixed = self.dtype is None or name in self.keep or not source.dtype.is_floating_point
        return source.dtype if fixed else self.dtype

    def bytes_of(self, name: str, source: TensorSource) -> int:
        return math.prod(source.shape) * self.dtype_of(name, source).itemsize

    def write(self, file: Path, tensors: Mapping[str, TensorSource]) -> str:
        """Write one file, and wait until it is on the disk; its SHA-256.

        Raises UserError for values that do not fit the dtype.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, source in tensors.items():
            dtype, end = self.dtype_of(name, source), place + self.bytes_of(name, source)
            if dtype not in _NAMES:
                raise UserError(f"{name} is stored as {str(dtype)[6:]}; use a release in bf16, fp16 or fp32")
            header[name] = {"dtype": _NAMES[dtype], "shape": list(source.shape), "data_offsets": [place, end]}
            place = end
        text = compact_json(header)
        text += b" " * (-len(text) % 8)
        start = len(text).to_bytes(8, "little") + text
        digest = hashlib.sha256(start)
        with file.open("wb") as stream:
            stream.write(start)
            for name, source in tensors.items():
                for block in _blocks(name, source, self.dtype_of(name, source)):
                    stream.write(block)
                    digest.update(block)
                    self.done += block.nbytes
                    self.show(self.done)
            stream.flush()
            os.fsync(stream.fileno())
            # The check that follows then reads the disk, not the memory that has just been written.
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()


def write_shards(
    folder: Path, tensors: Mapping[str, TensorSource], writer: TensorWriter, shard_bytes: int
) -> dict[str, str]:
    """Write a model's tensors as transformers names its files: one, or several of `shard_bytes` at most and an index.

    A tensor that is larger gets a file of its own. Returns the SHA-256 of each file by its name.
    """
    split = split_state_dict_into_shards_factory(
        {name: (name, source) for name, source in tensors.items()},
        get_storage_size=lambda named: writer.bytes_of(*named),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return {
        file: writer.write(folder / file, {name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    }


def check_written(folder: Path, files: Mapping[str, str], show: Callable[[int], None] = lambda size: None) -> None:
    """Read files again, by the library too; raises OSError where one has another SHA-256 than it was written with."""
    done = 0
    for name, sha256 in files.items():
        digest = hashlib.sha256()
        with (folder / name).open("rb") as stream:
            while block := stream.read(BLOCK // 16):
                digest.update(block)
                done += len(block)
                show(done)
        if digest.hexdigest() != sha256:
            raise OSError(f"{folder / name}: does not read back as written; check the disk")
        with safe_open(folder / name, framework="pt"):
            pass


def _blocks(name: str, source: TensorSource, dtype: torch.dtype) -> Iterator[memoryview]:
    """A tensor's bytes in `dtype`, little-endian, row-major."""
    tensor = source.read()
    assert (tensor.dtype, tuple(tensor.shape)) == (source.dtype, source.shape), f"{name}: not what its source says"
    flat = tensor.detach().contiguous().view(-1)
    step = BLOCK // max(dtype.itemsize, source.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        cast = part.to(dtype)
        if dtype == torch.float16 and not torch.equal(cast.isfinite(), part.isfinite()):
            raise UserError(
                f"{name}: holds values up to {part[part.isfinite()].abs().max():.3g}, and float16 ends at 65,504; "
                "export with --dtype bfloat16 or float32"
            )
        yield cast.view(torch.uint8).numpy().data


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end of the block; after an error nothing of it is left.

    Raises UserError where `out` is there already (an empty folder is taken), and for a full disk.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; choose a new folder, or move that one away")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as unfinished:
            yield unfinished
    except Exception as error:  # tokenizers, which write files too, have exceptions of their own for a full disk
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise UserError(
                f"{out}: no space is left on its disk; nothing was left there. Make room, or choose another disk"
            ) from error
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be written: {error}") from error
        raise


def require_space(folder: Path, size: int) -> None:
    """Raise UserError where `size` bytes do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{folder.parent}: {size / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; make room, or choose "
            "another disk or a smaller --dtype"
        )
