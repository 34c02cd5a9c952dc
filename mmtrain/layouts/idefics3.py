"""One square between the texts of Idefics3Processor for an image that it does not split."""

from mmtrain.layouts.layout import ImageLayout, Tiling

_BEFORE, _BEHIND = "<fake_token_around_image><global-img>", "<fake_token_around_image>"


class Idefics3(ImageLayout):
    """Idefics3's and SmolVLM's."""

    name = "idefics3"
    has_texts = True
    marks = ("<fake_token_around_image>", "<global-img>")
    texts = (name, _BEFORE, _BEHIND)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        return _BEFORE, tiling.positions, _BEHIND
