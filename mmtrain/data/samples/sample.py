"""Samples, their documents, and what stands for a sample that cannot be trained on.

members {"json", "jpg" or "0.jpg", "1.jpg", ...} --read_sample--> Sample: turns and image bytes
Sample --a template of templates.py--> Document: input_ids (T,), labels (T,) shifted
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.base.printing import escape
from mmtrain.data.samples.formats import LLAVA, SampleFormat, conversation, dotted_keys
from mmtrain.data.samples.records import IMAGE_MARK, IMAGE_SUFFIXES, BadSample, Turns
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.layouts.square import ONE_SQUARE

IMAGE_POSITION = -200  # LLaVA's IMAGE_TOKEN_INDEX: input_ids hold it where an image feature goes
IGNORE = -100  # torch's cross-entropy ignore_index: positions that predict nothing

# (width, height) in pixels of images, as EXIF turns them
Sizes = tuple[tuple[int, int], ...]
_IMAGE_SUFFIX = re.compile(rf"(?:(\d+)\.)?(?:{'|'.join(IMAGE_SUFFIXES)})")


@dataclass(frozen=True)
class Sample:
    """One conversation with its images, as stored."""

    key: str
    shard: str
    turns: Turns
    images: tuple[bytes, ...]  # encoded files, in the order of their <image> marks
    offset: int = 0  # of its first member's content in the shard, in bytes
    sizes: Sizes = ()  # of the images; where a layout asks

    @property
    def where(self) -> str:
        return f"{self.shard}: sample {escape(self.key)}"

    def quarantined(self, error: BadSample) -> QuarantinedSample:
        return QuarantinedSample(
            self.key,
            self.shard,
            self.offset,
            error.reason,
            error.detail,
        )


def without_images(sample: Sample) -> Sample:
    """Return a sample's text alone.

    Turns with <image> marks lose them, and the white space at their ends.

    Raises BadSample for an answer that was nothing else.
    """
    turns = []
    for speaker, text in sample.turns:
        if IMAGE_MARK in text:
            text = text.replace(IMAGE_MARK, "").strip()
        turns.append((speaker, text))
    if ("gpt", "") in turns:
        raise BadSample("no_answer", f"an answer is empty without its {IMAGE_MARK} marks")
    return replace(sample, turns=tuple(turns), images=(), sizes=())


@dataclass(frozen=True)
class Document:
    """A sample's tokens: what position t holds and which token it must predict."""

    sample: Sample
    input_ids: tuple[int, ...]  # IMAGE_POSITION at image positions
    # shifted: labels[t] is the token after position t, IGNORE where it is not supervised
    labels: tuple[int, ...]
    tilings: tuple[Tiling, ...]  # of each of the sample's images
    is_control: bool = False  # the images are another sample's, and take the sizes of its own


@dataclass(frozen=True)
class QuarantinedSample:
    """A sample that cannot be trained on, and why: its line in quarantine.jsonl."""

    key: str
    shard: str
    # of the damaged member's content, or the sample's first one, in the shard, in bytes
    offset: int
    reason: str  # a code of records.REASONS
    detail: str

    @property
    def where(self) -> str:
        return f"{self.shard}: sample {escape(self.key)}: {self.reason}: {escape(self.detail)}"


@dataclass(frozen=True)
class Tokenization:
    """The way from a sample's text to its tokens."""

    tokenizer: str  # of an LLM: its folder, or its name
    template: str  # as data.template
    layout: ImageLayout = ONE_SQUARE
    form: SampleFormat = LLAVA

    @cached_property
    def fingerprint(self) -> str:
        """Name under which indexes hold the lengths of these texts; raises UserError."""
        folder = model_folder(self.tokenizer)
        return text_fingerprint(folder, self.template, self.layout.texts, self.form.wording)


def image_number(suffix: str) -> int | None:
    """Return the number of the image that a lower-case suffix names: 0 for `jpg`, 2 for `2.jpg`.

    None if none.
    """
    match = _IMAGE_SUFFIX.fullmatch(suffix)
    if match is None:
        return None
    number = match[1] or "0"
    # Python's int() raises ValueError for more than 4,300 digits
    return int(number) if len(number) <= 9 else 10**9


def image_suffixes(suffixes: Collection[str]) -> list[str]:
    """Return the suffixes that are images, in the order of their <image> marks; raises BadSample.

    One image is KEY.jpg (or another of IMAGE_SUFFIXES) or KEY.0.jpg, several KEY.0.jpg, KEY.1.jpg,
    ... without a gap.
    """
    images = [suffix for suffix in suffixes if image_number(suffix) is not None]
    images.sort(key=lambda suffix: (image_number(suffix), suffix))
    has_gap = list(map(image_number, images)) != list(range(len(images)))
    if has_gap or (len(images) > 1 and not images[0][0].isdigit()):
        raise BadSample("image_names", f"it has {', '.join(images)}{dotted_keys(suffixes)}")
    return images


def read_sample(
    key: str,
    shard: str,
    members: Mapping[str, bytes],
    offset: int = 0,
    form: SampleFormat = LLAVA,
) -> Sample:
    """Read a sample from a shard's members, bytes by lower-case suffix; raises BadSample."""
    images = tuple(members[suffix] for suffix in image_suffixes(members))
    return Sample(
        key,
        shard,
        conversation(members, len(images), form),
        images,
        offset,
    )
