"""A stock class of transformers: runs that it computes, the files of its folder, how they are read.

planner:  Models --needs--> what a run would have to change, or nothing
export:   run, ExportedEncoder --config, processor, image_settings, names--> the files of a folder
          tiles of a sample's images --inputs--> what the stock model takes for them
init:     StockFolder --read--> keys of model.vision, model.projector and data.image_fit

One file a class. Names on disk are those of the class's published models. Every processor must make
of an image the tiles and positions of training, and write around them only what the image layout
does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmtrain.base.errors import UserError
from mmtrain.connectors import NEWLINE
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.encoders import FAMILIES, TESTED_TRANSFORMERS, TIMM
from mmtrain.facts.families import canonical_name
from mmtrain.facts.models import Models
from mmtrain.facts.settings import Settings
from mmtrain.facts.shapes import VisionShape, llm_shape
from mmtrain.facts.timm_models import form_of
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.layouts.registry import LAYOUT_KEYS, LAYOUTS
from mmtrain.layouts.square import Square
from mmtrain.stock.stock_folder import CONFIG, Keys, StockFolder, unfit

if TYPE_CHECKING:
    import torch
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

    from mmtrain.data.stream.images import ImageTransform

# What a refusal to export a whole model says of the formats that need less.
WHAT_WORKS = (
    "--format safetensors exports any projector, --format llava a linear or mlp2x_gelu one trained "
    "alone, on features before the encoder's last norm"
)
Inputs = dict[str, "torch.Tensor"]
INTERN_VIT = "InternVLVisionModel"
# Python of a card: `picture` in RGB, what is transparent in it laid on white, as in training.
ON_WHITE = (
    'Image.alpha_composite(Image.new("RGBA", picture.size, "white"), '
    'picture.convert("RGBA")).convert("RGB")'
)
# By data.resize: transformers' backend, and what files add to the name of an image processor.
# transformers 4 loads the backend of that name; 5 takes either name for both.
BACKENDS = {"pillow": "pil", "torchvision": "torchvision"}
SUFFIXES = {"pillow": "", "torchvision": "Fast"}
# what comes before a CLIP or SigLIP tensor's name, depending on who saved it
OUTER = "vision_model."


@dataclass(frozen=True)
class ExportedEncoder:
    """Settings and tensors of the vision encoder in a folder."""

    config: Settings  # `vision_config` of config.json, with its model_type
    # TensorSource by name on disk, without what the class puts before it
    tensors: Mapping[str, Any]
    # `vision_feature_layer`; -1 is the last block's output, without the final norm
    feature_layer: int
    patch_size: int  # pixels a side
    # `num_additional_image_tokens` of the processor: 1 with a class token, else 0
    prefix_tokens: int

    @property
    def select_strategy(self) -> str:
        """`vision_feature_select_strategy`: "default" drops the first token."""
        return "default" if self.prefix_tokens else "full"

    def without(self, beginnings: str | tuple[str, ...], **settings: Any) -> ExportedEncoder:
        """Return it without tensors of these beginnings, with more settings in its config."""
        names = [name for name in self.tensors if not name.startswith(beginnings)]
        kept = {name: self.tensors[name] for name in names}
        return replace(self, tensors=kept, config={**self.config, **settings})


def square_size(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def resize_of(settings: Mapping[str, Any]) -> str:
    """Return the value of data.resize that an image processor's settings stand for."""
    if str(settings.get("image_processor_type")).endswith(SUFFIXES["torchvision"]):
        return "torchvision"
    return "pillow"


def of_images(tiles: torch.Tensor, tilings: Sequence[Tiling]) -> tuple[torch.Tensor, ...]:
    """Split the tiles of a sample by its images."""
    return tiles.split([tiling.tiles for tiling in tilings])


def _stock(name: str) -> Any:
    """Find a name of transformers. Raises UserError for one that the installed version lacks."""
    import transformers

    if (found := getattr(transformers, name, None)) is None:
        raise UserError(
            f"transformers {transformers.__version__} has no {name}. "
            f"Install version {TESTED_TRANSFORMERS}, which has it"
        )
    return found


class ExportedClass:
    """A class of transformers that an export fills."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    decoder_names: str  # what stands before the names of the LLM's decoder in its folder
    mrope = False  # whether its LLM uses M-RoPE

    @property
    def class_name(self) -> str:
        return self.model_class.__name__

    def language_name(self, name: str, base: str) -> str:
        """Return the name on disk of an LLM's tensor `name`, of its own class around `base`."""
        return name

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: ImageLayout) -> Inputs:
        """Return the stock model's inputs for a sample's images, of tiles (N, 3, S, S) float32."""
        return {"pixel_values": tiles}


class StockClass(ExportedClass):
    """A multimodal class of transformers: LLaVA's values, which another class overrides."""

    name: ClassVar[str]  # Llava has LlavaForConditionalGeneration, LlavaConfig and LlavaProcessor
    model_type: ClassVar[str]  # in config.json

    # ---- which runs it computes
    connectors: ClassVar[tuple[str, ...]]  # values of model.projector.type
    final_norm = False  # whether it takes features behind the encoder's last norm
    merger = False  # whether the encoder's own merger runs before the connector
    last_block = False  # whether it takes the last block's output alone
    # whether its processor bounds the longest edge, not image tokens
    bounds_edge = False
    layouts: ClassVar[tuple[str, ...]] = (Square.name,)  # values of model.vision.layout
    # values of data.image_fit that its processor can make of one square
    fits: ClassVar[tuple[str, ...]] = ("resize",)
    # values of model.projector.factor, 1 for none
    factors: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    encoders: ClassVar[tuple[str, ...]] = ()  # kinds that it takes; all where none is named
    not_encoders: ClassVar[tuple[str, ...]] = ()  # kinds that it loads and cannot run
    misplaced: ClassVar[frozenset[int]] = frozenset()  # patches a side that it places wrongly
    largest_grid: ClassVar[int | None] = None  # patches a side up to which `misplaced` is known
    # model_type of classes that compute the same; a run may begin with theirs
    also: ClassVar[tuple[str, ...]] = ()
    # model_type of encoders in its folders that no family here has
    own_encoders: ClassVar[tuple[str, ...]] = ()

    # ---- its folder
    # what stands before the names of the encoder's tensors
    encoder_names = "vision_tower."
    connector_names = "multi_modal_projector."
    # modules of the connector that have other names on disk
    renamed: ClassVar[Mapping[str, str]] = {}
    decoder_names = "language_model.model."  # of transformers 4 too; version 5 reads it
    head_name = "language_model.lm_head.weight"
    # A small encoder of the class's own, for trials of the LLM beside it.
    tiny_encoder: ClassVar[Mapping[str, Any]] = {
        "model_type": "clip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 8,
    }
    image_token_key = "image_token_index"  # in config.json
    video_token_key = "video_token_id"
    mark_keys: ClassVar[Mapping[str, str]] = {}  # others in config.json, and their texts
    image_processor = "LlavaImageProcessor"
    # values of data.resize that its image processor has a backend for
    backends: ClassVar[tuple[str, ...]] = tuple(BACKENDS)
    # whether its processor lets the tokenizer begin a text
    adds_special_tokens = True
    video_processor: ClassVar[str | None] = None  # that its processor cannot do without
    # that its processor counts; it must be neither padding nor in a text
    video_token: ClassVar[str | None] = None
    more_tokens: ClassVar[tuple[str, ...]] = ()  # others that its processor adds to the tokenizer

    @property
    def model_types(self) -> tuple[str, ...]:
        """model_type of folders that hold what it computes."""
        return (self.model_type, *self.also)

    @property
    def is_native(self) -> bool:
        """Whether it takes images of any size."""
        return any(LAYOUTS[name].attends_across for name in self.layouts)

    @property
    def class_name(self) -> str:
        return f"{self.name}ForConditionalGeneration"

    @property
    def processor_name(self) -> str:
        return f"{self.name}Processor"

    @cached_property
    def config_class(self) -> type[PreTrainedConfig]:  # type: ignore[override]
        return _stock(f"{self.name}Config")

    @cached_property
    def model_class(self) -> type[PreTrainedModel]:  # type: ignore[override]
        return _stock(self.class_name)

    def needs(self, models: Models) -> Iterator[str]:
        """Yield the changes that a run with one of its connectors would need, and why."""
        vision = models.section.vision
        factor = models.factor
        if vision.final_norm != self.final_norm:
            place = "before"
            if self.final_norm:
                place = "after"
            yield (
                f"model.vision.final_norm={str(self.final_norm).lower()} (its "
                f"features come from {place} that norm)"
            )
        layout = LAYOUTS[self.layouts[0]]
        if vision.layout in self.layouts:
            layout = LAYOUTS[vision.layout]
        else:
            yield f"model.vision.layout={' or '.join(self.layouts)} (as its processor writes)"
        fits = self.fits
        if layout.is_sized:
            fits = ("null",)
        if (models.image_fit or "null") not in fits:
            yield (
                f"data.image_fit={' or '.join(fits)} (its processor cannot do {models.image_fit})"
            )
        if factor not in self.factors:
            factors = " or ".join(map(str, self.factors))
            yield f"model.projector.factor={factors} (it does not support {factor})"
        if vision.merger != self.merger:
            yield f"model.vision.merger={str(self.merger).lower()} (its class has it so)"
        if (self.last_block or self.final_norm) and vision.select_layer != -1:
            yield "model.vision.select_layer=-1 (it takes the last block's output)"
        if layout.attends_across and self.bounds_edge != (vision.longest_edge is not None):
            bounds = "=null (its processor bounds image tokens)"
            if self.bounds_edge:
                bounds = " (its processor bounds that)"
            yield f"model.vision.longest_edge{bounds}"
        if unfit := self.unfit_encoder(vision.name, models.published_vision):
            yield f"another model.vision.name ({unfit})"
        if needed := self.unfit_llm(models.section.llm.path):
            yield needed

    def unfit_llm(self, path: str) -> str:
        """Return the LLM that the class takes instead of the one in `path`; "": it takes that."""
        return ""

    def unfit_encoder(self, name: str, vision: VisionShape) -> str:
        """Return the reason why the class does not compute with the encoder `name`; "": it does."""
        kind = vision.family.model
        side = math.isqrt(vision.patches_per_image)
        if vision.family.native is not None and not self.is_native:
            return f"{name} takes images of any size, but its class makes squares of them"
        if vision.prefix_tokens > 1:
            return (
                f"{name} has {vision.prefix_tokens} tokens before its patches, "
                "but it reads all except a class token as patches"
            )
        if kind == TIMM and TIMM not in self.encoders:
            shapes = {p.name.removeprefix("vision."): p.shape for p in vision.parameters}
            form = form_of(shapes, final_norm=self.final_norm)
            if isinstance(form, str):
                return f"{name} {form}, unlike every stock encoder"
            kind = FAMILIES[form.model_type].model
        if self.encoders and kind not in self.encoders:
            return f"its encoder is {' or '.join(self.encoders)}, but {name} is or becomes {kind}"
        if kind in self.not_encoders:
            return f"its class divides image_size, which is a list in the config of {kind}"
        if self.largest_grid and (side > self.largest_grid or side in self.misplaced):
            return f"{name} has {side} x {side} patches, which its class puts in wrong places"
        return ""

    def language_name(self, name: str, base: str) -> str:
        if not canonical_name(name).startswith("llm.head."):
            return self.decoder_names + name.removeprefix(base + ".")
        if not name.endswith(".weight"):
            raise UserError(
                f"the LLM's head has a bias ({name}), but {self.class_name}'s has none; "
                f"{WHAT_WORKS}"
            )
        return self.head_name

    def connector_name(self, name: str) -> str:
        """Return the name on disk of one of the connector's tensors, by our module's name."""
        if name == NEWLINE:
            return name
        module, _, rest = name.partition(".")
        return self.connector_names + f"{self.renamed.get(module, module)}.{rest}".lstrip(".")

    def text_config(self, language: Settings) -> Settings:
        """Return `text_config`, of the LLM's own configuration."""
        return language

    def adapt_encoder(self, models: Models, encoder: ExportedEncoder) -> ExportedEncoder:
        """Return the encoder in the class's own names and settings.

        Raises UserError for one that it does not take.
        """
        return encoder

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        """Return the class's own keys of config.json."""
        return {
            "image_seq_length": models.layout.positions_per_tile,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        """Return the class's own keys of processor_config.json."""
        return {
            "image_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "num_additional_image_tokens": encoder.prefix_tokens,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        """Return the content of preprocessor_config.json."""
        from PIL import Image

        return {
            "image_processor_type": self.image_processor + SUFFIXES[transform.resize],
            "processor_class": self.processor_name,
            "do_convert_rgb": True,
            "do_resize": True,
            "size": square_size(transform.image_size),
            "resample": int(Image.Resampling[transform.interpolation.upper()]),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(transform.mean),
            "image_std": list(transform.std),
            **self.own_image_settings(transform, layout),
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        """Return the class's own keys of preprocessor_config.json.

        LLaVA's pads to a square of int(255 x mean), resizes, then crops, which does nothing but for
        center_crop.
        """
        square = square_size(transform.image_size)
        size = square
        if transform.fit == "center_crop":
            size = {"shortest_edge": transform.image_size}
        return {
            "do_pad": transform.fit == "pad",
            "size": size,
            "do_center_crop": True,
            "crop_size": square,
        }

    def video_settings(self, transform: ImageTransform) -> Settings | None:
        """Return the content of video_preprocessor_config.json, for a processor of three parts."""
        if self.video_processor is None:
            return None
        return {
            "video_processor_type": self.video_processor,
            "processor_class": self.processor_name,
            "size": square_size(transform.image_size),
        }

    def load_processor(self, folder: Path) -> ProcessorMixin:
        """Load a folder's processor, which resizes as training does if it can.

        AutoProcessor, where files name no class, passes trust_remote_code on to none of a
        processor's parts.
        """
        import transformers

        processor = _stock(self.processor_name).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        resize = resize_of(vars(processor.image_processor))
        if resize in self.backends:
            processor.image_processor = transformers.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend=BACKENDS[resize]
            )
        return processor

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Return names by which the processor asks its tokenizer for tokens."""
        return {}

    def keys(self, folder: StockFolder) -> Keys:
        """Return the keys of model.vision, model.projector and data.image_fit for a folder."""
        llm = llm_shape(folder.path)
        folder.check()
        keys = {
            "final_norm": self.final_norm,
            "merger": self.merger,
            "layout": self.layouts[0],
            "factor": None,
            "width": None,
            "select_layer": -1,
            "type": self.connectors[0],
            "image_fit": "resize",
            **dict.fromkeys(LAYOUT_KEYS),
            **self.read(folder),
        }
        newlines = {NEWLINE, f"model.{NEWLINE}"}
        if LAYOUTS[keys["layout"]].has_newlines and not newlines & folder.tensors.keys():
            raise UserError(
                f"its weights hold no {NEWLINE}, which ends lines. Download the folder again"
            )
        if keys["width"] == llm.hidden_size:
            keys["width"] = None
        projector = "model.projector"
        section = {"type": projector, "factor": projector, "width": projector, "image_fit": "data"}
        return {f"{section.get(key, 'model.vision')}.{key}": value for key, value in keys.items()}

    def read(self, folder: StockFolder) -> Keys:
        """Return the keys, by their last name, that a folder has other than `keys` begins with."""
        raise NotImplementedError

    def factor(self, folder: StockFolder, key: str, value: Any = None) -> int | None:
        """Return model.projector.factor; None for 1, which a second connector of the class has.

        `value` is that of the folder's `key`, 2 where it has none.
        """
        said = folder.config.get(key)
        if value is None:
            value = folder.config.get(key, 2)
        factors = [factor for factor in self.factors if factor > 1 or len(self.connectors) > 1]
        if type(value) is not int or value not in factors:
            raise unfit(CONFIG, key, said, f"a factor of {', '.join(map(str, factors))}")
        return None if value == 1 else value


class NestedClass(StockClass):
    """A class whose folders name its parts below `model.`, and the head beside it."""

    encoder_names = "model.vision_tower."
    connector_names = "model.multi_modal_projector."
    decoder_names = "model.language_model."
    head_name = "lm_head.weight"
    image_token_key = "image_token_id"

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {}
