"""Exported encoders in stock LLaVA: loaded from disk, then compared where the projector takes its
input.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scenes import images, perturb
from stock_encoders import DINO_SIZES, ENCODERS, HF_SIZES
from tiers import nightly
from transformers import (
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    SiglipConfig,
    SiglipModel,
)
from untrained_runs import make_tower

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.exporting.vision import ExportedEncoder, encoder_for_export
from mmtrain.facts.models import models_of
from mmtrain.model.encoder.vision import load_vision

CONFIG = Path(__file__).parents[2] / "configs" / "llava_pp4.yaml"
SMALL_TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}

# Architecture, what differs from make_tower's, and the stock model that computes it.
TIMM = {
    "siglip": ("vit_base_patch16_siglip_224", {}, "siglip_vision_model"),
    "siglip with tanh": (
        "vit_base_patch16_siglip_224",
        {"act_layer": "gelu_tanh"},
        "siglip_vision_model",
    ),
    "siglip with a rest of pixels": (
        "vit_base_patch16_siglip_224",
        {"img_size": 33},
        "siglip_vision_model",
    ),
    "clip": ("vit_base_patch16_clip_224", {}, "clip_vision_model"),
    "quickgelu clip": ("vit_base_patch16_clip_quickgelu_224", {}, "clip_vision_model"),
    "clip with an apart class token": (
        "vit_base_patch16_clip_224",
        {"no_embed_class": True},
        "clip_vision_model",
    ),
    "averaging vit": (
        "vit_tiny_patch16_224",
        {"class_token": False, "global_pool": "avg"},
        "siglip_vision_model",
    ),
    "vit without biases and norm": (
        "vit_tiny_patch16_224",
        {
            "class_token": False,
            "global_pool": "avg",
            "qkv_bias": False,
            "proj_bias": False,
            "final_norm": False,
        },
        "siglip_vision_model",
    ),
    "vit": ("vit_tiny_patch16_224", {}, "dinov2"),
    "dinov2": ("vit_small_patch14_dinov2", {}, "dinov2"),
    "deit3": ("deit3_small_patch16_224", {}, "dinov2"),
}
OTHERS = {
    f"hf {kind}": make for kind, (make, _, prefix_tokens) in ENCODERS.items() if prefix_tokens < 2
} | {
    "hf siglip beside text": lambda: SiglipModel(
        SiglipConfig(vision_config=HF_SIZES, text_config=SMALL_TEXT)
    ),
    "hf dinov2 with gates": lambda: Dinov2Model(Dinov2Config(**DINO_SIZES, use_swiglu_ffn=True)),
    "hf dinov3 without registers": lambda: DINOv3ViTModel(
        DINOv3ViTConfig(**HF_SIZES, num_register_tokens=0)
    ),
}
WITHOUT = {"hf siglip without head": "head.", "hf siglip without last norm": "post_layernorm."}


def save_hf(folder: Path, kind: str) -> Path:
    perturb(OTHERS.get(kind, OTHERS["hf siglip"])()).save_pretrained(folder)
    if kind in WITHOUT:
        weights = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if WITHOUT[kind] not in name}
        assert len(kept) < len(weights)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, str]:
    """A folder of every kind, and the demo's own encoder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoders")
    made = {kind: make_tower(folder / kind, *TIMM[kind][:2]) for kind in TIMM}
    made |= {kind: save_hf(folder / kind, kind) for kind in (*OTHERS, *WITHOUT)}
    return {kind: str(path) for kind, path in made.items()} | {"demo": "demo:vision"}


def exported(
    name: str, select_layer: int = -2, trained: dict | None = None, *, final_norm: bool = False
) -> ExportedEncoder:
    choices = [f"model.vision.{key}" for key in (f"name={name}", f"select_layer={select_layer}")]
    choices.append(f"model.vision.final_norm={str(final_norm).lower()}")
    own = {weight.removeprefix("vision."): tensor for weight, tensor in (trained or {}).items()}
    return encoder_for_export(models_of(load_config(CONFIG, choices)), own)


def stock_llava(encoder: ExportedEncoder, folder: Path) -> LlavaForConditionalGeneration:
    """A LLaVA folder with this vision tower, as stock transformers loads it; nothing may be missing
    or left over.
    """
    width = encoder.config["hidden_size"]
    text = LlamaConfig(**SMALL_TEXT)
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": encoder.config,
        "text_config": text.to_dict(),
        "image_token_index": 49,
        "vision_feature_layer": encoder.feature_layer,
        "vision_feature_select_strategy": encoder.select_strategy,
    }
    tensors = {
        f"vision_tower.{name}": source.read().clone() for name, source in encoder.tensors.items()
    }
    tensors |= {
        f"language_model.{name}": tensor
        for name, tensor in LlamaForCausalLM(text).state_dict().items()
    }
    for layer, shape in (("linear_1", (16, width)), ("linear_2", (16, 16))):
        tensors |= {
            f"multi_modal_projector.{layer}.weight": torch.randn(shape),
            f"multi_modal_projector.{layer}.bias": torch.randn(16),
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert {key: list(found) for key, found in info.items() if found} == {}
    return model.eval()


def features(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """What stock LLaVA hands to its projector."""
    seen = []
    projector = model.model.multi_modal_projector
    with (
        projector.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
        torch.no_grad(),
    ):
        model.model.get_image_features(
            pixels,
            vision_feature_layer=model.config.vision_feature_layer,
            vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        )
    return seen[0]


KINDS = [*TIMM, *OTHERS, *WITHOUT, "demo"]
# Daily each kind at one of the two layers.
AT_LAYERS = [*zip(KINDS, itertools.cycle((-1, -2)), strict=False)]
AT_LAYERS += [nightly(kind, -3 - layer) for kind, layer in AT_LAYERS]


@pytest.mark.parametrize(("kind", "select_layer"), AT_LAYERS)
def test_stock_llava_computes_the_features_that_the_projector_was_trained_on(
    encoders, tmp_path, kind, select_layer
):
    tower = load_vision(encoders[kind], select_layer, torch.float32)
    encoder = exported(encoders[kind], select_layer)
    expected = tower(images(tower.image_size))
    got = features(stock_llava(encoder, tmp_path), images(tower.image_size))
    assert got.shape == expected.shape == (3, tower.patches_per_image, tower.width)
    assert torch.allclose(got, expected, rtol=0, atol=1e-5)
    assert encoder.config["image_size"] == tower.image_size
    assert (tower.image_size // encoder.patch_size) ** 2 == tower.patches_per_image
    assert (encoder.prefix_tokens, encoder.select_strategy) in [(0, "full"), (1, "default")]
    if kind in TIMM:
        assert encoder.config["model_type"] == TIMM[kind][2]


NORMED = [kind for kind in OTHERS if "clip" not in kind]


@pytest.mark.parametrize("kind", ["siglip", "dinov2", *map(nightly, NORMED)])
def test_behind_the_final_norm_the_stock_vision_models_last_hidden_state_is_what_was_trained_on(
    encoders, tmp_path, kind
):
    tower = load_vision(encoders[kind], -1, torch.float32, final_norm=True)
    pixels = images(tower.image_size)
    trained = {name: weight.detach() for name, weight in perturb(tower).global_parameters()}
    encoder = exported(encoders[kind], -1, trained, final_norm=True)
    with torch.no_grad():
        stock = stock_llava(encoder, tmp_path).model.vision_tower(pixels).last_hidden_state
    assert torch.allclose(stock[:, encoder.prefix_tokens :], tower(pixels), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("quickgelu clip", "whose final norm is only for its class token"),
        ("vit without biases and norm", "has no final norm"),
        ("averaging vit", "has no final norm"),
    ],
)
def test_behind_the_final_norm_an_encoder_without_a_stock_counterpart_is_refused(
    encoders, kind, why
):
    load_vision(encoders[kind], -1, torch.float32, final_norm=True)  # it trains
    with pytest.raises(UserError, match=why):
        exported(encoders[kind], -1, final_norm=True)


@pytest.mark.parametrize(
    "kind",
    [
        "siglip",
        "quickgelu clip",
        "dinov2",
        "hf clip",
        "hf siglip",
        "hf dinov2",
        "hf vit",
        "hf internvl",
    ],
)
def test_trained_weights_take_the_place_of_the_encoders_own(encoders, tmp_path, kind):
    tower = load_vision(encoders[kind], -2, torch.float32)
    before = tower(images(28))
    perturb(tower)
    trained = {name: parameter.detach().clone() for name, parameter in tower.global_parameters()}
    encoder = exported(encoders[kind], trained=trained)
    expected = tower(images(28))
    assert not torch.allclose(before, expected, atol=0.01)
    assert torch.allclose(
        features(stock_llava(encoder, tmp_path), images(28)), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["siglip", "hf clip"])
def test_a_trained_tensor_that_the_encoder_does_not_have_is_refused(encoders, kind):
    for name, shape in (
        ("vision.blocks.9.norm1.weight", 32),
        ("vision.encoder.layers.1.layer_norm1.weight", 5),
    ):
        with pytest.raises(
            UserError, match=rf"{name}: trained with shape \({shape},\), .* has no such tensor"
        ):
            exported(encoders[kind], trained={name: torch.zeros(shape)})


def test_tensors_are_in_the_precision_that_they_are_stored_in_and_read_late(tmp_path):
    model = perturb(ENCODERS["clip_vision"][0]()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    sources = exported(str(tmp_path)).tensors
    assert {source.dtype for source in sources.values()} == {torch.bfloat16}
    source = sources["vision_model.encoder.layers.1.mlp.fc1.weight"]
    stored = next(
        t
        for name, t in model.state_dict().items()
        if name.endswith("encoder.layers.1.mlp.fc1.weight")
    )
    assert source.shape == (48, 32) and torch.equal(source.read(), stored)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        source.read()


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        (
            "vit_small_patch14_reg4_dinov2",
            {},
            "has 4 register tokens, which a stock class would read as patches",
        ),
        ("vit_tiny_patch16_224", {"act_layer": "silu"}, "has a SiLU as blocks.0.mlp.act"),
        ("vit_tiny_patch16_224", {"qk_norm": True}, "has a LayerNorm as blocks.0.attn.q_norm"),
        (
            "vit_tiny_patch16_224",
            {"scale_attn_norm": True},
            "has a LayerNorm as blocks.0.attn.norm",
        ),
        ("vit_tiny_patch16_224", {"scale_mlp_norm": True}, "has a LayerNorm as blocks.0.mlp.norm"),
        ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm"}, "has a RmsNorm as blocks.0.norm1"),
        (
            "vit_tiny_patch16_224",
            {"embed_norm_layer": "layernorm"},
            "has a LayerNorm as patch_embed.norm",
        ),
        ("vit_tiny_patch16_224", {"attn_layer": "diff"}, "has a DiffAttention as blocks.0.attn"),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}, "has no learned position embeddings"),
        ("vit_tiny_patch16_224", {"mlp_ratio": 2.5}, "has MLPs of 80 in blocks of 32"),
        ("vit_base_patch16_siglip_224", {"pre_norm": True}, "has norm_pre.bias"),
        ("vit_base_patch16_siglip_224", {"init_values": 0.1}, "has blocks.0.ls1.gamma"),
        (
            "vit_base_patch16_clip_224",
            {"init_values": 0.1},
            "has blocks.0.ls1.gamma",
        ),
        ("vit_giant_patch14_dinov2", {}, "has a GluMlp as blocks.0.mlp"),
        ("eva02_tiny_patch14_224", {}, "is a Eva, not a plain ViT"),
        ("vit_small_patch16_dinov3", {}, "is a Eva, not a plain ViT"),
        ("deit_tiny_distilled_patch16_224", {}, "is a VisionTransformerDistilled, not a plain ViT"),
        ("beit_base_patch16_224", {}, "is a Beit, not a plain ViT"),
    ],
)
def test_what_no_stock_model_computes_is_refused_with_the_formats_that_work(
    tmp_path, architecture, changes, why
):
    folder = make_tower(tmp_path / "encoder", architecture, changes)
    load_vision(str(folder), -2, torch.float32)  # it trains
    with pytest.raises(UserError) as refused:
        exported(str(folder))
    assert why in str(refused.value)
    assert "--format safetensors" in str(refused.value) and "--format llava" in str(refused.value)


@pytest.mark.parametrize(("kind", "count"), [("dinov2_registers", 4), ("dinov3", 2)])
def test_a_transformers_encoder_with_registers_is_refused(tmp_path, kind, count):
    ENCODERS[kind][0]().save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=f"has {count} register tokens, which a stock class would read as patches"
    ):
        exported(str(tmp_path))


def test_incomplete_and_pickled_encoders_are_refused(encoders, tmp_path):
    source = Path(encoders["hf siglip"])
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    # A layer behind the selected one: training never reads it, a stock model would fill it at
    # random.
    last = next(name for name in weights if name.endswith("encoder.layers.3.mlp.fc1.weight"))
    save_file(
        weights | {last: torch.zeros(4, 32)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        UserError, match=r"mlp\.fc1\.weight with shape \(4, 32\), but .* asks for \(48, 32\)"
    ):
        exported(str(tmp_path))
    del weights[last]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"lacks the encoder's tensor encoder\.layers\.3\.mlp\.fc1\.weight"
    ):
        exported(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="only pickled weights"):
        exported(str(tmp_path))
