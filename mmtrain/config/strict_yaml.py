"""YAML for configuration files: safe loading that refuses what PyYAML takes without a word, or
reads for hours.

Refused, with line and column: a key given twice, deep nesting, tags, and anchors and aliases (nine
lines of them can stand for a thousand million values). A file has at most MAX_BYTES.
"""

from pathlib import Path
from typing import Any

import yaml

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import LONGEST_NUMBER, read_limited

MAX_BYTES = 500_000  # PyYAML reads about 300,000 a second; the shipped configurations have 2,000
MAX_DEPTH = 32  # configurations have 5


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses tags, anchors and aliases, keys given twice and keys that are no
    text.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if event.anchor is not None or getattr(event, "tag", None) is not None:
            raise _fault(
                "&, * and ! begin an anchor, an alias and a tag. Write the value out, or quote it",
                event,
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _fault(f"nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode):
            if "\0" in node.value:
                raise _fault("a null character (\\0), which is not allowed", node)
            if not node.tag.endswith(":str") and len(node.value) > LONGEST_NUMBER:
                raise _fault(f"a number of {len(node.value):,} digits", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # PyYAML's, for the 99th of May or 0x_
            raise _fault(
                f"{escape(repr(node.value))} is not a valid {node.tag.rpartition(':')[2]}", node
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _fault(
                    f"key {escape(repr(key))} is not text (YAML reads on, yes and "
                    "numbers as values)",
                    key_node,
                )
            if key in lines:
                raise _fault(
                    f"key {escape(key)} is given twice, first on line {lines[key]}", key_node
                )
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises UserError with file and line of a mistake."""
    try:
        text = read_limited(path, MAX_BYTES, "a configuration").decode("utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file. Name a YAML file, or example:NAME; mmtrain init lists these"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return the content of YAML text; `source` names it in errors. Raises UserError with line and
    column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}"
        quote = ""
        if "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            quote = ' (inside [ ] and { }, quote a path with a variable: "${NAME}/file")'
        raise UserError(
            f"{where}: {escape(error.problem or error.context)}. Fix the YAML there{quote}"
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # a character, or a %YAML version, that YAML lacks
        raise UserError(f"{source}: {escape(str(error))}. Fix the YAML there") from None


def _fault(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
