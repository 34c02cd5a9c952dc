"""The documentation's table of layouts says what the layouts do."""

import re
from pathlib import Path

import pytest

from mmtrain.layouts.registry import LAYOUTS

TEXT = (Path(__file__).parents[2] / "mmtrain" / "docs" / "pages" / "model.md").read_text()
SECTION = TEXT.split("## High resolution")[1].split("\n## ")[0]
TABLE = SECTION.split("\n\n")[2]
HEAD, _, *ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines()]
SIZES = [tuple(map(int, size.split(" x "))) for size in HEAD[1:]]
ENCODERS = {"SigLIP 384": (729, 384), "CLIP 336": (576, 336), "SigLIP2 512, factor 4": (64, 512)}
ENCODERS |= {"SigLIP 2 NaFlex, factor 2": (1, 32)}
NATIVE = {"min_positions": 64, "max_positions": 256, "is_capped": True}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_an_image_costs_is_what_its_layout_takes(row):
    encoder, layout = re.fullmatch(r"(.+), `(\w+)`", row[0]).groups()
    positions, side = ENCODERS[encoder]
    taken = LAYOUTS[layout](positions, side, **NATIVE if layout == "native" else {})
    for size, said in zip(SIZES, row[1:], strict=True):
        tiling = taken.tiling(*size)
        squares = "" if taken.attends_across else f" ({tiling.tiles})"
        assert said == f"{tiling.positions:,}{squares}"
