"""Tokenizer files of a model's folder, judged before the libraries read them.

The fingerprint of a tokenizer's files enters a shard's index: text lengths depend on them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import escape
from mmtrain.base.small_files import parse_json
from mmtrain.config.limits import MAX_TOKENIZER_BYTES
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import jinja_of, template_name
from mmtrain.facts.model_files import find_model_folder, optional_json
from mmtrain.layouts.registry import LAYOUTS

# What AutoTokenizer may read in a model's folder, across its families. An export holds these and no
# others.
READ_BY_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# What stock models and processors read besides the tokenizer's files.
CONFIGURATIONS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Part of every fingerprint. Templates that make other tokens of the same text need another one, or
# the lengths of indexes written before would be taken for theirs.
TEXT_RULES_VERSION = 1


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that AutoTokenizer may read.

    Raises UserError for one that is too large.
    """
    found = set().union(*map(folder.glob, READ_BY_TOKENIZERS))
    files = sorted(filter(Path.is_file, found))
    for file in files:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise UserError(
                f"{file}: larger than {MAX_TOKENIZER_BYTES:,} bytes, too large for a tokenizer"
            )
    return files


def published_files(folder: Path, *, is_whole: bool) -> list[Path]:
    """Return the files of an LLM's folder that an export publishes.

    Those of a whole model are its configurations, too. Raises UserError for a file that lies
    neither in its folder nor in the hub cache's blobs beside that snapshot.
    """
    files = tokenizer_files(folder)
    if is_whole:
        files = [*filter(Path.is_file, map(folder.joinpath, CONFIGURATIONS)), *files]
    home = folder.resolve()
    blobs = home.parent.parent / "blobs"  # of CACHE/models--ORG--NAME/snapshots/COMMIT
    for file in files:
        target = file.resolve()
        is_blob = home.parent.name == "snapshots" and target.is_relative_to(blobs)
        if not is_blob and not target.is_relative_to(home):
            raise UserError(
                f"{escape(str(file))}: is a link to {escape(str(target))}, outside its folder, and "
                "an export would publish that file. "
                "Replace the link by a copy if it belongs to the model"
            )
    return files


@contextmanager
def panics_told(name: str) -> Iterator[None]:
    """Raise UserError where the tokenizers library, written in Rust, panics.

    A panic is a BaseException that nobody catches.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(
            f"{name}: its tokenizer fails ({reason}): its files are damaged. Download them again"
        ) from None


def refuse_missing_marks(config: RunConfig) -> None:
    """Raise UserError for an image layout whose texts the LLM's tokenizer.json has no tokens for.

    A folder without tokenizer.json passes.
    """
    vision = config.model.vision
    if vision is None:
        return
    marks = LAYOUTS[vision.layout].marks
    path = config.model.llm.path
    folder = find_model_folder(path)
    if not marks or folder is None:
        return
    file = folder / "tokenizer.json"
    if file not in tokenizer_files(folder):
        return

    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    added = None
    if isinstance(content, dict):
        added = content.get("added_tokens")
    tokens = {str(token.get("content")) for token in added or () if isinstance(token, dict)}
    if lacking := [mark for mark in marks if mark not in tokens]:
        raise missing_marks(vision.layout, lacking, path)


def missing_marks(layout: str, lacking: Sequence[str], tokenizer: str) -> UserError:
    """Make the error for a tokenizer without tokens of its own for texts around images."""
    return UserError(
        f"model.vision.layout: {layout} writes {' and '.join(lacking)} around each image, but the "
        f"tokenizer of {tokenizer} lacks these tokens, so the LLM was never trained on them. "
        "Use an LLM that was, or set model.vision.layout=square"
    )


def missing_chat_template(folder: str | Path) -> UserError:
    """Make the error for a tokenizer, in `folder`, without a chat template."""
    return UserError(
        f"data.template: chat is the model's own chat template, but the tokenizer in {folder} "
        "has none. Put a chat_template.jinja beside the tokenizer, or set data.template=llava_v1 "
        "(Vicuna's), to your own FILE.jinja or, for captions of images, to plain"
    )


def text_fingerprint(
    tokenizer_folder: Path, template: str, image_texts: Sequence[str] = (), wording: str = ""
) -> str:
    """Return 16 hex digits of a SHA-256 over all that lengths of texts depend on.

    It is over the tokenizer's files, the template and rules of segmentation. `template` is
    `data.template`, `image_texts` the layout's (ImageLayout.texts), `wording` the samples' format's
    (SampleFormat.wording). Raises UserError for a folder without a tokenizer, and a file that is
    too large.
    """
    files = tokenizer_files(tokenizer_folder)
    if not files:
        raise UserError(
            f"{tokenizer_folder}: holds no tokenizer (tokenizer.json, "
            "tokenizer.model or vocab.json)"
        )
    # AutoTokenizer chooses the class by it where tokenizer_config.json names none.
    model_type = optional_json(tokenizer_folder).get("model_type")
    if (jinja := jinja_of(template)) is not None:
        template = f"{template_name(template)} {hashlib.sha256(jinja.encode()).hexdigest()}"
    texts = [TEXT_RULES_VERSION, template, model_type, *image_texts]
    if wording:
        texts.append(wording)
    digest = hashlib.sha256(compact_json(texts))
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(compact_json([file.relative_to(tokenizer_folder).as_posix(), content]))
    return digest.hexdigest()[:16]
