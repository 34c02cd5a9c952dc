"""Conversation templates as `data.template` says them: by name, or as the text of a Jinja file of one's own.

FILE.jinja --read_template, when a configuration is read--> its text, which stands in the configuration from then on

So the text, not a path, is what a resumed run is compared by, what indexes are made for, and what checkpoints keep.
`llava_v1`, `llama_2` and `chatml` are files of chat_templates/.
"""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import read_limited
from mmtrain.config.environment import variable_hint

TemplateName = Literal["plain", "chat", "llava_v1", "llama_2", "chatml"]
NAMES: tuple[str, ...] = typing.get_args(TemplateName)
MAX_CHARACTERS = 100_000  # the longest in use have 40,000
FILE = "FILE.jinja"  # what messages call a template that has no name
TemplateText = Annotated[str, Field(pattern=r"\{[{%]", max_length=MAX_CHARACTERS, title=FILE)]
SHIPPED = Path(__file__).parent / "chat_templates"


def is_template_file(given: str) -> bool:
    """Whether what a user wrote as `data.template` names a file: it is neither a name nor a template's text."""
    return given.endswith(".jinja") and "{{" not in given and "{%" not in given


def read_template(given: str) -> str:
    """What `data.template` holds where a user wrote `given`: the text of FILE.jinja, else `given` itself.

    Raises UserError for a file that cannot be read, or is no template.
    """
    if not is_template_file(given):
        return given
    try:
        text = read_limited(Path(given).expanduser(), 4 * MAX_CHARACTERS, "a Jinja template").decode()
    except (FileNotFoundError, RuntimeError):  # the latter for a ~user that is not there
        raise UserError(
            f"{given}: no such file{variable_hint(given)}; name a Jinja template, or one of {', '.join(NAMES)}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{given}: cannot be read as text ({error})") from None
    if len(text) > MAX_CHARACTERS or "\0" in text or not ("{{" in text or "{%" in text):
        raise UserError(
            f"{given}: no Jinja template of a conversation, which has {{{{ or {{%, no null character, and at most "
            f"{MAX_CHARACTERS:,} characters"
        )
    return text


def template_argument(given: str) -> str:
    """The `type` of an argument that says what `data.template` holds."""
    try:
        template = read_template(given)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if template == given and given not in NAMES:
        raise argparse.ArgumentTypeError(f"{given!r} is no template; needed is one of {', '.join(NAMES)}, or {FILE}")
    return template


def template_name(template: str) -> str:
    """How messages and records call what `data.template` holds."""
    return template if template in NAMES else FILE


def jinja_of(template: str) -> str | None:
    """The Jinja text of what `data.template` holds; None for plain, which needs none, and chat, the tokenizer's own."""
    if template in ("plain", "chat"):
        return None
    if template in NAMES:
        return (SHIPPED / f"{template}.jinja").read_text(encoding="utf-8")
    return template
