"""The model card of an exported Hugging Face folder: what it is made of, how good it was, how to load it."""

from __future__ import annotations

from pathlib import Path

import yaml

from mmtrain.export import markdown
from mmtrain.export.language import ExportedLanguage
from mmtrain.export.origin import Origin
from mmtrain.export.processor import ExportedProcessor
from mmtrain.export.vision import ExportedEncoder
from mmtrain.pretrained.model_files import HUB_ID

LOADING = """\
```python
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

folder = "."  # this folder
processor = AutoProcessor.from_pretrained(folder)
model = LlavaForConditionalGeneration.from_pretrained(folder, dtype="auto")
{prompt}
inputs = processor(images=Image.open("picture.png"), text=prompt, return_tensors="pt").to(model.device, model.dtype)
output = model.generate(**inputs, max_new_tokens=64)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
CHAT = """\
question = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
prompt = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)"""
PLAIN = """\
picture = [{"role": "user", "content": [{"type": "image"}]}]
prompt = processor.apply_chat_template(picture, add_generation_prompt=True)"""


def write_card(
    folder: Path,
    about: Origin,
    dtype: str,
    encoder: ExportedEncoder,
    language: ExportedLanguage,
    processor: ExportedProcessor,
) -> None:
    """Write README.md."""
    bases = [name for name in (about.llm, about.vision) if HUB_ID.fullmatch(name) and "/" in name]
    front = {"library_name": "transformers", "pipeline_tag": "image-text-to-text"} | (
        {"base_model": bases} if bases else {}
    )
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {markdown.name(Path(about.llm).name)} that sees through {markdown.name(Path(about.vision).name)}",
        f"Made with mmtrain {markdown.name(about.versions['mmtrain'])}. {_what_trained(about)}",
        "## Made of\n\n" + markdown.table(_parts(about, dtype, language)),
        "## Training\n\n" + markdown.table(_training(about)),
        "## How to load\n\n" + LOADING.format(prompt=CHAT if about.template == "chat" else PLAIN),
    ]
    if notes := [*_language_notes(language, processor), *encoder.notes, *processor.notes]:
        sections.append("## Notes\n\n" + "\n".join(f"- {note.removesuffix('.')}." for note in notes))
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _what_trained(about: Origin) -> str:
    others = [name for name in about.trained if not name.startswith("projector.")]
    if not others:
        return "Only the projector between the two was trained; LLM and vision encoder are as they were published."
    return f"The projector between the two was trained, and {len(others)} tensors of the models around it."


def _parts(about: Origin, dtype: str, language: ExportedLanguage) -> dict[str, str]:
    llm, vision = markdown.code(about.llm), markdown.code(about.vision)
    return {
        "LLM": f"{llm} ({markdown.name(language.config['model_type'])}, {about.llm_width:,} wide)",
        "vision encoder": f"{vision}, block {about.vision_select_layer} ({about.vision_width:,} wide)",
        "projector": about.projector_type,
        "images become square by": about.image_fit,
        "weights stored in": f"{dtype}; the projector was trained in float32 against an LLM in {about.llm_dtype}",
    }


def _training(about: Origin) -> dict[str, str]:
    scores = about.evaluation or {}
    shown = {
        "held-out loss": (scores.get("loss"), "{:.4f} nats a token"),
        "held-out tokens right": (scores.get("token_accuracy"), "{:.1%}"),
        "held-out answers right": (scores.get("exact_match"), f"{{:.1%}} of {scores.get('answers', 0):,}"),
    }
    versions = ", ".join(f"{name} {markdown.name(version)}" for name, version in about.versions.items())
    return {
        "steps": f"{about.steps:,}" + (f" of {about.max_steps:,}" if about.max_steps else ""),
        "template": about.template,
        "data fingerprint": markdown.code(about.data_fingerprint),
        "fingerprint of what was frozen": markdown.code(about.frozen_fingerprint),
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
    if language.added_rows:
        notes.append(
            f"The LLM has no spare row for `<image>` (id {processor.image_token_id}) or for padding: its embedding and "
            f"head gained {language.added_rows}, each the mean of the others. The embedding's is never used, since "
            "image features take its place or it is masked; the head's gives the mean of the other logits, so it is "
            "never the largest."
        )
    if language.left_out:
        notes.append(
            f"{len(language.left_out)} tensors of the LLM's files were left out, since stock transformers computes "
            f"them or does not load them (e.g. {markdown.code(language.left_out[0])})."
        )
    return notes
