"""HyperCLOVAXVisionV2, VideoLlama3, Exaone4_5: all images' patches in one sequence, their grids.

| class                | encoder                             | connector                          |
|----------------------|-------------------------------------|------------------------------------|
| HyperCLOVAXVisionV2  | Qwen3.5's, Qwen3-VL's, Qwen2.5-VL's | linear, behind the encoder's merger|
| VideoLlama3          | its own                             | mlp2x_gelu                         |
| Exaone4_5            | its own                             | patch_merger_rms                   |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmtrain.facts.models import Models
from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.native import FRAMES, Native, PatchOrder, patch_rows
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.stock.stock_class import ExportedEncoder, Inputs, NestedClass, Settings, of_images
from mmtrain.stock.stock_folder import CONFIG, IMAGES, Keys, StockFolder, unfit

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from mmtrain.data.stream.images import ImageTransform


class HyperCLOVAXVisionV2(NestedClass):
    """HyperCLOVA X Think's class, with any LLM; its head multiplies logits by `logits_scaling`."""

    name = "HyperCLOVAXVisionV2"
    model_type = "hyperclovax_vision_v2"
    connectors = ("linear",)
    renamed: ClassVar = {"linear_1": ""}
    factors = (1,)
    merger = True
    last_block = True
    layouts = (Native.name,)
    encoders = (
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen3VLVisionModel",
        "Qwen3VLMoeVisionModel",
        "Qwen3_5VisionModel",
        "Qwen3_5MoeVisionModel",
    )
    encoder_names = "model.vision_model."
    connector_names = "model.vision_projector."
    tiny_encoder: ClassVar = {
        "model_type": "qwen2_5_vl_vision",
        "hidden_size": 8,
        "intermediate_size": 8,
        "depth": 1,
        "num_heads": 1,
        "patch_size": 8,
        "out_hidden_size": 8,
    }
    image_processor = "Qwen2VLImageProcessor"
    video_processor = "Qwen2VLVideoProcessor"
    video_token = "<|video_pad|>"
    text_keys: ClassVar = {"logits_scaling": 1.0}  # of text_config
    merge_size = 2  # of its processor
    block = 2  # patches a side that stand together
    frames = 1  # that its processor counts when it bounds pixels
    default_bounds = (56 * 56, 28 * 28 * 1280)  # in pixels
    patches: ClassVar[PatchOrder] = "c t dy dx"

    def text_config(self, language: Settings) -> Settings:
        return {**language, **self.text_keys}

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {}

    def own_image_settings(self, transform: ImageTransform, layout: Native) -> Settings:
        pixels = self.frames * layout.tile_size**2
        return {
            "size": {
                "shortest_edge": layout.min_positions * pixels,
                "longest_edge": layout.max_positions * pixels,
            },
            "patch_size": layout.patch_size,
            "merge_size": self.merge_size,
        }

    def video_settings(self, transform: ImageTransform) -> Settings | None:
        if self.video_processor is None:
            return None
        return {
            "video_processor_type": self.video_processor,
            "processor_class": self.processor_name,
        }

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        named = {
            "image_token": LAYOUTS[self.layouts[0]].image_token,
            "video_token": self.video_token,
        }
        return {key: token for key, token in named.items() if token}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> Inputs:
        """Return the patches (P, values) of all images, and each grid (1, rows, columns)."""
        import torch

        side = layout.factor
        patches = []
        grids = []
        for cells, tiling in zip(of_images(tiles, tilings), tilings, strict=True):
            cell_grid = (tiling.rows, tiling.columns)
            patches.append(patch_rows(cells, cell_grid, side, self.block, self.patches))
            grids.append((1, side * tiling.rows, side * tiling.columns))
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}

    def read(self, folder: StockFolder) -> Keys:
        side = folder.vision.patch_size
        needed = {"patch_size": side, "merge_size": self.merge_size, "temporal_patch_size": 1}
        if "t" in self.patches:
            needed["temporal_patch_size"] = FRAMES
        folder.equal(IMAGES, folder.images, needed, {"patch_size": 14})
        text = {"logits_scaling": 1.0, **(folder.config.get("text_config") or {})}
        if not self.mrope and self.text_config(text) != text:
            raise unfit(CONFIG, "text_config.logits_scaling", text["logits_scaling"], "1")
        bounds = self.pixel_bounds(folder.images)
        keys = folder.cells(bounds, self.frames * (self.merge_size * side) ** 2)
        if self.factors != (1,):
            keys["factor"] = self.factors[0]
        return keys

    def pixel_bounds(self, images: Settings) -> list[Any]:
        """Return the least and most pixels of an image.

        Their older names win; GLM's processors do not know those.
        """
        least, most = self.default_bounds
        size = images.get("size", {"shortest_edge": least, "longest_edge": most})
        if not isinstance(size, dict):
            raise unfit(
                IMAGES, "size", size, "shortest_edge and longest_edge, in pixels of the whole image"
            )
        bounds = []
        for key, older in ("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"):
            bound = images.get(older)
            if bound is None or self.frames > 1:
                bound = size.get(key)
            bounds.append(bound)
        return bounds


class VideoLlama3(HyperCLOVAXVisionV2):
    """VideoLLaMA 3 on images, each of whose patches is a position."""

    name = "VideoLlama3"
    model_type = "video_llama_3"
    connectors = ("mlp2x_gelu",)
    renamed: ClassVar = {"linear_1": "0", "linear_2": "2"}
    merger = False
    final_norm = True
    encoders = ("VideoLlama3VisionModel",)
    connector_names = "model.projector.readout."
    tiny_encoder: ClassVar = {**NestedClass.tiny_encoder, "model_type": "video_llama_3_vision"}
    image_processor = "VideoLlama3ImageProcessor"
    video_processor = "VideoLlama3VideoProcessor"
    text_keys: ClassVar = {}
    merge_size = block = 1
    patches = "c dy dx"

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> Inputs:
        found = super().inputs(tiles, tilings, layout)
        return {**found, "image_merge_sizes": found["image_grid_thw"].new_ones(len(tilings))}


class Exaone45(HyperCLOVAXVisionV2):
    """EXAONE 4.5's class, with any LLM; its connector is the encoder's merger, trained."""

    name = "Exaone4_5_"
    model_type = "exaone4_5"
    connectors = ("patch_merger_rms",)
    renamed: ClassVar = {"norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"}
    factors = (2,)
    merger = False
    encoders = ("Exaone4_5_VisionModel",)
    encoder_names = "model.visual."
    connector_names = "model.visual.merger."
    tiny_encoder: ClassVar = {
        **HyperCLOVAXVisionV2.tiny_encoder,
        "model_type": "exaone4_5_vision",
        "num_key_value_heads": 1,
    }
    text_keys: ClassVar = {}

    def adapt_encoder(self, models: Models, encoder: ExportedEncoder) -> ExportedEncoder:
        return encoder.without("merger.", out_hidden_size=models.published_llm.hidden_size)
