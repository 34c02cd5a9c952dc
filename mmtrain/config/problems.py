"""Explain a wrong configuration by key path, value seen, what is allowed, and a valid key near it.

What is allowed is pydantic's message, what a key means is the description of its declaration. For
keys of other programs the table foreign_keys.yaml says what is set here instead.
"""

import difflib
import functools
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mmtrain.base.printing import escape
from mmtrain.config.keys import NAME, Path, all_fields, declared_path
from mmtrain.config.templates import JINJA

TABLE = FilePath(__file__).with_name("foreign_keys.yaml")
MOST_EXPLAINED = 20  # errors; finding the nearest key takes milliseconds each, and nobody reads on
LONGEST_KEY = 60  # characters of an unknown key that are compared and shown
_ALIKE = 0.76  # of names within a section; tests hold which slips and strangers it parts
_ALMOST_EQUAL = 0.9  # of names of other sections
_VAGUE = {"name", "type", "path", "dir", "format"}  # such a key of another section is no answer
_NEAR = 0.5  # of values that a key may have: fp32 for float32, vicuna_v1 for llava_v1
_SHOULD = {
    "model_type": "be a section",
    "tuple_type": "be a list",
    "missing": "have more entries",
    NAME: "be letters, digits, '.', '_' and '-', and begin with one of the first two",
    JINJA: "be Jinja text",
}
"""Ends of the sentence "it should ...", by pydantic's type of error or a pattern that failed."""


def explain(
    model: type[BaseModel], errors: Sequence[ErrorDetails], content: dict[str, Any]
) -> list[str]:
    """Return a line for each wrong key of the first MOST_EXPLAINED errors in the `content`."""
    fields = dict(all_fields(model))
    lines = []
    # a union has an error per alternative, a list one per element
    wrong_values: dict[Path, list[str]] = {}
    for error in errors[:MOST_EXPLAINED]:
        path, below = _key_path(error["loc"], fields)
        if error["type"] == "cross_field":
            lines.append(error["msg"])
        elif error["type"] == "extra_forbidden":
            lines.append(_unknown_key((*path, *below), error["input"], fields))
        elif error["type"] == "missing" and not below:
            lines.append(f"{'.'.join(path)}: missing{_meaning(fields[declared_path(path)])}")
        else:
            kind = error.get("ctx", {}).get("pattern", error["type"])
            message = re.sub(r"^\w+ should ", "", error["msg"]).replace("tuple", "list")
            should = _SHOULD.get(kind, message)
            wrong_values.setdefault(path, []).append(should)
    for path, should in wrong_values.items():
        value = _value_at(content, path)
        begin = "it"
        meaning = ""
        if path:  # without: a key that is no Unicode
            field = fields[declared_path(path)]
            begin = _meant(field.annotation, value, should)
            meaning = _meaning(field)
        needed = f"{begin} should {' or '.join(dict.fromkeys(should))}{meaning}"
        lines.append(f"{'.'.join(path) or 'its keys'}: {_shown(value)} is not allowed; {needed}")
    if len(errors) > MOST_EXPLAINED:
        lines.append("and more. Fix these first")
    return lines


def _meant(annotation: Any, value: Any, should: Sequence[str]) -> str:
    """Begin a sentence; where a valid value is near to a wrong one, with "did you mean ...?"."""
    takes_text = str in typing.get_args(annotation)
    if isinstance(value, str) and takes_text and should == [_SHOULD["tuple_type"]]:
        return f"did you mean [{escape(value, LONGEST_KEY)}]? It"
    choices = re.findall(r"'(\w+)'", " ".join(should))
    for word in re.findall(r"\w+", str(value).lower()):
        if word not in choices and (near := difflib.get_close_matches(word, choices, 1, _NEAR)):
            return f"did you mean {near[0]}? It"
    return "it"


def _key_path(location: tuple[int | str, ...], fields: dict[Path, FieldInfo]) -> tuple[Path, Path]:
    """Split a pydantic location into the longest declared key path and the rest."""
    path = tuple(str(part) for part in location)
    length = len(path)
    while length and declared_path(path[:length]) not in fields:
        length -= 1
    return path[:length], path[length:]


def _unknown_key(path: Path, value: Any, fields: dict[Path, FieldInfo]) -> str:
    path = tuple(escape(part, LONGEST_KEY) for part in path)
    problem = f"{'.'.join(path)}: unknown key (value {_shown(value)}); "
    if (answer := answer_to(path)) is not None:
        return f"{problem}here {answer}"
    if (near := nearest_key(path, list(fields))) is not None:
        problem += f"nearest valid key: {'.'.join(near)}; "
    siblings = [candidate[-1] for candidate in fields if candidate[:-1] == declared_path(path[:-1])]
    where = ".".join(path[:-1]) or "the top level"
    return f"{problem}keys of {where}: {', '.join(siblings)}"


def nearest_key(path: Path, known: Sequence[Path]) -> Path | None:
    """Return the known key path most like `path`, None where none is near enough to be meant.

    The right name in another section beats a similar name in this one.
    """
    path = tuple(part.lower() for part in path)

    def likeness(one: Path) -> float:
        return _ratio(path[-1], one[-1]) + _ratio(".".join(path), ".".join(one))

    near = [candidate for candidate in known if _may_mean(path, candidate)]
    return max(near, key=likeness, default=None)


def _may_mean(path: Path, known: Path) -> bool:
    name = path[-1]
    words = _words(path)
    known_words = _words(known)
    likeness = _ratio(name, known[-1])
    if words <= known_words and _words(known[-1:]) <= _words(path[-1:]):
        return True  # model.llm_path or lr: the name, and some of its sections
    if declared_path(path[:-1]) == known[:-1]:
        # a slip, or checkpoint.keep for keep_last
        return likeness >= _ALIKE or _words(path[-1:]) <= _words(known[-1:])
    return likeness >= _ALMOST_EQUAL and known[-1] not in _VAGUE


def _words(path: Path) -> set[str]:
    return set(re.split("[._]", ".".join(path)))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _meaning(field: FieldInfo) -> str:
    if not field.description:
        return ""
    return f" ({' '.join(field.description.split())})"


def _value_at(content: Any, path: Path) -> Any:
    for part in path:
        content = content[int(part) if part.isdecimal() else part]
    return content


def _shown(value: Any) -> str:
    """Return a value as YAML has it: its lists have become tuples."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return escape(repr(_with_lists(value)), 120)


def _with_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_with_lists, value))
    return value


@functools.cache
def answers() -> dict[str, str]:
    """Return the messages about keys of other programs, by key: each follows the word "here"."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: entry["here"] for entry in table for name in entry["keys"].split()}


def answer_to(path: Path) -> str | None:
    """Return the message about a key of another program, in any section; None for other keys."""
    names = [name.lstrip("-").replace("-", "_").lower() for name in path]
    # eval: {batch_size: 4}, then batch_size
    return answers().get("_".join(names[-2:])) or answers().get(names[-1])


def foreign_keys_of(content: Mapping[str, Any]) -> list[str]:
    """Return the keys by which a file is another program's configuration; none for our own."""
    if any(isinstance(content.get(section), dict) for section in ("run", "data", "train")):
        return []
    keys = [str(key) for key in content if key in answers()]
    return keys if len(keys) > 1 else []
