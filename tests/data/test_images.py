import io
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from mmtrain.data.images import decode_image, image_transform, timm_config
from mmtrain.errors import UserError


def noise_image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def clip_folder(tmp_path):
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_vision_model", "image_size": 28}))
    return tmp_path


@pytest.mark.parametrize("size", [(40, 40), (60, 25), (25, 61), (10, 9)])
def test_pixels_are_those_of_llavas_own_padding_processor(clip_folder, size):
    stock = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_pad=True)
    image = noise_image(*size)
    expected = torch.as_tensor(np.array(stock(image)["pixel_values"]))[0]
    torch.testing.assert_close(image_transform(str(clip_folder))(image), expected, rtol=0, atol=2e-6)


def test_a_timm_name_gives_timms_own_preprocessing_without_its_crop():
    name = "test_vit.r160_in1k"
    config = timm.get_pretrained_cfg(name)
    stock = create_transform(
        config.input_size, interpolation=config.interpolation, mean=config.mean, std=config.std, crop_pct=1.0
    )
    image = noise_image(200, 200)
    torch.testing.assert_close(image_transform(name)(image), stock(image), rtol=0, atol=2e-6)


def test_a_timm_folder_gives_its_own_size_and_mean(tiny):
    transform = image_transform(str(tiny / "vision"))
    assert (transform.image_size, transform.mean, transform.interpolation) == (32, (0.5, 0.5, 0.5), "bicubic")


def test_a_wide_image_keeps_both_ends_between_bars_of_the_mean_colour(tiny):
    image = Image.new("RGB", (64, 16), (255, 0, 0))
    image.paste((0, 0, 255), (32, 0, 64, 16))
    pixels = image_transform(str(tiny / "vision"))(image)
    assert pixels[:, 16, 1].tolist() == [1, -1, -1] and pixels[:, 16, -2].tolist() == [-1, -1, 1]
    assert pixels[:, 2].abs().max() < 0.01 and pixels[:, -2].abs().max() < 0.01


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_image_mode_becomes_rgb(tiny, mode):
    stream = io.BytesIO()
    noise_image(20, 30).convert(mode).save(stream, "TIFF")
    pixels = image_transform(str(tiny / "vision"))(decode_image(stream.getvalue(), "x"))
    assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.float32


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "WEBP"])
def test_a_cut_off_image_is_refused_by_name(suffix):
    stream = io.BytesIO()
    noise_image(50, 50).save(stream, suffix)
    with pytest.raises(UserError, match=r"a\.tar: sample 7, image 0: not a readable image"):
        decode_image(stream.getvalue()[:700], "a.tar: sample 7, image 0")


def test_clip_weights_trained_with_quickgelu_are_refused_under_the_gelu_name():
    with pytest.raises(UserError, match=r"use vit_large_patch14_clip_quickgelu_336\.openai"):
        timm_config("vit_large_patch14_clip_336.openai")
    assert timm_config("vit_large_patch14_clip_quickgelu_336.openai").input_size == (3, 336, 336)


def test_an_unknown_timm_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="nearest are vit_large_patch14_clip_quickgelu_336"):
        timm_config("vit_larg_patch14_clip_quickgelu_336.openai")
    with pytest.raises(UserError, match=r"it has test_vit\.r160_in1k"):
        timm_config("test_vit.nothing")


def test_a_transformers_folder_without_preprocessor_is_refused(clip_folder):
    (clip_folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"preprocessor_config\.json: no such file"):
        image_transform(str(clip_folder))
