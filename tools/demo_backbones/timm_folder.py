"""Saves a small timm ViT as a folder that timm loads; apart, since what trains the demo's encoder
must know no text.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import nn


def save_timm_folder(model: nn.Module, folder: Path, architecture: str, model_args: dict) -> None:
    """Write config.json and model.safetensors, weights in their own dtype; images are normalised to
    -1 .. 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architecture": architecture,
        "num_classes": 0,
        "num_features": model_args["embed_dim"],
        "model_args": model_args,
        "pretrained_cfg": {
            "input_size": [3, model_args["img_size"], model_args["img_size"]],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": 0,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
