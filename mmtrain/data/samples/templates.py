"""Conversation templates: which tokens a sample becomes, and which of them are supervised.

Sample (turns, images) --template--> Document: input_ids (T,), labels (T,) shifted

A template asks for the number and sizes of a sample's images and does not look at them, so text lengths are known
without decoding (`TextCounter`). A sample that it cannot hold raises BadSample; a tokenizer or template that no sample
could mend raises UserError.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.templates import FILE, template_name
from mmtrain.data.samples.chat import PROBE, ChatText, Span, Turns, any_of
from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.samples.records import IMAGE_MARK, BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample, without_images
from mmtrain.models.facts.model_files import foreign_files, model_folder
from mmtrain.models.facts.tokenizer_files import missing_marks, panics_told, text_fingerprint, tokenizer_files
from mmtrain.models.layouts.layout import ImageLayout, Tiling, UnfitImage
from mmtrain.models.layouts.square import ONE_SQUARE

CHATML = ("<|im_start|>", "<|im_end|>")


class PlainTemplate:
    """LLaVA's stage 1: images, then the caption, nothing else.

    [BOS] images, caption, EOS. BOS only if the tokenizer begins texts with it; the words of system and human
    turns are dropped; caption and EOS are supervised. Source: `preprocess_plain` in LLaVA's train.py, which ends a
    caption with a line break where this ends it with EOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: ImageLayout, vocab_size: int) -> None:
        """Raises UserError for a tokenizer without EOS: the LLM would be taught captions that never end."""
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"data.template: plain ends captions with the EOS token, and the tokenizer of {tokenizer.name_or_path} "
                "has none; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.layout = layout
        self.vocab_size = vocab_size
        bos = tokenizer.bos_token_id
        with panics_told(tokenizer.name_or_path):
            self.prefix = [bos] if tokenizer("a").input_ids[:1] == [bos] and bos is not None else []
        self.special_texts = any_of(tokenizer.convert_ids_to_tokens(sorted(_special_ids(tokenizer))))
        _refuse_missing_marks(tokenizer, layout)
        self.encoder = with_marks(tokenizer, IMAGE_MARK) if layout.has_texts else _own_copy(tokenizer)
        self.image_id = self.encoder.convert_tokens_to_ids(IMAGE_MARK)
        try:
            self._images((layout.tiling(1, 1),))
        except BadSample as error:
            raise UserError(
                f"data.template=plain: {error.detail}; put another tokenizer into the model's folder, or set "
                "model.vision.layout=square"
            ) from error

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample; raises BadSample if it is not one question and one answer of mere text."""
        *_, (_, caption) = sample.turns
        speakers = [speaker for speaker, _ in sample.turns if speaker != "system"]
        if speakers != ["human", "gpt"]:
            seen = f"{len(speakers) // 2} questions and answers"
            raise BadSample("template", f"the plain template takes one question and one answer; it has {seen}")
        if IMAGE_MARK in caption:
            raise BadSample("template", f"{IMAGE_MARK} in the caption; the plain template puts images before it")
        _refuse_special(self.special_texts, sample.turns[-1:], self.tokenizer.name_or_path)
        supervised = [*self._ids(caption), self.tokenizer.eos_token_id]
        tilings = tilings_of(sample, self.layout)
        context = self.prefix + self._images(tilings)
        return _document(sample, tilings, context + supervised, [IGNORE] * len(context) + supervised, self)

    def _images(self, tilings: Sequence[Tiling]) -> list[int]:
        """Tokens of all images with the texts around them, which are tokenized together, as stock processors do."""
        text, runs = _text_and_runs(self.layout, tilings)
        if text == IMAGE_MARK * len(runs):
            return [IMAGE_POSITION] * sum(runs)
        ids = self._ids(text)
        _refuse_unread_marks(ids, self.image_id, runs, self.tokenizer.name_or_path)
        left = iter(runs)
        return [one for token in ids for one in ([IMAGE_POSITION] * next(left) if token == self.image_id else [token])]

    def _ids(self, text: str) -> list[int]:
        with panics_told(self.tokenizer.name_or_path):
            if isinstance(self.encoder, PreTrainedTokenizerFast):
                return self.encoder.backend_tokenizer.encode(text, add_special_tokens=False).ids
            return self.encoder(text, add_special_tokens=False).input_ids


class ChatTemplate:
    """A template in Jinja, the tokenizer's own chat template or another: all turns, every answer supervised.

    The conversation is written as text (chat.ChatText) and tokenized once, as at inference and by transformers'
    processors; then each <image> token becomes the positions that the layout gives it. Tokens that overlap an answer's
    span, from the prompt's end to the end mark, are supervised; unsupervised ones lie before each answer. An image in
    an answer is never predicted, nor what the layout writes around it; the text behind it is.

    Price: 2 renderings per answer, one copy of the tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, layout: ImageLayout, vocab_size: int, template: str = "chat"
    ) -> None:
        """Raises UserError for a tokenizer without chat template or character offsets, and for an unfit template.

        `template` is what `data.template` holds.
        """
        self.name = tokenizer.name_or_path
        called = template_name(template)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"data.template: {called} finds answers by character offsets, and the tokenizer of {self.name} "
                f"({type(tokenizer).__name__}) has none; save a fast one (tokenizer.json) into the model's folder, or, "
                "for captions of images, set data.template=plain"
            )
        self.tokenizer = with_marks(tokenizer, IMAGE_MARK)
        self.layout = layout
        self.vocab_size = vocab_size
        self.image_id = self.tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        _refuse_missing_marks(tokenizer, layout)
        if template == "chatml" and (lacking := [m for m in CHATML if m not in tokenizer.added_tokens_encoder]):
            raise UserError(
                f"data.template: chatml writes {' and '.join(lacking)}, and the tokenizer of {self.name} has no such "
                "tokens, so that the LLM was never trained on them; take an LLM that was, or set "
                "data.template=llava_v1"
            )
        special = _special_ids(self.tokenizer) - {self.image_id}
        self.added_ids = special | set(self.tokenizer.added_tokens_decoder)
        # <unk> is no end mark: a last word that is unknown would pass for one. Nor is <s>: it begins the next text.
        self.end_marks = special - {self.tokenizer.unk_token_id, self.tokenizer.bos_token_id}
        if self.tokenizer.eos_token_id is not None:
            self.end_marks.add(self.tokenizer.eos_token_id)
        self.special_texts = any_of(self.tokenizer.convert_ids_to_tokens(sorted(special)))
        try:
            self.chat = ChatText(self.tokenizer, self.tokenizer.convert_ids_to_tokens(sorted(self.end_marks)), template)
            self._tokens(PROBE, (layout.tiling(1, 1),))
        except BadSample as error:
            remedy = "mend it" if called == FILE else "put another tokenizer into the model's folder"
            if template == "chat":
                remedy = "put another chat_template.jinja or tokenizer into the model's folder"
            begins = f" (the one that begins {escape(repr(template), 60)})" if called == FILE else ""
            raise UserError(
                f"data.template={called}{begins}: {error.detail}; {remedy}, or set data.template="
                f"{'chat' if called == 'llava_v1' else 'llava_v1'}, or, for captions of images, plain"
            ) from error

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample; raises BadSample for turns that cannot be written and masked faithfully."""
        _refuse_special(self.special_texts, sample.turns, self.name)
        tilings = tilings_of(sample, self.layout)
        ids, supervised, runs = self._tokens(sample.turns, tilings)
        input_ids: list[int] = []
        labels: list[int] = []
        left = iter(runs)
        for token, learnt in zip(ids, supervised, strict=True):
            if token == self.image_id:
                positions = next(left)
                input_ids += [IMAGE_POSITION] * positions
                labels += [IGNORE] * positions
            else:
                input_ids.append(token)
                labels.append(token if learnt else IGNORE)
        return _document(sample, tilings, input_ids, labels, self)

    def _tokens(self, turns: Turns, tilings: Sequence[Tiling]) -> tuple[list[int], list[bool], list[int]]:
        """Token ids of the conversation's text, which of them belong to answers, and what its <image> tokens stand for.

        The latter are positions, of one <image> after the other.
        """
        text, spans = self.chat.write(turns)
        images = [_text_and_runs(self.layout, (tiling,)) for tiling in tilings]
        text, spans, around = _wrapped(text, spans, [written for written, _ in images])
        positions = list(itertools.chain.from_iterable(runs for _, runs in images))
        with panics_told(self.name):
            encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        _refuse_unread_marks(ids, self.image_id, positions, self.name)
        in_answer = _overlapping(ids, encoding.offsets, spans, self.added_ids)
        last = [token for token, now, after in zip(ids, in_answer, [*in_answer[1:], False], strict=True) if now > after]
        if in_answer[0] or len(last) != len(spans):
            raise self.chat.unfit(
                "writes nothing before an answer, or nothing between two: they cannot be told apart",
                "puts a mark there",
            )
        for token in last:
            if token not in self.end_marks:
                end = self.tokenizer.decode([token])
                raise self.chat.unfit(
                    f"ends an answer with {end!r}, no special token that can end it: the model would never learn to "
                    "stop",
                    f"writes {self.tokenizer.eos_token or 'a special token'} after answers",
                )
        if around:
            wrapping = _overlapping(ids, encoding.offsets, around, self.added_ids)
            in_answer = [now and not wraps for now, wraps in zip(in_answer, wrapping, strict=True)]
        return ids, in_answer, positions


Template = PlainTemplate | ChatTemplate


def make_template(template: str, tokenizer: PreTrainedTokenizerBase, layout: ImageLayout, vocab_size: int) -> Template:
    """The template that `data.template` says; raises UserError for a tokenizer that it does not fit."""
    if template == "plain":
        return PlainTemplate(tokenizer, layout, vocab_size)
    return ChatTemplate(tokenizer, layout, vocab_size, template)


def tilings_of(sample: Sample, layout: ImageLayout) -> tuple[Tiling, ...]:
    """What each of a sample's images becomes; raises BadSample for one that cannot be cut."""
    images = len(sample.images)
    assert len(sample.sizes) == images or not layout.is_sized, f"{sample.where}: {images} images, sizes {sample.sizes}"
    try:
        return tuple(layout.tiling(*size, images) for size in sample.sizes or ((0, 0),) * images)
    except UnfitImage as error:
        raise BadSample("unfit_shape", str(error)) from None


def _text_and_runs(layout: ImageLayout, tilings: Sequence[Tiling]) -> tuple[str, list[int]]:
    """The text of images, <image> for each run of positions, and how long these are."""
    pieces = [piece for tiling in tilings for piece in layout.pieces(tiling)]
    runs = [piece for piece in pieces if isinstance(piece, int)]
    return "".join(IMAGE_MARK if isinstance(piece, int) else piece for piece in pieces), runs


def _refuse_unread_marks(ids: Sequence[int], image_id: int, runs: Sequence[int], tokenizer: str) -> None:
    """Raise BadSample where a text's tokens have not one <image> for each run of positions."""
    if (read := ids.count(image_id)) != len(runs):
        raise BadSample(
            "template",
            f"{len(runs)} images or tiles, but the tokenizer of {tokenizer} reads {read} {IMAGE_MARK} tokens in their "
            f"text; {IMAGE_MARK} must be an added token with normalized: false and single_word: false",
        )


def _document(
    sample: Sample, tilings: tuple[Tiling, ...], input_ids: list[int], labels: list[int], template: Template
) -> Document:
    """The document of tokens and labels that are not shifted yet; raises UserError for ids without an embedding."""
    if max(input_ids) >= template.vocab_size:
        raise UserError(
            f"{sample.where}: the tokenizer of {template.tokenizer.name_or_path} makes token {max(input_ids)}, but "
            f"the model's embedding has {template.vocab_size} rows: the two do not belong together"
        )
    return Document(sample, tuple(input_ids), (*labels[1:], IGNORE), tilings)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {token for token in added if added[token].special} | set(tokenizer.all_special_ids)


def _refuse_special(special_texts: re.Pattern[str], turns: Turns, tokenizer: str) -> None:
    """Raise BadSample for a text that the tokenizer would read as marks."""
    for speaker, text in turns:
        if found := special_texts.search(text):
            raise BadSample(
                "template",
                f"a turn from {speaker} holds {found[0]!r}, a special token of {tokenizer}: the LLM would read it as "
                "the end of a turn or the like",
            )


def _refuse_missing_marks(tokenizer: PreTrainedTokenizerBase, layout: ImageLayout) -> None:
    """Raise `missing_marks` for tokens around an image that the tokenizer does not have."""
    lacking = [mark for mark in layout.marks if mark not in tokenizer.added_tokens_encoder]
    if lacking:
        raise missing_marks(layout.name, lacking, tokenizer.name_or_path)


def _wrapped(text: str, spans: list[Span], images: Sequence[str]) -> tuple[str, list[Span], list[Span]]:
    """The text with those of images for its <image> marks, the same spans in it, and where they stand.

    Raises BadSample where there are more marks than images, or fewer.
    """
    marks = [found.start() for found in re.finditer(re.escape(IMAGE_MARK), text)]
    if len(marks) != len(images):
        raise BadSample("template", f"{len(images)} images, for which the template writes {len(marks)} {IMAGE_MARK}")
    if all(image == IMAGE_MARK for image in images):
        return text, spans, []
    grown = [0, *itertools.accumulate(len(image) - len(IMAGE_MARK) for image in images)]
    moved = [tuple(at + grown[bisect_left(marks, at)] for at in span) for span in spans]
    around = [(at + grown[n], at + grown[n] + len(images[n])) for n, at in enumerate(marks)]
    texts = iter(images)
    return re.sub(re.escape(IMAGE_MARK), lambda _: next(texts), text), moved, around


def with_marks(tokenizer: PreTrainedTokenizerBase, *marks: str) -> PreTrainedTokenizerBase:
    """Return a copy that reads each of `marks` as one token. A new one gets the lowest id that no token has.

    The libraries take the number of tokens for its id, which another token has where the vocabulary has holes.
    """
    copied, known = _own_copy(tokenizer), tokenizer.get_vocab()
    if isinstance(copied, PreTrainedTokenizerFast) and max(known.values()) >= len(copied):
        content = json.loads(copied.backend_tokenizer.to_str())
        free = sorted(set(range(len(known) + len(marks))) - set(known.values()))
        content["model"]["vocab"] |= dict(zip([mark for mark in marks if mark not in known], free, strict=False))
        copied.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    new = [
        AddedToken(mark, special=True, normalized=False) for mark in marks if mark not in copied.added_tokens_encoder
    ]
    copied.add_tokens(new, special_tokens=True)
    return copied


def _own_copy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy whose backend can be called itself, which takes 30 us a text less than transformers' call around it."""
    copied = copy.deepcopy(tokenizer)
    copied("")  # switches off the truncation and padding that tokenizer.json may ask for; nobody else can switch it on
    return copied


def _overlapping(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], added_ids: set[int]) -> list[bool]:
    """Which tokens overlap a span of the text; spans are in order and apart.

    White space that a tokenizer cuts from a token's offsets (ByteLevel's trim_offsets, down to an empty range) is taken
    to belong to it, and an added token that begins before a span is not in it, though it may swallow the white space
    that the span begins with (Phi 3's rstrip).
    """
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    result = []
    previous_end = 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        begin = previous_end if start == end else start
        nearest = bisect_right(ends, begin)  # the first span that ends behind the token's begin
        result.append(
            nearest < len(spans) and (begin >= begins[nearest] or (end > begins[nearest] and token not in added_ids))
        )
        previous_end = end
    return result


class TextCounter:
    """Counts as training tokenizes: it is the same template that makes the document."""

    def __init__(
        self, tokenizer_path: str, template: str, layout: ImageLayout = ONE_SQUARE, form: SampleFormat = LLAVA
    ) -> None:
        """Raises UserError for a folder without tokenizer and for a template that the tokenizer does not fit."""
        self.arguments = tokenizer_path, template, layout, form
        self.form = form  # of the samples that are counted
        self.fingerprint = text_fingerprint(model_folder(tokenizer_path), template, layout.texts, form.wording)
        self.layout = layout.of_texts
        # The tokens' number does not depend on the size of the embedding.
        self.template = make_template(template, load_tokenizer(tokenizer_path), self.layout, sys.maxsize)

    def __call__(self, sample: Sample) -> int:
        """Tokens without those of images; raises BadSample for a conversation that the template cannot hold."""
        input_ids = self.template(without_images(sample) if self.layout.strips else sample).input_ids
        return len(input_ids) - input_ids.count(IMAGE_POSITION)

    def __reduce__(self) -> tuple[type[TextCounter], tuple[str, str, ImageLayout, SampleFormat]]:
        return TextCounter, self.arguments  # a jinja2 template cannot be pickled


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in an LLM's folder; raises UserError where there is none that can be read."""
    folder = model_folder(path)
    tokenizer_files(folder)  # refuses one that is too large
    with panics_told(path), foreign_files(f"{path}: the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
