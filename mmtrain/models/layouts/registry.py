"""The layouts by name: of model.vision.layout, and of data.images for a run without an encoder."""

from __future__ import annotations

from typing import Literal

from mmtrain.models.layouts.anyres import Anyres, AnyresMax9
from mmtrain.models.layouts.idefics3 import Idefics3
from mmtrain.models.layouts.layout import ImageLayout
from mmtrain.models.layouts.square import Square
from mmtrain.models.layouts.text_alone import Require, Strip
from mmtrain.models.layouts.tiles import Tiles

LayoutName = Literal["square", "idefics3", "tiles", "anyres", "anyres_max_9"]
LAYOUTS: dict[str, type[ImageLayout]] = {kind.name: kind for kind in (Square, Idefics3, Tiles, Anyres, AnyresMax9)}
LAYOUT_KEYS = tuple(dict.fromkeys(key for layout in LAYOUTS.values() for key in layout.keys))  # of model.vision
TEXT_ALONE: dict[str, type[ImageLayout]] = {kind.name: kind for kind in (Require, Strip)}
