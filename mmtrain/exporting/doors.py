"""What each stock class wants in its folder: names of tensors, keys of config.json, its processor's files.

run, encoder --StockDoor--> config.json, names on disk, processor_config.json, preprocessor_config.json
tiles of a sample's images --StockDoor.inputs--> what the stock model takes for them

One class a door; `mmtrain.pretrained.doors` says which runs each takes. Names on disk are those that the published
models of a class have, its loader is asked whether all of them find their place. Every processor is told to make of an
image the tiles and positions of training, and to write nothing around them but what the layout does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.stream.images import ImageTransform
from mmtrain.exporting.vision import OUTER, ExportedEncoder, encoder_for_export, wrapped_timm_encoder
from mmtrain.pretrained.connectors import NEWLINE, image_layout, reduction
from mmtrain.pretrained.doors import DOORS, WHAT_WORKS, Door
from mmtrain.pretrained.families import global_name
from mmtrain.pretrained.layouts import ANYRES_MAX_9, OVERVIEW_NAME, TILE_NAME, TILES, ImageLayout
from mmtrain.pretrained.tiling import Tiling

# A small encoder of the class's own, for trials of the LLM beside it.
_TINY = {
    "model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "image_size": 8, "patch_size": 8,
}  # fmt: skip
_TINY_TIMM = {"img_size": 8, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}


class StockClass:
    """A stock class of transformers that an export fills."""

    decoder_names: str  # what stands before the names of the LLM's decoder in its folder

    def __init__(self, config_class: type[PreTrainedConfig], model_class: type[PreTrainedModel]) -> None:
        self.config_class, self.model_class = config_class, model_class
        self.class_name = model_class.__name__

    def language_name(self, name: str, base: str) -> str:
        """The name of one of the LLM's tensors, which its own class, around `base`, calls `name`; raises UserError."""
        raise NotImplementedError

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling]) -> dict[str, torch.Tensor]:
        """What the stock model takes for the images of one sample, whose tiles are (N, 3, S, S) float32."""
        return {"pixel_values": tiles}


class StockDoor(StockClass):
    """LLaVA's folder; another door says what it has otherwise."""

    encoder_names: ClassVar[str] = "vision_tower."  # what stands before the names of the encoder's tensors
    connector_names: ClassVar[str] = "multi_modal_projector."
    newline_name: ClassVar[str] = "image_newline"
    # Names of transformers 4 too, which version 5 reads.
    decoder_names = "language_model.model."
    head_name: ClassVar[str] = "language_model.lm_head.weight"
    tiny_encoder: ClassVar[Mapping[str, Any]] = _TINY
    image_token_key: ClassVar[str] = "image_token_index"  # in config.json
    video_token_key: ClassVar[str] = "video_token_id"
    image_processor: ClassVar[str] = "LlavaImageProcessor"
    has_pillow: ClassVar[bool] = True  # whether its image processor can resize with Pillow, as training does
    video_processor: ClassVar[str | None] = None  # that its processor cannot do without
    video_token: ClassVar[str | None] = None  # that its processor counts; it must be neither padding nor in a text
    more_tokens: ClassVar[tuple[str, ...]] = ()  # others that its processor adds to the tokenizer

    def __init__(self, facts: Door) -> None:
        model_class = getattr(transformers, f"{facts.name}ForConditionalGeneration")
        super().__init__(getattr(transformers, f"{facts.name}Config"), model_class)
        self.facts = facts
        self.processor_name = f"{facts.name}Processor"

    def language_name(self, name: str, base: str) -> str:
        if not global_name(name).startswith("llm.head."):
            return self.decoder_names + name.removeprefix(base + ".")
        if not name.endswith(".weight"):
            raise UserError(f"the LLM's head has a bias ({name}), and {self.class_name}'s has none; {WHAT_WORKS}")
        return self.head_name

    def connector_name(self, name: str) -> str:
        """The name on disk of one of the connector's tensors, by our module's name."""
        return self.newline_name if name == NEWLINE else self.connector_names + name

    def encoder(self, run: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
        """The run's encoder in the class's own names; `trained` as `encoder_for_export` has it."""
        return encoder_for_export(run, trained)

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        """The class's own keys of config.json."""
        return {
            "image_seq_length": image_layout(run).positions_per_tile,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        """The class's own keys of processor_config.json."""
        return {
            "image_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "num_additional_image_tokens": encoder.prefix_tokens,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """The content of preprocessor_config.json."""
        return {
            "image_processor_type": self.image_processor,
            "processor_class": self.processor_name,
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"height": transform.image_size, "width": transform.image_size},
            "resample": int(Image.Resampling[transform.interpolation.upper()]),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(transform.mean),
            "image_std": list(transform.std),
            **self.own_image_settings(transform, layout),
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """One class serves every fit: it pads to a square of int(255 x mean) first, then resizes, then crops.

        Nothing is left to crop but for center_crop; crop_size is what other software reads the encoder's size from.
        """
        square = {"height": transform.image_size, "width": transform.image_size}
        size = {"shortest_edge": transform.image_size} if transform.fit == "center_crop" else square
        return {"do_pad": transform.fit == "pad", "size": size, "do_center_crop": True, "crop_size": square}

    def video_settings(self, transform: ImageTransform) -> dict[str, Any] | None:
        """The content of video_preprocessor_config.json, for a processor that is made of three parts."""
        if self.video_processor is None:
            return None
        size = {"height": transform.image_size, "width": transform.image_size}
        return {"video_processor_type": self.video_processor, "processor_class": self.processor_name, "size": size}

    def exact_pixels(self, transform: ImageTransform) -> str:
        """Return a line of Python after which `processor` makes of `picture` the pixels of training, to the bit.

        AutoProcessor would hand `backend="pil"` to the tokenizer too, which then makes no masks of answers.
        """
        return 'processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")'

    def load_processor(self, folder: Path, name: str | None = None) -> ProcessorMixin:
        """The processor of a folder, which resizes as training does, if it can; `name`: of another class than its own.

        Not AutoProcessor's: where files name no class, that passes trust_remote_code on to none of a processor's parts.
        """
        stock = getattr(transformers, name or self.processor_name)
        processor = stock.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if self.has_pillow:
            processor.image_processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        return processor

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Names by which the processor asks its tokenizer for tokens."""
        return {}


class LlavaNextDoor(StockDoor):
    """A tile of the whole and those of a grid, whose lines end with a trained newline."""

    image_processor = "LlavaNextImageProcessor"

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        pinpoints = [list(pair) for pair in image_layout(run).pinpoints]
        settings = {"image_grid_pinpoints": pinpoints, "use_image_newline_parameter": True}
        return {**super().config(run, encoder), **settings}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """Nothing is left to crop; crop_size is what transformers 4 reads the tile's size from."""
        square = {"height": transform.image_size, "width": transform.image_size}
        pinpoints = [list(pair) for pair in layout.pinpoints]
        return {"image_grid_pinpoints": pinpoints, "do_pad": True, "do_center_crop": True, "crop_size": square}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling]) -> dict[str, torch.Tensor]:
        """Tiles (images, most tiles, 3, S, S), zeros behind the last of each image, and (height, width) of each."""
        of_images = tiles.split([tiling.tiles for tiling in tilings])
        sizes = torch.tensor([(tiling.height, tiling.width) for tiling in tilings])
        return {"pixel_values": torch.nn.utils.rnn.pad_sequence(of_images, batch_first=True), "image_sizes": sizes}


class LlavaOnevisionDoor(LlavaNextDoor):
    """The same with the rule of 1.1; of several images in a sample each is one square. It has a part for videos."""

    image_processor = "LlavaOnevisionImageProcessor"
    video_processor = "LlavaOnevisionVideoProcessor"
    video_token = "<|video|>"
    video_token_key = "video_token_index"

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {**super().config(run, encoder), "vision_aspect_ratio": ANYRES_MAX_9}

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {
            "image_token": IMAGE_MARK,
            "video_token": self.video_token,
            "num_image_tokens": image_layout(run).positions_per_tile + encoder.prefix_tokens,
            "vision_feature_select_strategy": encoder.select_strategy,
            "vision_aspect_ratio": ANYRES_MAX_9,
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        return {"image_grid_pinpoints": [list(pair) for pair in layout.pinpoints], "do_pad": True}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling]) -> dict[str, torch.Tensor]:
        return {**super().inputs(tiles, tilings), "batch_num_images": torch.tensor([len(tilings)])}


class AyaVisionDoor(StockDoor):
    """One tile without texts around it, N positions exactly; or the tiles of a grid, each behind its name."""

    image_processor = "GotOcr2ImageProcessor"

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        width = run.model.projector.width
        return {
            "downsample_factor": reduction(run.model.projector),
            **({} if width is None else {"alignment_intermediate_size": width}),
            "adapter_layer_norm_eps": 1e-6,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        names = (TILE_NAME, OVERVIEW_NAME) if run.model.vision.layout == TILES else ("", "")
        return {
            "image_token": IMAGE_MARK,
            "img_patch_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "downsample_factor": reduction(run.model.projector),
            "img_size": encoder.image_size,
            **dict.fromkeys(("start_of_img_token", "end_of_img_token", "img_line_break_token"), ""),
            **dict(zip(("tile_token", "tile_global_token"), names, strict=True)),
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """Its processor asks for tiles whatever the file says, of which there then may be one."""
        most = layout.max_tiles if layout.name == TILES else 1
        return {"crop_to_patches": layout.name == TILES, "min_patches": 1, "max_patches": most}


class Idefics3Door(StockDoor):
    """One square between the texts of the layout `idefics3`. Its ViT is SigLIP's; SmolVLM's class computes the same."""

    encoder_names = "model.vision_model."
    connector_names = "model.connector.modality_projection."
    decoder_names = "model.text_model."
    head_name = "lm_head.weight"
    tiny_encoder: ClassVar = {**_TINY, "model_type": "idefics3_vision"}
    image_token_key = "image_token_id"
    image_processor = "Idefics3ImageProcessor"
    more_tokens = ("<fake_token_around_image>", "<end_of_utterance>")

    def encoder(self, run: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
        encoder = encoder_for_export(run, trained)
        if encoder.config["model_type"] != "siglip_vision_model":
            raise UserError(
                f"model.vision.name: {run.model.vision.name} becomes a {encoder.config['model_type']}, and the encoder "
                f"of {self.class_name} is a SigLIP; {WHAT_WORKS}"
            )
        settings = {key: value for key, value in encoder.config.items() if not key.startswith(("vision_", "project"))}
        tensors = {name.removeprefix(OUTER): source for name, source in encoder.tensors.items()}
        kept = {name: source for name, source in tensors.items() if not name.startswith("head.")}
        return replace(encoder, config={**settings, "model_type": "idefics3_vision"}, tensors=kept)

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {"scale_factor": reduction(run.model.projector)}

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {"image_seq_len": image_layout(run).positions_per_tile}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """Its model takes a square of zeros for no image: one that is of the mean colour, if 8 bits can say that."""
        if all((255 * channel).is_integer() for channel in transform.mean):
            raise UserError(
                f"an image of the colour {transform.mean} would be all zeros, which {self.class_name} takes for no "
                f"image; {WHAT_WORKS}"
            )
        return {"do_image_splitting": False, "max_image_size": {"longest_edge": transform.image_size}}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling]) -> dict[str, torch.Tensor]:
        return {"pixel_values": tiles[None]}


class InternVLDoor(AyaVisionDoor):
    """One tile; the tokens around it may be empty, and its processor then writes none."""

    tiny_encoder: ClassVar = {**_TINY, "model_type": "internvl_vision"}
    image_token_key = "image_token_id"
    video_processor = "InternVLVideoProcessor"

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        # -1 is behind the last norm, which some InternViTs have; hidden states before it are counted from 0
        layers = encoder.config["num_hidden_layers"]
        return {
            "image_seq_length": image_layout(run).positions_per_tile,
            "downsample_ratio": 1 / reduction(run.model.projector),
            "projector_hidden_act": "gelu",
            "vision_feature_layer": layers if encoder.feature_layer == -1 else encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {"image_seq_length": image_layout(run).positions_per_tile}

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Its processor looks for videos in texts: padding is in none."""
        around = {"start_image_token": "", "end_image_token": ""}
        return {**around, "context_image_token": IMAGE_MARK, "video_token": tokenizer.pad_token}


class PerceptionLMDoor(StockDoor):
    """One tile; timm's own encoder, by its own names."""

    encoder_names = "model.vision_tower."
    connector_names = "model.multi_modal_projector."
    decoder_names = "model.language_model."
    head_name = "lm_head.weight"
    tiny_encoder: ClassVar = {
        "model_type": "timm_wrapper",
        "architecture": "vit_tiny_patch16_224",
        "model_args": _TINY_TIMM,
    }
    image_token_key = "image_token_id"
    image_processor = "PerceptionLMImageProcessor"
    has_pillow = False
    video_processor = "PerceptionLMVideoProcessor"
    video_token = "<|video|>"

    def encoder(self, run: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
        return wrapped_timm_encoder(run, trained)

    def config(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {
            "vision_use_cls_token": bool(encoder.prefix_tokens),
            "projector_pooling_ratio": reduction(run.model.projector),
        }

    def processor(self, run: RunConfig, encoder: ExportedEncoder) -> dict[str, Any]:
        return {"patch_size": encoder.patch_size, "pooling_ratio": reduction(run.model.projector)}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        if transform.interpolation not in ("bilinear", "bicubic"):
            raise UserError(
                f"the encoder's pictures are resized by the filter {transform.interpolation}, which torchvision, all "
                f"that {self.processor_name} resizes with, does not have; {WHAT_WORKS}"
            )
        return {"vision_input_type": "one tile", "tile_size": transform.image_size, "max_num_tiles": 1}

    def exact_pixels(self, transform: ImageTransform) -> str:
        size, by = (transform.image_size, transform.image_size), transform.interpolation.upper()
        white = 'Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))'
        return f'picture = {white}.convert("RGB").resize({size}, Image.Resampling.{by})'

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {"image_token": IMAGE_MARK, "video_token": self.video_token}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling]) -> dict[str, torch.Tensor]:
        return {"pixel_values": tiles[:, None]}


STOCK_DOORS: dict[str, type[StockDoor]] = {
    "Llava": StockDoor,
    "LlavaNext": LlavaNextDoor,
    "LlavaOnevision": LlavaOnevisionDoor,
    "AyaVision": AyaVisionDoor,
    "Idefics3": Idefics3Door,
    "InternVL": InternVLDoor,
    "PerceptionLM": PerceptionLMDoor,
}  # by Door.name


def door_of(facts: Door) -> StockDoor:
    """The stock class of a door, and what its folder must hold."""
    return STOCK_DOORS[facts.name](facts)


def door_of_type(model_type: str) -> StockDoor:
    """The same for a door's model_type in a config.json."""
    return next(door_of(facts) for facts in DOORS if facts.model_type == model_type)
