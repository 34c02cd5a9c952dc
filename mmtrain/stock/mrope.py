"""Classes whose LLM uses M-RoPE, each with an encoder and a text model of its own.

| class                           | connector                                     | layout       |
|---------------------------------|-----------------------------------------------|--------------|
| Qwen2VL, Qwen3_5, Qwen3_5Moe    | qwen_merger                                   | qwen_vl      |
| Qwen2_5_VL                      | patch_merger_rms                              | qwen_vl      |
| Qwen3VL, Qwen3VLMoe             | qwen_merger_deepstack                         | qwen_vl      |
| Glm4v, Glm46V, Glm4vMoe, GlmOcr | glm_merger, behind the encoder's final norm   | glm_v        |
| PaddleOCRVL                     | patch_merger, behind the encoder's final norm | paddleocr_vl |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.families import MROPE_MODELS
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import llm_shape
from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.mrope import GlmV, PaddleOcrVl, QwenVl
from mmtrain.layouts.native import Native
from mmtrain.stock.grids import HyperCLOVAXVisionV2
from mmtrain.stock.stock_class import ExportedEncoder, Inputs, Settings
from mmtrain.stock.stock_folder import Keys, StockFolder

if TYPE_CHECKING:
    import torch

# an encoder's tensors that are the connector's
_BESIDE = ("merger.", "deepstack_merger_list.", "downsample.")


class Qwen2VL(HyperCLOVAXVisionV2):
    """Qwen2-VL and Qwen2.5-VL; the other classes override what differs."""

    name = "Qwen2VL"
    model_type = "qwen2_vl"
    mrope = True
    connectors = ("qwen_merger",)
    renamed: ClassVar = {"norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"}
    factors = (2,)
    merger = False
    layouts = (QwenVl.name,)
    encoder_names = "visual."
    connector_names = "visual.merger."
    decoder_names = "model."
    mark_keys: ClassVar = {
        f"vision_{end}_token_id": f"<|vision_{end}|>" for end in ("start", "end")
    }
    tiny_encoder: ClassVar = {
        "depth": 1,
        "hidden_size": 8,
        "embed_dim": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "out_hidden_size": 8,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [],
    }
    # values of MROPE_MODELS, its own first
    text_models = ("qwen2_vl", "qwen2_5_vl")
    width_key = "hidden_size"  # of vision_config: the LLM's width

    @property
    def encoders(self) -> tuple[str, ...]:  # type: ignore[override]
        return (FAMILIES[self.model_type].model,)

    def unfit_llm(self, path: str) -> str:
        family = llm_shape(path).model_type
        if MROPE_MODELS.get(family) in self.text_models:
            return ""
        fitting = [name for name, whole in MROPE_MODELS.items() if whole in self.text_models]
        return f"a {' or '.join(fitting)} LLM ({path} is {family})"

    def text_config(self, language: Settings) -> Settings:
        return {**language, "model_type": f"{self.text_models[0]}_text"}

    def adapt_encoder(self, models: Models, encoder: ExportedEncoder) -> ExportedEncoder:
        return encoder.without(_BESIDE, **{self.width_key: models.published_llm.hidden_size})


class Qwen3VL(Qwen2VL):
    """Qwen3-VL, and Qwen3.5 without DeepStack."""

    name = "Qwen3VL"
    model_type = "qwen3_vl"
    processor_name = "Qwen3VLProcessor"
    connectors = ("qwen_merger_deepstack",)
    renamed: ClassVar = {"linear_1": "linear_fc1", "linear_2": "linear_fc2"}
    encoder_names = "model.visual."
    connector_names = "model.visual.merger."
    decoder_names = "model.language_model."
    text_models = (model_type,)
    video_processor = "Qwen3VLVideoProcessor"
    width_key = "out_hidden_size"

    def connector_name(self, name: str) -> str:
        if not name.startswith("deepstack."):
            return super().connector_name(name)
        _, number, module, kind = name.split(".")
        module = self.renamed.get(module, module)
        return f"{self.encoder_names}deepstack_merger_list.{number}.{module}.{kind}"


class Glm4v(Qwen3VL):
    """GLM-4.1V to GLM-4.6V, GLM-OCR; their processors bound pixels of an image as two frames."""

    name = "Glm4v"
    model_type = "glm4v"
    processor_name = "Glm4vProcessor"
    connectors = ("glm_merger",)
    final_norm = True
    layouts = (GlmV.name,)
    mark_keys: ClassVar = dict(
        zip(("image_start_token_id", "image_end_token_id"), GlmV.around, strict=True)
    )
    image_processor = "Glm4vImageProcessor"
    video_processor = "Glm4vVideoProcessor"
    video_token = "<|video|>"
    text_models = (model_type,)
    default_bounds = (112 * 112, 28 * 28 * 15000)
    frames = 2

    def connector_name(self, name: str) -> str:
        if name.startswith("downsample."):
            return self.encoder_names + name
        return self.connector_names + name.removeprefix("mlp.")

    def read(self, folder: StockFolder) -> Keys:
        keys = super().read(folder)
        width = llm_shape(folder.path).hidden_size
        for name, shape in folder.tensors.items():
            if name.endswith("merger.up_proj.weight") and shape[0] != 3 * width:
                keys["width"] = shape[0]
        return keys


class PaddleOCRVL(Qwen2VL):
    """PaddleOCR-VL, whose patches stand row by row."""

    name = "PaddleOCRVL"
    model_type = "paddleocr_vl"
    connectors = ("patch_merger",)
    renamed: ClassVar = {"norm": "pre_norm"}
    final_norm = True
    layouts = (PaddleOcrVl.name,)
    connector_names = "mlp_AR."
    mark_keys: ClassVar = dict(zip(Qwen2VL.mark_keys, PaddleOcrVl.around, strict=True))
    text_models = (model_type,)
    image_processor = "PaddleOCRVLImageProcessor"
    video_processor = None
    video_token = None
    default_bounds = (384 * 384, 1536 * 1536)
    block = 1
    patches = "c dy dx"

    def adapt_encoder(self, models: Models, encoder: ExportedEncoder) -> ExportedEncoder:
        return encoder

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> Inputs:
        found = super().inputs(tiles, tilings, layout)
        size = layout.patch_size
        return {**found, "pixel_values": found["pixel_values"].view(-1, 3, size, size)}


def _like(kind: type[Qwen2VL], name: str, model_type: str, **other: Any) -> Qwen2VL:
    """Make a variant of `kind` with another name and the given attributes."""
    own = {"name": name, "model_type": model_type, "text_models": (model_type,), **other}
    return type(name, (kind,), own)()


_GLM46 = {
    "image_processor": "Glm46VImageProcessor",
    "video_processor": "Glm46VVideoProcessor",
    "processor_name": "Glm46VProcessor",
}
MROPE_CLASSES = (
    Qwen2VL(),
    _like(
        Qwen2VL,
        "Qwen2_5_VL",
        "qwen2_5_vl",
        connectors=("patch_merger_rms",),
        width_key="out_hidden_size",
        text_models=("qwen2_5_vl", "qwen2_vl"),
    ),
    Qwen3VL(),
    _like(Qwen3VL, "Qwen3VLMoe", "qwen3_vl_moe"),
    _like(Qwen3VL, "Qwen3_5", "qwen3_5", connectors=("qwen_merger",)),
    _like(Qwen3VL, "Qwen3_5Moe", "qwen3_5_moe", connectors=("qwen_merger",)),
    Glm4v(),
    _like(Glm4v, "Glm46V", "glm46v", text_models=("glm4v",), **_GLM46),
    _like(Glm4v, "Glm4vMoe", "glm4v_moe"),
    _like(Glm4v, "GlmOcr", "glm_ocr", **_GLM46),
    PaddleOCRVL(),
)
