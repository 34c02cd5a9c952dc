"""YAML for configuration files: safe loading that refuses a key given twice, which PyYAML takes without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mmtrain.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader whose mappings have each key once and text keys only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key!r} is not text (YAML reads on, yes and numbers as values)",
                    key_node.start_mark,
                )
            if key in lines and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key} is given twice, first on line {lines[key]}", key_node.start_mark
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Content of a YAML file; raises UserError naming the file, and the line of a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Content of YAML text; `source` names it in errors. Raises UserError with line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise UserError(f"{where}: {error.problem or error.context}; mend the YAML there") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise UserError(f"{source}: {error}; mend the YAML there") from None
