"""The model card of an exported Hugging Face folder: what it is made of, how good it was, how to load it.

Names from configurations and model folders are shown in its Markdown as they are, never obeyed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import transformers
import yaml

from mmtrain.base.printing import escape
from mmtrain.config.model import LoraSection
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.templates import PlainTemplate
from mmtrain.exporting.language import ExportedLanguage
from mmtrain.exporting.processor import ExportedProcessor
from mmtrain.exporting.projector_file import Origin
from mmtrain.exporting.vision import ExportedEncoder
from mmtrain.models.facts.adapters import adapted_layer, is_adapter, is_llm_adapter
from mmtrain.models.facts.model_files import HUB_ID
from mmtrain.models.layouts.layout import ImageLayout
from mmtrain.models.modules.projector import PROJECTOR
from mmtrain.stock.stock_class import StockClass

LOADING = """\
```python
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoProcessor, {model}

folder = "."  # this folder
processor = AutoProcessor.from_pretrained(folder)
model = {model}.from_pretrained(folder, dtype="auto")
picture = ImageOps.exif_transpose(Image.open("picture.png"))
{exact}  # resizes as training did
{prompt}
inputs = processor(images=picture, text=prompt, return_tensors="pt").to(model.device, model.dtype)
output = model.generate(**inputs, max_new_tokens=64)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
ADAPTER_LOADING = """\
```python
from peft import PeftModel
from transformers import {model}

base = {model}.from_pretrained({opened}, dtype="auto")
model = PeftModel.from_pretrained(base, ".")  # this folder
```"""
CHAT = """\
question = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
prompt = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)"""
CAPTION = """\
question = [{"role": "user", "content": [{"type": "image"}]}]
prompt = processor.apply_chat_template(question, add_generation_prompt=True)"""
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
    bases = [name for name in (about.llm, about.vision) if HUB_ID.fullmatch(name) and "/" in name]
    front = {"library_name": "transformers", "pipeline_tag": "image-text-to-text"}
    front |= {"base_model": bases} if bases else {}
    loading = LOADING.format(
        model=stock.class_name,
        exact=stock.exact_pixels(processor.transform),
        prompt=CAPTION if about.template == "plain" else CHAT,
    )
    ran = f"Tested with transformers {transformers.__version__}: it loads this folder and makes the inputs of training."
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {shown_name(Path(about.llm).name)} that sees through {shown_name(Path(about.vision).name)}",
        f"Made with mmtrain {shown_name(about.versions['mmtrain'])}. {_what_trained(about)}",
        "## Made of\n\n" + table(_parts(about, dtype, language, processor.layout)),
        "## Training\n\n" + table(_training(about)),
        f"## How to load\n\n{ran}\n\n{loading}",
    ]
    notes = [*_language_notes(language, processor), *encoder.notes, *processor_notes(processor)]
    notes += [unmarked] if unmarked else []
    sections.append("## Notes\n\n" + "\n".join(f"- {note.removesuffix('.')}." for note in notes))
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def write_adapter_card(folder: Path, about: Origin, model: str, lora: LoraSection, base: str | None) -> None:
    """Write README.md of a folder for peft; base: the folder in it for which the adapter is, None: the published LLM.

    `model` is the class that loads the base.
    """
    hub = HUB_ID.fullmatch(about.llm) and "/" in about.llm
    front = {"library_name": "peft"} | ({"base_model": about.llm} if hub and base is None else {})
    adapted = {adapted_layer(name) for name in about.trained if is_llm_adapter(name)}
    made_of = {
        "adapters": f"of {len(adapted)} layers, rank {lora.r}, scaled by {lora.alpha:g} / {lora.r}",
        "base model": code(about.llm) if base is None else f"`{base}/` in this folder, with all else that was trained",
    }
    if base is None and about.vision is not None:
        made_of["projector"] = "`projector.safetensors`: the LLM alone has no place for it"
    opened = repr(about.llm if base is None else base)
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# Adapters for {shown_name(Path(about.llm).name)}",
        f"Low-rank adapters, made with mmtrain {shown_name(about.versions['mmtrain'])}.",
        "## Made of\n\n" + table(made_of),
        "## Training\n\n" + table(_training(about)),
        "## How to load\n\n" + ADAPTER_LOADING.format(model=model, opened=opened),
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


TEXT_LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
question = [{"role": "user", "content": "What is a projector?"}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def write_text_card(folder: Path, about: Origin, dtype: str, language: ExportedLanguage) -> None:
    """Write README.md of an LLM that was trained on text alone."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": [about.llm]} if HUB_ID.fullmatch(about.llm) and "/" in about.llm else {}
    llm = f"{code(about.llm)} ({shown_name(language.config['model_type'])}, {about.llm_width:,} wide)"
    stored = f"{dtype}; what was trained was so in float32, in {_trained_against(about)}"
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {shown_name(Path(about.llm).name)}, trained further",
        f"Made with mmtrain {shown_name(about.versions['mmtrain'])}: {_tensors(len(about.trained))} trained on text.",
        "## Made of\n\n" + table({"LLM": llm, "weights stored in": stored}),
        "## Training\n\n" + table(_training(about)),
        "## How to load\n\n" + TEXT_LOADING,
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _what_trained(about: Origin) -> str:
    around = [name for name in about.trained if not name.startswith(PROJECTOR)]
    if not about.trained:
        return "Nothing in this folder was trained: it is the base of an adapter."
    if not around:
        return "Only the projector between the two was trained; LLM and vision encoder are as they were published."
    adapted = {adapted_layer(name) for name in filter(is_adapter, around)}
    whole = len(around) - 2 * len(adapted)
    said = [f"low-rank adapters of {len(adapted)} layers, merged into their weights"] if adapted else []
    said += [f"{_tensors(whole)} of LLM and vision encoder"] if whole else []
    also = "was not" if len(around) == len(about.trained) else "was too"
    return f"Trained: {' and '.join(said)}; the projector between the two {also}."


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"


def _parts(about: Origin, dtype: str, language: ExportedLanguage, layout: ImageLayout) -> dict[str, str]:
    llm, vision, factor = code(about.llm), code(about.vision), about.projector_factor
    return {
        "LLM": f"{llm} ({shown_name(language.config['model_type'])}, {about.llm_width:,} wide)",
        "vision encoder": f"{vision}, block {about.vision_select_layer} ({about.vision_width:,} wide)"
        + (", behind its last norm" if about.vision_final_norm else ""),
        "projector": about.projector_type + (f", {factor} x {factor} patches a position" if factor > 1 else ""),
        "images": layout.description or f"become square by: {about.image_fit}",
        "weights stored in": f"{dtype}; what was trained was so in float32, against {_trained_against(about)}",
    }


def _trained_against(about: Origin) -> str:
    said = f"an LLM in {about.llm_dtype}"
    if about.llm_quantize is None:
        return said
    then = f"quantised to {about.llm_quantize} during training; they are not quantised here"
    return f"{said}, its frozen decoder layers {then}"


def _training(about: Origin) -> dict[str, str]:
    scores = about.evaluation or {}
    shown = {
        "held-out loss": (scores.get("loss"), "{:.4f} nats a token"),
        "held-out tokens right": (scores.get("token_accuracy"), "{:.1%}"),
        "held-out answers right": (scores.get("exact_match"), f"{{:.1%}} of {scores.get('answers', 0):,}"),
    }
    versions = ", ".join(f"{name} {shown_name(version)}" for name, version in about.versions.items())
    return {
        "steps": f"{about.steps:,}" + (f" of {about.max_steps:,}" if about.max_steps else ""),
        "template": about.template,
        "data fingerprint": code(about.data_fingerprint),
        "fingerprint of what was frozen": code(about.frozen_fingerprint),
        "training loss": "unknown" if about.training_loss is None else f"{about.training_loss:.4f} nats a token",
        **{name: form.format(value) for name, (value, form) in shown.items() if value is not None},
        "versions": versions,
    }


def _language_notes(language: ExportedLanguage, processor: ExportedProcessor) -> list[str]:
    notes = []
    if language.config["model_type"] == "gemma":
        notes.append(
            "Needs transformers 5, by which it was trained: version 4 multiplies image features by the root of the "
            "LLM's width, as if they were embeddings of text."
        )
    if gained := language.added_rows:
        rows = language.config["vocab_size"] - gained
        bound = f"{math.log1p(gained / rows):.1e} nats at most: ln(1 + {gained} / {rows:,})"
        notes.append(
            f"The LLM has no spare row for all tokens that it gained ({', '.join(map(code, processor.new_tokens))}; "
            f"`{IMAGE_MARK}` is {processor.image_token_id}): its embedding and head gained {gained}, each "
            "the mean of the others. The embedding's is never used, since image features take its place, it is masked, "
            "or no prompt holds it; the head's gives the mean of the other logits, so it is never the largest. It "
            f"raises the loss of every token, by {bound}."
        )
    if language.left_out:
        notes.append(
            f"{len(language.left_out)} tensors of the LLM's files were left out, since stock transformers computes "
            f"them or does not load them (e.g. {code(language.left_out[0])})."
        )
    return notes


def processor_notes(processor: ExportedProcessor) -> list[str]:
    """Sentences on what conversations, answers and pictures need to be as they were in training."""
    if isinstance(processor.template, PlainTemplate):
        notes = [
            "The model was trained on images followed by their captions, without questions. The chat template writes "
            "the images first; a text beside them stands behind them, as the beginning of the caption."
        ]
    else:
        notes = [
            "The chat template writes all special tokens; this folder's tokenizer adds none by itself. An image and "
            "the text beside it are parted by a line break, as in LLaVA's records; a message that is one text may hold "
            f"`{IMAGE_MARK}` anywhere."
        ]
        if dates := processor.template.chat.dates:
            date = shown_name(next(iter(dates.values())))
            notes.append(f"The LLM's own template writes today's date; this one always writes {date}, as in training.")
    settings = processor.left_out.items()
    said = ", ".join(shown_name(f"{name} {value}") for name, value in settings if value not in (None, False))
    also = f"; the LLM's own settings ({said}) are left out" if said else ""
    notes.append(f"`generate` is greedy by default, as the run's evaluation is{also}.")

    transform = processor.transform
    size = f"{transform.image_size} x {transform.image_size}"
    if transform.interpolation in NEAR_WITH_TORCHVISION:
        backend = (
            "Training resizes pictures with Pillow, as the code above does, to the bit; torchvision, the default, "
            f"differs by a level or two of 255 where a picture is not {size} pixels already."
        )
    else:
        backend = (
            f"Training resizes pictures by Pillow's {transform.interpolation} filter, as the code above does; "
            "torchvision, the default, does not have it."
        )
    turned = "Training turns pictures by their EXIF orientation, as the code above does; `Image.open` alone does not."
    colour = (
        "Training lays transparent pixels on white, as processors do from transformers 5.21 on; `load_image` and "
        '`convert("RGB")` drop transparency. Of 16-bit pictures training keeps the upper 8 bits, where Pillow clips '
        "the values: turn them into 8-bit RGB first."
    )
    return [*notes, backend, turned, colour]


def shown_name(text: str) -> str:
    """A name on one line: as it stands where nothing in it is markup, else as code."""
    return text if PLAIN.fullmatch(text) else code(text)


def code(text: str) -> str:
    """A code span, whose fence is longer than any in the text; what is not printable is escaped."""
    shown = escape(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{space}{shown}{space}{fence}"


def table(rows: dict[str, str]) -> str:
    """Rows of a name and a Markdown text; a bar would begin another cell, even in code."""
    escaped = {title: value.replace("|", r"\|") for title, value in rows.items()}
    lines = (f"| {title} | {value} |" for title, value in escaped.items())
    return "\n".join(["| | |", "|---|---|", *lines])
