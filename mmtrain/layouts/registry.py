"""The layouts by name: of model.vision.layout, and of data.images for a run without an encoder."""

import itertools
from typing import Literal

from mmtrain.layouts.anyres import Anyres, AnyresMax9
from mmtrain.layouts.idefics3 import Idefics3
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.mrope import GlmV, PaddleOcrVl, QwenVl
from mmtrain.layouts.native import Native
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles


class Require(ImageLayout):
    """Without an encoder images take no position; a sample that has some is unusable."""

    name = "require"
    takes_images = False


class Strip(Require):
    """Without an encoder images and their marks are taken out of samples."""

    name = "strip"
    strips = True
    texts = (name, "", "")


def _by_name(*kinds: type[ImageLayout]) -> dict[str, type[ImageLayout]]:
    return {kind.name: kind for kind in kinds}


LayoutName = Literal[
    "square",
    "idefics3",
    "tiles",
    "anyres",
    "anyres_max_9",
    "native",
    "qwen_vl",
    "glm_v",
    "paddleocr_vl",
]
LAYOUTS = _by_name(
    Square,
    Idefics3,
    Tiles,
    Anyres,
    AnyresMax9,
    Native,
    QwenVl,
    GlmV,
    PaddleOcrVl,
)
_KEYS = itertools.chain(*(layout.keys for layout in LAYOUTS.values()))
LAYOUT_KEYS = tuple(dict.fromkeys(_KEYS))  # of model.vision
TEXT_ALONE = _by_name(Require, Strip)
