"""What a rank would refuse of an encoder's folder, the plan refuses: nothing of torch is needed to
see it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from json_files import read_json
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPImageProcessor

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.stream.images import image_transform
from mmtrain.facts.vision_files import patches_per_image
from mmtrain.plan.planner import make_plan

VIT = {
    "cls_token": [1, 1, 8],
    "pos_embed": [1, 3, 8],
    "patch_embed.proj.weight": [8, 3, 14, 14],
    **{
        f"blocks.{i}.{name}": shape
        for i in range(3)
        for name, shape in (("norm1.weight", [8]), ("w.weight", [8, 8]))
    },
}
CLIP = {
    "embeddings.class_embedding": [8],
    "embeddings.patch_embedding.weight": [8, 3, 14, 14],
    "embeddings.position_embedding.weight": [5, 8],
    "encoder.layers.0.mlp.fc1.weight": [8, 8],
    "encoder.layers.1.mlp.fc1.weight": [8, 8],
}


def planned(folder: Path, config: dict, shapes: dict[str, list[int]]) -> None:
    """Plan the demo's LLM behind an encoder whose folder is this."""
    encoder = folder / "encoder"
    encoder.mkdir(exist_ok=True)
    (encoder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.zeros(shape) for name, shape in shapes.items()}, encoder / "model.safetensors"
    )
    file = folder / "run.yaml"
    file.write_text(
        "{run: {name: a}, model: {llm: {path: demo:llm}, vision: {name: " + str(encoder) + "}}, "
        "data: {shards: a.tar}, train: {packs_per_step: 1, max_steps: 1}}"
    )
    make_plan(load_config(file))


def timm_config(architecture: str, size: list[int]) -> dict:
    return {"architecture": architecture, "pretrained_cfg": {"input_size": size}}


def clip_config(**changes: object) -> dict:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 28}
    return {"model_type": "clip_vision_model", **sizes} | changes


@pytest.mark.parametrize(
    ("config", "shapes", "said"),
    [
        (
            timm_config("vit_x", [3, 28, 56]),
            VIT,
            "takes images of 28 x 56 pixels; needed are square ones",
        ),
        (
            timm_config("vit_x", [3, 28, 28]) | {"model_args": {"img_size": [56, 28]}},
            VIT,
            "images of 56 x 28 pixels",
        ),
        (
            timm_config("vit_x", [3, 28, 28]),
            VIT | {"patch_embed.proj.weight": [8, 3, 14, 7]},
            "takes patches of 14 x 7 pixels; needed are square ones",
        ),
        (
            timm_config("hiera_tiny", [3, 28, 28]),
            VIT | {"blocks.2.norm1.weight": [16]},
            r"not a plain vision transformer \(hiera_tiny\).* Use a ViT",
        ),
        (
            clip_config(image_size=[28, 56]),
            CLIP,
            "takes images of 28 x 56 pixels; needed are square ones",
        ),
        (
            clip_config(image_size=56),
            CLIP,
            "images of 56 pixels have 17 patches and class tokens, but .* has 5 rows",
        ),
    ],
)
def test_an_encoder_that_no_rank_could_run_is_refused_by_the_plan(tmp_path, config, shapes, said):
    with pytest.raises(UserError, match=said):
        planned(tmp_path, config, shapes)


def test_a_clip_without_preprocessor_config_is_refused_saying_which_call_makes_it(tmp_path):
    with pytest.raises(
        UserError,
        match=r"no preprocessor_config\.json.* SiglipImageProcessor\(\)\.save_pretrained\('",
    ):
        planned(tmp_path, clip_config(), CLIP)
    CLIPImageProcessor().save_pretrained(tmp_path / "encoder")
    planned(tmp_path, clip_config(), CLIP)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_mean": [0.5]}, r"image_mean is \[0\.5\]; needed are three numbers"),
        ({"image_std": [1, 1, 0]}, "needed are three numbers from 0.001 to 10"),
        (
            {"image_mean": [1e30, 0, 0]},
            r"image_mean is \[1e\+30, 0, 0\]; needed are three numbers from -10 to 10",
        ),
        ({"resample": 17}, "says resample 17, which no model has"),
        ({"resample": {"value": 3}}, "says resample {'value': 3}, which no model has"),
        ({"do_rescale": False}, "do_rescale is false, so its encoder takes bytes as they are"),
        ({"do_normalize": 0}, "says do_normalize 0, which no model has; needed is true or false"),
        (
            {"rescale_factor": 0},
            "says rescale_factor 0, which no model has; needed is a number from",
        ),
    ],
)
def test_a_preprocessor_config_of_no_use_is_refused_by_the_plan(tmp_path, changes, said):
    (tmp_path / "encoder").mkdir()
    facts = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]} | changes
    (tmp_path / "encoder" / "preprocessor_config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=said):
        planned(tmp_path, clip_config(), CLIP)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_normalize": False},
        {"do_normalize": False, "image_mean": None},
        {"rescale_factor": 1 / 127.5},
    ],
)
def test_pixels_are_scaled_and_normalised_as_the_stock_processor_does(tmp_path, changes):
    folder = tmp_path / "encoder"
    CLIPImageProcessor(size={"height": 28, "width": 28}, do_center_crop=False).save_pretrained(
        folder
    )
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(read_json(file) | changes))
    planned(tmp_path, clip_config(), CLIP)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8))
    stock = CLIPImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")[
        "pixel_values"
    ][0]
    transform = image_transform(str(folder), "resize")
    pixels = transform.normalise(transform.fitted(picture))
    torch.testing.assert_close(pixels, stock.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("image_size", [32, 35, 39])
def test_token_count_is_what_a_stock_encoder_returns(image_size):
    encoder = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=image_size,
        patch_size=8,
        embed_dim=12,
        depth=1,
        num_heads=1,
    )
    features = encoder.forward_features(torch.zeros(1, 3, image_size, image_size))
    assert features.shape[1] - encoder.num_prefix_tokens == patches_per_image(image_size, 8)


@pytest.mark.parametrize(("image_size", "patch_size"), [(13, 14), (224, 0)])
def test_an_image_without_a_patch_is_refused_with_both_sizes(image_size, patch_size):
    with pytest.raises(UserError, match=f"image size {image_size} with patch size {patch_size}"):
        patches_per_image(image_size, patch_size)
