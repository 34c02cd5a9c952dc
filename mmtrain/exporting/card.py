"""Write the model card of an exported folder: its parts, its scores, and code that loads it.

`origin`, what was written --card.md.jinja--> README.md

Names from configurations and model folders are shown in its Markdown, never obeyed.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import transformers
import yaml

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import read_limited
from mmtrain.facts.adapters import adapted_layer, is_adapter, is_llm_adapter
from mmtrain.facts.model_files import HUB_ID, find_model_folder
from mmtrain.facts.settings import Settings
from mmtrain.model.trained.projector import PROJECTOR

# nothing that Markdown or HTML reads
PLAIN = re.compile(r"(?!www\.)[A-Za-z0-9]+([ .,+/_-][A-Za-z0-9]+)*")
MAX_CARD_BYTES = 64 << 10  # YAML of more would take seconds
MODELS = ("llm", "vision")  # keys of `origin`
# metadata of a card, by form
FRONT = {
    "model": {"library_name": "transformers", "pipeline_tag": "image-text-to-text"},
    "text": {"library_name": "transformers", "pipeline_tag": "text-generation"},
    "adapters": {"library_name": "peft"},
}


def write_card(
    folder: Path, about: Settings, form: str, *, is_whole: bool = False, **context: Any
) -> None:
    """Write README.md in a `form` of the template, which says what it shows of the `context`.

    is_whole: the folder is that of a published model, with what trained in its place.
    """
    # pairs, since two folders may have one name
    licences = []
    for model in filter(None, map(about.get, MODELS)):
        licences.append((public_name(model), _licence(model)))
    about = published(about)
    front = dict(FRONT[form])
    known = {licence for _, licence in licences}
    if len(known) == 1 and None not in known:
        front["license"] = known.pop()

    # the models that this one was made from, where they are on the hub
    models = [about["llm"]]
    if form == "model":
        models.append(about["vision"])
    elif context.get("base_folder"):
        models.clear()
    hub_ids = [name for name in models if HUB_ID.fullmatch(name) and "/" in name]
    if hub_ids:
        front["base_model"] = hub_ids
    if hub_ids and form == "adapters":
        front["base_model"] = hub_ids[0]

    around = [name for name in about["trained"] if not name.startswith(PROJECTOR)]
    adapters = filter(is_adapter, around)
    if form == "adapters":
        adapters = filter(is_llm_adapter, around)
    text = _template().render(
        front=yaml.safe_dump(front, sort_keys=False),
        about=about,
        licences=licences,
        form=form,
        is_whole=is_whole,
        transformers=transformers.__version__,
        around=len(around),
        adapted=len(set(map(adapted_layer, adapters))),
        **context,
    )
    (folder / "README.md").write_text(text)


def published(about: Settings) -> Settings:
    """Return `origin` with the models' names without the folders of this machine."""
    shown = dict(about)
    for key in MODELS:
        shown[key] = about[key] and public_name(about[key])
    return shown


def public_name(model: str) -> str:
    """Return a model's name without the folders of this machine; a hub id as it is."""
    if Path(model).expanduser().is_dir() or not HUB_ID.fullmatch(model):
        return Path(model).name
    return model


def _licence(model: str) -> str | None:
    """Return the licence that the card in a model's folder names; None where none does."""
    folder = find_model_folder(model)
    if folder is None:
        return None
    try:
        card = read_limited(folder / "README.md", MAX_CARD_BYTES, "a card")
        named = yaml.safe_load(card.decode().split("---\n")[1]).get("license")
    except (
        OSError,
        UserError,
        LookupError,
        AttributeError,
        ValueError,
        RecursionError,
        yaml.YAMLError,
    ):
        return None
    if isinstance(named, str) and PLAIN.fullmatch(named):
        return named
    return None


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "base": lambda path: Path(path).name,
        "code": code,
        "log1p": math.log1p,
        "name": shown_name,
        # a bar would begin another cell, even in code
        "cell": lambda text: text.replace("|", r"\|"),
        "tensors": lambda count: f"{count} tensor{'s' if count != 1 else ''}",
    }
    return environment.from_string((Path(__file__).parent / "card.md.jinja").read_text("utf-8"))


def shown_name(text: str) -> str:
    """Return a name on one line: unchanged where nothing in it is markup, else as code."""
    return text if PLAIN.fullmatch(text) else code(text)


def code(text: str) -> str:
    """Return a code span whose fence is longer than any in the text, unprintable text escaped."""
    shown = escape(text)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    if not shown or "`" in (shown[0], shown[-1]):
        shown = f" {shown} "
    fence = "`" * (longest + 1)
    return fence + shown + fence
