"""What is wrong with a configuration, in the user's terms: key path, value seen, what is allowed, a valid key near it.

Works on any tree of pydantic sections: allowed values and meanings are read from the declared types and descriptions,
so a message can never disagree with what is checked. Keys of other programs get the answer of `foreign_keys`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mmtrain.base.printing import escape
from mmtrain.config.foreign_keys import answer_to
from mmtrain.config.keys import ELEMENT, Path, all_fields, declared_path, section_of

_NOUNS = {int: "an integer", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
_PLURALS = {int: "integers", float: "numbers", str: "texts"}
MOST_EXPLAINED = 20  # problems; finding the nearest key takes milliseconds each, and nobody reads on
LONGEST_KEY = 60  # characters of an unknown key that are compared and shown
_ALIKE = 0.76  # of names within a section; tests hold which slips and strangers it parts
_ALMOST_EQUAL = 0.9  # of names of other sections
_VAGUE = {"name", "type", "path", "dir", "format"}  # such a key of another section is no answer
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def explain(model: type[BaseModel], errors: Sequence[ErrorDetails], given: dict[str, Any]) -> list[str]:
    """One line per wrong key, in the order found, the first MOST_EXPLAINED of them; `given` is what was validated."""
    fields = dict(all_fields(model))
    lines: dict[Path | str, str] = {}
    for error in errors:
        if len(lines) == MOST_EXPLAINED:
            lines["more"] = "and more; mend these first"
            break
        path, below = _key_path(error["loc"], fields)
        declared = declared_path(path)
        if error["type"] == "cross_field":
            lines[error["msg"]] = error["msg"]
        elif error["type"] == "extra_forbidden":
            unknown = (*path, *below)
            lines[unknown] = _unknown_key(unknown, error["input"], fields)
        elif error["type"] == "missing" and not below:
            for missing in _required(declared, fields):
                field = fields[missing]
                name = (*path, *missing[len(path) :])
                said = f"{'.'.join(name)}: missing; needs {_allowed(field.annotation, field.metadata)}"
                lines[name] = f"{said}: {_meaning(field)}" if field.description else said
        else:
            # A union reports one error per alternative, a list one per element: one line for the key says it all.
            field = fields[declared]
            value, allowed = _value_at(given, path), _allowed(field.annotation, field.metadata)
            said = f"{'.'.join(path)}: {_shown(value)} is not allowed; needs {allowed}"
            if isinstance(value, str | int) and not isinstance(value, bool) and _is_allowed(field, [value]):
                said += f"; write [{value}]"
            lines[path] = f"{said} ({_meaning(field)})" if field.description else said
    return list(lines.values())


def _is_allowed(field: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return False
    return True


def _key_path(location: tuple[int | str, ...], fields: dict[Path, FieldInfo]) -> tuple[Path, Path]:
    """The longest declared key path that a pydantic location begins with, and the rest of the location."""
    path = tuple(str(part) for part in location)
    length = len(path)
    while length and declared_path(path[:length]) not in fields:
        length -= 1
    return path[:length], path[length:]


def _unknown_key(path: Path, value: Any, fields: dict[Path, FieldInfo]) -> str:
    path = tuple(escape(part, LONGEST_KEY) for part in path)
    said = f"{'.'.join(path)}: unknown key (value {_shown(value)}); "
    if (answer := answer_to(path)) is not None:
        return f"{said}here {answer}"
    if (near := nearest_key(path, list(fields))) is not None:
        said += f"nearest valid key: {'.'.join(near)}; "
    siblings = [candidate[-1] for candidate in fields if candidate[:-1] == declared_path(path[:-1])]
    where = ".".join(path[:-1]) or "the top level"
    return f"{said}keys of {where}: {', '.join(siblings)}"


def nearest_key(path: Path, known: Sequence[Path]) -> Path | None:
    """The known key path most like `path`; None where none is near enough to be meant.

    The right name in another section beats a similar name in this one.
    """
    path = tuple(part.lower() for part in path)
    near = [candidate for candidate in known if _may_mean(path, candidate)]
    return max(near, key=lambda one: _ratio(path[-1], one[-1]) + _ratio(".".join(path), ".".join(one)), default=None)


def _may_mean(path: Path, known: Path) -> bool:
    name, words, known_words = path[-1], _words(path), _words(known)
    likeness = _ratio(name, known[-1])
    if words <= known_words and _words(known[-1:]) <= _words(path[-1:]):
        return True  # model.llm_path or lr: the name, and some of its sections
    if declared_path(path[:-1]) == known[:-1]:
        return likeness >= _ALIKE or _words(path[-1:]) <= _words(known[-1:])  # a slip, or checkpoint.keep for keep_last
    return likeness >= _ALMOST_EQUAL and known[-1] not in _VAGUE


def _words(path: Path) -> set[str]:
    return set(re.split("[._]", ".".join(path)))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _required(path: Path, fields: dict[Path, FieldInfo]) -> list[Path]:
    """The keys without a default below a missing one, or that one itself where there are none."""
    below = [
        candidate
        for candidate, field in fields.items()
        if candidate[: len(path)] == path
        and ELEMENT not in candidate[len(path) :]
        and section_of(field.annotation) is None
        and all(fields[candidate[:length]].is_required() for length in range(len(path), len(candidate) + 1))
    ]
    return below or [path]


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())  # one line of what is wrapped in the schema


def _value_at(given: Any, path: Path) -> Any:
    for part in path:
        given = given[int(part) if part.isdecimal() else part]
    return given


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(_as_written(value))
    text = {"True": "true", "False": "false"}.get(text, text)
    return escape(text, 120)


def _as_written(value: Any) -> Any:
    """Lists, at any depth, for what YAML's lists became."""
    return [_as_written(one) for one in value] if isinstance(value, list | tuple) else value


def _allowed(annotation: Any, metadata: Sequence[Any]) -> str:
    """What a key may hold, from its declaration: `an integer >= 1`, `one of float32, bfloat16, or null`.

    A type that has a title is called by it.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _allowed(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        choices = [_allowed(argument, []) for argument in arguments]
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if (section := section_of(annotation)) is not None:
        return f"a section with the keys {', '.join(section.model_fields)}"
    if origin is Literal:
        known = list(map(str, arguments))
        return known[0] if len(known) == 1 else f"one of {', '.join(known)}"
    if title := next((item.title for item in metadata if isinstance(item, FieldInfo) and item.title), None):
        return title
    limits = _limits(metadata)
    if origin is tuple:
        inner = arguments[0]
        element_limits = ""
        if typing.get_origin(inner) is typing.Annotated:
            inner, *inner_metadata = typing.get_args(inner)
            element_limits = _limits(inner_metadata)
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        empty = "non-empty " if any(getattr(item, "min_length", None) for item in _flat(metadata)) else ""
        if (section := section_of(inner)) is not None:
            return f"a {empty}list of sections with the keys {', '.join(section.model_fields)}"
        if typing.get_origin(inner) is Literal:
            return f"a {empty}list of {', '.join(map(str, typing.get_args(inner)))}"
        return f"a {empty}list of {count}{_PLURALS[inner]}{element_limits}"
    return _NOUNS[annotation] + limits


def _limits(metadata: Sequence[Any]) -> str:
    """Bounds and patterns among a field's metadata, e.g. ` >= 0 and <= 1`."""
    flat = _flat(metadata)
    bounds = [
        f"{sign} {getattr(item, name):,}"
        for item in flat
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    text = " " + " and ".join(bounds) if bounds else ""
    if pattern := next((item.pattern for item in flat if isinstance(getattr(item, "pattern", None), str)), None):
        text += f" matching {pattern}"
    return text


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """Constraints alone: an Annotated type holds its Field(...), which holds them, a field holds them itself."""
    return [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
