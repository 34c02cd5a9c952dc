"""Chat templates of public families, conversations to write with them, and exported processors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import NAMES
from mmtrain.exporting.processor import ExportedProcessor, write_processor
from mmtrain.facts.models import models_of
from mmtrain.stock.exporters import stock_class


@dataclass(frozen=True)
class Tower:
    image_size: int = 32
    patch_size: int = 8
    prefix_tokens: int = 0
    select_strategy: str = "full"


# As the published ones are written, shortened by what has nothing to do with contents.
QWEN25 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}\
{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

VICUNA = """A chat. {% for message in messages %}{% if message['role'] == 'user' %}\
{{ 'USER: ' + message['content'] + ' ' }}{% elif message['role'] == 'assistant' %}\
{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% else %}{{ message['content'] + ' ' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

PARTS_OF_ITS_OWN = """{% for message in messages %}{{ '\\n[' + message.role + ']' }}{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{{ part.text or '<img/>' }}{% endfor %}{% endif %}\
{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '\\n[assistant]' }}{% endif %}"""

STYLES = {  # template, special tokens, kind of tokenizer, whether it takes a system turn
    "qwen2.5": (QWEN25, ("<|im_start|>", "<|im_end|>"), "byte_level", True),
    "llama3.1": (
        LLAMA31,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "byte_level",
        True,
    ),
    "mistral": (MISTRAL, (), "sentencepiece", False),
    "llama2": (LLAMA2, (), "sentencepiece", True),
    "vicuna, whose tokenizer adds <s>": (VICUNA, (), "byte_level", True),
    "a template that takes parts itself": (PARTS_OF_ITS_OWN, (), "byte_level", True),
    "data.template=llava_v1": ("llava_v1", (), "sentencepiece", True),
    "data.template=llama_2": ("llama_2", (), "sentencepiece", True),
    "data.template=chatml": ("chatml", ("<|im_start|>", "<|im_end|>"), "byte_level", True),
}
IMAGE = {"type": "image"}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


# LLaVA's turns beside the same as messages with parts.
CONVERSATIONS = {
    "one image": (
        [("human", "<image>\nWhat is this?"), ("gpt", "A red circle.")],
        [[IMAGE, text("What is this?")], [text("A red circle.")]],
    ),
    "image behind the text": (
        [("human", "What is this?\n<image>"), ("gpt", "A red circle.")],
        [[text("What is this?"), IMAGE], [text("A red circle.")]],
    ),
    "two images": (
        [("human", "<image>\n<image>\nTell them apart."), ("gpt", "No.")],
        [[IMAGE, IMAGE, text("Tell them apart.")], [text("No.")]],
    ),
    "turns": (
        [
            ("human", "<image>\nWhat is  this?"),
            ("gpt", "A circle."),
            ("human", "Where? 😀"),
            ("gpt", "Left."),
        ],
        [
            [IMAGE, text("What is  this?")],
            "A circle.",
            [text("Where?"), text(" 😀")],
            [text("Left.")],
        ],
    ),
    "a later image": (
        [("human", "Hello"), ("gpt", "Hi."), ("human", "<image>\nThis?\n<image>"), ("gpt", "No.")],
        ["Hello", "Hi.", [IMAGE, text("This?"), IMAGE], "No."],
    ),
    "image alone": ([("human", "<image>"), ("gpt", "A circle.")], [[IMAGE], "A circle."]),
    "no image": ([("human", "Hello"), ("gpt", "Hi.")], [[text("Hello")], "Hi."]),
    "a line break of one's own": (
        [("human", "<image>\nThis?"), ("gpt", "No.")],
        [[IMAGE, text("\nThis?")], "No."],
    ),
    "texts alone": (
        [("human", "Look: <image>, and <image>!"), ("gpt", "Yes.")],
        ["Look: <image>, and <image>!", "Yes."],
    ),
    "system": (
        [("system", "Be brief."), ("human", "<image>\nWhat is this?"), ("gpt", "A circle.")],
        [[text("Be brief.")], [IMAGE, text("What is this?")], [text("A circle.")]],
    ),
}
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's kind: byte fallback, begins every stretch of text with a space, adds <s> by its
    post-processor.
    """
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator(
        ["[INST] What is this? [/INST] A red circle, left. Tell them apart."] * 3, trainer
    )
    content = json.loads(trained.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
    )


def data_template(template: str) -> str:
    """`data.template` of a run on an LLM's folder whose own chat template this is, or that has one
    of this name.
    """
    return template if template in NAMES else "chat"


def run_config(tiny: Path, llm: Path, *overrides: str) -> RunConfig:
    return load_config(tiny / "config.yaml", [f"model.llm.path={llm}", *overrides])


def export(config: RunConfig, folder: Path, tower: Tower = Tower()) -> ExportedProcessor:
    folder.mkdir(exist_ok=True)
    exported = write_processor(
        stock_class("llava"), models_of(config), config.data.template, tower, folder
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    return exported


def messages_of(turns, contents) -> list[dict]:
    return [
        {"role": ROLES[speaker], "content": said}
        for (speaker, _), said in zip(turns, contents, strict=True)
    ]


def with_images(messages: list[dict], images: list[Image.Image]) -> list[dict]:
    """The same messages with the pictures in their image parts, as
    apply_chat_template(tokenize=True) takes them.
    """
    following = iter(images)
    return [
        message
        if isinstance(message["content"], str)
        else message
        | {
            "content": [
                p | {"image": next(following)} if p["type"] == "image" else p
                for p in message["content"]
            ]
        }
        for message in messages
    ]
