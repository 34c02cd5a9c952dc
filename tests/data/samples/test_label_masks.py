"""Two public tokenizer families, rebuilt small: every token of a conversation, and what is supervised, by hand.

Vocabularies are single bytes (or characters) and a few whole words, so that what a text becomes can be read off it.
"""

import pytest
from chat_styles import QWEN25
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import ChatTemplate, PlainTemplate
from mmtrain.layouts.square import Square

# Qwen2.5-Instruct's, without its branches for tools, and with a system prompt that is few tokens.
QWEN = QWEN25.replace("You are a helpful assistant.", "You are Qwen.")

# Mistral-7B-Instruct-v0.1's.
MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

# The pattern that GPT-4's, Llama 3's and (with single digits) Qwen's tokenizers split texts by.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_WORDS = "user assistant You What And No See Ġare ĠQwen Ġsee Ġpictures Ġis Ġthis Ġhere Ġthen Ġred Ġcircle system"
KNOWN_PIECES = "▁ [INST] ▁[INST] ▁[/INST] What ▁What ▁is ▁this And ▁And A No See ▁red ▁circle ▁here ▁then ? . , e"


def qwen() -> PreTrainedTokenizerFast:
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet()), *KNOWN_WORDS.split()]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))  # as Llama 3: a known word needs no merges
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def mistral() -> PreTrainedTokenizerFast:
    """A sentencepiece BPE with byte fallback: unknown characters become their bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *KNOWN_PIECES.split()]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)},
        [],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    before = [
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        pre_tokenizers.Split(Regex(r"▁?\[/?INST\]|[?.,\n]"), "isolated"),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL
    )


IN_BOTH = (
    ("human", "<image>\nWhat is this?"),
    ("gpt", "A red 😀 circle."),
    ("human", "And <image><image> here?"),
    ("gpt", "See <image> e\u0301, لا."),
    ("human", "And then?"),
    ("gpt", "No\n\n"),
)
# (supervised?, tokens): <image> stands for one image of one position
CASES = {
    "qwen": (
        qwen,
        (("system", "You see <image> pictures."), *IN_BOTH),
        [
            (False, "<|im_start|> system Ċ You Ġsee Ġ <image> Ġpictures . <|im_end|> Ċ"),
            (False, "<|im_start|> user Ċ <image> Ċ What Ġis Ġthis ? <|im_end|> Ċ <|im_start|> assistant Ċ"),
            (True, "A Ġred Ġ ð Ł ĺ Ģ Ġcircle . <|im_end|>"),
            (False, "Ċ <|im_start|> user Ċ And Ġ <image> <image> Ġhere ? <|im_end|> Ċ <|im_start|> assistant Ċ"),
            (True, "See Ġ"),
            (False, "<image>"),
            (True, "Ġ Ã © , Ġ Ù Ħ Ø § . <|im_end|>"),  # e and its accent are one letter: NFC
            (False, "Ċ <|im_start|> user Ċ And Ġthen ? <|im_end|> Ċ <|im_start|> assistant Ċ"),
            (True, "No Ċ Ċ <|im_end|>"),
            (False, "Ċ"),
        ],
    ),
    "mistral": (
        mistral,
        IN_BOTH,
        [
            (False, "<s> [INST] ▁ <image> <0x0A> What ▁is ▁this ? ▁[/INST]"),
            (True, "A ▁red ▁ <0xF0> <0x9F> <0x98> <0x80> ▁circle . </s>"),
            (False, "▁[INST] ▁And ▁ <image> <image> ▁here ? ▁[/INST]"),
            (True, "See ▁"),
            (False, "<image>"),
            (True, "▁ e <0xCC> <0x81> , ▁ <0xD9> <0x84> <0xD8> <0xA7> . </s>"),
            (False, "▁[INST] ▁And ▁then ? ▁[/INST]"),
            (True, "No <0x0A> <0x0A> </s>"),
            (False, "▁"),
        ],
    ),
}


def tokens_and_labels(tokenizer, expected, tokens_per_image: int):
    """input_ids and shifted labels of tokens written by hand."""
    written = [(supervised, token) for supervised, tokens in expected for token in tokens.split(" ")]
    ids: list[int] = []
    labels: list[int] = []
    for supervised, token in written:
        if token == "<image>":
            ids += [IMAGE_POSITION] * tokens_per_image
            labels += [IGNORE] * tokens_per_image
        else:
            number = tokenizer.get_vocab()[token]
            ids.append(number)
            labels.append(number if supervised else IGNORE)
    return tuple(ids), (*labels[1:], IGNORE)


def sample(turns) -> Sample:
    return Sample("k", "s.tar", turns, (b"",) * sum(text.count("<image>") for _, text in turns))


@pytest.mark.parametrize("tokens_per_image", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_chat_is_the_tokens_and_labels_written_by_hand(name, tokens_per_image):
    make, turns, expected = CASES[name]
    document = ChatTemplate(make(), Square(tokens_per_image), 1000)(sample(turns))
    names = {number: token for token, number in make().get_vocab().items()} | {IMAGE_POSITION: "<image>"}
    tokens = [token for _, tokens in expected for token in tokens.split(" ")]
    if tokens_per_image == 1:
        assert [names[token] for token in document.input_ids] == tokens
    assert (document.input_ids, document.labels) == tokens_and_labels(make(), expected, tokens_per_image)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (qwen, [(False, "<image> <image>"), (True, "A Ġred Ġ ð Ł ĺ Ģ Ġcircle . <|im_end|>")]),
        (mistral, [(False, "<image> <image>"), (True, "▁ A ▁red ▁ <0xF0> <0x9F> <0x98> <0x80> ▁circle . </s>")]),
    ],
    ids=["qwen", "mistral"],
)
def test_plain_is_the_tokens_and_labels_written_by_hand(make, expected):
    turns = (("system", "You <image>"), ("human", "What is <image>?"), ("gpt", "A red 😀 circle."))
    document = PlainTemplate(make(), Square(3), 1000)(sample(turns))
    assert (document.input_ids, document.labels) == tokens_and_labels(make(), expected, 3)


def test_the_mask_is_the_tokenizers_own_where_its_template_marks_generation():
    answer = "{{ message['content'] + eos_token + ' ' }}"
    marked = "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ ' ' }}"
    texts = ("<image>\nWhat is this?", "A red 😀 circle.", "And <image><image> here?", "  e\u0301, لا.", "?", "No\n\n")
    turns = tuple((("human", "gpt")[number % 2], text) for number, text in enumerate(texts))
    tokenizer = mistral()
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = MISTRAL.replace(answer, marked)
    assert tokenizer.chat_template.count("endgeneration") == 1
    messages = [{"role": {"human": "user", "gpt": "assistant"}[speaker], "content": text} for speaker, text in turns]
    stock = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    image = tokenizer.convert_tokens_to_ids("<image>")
    document = ChatTemplate(tokenizer, Square(1), 1000)(sample(turns))
    assert [image if token == IMAGE_POSITION else token for token in document.input_ids] == stock["input_ids"]
    assert [label != IGNORE for label in document.labels] == [*map(bool, stock["assistant_masks"][1:]), False]
    assert sum(stock["assistant_masks"]) > 15
