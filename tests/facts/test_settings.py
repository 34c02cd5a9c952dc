"""What no model says in its JSON files is refused when they are read; what published models say is
not.
"""

import pytest

from mmtrain.base.errors import UserError
from mmtrain.facts.settings import check_layers, check_settings, check_sizes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"hidden_size": "64"},
            "hidden_size '64', which no model has; needed is a whole number from 1 to 1,000,000",
        ),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers 1000000000, which"),
        ({"num_attention_heads": True}, "num_attention_heads True, which"),
        ({"vision_config": [1]}, r"vision_config \[1\], which no model has; needed is an object"),
        ({"model_type": ["llama"]}, "needed is a text"),
        ({"resample": [3]}, r"resample \[3\], which"),
        ({"tile_size": 10**9}, "tile_size 1000000000, which"),
        ({"max_patches": 10**9}, "max_patches 1000000000, which"),
        ({"downsample_ratio": 1e-9}, "downsample_ratio 1e-09, which"),
        ({"tie_word_embeddings": "yes"}, "needed is true or false"),
        ({"layer_types": [1, 2]}, "needed is a list of texts"),
        ({"image_processor": {"size": {"height": 10**6}}}, "height 1000000, which"),
        ({"model_args": {"mlp_ratio": 1e5}}, "mlp_ratio 100000.0, which"),
        ({"model_args": {"depth": "x"}}, "depth 'x', which"),
        ({"head_dim": {"value": 3}}, r"head_dim {'value': 3}, which"),
        (
            {"model_max_length": "4096"},
            "model_max_length '4096', which no model has; needed is a number from 1",
        ),
        (
            {"rope_parameters": [1]},
            r"rope_parameters \[1\], which no model has; needed is an object",
        ),
        (
            {"rope_scaling": {"mrope_section": [16, 24]}},
            r"mrope_section \[16, 24\], which no model has; needed is three",
        ),
    ],
)
def test_a_value_that_no_model_has_is_refused_wherever_it_stands(content, said):
    with pytest.raises(UserError, match=f"^a/config.json says .*{said}"):
        check_settings(content, "a/config.json")


def test_what_published_models_say_is_taken():
    swin = {
        "model_type": "swin",
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "image_size": 224,
    }
    wrapped = {
        "architecture": "vit_pe_core",
        "model_args": {"img_size": [448, 448]},
        "pretrained_cfg": None,
    }
    llava = {
        "model_type": "llava_qwen",
        "image_grid_pinpoints": "(1x1),...,(6x6)",
        "image_crop_resolution": None,
    }
    tokenizer = {
        "model_max_length": 1000000000000000019884624838656,
        "eos_token_id": [1, 2],
        "pad_token_id": -1,
    }
    for content in (
        swin,
        wrapped,
        llava,
        tokenizer,
        {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    ):
        check_settings(content, "config.json")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"num_attention_heads": 5, "hidden_size": 64}, "hidden size 64 and 5 attention heads"),
        ({"n_head": 5, "d_model": 64}, "hidden size 64 and 5 attention heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads in 3 groups"),
        ({"num_key_value_heads": [2, 4]}, "needed is one number for all layers"),
    ],
)
def test_layers_that_differ_and_heads_that_do_not_divide_are_refused(part, said):
    with pytest.raises(UserError, match=said):
        check_layers(part, "config.json")
    check_layers(part | {"num_attention_heads": 4, "num_key_value_heads": 2}, "config.json")


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_model_larger_than_its_tensors_is_refused(key):
    tensors = {"embedding": (9, 4), "norm": (4,)}
    for content in ({key: 10}, {"vision_config": {"model_args": {key: 10}}}):
        with pytest.raises(UserError, match=f"folder: config.json says {key} 10, but "):
            check_sizes(content, tensors, "folder")
    check_sizes({key: 2}, tensors, "folder")
