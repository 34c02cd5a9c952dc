"""Which tensors a model's files hold, opened one by one: a slice of a 70B model reads its own layers and nothing else.

safetensors files --headers--> name and file of every tensor --the slice's own--> lazy handles (shape and dtype; the
bytes come from a memory map when transformers asks for them)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from mmtrain.base.errors import UserError
from mmtrain.pretrained.model_files import read_json, tensor_shapes


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a model's folder, by the tensor's name on disk.

    Raises UserError for a folder without weights, with missing or damaged files, or with pickled weights only.
    """
    shapes = tensor_shapes(folder)
    if shapes is None:
        raise UserError(
            f"{folder}: holds no model.safetensors and no model.safetensors.index.json; download the weights"
        )
    index = folder / "model.safetensors.index.json"
    files = read_json(index)["weight_map"] if index.is_file() else dict.fromkeys(shapes, "model.safetensors")
    return {name: folder / files[name] for name in shapes}


def open_tensors(files: dict[str, Path]) -> dict[str, Any]:
    """Lazy safetensors handles of the named tensors, by name."""
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    return {name: opened[file].get_slice(name) for name, file in files.items()}
