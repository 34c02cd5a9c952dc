"""The stock image processor that does to a picture what `data.images.ImageTransform` does.

ImageTransform (size, mean, std, interpolation, fit) --> preprocessor_config.json of transformers' LlavaImageProcessor

Measured with transformers 5.23 in levels of 0..255, on pictures of 1 x 1 to 1000 x 30 pixels: its Pillow backend gives
the same floats, whatever the size, fit and interpolation. torchvision, its default where that is installed, gives them
to 3e-7 for pictures of the encoder's size; others differ by up to 2 levels (bicubic, bilinear), by 25 where a noisy
strip of 1000 x 30 is stretched, by anything for nearest; box and hamming it does not know. No file can choose the
backend: `AutoProcessor.from_pretrained(folder, backend="pil")` does (transformers 4: use_fast=False).
"""

from __future__ import annotations

from PIL import Image

from mmtrain.data.stream.images import ImageTransform

NEAR_WITH_TORCHVISION = ("bilinear", "bicubic", "lanczos")


def image_processor_config(transform: ImageTransform) -> dict:
    """The content of preprocessor_config.json.

    One class serves every fit: it pads to a square of int(255 x mean) first, then resizes, then crops. Nothing is left
    to crop but for center_crop; crop_size is what other software reads the encoder's size from.
    """
    square = {"height": transform.image_size, "width": transform.image_size}
    return {
        "image_processor_type": "LlavaImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_pad": transform.fit == "pad",
        "do_resize": True,
        "size": {"shortest_edge": transform.image_size} if transform.fit == "center_crop" else square,
        "resample": int(Image.Resampling[transform.interpolation.upper()]),
        "do_center_crop": True,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(transform.mean),
        "image_std": list(transform.std),
    }


def image_processor_notes(transform: ImageTransform) -> list[str]:
    """Sentences for the model card: how to get the pixels of training."""
    size = f"{transform.image_size} x {transform.image_size}"
    exact = '`AutoProcessor.from_pretrained(folder, backend="pil")` (transformers 4: `use_fast=False`)'
    if transform.interpolation in NEAR_WITH_TORCHVISION:
        backend = (
            f"Training resizes pictures with Pillow. {exact} does the same, to the bit; the default backend, "
            f"torchvision, differs by a level or two of 255 where a picture is not {size} pixels already."
        )
    else:
        backend = (
            f"Training resizes pictures by Pillow's {transform.interpolation} filter, which torchvision, the default "
            f"backend, does not have. Load the processor with {exact}."
        )
    colour = (
        "Training drops transparency and the lower 8 of 16 bits; transformers puts transparent pictures on white, and "
        "Pillow cuts 16 bits off. Pictures with either must be turned into 8-bit RGB first."
    )
    return [backend, colour]
