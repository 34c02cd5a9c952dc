"""A tiny SigLIP 2 NaFlex in stock code; apart, since what trains the demo's encoders must know no
text.
"""

import json
from pathlib import Path

import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel


def make_encoder() -> Siglip2VisionModel:
    """As wide and deep as the encoder of notes; its MLP is smaller by what a table of 16 x 16
    positions takes.
    """
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 480,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return Siglip2VisionModel(
        Siglip2VisionConfig(**sizes, num_patches=256, patch_size=16, vision_use_head=False)
    )


def native_features(encoder: Siglip2VisionModel, images: torch.Tensor) -> torch.Tensor:
    """Images (N, 3, H, W) of whole patches to features (N, patches, width), in reading order."""
    rows, columns = (side // 16 for side in images.shape[2:])
    patches = images.unflatten(3, (columns, 16)).unflatten(2, (rows, 16)).permute(0, 2, 4, 3, 5, 1)
    patches, grids = patches.flatten(3).flatten(1, 2), torch.tensor([[rows, columns]] * len(images))
    return encoder(patches, pixel_attention_mask=None, spatial_shapes=grids).last_hidden_state


def save_native_folder(encoder: Siglip2VisionModel, folder: Path) -> None:
    """Write a folder of transformers, weights in their own dtype; images are normalised to -1 ..
    1.
    """
    encoder.save_pretrained(folder)
    images = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
        "patch_size": 16,
        "max_num_patches": 256,
    }
    content = json.dumps({"image_processor_type": "Siglip2ImageProcessor", **images}, indent=2)
    (folder / "preprocessor_config.json").write_text(content + "\n")
