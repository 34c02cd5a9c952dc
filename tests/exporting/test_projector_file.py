"""The projector alone, for mmtrain and for LLaVA's own code."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import torch
from json_files import read_json
from safetensors.torch import load_file
from torch import nn
from untrained_runs import config_of, make_checkpoint, run_export


def test_the_projector_file_says_what_it_belongs_to(checkpoint, tmp_path):
    assert run_export(checkpoint.path, "safetensors", tmp_path / "out") == 0
    content = (tmp_path / "out" / "projector.safetensors").read_bytes()
    about = read_json(tmp_path / "out" / "projector.json")
    assert about["sha256"] == {"projector.safetensors": hashlib.sha256(content).hexdigest()}
    trained, found = (
        load_file(checkpoint.tensors_file),
        load_file(tmp_path / "out" / "projector.safetensors"),
    )
    assert found.keys() == trained.keys() == set(about["trained"])
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    # without the folders of this machine
    assert (about["llm"], about["vision"]) == ("llm", "vision")
    assert (about["llm_width"], about["vision_width"], about["vision_select_layer"]) == (64, 48, -2)
    assert (about["projector_type"], about["dtype"], about["steps"]) == (
        "mlp2x_gelu",
        "float32",
        20,
    )
    assert about["data_fingerprint"] == "d" * 64 and about["versions"]["torch"] == "2"


def test_a_projector_is_exported_where_its_models_are_gone(tiny, tmp_path):
    models = tmp_path / "models"
    shutil.copytree(tiny, models)
    (models / "config.yaml").write_text(
        (tiny / "config.yaml").read_text().replace(str(tiny), str(models))
    )
    keys = (
        "model.vision.layout=tiles",
        "data.image_fit=null",
        "model.projector.type=shuffle_swiglu",
    )
    checkpoint = make_checkpoint(tmp_path / "run", config_of(models, *keys))
    models.rename(tmp_path / "gone")
    assert run_export(checkpoint.path, "safetensors", tmp_path / "out") == 0
    about = read_json(tmp_path / "out" / "projector.json")
    assert (about["vision_width"], about["layout"], about["max_tiles"]) == (48, "tiles", 12)


def test_a_run_on_text_alone_has_no_projector_in_its_file_nor_in_its_name(tiny, tmp_path):
    keys = (
        "model.vision=null",
        "data.template=llava_v1",
        "data.images=strip",
        "model.trainable=[llm.norm]",
    )
    others = {"llm.norm.weight": torch.linspace(0, 1, 64)}
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, *keys), others)
    assert run_export(checkpoint.path, "safetensors", tmp_path / "out") == 0
    assert torch.equal(
        load_file(tmp_path / "out" / "trained.safetensors")["llm.norm.weight"],
        others["llm.norm.weight"],
    )
    assert read_json(tmp_path / "out" / "trained.json")["trained"] == ["llm.norm.weight"]


def llava_module(kind: str, vision_width: int, llm_width: int) -> nn.Module:
    """As LLaVA's build_vision_projector makes it."""
    if kind == "linear":
        return nn.Linear(vision_width, llm_width)
    return nn.Sequential(
        nn.Linear(vision_width, llm_width), nn.GELU(), nn.Linear(llm_width, llm_width)
    )


@pytest.mark.parametrize("kind", ["linear", "mlp2x_gelu"])
def test_llavas_own_way_of_loading_gets_the_trained_projector_bit_for_bit(tiny, tmp_path, kind):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, f"model.projector.type={kind}"))
    assert run_export(checkpoint.path, "llava", tmp_path / "llava") == 0
    content = torch.load(
        tmp_path / "llava" / "mm_projector.bin", map_location="cpu", weights_only=True
    )
    assert type(content) is dict and all(name.startswith("model.mm_projector.") for name in content)
    config = read_json(tmp_path / "llava" / "config.json")
    module = llava_module(
        config["mm_projector_type"], config["mm_hidden_size"], config["hidden_size"]
    )
    # initialize_vision_modules takes what follows `mm_projector.` in each name
    module.load_state_dict(
        {name.split("mm_projector.")[1]: tensor for name, tensor in content.items()}
    )
    trained = load_file(checkpoint.tensors_file)
    features = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    layers = [module] if kind == "linear" else [module[0], module[2]]
    for number, layer in enumerate(layers, 1):
        for part in ("weight", "bias"):
            expected = trained[f"projector.linear_{number}.{part}"]
            assert torch.equal(getattr(layer, part).view(torch.int32), expected.view(torch.int32))
    assert module(features).shape == (3, 5, 64)


@pytest.mark.parametrize("layout", ["anyres", "anyres_max_9"])
def test_llavas_code_gets_the_newline_and_the_grids_as_width_and_height(tiny, tmp_path, layout):
    keys = (
        f"model.vision.layout={layout}",
        "data.image_fit=null",
        "model.vision.pinpoints=[[64, 32], [32, 96]]",
    )
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, *keys))
    assert run_export(checkpoint.path, "llava", tmp_path / "llava") == 0
    content = torch.load(
        tmp_path / "llava" / "mm_projector.bin", map_location="cpu", weights_only=True
    )
    # as LlavaMetaModel is made of such a config: loading is not strict, and would pass over a name
    model = nn.Module()
    model.mm_projector, model.image_newline = (
        llava_module("mlp2x_gelu", 48, 64),
        nn.Parameter(torch.empty(64)),
    )
    whole = nn.Module()
    whole.model = model
    assert whole.load_state_dict(content, strict=False) == ([], [])
    assert torch.equal(
        model.image_newline, load_file(checkpoint.tensors_file)["projector.image_newline"]
    )
    config = read_json(tmp_path / "llava" / "config.json")
    expected = {
        "image_aspect_ratio": layout,
        "image_grid_pinpoints": [[32, 64], [96, 32]],
        "mm_patch_merge_type": "spatial_unpad",
    }
    assert expected.items() <= config.items()
    assert config["mmtrain"]["layout"] == layout and config["mmtrain"]["pinpoints"] == [
        [64, 32],
        [32, 96],
    ]


def test_the_llava_config_says_what_llavas_code_asks_for(checkpoint, tiny, tmp_path):
    assert run_export(checkpoint.path, "llava", tmp_path / "llava", "--dtype", "bfloat16") == 0
    config = read_json(tmp_path / "llava" / "config.json")
    expected = {
        "model_type": "llava_llama",
        "use_mm_proj": True,
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 48,
        "mm_vision_tower": str(tiny / "vision"),
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "cls_patch",  # the tiny encoder has no class token to drop
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "image_aspect_ratio": "pad",
    }
    assert expected.items() <= config.items()
    content = torch.load(tmp_path / "llava" / "mm_projector.bin", weights_only=True)
    assert {tensor.dtype for tensor in content.values()} == {torch.bfloat16}
