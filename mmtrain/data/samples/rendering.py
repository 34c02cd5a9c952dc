"""Render chat templates, which come with models, in transformers' sandbox and up to a length.

template text --jinja2, in transformers' environment--> text, or TemplateError

The sandbox keeps a template from files and from Python. It does not keep one from wasting time or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template

from mmtrain.base.printing import escape

MAX_RENDERED = 10_000_000  # characters; the texts of a conversation have at most a tenth of it


class TemplateError(Exception):
    """The template cannot be compiled, or does not take the conversation. The message is the template's own."""


class JinjaTemplate:
    """A chat template as transformers' tokenizers render it."""

    def __init__(self, text: str) -> None:
        """Raises TemplateError for a text that is no template."""
        try:
            self._template = _compile_jinja_template(text)
        except Exception as error:  # of jinja2, and of Python compiling what jinja2 made of it
            raise _failure(error) from error

    def render(self, messages: list[dict], variables: Mapping[str, Any]) -> str:
        """Return the text of `messages`; the template may use `variables`.

        Raises TemplateError, also for more than MAX_RENDERED characters.
        """
        pieces, length = [], 0
        try:
            for piece in self._template.generate({**variables, "messages": messages}):
                length += len(piece)
                if length > MAX_RENDERED:
                    raise TemplateError(f"it writes more than {MAX_RENDERED:,} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise _failure(error) from error
        return "".join(pieces)


def _failure(error: Exception) -> TemplateError:
    return TemplateError(escape(str(error), 300) or type(error).__name__)
