"""LLMs' folders with other tokenizers and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from chat_styles import sentencepiece_like
from tokenizers import AddedToken


@pytest.fixture(scope="session")
def llm_with(make_tiny, tiny, tmp_path_factory):
    """Makes an LLM's folder with the tiny weights (320 rows) and another tokenizer."""

    def make(template: str | None, marks: tuple[str, ...] = (), kind: str = "byte_level", **generation) -> Path:
        folder = tmp_path_factory.mktemp("llm") / "llm"
        shutil.copytree(tiny / "llm", folder)
        tokenizer = sentencepiece_like() if kind == "sentencepiece" else make_tiny.make_tokenizer()
        added = [AddedToken(mark, special=True, normalized=False) for mark in marks]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make
