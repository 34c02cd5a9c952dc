"""Weight files of others: safetensors opened tensor by tensor, and the one place that opens
pickles.

safetensors --headers--> entry of every weight --those wanted--> lazy handles: bytes are read, and
    published codes dequantised, when asked for
a pickle ----torch's weights_only unpickler--> {name: tensor, alone in its storage}

A pickle is a program. `weights_only` runs only the part of it that makes tensors and containers of
them and refuses every other name (torch/_weights_only_unpickler.py); what comes out is checked here
before anything is done with it.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.families import canonical_name, llm_config, llm_tensors, parts_on_disk
from mmtrain.facts.model_files import read_json, stored_weights
from mmtrain.model.weights.published import CodedWeight

REFUSED_CALL = re.compile(
    r"GLOBAL (\S+) (?:was not an allowed|whose module)|unrecognized function (.+)"
)
ZIP_MAGIC = b"PK\x03\x04"  # what torch.save writes since 1.6; older files are read as a whole


class Entry(NamedTuple):
    """The place of a tensor on disk."""

    name: str
    file: Path
    scales: Entry | None = None  # where it holds codes


def tensor_entries(folder: Path) -> dict[str, Entry]:
    """Map the name of every weight in a model's folder to its entry; raises what `stored_weights`
    raises.
    """
    weights = stored_weights(folder)
    if weights is None:
        raise UserError(
            f"{folder}: holds no model.safetensors and no model.safetensors.index.json. Download "
            "the weights"
        )
    index = folder / "model.safetensors.index.json"
    files = {}
    if index.is_file():
        files = read_json(index)["weight_map"]

    def place(name: str, scales: Entry | None = None) -> Entry:
        return Entry(name, folder / files.get(name, "model.safetensors"), scales)

    entries = {}
    for name, weight in weights.items():
        scales = None
        if weight.scales is not None:
            scales = place(weight.scales)
        entries[name] = place(weight.name, scales)
    return entries


def open_tensors(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Open weights lazily: `[...]` reads one."""
    open_file = functools.cache(functools.partial(safe_open, framework="pt"))
    opened = {}
    for name, entry in entries.items():
        tensor = open_file(entry.file).get_slice(entry.name)
        if entry.scales is not None:
            scales = open_file(entry.scales.file).get_slice(entry.scales.name)
            tensor = CodedWeight(tensor, scales)
        opened[name] = tensor
    return opened


def read_stored(entry: Entry) -> Tensor:
    """Read a tensor as it is on disk."""
    # Opened for each tensor: an open file's map keeps every page that was read, in the end the
    # whole model.
    with safe_open(entry.file, framework="pt") as opened:
        return opened.get_tensor(entry.name)


def coded_parameters(folder: Path) -> dict[str, list[Entry]]:
    """Map the LLM's parameters whose every part is codes on disk, by global name, to these, in the
    order of the parameter's rows.
    """
    entries = llm_tensors(folder, tensor_entries(folder))
    parameters = {}
    for name, parts in parts_on_disk(llm_config(folder)["model_type"], entries).items():
        its_entries = [entries[part] for part in parts]
        if all(entry.scales is not None for entry in its_entries):
            parameters[canonical_name(name)] = its_entries
    return parameters


def read_pickled(file: Path) -> dict[str, Tensor]:
    """Read a torch.save file's named tensors, each alone in its storage, on the CPU; nothing in it
    is executed.

    Raises UserError for a file that is missing, damaged, or anything but a dictionary of plain
    tensors.
    """
    try:
        with file.open("rb") as stream:
            zipped = stream.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        # guesses about files that are refused in a moment
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(
                file,
                map_location="cpu",
                weights_only=True,
                mmap=zipped,
            )
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    except Exception as error:
        # a damaged pickle fails anywhere: KeyError, IndexError, struct.error, ...
        raise _refusal(file, error) from None
    pairs = content.items() if isinstance(content, dict) else [(None, content)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
        raise UserError(f"{file}: holds more than named tensors. Give a state dict")
    return _alone(content, file)


def _alone(
    content: Mapping[str, Tensor],
    file: Path,
) -> dict[str, Tensor]:
    """Give each tensor of a file its own storage; raises UserError for one that is not plain."""
    size = file.stat().st_size
    tensors = {}
    storages = set()
    for name, tensor in content.items():
        # Quantised and sparse tensors have no plain storage; a stride of 0 lets a small file claim
        # any size.
        plain = (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
        )
        if not plain or tensor.nbytes > size:
            raise UserError(
                f"{file}: {escape(name)} is not a plain tensor with its values in the file"
            )
        # safetensors stores no shared memory: tied weights come out twice, views without what
        # surrounds them.
        storage = tensor.untyped_storage()
        alone = storage.data_ptr() not in storages and storage.nbytes() == tensor.nbytes
        storages.add(storage.data_ptr())
        tensor = tensor.detach()
        if not alone:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensors[name] = tensor.contiguous()
    return tensors


def _refusal(file: Path, error: Exception) -> UserError:
    """Quote the cause alone: torch's own message recommends switching the protection off."""
    if call := REFUSED_CALL.search(str(error)):
        cause = f"it asks to call {call[1] or call[2]}"
    else:
        message = str(error).split("WeightsUnpickler error:")[-1].strip()
        message = message.partition("\n")[0].partition(". ")[0]
        cause = f"{type(error).__name__}: {message}"
    return UserError(
        f"{file}: not a file of plain tensors, or damaged ({escape(cause)}); nothing of it was "
        "run. Get it again from a source you trust, as safetensors if there is one"
    )
