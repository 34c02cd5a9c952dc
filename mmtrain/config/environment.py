"""Environment variables in paths: `${NAME}` in a key that names files, filled in when a configuration is read.

Once, as text: what a variable holds is neither YAML nor filled in again, and `config.yaml` has the whole path. So who
writes a configuration puts variables of whoever runs it into paths, which records, pages and exports show. Therefore no
variable that its name calls a secret, none in other keys, none in `pipe:` URLs, whose programs could send it away.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import BaseModel

from mmtrain.base.disclosed import without_logins
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.keys import ELEMENT, NamesFiles, Path, marked

_BRACED = re.compile(r"\$\{([A-Za-z_]\w*)((?:[:=?+-][^{}]*)?)\}", re.ASCII)  # and what a shell does where it is not set
_UNBRACED = re.compile(r"(\$([A-Za-z_]\w*)|%([A-Za-z_]\w*)%)[^/]*", re.ASCII)  # and the rest of that file's name
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)(KEY|PASS|PAT)(_|$)")  # in a name, in capitals


def fill_in_paths(model: type[BaseModel], content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `model` is made of with the variables of its paths filled in, and a line for each path where that fails."""
    problems: list[str] = []
    for path, mark in marked(model, NamesFiles).items():
        content = _below(content, path, mark, (), problems)
    return content, problems


def variable_hint(path: str) -> str:
    """Part of a message that `path` is not there: how a variable is written, where it seems to hold one."""
    found = _UNBRACED.search(path)
    return f" (a variable is written ${{{escape(found[2] or found[3], 60)}}})" if found else ""


def _below(value: Any, path: Path, mark: NamesFiles, key: Path, problems: list[str]) -> Any:
    """A copy of the value of `key` whose texts at `path` are filled in; what is of another type stays."""
    if isinstance(value, list) and path[:1] in ((), (ELEMENT,)):
        return [_below(one, path[1:], mark, (*key, str(number)), problems) for number, one in enumerate(value)]
    if isinstance(value, dict) and path and path[0] in value:
        name, *others = path
        return value | {name: _below(value[name], tuple(others), mark, (*key, name), problems)}
    if path or not isinstance(value, str) or not mark.is_path(value):
        return value
    try:
        return _filled(value)
    except UserError as error:
        problems.append(f"{'.'.join(key)}: {error}")
        return value


def _filled(text: str) -> str:
    """A path with its variables filled in; raises UserError, without the key, where one cannot be."""
    for found in _UNBRACED.finditer(text):
        name = found[2] or found[3]
        if name in os.environ and not os.path.lexists(text[: found.end()]):
            raise UserError(f"{found[1]} is neither a file nor a variable; write ${{{name}}}")
    for found in _BRACED.finditer(text):
        (name, otherwise), shown = found.groups(), escape(found[0], 60)
        if otherwise:
            raise UserError(f"{shown} has a default, which only a shell knows; leave it out, and set the variable")
        if _SECRET.search(name.upper()):
            raise UserError(f"{shown} is a secret by its name, and paths are shown; give the variable another name")
        if without_logins(value := os.environ.get(name, "")) != value:  # config.yaml would hold it
            raise UserError(f"{shown} holds an address with a login, and paths are shown; name a path without one")
        if not value:
            empty = "empty" if name in os.environ else "not set"
            raise UserError(f"the environment variable of {shown} is {empty}; set it, or write the path out")
    filled = _BRACED.sub(lambda found: os.environ[found[1]], text)
    if filled != text and _BRACED.search(filled):  # or config.yaml would be filled in again
        raise UserError(f"{escape(text, 60)} holds ${{...}} when it is filled in; give the variable another value")
    return filled
