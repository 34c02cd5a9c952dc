"""Write the chat template of an exported folder, and mark the answers in it.

messages (contents: text, or lists of text and image parts)
    --jinja--> text with one <image> mark per image
chat_template.jinja
    --mark_answers--> the same text for every conversation, answers between
                      {% generation %} marks
conversations
    --stock tokenizer and processor, return_assistant_tokens_mask-->
                      the label mask of training, or no marks

For data.template=plain it writes images, then the beginning of the caption. Otherwise it is the
template of training behind a preamble that turns lists of parts into the text of a LLaVA record.

With the marks trl's assistant_only_loss trains what mmtrain trained. They are written without
dashes and with nothing around them: programs without transformers' extension (mistral.rs, Dynamo)
remove this very spelling, llama.cpp reads over it, vLLM and SGLang render by transformers. Cost:
two more renderings an answer where no answer is asked for.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import jinja2
import transformers
from transformers import AutoProcessor

from mmtrain.data.samples.chat import PROBE, ROLES, Turns
from mmtrain.data.samples.records import IMAGE_MARK, BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.samples.templates import (
    BREAKS,
    ChatTemplate,
    PlainTemplate,
    Template,
    load_tokenizer,
    make_template,
)
from mmtrain.facts.models import Models
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import ONE_SQUARE

TEMPLATE_FILE = "chat_template.jinja"
MARK = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
# blocks that change nothing, in place of marks
HARMLESS = {"generation": "if true", "endgeneration": "endif"}
CONVERSATIONS = (
    PROBE,
    (("human", "Hello"), ("gpt", "Hi.")),
    (
        *PROBE,
        ("human", "Where is it?"),
        ("gpt", "At the left, 2 cm up."),
        ("human", "And then?"),
        ("gpt", "No\n1. é"),
    ),
    (("system", "Be brief."), *PROBE, ("human", "Why?"), ("gpt", "See <image> there.")),
)

TEMPLATES = Path(__file__).parent / "chat_templates"
# Its last line break is eaten by transformers' environment (trim_blocks), instead of one that the
# template begins with.
LISTS_TO_TEXT = (TEMPLATES / "lists_to_text.jinja").read_text("utf-8")
PLAIN = (TEMPLATES / "plain.jinja").read_text("utf-8").removesuffix("\n")
# The template of the folder is a macro here. Its last line break would be dropped at a template's
# end, and white space before {% endmacro %} at a line's begin: neither happens behind an
# expression.
MARKED = (TEMPLATES / "marked.jinja").read_text("utf-8").removesuffix("\n")


def exported_chat_template(template: Template, beginning: str = "") -> str:
    """Return the content of chat_template.jinja.

    [image, "What is this?"] becomes "<image>\\nWhat is this?", as in LLaVA's records; the template
    of training follows, with the date that training wrote. plain: all images, then the user's words
    as the beginning of the caption, and before them `beginning`, where no tokenizer writes it. A
    layout may have another text for <image>, without a break.
    """
    prompt_text = template.layout.prompt_text
    jinja = LISTS_TO_TEXT
    if prompt_text != IMAGE_MARK:
        jinja = jinja.replace("as_text.text + '\\n'", "as_text.text")
    if isinstance(template, PlainTemplate):
        if beginning:
            jinja += f"{{{{- {json.dumps(beginning, ensure_ascii=False)} }}}}"
        return (jinja + PLAIN).replace(IMAGE_MARK, prompt_text)
    jinja = jinja.replace(IMAGE_MARK, prompt_text)
    if dates := template.chat.dates:
        jinja += f"{{%- set fixed_dates = {json.dumps(dates, ensure_ascii=False)} %}}\n"
    return jinja + template.chat.jinja


def marked_template(jinja: str, template: ChatTemplate) -> str:
    """Return `jinja` with marks around each answer that `template` would supervise.

    They replace its own marks. An answer that later turns rewrite, or that no question precedes,
    stays unmarked, as does an image in an answer.
    """
    chat = template.chat
    unmarked = MARK.sub(lambda found: f"{{%{found[1]} {HARMLESS[found[2]]} {found[3]}%}}", jinja)
    values = {
        "@TEMPLATE@": unmarked.removesuffix("\n"),
        "@AFTER@": str(chat.unsupervised_tail),
        "@TAIL@": json.dumps(chat.tail, ensure_ascii=False),
    }
    marked = MARKED.replace(IMAGE_MARK, template.layout.prompt_text)
    return re.sub("|".join(values), lambda found: values[found[0]], marked)


def documents_of(
    template: Template,
    conversations: Iterable[Turns],
    sizes: Sequence[tuple[int, int]] = (),
) -> list[tuple[Turns, Document]]:
    """Return the conversations that a template accepts, and their documents in training.

    Not every template takes systems, later questions or images in answers.
    `sizes`: (width, height) of their images.
    """
    taken = []
    for turns in conversations:
        images = sum(text.count(IMAGE_MARK) for _, text in turns)
        with contextlib.suppress(BadSample):
            sample = Sample("probe", "probe", turns, (b"",) * images, sizes=tuple(sizes[:images]))
            taken.append((turns, template(sample)))
    return taken


def load_template(llm: str, name: str, layout: ImageLayout) -> Template:
    """Return the template of a run, by `model.llm.path` and `data.template`."""
    return make_template(name, load_tokenizer(llm), layout, sys.maxsize)


def mark_answers(models: Models, name: str, folder: Path) -> str | None:
    """Mark the answers in the template of a folder that has its processor's files.

    Returns a sentence why not where it is left without marks.
    """
    file = folder / TEMPLATE_FILE
    before = file.read_text(encoding="utf-8")
    # The processors of other layouts write the texts around <image> themselves.
    layout = ONE_SQUARE
    if models.layout.prompt_text != IMAGE_MARK:
        layout = replace(models.layout, min_positions=1, max_positions=1)
    template = load_template(models.section.llm.path, name, layout)
    if isinstance(template, ChatTemplate):
        file.write_text(marked_template(before, template), encoding="utf-8")
    try:
        fault = _fault(folder, before, template)
    except (jinja2.TemplateError, TypeError, ValueError, IndexError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return None
    if isinstance(template, PlainTemplate):
        before = MARK.sub("", before)
    file.write_text(before, encoding="utf-8")
    return (
        "The chat template does not mark answers with {% generation %}, so trl's "
        f"assistant_only_loss cannot be used with it: {fault}."
    )


def as_prompted(text: str, layout: ImageLayout, *, alone: bool) -> str:
    """Return a turn's text, or its images alone, as the stock prompt writes them."""
    if alone:
        text = IMAGE_MARK * text.count(IMAGE_MARK)
    if layout.prompt_text == IMAGE_MARK:
        return text
    return BREAKS.sub(layout.prompt_text, text)


def _fault(folder: Path, before: str, template: Template) -> str | None:
    """Say where stock transformers marks other answers in `folder` than training; None: nowhere."""
    processor = AutoProcessor.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
    )
    tokenizer = processor.tokenizer
    layout = template.layout
    image = tokenizer.convert_tokens_to_ids(layout.image_token)
    is_plain = isinstance(template, PlainTemplate)
    # of the plain template, before whose text only a processor writes it
    bos = template.prefix if is_plain else []
    documents = documents_of(template, CONVERSATIONS, ((1, 1),) * 2)
    for turns, document in documents:
        messages = []
        for who, text in turns:
            content = as_prompted(text, layout, alone=is_plain and who != "gpt")
            messages.append({"role": ROLES[who], "content": content})
        for ask in (False, True):
            write = functools.partial(
                tokenizer.apply_chat_template,
                messages,
                tokenize=False,
                add_generation_prompt=ask,
            )
            if write() != write(chat_template=before):
                return "marks would change what it writes"

        ids = as_written(document.input_ids, image)[len(bos) :]
        # of ids[1:]: nothing predicts the first
        learnt = [label != IGNORE for label in document.labels[len(bos) : -1]]
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        one = tokenizer.apply_chat_template(messages, **options)
        pairs = [(one["input_ids"], one["assistant_masks"])]
        if not document.sample.images:  # with some it needs the pictures, and transformers 5.18
            several = processor.apply_chat_template(messages, **options)
            pairs += zip(several["input_ids"], several["assistant_masks"], strict=True)
        for written, masks in pairs:
            written = list(written)  # some processors give a tensor
            skipped = len(bos) if written[: len(bos)] == bos else 0
            if written[skipped:] != ids:
                return "its tokens differ from those of training"
            if list(map(bool, masks))[skipped + 1 :] != learnt:
                return (
                    f"transformers {transformers.__version__} marks other tokens as answers "
                    "than training does"
                )
    if not documents:
        return "no conversation could be compared"
    return None


def as_written(ids: Iterable[int], image: int) -> list[int]:
    """Return a document's tokens with the id `image` at the positions of images."""
    return [image if token == IMAGE_POSITION else token for token in ids]
