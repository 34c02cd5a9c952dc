"""The models of a run: what its keys and its models' files say of them, read once.

model section, data.images --models_of--> Models: shapes of LLM and encoder, operations of the
    connector, layout of the images

Whoever opens a run (a plan, a launcher, a rank, an export) makes one and hands it on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.config.limits import MAX_TILES
from mmtrain.config.model import ModelSection
from mmtrain.config.schema import RunConfig
from mmtrain.connectors import DEFAULT_NORM_EPS, Operation
from mmtrain.facts.adapters import with_adapters
from mmtrain.facts.families import refuse_without_mrope
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.projector import connector, connector_parameters, has_deepstack, reduction
from mmtrain.facts.shapes import (
    NO_VISION,
    LlmShape,
    ParameterShape,
    VisionShape,
    llm_shape,
    vision_shape,
)
from mmtrain.layouts.layout import ImageLayout, UnfitImage
from mmtrain.layouts.native import Native
from mmtrain.layouts.registry import LAYOUTS, TEXT_ALONE
from mmtrain.layouts.square import Square


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a run. A part is read from its files when it is first asked for, then kept.

    Every part raises UserError where it is not known, or where the parts do not fit together.
    """

    section: ModelSection  # without `pretrained`: its keys are those of the parts
    images: str  # data.images
    image_fit: str | None = None  # data.image_fit
    resize: str = "pillow"  # data.resize

    def read(self) -> Models:
        """Read every part, so that the caller meets its errors first, and return this object."""
        _ = self.connector, self.llm, self.layout
        return self

    @property
    def factor(self) -> int:
        """Patches a side that the connector makes one position of; 1: each patch is one."""
        return reduction(self.section.projector)

    @cached_property
    def llm_folder(self) -> Path:
        return model_folder(self.section.llm.path)

    @cached_property
    def published_llm(self) -> LlmShape:
        """The LLM without adapters."""
        return llm_shape(self.section.llm.path)

    @cached_property
    def published_vision(self) -> VisionShape:
        """The vision encoder without adapters.

        One for images of any size has the cells that the connector makes.
        """
        chosen, projector = self.section.vision, self.section.projector
        if chosen is None:
            return NO_VISION
        deepstack = has_deepstack(projector)
        shape = vision_shape(
            chosen.name, chosen.select_layer, chosen.final_norm, chosen.merger, deepstack
        )
        if deepstack and (chosen.select_layer != -1 or not shape.deepstack):
            needed = "an encoder that has it, such as Qwen3-VL's"
            if shape.deepstack:
                needed = "model.vision.select_layer=-1"
            raise UserError(
                f"model.projector.type: {projector.type} has DeepStack, which needs {needed}."
            )
        return shape.with_cells(self.factor)

    @cached_property
    def _adapted(self) -> tuple[LlmShape, VisionShape]:
        return with_adapters(self.published_llm, self.published_vision, self.section.lora)

    @property
    def llm(self) -> LlmShape:
        """The LLM with its adapters."""
        return self._adapted[0]

    @property
    def vision(self) -> VisionShape:
        """The vision encoder with its adapters; without an encoder NO_VISION."""
        return self._adapted[1]

    @cached_property
    def connector(self) -> tuple[Operation, ...]:
        """The connector, with the widths of encoder and LLM; () without an encoder."""
        if self.section.vision is None:
            return ()
        llm, vision = self.published_llm, self.published_vision
        if self.has_grid_positions:
            refuse_without_mrope(llm.model_type, self.section.llm.path)
        return connector(
            self.section.projector,
            vision.merged_width or vision.width,
            llm.hidden_size,
            self.layout_class.has_newlines,
            llm.norm_eps or DEFAULT_NORM_EPS,
            len(vision.deepstack),
        )

    @property
    def layout_class(self) -> type[ImageLayout]:
        vision = self.section.vision
        return TEXT_ALONE[self.images] if vision is None else LAYOUTS[vision.layout]

    @property
    def has_grid_positions(self) -> bool:
        """Whether the LLM takes M-RoPE's grid positions."""
        return self.layout_class.has_grid_positions

    @cached_property
    def layout(self) -> ImageLayout:
        """The layout of the images; without an encoder they take no position."""
        if self.section.vision is None:
            return self.layout_class(0)
        return _layout(self.section, self.layout_class, self.published_vision)

    @property
    def first_layers(self) -> int:
        """The number of layers that stage 0 holds at least.

        DeepStack's features would have to travel to another stage.
        """
        return 1 + len(self.vision.deepstack)

    @property
    def projector(self) -> tuple[ParameterShape, ...]:
        return tuple(connector_parameters(self.connector))

    @property
    def parameters(self) -> Iterator[ParameterShape]:
        """All parameters of the run, by global names, from the encoder to the head."""
        yield from self.vision.parameters
        yield from self.projector
        yield from self.llm.front
        for layer in self.llm.decoder:
            yield from layer
        yield from self.llm.head


def models_of(config: RunConfig) -> Models:
    """Return the models of a run, whose configuration has no `model.pretrained` any more."""
    assert config.model.pretrained is None, (
        "`expand_pretrained` comes before: models are read from explicit keys"
    )
    data = config.data
    return Models(config.model, data.images, data.image_fit, data.resize)


def _layout(section: ModelSection, layout: type[ImageLayout], vision: VisionShape) -> ImageLayout:
    """Make the layout of a run's images.

    Raises UserError for a factor that does not divide the encoder's grid, for pinpoints that are no
    grid of tiles, and for a layout of squares where the encoder takes images of any size, or the
    reverse.
    """
    chosen, native = section.vision, vision.family.native
    _refuse_other_encoder(chosen.name, layout, vision)
    factor, side = reduction(section.projector), math.isqrt(vision.patches_per_image)
    if vision.features_per_image % factor**2:
        fitting = [f"model.projector.factor={other}" for other in (2, 3, 4) if side % other == 0]
        raise UserError(
            f"model.projector.factor: {factor} does not divide the grid of {chosen.name}, {side} x "
            f"{side} patches ({vision.image_size} pixels in patches of {vision.patch_size}). Set "
            f"{' or '.join(fitting or ['model.projector.type=mlp2x_gelu'])}"
        )
    size = vision.image_size
    for height, width in chosen.pinpoints or ():
        if height % size or width % size or height * width > MAX_TILES * size**2:
            raise UserError(
                f"model.vision.pinpoints: [{height}, {width}] is no grid of up to {MAX_TILES} "
                f"tiles of {size} x {size} pixels, as {chosen.name} takes. "
                f"Correct it, or leave pinpoints out for {layout.name}'s own."
            )
    numbers = {key: getattr(chosen, key) for key in layout.keys}
    if native is not None:
        if side % native.block:
            raise UserError(
                f"model.projector.factor: {chosen.name} has its patches in blocks of "
                f"{native.block} x {native.block}, but {section.projector.type} joins "
                f"{factor} x {factor}. Set model.vision.merger=true, for the encoder's own merger, "
                "or a projector that joins 2 x 2, e.g. shuffle_mlp2x_gelu"
            )
        numbers |= {"factor": side, "is_capped": native.is_capped}
    given = {key: value for key, value in numbers.items() if value is not None}
    made = layout(vision.features_per_image // factor**2, size, **given)
    if layout.attends_across:
        _refuse_small_bounds(made)
    return made


def _refuse_other_encoder(name: str, layout: type[ImageLayout], vision: VisionShape) -> None:
    """Raise UserError for a layout of squares and an encoder of any size, or the reverse."""
    if layout.attends_across == (vision.family.native is not None):
        return
    if layout.attends_across:
        takes = (
            f"of one size, {vision.image_size} pixels a side. Set another layout, e.g. "
            f"{Square.name}"
        )
    else:
        takes = (
            f"of any size. Set model.vision.layout={Native.name}, or qwen_vl, glm_v or "
            "paddleocr_vl for M-RoPE"
        )
    raise UserError(f"model.vision.layout: {layout.name}, but {name} takes images {takes}")


def _refuse_small_bounds(layout: Native) -> None:
    """Raise UserError for bounds of an image's size that some image cannot meet."""
    try:
        for trial in layout.trial_sizes:
            layout.tiling(*trial)
    except UnfitImage as error:
        bound, lower = "max_positions", ", or lower min_positions"
        if layout.longest_edge:
            bound, lower = "longest_edge", ""
        raise UserError(
            f"model.vision.{bound}: {getattr(layout, bound)} is too small for an image of {error}. "
            f"Raise it{lower}"
        ) from None
