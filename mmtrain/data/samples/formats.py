"""Read samples as other people write them: conversations about images.

KEY.json, KEY.txt, KEY.caption --conversation, as a SampleFormat says-->
    turns ("system" | "human" | "gpt", text); each image has one <image> mark in their texts

    llava        KEY.json {"conversations": [{"from": "human" | "gpt" | "system", "value": text},
                 ...]}, with all marks
    sharegpt     KEY.json {"messages" or "conversations": [...]}, role and content under any usual
                 key and name (ROLE_KEYS, CONTENT_KEYS, SPEAKERS), contents as texts or as lists of
                 parts; "system" beside
    qa           KEY.json {"texts": [{"user": text, "assistant": text}, ...]}, as FineVision and
                 the_cauldron have them, or a question and an answer under QUESTION_KEYS and
                 ANSWER_KEYS: texts, or lists of messages (TRL's), with Alpaca's "input" behind the
                 question and a "history" of pairs before it
    interleaved  KEY.json {"texts": [text or null, ...], "images": [null or image, ...]}, as OBELICS
                 has a web page
    caption      KEY.txt, KEY.caption, or a key of KEY.json

Where a conversation has images and no mark, the marks are put before its first question, as LLaVA
writes them. Other samples raise BadSample.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from mmtrain.base.json_lines import compact_json
from mmtrain.config.schema import SampleFormatName
from mmtrain.data.samples.records import (
    CONTENT_KEYS,
    IMAGE_MARK,
    IMAGE_SUFFIXES,
    UNREAD_KEYS,
    BadSample,
    Turns,
    are_objects,
    held,
    is_given,
    judged_turns,
    keys_or_value,
    objects_in,
    parse_turns,
    refuse_unread_parts,
    refuse_wrong_image_count,
    short,
    value_text,
)

CAPTION_SUFFIXES = ("txt", "caption")
TEXT_SUFFIXES = ("json", *CAPTION_SUFFIXES)  # of members that some format reads
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
TEXTS_KEYS = ("texts",)
QUESTION_KEYS = ("question", "prompt", "query", "instruction")
ANSWER_KEYS = ("answer", "answers", "completion", "response", "output")
ROLE_KEYS = ("role", "from")
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "human"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "gpt"),
}
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of a content's parts
TEXT_PARTS = ("text", "input_text", "output_text")
# of a record: file names, or what a table holds of them
IMAGE_KEYS = ("images", "image", "image_path", "image_paths")
# ms-swift puts names and boxes of a record's `objects` there
_OBJECT_MARK = re.compile("<ref-object>|<bbox>")
# of a turn: with 0 or false OpenAI, ms-swift, axolotl do not train on it
MASK_KEYS = ("weight", "loss", "train")
_UNREAD_MEDIA = re.compile(  # suffixes of pictures, videos and sound
    rf"(.*\.)?({'|'.join(IMAGE_SUFFIXES)}|hei[cf]|avif|jxl|jp2|j2k|svg|p[pgbn]m|ico|tga|psd|exr|dng|"
    "mp4|m4v|mov|avi|mkv|webm|mpe?g|wmv|flv|wav|mp3|flac|ogg|opus|m4a)"
)
CAPTION_KEYS = ("caption", "text")  # of KEY.json, where no key is named
# a paragraph of OBELICS where a page begins another article
_NEXT_PAGE = "END_OF_DOCUMENT_TOKEN_TO_BE_REPLACED"


@dataclass(frozen=True)
class SampleFormat:
    """One way to write samples; the last two fields, as in `data`, count for captions alone."""

    name: str = "llava"  # one of NAMES
    caption_key: str | None = None
    caption_prompt: str = ""

    @property
    def reading(self) -> str:
        """Name under which an index holds the samples that this format cannot read."""
        if self.name == "caption" and self.caption_key is not None:
            return f"caption {compact_json(self.caption_key).decode()}"
        return self.name

    @property
    def wording(self) -> str:
        """Return the part of a text's fingerprint that this format decides.

        Empty for LLaVA's own format.
        """
        if self.name == "llava":
            return ""
        prompt = self.caption_prompt if self.name == "caption" else None
        return compact_json([self.reading, prompt]).decode()


LLAVA = SampleFormat()
NAMES = get_args(SampleFormatName)[1:]  # without "auto"
SEEN = 100  # samples that `auto` looks at
# share of them that a format must read to be the one: data.max_quarantine_rate lets no more pass
ENOUGH = 0.99


def candidates(records: Iterable[object]) -> tuple[str, ...]:
    """Return the formats to try.

    llava is not tried where a record has a system prompt of its own or an answer marked as not to
    train on: it would ignore both.
    """
    if any(map(_says_more_than_llava, records)):
        return NAMES[1:]
    return NAMES


def best(read: Sequence[int], seen: int) -> int:
    """Return the place of the first format that reads ENOUGH of the `seen` samples.

    Where there is none, it is the one that reads most of them.
    """
    for place, count in enumerate(read):
        if count >= ENOUGH * seen:
            return place
    return read.index(max(read))


def text_suffix(reading: str, suffixes: Collection[str]) -> str:
    """Return the suffix of the member with a sample's text, for a format's `reading`."""
    if reading == "caption":
        for suffix in CAPTION_SUFFIXES:
            if suffix in suffixes:
                return suffix
    return "json"


def conversation(members: Mapping[str, bytes], images: int, form: SampleFormat) -> Turns:
    """Return the turns of a sample from its members, bytes by lower-case suffix.

    Raises BadSample.
    """
    content = _caption(members, form) if form.name == "caption" else _record(members)
    unread = sorted(filter(_UNREAD_MEDIA.fullmatch, members))
    if unread and not images:
        raise BadSample(
            "image_count",
            f"KEY.{', KEY.'.join(unread)[:200]} are not read as images; "
            f"name images KEY.jpg, or KEY.0.jpg, KEY.1.jpg, ... ({', '.join(IMAGE_SUFFIXES)})",
        )
    if form.name == "caption":
        return caption_turns(content, images, form.caption_prompt)
    refuse_unread(content)
    return READERS[form.name].turns(content, images)


def llava_turns(record: object, images: int) -> Turns:
    """Return the turns of a record in LLaVA's own form; raises BadSample."""
    turns = parse_turns(record)
    if _says_more_than_llava(record):
        raise BadSample(
            "unread_part",
            "it has a system prompt beside its turns, or an answer that is not to be trained on; "
            "LLaVA's format has none, use data.format=sharegpt (--format sharegpt)",
        )
    if images and not _has_marks(turns):
        raise BadSample(
            "image_count",
            f"0 {IMAGE_MARK} marks in the conversation, {images} images; "
            "data.format=sharegpt (--format sharegpt) adds missing marks",
        )
    refuse_wrong_image_count(turns, images)
    refuse_what_would_be_lost(record, turns, images)
    return turns


def refuse_what_would_be_lost(
    record: object,
    turns: Turns,
    images: int,
) -> None:
    """Raise BadSample for a record that says more than its turns hold.

    It has no marks and names other images than its sample has, or it has marks of objects.
    """
    named = len(first_held(record, IMAGE_KEYS))
    if not named:
        for message in first_held(record, (*CONVERSATION_KEYS, *TEXTS_KEYS, *QUESTION_KEYS)):
            named += len(first_held(message, IMAGE_KEYS))
    if named not in (0, images) and not _has_marks(turns):
        raise BadSample(
            "image_count", f"its record names {named} images, but the sample has {images}"
        )
    if first_held(record, ("objects",)) and any(_OBJECT_MARK.search(text) for _, text in turns):
        raise BadSample(
            "unread_part",
            "<ref-object> and <bbox> stand for its objects; write those into the texts",
        )


def refuse_unread(record: object) -> None:
    """Raise BadSample for a record with videos, sound or tools."""
    unread = [key for key in UNREAD_KEYS if first_held(record, (key,))]
    if unread:
        raise BadSample(
            "unread_media", f"it has {' and '.join(unread)}: {short(first_held(record, unread))}"
        )


def sharegpt_turns(record: object, images: int) -> Turns:
    """Return the turns of a record with messages in any usual form; raises BadSample."""
    messages = first_held(record, CONVERSATION_KEYS)
    if not are_objects(messages):
        raise BadSample(
            "no_conversation",
            f"it needs a list of messages under {' or '.join(CONVERSATION_KEYS[:2])}; "
            f"{keys_or_value(record)}",
        )
    return _conversation(record, messages, images)


def _conversation(record: object, messages: Sequence[dict], images: int) -> Turns:
    turns = list(itertools.starmap(_turn, enumerate(messages)))
    system = _system_beside(record)
    if system and turns[0][0] != "system":
        turns.insert(0, ("system", _text(0, system)))
    refuse_what_would_be_lost(record, turns, images)
    return _with_marks(turns, images)


def qa_turns(record: object, images: int) -> Turns:
    """Return the turns of a record that names its questions and answers; raises BadSample.

    Of several answers to one question, as annotators of VQA gave them, the most frequent is taken,
    on a tie the first. Of numbers one counts only if more than half are equal: they may be a box.
    """
    messages = []
    pairs = first_held(record, TEXTS_KEYS)
    if are_objects(pairs):
        for pair in pairs:
            for role in ("user", "assistant"):
                messages.append({**pair, "role": role, "content": pair.get(role)})
        return _conversation(record, messages, images)

    question = value_text(first_value(record, QUESTION_KEYS))
    more = value_text(first_value(record, ("input",)))  # Alpaca's, behind its question
    if question is None:
        question = more
    elif isinstance(question, str) and isinstance(more, str):
        question = f"{question}\n{more}"
    elif more is not None:
        raise BadSample("non_text_value", f"its input is {short(more)}; write it into the question")
    answer = first_value(record, ANSWER_KEYS)
    if question is None or answer is None:
        raise BadSample(
            "no_conversation",
            f"it needs {' or '.join(QUESTION_KEYS)} with {' or '.join(ANSWER_KEYS)}, "
            f"or texts of {{user, assistant}}; {keys_or_value(record)}",
        )
    for pair in [*first_held(record, ("history",)), [question, answer]]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadSample(
                "unread_part",
                f"its history holds {short(pair)}; write pairs of a question and its answer",
            )
        messages += [*_messages("user", pair[0]), *_messages("assistant", pair[1])]
    return _conversation(record, messages, images)


def _messages(speaker: str, value: object) -> list[dict]:
    if isinstance(value, list):
        have_roles = (isinstance(one, dict) and not {*ROLE_KEYS}.isdisjoint(one) for one in value)
        if all(have_roles):
            return value
        texts = list(map(_answer_text, value))
        if all(isinstance(text, str) for text in texts):
            if speaker == "user":
                raise BadSample(
                    "non_text_value",
                    f"it has several questions: {short(value)}; write a record for each",
                )
            answer, times = Counter(texts).most_common(1)[0]
            if isinstance(value[0], int | float) and 2 * times <= len(texts):
                raise BadSample(
                    "non_text_value",
                    f"its answer is {short(value)}; write a list of numbers as text",
                )
            value = answer
    if isinstance(value, str) and value.startswith("['") and value.endswith("']"):
        raise BadSample(
            "non_text_value",
            f"the {speaker}'s text is a list of Python's, {short(value)}; write JSON",
        )
    return [{"role": speaker, "content": value}]


def _answer_text(entry: object) -> object:
    """Return the text of one of several answers, which may be an object.

    A part of a message stays.
    """
    if isinstance(entry, dict) and "type" not in entry:
        entry = entry.get("answer", entry.get("text"))
    return value_text(entry)


def interleaved_turns(record: object, images: int) -> Turns:
    """Return a page as one answer, which holds its texts and images in their order.

    Raises BadSample.

    The images that it begins with are the question. Where the record lists no images, each null
    among the texts is one.
    """
    texts = first_value(record, TEXTS_KEYS)
    is_page = isinstance(texts, list)
    if is_page:
        texts = list(map(value_text, texts))
        is_page = all(isinstance(text, str | None) for text in texts)
    if not is_page:
        raise BadSample(
            "no_conversation",
            "it needs a list of texts and nulls under texts, and under images a list with nulls "
            f"for the texts; {keys_or_value(record)}",
        )
    named = first_value(record, ("images",))
    if named is None:
        named = [text is None for text in texts]
    if not isinstance(named, list) or len(named) != len(texts):
        raise BadSample(
            "image_count", f"texts has {len(texts)} places; images must be a list of that length"
        )

    pieces = []
    for text, image in zip(texts, named, strict=True):
        if held(image):
            pieces.append(IMAGE_MARK)
        pieces += filter(None, map(str.strip, (text or "").split(_NEXT_PAGE)))
    answer = list(itertools.dropwhile(IMAGE_MARK.__eq__, pieces))
    question = pieces[: len(pieces) - len(answer)]
    turns = judged_turns([("human", "\n".join(question)), ("gpt", "\n\n".join(answer))])
    refuse_wrong_image_count(turns, images)
    return turns


def caption_turns(caption: object, images: int, prompt: str) -> Turns:
    """Return the question `prompt` with the caption as its answer.

    The caption is a text, or the first of several. Raises BadSample.
    """
    if isinstance(caption, list) and caption:
        caption = caption[0]
    caption = value_text(caption)
    if not isinstance(caption, str):
        raise BadSample("non_text_value", f"the caption is {short(caption)}")
    if not images:
        raise BadSample(
            "image_count",
            "a caption without an image: the sample has no member KEY.jpg, KEY.png, ...",
        )
    answer = caption.replace(IMAGE_MARK, "").strip()
    return _with_marks([("human", prompt), ("gpt", answer)], images)


def first_value(record: object, keys: Iterable[str]) -> Any:
    """Return a record's value under the first of the keys that has one, perhaps 0.

    It is None where there is none.
    """
    if isinstance(record, dict):
        for key in keys:
            if is_given(record.get(key)):
                return record[key]
    return None


def first_held(record: object, keys: Iterable[str]) -> list:
    """Return the list of values under the first of the keys that holds any, such as images."""
    for key in keys:
        if entries := held(first_value(record, (key,))):
            return entries
    return []


def _has_marks(turns: Turns) -> bool:
    return any(IMAGE_MARK in text for _, text in turns)


def _says_more_than_llava(record: object) -> bool:
    turns = objects_in(first_held(record, ("conversations",)))
    has_own_system = bool(turns) and turns[0].get("from") == "system"
    masks_an_answer = any(_masks(turn) for turn in turns if turn.get("from") == "gpt")
    return masks_an_answer or (bool(_system_beside(record)) and not has_own_system)


def _system_beside(record: object) -> Any:
    """Return the system prompt that is not among the turns: a text, or a list of parts."""
    system = first_value(record, ("system",))
    if isinstance(system, str) and not system.strip():
        return None
    return system


def _masks(turn: dict) -> list[str]:
    """Return the keys of a turn that say not to supervise it."""
    return [key for key in MASK_KEYS if isinstance(turn.get(key), int | float) and not turn[key]]


def json_record(members: Mapping[str, bytes]) -> object:
    """Return the content of KEY.json; None where it is missing or cannot be read."""
    try:
        return _record(members)
    except BadSample:
        return None


def _record(members: Mapping[str, bytes], reason: str = "no_json") -> object:
    if "json" not in members:
        raise BadSample(reason, f"it has {', '.join(sorted(members))}{dotted_keys(members)}")
    try:
        return json.loads(members["json"])
    except (ValueError, RecursionError) as error:
        mend = ""
        if str(error).startswith("Extra data"):
            mend = "; write one JSON value, not JSON lines"
        raise BadSample("not_json", f"{error}{mend}") from None


def dotted_keys(suffixes: Iterable[str]) -> str:
    """Return the remedy for messages where names of files have a dot in their key."""
    endings = tuple(f".{name}" for name in TEXT_SUFFIXES)
    if any(suffix.endswith(endings) for suffix in suffixes):
        return (
            "; a key ends at the first dot of a name: write the tar with other characters for dots"
        )
    return ""


def _caption(members: Mapping[str, bytes], form: SampleFormat) -> object:
    suffix = text_suffix(form.reading, members)
    if suffix != "json":
        try:
            return members[suffix].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadSample("not_json", f"{suffix}: {error}") from None
    names: tuple[str, ...] = CAPTION_KEYS
    reason = "no_caption"
    if form.caption_key is not None:
        names = (form.caption_key,)
        reason = "no_json"
    record = _record(members, reason)
    for name in names:
        if isinstance(record, dict) and name in record:
            return record[name]
    raise BadSample(
        "no_caption", f"its json has no key {' or '.join(names)}; {keys_or_value(record)}"
    )


def _turn(number: int, message: dict) -> tuple[str, str]:
    role = first_value(message, ROLE_KEYS)
    speaker = SPEAKERS.get(role.lower()) if isinstance(role, str) else None
    if speaker is None or (speaker == "system" and number > 0):
        raise BadSample("unknown_role", f"turn {number} is from {short(role)}")
    if speaker == "gpt" and (masks := _masks(message)):
        raise BadSample(
            "masked_answer", f"turn {number}, an answer, has {masks[0]}: {message[masks[0]]}"
        )
    refuse_unread_parts(number, message)
    # The first that is given; else the first, as the empty question of an image.
    contents = [message[key] for key in CONTENT_KEYS if key in message]
    return speaker, _text(number, max(contents, key=is_given, default=None))


def _text(number: int, content: object) -> str:
    """Return a message's content as text.

    An image in a list of parts becomes a mark on a line of its own.
    """
    parts = content if isinstance(content, list) else [value_text(content)]
    text = ""
    was_image = False
    for place, part in enumerate(parts):
        piece = part
        is_image = isinstance(part, dict) and is_image_part(part)
        if is_image:
            refuse_unread_parts(number, part, ("text",))
            piece = IMAGE_MARK
        elif isinstance(part, dict):
            refuse_unread_parts(number, part, IMAGE_PARTS)
            has_text = part.get("type", "text") in TEXT_PARTS
            piece = has_text and value_text(part.get("text"))
        if not isinstance(piece, str):
            raise BadSample("non_text_value", f"turn {number} has the value {short(part)}")
        if place and (is_image or was_image):
            text += "\n"
        text += piece
        was_image = is_image
    return text


def is_image_part(part: dict) -> bool:
    """Tell whether a part of a content is an image.

    It says so by its type or, as Qwen-VL writes parts, by its key.
    """
    kind = part.get("type")
    return kind in IMAGE_PARTS or (kind is None and first_value(part, IMAGE_PARTS) is not None)


def _with_marks(turns: list[tuple[str, str]], images: int) -> Turns:
    """Return the checked turns, with a mark for each image.

    If none has a mark, put the marks of all images before the first question.
    """
    if not _has_marks(turns):
        for place, (speaker, text) in enumerate(turns):
            if speaker == "human":
                turns[place] = (speaker, f"{IMAGE_MARK}\n" * images + text)
                break
    judged = judged_turns(turns)
    refuse_wrong_image_count(judged, images)
    return judged


class Reader(NamedTuple):
    description: str
    keys: tuple[str, ...]  # what a conversation may be under
    turns: Callable[[object, int], Turns]  # of a record and its number of images; raises BadSample


READERS = {
    "llava": Reader("LLaVA's conversations", CONVERSATION_KEYS[1:2], llava_turns),
    "sharegpt": Reader("ShareGPT's messages", CONVERSATION_KEYS, sharegpt_turns),
    "qa": Reader(
        "questions with their answers",
        (*TEXTS_KEYS, *QUESTION_KEYS, *ANSWER_KEYS, "input", "history"),
        qa_turns,
    ),
    "interleaved": Reader("pages of texts and images", TEXTS_KEYS, interleaved_turns),
}
