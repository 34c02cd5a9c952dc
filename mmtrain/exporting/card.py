"""The model card of an exported folder: what it is made of, how good it was, how to load it.

`origin`, what was written --card.md.jinja--> README.md

Names from configurations and model folders are shown in its Markdown, never obeyed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
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
from mmtrain.model.trained.projector import PROJECTOR

PLAIN = re.compile(r"(?!www\.)[A-Za-z0-9]+([ .,+/_-][A-Za-z0-9]+)*")  # nothing that Markdown or HTML reads
MAX_CARD_BYTES = 64 << 10  # YAML of more would take seconds
FRONT = {
    "model": {"library_name": "transformers", "pipeline_tag": "image-text-to-text"},
    "text": {"library_name": "transformers", "pipeline_tag": "text-generation"},
    "adapters": {"library_name": "peft"},
}  # metadata of a card, by form


def write_card(folder: Path, about: Mapping[str, Any], form: str, *, is_whole: bool = False, **context: Any) -> None:
    """Write README.md in a `form` of the template, which says what each form shows of the `context`.

    is_whole: the folder is that of a published model, with what trained in its place.
    """
    parts = [about[part] for part in ("llm", "vision") if about[part]]
    licences = [(public_name(part), _licence(part)) for part in parts]  # two folders may have one name
    about = published(about)
    front: dict[str, Any] = dict(FRONT[form])
    if len(known := {licence for _, licence in licences}) == 1 and None not in known:
        front["license"] = known.pop()
    models = {"model": [about["llm"], about["vision"]], "text": [about["llm"]]}
    models["adapters"] = [] if context.get("base_folder") else [about["llm"]]
    if hub_ids := [name for name in models[form] if HUB_ID.fullmatch(name) and "/" in name]:
        front["base_model"] = hub_ids[0] if form == "adapters" else hub_ids
    around = [name for name in about["trained"] if not name.startswith(PROJECTOR)]
    adapters = filter(is_llm_adapter if form == "adapters" else is_adapter, around)
    text = _template().render(
        front=yaml.safe_dump(front, sort_keys=False),
        about=about,
        licences=licences,
        form=form,
        is_whole=is_whole,
        transformers=transformers.__version__,
        around=len(around),
        adapted=len({adapted_layer(name) for name in adapters}),
        **context,
    )
    (folder / "README.md").write_text(text)


def published(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `origin` with the models' names without the folders of this machine."""
    return {**about, **{part: about[part] and public_name(about[part]) for part in ("llm", "vision")}}


def public_name(model: str) -> str:
    """Return a model's name without the folders of this machine; a hub id as it is."""
    return Path(model).name if Path(model).expanduser().is_dir() or not HUB_ID.fullmatch(model) else model


def _licence(model: str) -> str | None:
    """Return the licence that the card in a model's folder names; None where there is no card, or no such name."""
    folder = find_model_folder(model)
    try:
        card = read_limited(folder / "README.md", MAX_CARD_BYTES, "a card") if folder is not None else b""
        named = yaml.safe_load(card.decode().split("---\n")[1]).get("license")
    except (OSError, UserError, LookupError, AttributeError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return named if isinstance(named, str) and PLAIN.fullmatch(named) else None


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "base": lambda path: Path(path).name,
        "code": code,
        "log1p": math.log1p,
        "name": shown_name,
        "cell": lambda text: text.replace("|", r"\|"),  # a bar would begin another cell, even in code
        "tensors": lambda count: f"{count} tensor{'s' if count != 1 else ''}",
    }
    return environment.from_string((Path(__file__).parent / "card.md.jinja").read_text("utf-8"))


def shown_name(text: str) -> str:
    """Return a name on one line: unchanged where nothing in it is markup, else as code."""
    return text if PLAIN.fullmatch(text) else code(text)


def code(text: str) -> str:
    """Return a code span, whose fence is longer than any in the text; what is not printable is escaped."""
    shown = escape(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{space}{shown}{space}{fence}"
