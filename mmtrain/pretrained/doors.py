"""Doors: the formats that a run can leave mmtrain through, and what each needs of it, known before it trains.

config --connector, final norm, layout, fit, encoder--> the stock class that computes what is trained, or what to change

An export computes exactly what was trained. A class of transformers fixes much of that by itself: which connector it
has, whether its features come from before or behind the encoder's last norm, how its processor makes a square. The
planner asks for `export.format`, the export itself for what it writes: both get the same answer. What only the modules
of a timm encoder tell (an activation, rotary positions) is known when it is exported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.pretrained.adapters import is_adapter, is_llm_adapter
from mmtrain.pretrained.connectors import reduction
from mmtrain.pretrained.encoders import FAMILIES, family_of
from mmtrain.pretrained.families import BASE_PREFIX, global_name
from mmtrain.pretrained.layouts import ANYRES, ANYRES_MAX_9, SQUARE, TILES, WITH_NEWLINES
from mmtrain.pretrained.model_files import find_model_folder, model_folder, tensor_shapes
from mmtrain.pretrained.parts import HEADS_BY_DEFAULT, PLAIN_HEAD, encoder_config, holds_parts, llm_config, llm_tensors
from mmtrain.pretrained.recorded_shapes import find_recorded
from mmtrain.pretrained.shapes import llm_shape, vision_shape
from mmtrain.pretrained.timm_forms import form_of
from mmtrain.pretrained.tokenizer_files import lacking_marks
from mmtrain.pretrained.vision_files import is_timm_name

Base = Literal["llm", "hf"]  # what adapters are for: the LLM as it was published, or a whole model of its own
LLAVA_CODE = ("linear", "mlp2x_gelu")  # projectors that LLaVA's own code builds
# What a refusal to export a whole model says of the formats that need less.
WHAT_WORKS = (
    "--format safetensors exports any projector, --format llava a linear or mlp2x_gelu one that was trained alone, on "
    "features before the encoder's last norm"
)
TIMM = "timm"  # as a kind of encoder; the others are classes of transformers
_OTHER_EMBEDDING = ("gpt2", "gpt_bigcode", "opt")  # families whose embedding is not where the classes look for it
INTERN_VIT = "InternVLVisionModel"
# Patches a side at which Idefics3's class gives some patches another's position on a CPU (torch.arange rounds by the
# width of its vectors, 1 to 16; `Idefics3VisionEmbeddings.forward`); it was looked at up to 64.
LARGEST_GRID = 64
MISPLACED = frozenset({19, 25, 29, 31, 36, 37, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62})


@dataclass(frozen=True)
class Encoder:
    """What doors ask of a run's encoder."""

    kind: str  # "timm", or its class of transformers
    model: str | None  # class of transformers that it is, or that a timm encoder becomes; None where it has none
    unfit: str  # why it has none
    prefix_tokens: int
    side: int  # patches


@dataclass(frozen=True)
class Door:
    """A stock class of transformers, and which runs it computes."""

    name: str  # of its classes: Llava is LlavaForConditionalGeneration, LlavaConfig and LlavaProcessor
    model_type: str  # in config.json
    connectors: tuple[str, ...]  # values of model.projector.type
    final_norm: bool = False  # whether it takes features behind the encoder's last norm
    layouts: tuple[str, ...] = (SQUARE,)  # values of model.vision.layout
    fits: tuple[str, ...] = ("resize",)  # values of data.image_fit that its processor can make of one square
    factors: tuple[int, ...] = (1, 2, 3, 4)  # values of model.projector.factor, 1 for none
    encoders: tuple[str, ...] = ()  # kinds that it takes; all where none is named
    not_encoders: tuple[str, ...] = ()  # kinds that it loads and cannot run
    largest_grid: int | None = None  # patches a side that it places rightly, but for MISPLACED
    also: tuple[str, ...] = ()  # model_type of other classes that compute the same, of which a run may begin
    own_encoders: tuple[str, ...] = ()  # model_type of an encoder in its folders that no family of `encoders` has

    @property
    def model_types(self) -> tuple[str, ...]:
        """model_type of folders that hold what it computes."""
        return (self.model_type, *self.also)

    def needs(self, config: RunConfig, encoder: Encoder) -> Iterator[str]:
        """What a run whose connector it has would have to change, and why."""
        vision, factor = config.model.vision, reduction(config.model.projector)
        if vision.final_norm != self.final_norm:
            where = "behind" if self.final_norm else "before"
            yield f"model.vision.final_norm={str(self.final_norm).lower()} (its features come from {where} that norm)"
        if vision.layout not in self.layouts:
            yield f"model.vision.layout={' or '.join(self.layouts)} (which is what its processor writes)"
        if lacking := lacking_marks(config.model, self.layouts[0]):
            yield f"another model.llm.path (the tokenizer of {config.model.llm.path} has no {' and '.join(lacking)})"
        if not vision.cuts_images and config.data.image_fit not in self.fits:
            fits = " or ".join(self.fits)
            yield f"data.image_fit={fits} (its processor does not make {config.data.image_fit})"
        if factor not in self.factors:
            factors = " or ".join(map(str, self.factors))
            yield f"model.projector.factor={factors} (it cannot compute with {factor})"
        given = TIMM if encoder.kind == TIMM and TIMM in self.encoders else encoder.model
        if encoder.prefix_tokens > 1:
            before = f"{vision.name} has {encoder.prefix_tokens} tokens before its patches"
            yield f"another model.vision.name ({before}, and it takes all but a class token for patches)"
        elif given is None:
            yield f"another model.vision.name ({vision.name} {encoder.unfit}, which no stock encoder has)"
        elif self.encoders and given not in self.encoders:
            kinds = " or ".join(self.encoders)
            yield f"another model.vision.name (its encoder is {kinds}, and {vision.name} is or becomes {given})"
        elif given in self.not_encoders:
            yield f"another model.vision.name (its class divides image_size, which is a list in the config of {given})"
        elif self.largest_grid and (encoder.side > self.largest_grid or encoder.side in MISPLACED):
            grid = f"{encoder.side} x {encoder.side} patches"
            yield f"another model.vision.name ({vision.name} has {grid}, which its class puts in wrong places)"


DOORS = (
    Door("Llava", "llava", ("mlp2x_gelu",), fits=("pad", "resize", "center_crop"), own_encoders=("pixtral",)),
    Door("LlavaNext", "llava_next", ("mlp2x_gelu",), layouts=(ANYRES,), not_encoders=(INTERN_VIT,)),
    Door("LlavaOnevision", "llava_onevision", ("mlp2x_gelu",), layouts=(ANYRES_MAX_9,), not_encoders=(INTERN_VIT,)),
    Door("AyaVision", "aya_vision", ("shuffle_swiglu",), layouts=(SQUARE, TILES)),
    Door(
        "Idefics3",
        "idefics3",
        ("shuffle_linear",),
        final_norm=True,
        layouts=("idefics3",),
        encoders=("SiglipVisionModel",),
        largest_grid=LARGEST_GRID,
        also=("smolvlm",),
        own_encoders=("idefics3_vision", "idefics3"),  # the latter in files of transformers 4.46
    ),
    # Its config makes an InternViT of any encoder: another one's weights would be left out, without an exception.
    # 1/3 cannot be said in it: its class finds that 27 is no multiple.
    Door("InternVL", "internvl", ("shuffle_mlp2x_gelu",), factors=(2, 4), encoders=(INTERN_VIT,)),
    Door(
        "PerceptionLM",
        "perception_lm",
        ("mlp2x_gelu_pool", "mlp2x_gelu"),
        final_norm=True,
        encoders=(TIMM,),
        own_encoders=("timm_wrapper",),
    ),
)


def stock_door(config: RunConfig) -> Door:
    """The stock class that computes what a run trains.

    Raises UserError with what each class that has its connector would need, and what `vision_shape` raises.
    """
    kind, layout = config.model.projector.type, config.model.vision.layout
    near = [door for door in DOORS if kind in door.connectors]
    near = [door for door in near if layout in door.layouts] or near
    if not near:
        known = ", ".join(f"{connector} ({door.name})" for door in DOORS for connector in door.connectors)
        raise UserError(f"no stock model has a {kind} projector (model.projector.type); there are {known}")
    if why := _unfit_llm(config.model.llm.path):
        raise UserError(f"no stock model computes what this run trains: {why}; it would need another model.llm.path")
    encoder = _encoder(config)
    needs = {door: list(door.needs(config, encoder)) for door in near}
    for door, missing in needs.items():
        if not missing:
            return door
    listed = "; ".join(f"{door.name} would need {', '.join(missing)}" for door, missing in needs.items())
    raise UserError(f"no stock model computes what this run trains ({kind}): {listed}")


def _unfit_llm(path: str) -> str:
    """Return why no stock class computes this LLM behind an encoder; "" where only a trial can tell."""
    llm, folder = llm_shape(path), find_model_folder(path)
    head = dict.fromkeys(HEADS_BY_DEFAULT.get(llm.model_type, ()), "by default")
    head |= llm_config(folder) if folder else {}
    if scaled := next((key for key, plain in PLAIN_HEAD.items() if head.get(key) not in (None, plain)), None):
        return f"the head of {path} ({llm.model_type}) scales or caps its logits ({scaled}), and the stock heads do not"
    if any(parameter.name == "llm.head.bias" for parameter in llm.head):
        return f"the head of {path} ({llm.model_type}) has a bias, and the stock heads have none"
    return f"they do not find the embedding of a {llm.model_type}" if llm.model_type in _OTHER_EMBEDDING else ""


def _encoder(config: RunConfig) -> Encoder:
    name = config.model.vision.name
    shape = vision_shape(name, config.model.vision.select_layer, config.model.vision.final_norm)
    side = math.isqrt(shape.patches_per_image)
    if not is_timm_name(name):
        folder, recorded = find_model_folder(name), find_recorded("vision", name)
        content = recorded.config if folder is None and recorded is not None else encoder_config(folder)
        if "architecture" not in content:
            model = family_of(content.get("model_type"), name).model
            return Encoder(model, model, "", shape.prefix_tokens, side)
    form = form_of(parameter.name.removeprefix("vision.") for parameter in shape.parameters)
    if isinstance(form, str):
        return Encoder(TIMM, None, form, shape.prefix_tokens, side)
    return Encoder(TIMM, FAMILIES[form.model_type].model, "", shape.prefix_tokens, side)


def refuse_llava_code(config: RunConfig, trained: Collection[str]) -> None:
    """Raises UserError for a run that `trained` (global names) more than a projector that LLaVA's own code computes."""
    kind, vision = config.model.projector.type, config.model.vision
    if vision is None:
        raise UserError("llava holds a projector, and model.vision=null has none")
    if kind not in LLAVA_CODE:
        raise UserError(f"llava takes a {' or '.join(LLAVA_CODE)} projector, and model.projector.type is {kind}")
    if vision.final_norm or vision.layout not in (SQUARE, *WITH_NEWLINES):
        key = "final_norm" if vision.final_norm else "layout"
        value = str(getattr(vision, key)).lower()
        raise UserError(f"llava's code knows no model.vision.{key}={value}, which this run trains with")
    if others := [name for name in trained if not name.startswith("projector.")]:
        raise UserError(f"llava holds the projector alone, and {others[0]} trains too (model.trainable)")


def _refuse_without_adapters(config: RunConfig, trained: Collection[str]) -> None:
    """Raises UserError for a run that has nothing for peft, whose base model is a whole one or the LLM alone."""
    if not any(map(is_llm_adapter, trained)):
        raise UserError("peft holds adapters of the LLM, and model.lora gives it none")
    _refuse_unknown_class(config, trained)


def _refuse_more_than_adapters(config: RunConfig, trained: Collection[str]) -> None:
    """Raises UserError for a run that trains anything but adapters of the published LLM, and the projector."""
    if holds_parts(model_folder(config.model.llm.path)):
        raise UserError(f"{config.model.llm.path} is a whole model, not the LLM alone")
    if not any(map(is_llm_adapter, trained)) or not all(
        name.startswith("projector.") or is_llm_adapter(name) for name in trained
    ):
        raise UserError("adapters of the LLM are not all that trains")


def _refuse_unknown_class(config: RunConfig, trained: Collection[str]) -> None:
    """Raises UserError for a run that no stock class computes; that of text alone is the LLM's own."""
    if config.model.vision is not None:
        stock_door(config)
    folder = find_model_folder(config.model.llm.path)
    if folder is None or (tensors := tensor_shapes(folder)) is None:
        return
    base = BASE_PREFIX.get(llm_config(folder)["model_type"], "model.")
    stored = {global_name(before + name) for name in llm_tensors(folder, tensors) for before in ("", base)}
    for name in trained:
        if name.startswith("llm.") and not is_adapter(name) and name not in stored:
            raise UserError(f"{name} trains, but the LLM's files have it under another name or in several tensors")


def default_base(config: RunConfig) -> Base:
    """What a run's adapters are for unless one says it: the published LLM where it is all of the model."""
    alone = config.model.vision is None and not holds_parts(model_folder(config.model.llm.path))
    return "llm" if alone else "hf"


def formats_for(config: RunConfig, trained: Collection[str]) -> str:
    """Options of `mmtrain export` that write what a run `trained`, by global names."""
    formats = ["--format safetensors"]
    for name, check in (
        ("llava", refuse_llava_code),
        ("hf", _refuse_unknown_class),
        ("peft", _refuse_without_adapters),
        ("peft --base llm", _refuse_more_than_adapters),
    ):
        with contextlib.suppress(UserError):
            check(config, trained)
            formats.append(f"--format {name}")
    return " or ".join(formats)


def check_export_format(config: RunConfig, trained: Collection[str]) -> None:
    """Raises UserError for a run that could not leave by its `export.format`, saying what to change.

    trained: the global names of what trains.
    """
    try:
        if config.export.format == "hf":
            _refuse_unknown_class(config, trained)
        elif config.export.format == "llava":
            refuse_llava_code(config, trained)
        elif config.export.format == "peft":
            _refuse_without_adapters(config, trained)
    except UserError as error:
        raise UserError(
            f"export.format={config.export.format}: {error}; change that, or set export.format=safetensors"
        ) from None
