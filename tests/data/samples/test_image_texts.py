"""Text that borders on images: index, template and the stock processor count and write the same
tokens.
"""

import io
import json
import random
import tarfile

import pytest
from chat_styles import LLAMA2, QWEN25, sentencepiece_like
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AyaVisionProcessor,
    CLIPImageProcessor,
    GotOcr2ImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample, Tokenization
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.shards.index import read_index
from mmtrain.data.shards.indexing import build_indexes
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.idefics3 import Idefics3
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles

MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
PIECES = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " \n",
        "0",
        "42",
        "1.5",
        "a red circle",
        "What",
        "this?",
        "(",
        ")",
        "...",
        "-",
    ),
    *(
        "图像",
        "これは何",
        "картинка",
        "صورة",
        "चित्र",
        "ภาพ",
        "é",
        "e\u0301",
        "ﬁ",
        "😀",
        "👩\u200d🔬",
    ),
    *("\u00a0", "\u3000", "▁", "Ġ"),
]
PICTURE = Image.new("RGB", (32, 32), (200, 30, 30))
SIDE, POSITIONS = 32, 4


def byte_level() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([" ".join(PIECES), "What is this?\na red circle\n\n"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", chat_template=QWEN25
    )


def unigram() -> PreTrainedTokenizerFast:
    """T5's and XLM-R's kind: a space before the text alone, not before each stretch of it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(
        [" ".join(PIECES), "What is this? a red circle", "system user assistant"] * 3, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", unk_token="<unk>", chat_template=QWEN25
    )


def like_llama_2() -> PreTrainedTokenizerFast:
    tokenizer = sentencepiece_like()
    tokenizer.chat_template = LLAMA2
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "unigram": unigram, "sentencepiece": like_llama_2}


def llava(tokenizer):
    size = {"height": SIDE, "width": SIDE}
    pictures = CLIPImageProcessor(size=size, crop_size=size)
    return LlavaProcessor(pictures, tokenizer, patch_size=16, vision_feature_select_strategy="full")


def aya_vision(tokenizer):
    pictures = GotOcr2ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=1)
    texts = {f"{name}_token": "" for name in ("start_of_img", "end_of_img", "tile", "tile_global")}
    return AyaVisionProcessor(
        pictures,
        tokenizer,
        patch_size=8,
        img_size=SIDE,
        downsample_factor=2,
        img_patch_token="<image>",
        **texts,
    )


def idefics3(tokenizer):
    size = {"height": SIDE, "width": SIDE}
    pictures = Idefics3ImageProcessor(
        size=size, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    return Idefics3Processor(pictures, tokenizer, image_seq_len=POSITIONS)


PROCESSORS = {
    "llava": (llava, "square"),
    "aya_vision": (aya_vision, "square"),
    "idefics3": (idefics3, "idefics3"),
}


def conversations(seed: int, count: int) -> list[list[tuple[str, str]]]:
    """Questions in which images stand anywhere, and answers without any."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        question = [draw.choice(PIECES) for _ in range(draw.randint(0, 8))]
        for _ in range(draw.randint(1, 3)):
            question.insert(draw.randint(0, len(question)), "<image>")
        answer = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 5))).strip()
        made.append([("human", "".join(question)), ("gpt", answer or "Yes.")])
    return made


@pytest.mark.parametrize("processor_name", PROCESSORS)
@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
def test_index_template_and_stock_processor_agree(tmp_path, tokenizer_name, processor_name):
    make, layout_name = PROCESSORS[processor_name]
    folder, layout = tmp_path / "llm", LAYOUTS[layout_name](POSITIONS)
    made = TOKENIZERS[tokenizer_name]()
    made.add_tokens(MARKS, special_tokens=True)
    made.pad_token = made.eos_token
    made.save_pretrained(folder)
    content = io.BytesIO()
    PICTURE.save(content, "PNG")
    talks, tar = conversations(17, 40), tmp_path / "shard.tar"
    with tarfile.open(tar, "w") as out:
        for number, turns in enumerate(talks):
            record = json.dumps(
                {"conversations": [{"from": who, "value": said} for who, said in turns]}
            ).encode()
            images = [content.getvalue()] * turns[0][1].count("<image>")
            for suffix, data in [
                ("json", record),
                *((f"{at}.png", data) for at, data in enumerate(images)),
            ]:
                member = tarfile.TarInfo(f"{number:05}.{suffix}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    build_indexes([tar], Tokenization(str(folder), "chat", layout))
    index = read_index(tar)
    lengths = index.texts[text_fingerprint(folder, "chat", layout.texts)]
    template = make_template("chat", load_tokenizer(str(folder)), layout, len(made))
    processor = make(PreTrainedTokenizerFast.from_pretrained(folder))
    image_id, compared = made.convert_tokens_to_ids("<image>"), 0
    for number, turns in enumerate(talks):
        if number in lengths.faults or number in index.faults["llava"]:
            continue
        images = turns[0][1].count("<image>")
        document = template(
            Sample(f"{number:05}", str(tar), tuple(turns), (content.getvalue(),) * images)
        )
        messages = [
            {"role": "user", "content": turns[0][1]},
            {"role": "assistant", "content": turns[1][1]},
        ]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        stock = processor(text=[text], images=[[PICTURE] * images], add_special_tokens=False)[
            "input_ids"
        ][0]
        ours = [image_id if token == IMAGE_POSITION else token for token in document.input_ids]
        counted = lengths.tokens[number] + layout.tiling(SIDE, SIDE).positions * images
        compared += 1
        assert list(stock) == ours and counted == len(ours), turns
    assert compared >= 35


def test_texts_around_an_image_are_never_learnt():
    tokenizer = byte_level()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    turns = (("human", "Draw one."), ("gpt", "Here: <image> is one."))
    document = make_template("chat", tokenizer, Idefics3(2), 1000)(Sample("a", "s", turns, (b"",)))
    around = tokenizer.convert_tokens_to_ids(MARKS[1:3])
    assert [token for token in document.input_ids if token in around] == [
        around[0],
        around[1],
        around[0],
    ]
    learnt = [label for label in document.labels if label != IGNORE]
    assert (
        not set(learnt) & set(around)
        and tokenizer.decode(learnt).replace(" ", "") == "Here:isone.<|im_end|>"
    )


def test_a_plain_caption_stands_behind_the_wrapped_images():
    tokenizer = byte_level()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    turns = (("human", "<image><image>"), ("gpt", "a red circle"))
    document = make_template("plain", tokenizer, Idefics3(2), 1000)(
        Sample("a", "s", turns, (b"", b""))
    )
    fake, tag = tokenizer.convert_tokens_to_ids(MARKS[1:3])
    image = [fake, tag, IMAGE_POSITION, IMAGE_POSITION, fake]
    caption = tokenizer("a red circle").input_ids
    assert list(document.input_ids) == [*image, *image, *caption, tokenizer.eos_token_id]


@pytest.mark.parametrize("template", ["plain", "chat"])
def test_a_tokenizer_without_the_tokens_of_a_layout_is_refused(template):
    with pytest.raises(
        UserError, match=r"model\.vision\.layout: idefics3 writes <fake_token_around_image>"
    ) as caught:
        make_template(template, byte_level(), Idefics3(2), 1000)
    assert "set model.vision.layout=square" in str(caught.value)


def test_a_plain_template_refuses_a_tokenizer_that_does_not_find_images_between_tile_names():
    tokenizer = byte_level()
    tokenizer.add_tokens(AddedToken("<image>", single_word=True, normalized=False))
    with pytest.raises(
        UserError, match=r"^data\.template=plain: 1 images or tiles, but .* reads 0 <image> tokens"
    ):
        make_template("plain", tokenizer, Tiles(4, SIDE), 1000)
    make_template("plain", tokenizer, Square(4), 1000)  # writes no text that could hide them


def test_a_template_that_writes_a_mark_for_each_tile_of_two_images_is_no_match_for_tile_names():
    """Its six marks are as many as the two images have runs of positions: three each, without their
    names.
    """
    thrice = QWEN25.replace(
        "message.content", "message.content | replace('<image><image>', '<image>' * 6)"
    )
    tokenizer = byte_level()
    tokenizer.chat_template = thrice
    assert thrice != QWEN25
    template = make_template("chat", tokenizer, Tiles(4, SIDE), 1000)
    turns = (("human", "<image><image> What?"), ("gpt", "a red circle"))
    with pytest.raises(BadSample, match="template: 2 images, but the template writes 6 <image>"):
        template(Sample("a", "s", turns, (b"", b""), sizes=((2 * SIDE, SIDE),) * 2))
