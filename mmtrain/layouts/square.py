"""One square without text: Llava's, InternVL's, PerceptionLM's, AyaVision's of one tile."""

from mmtrain.layouts.layout import ImageLayout


class Square(ImageLayout):
    """One tile, made square by data.image_fit."""

    name = "square"
    in_llava = True


ONE_SQUARE = Square()
