"""How an image becomes positions of the LLM: how many, from its size alone, and the text that stands around them.

image (width, height) --layout: `tiling`--> its tiles, in order, each a square for the encoder --connector--> positions
                              --`pieces`--> what stands for it in a text: words, and runs of positions

square        one tile, no text
idefics3      one tile between the texts that Idefics3Processor writes around an image that it does not split
tiles         AyaVision's: the tiles of a grid, then one of the whole image, each with its name before it
anyres        LlavaNext's: a tile of the whole image, then the lines of a grid without its padding, each with a trained
              newline behind it
anyres_max_9  LlavaOnevision's: the same, interpolated to what 9 tiles have where it is more; of several images in a
              sample each is one tile, with a newline
require       text alone, as data.images: no positions, and a sample that has images is unusable
strip         text alone, as data.images: images and their marks are taken out of samples

The texts are written into the conversation before it is tokenized, once and whole, as the stock processors do: text
lengths, and so text fingerprints, depend on them. Index, packs, loader, fusion, planner and exports ask here alone.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.tiling import Tiling, most_unpadded, one_of_several, tiled, unpadded

REQUIRE, STRIP = TEXT_ALONE = "require", "strip"
SQUARE, IDEFICS3, TILES, ANYRES, ANYRES_MAX_9 = "square", "idefics3", "tiles", "anyres", "anyres_max_9"
WRAPPERS = {
    SQUARE: ("", ""),
    IDEFICS3: ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    TILES: ("", ""),
    ANYRES: ("", ""),
    ANYRES_MAX_9: ("", ""),
    REQUIRE: ("", ""),
    STRIP: ("", ""),
}  # layout -> text before and behind an image's positions
WITH_NEWLINES = (ANYRES, ANYRES_MAX_9)  # layouts whose connector has a trained newline
SIZED = (TILES, *WITH_NEWLINES)  # layouts whose positions depend on an image's size
DEFAULT_MAX_TILES = 12  # AyaVision's and InternVL's
# (rows, columns) of tiles: LLaVA-NeXT's, and all up to 6 x 6, LLaVA-OneVision's.
_DEFAULT_GRIDS = {
    ANYRES: ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    ANYRES_MAX_9: tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)),
}
TILE_NAME, OVERVIEW_NAME = "TILE", "TILE_GLOBAL"  # AyaVisionProcessor's texts, which it writes before tiles


def layout_name(config: RunConfig) -> str:
    """The layout of a run's images, whose numbers the encoder decides."""
    return config.data.images if config.model.vision is None else config.model.vision.layout


def layout_argument(layout: ImageLayout) -> str:
    """What follows the other options of `mmtrain index` in a message that asks for this layout's lengths."""
    name = layout.of_texts.name
    if name in TEXT_ALONE:
        return f" --images {name}"
    numbers = f" --max-tiles {layout.max_tiles} --tile-size {layout.tile_size}" if name == TILES else ""
    return "" if name == SQUARE else f" --layout {name}{numbers}"


def marks_around(layout: str) -> list[str]:
    """The tokens that a layout's texts before and behind an image are made of."""
    return [mark for text in WRAPPERS[layout] for mark in re.findall(r"<[^<>]+>", text)]


@dataclass(frozen=True)
class ImageLayout:
    """A layout with its numbers."""

    name: str = SQUARE  # as `layout_name` says
    positions_per_tile: int = 1
    tile_size: int = 0  # pixels a side; with `max_tiles` and `pinpoints` what a SIZED layout asks for
    max_tiles: int = DEFAULT_MAX_TILES  # of a grid, the tile of the whole image not counted
    pinpoints: tuple[tuple[int, int], ...] = ()  # (height, width) in pixels of the grids

    @property
    def takes_images(self) -> bool:
        """Whether there is an encoder, so that images reach the model."""
        return self.name not in TEXT_ALONE

    @property
    def strips(self) -> bool:
        """Whether images are taken out of samples."""
        return self.name == STRIP

    @property
    def is_sized(self) -> bool:
        """Whether tiles and positions depend on an image's size."""
        return self.name in SIZED

    @property
    def has_newlines(self) -> bool:
        """Whether trained newlines end lines of an image's positions."""
        return self.name in WITH_NEWLINES

    @property
    def of_texts(self) -> ImageLayout:
        """A layout that writes the same texts around an image and asks as little of it as can be."""
        return ONE_SQUARE if self.has_newlines else replace(self, positions_per_tile=1, pinpoints=())

    @property
    def has_texts(self) -> bool:
        """Whether words stand around an image's positions."""
        return self.name == TILES or WRAPPERS[self.name] != ("", "")

    @property
    def texts(self) -> str:
        """What lengths of texts depend on: equal for layouts that write the same around images."""
        name = self.of_texts.name
        return f"{name} {self.max_tiles} {self.tile_size}" if name == TILES else name

    @property
    def numbers(self) -> str:
        """What the positions of images depend on beside their sizes: equal for layouts that give them the same."""
        own: tuple[str | int, ...] = ()
        if self.is_sized:
            pinpoints = ",".join(f"{height}x{width}" for height, width in self.pinpoints)
            own = (self.name, self.tile_size, self.max_tiles if self.name == TILES else pinpoints)
        return " ".join(map(str, (self.positions_per_tile, *own)))

    @property
    def most_tiles(self) -> int:
        """Tiles of an image at most."""
        if self.name == TILES:
            return self.max_tiles + (self.max_tiles > 1)
        grids = [height // self.tile_size * (width // self.tile_size) for height, width in self.pinpoints]
        return max(grids) + 1 if self.has_newlines else 1

    @property
    def most_positions(self) -> int:
        """Positions of an image at most, without text around them; a bound where grids are interpolated."""
        if not self.has_newlines:
            return self.most_tiles * self.positions_per_tile
        most = 9 if self.name == ANYRES_MAX_9 else None
        return most_unpadded(self.tile_size, self.positions_per_tile, self.pinpoints, most)

    def tiling(self, width: int = 0, height: int = 0, images: int = 1) -> Tiling:
        """Tiles and positions of an image of this size in pixels, one of so many of its sample.

        Raises UnfitImage for one that cannot be cut. A layout that is not `is_sized` need not be told.
        """
        return _tiling(self, width, height, images == 1) if self.is_sized else Tiling.uncut(self.positions_per_tile)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        """What stands for an image in a text, in order: words, and numbers of positions."""
        if self.name == TILES:
            names = [*(f"{TILE_NAME}_{number}" for number in range(1, tiling.tiles)), OVERVIEW_NAME]
            return tuple(piece for name in names for piece in (name, self.positions_per_tile))
        before, after = WRAPPERS[self.name]
        return tuple(piece for piece in (before, tiling.positions, after) if piece != "")


ONE_SQUARE = ImageLayout()


@functools.lru_cache(maxsize=1 << 16)
def _tiling(layout: ImageLayout, width: int, height: int, is_alone: bool) -> Tiling:
    side, positions = layout.tile_size, layout.positions_per_tile
    if layout.name == TILES:
        return tiled(width, height, side, positions, layout.max_tiles)
    if layout.name == ANYRES:
        return unpadded(width, height, side, positions, layout.pinpoints)
    if not is_alone:
        return one_of_several(width, height, positions)
    return unpadded(width, height, side, positions, layout.pinpoints, most=9)


def default_pinpoints(layout: str, tile_size: int) -> tuple[tuple[int, int], ...]:
    """The grids of a layout's stock class, (height, width) in pixels."""
    return tuple((rows * tile_size, columns * tile_size) for rows, columns in _DEFAULT_GRIDS.get(layout, ()))
