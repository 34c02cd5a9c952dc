"""What a plan's micro-batch holds: documents of one typical image, or none, and the expected text.

config, image layout --what data.expected_... says, else an image of 640 x 480 pixels--> Workload
"""

from __future__ import annotations

from dataclasses import dataclass

from mmtrain.config.schema import RunConfig
from mmtrain.models.layouts.layout import ImageLayout, Tiling

PATCHES_PER_CALL = 11_664  # of a frozen encoder: 16 tiles of 384 pixels, in patches of 14, keep any GPU busy
LEAST_TILES_PER_CALL = 16
FP32 = 4  # bytes an element: pixels, the projector, master weights, gradients and optimizer state
INTEGER = 8  # bytes of a token id, position or label
TYPICAL_SIZE = 640, 480  # pixels, of an image of which nothing else is known


@dataclass(frozen=True, slots=True)
class Workload:
    """What is computed on: a micro-batch in expectation, or a whole step as it came."""

    tokens: float  # positions of all its packs; of a step that is measured those that documents fill
    document: float  # tokens of a typical document; of several their squares' sum over their sum
    tiles: float  # squares that the encoder sees
    image_positions: float
    supervised: float  # tokens with a label


def tiles_per_call(patches_per_image: int) -> int:
    """Tiles that a frozen encoder takes at once, which bounds the memory of its inner results."""
    return max(LEAST_TILES_PER_CALL, PATCHES_PER_CALL // patches_per_image)


def workload(config: RunConfig, layout: ImageLayout) -> Workload:
    """Expected contents of a micro-batch: documents of one image, or none, and the expected text, without padding."""
    tokens = config.train.packs_per_microbatch * config.data.pack_length
    tiles, positions = expected_image(config, layout)
    document = min(config.data.pack_length, positions + config.data.expected_text_tokens)
    images, supervised = tokens / document, tokens * config.data.expected_supervised_fraction
    return Workload(tokens, document, images * tiles, images * positions, supervised)


def expected_image(config: RunConfig, layout: ImageLayout) -> tuple[float, float]:
    """Tiles and positions of a typical image, as the configuration says, else of one of 640 x 480 pixels."""
    if not layout.takes_images:
        return 0.0, 0.0
    typical, data = layout.tiling(*TYPICAL_SIZE), config.data
    if data.expected_image_tiles is None or data.expected_image_positions is None:
        return typical.tiles, typical.positions
    return data.expected_image_tiles, data.expected_image_positions


def arranged_positions(work: Workload, layout: ImageLayout) -> float:
    """The most positions that live at once while those of tiles are put in lines with newlines; 0 without newlines.

    All that the connector has made, one image's of it side by side, and two copies of what is taken: image by image,
    which overviews do without, and as one tensor.
    """
    if not layout.has_newlines:
        return 0.0
    images = work.tokens / work.document
    made, overviews = work.tiles * layout.positions_per_tile, images * layout.positions_per_tile
    return max(0.0, made + (made - overviews) / max(images, 1.0) + 2 * work.image_positions - overviews)


def typical_tiling(config: RunConfig, layout: ImageLayout) -> Tiling | None:
    """What an image becomes that comes nearest to the expected one, of those that leave a pack room for text.

    Where none does, the smallest; None for a run that takes no images.
    """
    if not layout.takes_images:
        return None
    tiles, positions = expected_image(config, layout)
    sizes, side = [TYPICAL_SIZE], layout.tile_size // 2
    if layout.is_sized:
        sizes += [(side * columns, side * rows) for columns in range(1, 13) for rows in range(1, 13)]
    tilings = [layout.tiling(*size) for size in sizes]
    fitting = [x for x in tilings if x.positions < config.data.pack_length]
    if not fitting:
        return min(tilings, key=lambda x: x.positions)
    return min(fitting, key=lambda x: abs(x.tiles / tiles - 1) + abs(x.positions / positions - 1))
