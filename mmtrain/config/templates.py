"""Conversation templates as `data.template` says them: by name, or as the text of a Jinja file of
one's own.

FILE.jinja --read_template, when a configuration is read--> its text, which then is the value of
    data.template

So resumed runs are compared, and indexes made, by the text. `llava_v1`, `llama_2` and `chatml` are
in chat_templates/.
"""

import typing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import read_limited

TemplateName = Literal["plain", "chat", "llava_v1", "llama_2", "chatml"]
NAMES: tuple[str, ...] = typing.get_args(TemplateName)
MAX_CHARACTERS = 100_000  # the longest in use have 40,000
FILE = "FILE.jinja"  # what messages call a template that has no name
JINJA = r"\{[{%]"
TemplateText = Annotated[str, Field(pattern=JINJA, max_length=MAX_CHARACTERS)]
SHIPPED = Path(__file__).parent / "chat_templates"


def is_template_file(value: str) -> bool:
    """Tell whether data.template names a file: it is neither a template's name nor its text."""
    return value.endswith(".jinja") and "{{" not in value and "{%" not in value


def read_template(value: str) -> str:
    """Return the text of FILE.jinja, or the name or text itself. Raises UserError for a file that
    is no template.
    """
    if not is_template_file(value):
        return value
    try:
        text = read_limited(
            Path(value).expanduser(), 4 * MAX_CHARACTERS, "a Jinja template"
        ).decode()
    except (FileNotFoundError, RuntimeError):  # the latter for a ~user that is not there
        raise UserError(
            f"{value}: no such file. Name a Jinja template, or one of {', '.join(NAMES)}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{value}: cannot be read as text ({error})") from None
    if len(text) > MAX_CHARACTERS or "\0" in text or not ("{{" in text or "{%" in text):
        raise UserError(
            f"{value}: not a Jinja template of a conversation. It needs "
            f"{{{{ or {{%, no null character, and at most {MAX_CHARACTERS:,} characters"
        )
    return text


def template_name(template: str) -> str:
    """Return a template's name, FILE.jinja for one of the user's own."""
    return template if template in NAMES else FILE


def jinja_of(template: str) -> str | None:
    """Return a template's Jinja text; None for plain, which needs none, and chat, the tokenizer's
    own.
    """
    if template in ("plain", "chat"):
        return None
    if template in NAMES:
        return (SHIPPED / f"{template}.jinja").read_text(encoding="utf-8")
    return template
