"""Whether stock AutoProcessor, loaded from an exported folder, makes the inputs that the run was trained on.

two conversations, one noise picture --template, ImageTransform--> ids and pixels of training
                                     --AutoProcessor--> ids and pixels of the folder: the same, or a UserError
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import AutoProcessor

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import PROBE, ROLES, Turns
from mmtrain.data.samples.records import IMAGE_MARK, Rejected
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import TEMPLATES
from mmtrain.data.samples.text_lengths import load_tokenizer
from mmtrain.data.stream.images import image_transform
from mmtrain.export.processor import ExportedProcessor

CONVERSATIONS: tuple[Turns, ...] = (PROBE, (*PROBE, ("human", "Where is it?"), ("gpt", "At the left.")))
PIXEL_TOLERANCE = 1e-5  # of normalised values; torchvision divides once where training divides twice


def check_processor(config: RunConfig, exported: ExportedProcessor, folder: Path) -> None:
    """Compare ids (whole, and as the prompt for the first answer) and pixels; the folder must hold its config.json.

    Raises UserError for a difference: generate would get inputs that the model has never seen.
    """
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    transform = image_transform(config.model.vision.name, config.data.image_fit)
    side = transform.image_size
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    pixels = processor.image_processor(picture, return_tensors="pt")["pixel_values"][0]
    difference = float((pixels - transform(picture)).abs().max())
    if not difference <= PIXEL_TOLERANCE:
        raise _differs(folder, f"pixel values differ by {difference:g}")

    template = TEMPLATES[config.data.template](
        load_tokenizer(config.model.llm.path), exported.image_seq_length, sys.maxsize
    )
    for turns in CONVERSATIONS:
        try:
            document = template(Sample("probe", "probe", turns, (b"",)))
        except Rejected:  # plain takes one question, and some templates one, too
            continue
        begin = next(t for t, label in enumerate(document.labels) if label != IGNORE) + 1
        asked = config.data.template == "plain"
        cases = [(turns[:1], document.input_ids[:begin])] + ([] if asked else [(turns, document.input_ids)])
        for said, trained in cases:
            text = processor.apply_chat_template(
                _messages(said, words=not asked), add_generation_prompt=len(said) == 1, tokenize=False
            )
            given = processor(text=text, images=[picture])["input_ids"][0]
            wanted = [exported.image_token_id if token == IMAGE_POSITION else token for token in trained]
            if list(given) != wanted:
                raise _differs(folder, f"{text!r} becomes the tokens {_short(given)}, training has {_short(wanted)}")


def _messages(turns: Turns, words: bool) -> list[dict]:
    """Turns as messages of image and text parts; without `words` of images alone."""
    messages = []
    for speaker, text in turns:
        images = [{"type": "image"}] * text.count(IMAGE_MARK)
        texts = [{"type": "text", "text": text.replace(IMAGE_MARK, "").strip()}] if words else []
        messages.append({"role": ROLES[speaker], "content": [*images, *texts]})
    return messages


def _short(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:40])) + (" ..." if len(ids) > 40 else "")


def _differs(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder}: stock AutoProcessor does not make the inputs that the run was trained on: {what}; export with "
        "--format safetensors or --format llava, which bring no processor"
    )
