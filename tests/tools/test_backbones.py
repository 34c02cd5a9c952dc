"""The frozen models that come with mmtrain, and the tool that made them."""

import random
import re
from pathlib import Path

import pytest
import torch
from conftest import TOOLS
from json_files import read_json
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.stream.images import image_transform
from mmtrain.demo.pictures import Scans, lay, paint
from mmtrain.demo.scene import draw_scene
from mmtrain.demo.text import COLOUR_WORDS, DIGIT_WORDS
from mmtrain.facts.model_files import demo_model
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import llm_shape, vision_shape
from mmtrain.model.encoder.vision import load_vision

PACKAGE = Path(__file__).parents[2] / "mmtrain"


def test_the_package_data_is_small():
    files = [
        file
        for file in (PACKAGE / "demo").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    assert sum(file.stat().st_size for file in files) <= 8e6


def test_the_llm_is_a_stock_llama_whose_tokenizer_has_a_chat_template_and_an_image_row():
    folder = demo_model("demo:llm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.config.model_type == "llama" and not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys")
    )
    assert (
        tokenizer.convert_tokens_to_ids("<image>") == len(tokenizer) - 1 < model.config.vocab_size
    )
    for word in (*COLOUR_WORDS, *DIGIT_WORDS):
        assert len(tokenizer(f" {word}", add_special_tokens=False).input_ids) == 1
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "<image>\nHi"}], tokenize=False
    )
    assert text == "<s>USER: <image>\nHi "


def test_a_text_with_any_characters_survives_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(demo_model("demo:llm"))
    text = "Über 3 naïve 数字, \t and \U0001f642?"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_encoder_is_exactly_a_siglip_tower():
    """Weights renamed, timm's joint query-key-value split; reference: transformers'
    SiglipVisionModel.
    """
    tower = load_vision("demo:vision", -1, torch.float32)
    model = tower.model
    config = SiglipVisionConfig(
        hidden_size=model.embed_dim,
        intermediate_size=model.blocks[0].mlp.fc1.out_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        image_size=64,
        patch_size=16,
        hidden_act="gelu",
        vision_use_head=False,
    )
    stock = SiglipVisionModel(config).eval()
    weights = {
        "embeddings.patch_embedding.weight": model.patch_embed.proj.weight,
        "embeddings.patch_embedding.bias": model.patch_embed.proj.bias,
        "embeddings.position_embedding.weight": model.pos_embed[0],
    }
    for number, block in enumerate(model.blocks):
        layer = f"encoder.layers.{number}"
        renamed = {
            "layer_norm1": block.norm1,
            "layer_norm2": block.norm2,
            "self_attn.out_proj": block.attn.proj,
            "mlp.fc1": block.mlp.fc1,
            "mlp.fc2": block.mlp.fc2,
        }
        for name, module in renamed.items():
            weights |= {
                f"{layer}.{name}.weight": module.weight,
                f"{layer}.{name}.bias": module.bias,
            }
        for kind in ("weight", "bias"):
            parts = getattr(block.attn.qkv, kind).chunk(3)
            weights |= {
                f"{layer}.self_attn.{n}_proj.{kind}": p for n, p in zip("qkv", parts, strict=True)
            }
    prefix = (
        "vision_model."
        if any(key.startswith("vision_model.") for key in stock.state_dict())
        else ""
    )
    missing, unexpected = stock.load_state_dict(
        {prefix + k: v for k, v in weights.items()}, strict=False
    )
    assert not unexpected and all("post_layernorm" in key for key in missing)
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stock(images, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(tower(images), expected, rtol=1e-5, atol=1e-5)


def test_the_native_encoder_is_stock_and_sees_a_sheet_in_its_own_shape():
    """Reference: Siglip2VisionModel on what its own image processor makes of the sheet."""
    config, folder = load_config("example:demo_native"), demo_model("demo:vision_native")
    draw = random.Random(0)
    sheet, _ = lay(paint(draw_scene(draw), Scans("held-out"), draw), draw)
    inputs = AutoImageProcessor.from_pretrained(folder)(
        sheet, max_num_patches=config.model.vision.max_positions, return_tensors="pt"
    )
    assert inputs["spatial_shapes"].tolist() == [[4, 16]]
    stock, info = Siglip2VisionModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys"))
    transform = image_transform(config.model.vision.name, tile_size=stock.config.patch_size)
    cells = transform.normalise(transform.cut(sheet, models_of(config).layout.tiling(*sheet.size)))
    tower = load_vision(config.model.vision.name, -1, torch.float32, final_norm=True)
    with torch.no_grad():
        torch.testing.assert_close(
            tower(cells, ((4, 16),))[:, 0], stock(**inputs).last_hidden_state[0]
        )


def test_planning_knows_the_demo_models():
    assert len(llm_shape("demo:llm").decoder) == 4
    vision = vision_shape("demo:vision", -1)
    assert (vision.patches_per_image, vision.width, vision.prefix_tokens) == (16, 128, 0)
    native = vision_shape("demo:vision_native", -1)
    assert (native.width, native.heads, native.blocks_run) == (
        vision.width,
        vision.heads,
        vision.blocks_run,
    )
    with pytest.raises(
        UserError, match="demo:gpt: the demo has no such model, only demo:llm, demo:vision"
    ):
        llm_shape("demo:gpt")


def test_a_scene_of_the_demo_reaches_the_encoder_pixel_by_pixel():
    draw = random.Random(0)
    picture = paint(draw_scene(draw), Scans("held-out"), draw)
    transform = image_transform("demo:vision")
    pixels = transform.normalise(transform.fitted(picture))
    back = ((pixels * 0.5 + 0.5) * 255).round().byte().permute(1, 2, 0)
    assert bytes(back.numpy()) == picture.tobytes()


# ---- where they come from


def test_the_llm_training_knows_no_pictures_and_the_encoder_training_no_words():
    names = ("train_demo_llm", "train_demo_backbones", "native_encoder")
    llm, driver, native = ((TOOLS / "demo_backbones" / f"{name}.py").read_text() for name in names)
    of_llm, of_encoder = (
        set(re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.M)) for text in (llm, driver)
    )
    assert not of_llm & {
        "PIL",
        "timm",
        "torchvision",
        "sklearn",
        "mmtrain.demo.pictures",
        "mmtrain.demo.data",
    }
    assert not of_encoder & {"transformers", "tokenizers", "mmtrain.demo.text", "mmtrain.demo.data"}
    assert re.findall(r"import (.+)", native) == [
        "json",
        "Path",
        "torch",
        "Siglip2VisionConfig, Siglip2VisionModel",
    ]
    # named, and called for the LLM alone
    assert re.findall(r"train_demo_llm\.(\w+)", driver) == ["py", "train_llm"]


@pytest.mark.nightly
def test_the_tool_makes_all_models_and_makes_them_again_the_same(tmp_path, capsys):
    import train_demo_backbones as tool

    for name in ("first", "second"):
        assert tool.main(["--out", str(tmp_path / name), "--steps", "2", "--threads", "1"]) == 0
    for name in ("llm", "vision", "vision_native"):
        made = {file.name: file.read_bytes() for file in (tmp_path / "first" / name).iterdir()}
        assert made == {
            file.name: file.read_bytes() for file in (tmp_path / "second" / name).iterdir()
        }
        assert made.keys() == {file.name for file in demo_model(f"demo:{name}").iterdir()}
    record = read_json(tmp_path / "first" / "backbones.json")
    assert [record[name]["steps"] for name in ("llm", "vision", "vision_native")] == [2, 2, 2]
    assert all(
        0 <= record[name]["encoder_cell_accuracy_held_out"] <= 1
        for name in ("vision", "vision_native")
    )
    for wrong in (["--steps", "0"], ["--threads", "0"]):
        with pytest.raises(SystemExit, match="2"):
            tool.main(["--out", str(tmp_path), *wrong])
    (tmp_path / "file").touch()
    assert tool.main(["--out", str(tmp_path / "file" / "below"), "--steps", "1"]) == 2
    assert "error: " in capsys.readouterr().err
    made = AutoTokenizer.from_pretrained(tmp_path / "first/llm")
    assert made.get_vocab() == AutoTokenizer.from_pretrained(demo_model("demo:llm")).get_vocab()
