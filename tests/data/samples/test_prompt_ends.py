"""Borders of prompts and answers: training never learns tokens that generation does not see there.

The reference is what a stock tokenizer makes of each prompt alone, as `apply_chat_template` writes it.
"""

from functools import cache
from itertools import product

import pytest
from chat_styles import STYLES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, Sample
from mmtrain.data.samples.templates import make_template
from mmtrain.layouts.square import Square

MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|assistant|>")
ENDS = ("\n", "\n\n", "\n\n\n", ":", ": ", ":  ", ":\n", ":\n\n", ": \n", "\t", "\r\n", " 1", "#", "]", "> ", "'", "'s")
BEGINS = ("", "\n", "\n\n", "\r\n", " ", "  ", "\t", "1", "12. ", "'s", "]", "\N{COMBINING ACUTE ACCENT}", "\n\n\n1")
QUESTION = "What is it?"


def ending_with(end: str, header: str = "assistant") -> str:
    """A template whose prompts end with these characters."""
    begin = f"{{{{ {header + end!r} }}}}"
    asked = "{% for m in messages %}{% if m.role == 'user' %}{{ 'user: ' + m.content + '\\n' }}{% else %}"
    answered = begin + "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    return asked + answered + "{% if add_generation_prompt %}" + begin + "{% endif %}"


TEMPLATES = {name: style[0] for name, style in STYLES.items()}
TEMPLATES |= {f"prompts end with {end!r}": ending_with(end) for end in ENDS}
TEMPLATES |= {f"behind a mark: {end!r}": ending_with(end, "<|im_start|>assistant") for end in ("\n", "\n\n", " ")}
TEMPLATES["a mark that takes white space in"] = ending_with("\n", "<|assistant|>")

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen's


def byte_level(pre_tokenizer, *, trims: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    return tokenizer


def qwen() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return byte_level(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )


def gpt2() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), trims=True)


def unsplit() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def llama() -> Tokenizer:
    """Each stretch between marks begins with a space, so no answer can be read apart."""
    tokenizer = gemma()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words, breaks = pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split(Regex("\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, breaks])
    return tokenizer


def unigram() -> Tokenizer:
    """White space is collapsed, and cut at the end of a text, as in T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@cache
def trained(make) -> PreTrainedTokenizerFast:
    """A tokenizer that has seen prompts and answers in one, so that it joins what it can."""
    tokenizer = make()
    special = ["<unk>", "<s>", "</s>"]
    options = {"vocab_size": 500, "show_progress": False}
    match type(tokenizer.model):
        case models.BPE:
            trainer = trainers.BpeTrainer(special_tokens=special, max_token_length=6, **options)
        case models.Unigram:
            trainer = trainers.UnigramTrainer(special_tokens=special, unk_token="<unk>", max_piece_length=6, **options)
        case models.WordPiece:
            trainer = trainers.WordPieceTrainer(special_tokens=special, **options)
    if make in (qwen, gpt2, unsplit):
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    answers = [begin + words for begin, words in product(BEGINS, ("Yes.", "A red circle.", "No."))]
    texts = [f"user: {QUESTION}\nassistant{end}{answer}" for end, answer in product(ENDS, answers)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", name_or_path=make.__name__
    )
    added = [AddedToken(mark, special=True, normalized=False, rstrip=mark == "<|assistant|>") for mark in MARKS]
    fast.add_tokens(added, special_tokens=True)
    return fast


def runs_of_labels(labels) -> list[int]:
    """Positions that predict the first token of each answer."""
    return [at for at, label in enumerate(labels) if label != IGNORE and (at == 0 or labels[at - 1] == IGNORE)]


def outcomes(make, name: str, answers) -> dict[str, int]:
    """Count conversations with these answers: kept as one text, kept apart, refused, and those with another prompt."""
    tokenizer, template = trained(make), TEMPLATES[name]
    found = {"whole": 0, "apart": 0, "refused": 0, "other": 0}
    talks = [(QUESTION, answer) for answer in answers]
    talks += [(QUESTION, *turns) for answer in answers for turns in ((answer, QUESTION, "No."), ("No.", "?", answer))]
    try:
        writes = make_template(template, tokenizer, Square(1), 10**6)
    except UserError:
        return found | {"refused": len(talks)}
    own = {"chat_template": writes.chat.jinja, "fixed_dates": writes.chat.dates, "tokenize": False}
    for texts in talks:
        turns = tuple((("human", "gpt")[place % 2], text) for place, text in enumerate(texts))
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
        try:
            document = writes(Sample("k", "s.tar", turns, ()))
        except BadSample as error:
            assert error.reason == "template"
            found["refused"] += 1
            continue
        asked = [
            tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, **own)
            for place in range(1, len(texts), 2)
        ]
        prompts = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in asked]
        starts = runs_of_labels(document.labels)
        ids = tuple(tokenizer(tokenizer.apply_chat_template(messages, **own), add_special_tokens=False).input_ids)
        if [document.input_ids[: start + 1] for start in starts] != prompts:
            found["other"] += 1
        elif document.input_ids == ids:
            found["whole"] += 1
        else:
            found["apart"] += 1
            assert tokenizer.decode(document.input_ids) == tokenizer.decode(ids), "another text"
    return found


TOKENIZERS = (qwen, gpt2, unsplit, llama, gemma, unigram, wordpiece)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_labels_begin_where_each_prompt_alone_ends_or_the_sample_is_refused(make):
    names = ("data.template=chatml", "prompts end with ': '", "prompts end with '\\n\\n'", "prompts end with ' 1'")
    found = [outcomes(make, name, ("Yes.", "\nYes.", " Yes.", "1.")) for name in names]
    assert sum(one["other"] for one in found) == 0
    assert sum(one["whole"] + one["apart"] for one in found) > 5, "not all are refused"


@pytest.mark.nightly
@pytest.mark.parametrize("make", TOKENIZERS)
def test_whatever_prompts_end_with_and_answers_begin_with(make):
    assert len(TEMPLATES) == 30
    found = [outcomes(make, name, [begin + "Yes." for begin in BEGINS]) for name in TEMPLATES]
    totals = {kind: sum(one[kind] for one in found) for kind in found[0]}
    print(f"{make.__name__}: {totals}")
    assert totals["other"] == 0 < totals["whole"]


def test_a_line_break_that_joins_the_prompts_is_learnt_in_a_last_answer_and_refused_in_an_earlier_one():
    tokenizer = trained(qwen)
    write = make_template("chatml", tokenizer, Square(1), 10**6)
    assert tokenizer.tokenize("\n\nYes")[0] == "ĊĊ"
    asked, answered = (("human", QUESTION), ("gpt", "No.")), (("human", QUESTION), ("gpt", "\nYes."))
    document = write(Sample("k", "s.tar", (*asked, *answered), ()))
    learnt = tokenizer.convert_ids_to_tokens([label for label in document.labels if label != IGNORE])
    assert learnt[learnt.index("<|im_end|>") + 1] == "Ċ"
    with pytest.raises(BadSample, match=r"ends a prompt with .*assistant\\n', which .* before '\\nYes.* remove what"):
        write(Sample("k", "s.tar", (*answered, *asked), ()))
