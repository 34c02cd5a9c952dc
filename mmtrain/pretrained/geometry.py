"""Image size to patches to LLM tokens: the only place that knows how many tokens an image takes.

An encoder cuts an image of (image_size, image_size) pixels into a grid of (patch_size, patch_size) patches and returns
one feature per patch; class and register tokens are dropped before the projector, which maps features one to one.
"""

from __future__ import annotations

from mmtrain.base.errors import UserError


def tokens_per_image(image_size: int, patch_size: int) -> int:
    """LLM positions that one image takes: (image_size // patch_size) squared, both sizes in pixels.

    An encoder's patch convolution drops what is left over at the right and the bottom, hence the floor (SigLIP: 384 px
    in patches of 14 give 27 x 27). Raises UserError when not even one patch fits.
    """
    if patch_size < 1 or image_size < patch_size:
        raise UserError(
            f"image size {image_size} with patch size {patch_size}: not one patch fits; the vision model's "
            "configuration must give an image at least as large as a patch"
        )
    return (image_size // patch_size) ** 2
