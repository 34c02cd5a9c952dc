"""A template in Jinja, the LLM's tokenizer's or another: a conversation as text, and where its answers stand.

turns ((speaker, text), ...) --jinja--> text, span of each answer (begin and end in characters)

An answer's span is what the LLM itself has to write: from the end of the prompt for it (the turns before, with
add_generation_prompt) to the end mark behind it, where generation stops (<|im_end|>, </s>, ...).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from mmtrain.config.templates import NAMES, jinja_of, template_name
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.rendering import JinjaTemplate, TemplateError
from mmtrain.models.facts.tokenizer_files import missing_chat_template

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}  # LLaVA's speakers, as chat templates call them
PROBE = (("human", "<image>\nWhat is this?"), ("gpt", "A red circle."))  # shows faults before any sample is read
FIXED_DATE = datetime(2024, 7, 26)  # the day that Llama 3's own template falls back to
FIXED_CLOCK = (  # a macro hides the function of this name that transformers gives to templates
    "{% macro strftime_now(format) %}"
    "{{ fixed_dates[format] or raise_exception('strftime_now needs its format written out') }}"
    "{% endmacro %}\n"
)

Span = tuple[int, int]  # begin and end in characters
Turns = Sequence[tuple[str, str]]


class ChatText:
    """Writes conversations as a template in Jinja does: human -> user, gpt -> assistant, system -> system.

    Without a system turn the template's default system text stands. A template that writes today's date (strftime_now)
    gets a fixed one, so that samples do not change overnight. One that ships with mmtrain begins a text as the
    tokenizer itself does.

    Price: 2 renderings per answer, to find where it begins and ends, and to see that later turns leave it as it was.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_marks: Iterable[str], template: str = "chat") -> None:
        """Try the template on one question and answer, which shows how answers end.

        `end_marks`: texts of the special tokens that may end an answer; `template`: what `data.template` holds. Raises
        UserError for a tokenizer without the chat template that it is to have, BadSample for a template from which the
        model could not learn to answer.
        """
        own = template == "chat"
        self.name = f"the chat template of {tokenizer.name_or_path}" if own else f"template {template_name(template)}"
        self.tokenizer = tokenizer
        self.jinja, self.dates = _dated(_begun(jinja_of(template) or _chat_template(tokenizer), template, tokenizer))
        # As `apply_chat_template` names them.
        self.variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map}
        try:
            self.template = JinjaTemplate(self.jinja)
        except TemplateError as error:
            raise BadSample("template", f"{self.name} fails: {error}") from error
        whole = self._render(PROBE)
        answer = PROBE[1][1]
        if answer not in whole:
            raise self._loses(answer, whole)
        begin = whole.rindex(answer)
        self.tail = whole[begin + len(answer) :]  # e.g. "<|im_end|>\n"
        mark = any_of(end_marks).search(self.tail)
        self.unsupervised_tail = len(self.tail) - (mark.end() if mark else len(self.tail.rstrip()))
        self.write(PROBE)

        prompt = self._render(PROBE[:1], add_generation_prompt=True)
        header = whole[len(prompt) : begin]
        # Llama 2's template has no prompt to add, its answers directly follow the question: that is right.
        if header.strip() and prompt == self._render(PROBE[:1]):
            raise self.unfit(
                f"ignores add_generation_prompt: {header!r} would be learnt as part of every answer",
                "writes it where add_generation_prompt is set",
            )

    def write(self, turns: Turns) -> tuple[str, list[Span]]:
        """Return the text and the span of each answer; raises BadSample where the template does not hold a turn."""
        if turns[0][0] == "system" and self._other_role is not None:
            raise self.unfit(
                f"writes a system turn as one of the {self._other_role}'s", "tells system, user and assistant apart"
            )
        text = self._render(turns)
        spans: list[Span] = []
        given: list[str] = []  # since the last answer
        for number, (speaker, said) in enumerate(turns):
            if speaker != "gpt":
                given.append(said)
                continue
            prompt = self._render(turns[:number], add_generation_prompt=True)
            whole = self._render(turns[: number + 1]) if number + 1 < len(turns) else text
            if not whole.startswith(prompt):
                raise self.unfit(
                    f"asks for an answer in another form than it writes one ({_difference(prompt, whole)})",
                    "begins answers as add_generation_prompt does",
                )
            self._refuse_lost_text(given, whole[spans[-1][1] if spans else 0 : len(prompt)])
            answered = whole[len(prompt) :].removesuffix(self.tail)
            if not whole.endswith(self.tail) or not answered.rstrip().endswith(said.strip()):
                raise self._loses(said.strip() + self.tail, whole[len(prompt) :])
            end = len(whole) - self.unsupervised_tail
            if not text.startswith(whole[:end]):
                raise self.unfit(
                    f"rewrites earlier turns once later ones follow ({_difference(whole[:end], text)}): answers would "
                    "be learnt in another form than they are asked for",
                    "does not, or a sample with one question",
                )
            spans.append((len(prompt), end))
            given = []
        return text, spans

    def unfit(self, fault: str, needed: str) -> BadSample:
        """What to raise for a template that does `fault`, where one that does `needed` would do."""
        return BadSample("template", f"{self.name} {fault}; needed is one that {needed}")

    @functools.cached_property
    def _other_role(self) -> str | None:
        """The role that this template writes a system turn as, if it does not tell it from that one."""
        try:
            system = self._render((("system", "You see pictures."), *PROBE))
        except BadSample:
            return None
        for speaker in ("human", "gpt"):
            try:
                if self._render(((speaker, "You see pictures."), *PROBE)) == system:
                    return ROLES[speaker]
            except BadSample:  # it refuses turns that do not alternate, so it does tell them apart
                continue
        return None

    def _render(self, turns: Turns, add_generation_prompt: bool = False) -> str:
        try:
            messages = [{"role": ROLES[speaker], "content": text} for speaker, text in turns]
            own = {"add_generation_prompt": add_generation_prompt, "fixed_dates": self.dates}
            return self.template.render(messages, {**self.variables, **own})
        except TemplateError as error:
            raise BadSample("template", f"{self.name} fails: {error}") from error

    def _refuse_lost_text(self, given: Sequence[str], written: str) -> None:
        """Raise BadSample unless the texts stand in `written`, in order."""
        at = 0
        for text in given:
            found = written.find(text.strip(), at)
            if found < 0:
                raise self._loses(text.strip(), written)
            at = found + len(text.strip())

    def _loses(self, given: str, written: str) -> BadSample:
        return self.unfit(
            f"does not write a turn as it was given: {given[-80:]!r} became {written[-160:]!r}",
            "takes texts and leaves them whole",
        )


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the first of these texts; those of white space alone are left out."""
    return re.compile("|".join(re.escape(text) for text in texts if text.strip()) or "(?!)")  # (?!) finds nothing


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's default chat template; raises UserError where there is none."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # none, or named ones without a default
        raise missing_chat_template(tokenizer.name_or_path) from None


def _begun(jinja: str, template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja of a template; of one that ships, told a BOS with which texts get the tokens that a tokenizer begins.

    LLaVA leaves BOS to the tokenizer, which may add none. Some write a blank before a text, and none behind a BOS that
    stands in the text itself.
    """
    if template not in NAMES or template == "chat":
        return jinja
    bos, word = tokenizer.bos_token or "", "A"
    own = tokenizer(word).input_ids
    for begin in (bos, bos + " "):
        ids = tokenizer(begin + word, add_special_tokens=False).input_ids
        if ids == own[: len(ids)]:
            break
    else:
        begin = ""
    return jinja if begin == bos else f"{{%- set bos_token = {json.dumps(begin, ensure_ascii=False)} %}}\n{jinja}"


def _dated(jinja: str) -> tuple[str, dict[str, str]]:
    """A template, told the fixed date, and that date in each format it asks for."""
    formats = re.findall(r"""strftime_now\(\s*(["'])(.*?)\1""", jinja)
    dates = {text: FIXED_DATE.strftime(text) for _, text in formats}
    return (FIXED_CLOCK + jinja if "strftime_now" in jinja else jinja), dates


def _difference(one: str, other: str) -> str:
    """Where two texts part, for a message."""
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(one, other)) if a != b)
    return f"{one[max(at - 20, 0) : at + 20]!r} against {other[max(at - 20, 0) : at + 20]!r}"
