"""Convert a model folder's pickled weights (pytorch_model*.bin) to safetensors, once.

mmtrain reads tensor by tensor, which pickles do not allow. Values stay the same and are read back for comparison.
Memory holds one shard, twice. No code in a pickle is run, and the originals are left alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.durable import whole_file, write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_result
from mmtrain.exporting.tensors import DTYPES, INDEX, in_memory, write_tensors
from mmtrain.models.facts.model_files import model_folder, read_weight_map
from mmtrain.models.weights.files import read_pickled

EXAMPLES = """\
  beside the .bin files, in the same folder:
    mmtrain convert ~/models/vicuna-7b-v1.5
  from the local Hugging Face cache (hf download ID) into a new folder, with config and tokenizer:
    mmtrain convert lmsys/vicuna-7b-v1.5 --out ~/models/vicuna-7b-v1.5
"""
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = {".bin", ".safetensors", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx", ".gguf"}


def find_shards(folder: Path) -> list[Path]:
    """Return the folder's pickled weight files, in order; raise UserError if any is missing."""
    index = folder / "pytorch_model.bin.index.json"
    names = sorted(set(read_weight_map(index, ".bin").values())) if index.is_file() else ["pytorch_model.bin"]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder}: lacks {', '.join(missing)}; finish the download")
    return [folder / name for name in names]


def convert(folder: Path, out: Path) -> None:
    """Write `folder`'s weights as safetensors into `out`, which may be `folder`; raises UserError.

    The file that makes the result visible to readers (the index, or the single weight file) is named last.
    """
    shards = find_shards(folder)
    existing = [name for name in (INDEX, SINGLE) if (out / name).exists()]
    if existing:
        raise UserError(f"{out}: {existing[0]} is there already; nothing to convert, or choose another --out")
    if out != folder and out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty; choose a new folder")
    out.mkdir(parents=True, exist_ok=True)
    if out != folder:
        for file in sorted(folder.iterdir()):
            weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if file.is_file() and not weights and not file.name.startswith("."):
                shutil.copyfile(file, out / file.name)
    weight_map: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = read_pickled(shard)
        twice = sorted(tensors.keys() & weight_map.keys())
        if twice:
            raise UserError(f"{shard}: {twice[0]} is in {weight_map[twice[0]]} already")
        for key, tensor in tensors.items():
            if tensor.dtype not in DTYPES.values():
                raise UserError(f"{shard}: {key} is stored as {str(tensor.dtype)[6:]}; use a release in bf16 or fp16")
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with whole_file(out / name) as unfinished:
            write_tensors(unfinished, {key: in_memory(tensor) for key, tensor in tensors.items()})
        print_result(f"{i}/{len(shards)} {shard.name} -> {name}: {len(tensors)} tensors")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(out / INDEX, json.dumps(index, indent=2) + "\n")


def run(options: argparse.Namespace) -> None:
    folder = model_folder(options.model)
    out = folder if options.out is None else options.out.expanduser()
    convert(folder, out)
    print_result(f"{out}: ready; use it as model.llm.path")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("convert", __doc__, EXAMPLES)
    parser.add_argument("model", help="model folder, or cached hub id")
    parser.add_argument("--out", type=Path, help="new folder for weights, config and tokenizer (default: in place)")
    return parser.parse_args(arguments)
