"""The answers that an exported chat template marks are those that training supervises, and its text
stays the same.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
import transformers
from chat_styles import (
    CONVERSATIONS,
    QWEN25,
    STYLES,
    data_template,
    export,
    messages_of,
    run_config,
    with_images,
)
from packaging.version import Version
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import PlainTemplate, make_template
from mmtrain.exporting.chat_template import mark_answers
from mmtrain.facts.models import models_of
from mmtrain.layouts.square import Square

CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
OWN_MARKS = """{% for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{%- generation -%}  {{ message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
{% else %}{{- message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
REWRITES = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
IN_A_BLOCK = "{% block chat %}" + QWEN25 + "{% endblock %}"
TEMPLATES = {name: values[:3] for name, values in STYLES.items()} | {
    "marks of its own that leave out the end": (OWN_MARKS, CHATML_MARKS, "byte_level"),
    "rewrites earlier answers": (REWRITES, CHATML_MARKS, "byte_level"),
}
# 5.17 shifts them by the pictures' tokens
MASKS_BESIDE_PICTURES = Version(transformers.__version__) >= Version("5.18")
MASKS = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
MORE = {
    "images in answers": (
        [
            ("human", "Show me."),
            ("gpt", "See <image><image>, or\n<image>"),
            ("human", "And?"),
            ("gpt", "é 😀"),
        ],
        ["Show me.", "See <image><image>, or\n<image>", "And?", "é 😀"],
    ),
    "words of templates": (
        [
            ("human", "{% generation %} {{ x }} USER: a"),
            ("gpt", "{% endgeneration %}'\"\\n ASSISTANT: [/INST]  "),
        ],
        ["{% generation %} {{ x }} USER: a", "{% endgeneration %}'\"\\n ASSISTANT: [/INST]  "],
    ),
}


def exported(tiny: Path, make, folder: Path, template: str, marks: tuple[str, ...], kind: str):
    """The run's template, the folder's processor, its template without marks, and what the export
    says of marks.
    """
    config = run_config(
        tiny, make(template, marks, kind), f"data.template={data_template(template)}"
    )
    export(config, folder)
    before = (folder / "chat_template.jinja").read_text()
    said = mark_answers(models_of(config), config.data.template, folder)
    return config, AutoProcessor.from_pretrained(folder), before, said


@pytest.fixture(scope="module", params=TEMPLATES)
def marked(request, tiny, llm_with, tmp_path_factory):
    config, processor, before, said = exported(
        tiny, llm_with, tmp_path_factory.mktemp("marked") / "out", *TEMPLATES[request.param]
    )
    assert said is None
    assert "{% generation %}" in processor.chat_template == processor.tokenizer.chat_template
    return request.param, config, processor, before


def trained_on(
    config: RunConfig, turns, image: int, tokens_per_image: int
) -> tuple[list[int], list[bool]] | None:
    """Token ids, and which of them training predicts; None where it rejects the conversation."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.llm.path)
    template = make_template(config.data.template, tokenizer, Square(tokens_per_image), sys.maxsize)
    images = (b"",) * sum(text.count("<image>") for _, text in turns)
    try:
        document = template(Sample("k", "s.tar", tuple(turns), images))
    except BadSample:
        return None
    learnt = [False, *(label != IGNORE for label in document.labels[:-1])]
    return [image if token == IMAGE_POSITION else token for token in document.input_ids], learnt


def test_the_masks_of_stock_transformers_are_the_labels_of_training(marked):
    name, config, processor, _ = marked
    compared = 0
    for turns, contents in (*CONVERSATIONS.values(), *MORE.values()):
        wanted = trained_on(config, turns, processor.image_token_id, 1)
        if wanted is None:
            continue
        compared += 1
        for said in ([text for _, text in turns], contents):
            found = processor.tokenizer.apply_chat_template(messages_of(turns, said), **MASKS)
            assert (found["input_ids"], [bool(mask) for mask in found["assistant_masks"]]) == wanted
        if name in STYLES and not any(
            "<image>" in text for speaker, text in turns if speaker == "gpt"
        ):
            ids, learnt = wanted
            prompts = [ids[:t] for t, now in enumerate(learnt) if now and not learnt[t - 1]]
            answers = [number for number, (speaker, _) in enumerate(turns) if speaker == "gpt"]
            messages = messages_of(turns, contents)
            options = {"add_generation_prompt": True, "return_dict": False}
            assert prompts == [
                processor.tokenizer.apply_chat_template(messages[:n], **options) for n in answers
            ]
        count = sum(text.count("<image>") for _, text in turns)
        marks_in_texts = any("<image>" in said for said in contents if isinstance(said, str))
        if count and (marks_in_texts or not MASKS_BESIDE_PICTURES):
            continue  # the stock processor takes pictures from image parts alone
        pictures = [Image.fromarray(np.full((40, 30, 3), 9 * i, np.uint8)) for i in range(count)]
        found = processor.apply_chat_template(
            with_images(messages_of(turns, contents), pictures), **MASKS
        )
        given = list(found["input_ids"][0]), [bool(mask) for mask in found["assistant_masks"][0]]
        assert given == trained_on(config, turns, processor.image_token_id, 16)
    assert compared >= 7


def conversations():
    """Random messages of every order of roles, and of every kind of content."""
    draw = random.Random(0)
    words = [
        "a",
        " b",
        "\n",
        "<image>",
        "",
        "  ",
        "é",
        "😀",
        "{{ x }}",
        "{% generation %}",
        "<|im_end|>",
        "</s>",
        "'\"",
    ]
    for _ in range(100):
        messages = []
        for number in range(draw.randint(1, 6)):
            usual = ("user", "assistant")[number % 2]
            role = (
                usual
                if draw.random() < 0.8
                else draw.choice(["system", "user", "assistant", "tool"])
            )
            text = "".join(draw.choices(words, k=draw.randint(0, 5)))
            parts = [{"type": "image"}, {"type": "text", "text": text}]
            messages.append(
                {
                    "role": role,
                    "content": text if draw.random() < 0.7 else parts[draw.randint(0, 1) :],
                }
            )
        yield messages


def written(tokenizer, messages, ask: bool, template: str | None) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, chat_template=template
        )
    except jinja2.TemplateError as error:
        return f"{type(error).__name__}: {error}"


def test_the_text_stays_byte_for_byte_the_same(marked):
    _, _, processor, before = marked
    texts = set()
    for messages in conversations():
        for ask in (False, True):
            text = written(processor.tokenizer, messages, ask, None)
            assert text == written(processor.tokenizer, messages, ask, before)
            texts.add(text)
    assert len(texts) > 50


@pytest.mark.skipif(
    not MASKS_BESIDE_PICTURES, reason="transformers 5.17 shifts masks by the pictures' tokens"
)
def test_plain_marks_the_caption_and_its_end_and_writes_what_it_wrote(tiny, tmp_path):
    config = run_config(tiny, tiny / "llm")
    export(config, tmp_path)
    assert mark_answers(models_of(config), "plain", tmp_path) is None
    processor = AutoProcessor.from_pretrained(tmp_path)
    trained = PlainTemplate(AutoTokenizer.from_pretrained(tiny / "llm"), Square(16), sys.maxsize)
    document = trained(
        Sample("k", "s.tar", (("human", "<image><image>"), ("gpt", "a red\ncircle ")), (b"",) * 2)
    )
    parts = [{"type": "image", "image": Image.new("RGB", (9, 9))}] * 2
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a red\ncircle "},
    ]
    assert processor.apply_chat_template(messages) == "<image><image>a red\ncircle </s>"
    found = processor.apply_chat_template(messages, **MASKS)
    marks = [bool(mask) for mask in found["assistant_masks"][0]]
    assert marks[1:] == [label != IGNORE for label in document.labels[:-1]]
    answer = [token for token, mask in zip(found["input_ids"][0], marks, strict=True) if mask]
    assert processor.decode(answer) == "a red\ncircle </s>"


def test_a_template_that_cannot_be_marked_stays_as_it_is_and_the_export_says_so(
    tiny, llm_with, tmp_path
):
    _, processor, before, said = exported(
        tiny, llm_with, tmp_path / "out", IN_A_BLOCK, CHATML_MARKS, "byte_level"
    )
    assert processor.chat_template == before and "generation %}" not in before
    assert said.startswith("The chat template does not mark answers") and "\n" not in said
    assert "assistant_only_loss" in said
