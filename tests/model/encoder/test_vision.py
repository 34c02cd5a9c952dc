import re
import shutil
from functools import cache, partial

import pytest
import timm
import torch
from coded_folders import write_codes
from json_files import read_json, write_json
from safetensors.torch import load_file, save_file
from scenes import images, perturb
from stock_encoders import DINO_SIZES, ENCODERS
from sweeps import sweep
from torch import nn
from transformers import Dinov2Config, Dinov2Model
from untrained_runs import make_tower

from mmtrain.base.errors import UserError
from mmtrain.facts.shapes import vision_shape
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.weights.files import open_tensors, tensor_entries


def block_output(model: nn.Module, block: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """What a block of the stock model gives out in the stock forward."""
    seen = []
    with (
        block.register_forward_hook(lambda module, inputs, output: seen.append(output)),
        torch.no_grad(),
    ):
        model(pixels)
    return seen[0]


DAILY = ("clip", "siglip", "dinov2_registers", "vit", "internvl")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """Makes the folder of one of `ENCODERS`, once."""

    @cache
    def made(kind):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        perturb(ENCODERS[kind][0]()).save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("select_layer", [-1, -2, -4])
def test_a_timm_tower_gives_the_selected_blocks_output_without_prefix_tokens(
    tmp_path, class_token, select_layer
):
    changes = {"class_token": class_token, "global_pool": "avg", "depth": 4}
    folder = make_tower(tmp_path / "vision", "vit_tiny_patch16_224", changes)
    stock = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    expected = block_output(stock, stock.blocks[select_layer], images(28))[
        :, stock.num_prefix_tokens :
    ]
    tower = load_vision(str(folder), select_layer, torch.float32)
    assert torch.equal(tower(images(28)), expected)
    assert (tower.width, tower.patches_per_image, tower.image_size) == (32, 16, 28)


@pytest.mark.parametrize("kind", sweep(ENCODERS, DAILY))
def test_an_hf_tower_gives_stock_hidden_states_without_class_and_register_tokens_normed_if_asked_for(
    hf_folder, kind
):
    make, path, prefix_tokens = ENCODERS[kind]
    encoder = type(make()).from_pretrained(hf_folder(kind)).eval().get_submodule(path)
    with torch.no_grad():
        stock = encoder(images(28), output_hidden_states=True)
    for select_layer in (-1, -2, -4):
        tower = load_vision(str(hf_folder(kind)), select_layer, torch.float32)
        features = tower(images(28))
        assert torch.equal(features, stock.hidden_states[select_layer][:, prefix_tokens:])
        assert features.shape == (3, tower.patches_per_image, tower.width) == (3, 16, 32)
    if kind.startswith("clip"):
        for look in (vision_shape, partial(load_vision, dtype=torch.float32)):
            with pytest.raises(UserError, match="has no final norm over its patches"):
                look(str(hf_folder(kind)), -1, final_norm=True)
        return
    normed = load_vision(str(hf_folder(kind)), -1, torch.float32, final_norm=True)
    assert torch.equal(normed(images(28)), stock.last_hidden_state[:, prefix_tokens:])
    assert torch.equal(stock.last_hidden_state, stock.hidden_states[-1]) == kind.startswith(
        "intern"
    )
    kept = {name: tuple(parameter.shape) for name, parameter in normed.global_parameters()}
    assert kept == {
        p.name: p.shape for p in vision_shape(str(hf_folder(kind)), -1, final_norm=True).parameters
    }


def test_the_gates_of_a_large_dinov2_which_files_hold_as_one_tensor_are_taken_apart(tmp_path):
    stock = perturb(Dinov2Model(Dinov2Config(**DINO_SIZES, use_swiglu_ffn=True)))
    stock.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = stock.eval()(images(28), output_hidden_states=True).hidden_states[-2][:, 1:]
    tower = load_vision(str(tmp_path), -2, torch.float32)
    assert torch.equal(tower(images(28)), expected)
    kept = sum(parameter.numel() for _, parameter in tower.global_parameters())
    assert kept == sum(parameter.numel for parameter in vision_shape(str(tmp_path), -2).parameters)


@pytest.mark.parametrize(
    "architecture",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_small_patch16_dinov3",
        "test_vit2",
    ],
)
def test_behind_the_final_norm_a_timm_tower_gives_forward_features_without_prefix_tokens(
    tmp_path, architecture
):
    folder = make_tower(tmp_path / "vision", architecture, {"depth": 2})
    stock = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        expected = stock.forward_features(images(28))[:, stock.num_prefix_tokens :]
    tower = load_vision(str(folder), -1, torch.float32, final_norm=True)
    assert torch.equal(tower(images(28)), expected)
    same = torch.equal(load_vision(str(folder), -1, torch.float32)(images(28)), expected)
    assert same == isinstance(stock.norm, nn.Identity)
    kept = {name: tuple(parameter.shape) for name, parameter in tower.global_parameters()}
    assert kept == {
        p.name: p.shape for p in vision_shape(str(folder), -1, final_norm=True).parameters
    }


@pytest.mark.parametrize("kind", sweep(("timm", *ENCODERS), ("timm", *DAILY)))
def test_only_what_runs_is_kept_and_the_planner_counts_the_same(tiny, hf_folder, kind):
    folder = tiny / "vision" if kind == "timm" else hf_folder(kind)
    tower = load_vision(str(folder), -2, torch.float32)
    kept = {name: tuple(parameter.shape) for name, parameter in tower.global_parameters()}
    planned = vision_shape(str(folder), -2)
    assert kept == {parameter.name: parameter.shape for parameter in planned.parameters}
    assert planned.patches_per_image == tower.patches_per_image
    assert {int(block[1]) for name in kept if (block := re.search(r"\.(\d+)\.", name))} == {0, 1, 2}
    behind = (
        "vision.head",
        "vision.norm.",
        "vision.layernorm",
        "vision.post_layernorm",
        "vision.pooler",
    )
    assert not any(name.startswith(behind) or "mask_token" in name for name in kept)


def test_a_tower_is_frozen_in_eval_mode_and_stored_in_its_dtype(tiny, hf_folder):
    for folder in (tiny / "vision", hf_folder("clip"), hf_folder("siglip")):
        tower = load_vision(str(folder), -2, torch.bfloat16)
        assert {parameter.dtype for _, parameter in tower.global_parameters()} == {torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in tower.parameters())
        assert not any(module.training for module in tower.model.modules())
        features, exact = (
            load_vision(str(folder), -2, d)(images(tower.image_size))
            for d in (torch.bfloat16, torch.float32)
        )
        assert features.dtype == torch.bfloat16 and not features.requires_grad
        assert (
            torch.nn.functional.cosine_similarity(
                features.float().flatten(), exact.flatten(), dim=0
            )
            > 0.999
        )


@pytest.mark.parametrize("architecture", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_rotary_tables_stay_unrounded_in_bfloat16(tmp_path, architecture):
    arguments = {
        "img_size": 28,
        "patch_size": 7,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "num_classes": 0,
    }
    stock = perturb(timm.create_model(architecture, pretrained=False, **arguments))
    tables = {name: table.clone() for name, table in stock.named_buffers()}
    assert tables and not set(tables) & set(stock.state_dict())
    facts = {"input_size": [3, 28, 28], "num_classes": 0}
    config = {"architecture": architecture, "model_args": arguments, "pretrained_cfg": facts}
    write_json(tmp_path / "config.json", config)
    save_file(stock.state_dict(), tmp_path / "model.safetensors")
    tower = load_vision(str(tmp_path), -2, torch.bfloat16)
    for name, table in tower.model.named_buffers():
        assert torch.equal(table, tables[name]), name
    expected = block_output(stock, stock.blocks[-2], images(28))[:, stock.num_prefix_tokens :]
    features = tower(images(28)).float()
    assert (
        torch.nn.functional.cosine_similarity(features.flatten(), expected.flatten(), dim=0) > 0.999
    )


def test_a_timm_name_loads_its_weights_from_the_local_hub_cache(tmp_path, monkeypatch):
    stock = perturb(timm.create_model("test_vit", pretrained=False))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"not in the local cache .*: hf download timm/test_vit\.r160_in1k"
    ):
        load_vision("test_vit.r160_in1k", -2, torch.float32)
    repository = tmp_path / "models--timm--test_vit.r160_in1k"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    save_file(stock.state_dict(), repository / "snapshots" / "abc" / "model.safetensors")
    expected = block_output(stock, stock.blocks[-2], images(160))[:, stock.num_prefix_tokens :]
    assert torch.equal(load_vision("test_vit.r160_in1k", -2, torch.float32)(images(160)), expected)


def test_incomplete_weights_are_refused_instead_of_filled_at_random(hf_folder, tiny, tmp_path):
    for source, tensor in (
        (hf_folder("siglip"), "encoder.layers.1.mlp.fc1.weight"),
        (tiny / "vision", "blocks.1.mlp.fc1.weight"),
    ):
        folder = tmp_path / source.name
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        weights = load_file(source / "model.safetensors")
        name = next(name for name in weights if name.endswith(tensor))
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=tensor.replace(".", r"\.")):
            load_vision(str(folder), -1, torch.float32)


@pytest.mark.parametrize("kind", sweep(ENCODERS, DAILY))
def test_a_kernel_that_config_json_names_is_not_downloaded(hf_folder, tmp_path, kind):
    source, folder = hf_folder(kind), shutil.copytree(hf_folder(kind), tmp_path / kind)
    config = read_json(folder / "config.json")
    inner = config.get("vision_config", config)
    inner["_attn_implementation"] = config["_attn_implementation"] = "kernels-community/flash-attn"
    write_json(folder / "config.json", config)
    expected = load_vision(str(source), -2, torch.float32)(images(28))
    assert torch.equal(load_vision(str(folder), -2, torch.float32)(images(28)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "evil"}, "cannot be used"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            r"its weights are quantised \(bitsandbytes\)",
        ),
    ],
)
def test_an_encoder_that_cannot_be_read_is_refused_by_its_folder(
    hf_folder, tmp_path, change, message
):
    folder = shutil.copytree(hf_folder("clip_vision"), tmp_path / "clip")
    config = read_json(folder / "config.json") | change
    write_json(folder / "config.json", config)
    with pytest.raises(UserError, match=f"{folder}:? {message}"):
        load_vision(str(folder), -2, torch.float32)


def test_an_encoder_with_published_codes_is_the_one_that_they_stand_for(hf_folder, tmp_path):
    coded, plain = (shutil.copytree(hf_folder("clip_vision"), tmp_path / name) for name in "ab")
    write_codes(coded)
    entries = tensor_entries(coded)
    assert any(entry.scales is not None for entry in entries.values())
    dequantised = {name: weight[...] for name, weight in open_tensors(entries).items()}
    save_file(dequantised, plain / "model.safetensors", metadata={"format": "pt"})
    ours, expected = (
        load_vision(str(one), -2, torch.float32).state_dict() for one in (coded, plain)
    )
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


@pytest.mark.parametrize("arguments", [{"act_layer": "os.system"}, {"no_such_argument": 1}])
def test_an_error_of_timm_is_one_that_names_the_folder(tiny, tmp_path, arguments):
    folder = shutil.copytree(tiny / "vision", tmp_path / "timm")
    config = read_json(folder / "config.json")
    config["model_args"] = config.get("model_args", {}) | arguments
    write_json(folder / "config.json", config)
    with pytest.raises(UserError, match=f"{folder} cannot be used"):
        load_vision(str(folder), -2, torch.float32)
