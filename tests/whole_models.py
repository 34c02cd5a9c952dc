"""Tiny random models of the multimodal classes of transformers, saved with their processors by its
own code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from json_files import read_json
from safetensors.torch import save_file
from scenes import make_config, perturb
from timm_folder import save_timm_folder
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmtrain.config.schema import RunConfig
from mmtrain.stock.pretrained import expand_pretrained

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {
        "img_size": 28,
        "patch_size": 7,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "global_pool": "",
    },
}
GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28]]
# class, model_type of encoder and of LLM, more of config.json
WHOLES: dict[str, tuple[str, str, str, dict]] = {
    "llava": ("Llava", "clip_vision_model", "llama", {"image_seq_length": 16}),
    "aya_vision": ("AyaVision", "siglip_vision_model", "cohere2", {"vision_feature_layer": -2}),
    "idefics3": ("Idefics3", "idefics3_vision", "llama", {}),
    "smolvlm": ("SmolVLM", "smolvlm_vision", "llama", {"tie_word_embeddings": True}),
    "internvl": ("InternVL", "internvl_vision", "qwen2", {"image_seq_length": 4}),
    "perception_lm": ("PerceptionLM", "timm_wrapper", "llama", {"projector_pooling_ratio": 2}),
    "llava_next": ("LlavaNext", "clip_vision_model", "mistral", {"image_grid_pinpoints": GRIDS}),
    "llava_onevision": (
        "LlavaOnevision",
        "siglip_vision_model",
        "qwen2",
        {"image_grid_pinpoints": GRIDS, "video_token_index": 318},
    ),
    "aya_tiles": ("AyaVision", "siglip_vision_model", "cohere2", {"vision_feature_layer": -2}),
    "gemma3": ("Gemma3", "siglip_vision_model", "gemma3_text", {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", "pixtral", "mistral", {"tie_word_embeddings": False}),
    "pixtral": (
        "Llava",
        "pixtral",
        "mistral",
        {
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
    ),
    "lighton_ocr": ("LightOnOcr", "pixtral", "qwen3", {"tie_word_embeddings": True}),
    "lfm2_vl": (
        "Lfm2Vl",
        "siglip2_vision_model",
        "llama",
        {"projector_hidden_size": 64, "tie_word_embeddings": False},
    ),
    "hyperclovax": (
        "HyperCLOVAXVisionV2",
        "qwen2_5_vl_vision",
        "llama",
        {"tie_word_embeddings": False, "video_token_id": 318},
    ),
    "hyperclovax3": (
        "HyperCLOVAXVisionV2",
        "qwen3_vl_vision",
        "qwen3",
        {"tie_word_embeddings": True, "video_token_id": 318},
    ),
    "video_llama_3": ("VideoLlama3", "video_llama_3_vision", "llama", {"video_token_id": 318}),
    "exaone4_5": ("Exaone4_5_", "exaone4_5_vision", "llama", {"video_token_id": 318}),
    "lfm2_patches": (
        "Lfm2Vl",
        "siglip2_vision_model",
        "lfm2",
        {"projector_hidden_size": 64, "downsample_factor": 1, "projector_use_layernorm": False},
    ),
}
# those whose LLM takes positions in rows and columns
MROPE: dict[str, tuple[str, str, str, dict]] = {
    "qwen2_vl": ("Qwen2VL", "qwen2_vl_vision", "qwen2_vl_text", {}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_vision",
        "qwen2_5_vl_text",
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl": ("Qwen3VL", "qwen3_vl_vision", "qwen3_vl_text", {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_vl_moe_vision", "qwen3_vl_moe_text", {}),
    "qwen3_5": ("Qwen3_5", "qwen3_5_vision", "qwen3_5_text", {}),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_vision", "qwen3_5_moe_text", {}),
    "glm4v": ("Glm4v", "glm4v_vision", "glm4v_text", {}),
    "glm46v": ("Glm46V", "glm4v_vision", "glm4v_text", {}),
    "glm4v_moe": ("Glm4vMoe", "glm4v_moe_vision", "glm4v_moe_text", {}),
    "glm_ocr": ("GlmOcr", "glm_ocr_vision", "glm_ocr_text", {}),
    "paddleocr_vl": ("PaddleOCRVL", "paddleocr_vl_vision", "paddleocr_vl_text", {}),
}
WHOLES |= MROPE
MORE_TEXT = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.25},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "HyperCLOVAXVisionV2": {"logits_scaling": 1.0},
}


def _rope(sections: list[int], **more: object) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"head_dim": 16, "rope_parameters": rope}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    **_rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
}
_GLM = _rope([2, 1, 1], partial_rotary_factor=0.5)
MORE_TEXT |= {
    "qwen2_vl_text": _rope([2, 3, 3]),
    "qwen2_5_vl_text": _rope([2, 3, 3]),
    "qwen3_vl_text": _rope([4, 2, 2], mrope_interleaved=True),
    "qwen3_vl_moe_text": _rope([4, 2, 2], mrope_interleaved=True) | _MOE,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _MOE | {"shared_expert_intermediate_size": 32},
    "glm4v_text": _GLM,
    "glm4v_moe_text": _GLM
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm_ocr_text": _rope([2, 3, 3]),
    "paddleocr_vl_text": _rope([2, 3, 3]),
}
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|video|>")
# Whose config calls the token so.
BY_ID = (
    "Idefics3",
    "SmolVLM",
    "InternVL",
    "PerceptionLM",
    "Lfm2Vl",
    "LightOnOcr",
    "HyperCLOVAXVisionV2",
    "VideoLlama3",
    "Exaone4_5_",
    *(name for name, *_ in MROPE.values()),
)
QWEN = {"depth": 3, "num_heads": 2, "out_hidden_size": 24}
WINDOWS = {"window_size": 28, "fullatt_block_indexes": [1]}
MORE_VISION = {
    "siglip2_vision_model": {"num_patches": 16, "vision_use_head": False},
    "qwen2_5_vl_vision": {**QWEN, **WINDOWS},
    "qwen3_vl_vision": {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "exaone4_5_vision": {**QWEN, **WINDOWS, "num_key_value_heads": 1, "out_hidden_size": 64},
}
_OWN = {**QWEN, "out_hidden_size": 64}
_DEEP = {**_OWN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
MORE_OWN_VISION = {  # beside their own LLM
    "qwen2_vl_vision": {**QWEN, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl_vision": {**_OWN, **WINDOWS},
    "qwen3_vl_vision": _DEEP,
    "qwen3_vl_moe_vision": _DEEP,
    "qwen3_5_vision": {**_OWN, "num_position_embeddings": 16},
    "qwen3_5_moe_vision": {**_OWN, "num_position_embeddings": 16},
    **dict.fromkeys(("glm4v_vision", "glm4v_moe_vision", "glm_ocr_vision"), _OWN),
    "paddleocr_vl_vision": {},
}
STATISTICS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
SQUARE = {"size": {"height": 28, "width": 28}}


def stock_class(name: str) -> type:
    """Return a class of transformers; skip the test where the installed version lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def stock_whole(kind: str) -> PreTrainedModel:
    """The stock model, every tensor random."""
    name, vision, text, more = WHOLES[kind]
    more_vision = MORE_OWN_VISION if kind in MROPE else MORE_VISION
    sizes = TIMM if vision == "timm_wrapper" else VISION | more_vision.get(vision, {})
    config = stock_class(f"{name}Config")(
        vision_config={"model_type": vision, **sizes},
        text_config={
            "model_type": text,
            **TEXT,
            **MORE_TEXT.get(text, {}),
            **MORE_TEXT.get(name, {}),
        },
        **{
            "image_token_id" if name in BY_ID else "image_token_index": 320
            if kind in MROPE
            else 314
        },
        **({"video_token_id": 322} if kind in MROPE else {}),
        **more,
    )
    torch.manual_seed(5)
    return perturb(stock_class(f"{name}ForConditionalGeneration")(config))


def save_whole(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The same, saved with its processor of one square an image; the model."""
    model = stock_whole(kind)
    model.save_pretrained(folder)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    PROCESSORS.get(kind, lambda *_: tokenizer.save_pretrained(folder))(folder, tokenizer)
    return model


OUR_MODULES = {
    "patch_merger.merging_layer": "merging_layer",
    "": "linear_1",
    "readout.0": "linear_1",
    "readout.2": "linear_2",
    "ln_q": "norm",
    "mlp.0": "linear_1",
    "mlp.2": "linear_2",
}


def save_its_parts(kind: str, model: PreTrainedModel, folder: Path) -> None:
    """The same weights by three hands: llm/ and vision/ as stock models alone have them, and
    projector.safetensors.
    """
    inner = model.model
    language = inner.text_model if hasattr(inner, "text_model") else inner.language_model
    config = copy.deepcopy(language.config)
    config.tie_word_embeddings, config.logit_scale = model.config.tie_word_embeddings, 1.0
    llm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    getattr(llm, llm.base_model_prefix).load_state_dict(language.state_dict())
    llm.lm_head.load_state_dict(model.lm_head.state_dict())
    llm.save_pretrained(folder / "llm")
    names = ("vision_model", "vision_tower", "vision_encoder", "visual")
    tower = next(getattr(inner, name) for name in names if hasattr(inner, name))
    if hasattr(inner, "connector"):
        siglip = SiglipVisionModel(SiglipVisionConfig(**VISION, vision_use_head=False))
        siglip.load_state_dict(tower.state_dict())
        tower, connector = siglip, inner.connector.modality_projection
    else:
        names = ("multi_modal_projector", "vision_projection", "projector")
        connector = (
            next((getattr(inner, name) for name in names if hasattr(inner, name)), None)
            or tower.merger
        )
    if hasattr(tower, "timm_model"):
        save_timm_folder(
            tower.timm_model, folder / "vision", TIMM["architecture"], TIMM["model_args"]
        )
    else:
        tower.save_pretrained(folder / "vision")
        (folder / "vision" / "preprocessor_config.json").write_text(json.dumps(STATISTICS))
    tensors = {}
    for name, tensor in connector.state_dict().items():
        module, _, kind = name.rpartition(".")
        tensors[f"projector.{OUR_MODULES.get(module, module)}.{kind}"] = tensor
    if (newline := getattr(inner, "image_newline", None)) is not None:
        tensors["projector.image_newline"] = newline.detach()
    save_file(tensors, folder / "projector.safetensors")


def _llava(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    images = transformers.LlavaImageProcessor(
        do_pad=True, crop_size=SQUARE["size"], **SQUARE, **STATISTICS
    )
    transformers.LlavaProcessor(
        images, tokenizer, 7, "default", num_additional_image_tokens=1
    ).save_pretrained(folder)


def _next(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As published: an edge for a size."""
    edge = {"size": {"shortest_edge": 28}, "crop_size": SQUARE["size"]}
    images = transformers.LlavaNextImageProcessor(image_grid_pinpoints=GRIDS, **edge, **STATISTICS)
    processor = transformers.LlavaNextProcessor(
        images, tokenizer, 7, "default", num_additional_image_tokens=1
    )
    processor.save_pretrained(folder)


def _onevision(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    images = transformers.LlavaOnevisionImageProcessor(
        image_grid_pinpoints=GRIDS, **SQUARE, **STATISTICS
    )
    videos = transformers.LlavaOnevisionVideoProcessor(**SQUARE)
    transformers.LlavaOnevisionProcessor(
        images,
        tokenizer,
        videos,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        video_token="<|video|>",
    ).save_pretrained(folder)


def _aya(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    most: int = 1,
    names: tuple[str, str] = ("", ""),
) -> None:
    images = transformers.GotOcr2ImageProcessor(max_patches=most, **SQUARE, **STATISTICS)
    around = dict.fromkeys(("start_of_img_token", "end_of_img_token"), "")
    before = dict(zip(("tile_token", "tile_global_token"), names, strict=True))
    transformers.AyaVisionProcessor(
        images, tokenizer, patch_size=7, img_size=28, downsample_factor=2, **around, **before
    ).save_pretrained(folder)


def _aya_tiles(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _aya(folder, tokenizer, most=6, names=("TILE", "TILE_GLOBAL"))


def _idefics3(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    images = transformers.Idefics3ImageProcessor(
        do_image_splitting=False,
        max_image_size={"longest_edge": 28},
        size={"longest_edge": 28},
        **STATISTICS,
    )
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _internvl(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    transformers.GotOcr2ImageProcessor(max_patches=1, **SQUARE, **STATISTICS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def _perception(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    images = transformers.PerceptionLMImageProcessor(
        vision_input_type="vanilla", tile_size=28, **STATISTICS
    )
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


LONGEST = {"size": {"longest_edge": 56}}
NO_TEXTS = {"image_break_token": "", "image_end_token": ""}


def _pixtral(folder: Path, tokenizer: PreTrainedTokenizerFast, merge: int = 1) -> None:
    images = transformers.PixtralImageProcessor(patch_size=7, **LONGEST, **STATISTICS)
    transformers.PixtralProcessor(
        images, tokenizer, 7, merge, image_token="<image>", **NO_TEXTS
    ).save_pretrained(folder)


def _mistral3(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _pixtral(folder, tokenizer, merge=2)


def _lighton(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    transformers.PixtralImageProcessor(patch_size=14, **LONGEST, **STATISTICS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


def _lfm2(folder: Path, tokenizer: PreTrainedTokenizerFast, factor: int = 2) -> None:
    images = transformers.Lfm2VlImageProcessor(
        do_image_splitting=False,
        min_image_tokens=2,
        max_image_tokens=20,
        encoder_patch_size=7,
        downsample_factor=factor,
        **STATISTICS,
    )
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    named = {"image_start_token": "", "image_end_token": ""}
    file.write_text(json.dumps({**read_json(file), "extra_special_tokens": named}))


def _lfm2_patches(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _lfm2(folder, tokenizer, factor=1)


def _qwen(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    size = {"shortest_edge": 2 * 14**2, "longest_edge": 20 * 14**2}
    transformers.Qwen2VLImageProcessor(patch_size=7, size=size, **STATISTICS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


TURNS = """{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{% if p.type == 'image' %}@IMAGE@{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def _mrope(
    images: str, videos: str, processor: str, *marks: str
) -> Callable[[Path, PreTrainedTokenizerFast], None]:
    """A family's own processor: sizes, tokens, and a chat template that takes parts in a list."""

    def save(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        frames = 2 if images.startswith("Glm") else 1
        size = {"shortest_edge": 2 * frames * 14**2, "longest_edge": 20 * frames * 14**2}
        tokenizer.add_tokens(list(marks), special_tokens=True)
        # no BOS
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        parts = [getattr(transformers, images)(patch_size=7, size=size, **STATISTICS), tokenizer]
        if videos:
            parts.append(getattr(transformers, videos)(patch_size=7))
        else:
            tokenizer.image_token, tokenizer.image_token_id = (
                marks[1],
                tokenizer.convert_tokens_to_ids(marks[1]),
            )
        template = TURNS.replace("@IMAGE@", "".join(marks[:3]))
        getattr(transformers, processor)(*parts, chat_template=template).save_pretrained(folder)
        if not videos:
            file = folder / "tokenizer_config.json"
            named = {"extra_special_tokens": {"image_token": marks[1]}}
            file.write_text(json.dumps({**read_json(file), **named}))

    return save


def _video_llama(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    size = {"shortest_edge": 2 * 7**2, "longest_edge": 20 * 7**2}
    transformers.VideoLlama3ImageProcessor(patch_size=7, size=size, **STATISTICS).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


PROCESSORS: dict[str, Callable[[Path, PreTrainedTokenizerFast], object]] = {
    "llava": _llava,
    "llava_next": _next,
    "llava_onevision": _onevision,
    "aya_vision": _aya,
    "aya_tiles": _aya_tiles,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "perception_lm": _perception,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "lighton_ocr": _lighton,
    "lfm2_vl": _lfm2,
    "lfm2_patches": _lfm2_patches,
    "hyperclovax": _qwen,
    "hyperclovax3": _qwen,
    "exaone4_5": _qwen,
    "video_llama_3": _video_llama,
}
QWEN_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_GLM_MARKS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")
_qwen2 = _mrope("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2VLProcessor", *QWEN_MARKS)
_qwen3 = _mrope("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", "Qwen3VLProcessor", *QWEN_MARKS)
_glm41 = _mrope("Glm4vImageProcessor", "Glm4vVideoProcessor", "Glm4vProcessor", *_GLM_MARKS)
_glm46 = _mrope("Glm46VImageProcessor", "Glm46VVideoProcessor", "Glm46VProcessor", *_GLM_MARKS)
_paddle = _mrope(
    "PaddleOCRVLImageProcessor",
    "",
    "PaddleOCRVLProcessor",
    *("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video|>"),
)
PROCESSORS |= {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _mrope(
        "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", *QWEN_MARKS
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _glm41),
    **dict.fromkeys(("glm46v", "glm_ocr"), _glm46),
    "paddleocr_vl": _paddle,
}


def whole_config(folder: Path, **overrides: object) -> RunConfig:
    """A run from the whole model in `folder`."""
    content = make_config(folder, **{"data__pack_length": 96, **overrides}).model_dump()
    chosen = {key: content["model"][key] for key in ("trainable", "lora")}
    content["model"] = {
        "pretrained": str(folder),
        "llm": {"dtype": content["model"]["llm"]["dtype"]},
        **chosen,
    }
    return expand_pretrained(RunConfig.model_validate(content))
