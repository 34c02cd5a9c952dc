"""Write a run's held-out questions for lmms-eval, one for each answer of a conversation.

held-out samples --write_questions--> questions.jsonl, {"messages", "images", "answer"},
                                      and the images as they are

Each is given the true turns before it. An answer generated greedily equals the true one where each
of its tokens is ranked first, given the true tokens before: that is the run's exact match, unless
two answers of different tokens have the same text.
"""

import json
import secrets
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import ROLES
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, Document
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.demo.data import make_demo_data
from mmtrain.exporting.chat_template import as_prompted
from mmtrain.facts.models import models_of
from mmtrain.training.held_out import HeldOut

HELD_OUT = "held_out"  # the task's name
QUESTIONS = "questions.jsonl"


def _documents(config: RunConfig) -> list[Document]:
    """Read the held-out samples; copies of remote shards are there for that time alone."""
    packed = PackedBatches(config, 0, 1)
    fetching = packed.fetch(cache_folder("copies") / secrets.token_hex(8), [0], steps=0)
    try:
        return HeldOut(packed).documents
    finally:
        if fetching is not None:
            fetching.stop()


def write_questions(config: RunConfig, folder: Path) -> int:
    """Write the questions into `folder`; return the most tokens that an answer has.

    Raises UserError for lost data.
    """
    make_demo_data(config)
    layout = models_of(config).layout
    is_plain = config.data.template == "plain"
    longest = 0
    with (folder / QUESTIONS).open("w", encoding="utf-8") as file:
        for number, document in enumerate(_documents(config)):
            longest = max(longest, sum(label != IGNORE for label in document.labels))
            sample = document.sample
            images = []
            for place, content in enumerate(sample.images):
                images.append(f"{number}-{place}")
                (folder / images[-1]).write_bytes(content)

            # one question for each answer, with the turns before it and their images
            messages = []
            seen = 0
            for speaker, text in sample.turns:
                if speaker == "gpt":
                    asked = {"messages": messages, "images": images[:seen], "answer": text}
                    file.write(json.dumps(asked, ensure_ascii=False) + "\n")
                seen += text.count(IMAGE_MARK)
                content = as_prompted(text, layout, alone=is_plain)
                messages.append({"role": ROLES[speaker], "content": content})
    return longest
