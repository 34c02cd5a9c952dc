"""The small files of an export: which ones leave the folder of a published model, and what is taken out of them.

model's folder --copy_files--> the files that stock classes read      content --write_json--> JSON that names no code

The folder may come from a stranger. A link in it may lead to a secret, and a file in it may be code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import parse_json, read_limited
from mmtrain.config.limits import MAX_TOKENIZER_BYTES
from mmtrain.models.facts.model_files import foreign_files, read_json
from mmtrain.models.facts.tokenizer_files import tokenizer_files

# What stock models and processors read besides the tokenizer's files.
CONFIGURATIONS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Keys by which transformers finds code, in a folder or on the hub, to run it.
CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")


def copy_files(source: Path, folder: Path, configurations: Sequence[str] = ()) -> None:
    """Copy the tokenizer's files and these `configurations` of a model's folder; JSON is read and written again.

    Raises UserError for a file that is a link out of the folder, and for what is no JSON.
    """
    files = [source / name for name in configurations if (source / name).is_file()]
    files += tokenizer_files(source)
    refuse_links(source, files)

    for file in files:
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        if file.suffix != ".json":
            shutil.copyfile(file, place)
            continue
        with foreign_files(str(file)):
            content = parse_json(read_limited(file, MAX_TOKENIZER_BYTES, "a file of JSON"))
        write_json(place, content)


def refuse_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise UserError for a file that lies neither in its folder nor in the hub cache's blobs beside that snapshot."""
    home = folder.resolve()
    blobs = home.parent.parent / "blobs"  # of CACHE/models--ORG--NAME/snapshots/COMMIT
    for file in files:
        target = file.resolve()
        is_blob = home.parent.name == "snapshots" and target.is_relative_to(blobs)
        if not is_blob and not target.is_relative_to(home):
            raise UserError(
                f"{escape(str(file))}: is a link to {escape(str(target))}, outside its folder, and an export would "
                "publish that file. Replace the link by a copy if it belongs to the model"
            )


def write_json(file: Path, content: Any) -> None:
    """Write JSON; a configuration (*config.json) without the keys that name code."""
    if file.name.endswith("config.json"):
        content = _without_code(content)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def code_named_in(folder: Path) -> list[str]:
    """Return "KEY in FILE" for all code that the configurations in a model's folder name; an export names none."""
    found = []
    for file in (folder / name for name in (*CONFIGURATIONS, "tokenizer_config.json")):
        text = json.dumps(read_json(file)) if file.is_file() else ""  # in which quotes inside a value are escaped
        found += [f"{key} in {file.name}" for key in CODE_KEYS if f'"{key}":' in text]
    return found


def _without_code(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_code(value) for key, value in content.items() if key not in CODE_KEYS}
    if isinstance(content, list):
        return [_without_code(value) for value in content]
    return content
