"""The model card of an exported folder: what it is made of, how good it was, how to load it.

Origin, what was written --card.md.jinja--> README.md

Names from configurations and model folders are shown in its Markdown, never obeyed.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import transformers
import yaml

from mmtrain.base.printing import escape
from mmtrain.config.model import LoraSection
from mmtrain.exporting.language import ExportedLanguage
from mmtrain.exporting.processor import ExportedProcessor
from mmtrain.exporting.projector_file import Origin
from mmtrain.exporting.vision import ExportedEncoder
from mmtrain.models.facts.adapters import adapted_layer, is_adapter, is_llm_adapter
from mmtrain.models.facts.model_files import HUB_ID
from mmtrain.models.modules.projector import PROJECTOR
from mmtrain.stock.stock_class import StockClass

PLAIN = re.compile(r"(?!www\.)[A-Za-z0-9]+([ .,+/_-][A-Za-z0-9]+)*")  # nothing that Markdown or HTML reads
NEAR_WITH_TORCHVISION = ("bilinear", "bicubic", "lanczos")


def write_card(
    stock: StockClass,
    folder: Path,
    about: Origin,
    dtype: str,
    encoder: ExportedEncoder,
    language: ExportedLanguage,
    processor: ExportedProcessor,
    unmarked: str | None,
) -> None:
    """Write README.md; `unmarked` says why the chat template marks no answers, where it does not."""
    around = [name for name in about.trained if not name.startswith(PROJECTOR)]
    adapted = {adapted_layer(name) for name in filter(is_adapter, around)}
    dates = getattr(processor.template, "chat", None) and processor.template.chat.dates
    gained = language.added_rows
    rows = language.config["vocab_size"] - gained
    _render(
        folder,
        about,
        {"library_name": "transformers", "pipeline_tag": "image-text-to-text"},
        [about.llm, about.vision],
        form="model",
        dtype=dtype,
        encoder=encoder,
        language=language,
        processor=processor,
        transform=processor.transform,
        stock=stock,
        unmarked=unmarked,
        around=len(around),
        adapted=len(adapted),
        row_cost=f"{math.log1p(gained / rows):.1e} nats at most: ln(1 + {gained} / {rows:,})",
        date=next(iter(dates.values())) if dates else None,
        near_with_torchvision=processor.transform.interpolation in NEAR_WITH_TORCHVISION,
    )


def write_text_card(folder: Path, about: Origin, dtype: str, language: ExportedLanguage) -> None:
    """Write README.md of an LLM that was trained on text alone."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    _render(folder, about, front, [about.llm], form="text", dtype=dtype, language=language)


def write_adapter_card(folder: Path, about: Origin, model: str, lora: LoraSection, base: str | None) -> None:
    """Write README.md of a folder for peft; `model` is the class that loads the base.

    `base` is the folder in it for which the adapters are; None: they are for the published LLM.
    """
    _render(
        folder,
        about,
        {"library_name": "peft"},
        [about.llm] if base is None else [],
        form="adapters",
        adapted=len({adapted_layer(name) for name in about.trained if is_llm_adapter(name)}),
        lora=lora,
        base_folder=base,
        class_name=model,
        opened=repr(base or about.llm),
    )


def _render(folder: Path, about: Origin, front: dict[str, Any], models: list[str], **context: Any) -> None:
    """Write the card; its metadata names those of the `models` that are ids of the hub."""
    if hub_ids := [name for name in models if HUB_ID.fullmatch(name) and "/" in name]:
        front["base_model"] = hub_ids if context["form"] != "adapters" else hub_ids[0]
    text = _template().render(
        front=yaml.safe_dump(front, sort_keys=False), about=about, transformers=transformers.__version__, **context
    )
    (folder / "README.md").write_text(text)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "base": lambda path: Path(path).name,
        "code": code,
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
