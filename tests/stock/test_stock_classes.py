"""Each stock class loads its folder without a remark, and computes, reads and answers as mmtrain
does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from chat_styles import CONVERSATIONS, STYLES, messages_of, with_images
from json_files import read_json
from packaging.version import Version
from PIL import Image, ImageOps
from safetensors.torch import load_file
from scenes import perturb
from stock_encoders import DINO_SIZES, HF_SIZES, NATIVE_SIZES, QWEN_SIZES, TABLE, WINDOWS
from sweeps import sweep
from transformers import (
    AutoModel,
    AutoProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    Exaone4_5_VisionConfig,
    Exaone4_5_VisionModel,
    InternVLVisionConfig,
    InternVLVisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen2_5_VLVisionConfig,
    Qwen3_5VisionConfig,
    Qwen3VLVisionConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    VideoLlama3VisionConfig,
    VideoLlama3VisionModel,
    ViTConfig,
    ViTModel,
)
from untrained_runs import (
    compared,
    config_of,
    drawn_adapters,
    export,
    load_stock,
    make_checkpoint,
    make_tower,
)

from mmtrain.__main__ import main
from mmtrain.api.generate import generate, load, stock_folder
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.model import LoraSection
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import ChatTemplate, load_tokenizer
from mmtrain.data.stream.images import decode_image, transform_of
from mmtrain.exporting.hf import ExportedModel
from mmtrain.exporting.verify import batch_fault
from mmtrain.facts.models import models_of
from mmtrain.facts.projector import connector_parameters
from mmtrain.model.trained.projector import read_projector
from mmtrain.plan.planner import make_plan

# 5.17 shifts them by the pictures' tokens
MASKS_BESIDE_PICTURES = Version(transformers.__version__) >= Version("5.18")
# what is transparent; before it drops alpha
LAYS_ON_WHITE = Version(transformers.__version__) >= Version("5.21")
MASKS = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
MARKS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
NORMED = ("model.vision.final_norm=true", "model.vision.select_layer=-1", "data.image_fit=resize")
CUT = "data.image_fit=null"
NATIVE = (
    "model.vision.layout=native",
    "model.vision.select_layer=-1",
    "model.vision.final_norm=true",
    CUT,
)
BOUNDED = ("model.vision.min_positions=4", "model.vision.max_positions=24")
MERGED = (
    *("model.vision.layout=native", CUT, "model.vision.select_layer=-1", *BOUNDED),
    "model.vision.merger=true",
)
WHOLE = (
    "model.vision.layout=native",
    "model.vision.longest_edge=42",
    CUT,
    "model.vision.select_layer=-1",
)
CLASSES = {  # encoder, keys, class
    "aya": (
        "siglip",
        ("model.projector.type=shuffle_swiglu", "data.image_fit=resize"),
        "AyaVision",
    ),
    "aya torchvision": (
        "siglip",
        (
            "model.projector.type=shuffle_swiglu",
            "model.vision.layout=tiles",
            "data.resize=torchvision",
            CUT,
        ),
        "AyaVision",
    ),
    "aya wide": (
        "clip",
        (
            "model.projector.type=shuffle_swiglu",
            "model.projector.width=96",
            "model.projector.factor=4",
            "data.image_fit=resize",
            "data.template=chat",
        ),
        "AyaVision",
    ),
    "aya tiles": (
        "siglip",
        (
            "model.projector.type=shuffle_swiglu",
            "model.vision.layout=tiles",
            "model.vision.max_tiles=5",
            "data.template=chat",
            CUT,
        ),
        "AyaVision",
    ),
    "next": ("clip", ("model.vision.layout=anyres", "data.template=chat", CUT), "LlavaNext"),
    "next siglip": (
        "hf siglip",
        (
            "model.vision.layout=anyres",
            "model.vision.pinpoints=[[56, 56], [28, 112]]",
            "model.vision.select_layer=-1",
            CUT,
        ),
        "LlavaNext",
    ),
    "onevision": (
        "siglip",
        (
            "model.vision.layout=anyres_max_9",
            "model.vision.select_layer=-1",
            "data.template=chat",
            CUT,
        ),
        "LlavaOnevision",
    ),
    "onevision clip": ("clip", ("model.vision.layout=anyres_max_9", CUT), "LlavaOnevision"),
    "idefics3": (
        "siglip",
        ("model.projector.type=shuffle_linear", "model.vision.layout=idefics3", *NORMED),
        "Idefics3",
    ),
    "idefics3 chat": (
        "hf siglip",
        (
            "model.projector.type=shuffle_linear",
            "model.vision.layout=idefics3",
            "data.template=chat",
            *NORMED,
        ),
        "Idefics3",
    ),
    "internvl": (
        "internvit",
        ("model.projector.type=shuffle_mlp2x_gelu", "data.image_fit=resize"),
        "InternVL",
    ),
    "internvl last": (
        "internvit",
        (
            "model.projector.type=shuffle_mlp2x_gelu",
            "model.vision.select_layer=-1",
            "data.template=chat",
            "data.image_fit=resize",
        ),
        "InternVL",
    ),
    "perception": (
        "vit",
        ("model.projector.type=mlp2x_gelu_pool", "data.template=chat", *NORMED),
        "PerceptionLM",
    ),
    "perception torchvision": (
        "vit",
        ("model.projector.type=mlp2x_gelu_pool", "data.resize=torchvision", *NORMED),
        "PerceptionLM",
    ),
    "perception eva": (
        "eva",
        ("model.projector.type=mlp2x_gelu_pool", *NORMED),
        "PerceptionLM",
    ),
    "perception rope": ("rope", ("model.projector.type=mlp2x_gelu_pool", *NORMED), "PerceptionLM"),
    "lfm2": (
        "naflex",
        ("model.projector.type=shuffle_mlp2x_gelu", "data.template=chat", *NATIVE, *BOUNDED),
        "Lfm2Vl",
    ),
    "lfm2 by 3": (
        "naflex",
        (
            "model.projector.type=shuffle_mlp2x_gelu",
            "model.projector.factor=3",
            *NATIVE,
            "model.vision.min_positions=2",
            "model.vision.max_positions=9",
        ),
        "Lfm2Vl",
    ),
    "lfm2 torchvision": (
        "naflex",
        (
            "model.projector.type=shuffle_mlp2x_gelu",
            "data.template=chat",
            "data.resize=torchvision",
            *NATIVE,
            *BOUNDED,
        ),
        "Lfm2Vl",
    ),
    "lfm2 of patches": ("naflex", ("data.template=chat", *NATIVE, *BOUNDED), "Lfm2Vl"),
    "pixtral": ("pixtral", ("data.template=chat", *WHOLE), "Llava"),
    "pixtral before the last": ("pixtral", WHOLE[:-1], "Llava"),
    "mistral3": ("pixtral", ("model.projector.type=norm_merge_mlp2x", *WHOLE), "Mistral3"),
    "mistral3 by 3": (
        "pixtral",
        (
            "model.projector.type=norm_merge_mlp2x",
            "model.projector.factor=3",
            "data.template=chat",
            *WHOLE[:-1],
        ),
        "Mistral3",
    ),
    "lighton": (
        "pixtral",
        ("model.projector.type=norm_merge_mlp2x", "data.template=chat", *WHOLE),
        "LightOnOcr",
    ),
    "qwen2.5": (
        "qwen2.5",
        ("model.projector.type=linear", "data.template=chat", *MERGED),
        "HyperCLOVAXVisionV2",
    ),
    "qwen3": ("qwen3", ("model.projector.type=linear", *MERGED), "HyperCLOVAXVisionV2"),
    "qwen3.5": (
        "qwen3.5",
        ("model.projector.type=linear", "data.template=chat", *MERGED),
        "HyperCLOVAXVisionV2",
    ),
    "video llama": ("video llama", ("data.template=chat", *NATIVE, *BOUNDED), "VideoLlama3"),
    "exaone": (
        "exaone",
        ("model.projector.type=patch_merger_rms", "data.template=chat", *MERGED[:-1]),
        "Exaone4_5_",
    ),
    "perception without pool": (
        "siglip",
        ("model.projector.type=mlp2x_gelu", *NORMED),
        "PerceptionLM",
    ),
}

DAILY = (
    "aya tiles",
    "onevision",
    "idefics3 chat",
    "lfm2",
    "lfm2 torchvision",
)


class Made(NamedTuple):
    """A run and its folder."""

    name: str
    checkpoint: StepFolder
    folder: Path
    exported: ExportedModel


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    made = {
        "siglip": make_tower(folder / "siglip", "vit_base_patch16_siglip_224", {}),
        "clip": make_tower(folder / "clip", "vit_base_patch16_clip_quickgelu_224", {}),
        "vit": make_tower(folder / "vit", "vit_tiny_patch16_224", {}),
        "rope": make_tower(folder / "rope", "vit_small_patch16_rope_mixed_224", {}),
        "eva": make_tower(folder / "eva", "eva02_tiny_patch14_224", {"num_heads": 2}),
    }
    stock = {
        "internvit": InternVLVisionModel(InternVLVisionConfig(**HF_SIZES, use_mean_pooling=False)),
        "hf siglip": SiglipVisionModel(SiglipVisionConfig(**HF_SIZES)),
        "naflex": Siglip2VisionModel(Siglip2VisionConfig(**NATIVE_SIZES, num_patches=16)),
        "pixtral": PixtralVisionModel(PixtralVisionConfig(**NATIVE_SIZES, image_size=56)),
        "qwen2.5": AutoModel.from_config(Qwen2_5_VLVisionConfig(**QWEN_SIZES, **WINDOWS)),
        "qwen3": AutoModel.from_config(
            Qwen3VLVisionConfig(**QWEN_SIZES, **TABLE, deepstack_visual_indexes=[1])
        ),
        "qwen3.5": AutoModel.from_config(Qwen3_5VisionConfig(**QWEN_SIZES, **TABLE)),
        "exaone": Exaone4_5_VisionModel(
            Exaone4_5_VisionConfig(**QWEN_SIZES, **WINDOWS, num_key_value_heads=2)
        ),
        "video llama": VideoLlama3VisionModel(VideoLlama3VisionConfig(**NATIVE_SIZES)),
        "hf clip": CLIPVisionModel(CLIPVisionConfig(**HF_SIZES)),
        "dinov2": Dinov2Model(Dinov2Config(**DINO_SIZES)),
        "dinov3": DINOv3ViTModel(DINOv3ViTConfig(**HF_SIZES, num_register_tokens=0)),
        "hf vit": ViTModel(ViTConfig(**HF_SIZES | {"image_size": [28, 28]})),
    }
    for name, model in stock.items():
        made[name] = folder / name
        perturb(model).save_pretrained(made[name])
        settings = {
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "resample": 2 if name == "naflex" else 3,
        }
        (made[name] / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def make(tiny, make_tiny, llm_with, encoders, tmp_path_factory) -> Callable[[str], Made]:
    """Makes a run, whose norms are no identities, and its folder; each once."""

    @functools.cache
    def made(kind: str) -> Made:
        encoder, overrides, name = CLASSES[kind]
        folder = tmp_path_factory.mktemp("kind")
        template, marks, *_ = STYLES["qwen2.5"]
        qwen3 = make_tiny.make_tiny_llm(folder / "qwen3", "qwen3") if name == "LightOnOcr" else None
        llm = llm_with(template, (*MARKS, *marks), source=qwen3)
        config = config_of(
            tiny, f"model.llm.path={llm}", f"model.vision.name={encoders[encoder]}", *overrides
        )
        draw = torch.Generator().manual_seed(1)
        norms = {
            parameter.name: torch.randn(parameter.shape, generator=draw)
            for parameter in connector_parameters(models_of(config).connector)
            if "norm" in parameter.name
        }
        # the encoder's own as trained; EVA here has none
        if config.model.vision.final_norm and encoder != "eva":
            last = "post_layernorm" if encoder in ("hf siglip", "naflex", "video llama") else "norm"
            norms[f"vision.{last}.weight"] = torch.randn(32, generator=draw)
        checkpoint = make_checkpoint(folder / "run", config, norms)
        return Made(name, checkpoint, folder / "out", export(checkpoint, folder / "out"))

    return made


@pytest.fixture(params=sweep(CLASSES, DAILY))
def made(request, make) -> Made:
    return make(request.param)


def test_the_stock_class_loads_the_folder_and_its_logits_and_batches_are_mmtrains(made):
    config = read_json(made.folder / "config.json")
    assert config["architectures"] == [f"{made.name}ForConditionalGeneration"]
    found = compared(made.checkpoint, made.exported, torch.float32, 32)
    assert (
        found.difference <= 1e-5 * max(1.0, found.largest) and found.agreeing == found.tokens > 40
    )
    assert {len(sample.images) for sample in found.samples} >= {1, 2}
    model = load_stock(made.folder)
    assert type(model).__name__ == config["architectures"][0]
    plain = made.checkpoint.config.data.template == "plain"
    assert batch_fault(made.folder, model, found.samples, plain) is None


LAYOUTS = {
    "square": (),
    "square shuffled": ("model.projector.type=shuffle_swiglu", "data.image_fit=resize"),
    "tiles": ("model.projector.type=shuffle_swiglu", "model.vision.layout=tiles", CUT),
    "anyres": ("model.vision.layout=anyres", CUT),
    "anyres_max_9": ("model.vision.layout=anyres_max_9", "data.pack_length=256", CUT),
}
ENCODERS = (
    "dinov2",
    "dinov3",
    "hf vit",
    "internvit",
    "hf clip",
    "hf siglip",
    "clip",
    "siglip",
    "vit",
)
REFUSED = [("internvit", "anyres"), ("internvit", "anyres_max_9")]
PAIRS = [pair for pair in itertools.product(ENCODERS, LAYOUTS) if pair not in REFUSED]


@pytest.fixture
def checkpoint_of(tiny, llm_with, encoders, tmp_path) -> Callable[[str, str], StepFolder]:
    """Make the checkpoint of a run with one of the ENCODERS and one of the LAYOUTS."""

    def make(encoder: str, layout: str) -> StepFolder:
        template, marks, *_ = STYLES["qwen2.5"]
        keys = [
            f"model.llm.path={llm_with(template, (*MARKS, *marks))}",
            f"model.vision.name={encoders[encoder]}",
        ]
        config = config_of(tiny, *keys, "export.format=hf", "data.template=chat", *LAYOUTS[layout])
        return make_checkpoint(tmp_path / "run", config)

    return make


@pytest.mark.nightly
@pytest.mark.parametrize(("encoder", "layout"), PAIRS)
def test_a_picture_goes_through_every_pair_of_encoder_and_layout_that_plans(
    checkpoint_of, tmp_path, encoder, layout
):
    checkpoint = checkpoint_of(encoder, layout)
    make_plan(checkpoint.config)
    exported = export(checkpoint, tmp_path / "out")
    found = compared(checkpoint, exported, torch.float32, 4)
    assert found.difference <= 1e-5 * max(1.0, found.largest) and found.tokens
    generate(tmp_path / "out", Image.new("RGB", (70, 40), (9, 99, 8)), "What?", max_new_tokens=1)


@pytest.mark.parametrize(("encoder", "layout"), sweep(REFUSED, REFUSED[:1]))
def test_an_encoder_that_a_class_loads_and_cannot_run_is_refused_by_plan_and_export(
    checkpoint_of, tmp_path, encoder, layout
):
    checkpoint = checkpoint_of(encoder, layout)
    for refused in (
        lambda: make_plan(checkpoint.config),
        lambda: export(checkpoint, tmp_path / "out"),
    ):
        with pytest.raises(
            UserError, match=r"another model.vision\.name .*its class divides image_size"
        ):
            refused()
    options = [
        str(checkpoint.path),
        "--format",
        "hf",
        "--out",
        str(tmp_path / "folder"),
        "--verify",
    ]
    assert main(["export", *options]) == 2 and not (tmp_path / "folder").exists()


def pictures() -> list[bytes]:
    """Files of odd sizes and modes; one is turned by its EXIF orientation."""
    noise = np.random.default_rng(0)
    files = []
    for mode, width, height in (
        *(
            ("RGB", 1, 1),
            ("RGB", 100, 3),
            ("RGB", 3, 100),
            ("L", 57, 31),
            ("1", 40, 41),
            ("P", 28, 28),
        ),
        *(("CMYK", 64, 48), ("RGB", 500, 333), ("RGB", 28, 28)),
    ):
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(content, "JPEG" if mode == "CMYK" else "PNG")
        files.append(content.getvalue())
    turned, content = Image.Exif(), io.BytesIO()
    turned[0x0112] = 6
    Image.fromarray(noise.integers(0, 256, (20, 70, 3), dtype=np.uint8)).save(
        content, "PNG", exif=turned
    )
    files.append(content.getvalue())
    for mode in ("RGBA", "LA", "P", "RGB", "L") if LAYS_ON_WHITE else ():
        picture = Image.fromarray(noise.integers(0, 256, (48, 64, 3), dtype=np.uint8))
        picture = picture.quantize(16) if mode == "P" else picture.convert(mode)
        clear = None
        if mode.endswith("A"):
            picture.putalpha(Image.fromarray(noise.integers(0, 256, (48, 64), dtype=np.uint8)))
        else:
            clear = noise.bytes(16) if mode == "P" else picture.getpixel((3, 3))
        content = io.BytesIO()
        picture.save(content, "PNG", transparency=clear)
        files.append(content.getvalue())
    return files


def test_pictures_become_what_they_were_in_training(made):
    config = made.checkpoint.config
    layout = models_of(config).layout
    transform = transform_of(models_of(config))
    _, processor = load(made.folder)
    for content in pictures():
        stock = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        tiling = layout.tiling(*stock.size)
        tiles = transform.normalise(transform.cut(decode_image(content), tiling))
        wanted = made.exported.stock.inputs(tiles, (tiling,), layout)["pixel_values"]
        asked = {
            "AyaVision": {"crop_to_patches": True},
            "Mistral3": {"patch_size": layout.tile_size},
        }.get(made.name, {})
        found = processor.image_processor(stock, return_tensors="pt", **asked)[
            "pixel_values"
        ].reshape(wanted.shape)
        # torchvision resizes it: some levels of 255 apart
        resize = config.data.resize
        if (made.name, resize) == ("PerceptionLM", "pillow") and stock.size != (28, 28):
            picture = decode_image(content).resize((28, 28), Image.Resampling.BICUBIC)
            found = processor.image_processor(picture, return_tensors="pt")["pixel_values"].reshape(
                wanted.shape
            )
        # the latter one level of 255
        within = {"PerceptionLM": 1e-6, "Lfm2Vl": 1.01 * 2 / 255}.get(made.name, 0)
        if resize == "torchvision":
            within = 1e-6
        assert float((found - wanted).abs().max()) <= within


def test_the_code_of_the_card_makes_the_pixels_of_training_and_masks_of_answers(
    made, tmp_path, monkeypatch
):
    monkeypatch.chdir(shutil.copytree(made.folder, tmp_path / "folder"))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 4), dtype=np.uint8))
    config = made.checkpoint.config
    # the card's own code lays it on white before it resizes with Pillow
    lays = (made.name, config.data.resize) == ("PerceptionLM", "pillow")
    noise.convert("RGBA" if LAYS_ON_WHITE or lays else "RGB").save("picture.png")
    card, names = Path("README.md").read_text(), {}
    assert (
        f"transformers {transformers.__version__}: it loads this folder" in card
        and "transformers 4" not in card
    )
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0], names)
    processor = names["processor"]
    layout = models_of(config).layout
    transform = transform_of(models_of(config))
    tiling = layout.tiling(64, 48)
    tiles = transform.normalise(transform.decode(Path("picture.png").read_bytes(), tiling))
    wanted = made.exported.stock.inputs(tiles, (tiling,), layout)["pixel_values"]
    if made.name in ("PerceptionLM", "Lfm2Vl") or config.data.resize == "torchvision":
        torch.testing.assert_close(
            names["inputs"]["pixel_values"].reshape(wanted.shape), wanted, rtol=0, atol=1e-6
        )
    else:
        assert torch.equal(names["inputs"]["pixel_values"].reshape(wanted.shape), wanted)
    if config.data.template != "plain":
        turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A dog."}]
        masks = processor.apply_chat_template(turns, **MASKS)["assistant_masks"]
        assert processor.tokenizer.is_fast and np.any(masks)


def test_conversations_become_the_tokens_and_labels_of_training(made):
    config = made.checkpoint.config
    if config.data.template == "plain":
        return
    processor = AutoProcessor.from_pretrained(made.folder)
    trained = ChatTemplate(
        load_tokenizer(config.model.llm.path), models_of(config).layout, sys.maxsize
    )
    for turns, contents in CONVERSATIONS.values():
        count = sum(text.count("<image>") for _, text in turns)
        if any("<image>" in said for said in contents if isinstance(said, str)):
            continue  # the stock processor takes pictures from image parts alone
        sizes = tuple((40 + 50 * number, 30) for number in range(count))
        document = trained(Sample("k", "s.tar", tuple(turns), (b"",) * count, sizes=sizes))
        wanted = [
            processor.image_token_id if token == IMAGE_POSITION else token
            for token in document.input_ids
        ]
        messages = with_images(
            messages_of(turns, contents),
            [Image.new("RGB", size, (n, 9, 9)) for n, size in enumerate(sizes)],
        )
        found = processor.apply_chat_template(messages, **MASKS)
        assert list(found["input_ids"][0]) == wanted
        if MASKS_BESIDE_PICTURES or not count:
            learnt = [False, *(label != IGNORE for label in document.labels[:-1])]
            assert [bool(mask) for mask in found["assistant_masks"][0]] == learnt


def test_another_run_begins_with_the_connector_of_the_folder(made):
    config, trained = made.checkpoint.config, load_file(made.checkpoint.tensors_file)
    found = read_projector(str(made.folder), models_of(config).connector)
    wanted = {
        name.removeprefix("projector."): tensor
        for name, tensor in trained.items()
        if "vision" not in name
    }
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_chat_says_what_stock_transformers_says(made, tmp_path):
    pictures = [tmp_path / "one.png", tmp_path / "two.png"]
    for number, file in enumerate(pictures):
        Image.new("RGB", (28 + 60 * number, 28), (200, 90 * number, 30)).save(file)
    said = generate(made.folder, pictures, "What?", max_new_tokens=8)
    words = (
        []
        if made.checkpoint.config.data.template == "plain"
        else [{"type": "text", "text": "What?"}]
    )
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, *words]}]
    processor, model = AutoProcessor.from_pretrained(made.folder), load_stock(made.folder)
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    # chat resizes as training does
    processor = made.exported.stock.load_processor(made.folder)
    inputs = processor(
        text=text, images=[[Image.open(file) for file in pictures]], return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    assert said == processor.decode(output, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("lfm2 of patches", "too long and thin for this model"),
        ("qwen2.5", "1 x 3000 pixels, cannot be"),
    ],
)
def test_chat_names_a_picture_that_the_processor_cannot_take(make, kind, said):
    with pytest.raises(UserError, match=said):
        generate(make(kind).folder, [Image.new("RGB", (1, 3000))], "What?")


def altered(source: Path, target: Path, file: str, changes: dict) -> Path:
    """A copy of a folder with these changes of a JSON file, those of a section within it."""
    folder = shutil.copytree(source, target)
    content = read_json(folder / file) if (folder / file).exists() else {}
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(content.get(key), dict) else value
    (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("kind", "file", "changes", "said"),
    [
        (
            "aya tiles",
            "config.json",
            {"alignment_intermediate_size": 10**8},
            "size 100000000, which no model has",
        ),
        (
            "aya tiles",
            "config.json",
            {"vision_config": {"hidden_size": 10**5}},
            "but no tensor is wider",
        ),
        ("aya tiles", "processor_config.json", {"img_size": 10**6}, "img_size 1000000, which no"),
        (
            "perception",
            "config.json",
            {"vision_config": {"architecture": "hf-hub:a/vit"}},
            "hf-hub:a/vit' is no",
        ),
        (
            "perception",
            "config.json",
            {"vision_config": {"model_args": {"checkpoint_path": "x"}}},
            "'x'}; needed are",
        ),
        (
            "perception",
            "config.json",
            {"vision_config": {"model_args": {"embed_dim": 3072}}},
            "no tensor is wider than",
        ),
        (
            "perception",
            "config.json",
            {"vision_config": {"model_args": {"norm_layer": "x"}}},
            "cannot be used (",
        ),
        (
            "perception",
            "config.json",
            {"vision_config": {"model_type": "timm_backbone"}},
            "model_type 'timm_backbone'",
        ),
    ],
)
def test_what_no_model_has_or_timm_would_load_from_elsewhere_is_refused(
    make, tmp_path, kind, file, changes, said
):
    folder = altered(make(kind).folder, tmp_path / "folder", file, changes)
    with pytest.raises(UserError, match=re.escape(said)):
        load(stock_folder(str(folder)))


@pytest.mark.parametrize(
    ("kind", "file", "changes"),
    [
        ("aya tiles", "processor_config.json", {"img_size": 14}),
        ("idefics3 chat", "processor_config.json", {"image_seq_len": 9}),
        ("internvl last", "processor_config.json", {"image_seq_length": 5}),
        ("perception", "config.json", {"projector_pooling_ratio": 3}),
        ("perception", "preprocessor_config.json", {"tile_size": 56}),
    ],
)
def test_a_wrong_number_that_only_an_answer_tells_is_one_line_that_names_the_folder(
    make, tmp_path, kind, file, changes
):
    folder = altered(make(kind).folder, tmp_path / "folder", file, changes)
    with pytest.raises(UserError, match=f"^{folder} cannot be used "):
        generate(folder, Image.new("RGB", (28, 28), (200, 90, 30)), "What?", max_new_tokens=2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("form", ["hf", "peft"])
def test_adapters_of_llm_and_encoder_leave_through_every_stock_class(make, tmp_path, kind, form):
    made = make(kind)
    targets = ["llm.layers.*", *(["vision.*"] if "eva" not in kind else [])]
    changes = {"model.lora": LoraSection(r=3, alpha=5.0, targets=tuple(targets))}
    config = made.checkpoint.config.changed(changes)
    others = load_file(made.checkpoint.tensors_file)
    checkpoint = make_checkpoint(tmp_path / "run", config, {**others, **drawn_adapters(config)})
    options = [
        str(checkpoint.path),
        "--format",
        form,
        "--out",
        str(tmp_path / "out"),
        "--verify",
        "8",
    ]
    assert main(["export", *options]) == 0


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "processor_config.json",
            {"processor_class": "FooProcessor", "auto_map": {"AutoProcessor": "ev.P"}},
        ),
        (
            "preprocessor_config.json",
            {"image_processor_type": "Foo", "auto_map": {"AutoImageProcessor": "ev.P"}},
        ),
        (
            "video_preprocessor_config.json",
            {"video_processor_type": "Foo", "auto_map": {"AutoVideoProcessor": "ev.P"}},
        ),
        (
            "config.json",
            {"auto_map": {"AutoConfig": "ev.P", "AutoModel": "ev.P", "AutoVideoProcessor": "ev.P"}},
        ),
    ],
)
def test_python_in_the_folder_is_not_run(make, tmp_path, monkeypatch, file, changes):
    folder = altered(make("internvl last").folder, tmp_path / "folder", file, changes)
    (folder / "ev.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with contextlib.suppress(UserError):
        load(stock_folder(str(folder)))
    assert not (tmp_path / "imported").exists()
