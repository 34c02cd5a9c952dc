"""Record a model's shapes, so that `mmtrain plan` works on machines that do not have its weights.

A record says what planning needs of a model's config.json and lists every parameter's name and
shape: a small JSON file in the cache. The model is built without memory for its weights; only its
config.json is needed.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.base.arguments import command_parser
from mmtrain.base.durable import write_whole
from mmtrain.base.printing import print_result
from mmtrain.facts.families import encoder_config
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.recorded_shapes import FOLDER, PLANNING_KEYS, Recorded, as_json, own_records
from mmtrain.facts.shapes import Shape, llm_shape_from, vision_shape_from
from mmtrain.facts.timm_models import timm_record
from mmtrain.facts.vision_files import encoder_settings, is_timm_name

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """\
  an LLM, from a folder with its config.json; the id is the name that configs will use:
    mmtrain record ~/models/qwen2.5-72b --id Qwen/Qwen2.5-72B-Instruct --alias Qwen/Qwen2.5-72B
  an LLM whose config.json is in the local Hugging Face cache (hf download ID config.json):
    mmtrain record Qwen/Qwen2.5-72B-Instruct
  a vision encoder by its timm name, or from the folder of a model of transformers:
    mmtrain record --vision vit_large_patch14_clip_quickgelu_336.openai
    mmtrain record --vision ~/models/clip-vit-large-patch14-336 \\
        --id openai/clip-vit-large-patch14-336
"""


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("record", __doc__, EXAMPLES)
    add = parser.add_argument
    add("model", nargs="?", help="folder or cached hub id of an LLM")
    add("--vision", metavar="NAME", help="timm name, folder or cached hub id of a vision encoder")
    add("--id", help="name to record it under; by default the hub id or timm name given")
    add(
        "--alias",
        action="append",
        default=[],
        help="another model with the same shapes; repeatable",
    )
    add(
        "--out",
        type=Path,
        help=f"folder to write to, instead of the cache; plans also read {FOLDER}",
    )
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.vision is None):
        parser.error("give either an LLM or --vision NAME")
    model = options.model or options.vision
    if options.id is None and Path(model).expanduser().is_dir():
        parser.error(f"{model} is a folder. Give the name to record it under: --id OWNER/NAME")
    return options


def record_llm(options: Namespace) -> Recorded:
    """Record a causal LM from the config.json in its folder; raises UserError for families that
    cannot be cut.
    """
    import torch

    from mmtrain.model.llm.language import auto_class, causal_config, drop_tower

    stock_config = causal_config(model_folder(options.model))
    with torch.device("meta"):
        model = auto_class(stock_config).from_config(
            stock_config, attn_implementation=None, trust_remote_code=False
        )
    drop_tower(model)
    facts = stock_config.get_text_config().to_dict()
    config = {key: facts[key] for key in PLANNING_KEYS if facts.get(key) is not None}
    if set(config.get("layer_types", ())) == {"full_attention"}:
        del config["layer_types"]
        config.pop("sliding_window", None)
    return Recorded(
        "llm", options.id or options.model, tuple(options.alias), config, _shapes(model)
    )


def record_vision(options: Namespace) -> Recorded:
    """Record a vision model of timm by its name, or one of transformers from the config.json in its
    folder.
    """
    if is_timm_name(options.vision):
        recorded = timm_record(options.vision)
        aliases = tuple(dict.fromkeys((*recorded.aliases, *options.alias)))
        return replace(recorded, id=options.id or recorded.id, aliases=aliases)
    import torch

    from mmtrain.model.encoder.vision import model_class, stock_config

    folder = model_folder(options.vision)
    family = encoder_settings(encoder_config(folder), str(folder)).family
    facts = stock_config(family, folder)
    # else config.json names it, and may name a kernel to be downloaded
    facts._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = model_class(family)(facts)
    size = "image_size" if family.native is None else "patch_size"
    keys = (
        "model_type",
        "num_attention_heads",
        size,
        "window_size",
        "fullatt_block_indexes",
        "deepstack_visual_indexes",
    )
    config = {key: value for key in keys if (value := getattr(facts, key, None)) is not None}
    return Recorded(
        "vision",
        options.id or options.vision,
        tuple(options.alias),
        config,
        family.own(_shapes(model)),
    )


def _shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the stock name and shape of every parameter; tied ones are listed once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def run(options: Namespace) -> None:
    """Write one record and print what is in it; raises UserError."""
    if options.vision is None:
        recorded = record_llm(options)
        shape = llm_shape_from(recorded.config, recorded.parameters, recorded.id)
        summary = f"{len(shape.decoder)} decoder layers, hidden size {shape.hidden_size}"
    else:
        recorded = record_vision(options)
        shape = vision_shape_from(recorded.config, recorded.parameters, -1, recorded.id)
        sizes = f"{shape.patches_per_image} patches per image"
        if shape.family.native is not None:
            sizes = f"patches of {shape.patch_size} pixels"
        summary = f"{shape.blocks_run} blocks, width {shape.width}, {sizes}"
    file = (options.out or own_records()) / (recorded.id.lower().replace("/", "--") + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, as_json(recorded))
    count = sum(math.prod(shape) for shape in recorded.parameters.values())
    print_result(f"{file}: {recorded.id}, {count:,} parameters, {summary}")
