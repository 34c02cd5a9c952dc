"""No encoder: images take no position. data.images says what becomes of a sample that has some."""

from __future__ import annotations

from mmtrain.models.layouts.layout import ImageLayout


class Require(ImageLayout):
    """A sample that has images is unusable."""

    name = "require"
    takes_images = False

    @property
    def index_options(self) -> str:
        return f" --images {self.name}"


class Strip(Require):
    """Images and their marks are taken out of samples."""

    name = "strip"
    strips = True
    texts = (name, "", "")
