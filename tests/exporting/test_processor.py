import io
import json
import shutil
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from chat_styles import (
    IMAGE,
    MISTRAL,
    STYLES,
    export,
    run_config,
    text,
    with_images,
)
from json_files import read_json
from packaging.version import Version
from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import ChatTemplate, PlainTemplate
from mmtrain.data.stream.images import ImageTransform, decode_image
from mmtrain.exporting.processor import check_processor
from mmtrain.layouts.square import ONE_SQUARE
from mmtrain.stock.exporters import stock_class


def changed(file: Path, **values) -> None:
    file.write_text(json.dumps(read_json(file) | values))


def test_a_folder_that_differs_from_training_fails_its_check(tiny, llm_with, tmp_path):
    config = run_config(tiny, llm_with(*STYLES["qwen2.5"][:2]), "data.template=chat")
    exported = export(config, tmp_path)
    adding_bos = read_json(Path(config.model.llm.path, "tokenizer.json"))["post_processor"]
    others = {
        "preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.4]},
        "processor_config.json": {"num_additional_image_tokens": 1},
        "tokenizer.json": {"post_processor": adding_bos},
        "chat_template.jinja": None,
    }
    for name, values in others.items():
        file = tmp_path / name
        content = file.read_text()
        if values is None:
            file.write_text(content.replace("helpful", "kind"))
        else:
            changed(file, **values)
        pixels = r"pixel_values differ by 0\.\d+. Export with --format safetensors"
        with pytest.raises(
            UserError, match=pixels if "pre" in name else r"becomes the tokens .* training has "
        ):
            check_processor(exported, tmp_path)
        file.write_text(content)
    check_processor(exported, tmp_path)


@pytest.mark.parametrize(
    ("resize", "other"),
    [("pillow", "LlavaImageProcessorFast"), ("torchvision", "LlavaImageProcessor")],
)
def test_a_folder_that_names_another_backend_than_the_runs_fails_its_check(
    tiny, tmp_path, resize, other
):
    exported = export(run_config(tiny, tiny / "llm", f"data.resize={resize}"), tmp_path)
    check_processor(exported, tmp_path)
    changed(tmp_path / "preprocessor_config.json", image_processor_type=other)
    with pytest.raises(UserError, match=r"pixel_values differ by 0\.0\d+\. Export with"):
        check_processor(exported, tmp_path)


def test_the_template_writes_the_date_that_training_wrote_and_not_todays(tiny, llm_with, tmp_path):
    template, marks, *_ = STYLES["llama3.1"]
    export(run_config(tiny, llm_with(template, marks), "data.template=chat"), tmp_path)
    written = AutoProcessor.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "hi"}]
    )
    assert "Today Date: 26 Jul 2024\n" in written
    assert datetime.now().strftime("%d %b %Y") not in written


def test_an_unfinished_answer_can_be_continued_and_other_parts_are_refused_by_name(
    tiny, llm_with, tmp_path
):
    export(run_config(tiny, llm_with(*STYLES["qwen2.5"][:2]), "data.template=chat"), tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": [IMAGE, text("What?")]},
        {"role": "assistant", "content": [text("A red")]},
    ]
    written = processor.apply_chat_template(messages, continue_final_message=True)
    assert written.endswith(
        "<|im_start|>user\n<image>\nWhat?<|im_end|>\n<|im_start|>assistant\nA red"
    )
    with pytest.raises(Exception, match="this model takes text and images, not video"):
        processor.apply_chat_template([{"role": "user", "content": [{"type": "video"}]}])


def test_plain_prompts_are_bos_and_images_then_what_the_caption_begins_with(tiny, tmp_path):
    exported = export(run_config(tiny, tiny / "llm"), tmp_path)
    trained = PlainTemplate(
        AutoTokenizer.from_pretrained(tiny / "llm"),
        exported.template.layout,
        sys.maxsize,
    )
    processor = AutoProcessor.from_pretrained(tmp_path)
    picture = Image.new("RGB", (50, 20))
    for count in (1, 2):
        turns = (("human", "<image>\n" * count + "Describe."), ("gpt", "a red circle"))
        document = trained(Sample("k", "s.tar", turns, (b"",) * count))
        wanted = [
            exported.image_token_id if token == IMAGE_POSITION else token
            for token in document.input_ids
        ]
        messages = [{"role": "user", "content": [IMAGE] * count}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        assert prompt == "<image>" * count
        given = list(processor(text=prompt, images=[picture] * count)["input_ids"][0])
        assert given == [1, *[exported.image_token_id] * 16 * count] == wanted[: len(given)]
        shown = with_images(messages, [picture] * count)
        asked = processor.apply_chat_template(
            shown, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert list(asked["input_ids"][0]) == given
        answered = [*messages, {"role": "assistant", "content": "a red circle"}]
        whole = processor(text=processor.apply_chat_template(answered), images=[picture] * count)
        assert list(whole["input_ids"][0]) == wanted
    beside = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("A photo of "), IMAGE]},
    ]
    assert processor.apply_chat_template(beside) == "<image>A photo of "
    assert (
        processor.apply_chat_template([{"role": "user", "content": "<image>\nA photo"}])
        == "<image>A photo"
    )


def test_a_spare_row_becomes_the_image_token_and_a_missing_one_is_asked_for_and_never_said(
    tiny, make_tiny, tmp_path
):
    length = len(AutoTokenizer.from_pretrained(tiny / "llm"))
    spare = export(run_config(tiny, tiny / "llm"), tmp_path / "spare")
    assert (spare.image_token_id, spare.rows_needed) == (length, 320)
    assert GenerationConfig.from_pretrained(tmp_path / "spare").suppress_tokens is None

    make_tiny.make_tiny_llm(tmp_path / "full", layers=1, vocab_size=length)
    full = export(run_config(tiny, tmp_path / "full"), tmp_path / "out")
    assert (full.image_token_id, full.rows_needed) == (length, length + 1)
    assert GenerationConfig.from_pretrained(tmp_path / "out").suppress_tokens == [length]


def test_in_a_vocabulary_with_holes_new_tokens_fill_these_and_no_other_token_is_read_as_an_image(
    tiny, make_tiny, tmp_path
):
    """Libraries number a new token by how many there are, which is another one's id here."""
    length, llm = len(AutoTokenizer.from_pretrained(tiny / "llm")), tmp_path / "llm"
    make_tiny.make_tiny_llm(llm, layers=1, vocab_size=length + 2)
    content = read_json(llm / "tokenizer.json")
    vocabulary = content["model"]["vocab"]
    vocabulary |= {token: number + 2 for token, number in vocabulary.items() if number >= 300}
    del vocabulary["<pad>"]
    content["added_tokens"] = [
        mark for mark in content["added_tokens"] if mark["content"] != "<pad>"
    ]
    (llm / "tokenizer.json").write_text(json.dumps(content))
    changed(llm / "tokenizer_config.json", pad_token="</s>")
    own = AutoTokenizer.from_pretrained(llm)
    (words,) = (token for token, number in vocabulary.items() if number == len(own))
    words = own.convert_tokens_to_string([words])

    config = run_config(tiny, llm, "data.template=llava_v1")
    exported = export(config, tmp_path / "out")
    check_processor(exported, tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert (exported.image_token_id, processor.tokenizer.pad_token_id, exported.rows_needed) == (
        0,
        300,
        length + 2,
    )
    assert processor.tokenizer(words).input_ids == own(words, add_special_tokens=False).input_ids
    turns = (("human", f"<image>\n{words}"), ("gpt", words))
    document = ChatTemplate(own, exported.template.layout, length + 2, "llava_v1")(
        Sample("k", "s.tar", turns, (b"",))
    )
    assert (
        document.input_ids.count(len(own)) == 2 and document.input_ids.count(IMAGE_POSITION) == 16
    )


def test_answers_end_at_the_end_mark_and_where_the_llm_ends_and_nothing_is_sampled(
    tiny, llm_with, tmp_path
):
    sampling = {
        "do_sample": True,
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "max_new_tokens": 99,
    }
    llm = llm_with(*STYLES["qwen2.5"][:2], eos_token_id=[2, 0], bos_token_id=1, **sampling)
    export(run_config(tiny, llm, "data.template=chat"), tmp_path)
    mark = AutoTokenizer.from_pretrained(llm).convert_tokens_to_ids("<|im_end|>")
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == [mark, 2, 0]
    assert (generation.do_sample, generation.max_new_tokens, generation.pad_token_id) == (
        False,
        99,
        0,
    )
    assert not {"temperature", "repetition_penalty"} & set(generation.to_diff_dict())


def test_a_tokenizer_that_its_family_builds_anew_is_exported_as_it_was_built(
    tiny, llm_with, tmp_path
):
    llm = llm_with(*STYLES["qwen2.5"][:2])
    changed(llm / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    built = AutoTokenizer.from_pretrained(llm)
    hard = "cafe\u0301 2024:  12345\n\n tabs\tand   spaces"
    as_stored = PreTrainedTokenizerFast(tokenizer_file=str(llm / "tokenizer.json"))
    assert (
        built(hard, add_special_tokens=False).input_ids
        != as_stored(hard, add_special_tokens=False).input_ids
    )
    export(run_config(tiny, llm, "data.template=chat"), tmp_path)
    exported = AutoProcessor.from_pretrained(tmp_path).tokenizer
    assert exported(hard).input_ids == built(hard, add_special_tokens=False).input_ids
    # the one name that transformers 4 and 5 both take for "tokenizer.json as it stands"
    assert (
        read_json(tmp_path / "tokenizer_config.json")["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "byte_level that pads with </s>"])
def test_the_files_say_that_prompts_are_padded_at_the_left_by_a_token_that_ends_nothing(
    tiny, llm_with, tmp_path, kind
):
    llm = llm_with(MISTRAL, (), kind)
    if kind.endswith("</s>"):
        changed(llm / "tokenizer_config.json", pad_token="</s>")
    exported = export(run_config(tiny, llm, "data.template=chat"), tmp_path)
    settings = read_json(tmp_path / "tokenizer_config.json")
    assert settings["padding_side"] == "left"
    processor, ends = (
        AutoProcessor.from_pretrained(tmp_path),
        GenerationConfig.from_pretrained(tmp_path).eos_token_id,
    )
    for tokenizer in (processor.tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.pad_token == settings["pad_token"] and tokenizer.padding_side == "left"
        assert tokenizer.pad_token_id not in (None, exported.image_token_id, *ends)
        assert tokenizer.decode([tokenizer.pad_token_id], skip_special_tokens=True) == ""
    assert (
        GenerationConfig.from_pretrained(tmp_path).pad_token_id == processor.tokenizer.pad_token_id
    )
    assert processor.tokenizer.pad_token_id < exported.rows_needed
    batch = processor(
        text=["What?", "What is this? What is this?"], padding=True, return_tensors="pt"
    )
    assert batch["attention_mask"][:, -1].tolist() == [1, 1] and batch["attention_mask"][0, 0] == 0


def test_padding_gets_a_row_of_its_own_where_the_vocabulary_has_no_token_for_it(
    tiny, make_tiny, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llm")
    make_tiny.make_tiny_llm(tmp_path / "llm", layers=1, vocab_size=len(tokenizer))
    file = tmp_path / "llm" / "tokenizer.json"
    file.write_text(file.read_text().replace('"<pad>"', '"<nothing>"'))
    changed(tmp_path / "llm" / "tokenizer_config.json", pad_token="</s>")
    exported = export(run_config(tiny, tmp_path / "llm"), tmp_path / "out")
    padding = AutoProcessor.from_pretrained(tmp_path / "out").tokenizer
    assert (padding.pad_token, padding.pad_token_id) == ("<pad>", len(tokenizer) + 1)
    assert exported.rows_needed == len(tokenizer) + 2
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.suppress_tokens == [exported.image_token_id, padding.pad_token_id]


def test_a_tokenizer_whose_special_tokens_cannot_be_switched_off_is_refused(tiny, tmp_path):
    llm = tmp_path / "llm"
    shutil.copytree(tiny / "llm", llm, ignore=shutil.ignore_patterns("tokenizer*"))
    ByT5Tokenizer().save_pretrained(llm)
    with pytest.raises(
        UserError, match=r"\(ByT5Tokenizer\) adds special tokens .* --format safetensors or llava"
    ):
        export(run_config(tiny, llm), tmp_path / "out")


# ---- pixels

SIZES = (
    (32, 32),
    (64, 48),
    (48, 64),
    (100, 37),
    (37, 100),
    (5, 3),
    (1, 1),
    (33, 32),
    (400, 20),
    (640, 480),
)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some grain."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), 3), dtype=np.uint8)
    smooth = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16
    )
    return Image.fromarray(
        np.clip(smooth + draw.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
    )


@pytest.fixture(scope="module")
def processor_for(tiny, tmp_path_factory):
    """AutoProcessor, with a backend, for a transform: the files of an exported folder, other
    pixels.
    """
    folder = tmp_path_factory.mktemp("pixels")
    export(run_config(tiny, tiny / "llm"), folder)

    def make(transform: ImageTransform, backend: str):
        (folder / "preprocessor_config.json").write_text(
            json.dumps(stock_class("llava").image_settings(transform, ONE_SQUARE))
        )
        processor = AutoProcessor.from_pretrained(folder, backend=backend)
        assert processor.image_processor.backend == backend
        return processor.image_processor

    return make


@pytest.mark.parametrize("fit", ["pad", "resize", "center_crop"])
@pytest.mark.parametrize(
    ("interpolation", "backend"),
    [
        *(("bicubic", "pil"), ("bilinear", "pil"), ("lanczos", "pil"), ("box", "pil")),
        *(("bicubic", "torchvision"), ("bilinear", "torchvision")),
    ],
)
def test_pillow_makes_the_pixels_of_training_to_the_bit_and_torchvision_to_two_levels(
    processor_for, fit, interpolation, backend
):
    transform = ImageTransform(32, CLIP_MEAN, CLIP_STD, interpolation, fit)
    pictures = processor_for(transform, backend)
    for seed, size in enumerate(SIZES):
        picture = photograph(*size, seed)
        made = pictures(picture, return_tensors="pt").pixel_values[0]
        levels = (
            (made - transform.normalise(transform.fitted(picture))).abs()
            * torch.tensor(CLIP_STD)[:, None, None]
            * 255
        ).max()
        assert levels <= (0 if backend == "pil" else 1e-4 if size == (32, 32) else 2.01), (
            size,
            levels,
        )


# transparent pixels; before it drops alpha
LAYS_ON_WHITE = Version(transformers.__version__) >= Version("5.21")


def stored(picture: Image.Image, file_format: str, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, file_format, **options)
    return stream.getvalue()


def test_files_of_every_mode_give_the_pixels_of_training_once_they_are_decoded_as_it_does(
    processor_for,
):
    transform = ImageTransform(32, (0.5,) * 3, (0.5,) * 3, "bicubic", "pad")
    pictures = processor_for(transform, "pil")
    draw = np.random.default_rng(0)
    clear = Image.fromarray(draw.integers(0, 256, (30, 40, 4), dtype=np.uint8))
    colours = clear.convert("RGB")
    opaque = [
        *(stored(colours.convert(mode), "PNG") for mode in ("RGB", "L", "1")),
        *(stored(colours.convert(mode), "JPEG") for mode in ("RGB", "L", "CMYK")),
        stored(colours.quantize(16), "PNG"),
    ]
    transparent = [
        stored(clear, "PNG"),
        stored(clear.convert("LA"), "PNG"),
        stored(colours.quantize(16), "PNG", transparency=3),
        stored(colours, "PNG", transparency=colours.getpixel((0, 0))),
        stored(colours.quantize(16), "GIF", transparency=3),
    ]
    grey16 = stored(Image.fromarray(draw.integers(0, 65536, (30, 40)).astype(np.uint16)), "PNG")
    for content in [*opaque, *(transparent if LAYS_ON_WHITE else [])]:  # as they are opened
        opened = pictures(Image.open(io.BytesIO(content)), return_tensors="pt").pixel_values[0]
        trained = transform.normalise(transform.fitted(decode_image(content)))
        assert torch.equal(opened, trained)
    for content in [*transparent, grey16]:
        decoded = pictures(decode_image(content), return_tensors="pt").pixel_values[0]
        trained = transform.normalise(transform.fitted(decode_image(content)))
        assert torch.equal(decoded, trained)
