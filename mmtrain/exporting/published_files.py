"""Copy the small files of a published model into an export, without what names code.

model's folder --copy_files--> the files that stock classes read
content --write_json--> JSON that names no code

The folder may come from a stranger. A link in it may lead to a secret, and a file in it may be
code.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from mmtrain.base.small_files import parse_json, read_limited
from mmtrain.config.limits import MAX_TOKENIZER_BYTES
from mmtrain.facts.model_files import foreign_files, optional_json
from mmtrain.facts.tokenizer_files import CONFIGURATIONS, published_files

# Keys by which transformers finds code, in a folder or on the hub, to run it.
CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines")


def copy_files(
    source: Path,
    folder: Path,
    *,
    is_whole: bool = False,
) -> None:
    """Copy what `published_files` names into a folder; JSON is read and written again.

    Raises UserError for a file that is a link out of the folder, and for what is no JSON.
    """
    for file in published_files(source, is_whole=is_whole):
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        if file.suffix != ".json":
            shutil.copyfile(file, place)
            continue
        with foreign_files(str(file)):
            content = parse_json(read_limited(file, MAX_TOKENIZER_BYTES, "a file of JSON"))
        write_json(place, content)


def write_json(file: Path, content: Any) -> None:
    """Write JSON; a configuration (*config.json) without the keys that name code."""
    if file.name.endswith("config.json"):
        content = _without_code(content)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def code_named_in(folder: Path) -> list[str]:
    """Return "KEY in FILE" for all code that the configurations in a model's folder name."""
    found = []
    for name in (*CONFIGURATIONS, "tokenizer_config.json"):
        # in which quotes inside a value are escaped
        text = json.dumps(optional_json(folder, name))
        found += [f"{key} in {name}" for key in CODE_KEYS if f'"{key}":' in text]
    return found


def _without_code(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_code(value) for key, value in content.items() if key not in CODE_KEYS}
    if isinstance(content, list):
        return [_without_code(value) for value in content]
    return content
