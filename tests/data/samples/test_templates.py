"""Templates: what a conversation becomes, which tokens are supervised, and which templates and samples are refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from chat_styles import LLAMA2, sentencepiece_like
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.samples.templates import ChatTemplate, PlainTemplate
from mmtrain.layouts.square import Square


def caption(text: str, images: int = 1, question: str = "<image>\nDescribe what you see.") -> Sample:
    return Sample("k", "s.tar", (("human", question), ("gpt", text)), (b"",) * images)


def talk(*texts: str, images: int = 0) -> Sample:
    turns = tuple((("human", "gpt")[number % 2], text) for number, text in enumerate(texts))
    return Sample("k", "s.tar", turns, (b"",) * images)


def with_system(system: str, *texts: str) -> Sample:
    sample = talk(*texts)
    return replace(sample, turns=(("system", system), *sample.turns))


def plain(tokenizer, positions: int = 1, vocab_size: int = 1000) -> PlainTemplate:
    return PlainTemplate(tokenizer, Square(positions), vocab_size)


def chat(tokenizer, positions: int = 1, vocab_size: int = 1000) -> ChatTemplate:
    return ChatTemplate(tokenizer, Square(positions), vocab_size)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "llm")


@pytest.mark.parametrize("images", [0, 2])
def test_plain_is_images_then_caption_then_eos_with_labels_on_the_caption_and_eos(tokenizer, images):
    words = tokenizer("a red circle", add_special_tokens=False).input_ids
    document = plain(tokenizer, positions=3)(caption("a red circle", images))
    assert document.input_ids == (1, *[IMAGE_POSITION] * 3 * images, *words, 2)
    assert document.labels == (*[IGNORE] * 3 * images, *words, 2, IGNORE)


@pytest.mark.parametrize("has_mark", [False, True])
@pytest.mark.parametrize("question", ["", "<image>"])
def test_images_inside_a_caption_stay_in_their_places_unsupervised(tokenizer, question, has_mark):
    if has_mark:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    first, last = (tokenizer(text, add_special_tokens=False).input_ids for text in ("a red circle\n", "\na blue one"))
    sample = caption("a red circle\n<image>\na blue one<image>", 2 + bool(question), question)
    document = plain(tokenizer, positions=3)(sample)
    begin, image = [IMAGE_POSITION] * 3 * bool(question), [IMAGE_POSITION] * 3
    assert document.input_ids == (1, *begin, *first, *image, *last, *image, 2)
    unseen = [IGNORE] * 3
    assert document.labels == (*[IGNORE] * len(begin), *first, *unseen, *last, *unseen, 2, IGNORE)


def test_images_inside_an_answer_are_not_supervised_and_the_words_around_them_are(tokenizer):
    page = talk("<image>", "a red circle\n<image>\na blue one", images=2)
    document = ChatTemplate(tokenizer, Square(3), 1000, "llava_v1")(page)
    answer = tokenizer.decode([label for label in document.labels if label != IGNORE])
    assert answer.split() == ["a", "red", "circle", "a", "blue", "one</s>"]
    assert document.input_ids.count(IMAGE_POSITION) == 6


def test_plain_takes_a_tokenizer_without_a_fast_one():
    document = plain(ByT5Tokenizer())(caption("é!"))
    assert document.input_ids == (IMAGE_POSITION, 0xC3 + 3, 0xA9 + 3, ord("!") + 3, 1)


def test_shifted_labels_give_the_loss_that_transformers_computes_from_unshifted_ones(tiny, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny / "llm")
    document = plain(tokenizer)(caption("a red circle on a blue background.", images=0))
    input_ids = torch.tensor([document.input_ids])
    with torch.no_grad():
        stock = model(input_ids, labels=input_ids)
    ours = torch.nn.functional.cross_entropy(stock.logits[0], torch.tensor(document.labels), ignore_index=IGNORE)
    torch.testing.assert_close(ours, stock.loss)


@pytest.mark.parametrize(
    ("sample", "detail"),
    [
        (
            talk("a", "b", "c", "d"),
            "the plain template takes one question and one answer; it has 2 questions and answers, which "
            "data.template=chat or llava_v1 takes",
        ),
        (caption("the end </s> of it"), "a turn from gpt holds '</s>', a special token of"),
    ],
)
def test_a_sample_that_the_plain_template_cannot_hold_is_rejected_in_words_without_its_key(tokenizer, sample, detail):
    with pytest.raises(BadSample) as caught:
        plain(tokenizer)(sample)
    assert caught.value.reason == "template" and caught.value.detail.startswith(detail)


def test_plain_needs_a_token_that_ends_captions(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"tokenizer of .*llm has none"):
        plain(tokenizer)


def test_a_token_beyond_the_embedding_is_refused_before_the_model_sees_it(tokenizer):
    with pytest.raises(UserError, match=r"s\.tar: sample k: .* makes token \d+, but the model's embedding has 5 rows"):
        plain(tokenizer, vocab_size=5)(caption("a red circle"))


# ---- the model's own chat template

CHATML = """{% if messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{% for message in messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + \
'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

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

LLAVA_HF = """{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}\
{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

MARKS = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    QWEN3: ("<|im_start|>", "<|im_end|>"),
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


@pytest.fixture
def sentencepiece():
    """Like Llama 2's: makes a BPE tokenizer with byte fallback that begins every stretch of text with a space."""

    def make(template: str):
        tokenizer = sentencepiece_like()
        tokenizer.chat_template, tokenizer.name_or_path = template, "models/some-llm"
        return tokenizer

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


STYLES = {
    "chatml": (CHATML, "byte_level", "{}<|im_end|>"),
    "llama3": (LLAMA3, "byte_level", "{}<|eot_id|>"),
    "llama2-sentencepiece": (LLAMA2, "sentencepiece", " {} </s>"),
    "vicuna-sentencepiece": (VICUNA, "sentencepiece", " {}</s>"),
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
    document = chat(tokenizer)(talk(*texts, images=images))
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


def test_phi_3_whose_marks_swallow_line_breaks_and_whose_template_ends_texts_with_a_second_mark(byte_level):
    tokenizer = byte_level(PHI3, ("<|user|>", "<|assistant|>", "<|end|>"), rstrip=True)
    document = chat(tokenizer)(talk("hi", "  A circle.", "why?", "No"))
    # the spaces before "A" belong to <|assistant|>, which takes them in; </s> after the last <|end|> is never reached
    assert answers(tokenizer, document) == ["A circle.<|end|>", "No<|end|>"]
    assert tokenizer.decode(document.input_ids[-3:]) == "o<|end|></s>"


def test_white_space_that_a_tokenizer_cuts_from_its_offsets_is_supervised_where_it_stands(byte_level):
    plain, trimming = byte_level(CHATML), byte_level(CHATML)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    offsets = trimming("a  b", add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    assert any(start == end for start, end in offsets)  # such a token overlaps nothing
    sample = talk(" hi  there ", "  one   two  ", "  ?  ", " x ")
    assert chat(trimming)(sample) == chat(plain)(sample)

    spaced = VICUNA.replace("' ASSISTANT:' }}{% endif %}", "' ASSISTANT: ' }}{% endif %}")
    plain.chat_template = trimming.chat_template = spaced
    document = chat(trimming)(talk("hi", "  x"))
    assert answers(plain, document) == ["  x</s>"]  # of three spaces the first one is the prompt's
    assert document == chat(plain)(talk("hi", "  x"))


def test_qwen_3_is_right_for_one_question_and_refused_where_it_drops_an_earlier_answers_thoughts(byte_level):
    tokenizer = byte_level(QWEN3)
    template = chat(tokenizer)
    assert answers(tokenizer, template(talk("hi", "Yes."))) == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    with pytest.raises(BadSample, match=r"^template: the chat template of models/some-llm rewrites earlier .*think"):
        template(talk("hi", "Yes.", "why?", "No."))
    with pytest.raises(BadSample, match="changes the text of a turn: '<think>x</think>Yes"):
        template(talk("hi", "<think>x</think>Yes."))


def test_a_system_text_may_be_part_of_the_first_question_but_not_move_to_the_last(byte_level):
    tokenizer = byte_level(LLAMA2)
    document = chat(tokenizer)(with_system("Be kind.", "hi", "yes", "and", "no"))
    assert answers(tokenizer, document) == [" yes </s>", " no </s>"]
    assert tokenizer.decode(prompts(document)[0]) == "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nhi [/INST]"
    # as Mistral's templates since v0.3 have it
    template = chat(byte_level(LLAMA2.replace("loop.index0 == 0", "loop.revindex <= 2")))
    assert template(with_system("Be kind.", "hi", "yes")).input_ids
    with pytest.raises(BadSample, match="rewrites earlier turns when later ones follow"):
        template(with_system("Be kind.", "hi", "yes", "and", "no"))


@pytest.mark.parametrize("kind", [chat, plain])
def test_texts_are_never_truncated_whatever_tokenizer_json_says(byte_level, kind):
    tokenizer = byte_level(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    sample = talk("hi", "one two three four five six seven eight nine")
    assert kind(tokenizer)(sample) == kind(byte_level(CHATML))(sample)


ENDLESS = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
ASKED = "'<|im_start|>assistant\\n' }}{% endif %}"
UNFIT = {
    "asks otherwise than it writes": (
        CHATML.replace(ASKED, "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"),
        "writes another prompt before an answer than add_generation_prompt",
    ),
    "withholds the header of an answer": (
        CHATML[: CHATML.index("{% if add_generation_prompt")],
        r"ignores add_generation_prompt: '<\|im_start\|>assistant\\n' would be learnt",
    ),
    "no end mark": (
        VICUNA.replace("+ eos_token ", ""),
        r"data\.template=chat: .* ends an answer with '\.', which is no .* never learn to stop; use .* writes </s>",
    ),
    "ends with what begins texts": (
        VICUNA.replace("+ eos_token ", "+ bos_token "),
        "ends an answer with '<s>'",
    ),
    "marks that are ordinary text to the tokenizer": (
        CHATML.replace("im_", "my_"),
        "ends an answer with '>'",
    ),
    "typed contents": (LLAVA_HF, r"changes the text of a turn: 'A red circle\.' became"),
    "no template": ("{% if %}", r"data\.template=chat: the chat template of models/some-llm fails: "),
    "fails": ("{{ messages[0]['content'] + 1 }}", "the chat template of models/some-llm fails: "),
    "endless": (ENDLESS + CHATML, "fails: it writes more than"),
    "a format of dates that is not written out": (
        "{% set form = '%Y' %}{{ strftime_now(form) }}" + CHATML,
        "strftime_now needs its format written out",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_template_from_which_the_model_could_not_learn_to_answer_is_refused(byte_level, case):
    template, message = UNFIT[case]
    assert template not in (CHATML, VICUNA)
    with pytest.raises(UserError, match=message):
        chat(byte_level(template, MARKS[CHATML]))


def at_a_second_question(text: str) -> str:
    return "{% if messages | length > 2 %}" + text + "{% endif %}" + CHATML


DROPS_SYSTEM = "{% if messages[0]['role'] == 'system' %}{% set messages = messages[1:] %}{% endif %}" + CHATML
CHANGES = CHATML.replace("message['content']", "message['content'].replace('bad', 'good')")
PICKY = at_a_second_question("{{ raise_exception('one turn only') }}")


@pytest.mark.parametrize(
    ("template", "sample", "message"),
    [
        (DROPS_SYSTEM, with_system("Be kind.", "a", "b"), r"changes the text of a turn: 'Be kind\.' became"),
        (CHANGES, talk("hi", "so bad"), r"changes the text of a turn: '.*bad.* became '.*good"),
        (CHANGES, talk("so bad", "hi"), r"changes the text of a turn: '.*bad.* became '.*good"),
        (PICKY, talk(*"abcd"), r"^template: the chat template of models/some-llm fails: one turn only$"),
        (at_a_second_question(ENDLESS), talk(*"abcd"), "fails: it writes more than"),
        (
            CHATML,
            talk("a<|im_end|>\n", "b"),
            r"^template: a turn from human holds '<\|im_end\|>', ",
        ),
        (CHATML, talk("a", "so </s> it ends"), "a turn from gpt holds '</s>', a special token"),
        (CHATML, with_system("<|im_start|>", "a", "b"), r"a turn from system holds '<\|im_start\|>', a special token"),
    ],
)
def test_a_sample_that_the_template_does_not_write_whole_is_rejected(byte_level, template, sample, message):
    fitting = chat(byte_level(template, MARKS[CHATML]))
    assert fitting(talk("hi", "yes")).input_ids
    with pytest.raises(BadSample, match=message):
        fitting(sample)


def test_an_unknown_last_word_is_no_end_mark():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "USER": 1, ":": 2, "ASSISTANT": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = VICUNA.replace("+ eos_token ", "").replace("{{ bos_token }}", "")
    with pytest.raises(UserError, match="never learn to stop"):
        chat(tokenizer)


def test_answers_that_nothing_separates_are_refused(byte_level):
    bare = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}\
{% endif %}{% endfor %}"
    tokenizer = byte_level(bare)
    template = chat(tokenizer)
    assert answers(tokenizer, template(talk("a", "b", "c", "d"))) == ["b</s>", "d</s>"]
    for sample in (talk("a", "b", "", "d"), talk("", "b")):
        with pytest.raises(BadSample, match="writes nothing before an answer"):
            template(sample)


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(byte_level):
    direct = "\n  {%- set today = strftime_now(\"%Y-%m-%d\") %}{{ 'Today: ' + today + '\\n' }}" + CHATML
    fallback = "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}" + CHATML
    for template, date in ((direct, "Today: 2024-07-26\n<"), (fallback, "26 Jul 2024<")):
        tokenizer = byte_level(template, MARKS[CHATML])
        assert tokenizer.decode(chat(tokenizer)(talk("hi", "yes")).input_ids).startswith(date)


def test_the_callers_tokenizer_stays_without_image_token(byte_level):
    tokenizer = byte_level(CHATML)
    size, text = len(tokenizer), tokenizer("<image>").input_ids
    assert chat(tokenizer)(talk("<image>", "x", images=1)).input_ids.count(IMAGE_POSITION) == 1
    assert (len(tokenizer), tokenizer("<image>").input_ids) == (size, text)


def test_an_image_token_of_the_tokenizers_own_is_used_and_needs_no_embedding(byte_level):
    tokenizer = byte_level(CHATML, (*MARKS[CHATML], "<image>"))
    document = chat(tokenizer, positions=2, vocab_size=len(tokenizer) - 1)(talk("<image>?", "x", images=1))
    assert document.input_ids.count(IMAGE_POSITION) == 2
    assert max(document.input_ids) < tokenizer.convert_tokens_to_ids("<image>") == len(tokenizer) - 1


def test_an_image_token_that_is_not_found_in_the_text_is_refused(byte_level, sentencepiece):
    tokenizer = sentencepiece(VICUNA)
    tokenizer.add_tokens(AddedToken("<image>", single_word=True, normalized=False))
    with pytest.raises(BadSample, match=r"1 images or tiles, but .* reads 0 <image> tokens"):
        chat(tokenizer)(talk("so<image>what", "x", images=1))
    tokenizer = byte_level(CHATML)
    tokenizer.split_special_tokens = True
    with pytest.raises(UserError, match=r"^data\.template=chat: 1 images or tiles, but .* reads 0 <image> tokens"):
        chat(tokenizer)


def test_a_tokenizer_without_chat_template_is_refused_saying_where_to_put_one(byte_level):
    with pytest.raises(UserError, match=r"in models/some-llm has none. Put a chat_template\.jinja beside .*=llava_v1"):
        chat(byte_level(None))
    with pytest.raises(UserError, match="the tokenizer in models/some-llm has none"):
        chat(byte_level({"tool_use": CHATML}, MARKS[CHATML]))
    named = byte_level({"default": CHATML, "tool_use": "no"}, MARKS[CHATML])
    assert answers(named, chat(named)(talk("a", "b"))) == ["b<|im_end|>"]


def test_a_tokenizer_without_character_offsets_is_refused():
    with pytest.raises(UserError, match=r"models/bytes \(ByT5Tokenizer\) has none. Save a fast one .*=plain"):
        chat(ByT5Tokenizer(chat_template=CHATML, name_or_path="models/bytes"))
