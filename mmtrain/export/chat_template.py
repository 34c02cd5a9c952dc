"""The chat template of an exported folder: it writes what this run was trained on.

messages (contents: text, or lists of text and image parts) --jinja--> text with one <image> mark per image

For data.template=chat it is the model's own template behind a preamble that turns lists of parts into the text that a
LLaVA record holds. For data.template=plain it writes images, then what the caption begins with.
"""

from __future__ import annotations

import json

from mmtrain.data.samples.templates import PlainTemplate, Template

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


def exported_chat_template(template: Template) -> str:
    """The jinja of chat_template.jinja.

    Parts of a list follow each other as they are, but an image and its neighbour are parted by a line break, as in
    LLaVA's records, unless the text has one there: [image, "What is this?"] becomes "<image>\\nWhat is this?". A text
    is taken as it stands, with its own <image> marks.

    chat: the model's own template follows, with the date that training wrote instead of today's. plain: all images,
    then the user's words as the beginning of the caption (a system turn's are dropped), or an assistant's as a caption
    that has ended.
    """
    if isinstance(template, PlainTemplate):
        return _LISTS_TO_TEXT + _PLAIN
    dates = template.chat.dates
    fixed = "{%- set fixed_dates = " + json.dumps(dates, ensure_ascii=False) + " %}\n" if dates else ""
    return _LISTS_TO_TEXT + fixed + template.chat.jinja
