"""Write the pages of the documentation that code holds: every key, and the help of every command.

    scripts/docs.sh   # runs this, then builds the site

Writes keys.md and commands.md into mmtrain/docs/pages; git ignores both.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mmtrain.__main__ import COMMANDS
from mmtrain.config.keys import all_fields, section_of
from mmtrain.config.problems import TABLE
from mmtrain.config.schema import RunConfig

PAGES = Path(__file__).parents[1] / "mmtrain" / "docs" / "pages"
KEYS = """\
# Keys

Every key of a configuration, from its declaration. `key=value` behind CONFIG sets one
for a run. A mistyped key is refused with the one that is meant.
"""
FOREIGN = """
## Keys of other programs

What a key of transformers' Trainer, LLaVA, LLaMA-Factory, ms-swift, DeepSpeed or Megatron is
called here, as the message says that refuses it.

| there | here |
|---|---|"""
COMMANDS_HEAD = """\
# Commands

What `mmtrain COMMAND --help` prints.
"""


def keys_page() -> str:
    """Return the reference of keys: a table for each section, then the keys of other programs."""
    sections: dict[tuple[str, ...], list[str]] = {}
    for path, field in all_fields(RunConfig):
        if section_of(field.annotation) is not None:
            said = f"{_text(field)}\n\n" if field.description else ""
            sections[path] = [
                f"\n## {'.'.join(path)}\n\n{said}| key | default | what it does |\n|---|---|---|"
            ]
        else:
            row = f"| `{'.'.join(path)}` | {_default(field)} | {_text(field)}{_choices(field)} |"
            sections[
                next(path[:n] for n in range(len(path), 0, -1) if path[:n] in sections)
            ].append(row)
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows = [
        f"| {', '.join(f'`{key}`' for key in entry['keys'].split())} | {entry['here']} |"
        for entry in table
    ]
    return "\n".join(
        [KEYS, *(line for lines in sections.values() for line in lines), FOREIGN, *rows, ""]
    )


def _text(field: FieldInfo) -> str:
    return (
        " ".join((field.description or "").split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
    )


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    return (
        f"`{yaml.safe_dump(_plain(field.default), default_flow_style=True).partition(chr(10))[0]}`"
    )


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _choices(field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is not Literal:
        return ""
    return f" ({', '.join(f'`{choice}`' for choice in typing.get_args(field.annotation))})"


def commands_page() -> str:
    """Return the help of each command."""
    lines = [COMMANDS_HEAD]
    for name, (module, purpose) in COMMANDS.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            importlib.import_module(module).parse_arguments(["--help"])
        lines += [
            f"## {name}\n",
            f"{purpose[0].upper()}{purpose[1:]}.\n",
            f"```text\n{printed.getvalue().rstrip()}\n```\n",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    (PAGES / "keys.md").write_text(keys_page(), encoding="utf-8")
    (PAGES / "commands.md").write_text(commands_page(), encoding="utf-8")
