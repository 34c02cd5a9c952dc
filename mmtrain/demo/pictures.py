"""Scenes as pictures: real handwriting, coloured, on a dark ground.

scans (N, 8, 8) of scikit-learn's `load_digits` --split by use--> --enlarge, turn, shift, colour-->
    RGB (64, 64)
such a picture as a note on an empty sheet, one of SHEET_TILES places in a row --lay--> RGB (64,
    256)

The scans are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI
Machine Learning Repository, CC BY 4.0): 1,797 digits of 13 people. They are split once, by a fixed
permutation: what the vision encoder was trained on, what the projector is trained on, and what
neither has seen.
"""

import random
from typing import Literal

import numpy as np
from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.demo.scene import DIGITS, Scene

SIZE = 64  # pixels a side
CELL = SIZE // 2
SPLIT_SEED = 20261120
INKS = (
    (225, 60, 60),
    (60, 190, 90),
    (80, 120, 245),
    (235, 215, 70),
    (240, 240, 240),
    (245, 130, 210),
)
INK_JITTER = 15  # of 255, each channel
GROUND = 60  # brightest ground, of 255
# that an encoder of the pictures' size sees of a sheet: as one square it is a quarter as wide
SHEET_TILES = 4

Use = Literal["encoder", "projector", "held-out"]
SHARES: dict[Use, float] = {"encoder": 0.6, "projector": 0.2, "held-out": 0.2}


class Scans:
    """The digits of one use, by the digit they show."""

    def __init__(self, use: Use) -> None:
        """Raises UserError without scikit-learn, whose package holds the scans: nothing is
        downloaded.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError(
                "the demo's handwriting comes with scikit-learn, which is not installed; install "
                "it: pip install 'mmtrain[demo]'"
            ) from None
        scans = load_digits()
        order = np.random.default_rng(SPLIT_SEED).permutation(len(scans.target))
        edges = np.cumsum([0.0, *SHARES.values()]) * len(order)
        place = list(SHARES).index(use)
        begin, end = edges[place : place + 2].round().astype(int)
        self.indices = order[begin:end]
        pixels = np.rint(scans.images[self.indices] * (255 / 16)).astype(np.uint8)
        digits = scans.target[self.indices]
        self._by_digit = [
            list(map(Image.fromarray, pixels[digits == digit])) for digit in range(DIGITS)
        ]

    def ink(self, digit: int, draw: random.Random) -> Image.Image:
        """Return a CELL x CELL mask, 255 where there is ink: a scan of `digit`, enlarged, turned
        and shifted a little.
        """
        side = draw.randint(22, 28)
        scan = draw.choice(self._by_digit[digit]).resize((side, side), Image.Resampling.BICUBIC)
        mask = Image.new("L", (CELL, CELL))
        room = CELL - side
        mask.paste(scan, (draw.randint(0, room), draw.randint(0, room)))
        return mask.rotate(draw.uniform(-10, 10), Image.Resampling.BILINEAR)


def paint(scene: Scene, scans: Scans, draw: random.Random) -> Image.Image:
    """Paint a scene, SIZE x SIZE, RGB."""
    picture = Image.new("RGB", (SIZE, SIZE), tuple(draw.randint(0, GROUND) for _ in range(3)))
    for cell, item in enumerate(scene):
        if item is not None:
            ink = tuple(
                min(255, max(0, c + draw.randint(-INK_JITTER, INK_JITTER)))
                for c in INKS[item.colour]
            )
            corner = (cell % 2 * CELL, cell // 2 * CELL)
            picture.paste(
                ink, (*corner, corner[0] + CELL, corner[1] + CELL), scans.ink(item.digit, draw)
            )
    return picture


def lay(note: Image.Image, draw: random.Random) -> tuple[Image.Image, int]:
    """Lay a painted scene on a wide empty sheet; return the sheet and the one tile that holds all
    of it.
    """
    sheet = Image.new(
        "RGB", (SHEET_TILES * SIZE, SIZE), tuple(draw.randint(0, GROUND) for _ in range(3))
    )
    tile = draw.randrange(SHEET_TILES)
    sheet.paste(note, (tile * SIZE, 0))
    return sheet, tile
