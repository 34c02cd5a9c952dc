"""Classes whose LLM takes positions in rows and columns (M-RoPE), each with an encoder and a text model of its own.

| class                           | connector                                     | layout       |
|---------------------------------|-----------------------------------------------|--------------|
| Qwen2VL, Qwen3_5, Qwen3_5Moe    | qwen_merger                                   | qwen_vl      |
| Qwen2_5_VL                      | patch_merger_rms                              | qwen_vl      |
| Qwen3VL, Qwen3VLMoe             | qwen_merger_deepstack                         | qwen_vl      |
| Glm4v, Glm46V, Glm4vMoe, GlmOcr | glm_merger, behind the encoder's final norm   | glm_v        |
| PaddleOCRVL                     | patch_merger, behind the encoder's final norm | paddleocr_vl |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.families import MROPE_MODELS
from mmtrain.models.facts.shapes import VisionShape, llm_shape
from mmtrain.models.layouts.layout import Tiling
from mmtrain.models.layouts.mrope import GlmV, PaddleOcrVl, QwenVl
from mmtrain.models.layouts.native import Native, patch_rows
from mmtrain.stock.grids import HyperCLOVAXVisionV2
from mmtrain.stock.stock_class import ExportedEncoder
from mmtrain.stock.stock_folder import Keys, StockFolder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_ENDS = {"start": "begin", "end": "end"}
_BESIDE = ("merger.", "deepstack_merger_list.", "downsample.")  # of an encoder's tensors: the connector's


class Qwen2VL(HyperCLOVAXVisionV2):
    """Qwen2-VL; other classes say what they have otherwise."""

    name = "Qwen2VL"
    model_type = "qwen2_vl"
    mrope = True
    connectors = ("qwen_merger",)
    renamed: ClassVar = {"norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"}
    factors = (2,)
    merger = False
    layouts = (QwenVl.name,)
    encoders = ("Qwen2VisionTransformerPretrainedModel",)
    encoder_names = "visual."
    connector_names = "visual.merger."
    decoder_names = "model."
    mark_keys: ClassVar = {f"vision_{end}_token_id": f"<|vision_{end}|>" for end in ("start", "end")}
    tiny_encoder: ClassVar = {
        "depth": 1, "hidden_size": 8, "embed_dim": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 8,
        "num_position_embeddings": 4, "deepstack_visual_indexes": [],
    }  # fmt: skip
    text_models: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl")  # MROPE_MODELS' classes with its text model
    width_key: ClassVar[str] = "hidden_size"  # in vision_config: the LLM's width
    frames: ClassVar[int] = 1  # that its processor counts when it bounds pixels

    def needs(self, config: RunConfig, shape: VisionShape) -> Iterator[str]:
        yield from super().needs(config, shape)
        family = llm_shape(config.model.llm.path).model_type
        if MROPE_MODELS.get(family) not in self.text_models:
            fitting = " or ".join(name for name, whole in MROPE_MODELS.items() if whole in self.text_models)
            yield f"a {fitting} LLM ({config.model.llm.path} is {family})"

    def text_config(self, language: dict[str, Any]) -> dict[str, Any]:
        return {**language, "model_type": f"{self.model_type}_text"}

    def adapt_encoder(self, run: RunConfig, encoder: ExportedEncoder) -> ExportedEncoder:
        kept = {name: source for name, source in encoder.tensors.items() if not name.startswith(_BESIDE)}
        width = {self.width_key: llm_shape(run.model.llm.path).hidden_size}
        return replace(encoder, tensors=kept, config={**encoder.config, **width})

    def own_image_settings(self, transform: Any, layout: Native) -> dict[str, Any]:
        settings = super().own_image_settings(transform, layout)
        return {**settings, "size": {edge: self.frames * pixels for edge, pixels in settings["size"].items()}}

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {}

    def refuse_other_language(self, folder: StockFolder) -> None:
        """Its LLM is its own."""

    def cell_pixels(self, folder: StockFolder) -> int:
        return self.frames * super().cell_pixels(folder)


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL."""

    name = "Qwen2_5_VL"
    model_type = "qwen2_5_vl"
    connectors = ("patch_merger_rms",)
    encoders = ("Qwen2_5_VisionTransformerPretrainedModel",)
    width_key = "out_hidden_size"


class Qwen35(Qwen2VL):
    """Qwen3.5."""

    name = "Qwen3_5"
    model_type = "qwen3_5"
    processor_name = "Qwen3VLProcessor"
    renamed: ClassVar = {"linear_1": "linear_fc1", "linear_2": "linear_fc2"}
    encoders = ("Qwen3_5VisionModel",)
    encoder_names = "model.visual."
    connector_names = "model.visual.merger."
    decoder_names = "model.language_model."
    text_models = ("qwen3_5",)
    video_processor = "Qwen3VLVideoProcessor"
    width_key = "out_hidden_size"


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts."""

    name = "Qwen3_5Moe"
    model_type = "qwen3_5_moe"
    encoders = ("Qwen3_5MoeVisionModel",)
    text_models = ("qwen3_5_moe",)


class Qwen3VL(Qwen35):
    """Qwen3-VL."""

    name = "Qwen3VL"
    model_type = "qwen3_vl"
    connectors = ("qwen_merger_deepstack",)
    encoders = ("Qwen3VLVisionModel",)
    text_models = ("qwen3_vl",)

    def connector_name(self, name: str) -> str:
        if not name.startswith("deepstack."):
            return super().connector_name(name)
        _, number, module, kind = name.split(".")
        return f"{self.encoder_names}deepstack_merger_list.{number}.{self.renamed.get(module, module)}.{kind}"


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with experts."""

    name = "Qwen3VLMoe"
    model_type = "qwen3_vl_moe"
    encoders = ("Qwen3VLMoeVisionModel",)
    text_models = ("qwen3_vl_moe",)


class Glm4v(Qwen35):
    """GLM-4.1V, whose processor bounds the pixels of both frames that an image becomes."""

    name = "Glm4v"
    model_type = "glm4v"
    processor_name = "Glm4vProcessor"
    connectors = ("glm_merger",)
    final_norm = True
    layouts = (GlmV.name,)
    encoders = ("Glm4vVisionModel",)
    text_models = ("glm4v",)
    mark_keys: ClassVar = {f"image_{end}_token_id": f"<|{name}_of_image|>" for end, name in _ENDS.items()}
    image_processor = "Glm4vImageProcessor"
    video_processor = "Glm4vVideoProcessor"
    video_token = "<|video|>"
    frames = 2

    def connector_name(self, name: str) -> str:
        if name.startswith("downsample."):
            return self.encoder_names + name
        return self.connector_names + name.removeprefix("mlp.")

    def text_config(self, language: dict[str, Any]) -> dict[str, Any]:
        return language

    def read(self, folder: StockFolder) -> Keys:
        inner = next(
            (shape[0] for name, shape in folder.tensors.items() if name.endswith("merger.up_proj.weight")), None
        )
        return {**super().read(folder), "width": None if inner == 3 * llm_shape(folder.path).hidden_size else inner}


class Glm46V(Glm4v):
    """GLM-4.6V."""

    name = "Glm46V"
    model_type = "glm46v"
    processor_name = "Glm46VProcessor"
    image_processor = "Glm46VImageProcessor"
    video_processor = "Glm46VVideoProcessor"


class Glm4vMoe(Glm4v):
    """GLM-4.5V."""

    name = "Glm4vMoe"
    model_type = "glm4v_moe"
    encoders = ("Glm4vMoeVisionModel",)
    text_models = ("glm4v_moe",)


class GlmOcr(Glm46V):
    """GLM-OCR."""

    name = "GlmOcr"
    model_type = "glm_ocr"
    encoders = ("GlmOcrVisionModel",)
    text_models = ("glm_ocr",)


class PaddleOCRVL(Qwen2VL):
    """PaddleOCR-VL, whose patches stand row by row."""

    name = "PaddleOCRVL"
    model_type = "paddleocr_vl"
    connectors = ("patch_merger",)
    renamed: ClassVar = {"norm": "pre_norm"}
    final_norm = True
    layouts = (PaddleOcrVl.name,)
    encoders = ("PaddleOCRVisionModel",)
    connector_names = "mlp_AR."
    text_models = ("paddleocr_vl",)
    mark_keys: ClassVar = {f"vision_{end}_token_id": f"<|IMAGE_{end.upper()}|>" for end in ("start", "end")}
    image_processor = "PaddleOCRVLImageProcessor"
    video_processor = None
    video_token = None
    patches = "c dy dx"

    def adapt_encoder(self, run: RunConfig, encoder: ExportedEncoder) -> ExportedEncoder:
        return encoder

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> dict[str, torch.Tensor]:
        import torch

        found, side, size = super().inputs(tiles, tilings, layout), layout.factor, layout.patch_size
        of_images = zip(tiles.split([tiling.tiles for tiling in tilings]), tilings, strict=True)
        rows = [patch_rows(cells, (one.rows, one.columns), side, 1, self.patches) for cells, one in of_images]
        return {**found, "pixel_values": torch.cat(rows).view(-1, 3, size, size)}
