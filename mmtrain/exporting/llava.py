"""Export the projector for LLaVA's own code: `mm_projector.bin` and keys of config.json.

    projector.linear_1.weight -> model.mm_projector.0.weight     mlp2x_gelu, which is
    projector.linear_2.weight -> model.mm_projector.2.weight     Sequential(Linear, GELU, Linear)
    projector.linear_1.weight -> model.mm_projector.weight       linear: nn.Linear
    projector.image_newline   -> model.image_newline             of layouts with lines

Sources: build_vision_projector in LLaVA's llava/model/multimodal_projector/builder.py,
initialize_vision_modules in llava_arch.py (--pretrain_mm_mlp_adapter, which leaves the newline
random) and load_pretrained_model in builder.py (--model-base); of layouts
prepare_inputs_labels_for_multimodal in LLaVA-NeXT's llava_arch.py and process_anyres_image in its
mm_utils.py. That code reads a pickle with torch.load, so this is the one place where mmtrain writes
one: a plain dictionary of tensors.
"""

import io
import json
from pathlib import Path

import torch

from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.connectors import NEWLINE
from mmtrain.exporting.card import published
from mmtrain.exporting.projector_file import opened
from mmtrain.exporting.tensors import require_space
from mmtrain.facts.families import llm_config
from mmtrain.facts.models import Models
from mmtrain.facts.settings import Settings
from mmtrain.layouts.anyres import Anyres
from mmtrain.layouts.layout import ImageLayout
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.stock.exporters import LLAVA_CODE

FILE = "mm_projector.bin"
# LLaVA's towers are OpenAI's CLIP under its names on the hub; these timm names are the same
# weights.
CLIP_NAMES = {
    "vit_base_patch32_clip_quickgelu_224.openai": "openai/clip-vit-base-patch32",
    "vit_base_patch16_clip_quickgelu_224.openai": "openai/clip-vit-base-patch16",
    "vit_large_patch14_clip_quickgelu_224.openai": "openai/clip-vit-large-patch14",
    "vit_large_patch14_clip_quickgelu_336.openai": "openai/clip-vit-large-patch14-336",
}
# families with a class in LLaVA's own code, or in LLaVA-NeXT's (the last two)
MODEL_TYPES = {
    "llama": "llava_llama",
    "mistral": "llava_mistral",
    "mpt": "llava_mpt",
    "qwen2": "llava_qwen",
    "mixtral": "llava_mixtral",
}


def export_llava(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write into the folder; raises UserError for what LLaVA's code cannot hold.

    LLaVA's loader finds a projector by its folder's name, which must have `llava` in it.
    """
    tensors, about = opened(checkpoint, "llava")
    names = {**LLAVA_CODE[about["projector_type"]], NEWLINE: f"model.{NEWLINE}"}
    projector = {}
    for name, source in tensors.items():
        layer, dot, part = name.removeprefix(PROJECTOR).partition(".")
        projector[names[layer] + dot + part] = source.read().to(dtype)
    content = io.BytesIO()  # a full disk is then an error of this module, not of torch's writer
    torch.save(projector, content)
    config = json.dumps(_config(about, checkpoint.models), indent=2) + "\n"
    require_space(folder, content.tell())
    (folder / FILE).write_bytes(content.getvalue())
    (folder / "config.json").write_text(config)
    if (folder / FILE).read_bytes() != content.getvalue():
        raise OSError(f"{folder / FILE}: does not read back as written. Check the disk")


def _config(about: Settings, models: Models) -> Settings:
    """Return the LLM's config.json with LLaVA's keys."""
    llm = llm_config(models.llm_folder)
    # "patch" drops the first token, which must then be a class token
    feature = "cls_patch"
    if models.published_vision.prefix_tokens:
        feature = "patch"
    return {
        **llm,
        "model_type": MODEL_TYPES.get(llm["model_type"], llm["model_type"]),
        "use_mm_proj": True,
        "mm_projector_type": about["projector_type"],
        "mm_hidden_size": about["vision_width"],
        "mm_vision_tower": CLIP_NAMES.get(about["vision"], about["vision"]),
        "mm_vision_select_layer": about["vision_select_layer"],
        "mm_vision_select_feature": feature,
        "mm_use_im_start_end": False,
        # LLaVA's loader takes a missing key for true, and adds a row
        "mm_use_im_patch_token": False,
        **_image_keys(about, models.layout),
        "tune_mm_mlp_adapter": True,
        "mmtrain": published(about),
    }


def _image_keys(about: Settings, layout: ImageLayout) -> Settings:
    """Return LLaVA's settings of images; its grids are (width, height), in our order of ties."""
    if not isinstance(layout, Anyres):
        # LLaVA stretches no image
        return {"image_aspect_ratio": "pad" if about["image_fit"] == "pad" else "square"}
    return {
        "image_aspect_ratio": layout.name,
        "image_grid_pinpoints": [[width, height] for height, width in layout.grids],
        "mm_patch_merge_type": "spatial_unpad",
    }
