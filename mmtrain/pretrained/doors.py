"""Doors: the formats that a run can leave mmtrain through, and what each needs of it, known before it trains.

config --connector, final norm, layout, fit, encoder--> the stock class that computes what is trained, or what to change

An export computes exactly what was trained. A class of transformers fixes much of that by itself: which connector it
has, whether its features come from before or behind the encoder's last norm, how its processor makes a square. The
planner asks for `export.format`, the export itself for what it writes: both get the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig

LLAVA_FORMAT = ("linear", "mlp2x_gelu")  # projectors that LLaVA's own code builds
# What a refusal to export a whole model says of the formats that need less.
WHAT_WORKS = (
    "--format safetensors exports any projector, --format llava any linear or mlp2x_gelu one that was trained alone"
)


@dataclass(frozen=True)
class Door:
    """A stock class of transformers, and which runs it computes."""

    name: str  # of its classes: Llava is LlavaForConditionalGeneration, LlavaConfig and LlavaProcessor
    model_type: str  # in config.json
    connectors: tuple[str, ...]  # values of model.projector.type
    final_norm: bool  # whether it takes features behind the encoder's last norm
    fits: tuple[str, ...] = ("resize",)  # values of data.image_fit that its processor can make

    def needs(self, config: RunConfig) -> Iterator[str]:
        """What a run whose connector it has would have to change, as `key=value (why)`."""
        vision = config.model.vision
        if vision.final_norm != self.final_norm:
            where = "behind" if self.final_norm else "before"
            yield f"model.vision.final_norm={str(self.final_norm).lower()} (its features come from {where} that norm)"
        if config.data.image_fit not in self.fits:
            fits = " or ".join(self.fits)
            yield f"data.image_fit={fits} (its processor does not make {config.data.image_fit})"


DOORS = (Door("Llava", "llava", ("mlp2x_gelu",), final_norm=False, fits=("pad", "resize", "center_crop")),)


def stock_door(config: RunConfig) -> Door:
    """The stock class that computes what a run trains; raises UserError with what each that nearly does would need."""
    kind = config.model.projector.type
    near = {door: list(door.needs(config)) for door in DOORS if kind in door.connectors}
    for door, needs in near.items():
        if not needs:
            return door
    if not near:
        known = ", ".join(f"{connector} ({door.name})" for door in DOORS for connector in door.connectors)
        raise UserError(f"no stock model has a {kind} projector (model.projector.type); there are {known}")
    listed = "; ".join(f"{door.name} would need {', '.join(needs)}" for door, needs in near.items())
    raise UserError(f"no stock model computes what this run trains ({kind}): {listed}")


def check_export_format(config: RunConfig) -> None:
    """Raises UserError for a run that could not leave by its `export.format`, saying what to change."""
    wanted = config.export.format
    kind = config.model.projector.type
    if wanted == "llava":
        if kind not in LLAVA_FORMAT:
            raise UserError(
                f"export.format: llava takes {' and '.join(LLAVA_FORMAT)} projectors, and model.projector.type is "
                f"{kind}; change one of the two, or set export.format=safetensors"
            )
        if (other := next((name for name in config.model.trainable if name != "projector"), None)) is not None:
            raise UserError(
                f"export.format: llava holds the projector alone, and model.trainable has {other!r} too; leave that "
                "out, or set export.format=hf or safetensors"
            )
    elif wanted == "hf":
        try:
            stock_door(config)
        except UserError as error:
            raise UserError(f"export.format: hf: {error}; change that, or set export.format=safetensors") from None
