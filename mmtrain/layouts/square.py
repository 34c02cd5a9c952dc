"""One square and no text around it, as Llava, AyaVision of one tile, InternVL and PerceptionLM have
it.
"""

from __future__ import annotations

from mmtrain.layouts.layout import ImageLayout


class Square(ImageLayout):
    """One tile, made square by data.image_fit."""

    name = "square"
    in_llava = True


ONE_SQUARE = Square()
