"""A template in Jinja: a conversation as text, and the spans of its answers.

turns ((speaker, text), ...) --jinja--> text, span of each answer (begin and end in characters)

An answer's span is what the LLM itself has to write: from the end of the prompt for it (the turns
before, with add_generation_prompt) to the end mark behind it, where generation stops (<|im_end|>,
</s>, ...).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from mmtrain.base.printing import escape
from mmtrain.config.templates import NAMES, jinja_of, template_name
from mmtrain.data.samples.records import IMAGE_MARK, BadSample, Turns
from mmtrain.facts.tokenizer_files import missing_chat_template

# LLaVA's speakers, as chat templates call them
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
# shows faults before any sample is read
PROBE = (("human", "<image>\nWhat is this?"), ("gpt", "A red circle."))
MAX_RENDERED = 10_000_000  # characters; the texts of a conversation have at most a tenth of it
FIXED_DATE = datetime(2024, 7, 26)  # the day that Llama 3's own template falls back to
FIXED_CLOCK = (  # a macro hides the function of this name that transformers gives to templates
    "{% macro strftime_now(format) %}{{ fixed_dates[format] or raise_exception('strftime_now needs "
    "its format written out') }}{% endmacro %}\n"
)

Span = tuple[int, int]  # begin and end in characters


class TemplateError(Exception):
    """The template cannot be compiled, or does not take the conversation.

    The message is the template's own.
    """


class JinjaTemplate:
    """A chat template in transformers' sandbox without files and Python.

    It may still waste time or memory.

    Raises TemplateError for what is no template.
    """

    def __init__(self, text: str) -> None:
        try:
            self._template = _compile_jinja_template(text)
        except Exception as error:  # of jinja2, and of Python compiling what jinja2 made of it
            raise _failure(error) from error

    def render(self, messages: list[dict], variables: Mapping[str, Any]) -> str:
        """Return the text of `messages`.

        Raises TemplateError, also for more than MAX_RENDERED characters.
        """
        pieces = []
        length = 0
        try:
            for piece in self._template.generate({**variables, "messages": messages}):
                length += len(piece)
                if length > MAX_RENDERED:
                    raise TemplateError(f"it writes more than {MAX_RENDERED:,} characters")
                pieces.append(piece)
        except Exception as error:  # a template is a program: it may raise anything
            raise _failure(error) from error
        return "".join(pieces)


def _failure(error: Exception) -> TemplateError:
    return TemplateError(escape(str(error), 300) or type(error).__name__)


class ChatText:
    """Writes conversations as a template in Jinja does.

    human is user, gpt is assistant, system is system.

    A template that writes today's date (strftime_now) gets a fixed one, so that samples do not
    change overnight. Cost: 2 renderings per answer, to find where it begins and ends, and to see
    that later turns leave it as it was.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_marks: Iterable[str],
        template: str,
        prompt_text: str,
    ) -> None:
        """Try the template, `data.template`'s value, on one question and answer.

        `end_marks` may end an answer.

        One that takes contents as lists of parts alone writes `prompt_text` for an image. Raises
        UserError for a tokenizer without chat template, BadSample for a template that could not be
        learnt.
        """
        self._part: str | None = None  # what the template writes for an image in a list
        self.name = f"template {template_name(template)}"
        if template == "chat":
            self.name = f"the chat template of {tokenizer.name_or_path}"
        self.tokenizer = tokenizer
        jinja = jinja_of(template) or _chat_template(tokenizer)
        self.jinja, self.dates = _dated(_begun(jinja, template, tokenizer))
        # As `apply_chat_template` names them.
        self.variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map}
        try:
            self.template = JinjaTemplate(self.jinja)
        except TemplateError as error:
            raise BadSample("template", f"{self.name} fails: {error}") from error
        if prompt_text != IMAGE_MARK and not self._takes_texts():
            self._part = prompt_text

        whole = self._render(PROBE)
        answer = PROBE[1][1]
        if answer not in whole:
            raise self._loses(answer, whole)
        begin = whole.rindex(answer)
        self.tail = whole[begin + len(answer) :]  # e.g. "<|im_end|>\n"
        mark = any_of(end_marks).search(self.tail)
        supervised = mark.end() if mark else len(self.tail.rstrip())
        self.unsupervised_tail = len(self.tail) - supervised
        self.write(PROBE)

        # Llama 2's template has no prompt to add: its answers directly follow the question.
        prompt = self._render(PROBE[:1], add_generation_prompt=True)
        header = whole[len(prompt) : begin]
        if header.strip() and prompt == self._render(PROBE[:1]):
            raise self.unfit(
                "ignores add_generation_prompt: "
                f"{header!r} would be learnt as part of every answer",
                "writes it when add_generation_prompt is set",
            )

    def write(self, turns: Turns) -> tuple[str, list[Span]]:
        """Return the text and the span of each answer.

        Raises BadSample where the template does not hold a turn.
        """
        text = self._render(turns)
        spans = []
        asked = []  # texts since the last answer
        for number, (speaker, words) in enumerate(turns):
            if speaker != "gpt":
                asked.append(words)
                continue
            prompt = self._render(turns[:number], add_generation_prompt=True)
            whole = text
            if number + 1 < len(turns):
                whole = self._render(turns[: number + 1])
            if not whole.startswith(prompt):
                raise self.unfit(
                    "writes another prompt before an answer than "
                    f"add_generation_prompt ({_difference(prompt, whole)})",
                    "begins answers as add_generation_prompt does",
                )

            answered = spans[-1][1] if spans else 0
            self._refuse_lost_text(asked, whole[answered : len(prompt)])
            answer = whole[len(prompt) :].removesuffix(self.tail)
            if not whole.endswith(self.tail) or not answer.rstrip().endswith(words.strip()):
                raise self._loses(words.strip() + self.tail, whole[len(prompt) :])

            end = len(whole) - self.unsupervised_tail
            if not text.startswith(whole[:end]):
                raise self.unfit(
                    "rewrites earlier turns when later ones "
                    f"follow ({_difference(whole[:end], text)})",
                    "does not, or a sample with one question",
                )
            spans.append((len(prompt), end))
            asked = []
        return text, spans

    def unfit(self, fault: str, needed: str) -> BadSample:
        """Return the error for a template that does `fault`; one that does `needed` would do."""
        return BadSample("template", f"{self.name} {fault}; use one that {needed}")

    def _render(self, turns: Turns, add_generation_prompt: bool = False) -> str:
        content = str if self._part is None else _parts
        messages = [{"role": ROLES[speaker], "content": content(text)} for speaker, text in turns]
        own = {"add_generation_prompt": add_generation_prompt, "fixed_dates": self.dates}
        try:
            written = self.template.render(messages, {**self.variables, **own})
        except TemplateError as error:
            raise BadSample("template", f"{self.name} fails: {error}") from error
        return written if self._part is None else written.replace(self._part, IMAGE_MARK)

    def _takes_texts(self) -> bool:
        try:
            return PROBE[1][1] in self._render(PROBE)
        except BadSample:
            return False

    def _refuse_lost_text(self, texts: Sequence[str], written: str) -> None:
        """Raise BadSample unless the texts stand in `written`, in order."""
        at = 0
        for text in map(str.strip, texts):
            if (begin := written.find(text, at)) < 0:
                raise self._loses(text, written)
            at = begin + len(text)

    def _loses(self, text: str, written: str) -> BadSample:
        return self.unfit(
            f"changes the text of a turn: {text[-80:]!r} became {written[-160:]!r}",
            "leaves texts unchanged",
        )


def _parts(text: str) -> list[dict[str, str]]:
    """Split a text at its <image> marks into the parts of multimodal chat templates."""
    parts = []
    for piece in filter(None, re.split(f"({IMAGE_MARK})", text)):
        if piece == IMAGE_MARK:
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": piece})
    return parts


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first of these texts.

    Those of white space alone are left out.
    """
    patterns = map(re.escape, filter(str.strip, texts))
    return re.compile("|".join(patterns) or "(?!)")  # which finds nothing


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # none, or named ones without a default
        raise missing_chat_template(tokenizer.name_or_path) from None


def _begun(jinja: str, template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a template's Jinja.

    A shipped one begins texts as the tokenizer does, perhaps without BOS.
    """
    if template not in NAMES or template == "chat":
        return jinja
    bos = tokenizer.bos_token or ""
    word = "A"
    ids = tokenizer(word).input_ids
    for begin in (bos, bos + " ", ""):
        begun = tokenizer(begin + word, add_special_tokens=False).input_ids
        if begun == ids[: len(begun)]:
            break
    if begin == bos:
        return jinja
    return f"{{%- set bos_token = {json.dumps(begin, ensure_ascii=False)} %}}\n{jinja}"


def _dated(jinja: str) -> tuple[str, dict[str, str]]:
    """Return a template that writes the fixed date, and that date in each format it asks for."""
    formats = re.findall(r"""strftime_now\(\s*(["'])(.*?)\1""", jinja)
    dates = {text: FIXED_DATE.strftime(text) for _, text in formats}
    if "strftime_now" in jinja:
        jinja = FIXED_CLOCK + jinja
    return jinja, dates


def _difference(one: str, other: str) -> str:
    at = 0
    while one[at : at + 1] == other[at : at + 1]:
        at += 1
    around = slice(max(at - 20, 0), at + 20)
    return f"{one[around]!r} against {other[around]!r}"
