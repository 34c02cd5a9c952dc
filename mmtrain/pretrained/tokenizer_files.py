"""What a model folder's tokenizer files say, judged before the libraries read them.

tokenizer.json        growth of a text under its rules, which multiply: four that write 1,000 letters for one make 10^12
chat_template.jinja   the default template; additional_chat_templates/NAME.jinja are others. Where either is there, the
                      "chat_template" of tokenizer_config.json (a text, or a list of named ones) is not read.
                      chat_template.json is read by processors alone. Source:
                      `PreTrainedTokenizerBase.from_pretrained` in transformers 5.17 to 5.23
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.small_files import parse_json, read_limited
from mmtrain.config.limits import MAX_TOKENIZER_BYTES
from mmtrain.config.model import ModelSection
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import jinja_of, template_name
from mmtrain.pretrained.layouts import REQUIRE, SQUARE, WRAPPERS, layout_name, marks_around
from mmtrain.pretrained.model_files import find_model_folder, read_json

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

# What AutoTokenizer may read in a model's folder, across its families.
READ_BY_TOKENIZERS = (
    *("tokenizer.*", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.*"),
    *("tekken.json", "*.tiktoken", "*.spm", "spiece.*", "sentencepiece*", "chat_template.*"),
    "additional_chat_templates/*",
)
# Part of every fingerprint. Templates that make other tokens of the same text need another one, or the lengths of
# indexes written before would be taken for theirs.
TEXT_RULES_VERSION = 1

# A text's growth under all rules together. Those in use replace a character by one, a few times over: at most 16 as it
# is counted here. 64 times the largest conversation is 64 MB.
MAX_GROWTH = 64


def refuse_growing_rules(file: Path) -> None:
    """Raise UserError for a tokenizer.json whose rules could make far more text than they are given.

    What is no tokenizer for other reasons is left to the tokenizers library.
    """
    try:
        content = parse_json(read_limited(file, MAX_TOKENIZER_BYTES, "a tokenizer's file"))
    except ValueError as error:
        raise UserError(f"{file}: no valid JSON ({error})") from None
    if not isinstance(content, dict):
        return
    # Decoders work on other texts than the first two.
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        growth = math.prod(_growth(rule, file) for part in parts for rule in _rules(content.get(part)))
        if growth > MAX_GROWTH:
            raise UserError(
                f"{file}: the rules of {' and '.join(parts)} may make {min(growth, 10**9):,} times as much text as "
                f"they are given; no tokenizer needs more than {MAX_GROWTH}: get the file from a source you trust"
            )


@contextmanager
def panics_told(name: str) -> Iterator[None]:
    """Raise UserError where the tokenizers library, written in Rust, panics: a BaseException that nobody catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(f"{name}: its tokenizer fails ({reason}); its files are damaged: get them again") from None


def _rules(part: Any) -> Iterator[dict[str, Any]]:
    """A part's rules, those inside sequences one by one; parse_json bounds how deep they are nested."""
    if isinstance(part, list):
        for rule in part:
            yield from _rules(rule)
    elif isinstance(part, dict):
        yield part
        for inner in part.values():
            if isinstance(inner, dict | list):
                yield from _rules(inner)


def _growth(rule: dict[str, Any], file: Path) -> int:
    """How many times as many characters a rule may make of a text."""
    kind, content = rule.get("type"), rule.get("content")
    if kind == "Replace" and isinstance(content, str):
        pattern = rule.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(replaced, str) and replaced:
            return max(math.ceil(len(content) / len(replaced)), 1)
        return 1 + len(content)  # a regular expression may match nothing, before each character
    if kind == "Prepend" and isinstance(rule.get("prepend"), str):
        return 1 + len(rule["prepend"])  # before each piece between added tokens
    if kind == "ByteLevel":
        return 2  # bytes above 127 become characters of two bytes
    if kind == "Precompiled":
        return _charsmap_growth(rule.get("precompiled_charsmap"), file)
    return 1


def _charsmap_growth(charsmap: Any, file: Path) -> int:
    """Of sentencepiece's table: the trie's size (4 bytes), the trie, then the texts that it leads to, each ended by 0.

    Source: sentencepiece's Normalizer::DecodePrecompiledCharsMap. Raises UserError for one that is cut off.
    """
    try:
        table = base64.b64decode(charsmap or "", validate=True)
        size = int.from_bytes(table[:4], "little")
        if charsmap and not 4 <= size <= len(table) - 4:
            raise ValueError(f"a trie of {size:,} bytes in {len(table):,}")
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: precompiled_charsmap is damaged ({error}); get the file again") from None
    # NFKC, which such tables follow, makes 18 characters, 33 bytes, of U+FDFA; most of the others become one or two.
    longest = max(map(len, table[4 + size :].split(b"\0")))
    return 2 if longest <= 36 else longest


def refuse_missing_chat_template(config: RunConfig) -> None:
    """Raises UserError for data.template=chat where the LLM's folder holds a tokenizer without a chat template.

    Says nothing about a model that is not there, a folder without tokenizer files, and Mistral's tekken.json, for which
    transformers may make a template: loading the tokenizer settles those.
    """
    if config.data.template != "chat":
        return
    folder = find_model_folder(config.model.llm.path)
    if folder is None or (folder / "tekken.json").is_file():
        return
    if any((folder / name).is_file() for name in TOKENIZER_FILES) and not has_chat_template(folder):
        raise missing_chat_template(folder)


def refuse_missing_marks(config: RunConfig) -> None:
    """Raises UserError for a layout of images whose texts the LLM's tokenizer has no tokens for."""
    layout = layout_name(config)
    if lacking := lacking_marks(config.model, layout):
        raise missing_marks(layout, lacking, config.model.llm.path)


def missing_marks(layout: str, lacking: Sequence[str], tokenizer: str) -> UserError:
    """The error for a tokenizer without tokens of its own for texts around images: their frozen rows mean nothing."""
    return UserError(
        f"model.vision.layout: {layout} writes {' and '.join(dict.fromkeys(lacking))} around each image, and the "
        f"tokenizer of {tokenizer} has no such tokens, so that the LLM was never trained on them; take an LLM that "
        "was, or set model.vision.layout=square"
    )


def lacking_marks(model: ModelSection, layout: str) -> list[str]:
    """Tokens that an image layout writes around images and that the LLM's tokenizer.json does not have as such.

    Says nothing about a model that is not there, or has no such file: loading the tokenizer settles those.
    """
    marks = marks_around(layout)
    folder = find_model_folder(model.llm.path)
    if not marks or folder is None or not (folder / "tokenizer.json").is_file():
        return []
    try:
        content = parse_json(read_limited(folder / "tokenizer.json", MAX_TOKENIZER_BYTES, "a tokenizer's file"))
    except ValueError as error:
        raise UserError(f"{folder / 'tokenizer.json'}: no valid JSON ({error})") from None
    added = content.get("added_tokens") if isinstance(content, dict) else None
    known = {str(token.get("content")) for token in added or () if isinstance(token, dict)}
    return [mark for mark in dict.fromkeys(marks) if mark not in known]


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template that is used without being named."""
    if (folder / "chat_template.jinja").is_file():
        return True
    others = {file.stem for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if others:
        return "default" in others
    file = folder / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(template, list):
        return any(isinstance(named, dict) and named.get("name") == "default" for named in template)
    return template is not None


def missing_chat_template(folder: str | Path) -> UserError:
    """The error for a tokenizer, in `folder`, without a chat template."""
    legacy = (Path(folder) / "chat_template.json").is_file()
    unread = "; its chat_template.json is read by processors alone" if legacy else ""
    return UserError(
        f"data.template: chat takes the model's own chat template, and the tokenizer in {folder} has none{unread}; put "
        "a chat_template.jinja beside the tokenizer (transformers reads it), or set data.template=llava_v1 "
        "(Vicuna's), or a FILE.jinja of your own, or, for captions of images, plain"
    )


def text_fingerprint(tokenizer_folder: Path, template: str, layout: str = "square", wording: str = "") -> str:
    """What text lengths depend on, as 16 hex digits of a SHA-256: tokenizer files, template, rules of segmentation.

    `template` is what `data.template` holds; one written in Jinja counts with its text, and a `layout`
    (ImageLayout.texts) counts too that writes texts around images, or takes their marks out. `wording` is the samples'
    format's (SampleFormat.wording).

    A tokenizer that another release of its library reads otherwise is found when a sample's length differs from its
    index. Raises UserError for a folder without a tokenizer, and for a file larger than MAX_TOKENIZER_BYTES.
    """
    found = {file for pattern in READ_BY_TOKENIZERS for file in tokenizer_folder.glob(pattern) if file.is_file()}
    if not found:
        raise UserError(f"{tokenizer_folder}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    config = tokenizer_folder / "config.json"
    # AutoTokenizer chooses the class by it where tokenizer_config.json names none.
    model_type = read_json(config).get("model_type") if config.is_file() else None
    around = [] if layout in (SQUARE, REQUIRE) else [layout, *WRAPPERS.get(layout, ())]
    jinja = jinja_of(template)
    said = template if jinja is None else f"{template_name(template)} {hashlib.sha256(jinja.encode()).hexdigest()}"
    digest = hashlib.sha256(compact_json([TEXT_RULES_VERSION, said, model_type, *around, *filter(None, [wording])]))
    for file in sorted(found):
        content = hashlib.sha256(read_limited(file, MAX_TOKENIZER_BYTES, "a tokenizer's file")).hexdigest()
        digest.update(compact_json([file.relative_to(tokenizer_folder).as_posix(), content]))
    return digest.hexdigest()[:16]
