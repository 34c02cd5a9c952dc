"""Tiny random models and data in the formats that real runs read; everything is a function of
arguments and seed.

llm/         random causal LM of some family, saved by stock transformers, with a byte-level BPE
tokenizer vision/      random ViT without class token in timm's local folder format shards/
webdataset tars: PNG and JPEG scenes of coloured shapes with LLaVA-format conversations config.yaml
a run over four pipeline ranks
"""

from __future__ import annotations

import io
import random
from pathlib import Path

import timm
import torch
import yaml
from PIL import Image, ImageDraw
from timm_folder import save_timm_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mmtrain.data.prepare.sharding import KeyedSample, write_shard

COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 84),
    "blue": (38, 84, 200),
    "yellow": (244, 200, 40),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
# transformers' usual 0.02 leaves signals of 1e-4 at such widths, and tests that compare them blind
WEIGHT_STD = 0.08


def make_tiny_llm(
    folder: str | Path,
    family: str = "llama",
    layers: int = 8,
    width: int = 64,
    seed: int = 0,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
    **config_values: object,
) -> Path:
    """Save a random causal LM of `family` (a transformers model_type) and its tokenizer into
    `folder`.

    `tied` overrides the family's choice on tied embeddings; `config_values` go to the family's
    config as they are.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    heads = 4
    wanted = (
        (width, "hidden_size n_embd moe_intermediate_size shared_expert_intermediate_size"),
        (2 * width, "intermediate_size ffn_dim"),
        (width // 2, "q_lora_rank kv_lora_rank"),
        (width // heads, "head_dim query_pre_attn_scalar"),
        (layers, "num_hidden_layers n_layer"),
        (heads, "num_attention_heads n_head num_experts num_local_experts n_routed_experts"),
        (heads // 2, "num_key_value_heads num_experts_per_tok"),
        (1, "n_shared_experts n_group topk_group"),
        (16, "qk_nope_head_dim v_head_dim"),
        (8, "qk_rope_head_dim"),
        (32, "sliding_window"),
        (4096, "max_position_embeddings"),
        (WEIGHT_STD, "initializer_range"),
    )
    default = AutoConfig.for_model(family)
    values = {
        name: value for value, names in wanted for name in names.split() if hasattr(default, name)
    }
    # its latent attention has no grouped keys, and head_dim is the rotary part
    if family.startswith("deepseek"):
        values |= {"num_key_value_heads": heads, "head_dim": 8, "first_k_dense_replace": 1}
    if tied is not None:
        values["tie_word_embeddings"] = tied
    special = {
        # Spare rows, as real models have: transformers may add a token.
        "vocab_size": -(-(len(tokenizer) + 1) // 64) * 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, **(values | special | config_values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=None, trust_remote_code=False
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # norms: all equal would hide a misplaced one
                if parameter.ndim == 1 and name.endswith("weight"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the vocabulary of the tiny scenes; begins every text with <s>, as Llama's
    does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(0)
    tokenizer.train_from_iterator((describe(draw_scene(draw)) for _ in range(400)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=4096,
    )


def make_tiny_vision(folder: str | Path, seed: int = 0) -> Path:
    """Save a random ViT into `folder` in timm's local format: timm.create_model("local-dir:FOLDER")
    loads it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    architecture = "vit_tiny_patch16_224"
    model_args = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 4,
        "num_heads": 3,
        "class_token": False,
        "global_pool": "avg",
        "num_classes": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = timm.create_model(architecture, pretrained=False, **model_args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=WEIGHT_STD)
    save_timm_folder(model, folder, architecture, model_args)
    return folder


def make_tiny_shards(
    folder: str | Path,
    samples: int = 96,
    shards: int = 2,
    text_only_fraction: float = 0.125,
    two_image_fraction: float = 0.0,
    seed: int = 0,
) -> list[Path]:
    """Write `samples` scenes with captions into `shards` webdataset tars and return their paths.

    Images are 20 to 60 pixels a side, every third one a JPEG. Two-image samples name them KEY.0.png
    and KEY.1.png.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)

    def draw_images() -> int:
        kind = draw.random()
        return (
            0
            if kind < text_only_fraction
            else 2
            if kind < text_only_fraction + two_image_fraction
            else 1
        )

    paths = [folder / f"tiny-{number:05d}.tar" for number in range(shards)]
    for number, path in enumerate(paths):
        path.unlink(missing_ok=True)
        indices = range(number * samples // shards, (number + 1) * samples // shards)
        write_shard(path, (_make_sample(f"{index:06d}", draw_images(), draw) for index in indices))
    return paths


def _make_sample(key: str, images: int, draw: random.Random) -> KeyedSample:
    scenes = [draw_scene(draw) for _ in range(max(images, 1))]
    suffix = "jpg" if draw.randrange(3) == 0 else "png"
    names = (
        [f"{key}.{suffix}"]
        if images == 1
        else [f"{key}.{number}.{suffix}" for number in range(images)]
    )
    question = "<image>\n" * images + "Describe what you see."
    answer = " ".join(describe(scene) for scene in scenes)
    record: dict[str, object] = {
        "id": key,
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
    }
    if images:
        record["image"] = names[0] if images == 1 else names
    return key, record, [(suffix, paint(scene, suffix)) for scene in scenes[:images]]


def draw_scene(draw: random.Random) -> dict:
    """A random scene: size in pixels, background colour and one to three coloured shapes, left to
    right.
    """
    background, *inks = draw.sample(sorted(COLOURS), 4)
    shapes = [(ink, draw.choice(SHAPES)) for ink in inks[: draw.randint(1, 3)]]
    return {
        "size": (draw.randint(20, 60), draw.randint(20, 60)),
        "background": background,
        "shapes": shapes,
    }


def describe(scene: dict) -> str:
    """The caption of a scene."""
    listed = ", then ".join(f"a {ink} {shape}" for ink, shape in scene["shapes"])
    return f"{listed} on a {scene['background']} background."


def paint(scene: dict, suffix: str) -> bytes:
    """The scene as PNG or JPEG bytes."""
    width, height = scene["size"]
    image = Image.new("RGB", (width, height), COLOURS[scene["background"]])
    canvas = ImageDraw.Draw(image)
    column = width / len(scene["shapes"])
    half = min(column, height) * 0.4
    for number, (ink, shape) in enumerate(scene["shapes"]):
        x, y = (number + 0.5) * column, height / 2
        box = (x - half, y - half, x + half, y + half)
        if shape == "circle":
            canvas.ellipse(box, fill=COLOURS[ink])
        elif shape == "square":
            canvas.rectangle(box, fill=COLOURS[ink])
        else:
            canvas.polygon(
                [(x, y - half), (x - half, y + half), (x + half, y + half)], fill=COLOURS[ink]
            )
    stream = io.BytesIO()
    image.save(stream, "JPEG" if suffix == "jpg" else "PNG")
    return stream.getvalue()


def make_config(folder: str | Path, name: str, pipeline: int = 4) -> Path:
    """Write `folder`/config.yaml, a run over the folder's model and shards."""
    folder = Path(folder).resolve()
    config = {
        "run": {"name": name, "seed": 0},
        "model": {
            "llm": {"path": str(folder / "llm"), "dtype": "float32"},
            "vision": {"name": str(folder / "vision"), "select_layer": -2},
            "trainable": ["projector"],
        },
        "parallel": {"pipeline": pipeline},
        "data": {"shards": str(folder / "shards" / "*.tar"), "pack_length": 128, "workers": 1},
        "train": {"packs_per_step": 8, "packs_per_microbatch": 1, "max_steps": 20},
        "optimizer": {"lr": 1e-3},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
