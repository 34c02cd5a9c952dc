"""Load vision encoders, cut after the layer that feeds the projector; whole, or a slice of their
blocks.

The encoder's own code runs: a timm ViT, or a vision model of transformers (`facts.encoders`). What
comes after the selected block is neither run nor kept, but for the last norm on request.
`select_layer` counts as in LLaVA: -1 is the last block's output, -2 the one before.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.encoders import ENCODER_BLOCK, TESTED_TRANSFORMERS, EncoderFamily, family_of
from mmtrain.facts.families import encoder_config, encoder_tensors, holds_encoder
from mmtrain.facts.model_files import cached_snapshot, foreign_files, hub_cache, model_folder
from mmtrain.facts.shapes import VisionShape, vision_shape
from mmtrain.facts.timm_models import refuse_wrong_activation, timm_config
from mmtrain.facts.vision_files import is_timm_name, square
from mmtrain.model.encoder import moonvit
from mmtrain.model.encoder.native_tower import NativeTower, Unmerged, on_its_device
from mmtrain.model.encoder.vision_tower import Blocks, VisionTower, drop_other_blocks
from mmtrain.model.llm.language import cut_class, forget_codes, quiet
from mmtrain.model.llm.tiny import randomise, shrink
from mmtrain.model.weights.files import Entry, open_tensors, tensor_entries

# What timm reads too, its preference first.
WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
MADE_UP_PATCHES = 6  # a side, of images for encoders of random weights


def load_vision(
    name: str,
    select_layer: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    final_norm: bool = False,
    shape: VisionShape | None = None,
    blocks: Blocks | None = None,
) -> VisionTower:
    """Load an encoder up to the selected layer: frozen, in eval mode, its weights stored in
    `dtype`.

    `name` is a timm name, or a folder or cached hub id of a vision model of timm or transformers;
    nothing is downloaded. With `final_norm`, for the last layer alone, features are those of timm's
    `forward_features`, or transformers' `last_hidden_state`. `shape` says what an encoder for
    images of any size is asked for: its cells, and whether its merger runs; None: one patch a cell.
    With `blocks`, [first, last) of those that run, the others are not kept.

    Raises UserError for a name, folder or layer that does not exist, weights that are not here, and
    other encoders.
    """
    model = timm_model(name, blocks)
    if model is not None:
        return _cut_timm(model, name, select_layer, dtype, final_norm, blocks).to(device)
    return _load_hf(name, select_layer, dtype, final_norm, shape, blocks).to(device)


def timm_model(
    name: str,
    held: Blocks | None = None,
) -> nn.Module | None:
    """Load a timm encoder as published, with bookends for all blocks but `held`; None for one of
    transformers.

    Raises what `load_vision` raises.
    """
    overlay = None
    if is_timm_name(name):
        architecture = name
        overlay = {"file": str(timm_weights(name))}
    else:
        folder = model_folder(name)
        config = encoder_config(folder)
        if "architecture" not in config:
            family_of(config.get("model_type"), name)
            return None
        if holds_encoder(folder):
            return _wrapped_timm(folder, config, held)
        refuse_wrong_activation(config)
        architecture = f"local-dir:{folder}"
    with foreign_files(f"model.vision.name: {name}"):
        # On the CPU, not on meta: EVA's and dinov3's rotary tables are in no checkpoint, the
        # constructor makes them.
        model = timm.create_model(
            architecture,
            pretrained=True,
            pretrained_cfg_overlay=overlay,
        )
    drop_other_blocks(model, held)
    return model


def timm_weights(name: str) -> Path:
    """Return the weight file of a timm name in the local cache. Raises UserError that says how to
    download it.
    """
    config = timm_config(name)
    if not config.hf_hub_id:
        raise UserError(
            f"model.vision.name: timm's weights of {name} are not on the Hugging Face hub. "
            "Save the model in a folder with timm.models.save_for_hf and name that folder"
        )
    snapshot = cached_snapshot(config.hf_hub_id)
    if snapshot is not None:
        for candidate in filter(None, (config.hf_hub_filename, *WEIGHT_FILES)):
            if (snapshot / candidate).is_file():
                return snapshot / candidate
    raise UserError(
        f"model.vision.name: the weights of timm's {name} are not in the local cache "
        f"{hub_cache()}. Download them first: hf download {config.hf_hub_id}"
    )


def check_wrapped_timm(config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for an encoder of transformers' timm_wrapper whose arguments let timm load it
    from elsewhere.
    """
    source = f"{folder}: vision_config in config.json"
    architecture = config.get("architecture")
    arguments = config.get("model_args") or {}
    if not architecture or ":" in architecture or not timm.is_model(architecture):
        raise UserError(f"{source}: architecture {escape(repr(architecture))} is not a timm model")
    if inspect.signature(timm.create_model).parameters.keys() & arguments.keys():
        raise UserError(
            f"{source}: model_args {escape(repr(arguments))}; needed are sizes of {architecture}"
        )


def _wrapped_timm(
    folder: Path,
    config: dict[str, Any],
    held: Blocks | None,
) -> nn.Module:
    check_wrapped_timm(config, folder)
    arguments = config["model_args"] or {}
    with foreign_files(f"model.vision.name: {folder}"):
        model = timm.create_model(
            config["architecture"],
            num_classes=0,
            **arguments,
        )
        wanted = set(model.state_dict())
        drop_other_blocks(model, held)
        entries = encoder_tensors(folder, tensor_entries(folder))
        # of all blocks: else slices would differ in what they refuse
        if missing := sorted(wanted - entries.keys()):
            raise _lacks_tensors(folder, missing)
        lazy = _open_held(entries, held)
        model.load_state_dict({name: lazy[name][...] for name in model.state_dict()})
    return model


def _cut_timm(
    model: nn.Module,
    name: str,
    select_layer: int,
    dtype: torch.dtype,
    final_norm: bool,
    held: Blocks | None,
) -> VisionTower:
    patches = model.patch_embed
    size = getattr(patches, "img_size", None) or model.pretrained_cfg["input_size"][1:]
    # Pruning changes what negative indices mean: only the index that it returns still names the
    # same block.
    block = model.prune_intermediate_layers(
        [select_layer],
        prune_norm=not final_norm,
        prune_head=True,
    )

    def features(model: nn.Module, images: Tensor) -> Tensor:
        if final_norm:
            return model.forward_features(images)[:, model.num_prefix_tokens :]
        return model.forward_intermediates(
            images,
            indices=block,
            intermediates_only=True,
            output_fmt="NLC",
            norm=False,
        )[0]

    tower = VisionTower(
        model,
        features,
        model.embed_dim,
        square(size, "images", name),
        square(patches.patch_size, "patches", name),
        model.num_prefix_tokens,
        blocks=held,
    )
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in tower.buffers():
        # Not tower.to(dtype): rotary tables would be rounded. EVA's constant zero bias must follow
        # its weights, though.
        if buffer.is_floating_point() and torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)):
            buffer.data = buffer.data.to(dtype)
    return tower


def model_class(family: EncoderFamily) -> type[transformers.PreTrainedModel]:
    """Return a family's class. Raises UserError for one that the installed transformers lacks."""
    # transformers does not export all
    for home in (transformers, moonvit, modeling_qwen2_vl, modeling_qwen2_5_vl):
        found = getattr(home, family.model, None)
        if found is not None:
            return found
    raise UserError(
        f"model.vision.name: transformers {transformers.__version__} has no {family.model}. "
        f"Install version {TESTED_TRANSFORMERS}, which has it"
    )


def stock_config(
    family: EncoderFamily,
    folder: Path,
) -> transformers.PreTrainedConfig:
    """Return transformers' config of the encoder in a folder, which may hold a multimodal model."""
    kind = model_class(family).config_class
    if holds_encoder(folder):
        config = kind.from_dict(encoder_config(folder))
    else:
        config = kind.from_pretrained(folder)
    forget_codes(config)
    # Qwen's and GLM's: in transformers 5.17 they do not know the usual names
    if hasattr(config, "depth"):
        kind.attribute_map = {
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "depth",
            **kind.attribute_map,
        }
    return config


def _load_hf(
    name: str,
    select_layer: int,
    dtype: torch.dtype,
    final_norm: bool,
    shape: VisionShape | None,
    held: Blocks | None,
) -> VisionTower:
    folder = model_folder(name)
    family = family_of(encoder_config(folder).get("model_type"), str(folder))
    if family.native is not None and shape is None:
        shape = vision_shape(name, select_layer, final_norm)
    stock = model_class(family)
    merges = shape is not None and shape.merge > 1
    unused = family.unused(final_norm, str(folder), merges)
    with foreign_files(f"model.vision.name: {folder}"):
        config = stock_config(family, folder)
    config.num_hidden_layers += 1 + select_layer
    config.vision_use_head = False
    config.deepstack_visual_indexes = [] if shape is None else list(shape.deepstack)
    if any(folder.glob("*.safetensors")):
        entries = encoder_tensors(folder, tensor_entries(folder))
        weights = {
            "pretrained_model_name_or_path": None,
            "state_dict": _open_held(entries, held),
        }
    else:
        # openai/clip-vit-large-patch14-336 is published so: transformers reads it by torch's
        # weights_only
        weights = {"pretrained_model_name_or_path": folder, "local_files_only": True}

    part_class = cut_class(stock, lambda model: drop_other_blocks(model, held))
    with foreign_files(f"model.vision.name: {folder}"), quiet():
        model, info = part_class.from_pretrained(
            **weights,
            config=config,
            dtype=dtype,
            # else config.json names it, and may name a kernel to be downloaded
            attn_implementation="sdpa",
            key_mapping={f"^{re.escape(outer)}": "" for outer in family.outer},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    _leave_out(model, unused)
    # transformers would only warn and train against an encoder that is partly random
    missing = dict(model.named_parameters()).keys() & info["missing_keys"]
    if missing:
        raise _lacks_tensors(folder, sorted(set(map(family.published, missing))))
    if info["mismatched_keys"]:
        tensor, stored, built = min(info["mismatched_keys"])
        raise UserError(
            f"model.vision.name: {folder}: {tensor} is {tuple(stored)} in the weights, but "
            f"{tuple(built)} by config.json. Correct config.json, or download the folder again"
        )
    return _hf_tower(model, family, config, str(folder), shape, held)


def _hf_tower(
    model: nn.Module,
    family: EncoderFamily,
    config: transformers.PreTrainedConfig,
    source: str,
    shape: VisionShape | None,
    held: Blocks | None = None,
) -> VisionTower:
    if family.native is not None:
        if family.native.block > 1 and shape.merge == 1:
            joined = family.native.block**2
            unmerged = Unmerged(joined)
            if hasattr(model, "downsample"):
                model.downsample = unmerged
                model.config.out_hidden_size = joined * shape.width
                if hasattr(model, "embeddings"):
                    model.embeddings.register_forward_pre_hook(on_its_device)
            else:
                model.merger = unmerged
                model.deepstack_merger_list = nn.ModuleList(unmerged for _ in shape.deepstack)
        return NativeTower(model, family, shape, blocks=held)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    prefix_tokens = family.prefix_tokens(shapes)

    def features(model: nn.Module, images: Tensor) -> Tensor:
        return model(images).last_hidden_state[:, prefix_tokens:]

    return VisionTower(
        model,
        features,
        config.hidden_size,
        square(config.image_size, "images", source),
        square(config.patch_size, "patches", source),
        prefix_tokens,
        family.published,
        held,
    )


def _leave_out(model: nn.Module, unused: Sequence[str]) -> None:
    for name in unused:
        path, _, last = name.rstrip(".").rpartition(".")
        owner = model.get_submodule(path)
        module = getattr(owner, last, None)
        if isinstance(module, nn.Module):
            setattr(owner, last, nn.Identity())
        elif isinstance(module, nn.Parameter):
            setattr(owner, last, None)


def made_up_encoder(
    name: str,
    dtype: torch.dtype,
    final_norm: bool,
    depth: int,
    shape: VisionShape | None = None,
) -> VisionTower:
    """Make an encoder such as `load_vision` loads, with `depth` blocks and random weights.

    timm's encoders keep their widths, those of transformers become tiny.
    """
    architecture = name
    options = {}
    if not is_timm_name(name):
        folder = model_folder(name)
        config_json = encoder_config(folder)
        if "architecture" not in config_json:
            family = family_of(config_json.get("model_type"), name)
            return _made_up_stock(family, folder, dtype, final_norm, depth, shape)
        architecture = f"local-dir:{folder}"
        if holds_encoder(folder):
            check_wrapped_timm(config_json, folder)
            architecture = config_json["architecture"]
            options = config_json["model_args"] or {}
    with foreign_files(f"model.vision.name: {name}"):
        with torch.device("meta"):
            published = timm.create_model(architecture, **options)
        pixels = MADE_UP_PATCHES * square(published.patch_embed.patch_size, "patches", name)
        options = {**options, "depth": depth, "img_size": pixels}
        model = timm.create_model(architecture, **options)
    randomise(model, seed=0)
    return _cut_timm(model, name, -1, dtype, final_norm, None)


def _made_up_stock(
    family: EncoderFamily,
    folder: Path,
    dtype: torch.dtype,
    final_norm: bool,
    depth: int,
    shape: VisionShape | None,
) -> VisionTower:
    with foreign_files(f"model.vision.name: {folder}"):
        config = shrink(stock_config(family, folder))
    config.num_hidden_layers = depth
    config.vision_use_head = False
    config.deepstack_visual_indexes = []
    # Qwen2.5-VL's: other blocks attend in windows of pixels
    if hasattr(config, "fullatt_block_indexes"):
        config.fullatt_block_indexes = [1]
        config.window_size = 4 * config.patch_size
    stock = model_class(family)(config)
    stock.set_attn_implementation("sdpa")
    randomise(stock, seed=0)
    merges = False
    if shape is not None:
        merges = shape.merge > 1
        # of the shrunken model
        width = config.hidden_size
        merged = shape.merged_width and getattr(config, "out_hidden_size", width)
        shape = replace(shape, width=width, merged_width=merged)
    source = str(folder)
    _leave_out(stock, family.unused(final_norm, source, merges))
    return _hf_tower(stock.to(dtype), family, config, source, shape)


def _open_held(
    entries: Mapping[str, Entry],
    held: Blocks | None,
) -> dict[str, Any]:
    """Open the encoder's tensors lazily, but for blocks outside `held`."""
    wanted = {}
    for name, entry in entries.items():
        block = ENCODER_BLOCK.match(f"vision.{name}")
        if held is None or block is None or held[0] <= int(block[1]) < held[1]:
            wanted[name] = entry
    return open_tensors(wanted)


def _lacks_tensors(folder: Path, missing: Sequence[str]) -> UserError:
    return UserError(
        f"model.vision.name: {folder} lacks {len(missing)} of the encoder's tensors, e.g. "
        f"{missing[0]}. Download the folder again"
    )
