import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.samples.templates import ChatTemplate, PlainTemplate
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.models.layouts.square import Square


def caption(text: str, images: int = 1, question: str = "<image>\nDescribe what you see.") -> Sample:
    return Sample("k", "s.tar", (("human", question), ("gpt", text)), (b"",) * images)


def talk(*texts: str, images: int = 0) -> Sample:
    turns = tuple((("human", "gpt")[number % 2], text) for number, text in enumerate(texts))
    return Sample("k", "s.tar", turns, (b"",) * images)


def with_system(system: str, *texts: str, images: int = 0) -> Sample:
    sample = talk(*texts, images=images)
    return replace(sample, turns=(("system", system), *sample.turns))


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "llm")


def test_plain_is_images_then_caption_then_eos_with_labels_on_the_caption_and_eos(tokenizer):
    words = tokenizer("a red circle", add_special_tokens=False).input_ids
    document = PlainTemplate(tokenizer, layout=Square(3), vocab_size=320)(caption("a red circle", images=2))
    assert document.input_ids == (1, *[IMAGE_POSITION] * 6, *words, 2)
    assert document.labels == (*[IGNORE] * 6, *words, 2, IGNORE)


def test_plain_drops_the_words_of_the_human_turn(tokenizer):
    template = PlainTemplate(tokenizer, Square(3), 320)
    assert template(caption("x")).input_ids == template(caption("x", question="<image> Be brief.")).input_ids


def test_a_text_only_sample_is_text_alone(tokenizer):
    words = tokenizer("a red circle", add_special_tokens=False).input_ids
    document = PlainTemplate(tokenizer, Square(3), 320)(caption("a red circle", images=0, question="Say something."))
    assert document.input_ids == (1, *words, 2)
    assert document.labels == (*words, 2, IGNORE)


def test_a_tokenizer_that_adds_no_bos_gets_none(tokenizer):
    tokenizer.backend_tokenizer.post_processor = None
    document = PlainTemplate(tokenizer, Square(2), 320)(caption("x"))
    assert document.input_ids == (IMAGE_POSITION, IMAGE_POSITION, *tokenizer("x").input_ids, 2)


def test_plain_takes_a_tokenizer_without_a_fast_one():
    document = PlainTemplate(ByT5Tokenizer(), Square(2), 1000)(caption("é!"))
    assert document.input_ids == (IMAGE_POSITION, IMAGE_POSITION, 0xC3 + 3, 0xA9 + 3, ord("!") + 3, 1)


def test_shifted_labels_give_the_loss_that_transformers_computes_from_unshifted_ones(tiny, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny / "llm")
    document = PlainTemplate(tokenizer, Square(3), 320)(caption("a red circle on a blue background.", images=0))
    input_ids = torch.tensor([document.input_ids])
    with torch.no_grad():
        stock = model(input_ids, labels=input_ids)
    ours = torch.nn.functional.cross_entropy(stock.logits[0], torch.tensor(document.labels), ignore_index=IGNORE)
    torch.testing.assert_close(ours, stock.loss)


def test_plain_puts_images_of_any_turn_first_and_drops_the_words_of_system_turns(tokenizer):
    template = PlainTemplate(tokenizer, Square(3), 320)
    turns = (("system", "You see <image>."), ("human", "Is <image> like <image>?"), ("gpt", "x"))
    assert template(Sample("k", "s.tar", turns, (b"",) * 3)).input_ids == template(caption("x", images=3)).input_ids


def test_a_sample_that_the_plain_template_cannot_hold_is_rejected_in_words_without_its_key(tokenizer):
    template = PlainTemplate(tokenizer, Square(3), 320)
    for sample, detail in (
        (talk("a", "b", "c", "d"), "the plain template takes one question and one answer; it has 2 questions"),
        (with_system("s", "a", "b", "c", "d"), "the plain template takes one question and one answer; it has 2"),
        (caption("see <image>"), "<image> in the caption"),
        (caption("the end </s> of it"), "a turn from gpt holds '</s>', a special token of"),
    ):
        with pytest.raises(BadSample) as caught:
            template(sample)
        assert caught.value.reason == "template"
        assert caught.value.detail.startswith(detail)


def test_plain_needs_a_token_that_ends_captions(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"tokenizer of .*llm has none"):
        PlainTemplate(tokenizer, Square(3), 320)


def test_a_token_beyond_the_embedding_is_refused_before_the_model_sees_it(tokenizer):
    with pytest.raises(UserError, match=r"makes token \d+, but the model's embedding has 5 rows"):
        PlainTemplate(tokenizer, Square(3), 5)(caption("a red circle"))


# ---- the model's own chat template

CHATML = """{% if messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA2 = """{% for message in messages %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}\
{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA2_SYSTEM = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}{% else %}\
{% set rest = messages %}{% set system = '' %}{% endif %}{% for message in rest %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}{% else %}\
{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

VICUNA = """{{ bos_token }}A chat.{% for message in messages %}{% if message['role'] == 'user' %}\
{{ ' USER: ' + message['content'] }}{% else %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

PHI3 = """{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

QWEN3 = """{%- set ns = namespace(last_query=0) %}{%- for message in messages %}{%- if message.role == 'user' %}\
{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}\
{%- set content = message.content %}{%- set reasoning = '' %}\
{%- if message.role == 'assistant' and '</think>' in content %}\
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
{{- '<|im_start|>' + message.role + '\\n' }}\
{%- if message.role == 'assistant' and loop.index0 > ns.last_query %}\
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}{{- content + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GPT_OSS = """{% for message in messages %}{% if message.role == 'user' %}\
{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% else %}\
{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

LLAVA_HF = """{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}\
{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

MARKS = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    QWEN3: ("<|im_start|>", "<|im_end|>"),
    GPT_OSS: ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
}


@pytest.fixture
def byte_level(make_tiny):
    """Like Qwen's and Llama 3's: makes a byte-level BPE tokenizer with a chat template and its marks."""

    def make(template: str | None, marks: tuple[str, ...] | None = None, **options):
        tokenizer = make_tiny.make_tokenizer()
        marks = MARKS.get(template, ()) if marks is None else marks
        added = [AddedToken(mark, special=True, normalized=False, **options) for mark in marks]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.chat_template = template
        tokenizer.name_or_path = "models/some-llm"
        return tokenizer

    return make


@pytest.fixture(scope="module")
def sentencepiece():
    """Like Llama 2's: makes a BPE tokenizer with byte fallback that begins every stretch of text with a space."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # else words would merge with the next one
    lines = ["[INST] What is this? [/INST] A red circle on a blue background.", "A chat. USER: hi ASSISTANT: two"] * 3
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator(lines, trainer)
    content = json.loads(trained.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    content["pre_tokenizer"] = None
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]

    def make(template: str):
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.decoder = decoders.Sequence(spaces)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            chat_template=template,
            name_or_path="models/some-llm",
        )

    return make


def answers(tokenizer, document: Document) -> list[str]:
    """Text of each maximal run of supervised positions."""
    runs = itertools.groupby(document.labels, key=lambda label: label != IGNORE)
    return [tokenizer.decode(list(labels)) for supervised, labels in runs if supervised]


def prompts(document: Document) -> list[tuple[int, ...]]:
    """What stands before each run of supervised labels: the ids from which the LLM has to write that answer."""
    starts = [
        t for t, label in enumerate(document.labels) if label != IGNORE and (t == 0 or document.labels[t - 1] == IGNORE)
    ]
    return [document.input_ids[: start + 1] for start in starts]


def expected(tokenizer, tokens_per_image: int, *pieces: tuple[str, bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """input_ids and shifted labels of pieces of text written by hand, True where supervised, each tokenized alone."""
    ids: list[int] = []
    labels: list[int] = []
    for text, supervised in pieces:
        for part in re.split("(<image>)", text):
            image = part == "<image>"
            new = [IMAGE_POSITION] * tokens_per_image if image else tokenizer(part, add_special_tokens=False).input_ids
            ids += new
            labels += new if supervised else [IGNORE] * len(new)
    return tuple(ids), (*labels[1:], IGNORE)


def test_chatml_supervises_each_answer_and_its_end_mark_and_not_the_line_break_after_it(byte_level):
    tokenizer = byte_level(CHATML)
    sample = talk("<image>\nAnd <image>?", "A red circle.", "Where?", "  Left,\n\nor not 😀é", images=2)
    document = ChatTemplate(tokenizer, layout=Square(3), vocab_size=384)(sample)
    assert (document.input_ids, document.labels) == expected(
        tokenizer,
        3,
        ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", False),
        ("<|im_start|>user\n<image>\nAnd <image>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("A red circle.<|im_end|>", True),
        ("\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n", False),
        ("  Left,\n\nor not 😀é<|im_end|>", True),
        ("\n", False),
    )
    assert document.sample is sample


def test_llama_3_begins_with_one_bos_and_strips_what_its_template_strips(byte_level):
    tokenizer = byte_level(LLAMA3)
    document = ChatTemplate(tokenizer, Square(2), 384)(talk("<image>\nWhat? ", "\n A circle. \n", images=1))
    assert (document.input_ids, document.labels) == expected(
        tokenizer,
        2,
        ("<s><|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat?<|eot_id|>", False),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("A circle.<|eot_id|>", True),
    )


def test_llama_2_whose_answers_follow_the_question_without_a_header(sentencepiece):
    tokenizer = sentencepiece(LLAMA2)
    document = ChatTemplate(tokenizer, Square(2), 600)(talk("<image> What?", "A red 😀 circle", "Why?", "No", images=1))
    tokens = [
        "</s>" if label == 2 else tokenizer.convert_ids_to_tokens(label) for label in document.labels if label >= 0
    ]
    first = ["▁A", "▁red", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁circle", "▁", "</s>"]
    assert tokens == [*first, "▁", "N", "o", "▁", "</s>"]
    assert document.input_ids.count(IMAGE_POSITION) == 2
    assert document.input_ids[-1] == 2 and document.labels[-1] == IGNORE and document.labels[-2] == 2


STYLES = {
    "chatml": (CHATML, "byte_level", "{}<|im_end|>"),
    "llama3": (LLAMA3, "byte_level", "{}<|eot_id|>"),
    "llama2": (LLAMA2, "byte_level", " {} </s>"),
    "vicuna": (VICUNA, "byte_level", " {}</s>"),
    "llama2-sentencepiece": (LLAMA2, "sentencepiece", "{} </s>"),
    "vicuna-sentencepiece": (VICUNA, "sentencepiece", "{}</s>"),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("images", "texts"),
    [
        (1, ("<image>\nWhat is this?", "A red circle.")),
        (0, ("hi", "two  spaces, é and 😀", "", "😀", "And\nnow?", "1. a\n2. b")),
        (2, ("<image><image>", "x", "More? <s", "<im_end> < / s >")),
    ],
    ids=["one image", "text only", "two images"],
)
def test_every_answer_is_learnt_whole_and_from_the_very_prompt_that_asks_for_it(request, style, images, texts):
    template, kind, form = STYLES[style]
    tokenizer = request.getfixturevalue(kind)(template)
    document = ChatTemplate(tokenizer, layout=Square(1), vocab_size=700)(talk(*texts, images=images))
    assert answers(tokenizer, document) == [form.format(text) for text in texts[1::2]]

    reader = request.getfixturevalue(kind)(template)
    reader.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    image = reader.convert_tokens_to_ids("<image>")
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    asked = [
        reader.apply_chat_template(messages[:n], add_generation_prompt=True).input_ids for n in range(1, len(texts), 2)
    ]
    seen = [[image if token == IMAGE_POSITION else token for token in prompt] for prompt in prompts(document)]
    assert seen == asked
    whole = reader.apply_chat_template(messages).input_ids
    assert [image if token == IMAGE_POSITION else token for token in document.input_ids] == whole


GENERATION = {
    "chatml": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "vicuna": """{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] }}\
{% else %}{{ ' ASSISTANT:' }}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}""",
}


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("style", GENERATION)
def test_the_mask_is_that_of_transformers_where_the_template_marks_generation(request, style, kind):
    make = request.getfixturevalue(kind)
    tokenizer = make(GENERATION[style])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False)], special_tokens=True)
    texts = ("hi", "A red circle.", "why?", "two  spaces\n\n😀", "", "x")
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    stock = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    document = ChatTemplate(tokenizer, Square(1), 700)(talk(*texts))
    assert list(document.input_ids) == stock["input_ids"]
    assert [label != IGNORE for label in document.labels] == [*map(bool, stock["assistant_masks"][1:]), False]


def test_the_ids_are_those_of_the_stock_llava_processor(byte_level):
    tokenizer = byte_level(LLAMA3)
    reader = byte_level(LLAMA3)
    reader.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        pictures, reader, patch_size=16, vision_feature_select_strategy="full", chat_template=LLAMA3
    )
    texts = ("<image>\nWhat is this?", "A red circle.", "Sure?", "Yes.")
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    text = processor.apply_chat_template(messages, tokenize=False)
    stock = processor(images=Image.new("RGB", (40, 32)), text=text, add_special_tokens=False)["input_ids"][0]
    document = ChatTemplate(tokenizer, layout=Square(4), vocab_size=384)(talk(*texts, images=1))
    image = processor.image_token_id
    assert [image if token == IMAGE_POSITION else token for token in document.input_ids] == list(stock)
    assert stock.count(image) == 4


def test_phi_3_whose_marks_swallow_line_breaks_and_whose_template_ends_texts_with_a_second_mark(byte_level):
    tokenizer = byte_level(PHI3, ("<|user|>", "<|assistant|>", "<|end|>"), rstrip=True)
    document = ChatTemplate(tokenizer, Square(1), 384)(talk("hi", "  A circle.", "why?", "No"))
    # the spaces before "A" belong to <|assistant|>, which takes them in; </s> after the last <|end|> is never reached
    assert answers(tokenizer, document) == ["A circle.<|end|>", "No<|end|>"]
    assert tokenizer.decode(document.input_ids[-3:]) == "o<|end|></s>"


def test_white_space_that_a_tokenizer_cuts_from_its_offsets_is_supervised_where_it_stands(byte_level):
    plain, trimming = byte_level(CHATML), byte_level(CHATML)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    offsets = trimming("a  b", add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    assert any(start == end for start, end in offsets)  # such a token overlaps nothing
    sample = talk(" hi  there ", "  one   two  ", "  ?  ", " x ")
    assert ChatTemplate(trimming, Square(1), 384)(sample) == ChatTemplate(plain, Square(1), 384)(sample)

    spaced = VICUNA.replace("' ASSISTANT:' }}{% endif %}", "' ASSISTANT: ' }}{% endif %}")
    plain.chat_template = trimming.chat_template = spaced
    document = ChatTemplate(trimming, Square(1), 384)(talk("hi", "  x"))
    assert answers(plain, document) == ["  x</s>"]  # of three spaces the first one is the prompt's
    assert document == ChatTemplate(plain, Square(1), 384)(talk("hi", "  x"))


def test_a_space_between_prompt_and_answer_is_learnt_as_part_of_the_token_it_belongs_to(byte_level):
    template = VICUNA.replace("' ASSISTANT:' }}{% endif %}", "' ASSISTANT: ' }}{% endif %}")
    assert template != VICUNA
    tokenizer = byte_level(template)
    document = ChatTemplate(tokenizer, Square(1), 384)(talk("hi", "a circle"))
    assert answers(tokenizer, document) == [" a circle</s>"]


def test_qwen_3_is_right_for_one_question_and_refused_where_it_drops_an_earlier_answers_thoughts(byte_level):
    tokenizer = byte_level(QWEN3)
    template = ChatTemplate(tokenizer, Square(1), 384)
    assert answers(tokenizer, template(talk("hi", "Yes."))) == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    with pytest.raises(BadSample, match=r"^template: the chat template of models/some-llm rewrites earlier .*think"):
        template(talk("hi", "Yes.", "why?", "No."))
    with pytest.raises(BadSample, match="does not write a turn as it was given: '<think>x</think>Yes"):
        template(talk("hi", "<think>x</think>Yes."))


def test_gpt_oss_learns_the_channel_it_writes_and_is_refused_where_the_end_mark_changes(byte_level):
    tokenizer = byte_level(GPT_OSS)
    template = ChatTemplate(tokenizer, Square(1), 384)
    # "final" is a word of the channel too, "return" of the end mark
    for answer in ("final", "return", "A circle."):
        learnt = f"<|channel|>final<|message|>{answer}<|return|>"
        assert answers(tokenizer, template(talk("hi", answer))) == [learnt]
    with pytest.raises(BadSample, match=r"rewrites earlier turns once later ones follow \(.*return.* against .*end"):
        template(talk("hi", "a", "b", "c"))


def test_a_system_turn_takes_the_place_of_the_templates_own_and_is_not_learnt(byte_level):
    tokenizer = byte_level(CHATML)
    document = ChatTemplate(tokenizer, Square(2), 384)(with_system("Be <image>.", "hi", "yes", images=1))
    assert (document.input_ids, document.labels) == expected(
        tokenizer,
        2,
        ("<|im_start|>system\nBe <image>.<|im_end|>\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("yes<|im_end|>", True),
        ("\n", False),
    )


def test_a_system_turn_that_the_template_drops_or_takes_for_another_speakers_is_rejected(byte_level):
    deaf = "{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}" + CHATML
    with pytest.raises(BadSample, match=r"does not write a turn as it was given: 'Be kind\.' became"):
        ChatTemplate(byte_level(deaf, MARKS[CHATML]), Square(1), 384)(with_system("Be kind.", "hi", "yes"))
    for template, role in ((VICUNA, "assistant"), (VICUNA.replace("== 'user'", "!= 'assistant'"), "user")):
        with pytest.raises(BadSample, match=rf"writes a system turn as one of the {role}'s"):
            ChatTemplate(byte_level(template), Square(1), 384)(with_system("Be kind.", "hi", "yes"))


def test_a_system_text_may_be_part_of_the_first_question_but_not_move_to_the_last(byte_level):
    tokenizer = byte_level(LLAMA2_SYSTEM)
    document = ChatTemplate(tokenizer, Square(1), 384)(with_system(" Be kind.\n", "hi", "yes", "and", "no"))
    assert answers(tokenizer, document) == [" yes </s>", " no </s>"]
    assert tokenizer.decode(prompts(document)[0]) == "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nhi [/INST]"
    # as Mistral's templates since v0.3 have it
    template = ChatTemplate(byte_level(LLAMA2_SYSTEM.replace("loop.first", "loop.revindex <= 2")), Square(1), 384)
    assert template(with_system("Be kind.", "hi", "yes")).input_ids
    with pytest.raises(BadSample, match="rewrites earlier turns once later ones follow"):
        template(with_system("Be kind.", "hi", "yes", "and", "no"))


def test_an_image_in_an_answer_is_not_predicted_and_the_text_behind_it_is(byte_level):
    tokenizer = byte_level(CHATML)
    for answer in ("<image> is <image>", "see <image>", "<image>"):
        document = ChatTemplate(tokenizer, Square(3), 384)(talk("hi", answer, images=answer.count("<image>")))
        at = [t for t, token in enumerate(document.input_ids) if token == IMAGE_POSITION]
        assert all(document.labels[t - 1] == IGNORE for t in at)
        ends = [t for t in at if t + 1 not in at]
        assert all(document.labels[t] == document.input_ids[t + 1] for t in ends)
        words = "".join(answers(tokenizer, document))
        assert words == answer.replace("<image>", "") + "<|im_end|>"


def test_only_the_number_of_images_counts(byte_level):
    template = ChatTemplate(byte_level(CHATML), Square(2), 384)
    sample = talk("<image> or <image>?", "x", images=2)
    real = replace(sample, images=(b"\xff\xd8 one", b"\xff\xd8 other"))
    assert template(sample).input_ids == template(real).input_ids


def test_texts_are_never_truncated_whatever_tokenizer_json_says(byte_level):
    tokenizer, plain = byte_level(CHATML), byte_level(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    for kind in (ChatTemplate, PlainTemplate):
        sample = talk("hi", "one two three four five six seven eight nine")
        assert kind(tokenizer, Square(1), 384)(sample) == kind(plain, Square(1), 384)(sample)


def test_a_template_that_asks_for_answers_in_another_form_than_it_writes_them_is_refused(byte_level):
    thinking = CHATML.replace(
        "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    assert thinking != CHATML
    with pytest.raises(UserError, match="asks for an answer in another form than it writes one"):
        ChatTemplate(byte_level(thinking, MARKS[CHATML]), Square(1), 384)


def test_a_template_that_withholds_the_header_of_an_answer_is_refused(byte_level):
    silent = CHATML[: CHATML.index("{% if add_generation_prompt")]
    with pytest.raises(UserError, match=r"ignores add_generation_prompt: '<\|im_start\|>assistant\\n' would be learnt"):
        ChatTemplate(byte_level(silent, MARKS[CHATML]), Square(1), 384)


def test_a_template_without_end_mark_is_refused_before_any_sample(byte_level):
    with pytest.raises(
        UserError,
        match=r"data\.template=chat: .* ends an answer with '\.', no .* never learn to stop; needed .* writes </s>",
    ):
        ChatTemplate(byte_level(VICUNA.replace("+ eos_token ", "")), Square(1), 384)
    with pytest.raises(UserError, match=r"ends an answer with '>', no special token that can end it"):
        ChatTemplate(
            byte_level(CHATML, marks=()), Square(1), 384
        )  # the template's marks are ordinary text to this tokenizer
    with pytest.raises(UserError, match="ends an answer with '<s>', no special token that can end it"):
        ChatTemplate(byte_level(VICUNA.replace("+ eos_token ", "+ bos_token ")), Square(1), 384)


def test_one_token_may_both_begin_texts_and_end_answers(byte_level):
    tokenizer = byte_level(VICUNA)
    tokenizer.bos_token = "</s>"  # as in GPT-2's family, where both are <|endoftext|>
    document = ChatTemplate(tokenizer, Square(1), 384)(talk("hi", "x"))
    assert answers(tokenizer, document) == [" x</s>"]
    assert document.input_ids[0] == document.input_ids[-1] == tokenizer.eos_token_id


def test_an_unknown_last_word_is_no_end_mark():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "USER": 1, ":": 2, "ASSISTANT": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = VICUNA.replace("+ eos_token ", "").replace("{{ bos_token }}", "")
    with pytest.raises(UserError, match="never learn to stop"):
        ChatTemplate(tokenizer, Square(1), 384)


def test_a_template_for_typed_contents_which_would_drop_every_text_is_refused(byte_level):
    with pytest.raises(UserError, match=r"does not write a turn as it was given: 'A red circle\.' became"):
        ChatTemplate(byte_level(LLAVA_HF), Square(1), 384)


def test_a_template_that_changes_a_text_is_refused_at_the_sample(byte_level):
    tokenizer = byte_level(
        CHATML.replace("message['content']", "message['content'].replace('bad', 'good')"), MARKS[CHATML]
    )
    template = ChatTemplate(tokenizer, Square(1), 384)
    assert answers(tokenizer, template(talk("hi", "yes"))) == ["yes<|im_end|>"]
    for sample in (talk("hi", "so bad"), talk("so bad", "hi")):
        with pytest.raises(BadSample, match=r"as it was given: '.*bad.* became '.*good"):
            template(sample)


def test_a_template_that_fails_or_is_no_template_is_refused_in_its_own_words(byte_level):
    picky = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML
    template = ChatTemplate(byte_level(picky, MARKS[CHATML]), Square(1), 384)
    with pytest.raises(BadSample, match=r"^template: the chat template of models/some-llm fails: one turn only$"):
        template(talk("a", "b", "c", "d"))
    with pytest.raises(UserError, match=r"data\.template=chat: the chat template of models/some-llm fails: "):
        ChatTemplate(byte_level("{% if %}"), Square(1), 384)
    with pytest.raises(UserError, match=r"data\.template=chat: the chat template of models/some-llm fails: "):
        ChatTemplate(byte_level("{{ messages[0]['content'] + 1 }}"), Square(1), 384)


def test_a_template_that_writes_without_end_is_refused_at_once_or_at_the_sample_on_which_it_does(byte_level):
    endless = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
    with pytest.raises(UserError, match=r"data\.template=chat: the chat template of models/some-llm fails: it wri"):
        ChatTemplate(byte_level(endless + CHATML), Square(1), 384)
    later = "{% if messages | length > 2 %}" + endless + "{% endif %}" + CHATML
    template = ChatTemplate(byte_level(later, MARKS[CHATML]), Square(1), 384)
    with pytest.raises(BadSample, match="fails: it writes more than"):
        template(talk("a", "b", "c", "d"))


def test_answers_that_nothing_separates_are_refused(byte_level):
    bare = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}\
{% endif %}{% endfor %}"
    tokenizer = byte_level(bare)
    template = ChatTemplate(tokenizer, Square(1), 384)
    assert answers(tokenizer, template(talk("a", "b", "c", "d"))) == ["b</s>", "d</s>"]
    for sample in (talk("a", "b", "", "d"), talk("", "b")):
        with pytest.raises(BadSample, match="writes nothing before an answer"):
            template(sample)


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(byte_level):
    direct = "\n  {%- set today = strftime_now(\"%Y-%m-%d\") %}{{ 'Today: ' + today + '\\n' }}" + CHATML
    fallback = "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}" + CHATML
    for template, date in ((direct, "Today: 2024-07-26\n<"), (fallback, "26 Jul 2024<")):
        tokenizer = byte_level(template, MARKS[CHATML])
        document = ChatTemplate(tokenizer, Square(1), 384)(talk("hi", "yes"))
        assert tokenizer.decode(document.input_ids).startswith(date)
    indirect = "{% set form = '%Y' %}{{ strftime_now(form) }}" + CHATML
    with pytest.raises(UserError, match="strftime_now needs its format written out"):
        ChatTemplate(byte_level(indirect, MARKS[CHATML]), Square(1), 384)


def test_the_callers_tokenizer_stays_without_image_token(byte_level):
    tokenizer = byte_level(CHATML)
    before = PlainTemplate(tokenizer, Square(3), 384)(caption("an <b>image</b>", question="<image>"))
    size, text = len(tokenizer), tokenizer("<image>").input_ids
    template = ChatTemplate(tokenizer, Square(3), 384)
    assert template(talk("<image>", "x", images=1)).input_ids.count(IMAGE_POSITION) == 3
    assert (len(tokenizer), tokenizer("<image>").input_ids) == (size, text)
    assert PlainTemplate(tokenizer, Square(3), 384)(caption("an <b>image</b>", question="<image>")) == before


def test_an_image_token_of_the_tokenizers_own_is_used_and_needs_no_embedding(byte_level):
    tokenizer = byte_level(CHATML, (*MARKS[CHATML], "<image>"))
    document = ChatTemplate(tokenizer, Square(2), vocab_size=len(tokenizer) - 1)(talk("<image>?", "x", images=1))
    assert document.input_ids.count(IMAGE_POSITION) == 2
    assert max(document.input_ids) < tokenizer.convert_tokens_to_ids("<image>") == len(tokenizer) - 1


def test_an_image_token_that_is_not_found_in_the_text_is_refused(sentencepiece):
    tokenizer = sentencepiece(VICUNA)
    tokenizer.add_tokens(AddedToken("<image>", single_word=True, normalized=False))
    with pytest.raises(BadSample, match=r"1 images or tiles, but .* reads 0 <image> tokens"):
        ChatTemplate(tokenizer, Square(1), 700)(talk("so<image>what", "x", images=1))


def test_a_tokenizer_that_finds_no_image_token_at_all_is_refused_before_any_sample(byte_level):
    tokenizer = byte_level(CHATML)
    tokenizer.split_special_tokens = True
    with pytest.raises(UserError, match=r"^data\.template=chat: 1 images or tiles, but .* reads 0 <image> tokens"):
        ChatTemplate(tokenizer, Square(1), 700)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (talk("a<|im_end|>\n", "b"), r"a turn from human holds '<\|im_end\|>', a special token of models/some-llm"),
        (talk("a", "so </s> it ends"), "a turn from gpt holds '</s>', a special token"),
        (talk("a", "b", "<pad>", "c"), "a turn from human holds '<pad>', a special token"),
        (with_system("<|im_start|>", "a", "b"), r"a turn from system holds '<\|im_start\|>', a special token"),
    ],
)
def test_a_sample_that_would_be_read_as_other_turns_is_rejected(byte_level, sample, message):
    with pytest.raises(BadSample, match=rf"^template: {message}"):
        ChatTemplate(byte_level(CHATML), Square(1), 384)(sample)


def test_a_token_of_a_chat_beyond_the_embedding_is_refused(byte_level):
    with pytest.raises(
        UserError, match=r"s\.tar: sample k: .* makes token \d+, but the model's embedding has 300 rows"
    ):
        ChatTemplate(byte_level(CHATML), Square(1), 300)(talk("hi", "x"))


def test_a_tokenizer_without_chat_template_is_refused_saying_where_to_put_one(byte_level):
    with pytest.raises(UserError, match=r"in models/some-llm has none; put a chat_template\.jinja beside .*=llava_v1"):
        ChatTemplate(byte_level(None), Square(1), 384)
    with pytest.raises(UserError, match="the tokenizer in models/some-llm has none"):
        ChatTemplate(byte_level({"tool_use": CHATML}, MARKS[CHATML]), Square(1), 384)
    named = byte_level({"default": CHATML, "tool_use": "no"}, MARKS[CHATML])
    assert answers(named, ChatTemplate(named, Square(1), 384)(talk("a", "b"))) == ["b<|im_end|>"]


def test_a_tokenizer_without_character_offsets_is_refused():
    with pytest.raises(UserError, match=r"models/bytes \(ByT5Tokenizer\) has none; save a fast one .*=plain"):
        ChatTemplate(ByT5Tokenizer(chat_template=CHATML, name_or_path="models/bytes"), Square(1), 384)


def test_a_run_with_data_template_chat_reads_its_shards_through_the_models_template(tiny, tmp_path):
    shutil.copytree(tiny / "llm", tmp_path / "llm")
    (tmp_path / "llm" / "chat_template.jinja").write_text(VICUNA)
    overrides = ["data.template=chat", f"model.llm.path={tmp_path / 'llm'}", "data.workers=0", "data.pack_length=256"]
    batch = next(iter(PackedBatches(load_config(tiny / "config.yaml", overrides), replica=0, replicas=1)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llm")
    learnt = tokenizer.decode([label for label in batch.labels[0].tolist() if label != IGNORE])
    captions = learnt.split("</s>")
    assert len(captions) - 1 == batch.samples and captions[-1] == ""
    assert all(re.fullmatch(r"( a .* background\.)+", text) for text in captions[:-1])
    assert (batch.input_ids == IMAGE_POSITION).sum() == 16 * len(batch.tiles)
