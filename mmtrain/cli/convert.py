"""Convert a model's pickled weights (pytorch_model*.bin) or GGUF file to safetensors, once.

mmtrain reads tensor by tensor, which pickles and GGUF do not allow. Pickled values stay the same
and are read back for comparison; memory holds one shard, twice. A GGUF file is read by
transformers, and its values are stored as bfloat16; memory holds the whole model. No code in a file
is run, and the originals are left alone.
"""

import json
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.durable import whole_file, write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import first_few, print_result
from mmtrain.exporting.tensors import DTYPES, INDEX, in_memory, new_folder, write_tensors
from mmtrain.facts.model_files import model_folder, read_weight_map
from mmtrain.facts.published import WHAT_IS_READ
from mmtrain.model.weights.files import read_pickled

EXAMPLES = """\
  beside the .bin files, in the same folder:
    mmtrain convert ~/models/vicuna-7b-v1.5
  from the local Hugging Face cache (hf download ID) into a new folder, with config and tokenizer:
    mmtrain convert lmsys/vicuna-7b-v1.5 --out ~/models/vicuna-7b-v1.5
  a file of llama.cpp into a new folder, with config and tokenizer (pip install 'mmtrain[gguf]'):
    mmtrain convert SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2
"""
SINGLE = "model.safetensors"
# Keys of a GGUF file that transformers leaves to the shapes of the tensors.
SHAPE_KEYS = {"vocab_size", "attention.key_length", "attention.value_length"}
WEIGHT_SUFFIXES = {
    ".bin",
    ".safetensors",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".gguf",
}


def find_shards(folder: Path) -> list[Path]:
    """Return the folder's pickled weight files, in order; raise UserError if any is missing."""
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.is_file():
        names = sorted(set(read_weight_map(index, ".bin").values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder}: lacks {', '.join(missing)}; finish the download")
    return [folder / name for name in names]


def convert(folder: Path, out: Path) -> None:
    """Write `folder`'s weights as safetensors into `out`, which may be `folder`; raises UserError.

    The file that makes the result visible to readers (the index, or the single weight file) is
    named last.
    """
    shards = find_shards(folder)
    existing = [name for name in (INDEX, SINGLE) if (out / name).exists()]
    if existing:
        raise UserError(
            f"{out}: {existing[0]} is there already; nothing to convert, or choose another --out"
        )
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
                raise UserError(
                    f"{shard}: {key} is stored as {str(tensor.dtype)[6:]}. {WHAT_IS_READ}"
                )
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with whole_file(out / name) as unfinished:
            write_tensors(unfinished, {key: in_memory(tensor) for key, tensor in tensors.items()})
        print_result(f"{i}/{len(shards)} {shard.name} -> {name}: {len(tensors)} tensors")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_whole(out / INDEX, json.dumps(index, indent=2) + "\n")


def unread_settings(file: Path) -> list[str]:
    """Return a GGUF file's settings and tensors that transformers ignores, though the model
    computes with them.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    names = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    read = names.get(architecture.replace("moe", "_moe")) or names.get(
        architecture.replace("-", "_")
    )
    if read is None:
        raise ValueError(
            f"transformers does not read GGUF files of the architecture {architecture}"
        )
    unread = []
    for name in reader.fields:
        prefix, _, key = name.partition(".")
        if prefix == architecture and key not in read.keys() | SHAPE_KEYS:
            unread.append(name)
    return unread + [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]


def convert_gguf(file: Path, out: Path) -> None:
    """Write the model of a GGUF file as the folder `out`, weights in bfloat16; raises UserError."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(
            f"{file}: needs gguf, which is not installed. Run pip install 'mmtrain[gguf]'"
        ) from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with new_folder(out) as unfinished, tempfile.TemporaryDirectory() as alone:
        # transformers also reads what lies beside the file: tokenizers, adapters, another model's.
        (Path(alone) / file.name).symlink_to(file.absolute())
        try:
            unread = unread_settings(file)
            if unread:
                raise ValueError(
                    f"transformers ignores its {first_few(unread, 3)} and would compute otherwise"
                )
            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file=file.name, trust_remote_code=False
            )
            model, found = AutoModelForCausalLM.from_pretrained(
                alone,
                gguf_file=file.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                attn_implementation=None,
                trust_remote_code=False,
            )
            if found["missing_keys"]:
                raise ValueError(f"it lacks {first_few(sorted(found['missing_keys']), 3)}")
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError, OSError) as error:
            raise UserError(
                f"{file}: cannot be converted: {error}. Use the publisher's safetensors"
            ) from error
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def run(options: Namespace) -> None:
    if options.model.endswith(".gguf"):
        if options.out is None:
            raise UserError(
                f"{options.model}: name a new folder for weights, config and tokenizer: "
                "--out FOLDER"
            )
        out = options.out.expanduser()
        convert_gguf(Path(options.model).expanduser(), out)
    else:
        folder = model_folder(options.model)
        out = folder if options.out is None else options.out.expanduser()
        convert(folder, out)
    print_result(f"{out}: ready; use it as model.llm.path")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("convert", __doc__, EXAMPLES)
    parser.add_argument("model", help="model folder, cached hub id, or FILE.gguf")
    parser.add_argument(
        "--out", type=Path, help="new folder for weights, config and tokenizer (default: in place)"
    )
    return parser.parse_args(arguments)
