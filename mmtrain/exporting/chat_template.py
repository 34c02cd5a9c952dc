"""The chat template of an exported folder: it writes what this run was trained on, and marks the answers in it.

messages (contents: text, or lists of text and image parts) --jinja--> text with one <image> mark per image
chat_template.jinja --mark_answers--> the same text for every conversation, answers between {% generation %} marks
conversations --stock tokenizer and processor, return_assistant_tokens_mask--> the label mask of training, or no marks

For data.template=plain it writes images, then what the caption begins with. Otherwise it is the template of training
behind a preamble that turns lists of parts into the text that a LLaVA record holds.

With the marks trl's assistant_only_loss trains what mmtrain trained. An answer's span is found as training finds it
(`data.samples.chat`): from the end of the prompt for it to its end mark. They are written without dashes and with
nothing around them: programs without transformers' extension (mistral.rs, Dynamo) take this very spelling out,
llama.cpp reads over it, vLLM and SGLang render by transformers. Price: where there are answers and no answer is asked
for, as in training, two more renderings an answer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import transformers
from transformers import AutoProcessor

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import PROBE, ROLES, Turns
from mmtrain.data.samples.records import IMAGE_MARK, BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.samples.templates import ChatTemplate, PlainTemplate, Template, load_tokenizer, make_template
from mmtrain.models.layouts.square import ONE_SQUARE

TEMPLATE_FILE = "chat_template.jinja"
MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
CONVERSATIONS: tuple[Turns, ...] = (
    PROBE,
    (("human", "Hello"), ("gpt", "Hi.")),
    (*PROBE, ("human", "Where is it?"), ("gpt", "At the left, 2 cm up."), ("human", "And then?"), ("gpt", "No\n1. é")),
    (("system", "Be brief."), *PROBE, ("human", "Why?"), ("gpt", "See <image> there.")),
)

# Its last line break is eaten by transformers' environment (trim_blocks), instead of one that the template begins with.
_LISTS_TO_TEXT = """\
{%- set as_text = namespace(messages=[], text='', last='') %}
{%- for message in messages %}
  {%- if message.content is defined and message.content is not none and message.content is not string %}
    {%- set as_text.text = '' %}
    {%- set as_text.last = '' %}
    {%- for part in message.content %}
      {%- if part.type == 'text' %}
        {%- set new = part.text %}
      {%- elif part.type in ['image', 'image_url'] %}
        {%- set new = '<image>' %}
      {%- else %}
        {{- raise_exception('this model takes text and images, not ' ~ part.type) }}
      {%- endif %}
      {%- if new %}
        {%- if as_text.last and not as_text.last == part.type == 'text'
            and not as_text.text.endswith('\\n') and not new.startswith('\\n') %}
          {%- set as_text.text = as_text.text + '\\n' %}
        {%- endif %}
        {%- set as_text.text = as_text.text + new %}
        {%- set as_text.last = part.type %}
      {%- endif %}
    {%- endfor %}
    {%- set as_text.messages = as_text.messages + [dict(message, content=as_text.text)] %}
  {%- else %}
    {%- set as_text.messages = as_text.messages + [message] %}
  {%- endif %}
{%- endfor %}
{%- set messages = as_text.messages %}
"""

_PLAIN = """\
{%- set plain = namespace(images=0) %}
{%- for message in messages %}
  {%- set plain.images = plain.images + message.content.count('<image>') %}
{%- endfor %}
{{- '<image>' * plain.images }}
{%- for message in messages %}
  {%- set said = message.content.replace('\\n<image>', '').replace('<image>\\n', '').replace('<image>', '').lstrip() %}
  {%- if message.role == 'assistant' %}{% generation %}{{- said + eos_token }}{% endgeneration %}
  {%- elif message.role != 'system' %}
    {{- said }}
  {%- endif %}
{%- endfor %}"""

# The template of the folder is a macro here. Its last line break would be dropped at a template's end, and white space
# before {% endmacro %} at a line's begin: neither happens behind an expression.
_MARKED = """\
{%- macro conversation_text(messages, add_generation_prompt) %}
@TEMPLATE@{{ '' }}{% endmacro %}
{%- set marked = namespace(text=conversation_text(messages, add_generation_prompt), at=0) %}
{%- if not add_generation_prompt %}
  {%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role in ['user', 'tool'] %}
      {%- set prompt = conversation_text(messages[:loop.index0], true) %}
      {%- set answered = conversation_text(messages[:loop.index], false) %}
      {%- set end = answered|length - @AFTER@ %}
      {%- if prompt|length >= marked.at and answered.startswith(prompt) and answered.endswith(@TAIL@)
          and marked.text[:end] == answered[:end] %}
        {{- marked.text[marked.at:prompt|length] }}
        {%- for piece in marked.text[prompt|length:end].split('<image>') %}
          {%- if not loop.first %}
            {{- '<image>' }}
          {%- endif %}
          {%- if piece %}{% generation %}{{- piece }}{% endgeneration %}{%- endif %}
        {%- endfor %}
        {%- set marked.at = end %}
      {%- endif %}
    {%- endif %}
  {%- endfor %}
{%- endif %}
{{- marked.text[marked.at:] }}"""


def exported_chat_template(template: Template) -> str:
    """The jinja of chat_template.jinja.

    Parts of a list follow each other as they are, but an image and its neighbour are parted by a line break, as in
    LLaVA's records, unless the text has one there: [image, "What is this?"] becomes "<image>\\nWhat is this?". A text
    is taken as it stands, with its own <image> marks.

    The template of training follows, with the date that training wrote instead of today's. plain: all images,
    then the user's words as the beginning of the caption (a system turn's are dropped), or an assistant's as a caption
    that has ended.
    """
    if isinstance(template, PlainTemplate):
        return _LISTS_TO_TEXT + _PLAIN
    dates = template.chat.dates
    fixed = "{%- set fixed_dates = " + json.dumps(dates, ensure_ascii=False) + " %}\n" if dates else ""
    return _LISTS_TO_TEXT + fixed + template.chat.jinja


def marked_template(jinja: str, template: ChatTemplate) -> str:
    """A template that writes what `jinja` writes, with marks around each answer that `template` would supervise.

    An answer that later turns rewrite, or that no question precedes, stays unmarked, as does an image in an answer.
    Marks that `jinja` has itself give way: they may leave out the end mark, or take in what stands before an answer.
    """
    chat = template.chat
    unmarked = MARK.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", jinja)
    values = {
        "@TEMPLATE@": unmarked.removesuffix("\n"),
        "@AFTER@": str(chat.unsupervised_tail),
        "@TAIL@": json.dumps(chat.tail, ensure_ascii=False),
    }
    return re.sub("|".join(values), lambda found: values[found[0]], _MARKED)


def documents_of(
    template: Template, conversations: Iterable[Turns], sizes: Sequence[tuple[int, int]] = ()
) -> list[tuple[Turns, Document]]:
    """Those of the conversations that a template takes, and what training makes of them.

    Not every template takes systems, later questions or images in answers. `sizes`: (width, height) of their images, at
    least as many as a conversation has, where the layout asks for them.
    """
    taken = []
    for turns in conversations:
        images = sum(text.count(IMAGE_MARK) for _, text in turns)
        with contextlib.suppress(BadSample):
            sample = Sample("probe", "probe", turns, (b"",) * images, sizes=tuple(sizes[:images]))
            taken.append((turns, template(sample)))
    return taken


def mark_answers(config: RunConfig, folder: Path) -> str | None:
    """Mark the answers in the template of an exported folder, whose processor's files are written.

    Returns None, or one sentence on why they are not marked: the template in the folder is then as it was.
    """
    file = folder / TEMPLATE_FILE
    before = file.read_text(encoding="utf-8")
    # What a layout writes around an image the processor adds to the template's text.
    template = make_template(config.data.template, load_tokenizer(config.model.llm.path), ONE_SQUARE, sys.maxsize)
    if isinstance(template, ChatTemplate):
        file.write_text(marked_template(before, template), encoding="utf-8")
    try:
        fault = _fault(folder, before, template)
    except (jinja2.TemplateError, TypeError, ValueError, IndexError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return None
    file.write_text(MARK.sub("", before) if isinstance(template, PlainTemplate) else before, encoding="utf-8")
    return (
        "The chat template does not mark answers with {% generation %}, so that trl's assistant_only_loss cannot be "
        f"used with it: {fault}."
    )


def _fault(folder: Path, before: str, template: Template) -> str | None:
    """What stock transformers, loaded from `folder`, makes of answers that training does not."""
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer = processor.tokenizer
    image = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
    plain = isinstance(template, PlainTemplate)
    bos = template.prefix if plain else []  # which only a processor writes before the plain template's text
    documents = documents_of(template, CONVERSATIONS)
    for turns, document in documents:
        messages = [
            {"role": ROLES[who], "content": IMAGE_MARK * said.count(IMAGE_MARK) if plain and who != "gpt" else said}
            for who, said in turns
        ]
        for ask in (False, True):
            write = functools.partial(
                tokenizer.apply_chat_template, messages, tokenize=False, add_generation_prompt=ask
            )
            if write() != write(chat_template=before):
                return "marks would change what it writes"
        ids = [image if token == IMAGE_POSITION else token for token in document.input_ids][len(bos) :]
        learnt = [label != IGNORE for label in document.labels[len(bos) : -1]]  # of ids[1:]: nothing predicts the first
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = [tokenizer.apply_chat_template(messages, **options)]
        if not document.sample.images:  # with some it needs the pictures, and transformers 5.18
            several = processor.apply_chat_template(messages, **options)
            found.append({name: several[name][0] for name in ("input_ids", "assistant_masks")})
        for one in found:
            given = list(one["input_ids"])
            skipped = len(bos) if given[: len(bos)] == bos else 0
            if given[skipped:] != ids:
                return "its tokens are others than those of training"
            if [bool(mask) for mask in one["assistant_masks"]][skipped + 1 :] != learnt:
                return f"transformers {transformers.__version__} takes other tokens for answers than training does"
    return None if documents else "no conversation could be compared"
