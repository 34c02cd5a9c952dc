"""Conversation templates: which tokens a sample becomes, and which of them are supervised.

Sample (turns, images) --template--> Document: input_ids (T,), labels (T,) shifted

A template does not look at images, so text lengths are known without decoding (`TextCounter`). A
sample that it cannot hold raises BadSample; a tokenizer or template that no sample could mend
raises UserError.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.config.templates import template_name
from mmtrain.data.samples.chat import PROBE, ChatText, Span, any_of
from mmtrain.data.samples.records import IMAGE_MARK, BadSample, Turns
from mmtrain.data.samples.sample import (
    IGNORE,
    IMAGE_POSITION,
    Document,
    Sample,
    Tokenization,
    without_images,
)
from mmtrain.facts.model_files import foreign_files, model_folder, read_json
from mmtrain.facts.tokenizer_files import (
    missing_marks,
    panics_told,
    tokenizer_files,
)
from mmtrain.layouts.layout import ImageLayout, Tiling, UnfitImage

BREAKS = re.compile(rf"\n?{IMAGE_MARK}\n?")


class _Template:
    """A tokenizer with the texts and tokens of images: the part that all templates share."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: ImageLayout,
        vocab_size: int,
    ) -> None:
        """Raises UserError for a tokenizer that lacks the layout's marks."""
        self.tokenizer = tokenizer
        self.name = tokenizer.name_or_path
        self.layout = layout
        self.vocab_size = vocab_size
        lacking = [mark for mark in layout.marks if mark not in tokenizer.added_tokens_encoder]
        if lacking:
            raise missing_marks(layout.name, lacking, self.name)
        self.image_id = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        # None is of an empty text, as exports name marks that they do not write
        self.special_ids = set(tokenizer.all_special_ids) - {None}
        for token, added in tokenizer.added_tokens_decoder.items():
            if added.special:
                self.special_ids.add(token)
        special = tokenizer.convert_ids_to_tokens(sorted(self.special_ids))
        self.special_texts = any_of(filter(IMAGE_MARK.__ne__, special))

    def _refuse_special(self, turns: Turns) -> None:
        for speaker, text in turns:
            if mark := self.special_texts.search(text):
                raise BadSample(
                    "template",
                    f"a turn from {speaker} holds {mark[0]!r}, "
                    f"a special token of {self.name}, which could end the turn",
                )

    def _text_and_runs(self, tilings: Sequence[Tiling]) -> tuple[str, list[int]]:
        """Return images' text, with <image> for each run of positions, and the runs' lengths."""
        text = ""
        runs = []
        for piece in itertools.chain.from_iterable(map(self.layout.pieces, tilings)):
            if isinstance(piece, int):
                runs.append(piece)
                piece = IMAGE_MARK
            text += piece
        return text, runs

    def _refuse_unread_marks(self, ids: Sequence[int], runs: Sequence[int]) -> None:
        if (read := ids.count(self.image_id)) != len(runs):
            raise BadSample(
                "template",
                f"{len(runs)} images or tiles, but the tokenizer of {self.name} reads {read} "
                f"{IMAGE_MARK} tokens in their text; {IMAGE_MARK} must be an added token with "
                "normalized: false and single_word: false",
            )

    def _expanded(
        self,
        ids: Sequence[int],
        supervised: Sequence[bool],
        runs: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Return input_ids and labels, with the positions of a run in place of each <image>."""
        lengths = iter(runs)
        input_ids = []
        labels = []
        for token, is_supervised in zip(ids, supervised, strict=True):
            positions = 1
            label = token if is_supervised else IGNORE
            if token == self.image_id:
                positions = next(lengths)
                token = IMAGE_POSITION
                label = IGNORE
            input_ids += [token] * positions
            labels += [label] * positions
        return input_ids, labels

    def _document(
        self,
        sample: Sample,
        tilings: tuple[Tiling, ...],
        input_ids: list[int],
        labels: list[int],
    ) -> Document:
        """Shift the labels; raises UserError for ids without an embedding."""
        if max(input_ids) >= self.vocab_size:
            raise UserError(
                f"{sample.where}: the tokenizer of {self.name} makes token {max(input_ids)}, but "
                f"the model's embedding has {self.vocab_size} rows: they do not belong together"
            )
        return Document(
            sample,
            tuple(input_ids),
            (*labels[1:], IGNORE),
            tilings,
        )


class PlainTemplate(_Template):
    """LLaVA's stage 1: images, then the caption, nothing else.

    [BOS] images, caption, EOS. BOS only if the tokenizer begins texts with it; the words of system
    and human turns are dropped; caption and EOS are supervised. Source: `preprocess_plain` of
    LLaVA, which ends with a line break, not EOS. Images inside the caption, of an interleaved page,
    stay in their places; the texts between them are tokenized alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: ImageLayout,
        vocab_size: int,
    ) -> None:
        """Open it; raises UserError for a tokenizer without EOS.

        The LLM would be taught captions that never end.
        """
        if tokenizer.eos_token_id is None:
            raise UserError(
                "data.template: plain ends captions with the EOS token, but the tokenizer of "
                f"{tokenizer.name_or_path} has none. Set eos_token in its tokenizer_config.json"
            )
        with panics_told(tokenizer.name_or_path):
            self.prefix = tokenizer("a").input_ids[:1]
        if self.prefix != [tokenizer.bos_token_id]:
            self.prefix = []
        if layout.has_texts:
            tokenizer = with_marks(tokenizer, IMAGE_MARK)
        super().__init__(tokenizer, layout, vocab_size)
        try:
            self._images((layout.tiling(1, 1),))
        except BadSample as error:
            raise UserError(
                f"data.template=plain: {error.detail}. "
                "Put another tokenizer into the model's folder, or set model.vision.layout=square"
            ) from error

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample.

        Raises BadSample if it is not one question and one answer of mere text.
        """
        *_, (_, caption) = sample.turns
        speakers = [speaker for speaker, _ in sample.turns if speaker != "system"]
        if speakers != ["human", "gpt"]:
            raise BadSample(
                "template",
                "the plain template takes one question and one answer; "
                f"it has {len(speakers) // 2} questions and answers, "
                "which data.template=chat or llava_v1 takes",
            )
        self._refuse_special(sample.turns[-1:])

        # All images that the question has come first, those inside the caption in their places.
        texts = caption.split(IMAGE_MARK)
        tilings = tilings_of(sample, self.layout)
        before = len(tilings) - len(texts) + 1
        input_ids = self.prefix + self._images(tilings[:before])
        labels = [IGNORE] * len(input_ids)
        for place, text in enumerate(texts, before):
            ids = self._ids(text)
            image = self._images(tilings[place : place + 1])
            input_ids += ids + image
            labels += ids + [IGNORE] * len(image)
        end = self.tokenizer.eos_token_id
        return self._document(sample, tilings, [*input_ids, end], [*labels, end])

    def _images(self, tilings: Sequence[Tiling]) -> list[int]:
        """Return the tokens of all images with the texts around them.

        They are tokenized together, as stock processors do.
        """
        text, runs = self._text_and_runs(tilings)
        if text == IMAGE_MARK * len(runs):
            return [IMAGE_POSITION] * sum(runs)
        ids = self._ids(text)
        self._refuse_unread_marks(ids, runs)
        input_ids, _ = self._expanded(ids, [False] * len(ids), runs)
        return input_ids

    def _ids(self, text: str) -> list[int]:
        with panics_told(self.name):
            return self.tokenizer(text, add_special_tokens=False).input_ids


class ChatTemplate(_Template):
    """A template in Jinja, the tokenizer's own or another: all turns, every answer supervised.

    The conversation is written as text (chat.ChatText) and tokenized once, as at inference; then
    each <image> token becomes the positions that the layout gives it. Tokens that overlap an
    answer's span, from the prompt's end to the end mark, are supervised, but not images and what
    the layout writes around them.

    Each prompt's own tokens must stand before its answer: a tokenizer may join the end of one and
    the begin of the other, which generation never sees. Then the last answer is tokenized apart,
    and an earlier one makes a BadSample: the prompts behind it are of the joined text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: ImageLayout,
        vocab_size: int,
        template: str = "chat",
    ) -> None:
        """Open it; raises UserError for an unfit tokenizer or template.

        A tokenizer needs a chat template and character offsets.
        """
        called = template_name(template)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"data.template: {called} finds answers by character offsets, but the tokenizer "
                f"of {tokenizer.name_or_path} ({type(tokenizer).__name__}) has none. Save a fast "
                "one (tokenizer.json) into the model's folder, or, for captions of images, set "
                "data.template=plain"
            )
        super().__init__(with_marks(tokenizer, IMAGE_MARK), layout, vocab_size)
        special = self.special_ids - {self.image_id}
        self.added_ids = special | set(self.tokenizer.added_tokens_decoder)
        # <unk> is no end mark: a last word that is unknown would pass for one. Nor is <s>: it
        # begins the next text.
        self.end_marks = special - {self.tokenizer.unk_token_id, self.tokenizer.bos_token_id}
        if self.tokenizer.eos_token_id is not None:
            self.end_marks.add(self.tokenizer.eos_token_id)
        try:
            end_marks = self.tokenizer.convert_ids_to_tokens(sorted(self.end_marks))
            self.chat = ChatText(
                self.tokenizer,
                end_marks,
                template,
                layout.prompt_text,
            )
            self._tokens(PROBE, (layout.tiling(1, 1),))
        except BadSample as error:
            raise UserError(
                f"data.template={called}: {error.detail}. "
                "Set data.template=llava_v1, or plain for captions of images, "
                "or put another chat_template.jinja or tokenizer into the model's folder"
            ) from error

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample.

        Raises BadSample for turns that cannot be written and masked faithfully.
        """
        self._refuse_special(sample.turns)
        tilings = tilings_of(sample, self.layout)
        return self._document(sample, tilings, *self._tokens(sample.turns, tilings))

    def _tokens(self, turns: Turns, tilings: Sequence[Tiling]) -> tuple[list[int], list[int]]:
        """Return input_ids and labels that are not shifted; raises BadSample."""
        # its families write no line break between an image and its text
        if self.layout.prompt_text != IMAGE_MARK:
            turns = [(speaker, BREAKS.sub(IMAGE_MARK, text)) for speaker, text in turns]
        text, spans = self.chat.write(turns)
        images = []
        positions = []
        for tiling in tilings:
            written, runs = self._text_and_runs((tiling,))
            images.append(written)
            positions += runs
        text, spans, around = _wrapped(text, spans, images)
        encoding = self._encoded(text)
        ids = encoding.ids
        offsets = encoding.offsets
        self._refuse_unread_marks(ids, positions)
        in_answer = _overlapping(ids, offsets, spans, self.added_ids)
        answers = []  # places of their tokens
        for is_answer, places in itertools.groupby(range(len(ids)), in_answer.__getitem__):
            if is_answer:
                answers.append(list(places))
        if in_answer[0] or len(answers) != len(spans):
            raise self.chat.unfit(
                "writes nothing before an answer, "
                "or nothing between two, so answers cannot be found",
                "puts a mark there",
            )
        for places in answers:
            last = ids[places[-1]]
            if last not in self.end_marks:
                end = self.tokenizer.decode([last])
                raise self.chat.unfit(
                    f"ends an answer with {end!r}, which is no special end token: "
                    "the model would never learn to stop",
                    f"writes {self.tokenizer.eos_token or 'a special token'} after answers",
                )

        for (begin, _), (first, *_) in zip(spans, answers, strict=True):
            # What stands before an added token does not change how the text behind it is tokenized.
            at = first - 1
            while at > 0 and ids[at] not in self.added_ids:
                at -= 1
            start = offsets[at][0] if at else 0
            if ids[at:first] != self._encoded(text[start:begin]).ids:
                ids, offsets = self._apart(text, spans, begin, encoding.ids)
                in_answer = _overlapping(ids, offsets, spans, self.added_ids)
        if around:
            wrapping = _overlapping(ids, offsets, around, self.added_ids)
            in_answer = [now and not wraps for now, wraps in zip(in_answer, wrapping, strict=True)]
        return self._expanded(ids, in_answer, positions)

    def _encoded(self, text: str) -> Encoding:
        with panics_told(self.name):
            return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)

    def _apart(
        self,
        text: str,
        spans: Sequence[Span],
        begin: int,
        joined: list[int],
    ) -> tuple[list[int], list[Span]]:
        """Return ids and offsets of the prompt and of its answer, each tokenized alone.

        The prompt ends at `begin`.

        Raises BadSample where another answer follows, and where they do not write what the text's
        `joined` tokens do.
        """
        # no begin of a text
        prompt = self._encoded(text[:begin])
        answer = self._encoded(IMAGE_MARK + text[begin:])
        ids = prompt.ids + answer.ids[1:]
        decode = self.tokenizer.backend_tokenizer.decode
        if begin < spans[-1][0] or decode(ids) != decode(joined):
            raise self.chat.unfit(
                f"ends a prompt with {text[:begin][-20:]!r}, "
                f"which the tokenizer reads otherwise before {text[begin : begin + 20]!r}: "
                "this answer would be learnt behind another prompt than is asked",
                "ends prompts with a special token, or remove what the answer begins with",
            )
        moved = begin - len(IMAGE_MARK)
        offsets = [(start + moved, end + moved) for start, end in answer.offsets[1:]]
        return ids, prompt.offsets + offsets


Template = PlainTemplate | ChatTemplate


def make_template(
    template: str,
    tokenizer: PreTrainedTokenizerBase,
    layout: ImageLayout,
    vocab_size: int,
) -> Template:
    """Return the template of a `data.template`.

    Raises UserError for a tokenizer that it does not fit.
    """
    if template == "plain":
        return PlainTemplate(tokenizer, layout, vocab_size)
    return ChatTemplate(tokenizer, layout, vocab_size, template)


def tilings_of(sample: Sample, layout: ImageLayout) -> tuple[Tiling, ...]:
    """Return the tiling of each of a sample's images.

    Raises BadSample for one that cannot be cut.
    """
    images = len(sample.images)
    assert len(sample.sizes) == images or not layout.is_sized, (
        f"{sample.where}: {images} images, sizes {sample.sizes}"
    )
    try:
        return tuple(layout.tiling(*size, images) for size in sample.sizes or ((0, 0),) * images)
    except UnfitImage as error:
        raise BadSample("unfit_shape", str(error)) from None


def _wrapped(text: str, spans: list[Span], images: list[str]) -> tuple[str, list[Span], list[Span]]:
    """Write images' texts in place of <image> marks.

    Return the text, the moved spans, the images' spans.
    """
    marks = [mark.start() for mark in re.finditer(IMAGE_MARK, text)]
    if len(marks) != len(images):
        raise BadSample(
            "template", f"{len(images)} images, but the template writes {len(marks)} {IMAGE_MARK}"
        )
    if images == [IMAGE_MARK] * len(marks):
        return text, spans, []

    around = []
    grown = [0]  # by the first n images
    for mark, image in zip(marks, images, strict=True):
        begin = mark + grown[-1]
        around.append((begin, begin + len(image)))
        grown.append(grown[-1] + len(image) - len(IMAGE_MARK))

    def moved(at: int) -> int:
        return at + grown[bisect_left(marks, at)]

    texts = iter(images)
    text = re.sub(IMAGE_MARK, lambda _: next(texts), text)
    return text, [(moved(begin), moved(end)) for begin, end in spans], around


def with_marks(tokenizer: PreTrainedTokenizerBase, *marks: str) -> PreTrainedTokenizerBase:
    """Return a copy that reads each of `marks` as one token.

    A new one gets the lowest id that no token has.

    The libraries take the number of tokens for its id, which another token has where the vocabulary
    has holes.
    """
    copied = copy.deepcopy(tokenizer)
    vocabulary = tokenizer.get_vocab()
    copied("")  # switches off the truncation and padding that tokenizer.json may ask for
    new = [mark for mark in marks if mark not in vocabulary]
    if isinstance(copied, PreTrainedTokenizerFast) and max(vocabulary.values()) >= len(copied):
        content = json.loads(copied.backend_tokenizer.to_str())
        free = sorted(set(range(len(vocabulary) + len(marks))) - set(vocabulary.values()))
        content["model"]["vocab"] |= dict(zip(new, free, strict=False))
        copied.backend_tokenizer.model = Tokenizer.from_str(json.dumps(content)).model
    added = [mark for mark in marks if mark not in copied.added_tokens_encoder]
    copied.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in added], special_tokens=True
    )
    return copied


def _overlapping(
    ids: Sequence[int],
    offsets: Sequence[Span],
    spans: Sequence[Span],
    added_ids: set[int],
) -> list[bool]:
    """Tell for each token whether it overlaps a span of the text; spans are in order and apart.

    White space that a tokenizer cuts from a token's offsets (ByteLevel's trim_offsets) belongs to
    the token. An added token that begins before a span is not in it, though it may swallow white
    space there (Phi 3's rstrip).
    """
    result = []
    previous_end = 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        begin = previous_end if start == end else start
        # the first span that ends behind the token's begin
        nearest = bisect_right(spans, begin, key=itemgetter(1))
        is_inside = False
        if nearest < len(spans):
            first = spans[nearest][0]
            is_inside = begin >= first or (end > first and token not in added_ids)
        result.append(is_inside)
        previous_end = end
    return result


class TextCounter:
    """Counts a sample's tokens by the template that training tokenizes with."""

    def __init__(self, how: Tokenization) -> None:
        self.how = how
        self.layout = how.layout.of_texts
        # The tokens' number does not depend on the size of the embedding.
        self.template = make_template(
            how.template, load_tokenizer(how.tokenizer), self.layout, sys.maxsize
        )

    def __call__(self, sample: Sample) -> int:
        """Return the number of tokens without those of images; raises BadSample."""
        if self.layout.strips:
            sample = without_images(sample)
        input_ids = self.template(sample).input_ids
        return len(input_ids) - input_ids.count(IMAGE_POSITION)

    def __reduce__(self) -> tuple:
        return TextCounter, (self.how,)  # a jinja2 template cannot be pickled


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in an LLM's folder.

    Raises UserError where there is none that can be read.
    """
    folder = model_folder(path)
    settings = folder / "tokenizer_config.json"
    if settings in tokenizer_files(folder):  # which refuses a file that is too large
        read_json(settings)  # which refuses numbers that no tokenizer has
    with panics_told(path), foreign_files(f"{path}: the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
