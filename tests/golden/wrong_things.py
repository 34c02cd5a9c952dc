"""Make the wrong files, shards and model folders that the recorded refusals name below {wrong}."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import torch
from json_files import read_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Payload:
    """Calls `print` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a pickle ran",)


def make_wrong_things(folder: Path, texts: dict[str, str], tiny: Path, checkpoint: Path) -> None:
    """Fill `folder` with `texts` by name and with damaged copies of what lies in `tiny` and in
    `checkpoint`.
    """
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "brackets.yaml").write_text("eval: " + "[" * 10_000)
    (folder / "digits.yaml").write_text("optimizer: {lr: " + "1" * 5_000 + "}")
    _make_shards(folder, next((tiny / "shards").glob("*.tar")))
    _make_models(folder, tiny / "llm")
    for name, file in (("damaged", "projector.safetensors"), ("no_state", "state.json")):
        shutil.copytree(checkpoint.parent.parent, folder / name)
        (path,) = (folder / name).rglob(file)
        content = path.read_bytes()
        path.unlink()
        if name == "damaged":
            path.write_bytes(content[:-1])


def _make_shards(folder: Path, sound: Path) -> None:
    tarfile.open(folder / "no_members.tar", "w").close()
    content = sound.read_bytes()
    (folder / "cut.tar").write_bytes(content[: len(content) // 2])
    for name in ("cut_index", "future_index", "unfinished"):
        shutil.copy(sound, folder / name / "tiny.tar")


def _make_models(folder: Path, sound: Path) -> None:
    config = read_json(sound / CONFIG)
    index = {"weight_map": {"lm_head.weight": "../../../../etc/passwd"}}
    texts = {
        "no_heads": {CONFIG: json.dumps(config | {"num_attention_heads": 0})},
        "text_heads": {CONFIG: json.dumps(config | {"num_attention_heads": "4"})},
        "five_heads": {CONFIG: json.dumps(config | {"num_attention_heads": 5, "head_dim": None})},
        "bart": {CONFIG: '{"model_type": "bart", "is_encoder_decoder": true}'},
        "broken_json": {CONFIG: "{"},
        "list_json": {CONFIG: "[]"},
        "no_config": {CONFIG: None},
        "no_weights": {WEIGHTS: None},
        "pickled": {WEIGHTS: None, "pytorch_model.bin": "pickle"},
        "outside_index": {WEIGHTS: None, f"{WEIGHTS}.index.json": json.dumps(index)},
        "cut_header": {WEIGHTS: "\x10\x00"},
        "long_header": {WEIGHTS: "\0" * 7 + "\x10"},
        "code_pickle": {WEIGHTS: None},
    }
    for name, files in texts.items():
        shutil.copytree(sound, folder / name)
        for file, text in files.items():
            if text is None:
                (folder / name / file).unlink()
            else:
                (folder / name / file).write_text(text, encoding="latin-1")
    torch.save({"weight": Payload()}, folder / "code_pickle" / "pytorch_model.bin")
