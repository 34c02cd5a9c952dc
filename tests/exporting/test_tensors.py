"""The safetensors writer, read back by the library."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmtrain.base.errors import UserError
from mmtrain.exporting import tensors as module
from mmtrain.exporting.tensors import (
    INDEX,
    TensorSource,
    TensorWriter,
    check_written,
    in_memory,
    stored,
    write_shards,
)

SINGLE = "model.safetensors"


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "float": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, generator=generator).to(torch.bfloat16),
        "whole": torch.arange(6).view(2, 3),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.5),
        "strided": torch.randn(4, 6, generator=generator).t(),
        'a "name" in ☃': torch.ones(2, dtype=torch.float16),
    }


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def test_the_library_reads_what_was_written_bit_for_bit(tmp_path):
    tensors = sample()
    TensorWriter(None).write(tmp_path / SINGLE, {name: in_memory(tensor) for name, tensor in tensors.items()})
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / SINGLE, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "transformers refuses a file without it"
    content = (tmp_path / SINGLE).read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0, "tensors begin at a multiple of 8 bytes"


@pytest.mark.parametrize("block", [8, 24, 1 << 26])
def test_a_cast_in_blocks_is_the_cast_of_the_whole(tmp_path, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK", block)
    tensors = sample()
    writer = TensorWriter(torch.bfloat16, keep={"strided"})
    writer.write(tmp_path / SINGLE, {name: in_memory(tensor) for name, tensor in tensors.items()})
    found = load_file(tmp_path / SINGLE)
    for name, tensor in tensors.items():
        cast = tensor.is_floating_point() and name != "strided"
        assert same(found[name], tensor.to(torch.bfloat16) if cast else tensor), name


def test_shards_hold_every_tensor_once_and_none_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    tensors = {f"t{i}": torch.full((i, 10), float(i)) for i in range(1, 9)}
    sources = {name: in_memory(tensor) for name, tensor in tensors.items()}
    files = write_shards(tmp_path, sources, TensorWriter(torch.float32), shard_bytes=200)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    count = len(files)
    assert count > 3 and list(files) == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for file in files:
        found = load_file(tmp_path / file)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 200
        for name, tensor in found.items():
            assert index["weight_map"][name] == file
            assert same(tensor, tensors.pop(name))
    assert not tensors


def test_one_file_has_no_index(tmp_path):
    write_shards(tmp_path, {"a": in_memory(torch.ones(2))}, TensorWriter(None), shard_bytes=100)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]


def test_no_tensor_is_in_memory_any_more_when_the_next_is_read(tmp_path):
    alive: list[weakref.ref] = []

    def source(number: int) -> TensorSource:
        def read() -> torch.Tensor:
            assert not any(earlier() is not None for earlier in alive), "two tensors at a time"
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            return tensor

        return TensorSource(torch.float32, (1000,), read)

    write_shards(tmp_path, {f"{i}": source(i) for i in range(5)}, TensorWriter(torch.float16), shard_bytes=5000)
    assert len(alive) == 5


def test_stored_tensors_are_read_as_they_are(tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in sample().items()}
    save_file(tensors, tmp_path / "source.safetensors")
    for name, tensor in tensors.items():
        source = stored(name, tmp_path / "source.safetensors")
        assert (source.dtype, source.shape) == (tensor.dtype, tuple(tensor.shape))
        assert same(source.read(), tensor)


def test_a_dtype_that_cannot_be_written_is_refused_when_it_is_seen(tmp_path):
    save_file({"w": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="w is stored as F8_E4M3"):
        stored("w", tmp_path / "a.safetensors")


def test_values_that_float16_does_not_hold_are_refused(tmp_path):
    fits, beyond = in_memory(torch.tensor([65504.0, float("-inf")])), in_memory(torch.tensor([1.0, 7e4]))
    TensorWriter(torch.float16).write(tmp_path / "a", {"w": fits})
    with pytest.raises(UserError, match=r"w: holds values up to 7e\+04.*bfloat16"):
        TensorWriter(torch.float16).write(tmp_path / "b", {"w": beyond})


@pytest.mark.parametrize("place", [3, 40, -1])
def test_a_bit_that_changed_on_the_disk_is_found(tmp_path, place):
    files = write_shards(tmp_path, {"a": in_memory(torch.ones(200))}, TensorWriter(None), shard_bytes=1000)
    check_written(tmp_path, files)
    content = bytearray((tmp_path / SINGLE).read_bytes())
    content[place] ^= 1
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(OSError, match="does not read back as written"):
        check_written(tmp_path, files)


def test_progress_counts_the_bytes_of_the_result(tmp_path):
    shown: list[int] = []
    sources = {"a": in_memory(torch.ones(10)), "b": in_memory(torch.ones(6))}
    write_shards(tmp_path, sources, TensorWriter(torch.float16, show=shown.append), shard_bytes=1000)
    assert shown == [20, 32]
