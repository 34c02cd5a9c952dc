"""Conversation templates: which tokens a sample becomes, and which of them are supervised.

Sample (turns, images) --template--> Document: input_ids (T,), labels (T,) shifted
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from datetime import datetime

import jinja2
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmtrain.data.records import IMAGE_MARK
from mmtrain.data.samples import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.errors import UserError
from mmtrain.plan.chat_template import missing_chat_template

ROLES = {"human": "user", "gpt": "assistant"}  # LLaVA's speakers, as chat templates call them
PROBE = (("human", "What is this?"), ("gpt", "A red circle."))  # shows a template's faults before any sample is read
FIXED_DATE = datetime(2024, 7, 26)  # the day that Llama 3's own template falls back to
FIXED_CLOCK = (  # a macro hides the function of this name that transformers gives to templates
    "{% macro strftime_now(format) %}"
    "{{ fixed_dates[format] or raise_exception('strftime_now needs its format written out') }}"
    "{% endmacro %}\n"
)

Span = tuple[int, int]  # begin and end in characters


class PlainTemplate:
    """LLaVA's stage 1: images, then the caption, nothing else.

    [BOS] image positions, caption, EOS. BOS only if the tokenizer begins texts with it; the human turn's words are
    dropped; caption and EOS are supervised. Source: `preprocess_plain` in LLaVA's train.py, which ends a caption with a
    line break where this ends it with EOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens_per_image: int, vocab_size: int) -> None:
        """Raises UserError for a tokenizer without EOS: the LLM would be taught captions that never end."""
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"data.template: plain ends captions with the EOS token, and the tokenizer of {tokenizer.name_or_path} "
                "has none; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.tokens_per_image = tokens_per_image
        self.vocab_size = vocab_size
        bos = tokenizer.bos_token_id
        self.prefix = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample; raises UserError naming it if it is not one human and one gpt turn."""
        if [speaker for speaker, _ in sample.turns] != ["human", "gpt"]:
            speakers = ", ".join(speaker for speaker, _ in sample.turns)
            raise UserError(f"{sample.where}: the plain template takes one human and one gpt turn; it has {speakers}")
        caption = sample.turns[1][1]
        if IMAGE_MARK in caption:
            raise UserError(f"{sample.where}: {IMAGE_MARK} in the caption; the plain template puts images before it")
        supervised = [*self.tokenizer(caption, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        context = self.prefix + [IMAGE_POSITION] * (self.tokens_per_image * len(sample.images))
        return _document(sample, context + supervised, [IGNORE] * len(context) + supervised, self)


class ChatTemplate:
    """The chat template that comes with the LLM's tokenizer: all turns, every answer supervised.

    The conversation is rendered to text (human -> user, gpt -> assistant, no system message but the template's own
    default) and tokenized once, as at inference and by transformers' LlavaProcessor; then each <image> token becomes
    `tokens_per_image` image positions. An answer's span of the text is what the LLM itself has to write: from the end
    of the prompt for it (the turns before, with add_generation_prompt) to the end mark behind it, where generation
    stops (a special token: <|im_end|>, </s>, ...). Tokens that overlap a span are supervised; unsupervised ones lie
    before each answer.

    A template that writes today's date (strftime_now) gets a fixed one, so that samples do not change overnight.

    Price: 2 renderings per answer, to find where it begins and ends; one copy of the tokenizer if it lacks <image>.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens_per_image: int, vocab_size: int) -> None:
        """Raises UserError for a tokenizer without chat template or character offsets, and for an unfit template."""
        self.name = tokenizer.name_or_path
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"data.template: chat finds answers by character offsets, and the tokenizer of {self.name} "
                f"({type(tokenizer).__name__}) has none; save a fast one (tokenizer.json) into the model's folder, or "
                "set data.template=plain"
            )
        self.jinja, self.dates = _chat_template(tokenizer)
        self.tokenizer = _with_image_token(tokenizer)
        self.tokens_per_image = tokens_per_image
        self.vocab_size = vocab_size
        self.image_id = self.tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        added = self.tokenizer.added_tokens_decoder
        special = {token for token in added if added[token].special} | set(self.tokenizer.all_special_ids)
        special.discard(self.image_id)
        self.added_ids = special | set(added)
        # <unk> is no end mark: a last word that is unknown would pass for one. Nor is <s>: it begins the next text.
        self.end_marks = special - {self.tokenizer.unk_token_id, self.tokenizer.bos_token_id}
        if self.tokenizer.eos_token_id is not None:
            self.end_marks.add(self.tokenizer.eos_token_id)
        self.special_texts = _any_of(self.tokenizer.convert_ids_to_tokens(sorted(special)))
        self._try_template()

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample; raises UserError naming it for turns that cannot be rendered and masked faithfully."""
        self._check_turns(sample)
        ids, supervised = self._tokens(sample.turns, sample.where)
        if ids.count(self.image_id) != len(sample.images):
            raise UserError(
                f"{sample.where}: {len(sample.images)} images, but the tokenizer of {self.name} reads "
                f"{ids.count(self.image_id)} {IMAGE_MARK} tokens in the conversation; {IMAGE_MARK} must be an added "
                "token with normalized: false and single_word: false"
            )
        input_ids: list[int] = []
        labels: list[int] = []
        for token, learnt in zip(ids, supervised, strict=True):
            if token == self.image_id:
                input_ids += [IMAGE_POSITION] * self.tokens_per_image
                labels += [IGNORE] * self.tokens_per_image
            else:
                input_ids.append(token)
                labels.append(token if learnt else IGNORE)
        return _document(sample, input_ids, labels, self)

    def _try_template(self) -> None:
        """Render one question and answer: how do answers end? Raises UserError for what no sample could mend."""
        where = "data.template=chat"
        messages = _messages(PROBE)
        whole = self._render(messages, where)
        answer = PROBE[1][1]
        if answer not in whole:
            raise self._loses(where, answer, whole)
        self.tail = whole[whole.rindex(answer) + len(answer) :]  # e.g. "<|im_end|>\n"
        mark = _any_of(self.tokenizer.convert_ids_to_tokens(sorted(self.end_marks))).search(self.tail)
        self.unsupervised_tail = len(self.tail) - (mark.end() if mark else len(self.tail.rstrip()))
        self._tokens(PROBE, where)

        prompt = self._render(messages[:1], where, add_generation_prompt=True)
        header = whole[len(prompt) : whole.rindex(answer)]
        # Llama 2's template has no prompt to add, its answers directly follow the question: that is right.
        if header.strip() and prompt == self._render(messages[:1], where):
            raise self._unfit(
                where,
                f"ignores add_generation_prompt: {header!r} would be learnt as part of every answer",
                "writes it where add_generation_prompt is set",
            )

    def _check_turns(self, sample: Sample) -> None:
        speakers = [speaker for speaker, _ in sample.turns]
        if not speakers or speakers != ["human", "gpt"] * (len(speakers) // 2):
            raise UserError(
                f"{sample.where}: the chat template takes human and gpt turns in alternation, from human to gpt; "
                f"it has {', '.join(speakers)}"
            )
        for number, (speaker, text) in enumerate(sample.turns, start=1):
            if found := self.special_texts.search(text):
                raise UserError(
                    f"{sample.where}: turn {number} holds {found[0]!r}, a special token of {self.name}: the LLM would "
                    "read it as the end of a turn or the like; take it out of the text"
                )
            if speaker == "gpt" and not text.strip():
                raise UserError(
                    f"{sample.where}: turn {number}, an answer, is empty; there is nothing to learn from it"
                )
            if speaker == "gpt" and IMAGE_MARK in text:
                raise UserError(
                    f"{sample.where}: turn {number}, an answer, holds {IMAGE_MARK}; images belong to human turns"
                )

    def _tokens(self, turns: Sequence[tuple[str, str]], where: str) -> tuple[list[int], list[bool]]:
        """Token ids of the rendered conversation, <image> as one token, and which of them are supervised."""
        text, spans = self._answers(turns, where)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoding.input_ids
        supervised = _overlapping(ids, encoding.offset_mapping, spans, self.added_ids)
        last = [
            token for token, now, after in zip(ids, supervised, [*supervised[1:], False], strict=True) if now > after
        ]
        if supervised[0] or len(last) != len(spans):
            raise self._unfit(
                where,
                "writes nothing before an answer, or nothing between two: they cannot be told apart",
                "puts a mark there",
            )
        for token in last:
            if token not in self.end_marks:
                end = self.tokenizer.decode([token])
                raise self._unfit(
                    where,
                    f"ends an answer with {end!r}, no special token that can end it: the model would never learn to "
                    "stop",
                    f"writes {self.tokenizer.eos_token or 'a special token'} after answers",
                )
        return ids, supervised

    def _answers(self, turns: Sequence[tuple[str, str]], where: str) -> tuple[str, list[Span]]:
        """The rendered conversation and the span of each answer in it."""
        messages = _messages(turns)
        text = self._render(messages, where)
        spans: list[Span] = []
        for number in range(1, len(messages), 2):
            prompt = self._render(messages[:number], where, add_generation_prompt=True)
            whole = self._render(messages[: number + 1], where) if number + 1 < len(messages) else text
            if not whole.startswith(prompt):
                raise self._unfit(
                    where,
                    f"asks for an answer in another form than it writes one ({_difference(prompt, whole)})",
                    "begins answers as add_generation_prompt does",
                )
            question, answer = (said.strip() for _, said in turns[number - 1 : number + 1])
            asked = whole[spans[-1][1] if spans else 0 : len(prompt)]
            if question not in asked:
                raise self._loses(where, question, asked)
            answered = whole[len(prompt) :].removesuffix(self.tail)
            if not whole.endswith(self.tail) or not answered.rstrip().endswith(answer):
                raise self._loses(where, answer + self.tail, whole[len(prompt) :])
            end = len(whole) - self.unsupervised_tail
            if not text.startswith(whole[:end]):
                raise self._unfit(
                    where,
                    f"rewrites earlier turns once later ones follow ({_difference(whole[:end], text)}): answers would "
                    "be learnt in another form than they are asked for",
                    "does not",
                    "give each sample one question",
                )
            spans.append((len(prompt), end))
        return text, spans

    def _render(self, messages: list[dict[str, str]], where: str, add_generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.jinja,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                fixed_dates=self.dates,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ImportError) as error:
            raise UserError(f"{where}: the chat template of {self.name} fails: {error}") from error

    def _loses(self, where: str, given: str, written: str) -> UserError:
        return self._unfit(
            where,
            f"does not write a turn as it was given: {given[-80:]!r} became {written[-160:]!r}",
            "takes texts and leaves them whole",
        )

    def _unfit(self, where: str, fault: str, mended: str, otherwise: str | None = None) -> UserError:
        """The error for a template that does `fault`; one that does `mended` would do."""
        options = [
            otherwise,
            "set data.template=plain",
            f"put a chat_template.jinja that {mended} beside the tokenizer",
        ]
        return UserError(
            f"{where}: the chat template of {self.name} {fault}; {', or '.join(option for option in options if option)}"
        )


TEMPLATES = {"plain": PlainTemplate, "chat": ChatTemplate}  # by the names that data.template takes


def _document(
    sample: Sample, input_ids: list[int], labels: list[int], template: PlainTemplate | ChatTemplate
) -> Document:
    """The document of tokens and labels that are not shifted yet; raises UserError for ids without an embedding."""
    if max(input_ids) >= template.vocab_size:
        raise UserError(
            f"{sample.where}: the tokenizer of {template.tokenizer.name_or_path} makes token {max(input_ids)}, but "
            f"the model's embedding has {template.vocab_size} rows: the two do not belong together"
        )
    return Document(sample, tuple(input_ids), (*labels[1:], IGNORE))


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": ROLES[speaker], "content": text} for speaker, text in turns]


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, dict[str, str]]:
    """The tokenizer's default chat template, told the fixed date, and that date in each format it asks for.

    Raises UserError where there is none.
    """
    try:
        jinja = tokenizer.get_chat_template()
    except ValueError:  # none, or named ones without a default
        raise missing_chat_template(tokenizer.name_or_path) from None
    formats = re.findall(r"""strftime_now\(\s*(["'])(.*?)\1""", jinja)
    dates = {text: FIXED_DATE.strftime(text) for _, text in formats}
    return (FIXED_CLOCK + jinja if "strftime_now" in jinja else jinja), dates


def _with_image_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy that reads <image> as one token, added as transformers' LLaVA conversion adds it."""
    if IMAGE_MARK in tokenizer.added_tokens_encoder:
        return tokenizer
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens(AddedToken(IMAGE_MARK, special=True, normalized=False), special_tokens=True)
    return copied


def _overlapping(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], added_ids: set[int]) -> list[bool]:
    """Which tokens overlap a span of the text.

    White space that a tokenizer cuts from a token's offsets (ByteLevel's trim_offsets, down to an empty range) is taken
    to belong to it, and an added token that begins before a span is not in it, though it may swallow the white space
    that the span begins with (Phi 3's rstrip).
    """
    result = []
    previous_end = 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        begin = previous_end if start == end else start
        result.append(
            any(
                begin < span_end and (begin >= span_begin or (end > span_begin and token not in added_ids))
                for span_begin, span_end in spans
            )
        )
        previous_end = end
    return result


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Finds the first of these texts; those of white space alone are left out."""
    return re.compile("|".join(re.escape(text) for text in texts if text.strip()) or "(?!)")  # (?!) finds nothing


def _difference(one: str, other: str) -> str:
    """Where two texts part, for a message."""
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
    return f"{one[max(at - 20, 0) : at + 20]!r} against {other[max(at - 20, 0) : at + 20]!r}"
