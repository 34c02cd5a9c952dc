"""Draw the demo's scenes: 2 x 2 cells, each empty or with a coloured handwritten digit.

Neither text nor image: `text` puts a scene into words, `pictures` paints it. The demo's LLM is
trained on the words alone, its vision encoder on the pictures alone; that both speak of the same
scenes is what a projector has to find out.
"""

import random
from dataclasses import dataclass

DIGITS = 10
COLOURS = 6
CELLS = 4  # in reading order: top left, top right, bottom left, bottom right
EMPTY_SHARE = 0.2


@dataclass(frozen=True)
class Item:
    """A coloured digit."""

    digit: int  # 0 .. DIGITS - 1
    colour: int  # 0 .. COLOURS - 1


Scene = tuple[Item | None, ...]  # CELLS of them


def draw_scene(draw: random.Random) -> Scene:
    """Draw a scene: cells are empty with probability EMPTY_SHARE, digits and colours uniform."""
    cells = []
    for _ in range(CELLS):
        item = None
        if draw.random() >= EMPTY_SHARE:
            item = Item(draw.randrange(DIGITS), draw.randrange(COLOURS))
        cells.append(item)
    return tuple(cells)
