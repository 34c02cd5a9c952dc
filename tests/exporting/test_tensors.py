"""Safetensors files that are cast and cut as they are written, read back by the library."""

from __future__ import annotations

import pytest
import torch
from json_files import read_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmtrain.base.errors import UserError
from mmtrain.exporting import tensors as module
from mmtrain.exporting.tensors import INDEX, cast_to, in_memory, stored, write_shards, write_tensors
from mmtrain.model.weights.files import Entry

SINGLE = "model.safetensors"
SHARED = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
TENSORS = {
    "float": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "NaN": torch.tensor([float("nan"), float("inf")]),
    "half": torch.linspace(0, 1, 3, dtype=torch.bfloat16),
    "whole": torch.arange(6).view(2, 3),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
    "strided": SHARED.t(),
    "tied": SHARED,
    "tied to it": SHARED,
    "a part": SHARED[2:4],
    'a "name" in ☃': torch.ones(2, dtype=torch.float16),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    equal = torch.equal(
        found.nan_to_num(7) if found.is_floating_point() else found, expected.nan_to_num(7)
    )
    return found.dtype == expected.dtype and found.shape == expected.shape and equal


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_library_reads_what_was_written_or_cast_bit_for_bit(tmp_path, dtype):
    sources = {name: in_memory(tensor) for name, tensor in TENSORS.items()}
    shown: list[int] = []
    if dtype is not None:
        sources = cast_to(dtype, sources, keep={"strided"})
    write_tensors(tmp_path / SINGLE, sources, shown.append)
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        is_cast = dtype is not None and tensor.is_floating_point() and name != "strided"
        assert same(found[name], tensor.to(dtype) if is_cast else tensor), name
    assert sum(shown) == sum(source.nbytes for source in sources.values())
    with safe_open(tmp_path / SINGLE, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "transformers refuses a file without it"


def test_shards_hold_every_tensor_once_and_none_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    tensors = {f"t{i}": torch.full((i, 10), float(i)) for i in range(1, 9)}
    write_shards(
        tmp_path, {name: in_memory(tensor) for name, tensor in tensors.items()}, shard_bytes=200
    )
    index = read_json(tmp_path / INDEX)
    files = sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    count = len(files)
    assert count > 3 and files == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    for file in files:
        found = load_file(tmp_path / file)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 200
        for name, tensor in found.items():
            assert index["weight_map"][name] == file
            assert same(tensor, tensors.pop(name))
    assert not tensors


def test_one_file_has_no_index(tmp_path):
    write_shards(tmp_path, {"a": in_memory(torch.ones(2))}, shard_bytes=100)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]


def test_stored_tensors_are_read_as_they_are_and_other_floats_are_refused(tmp_path):
    tensors = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in TENSORS.items()
    }
    save_file(tensors | {"w": torch.ones(4).to(torch.float8_e5m2)}, tmp_path / "source.safetensors")
    for name, tensor in tensors.items():
        source = stored(Entry(name, tmp_path / "source.safetensors"))
        assert (source.dtype, source.shape) == (tensor.dtype, tuple(tensor.shape))
        assert same(source.read(), tensor)
    with pytest.raises(UserError, match="w is stored as F8_E5M2"):
        stored(Entry("w", tmp_path / "source.safetensors"))


def test_values_that_float16_does_not_hold_are_refused(tmp_path):
    fits, beyond = (
        in_memory(torch.tensor([65504.0, float("-inf")])),
        in_memory(torch.tensor([1.0, 7e4])),
    )
    assert cast_to(torch.float16, {"w": fits})["w"].read().tolist() == [65504.0, float("-inf")]
    with pytest.raises(UserError, match=r"w holds values up to 7e\+04.*bfloat16"):
        cast_to(torch.float16, {"w": beyond})["w"].read()


def test_a_bit_that_changed_on_the_disk_is_found(tmp_path, monkeypatch):
    def flush(file):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(module, "flush", flush)
    with pytest.raises(OSError, match="a does not read back as written"):
        write_tensors(tmp_path / SINGLE, {"a": in_memory(torch.ones(200))})
