"""Environment variables in paths: `${NAME}` in a key that names files, filled in when a
configuration is read.

Once, as text: `config.yaml` has the whole path. So who writes a configuration puts variables of
whoever runs it into paths, which records, pages and exports show. Therefore no variable whose name
calls it a secret, none in other keys, none in URLs and `pipe:` programs, which could send it away.
"""

import os
import re
from typing import Any

from pydantic import BaseModel

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, without_logins
from mmtrain.config.keys import ELEMENT, NamesFiles, Path, marked

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}", re.ASCII)
_UNBRACED = re.compile(r"\$([A-Za-z_]\w*)[^/]*", re.ASCII)  # and the rest of that file's name
# of ${NAME:-default}, or within what a variable holds
_UNREAD = re.compile(r"\$\{[A-Za-z_]", re.ASCII)
# in a name, in capitals
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)(KEY|PASS|PAT)(_|$)")


def fill_in_paths(
    model: type[BaseModel], content: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the content with the variables of its paths filled in, and a line for each path where
    that fails.
    """
    problems: list[str] = []
    for path, mark in marked(model, NamesFiles).items():
        content = _filled_below(content, path, mark, (), problems)
    return content, problems


def _filled_below(value: Any, path: Path, mark: NamesFiles, key: Path, problems: list[str]) -> Any:
    """Return a copy of the value of `key` whose texts at `path` are filled in."""
    if isinstance(value, list) and path[:1] in ((), (ELEMENT,)):
        return [
            _filled_below(entry, path[1:], mark, (*key, str(number)), problems)
            for number, entry in enumerate(value)
        ]
    if isinstance(value, dict) and path and path[0] in value:
        name, *others = path
        return value | {
            name: _filled_below(value[name], tuple(others), mark, (*key, name), problems)
        }
    if path or not isinstance(value, str) or not mark.is_path(value):
        return value
    try:
        return _filled(value)
    except UserError as error:
        problems.append(f"{'.'.join(key)}: {error}")
        return value


def _filled(text: str) -> str:
    """Return a path with its variables filled in. Raises UserError, without the key, where one
    cannot be.
    """
    for variable in _UNBRACED.finditer(text):
        if variable[1] in os.environ and not os.path.lexists(text[: variable.end()]):
            raise UserError(
                f"${variable[1]} is neither a file nor a variable. Write ${{{variable[1]}}}"
            )
    for variable in _VARIABLE.finditer(text):
        name = variable[1]
        shown = escape(variable[0], 60)
        value = os.environ.get(name, "")
        if _SECRET.search(name.upper()):
            raise UserError(
                f"{shown} looks like a secret by its name, and paths are shown. Rename the variable"
            )
        if without_logins(value) != value:  # config.yaml would hold it
            raise UserError(
                f"{shown} holds an address with a login, and paths are shown. "
                "Use a path without a login"
            )
        if not value:
            empty = "empty" if name in os.environ else "not set"
            raise UserError(
                f"the environment variable of {shown} is {empty}. Set it, or write the path out"
            )
    filled = _VARIABLE.sub(lambda variable: os.environ[variable[1]], text)
    if _UNREAD.search(filled):  # config.yaml would be filled in again
        raise UserError(
            f"{escape(text, 60)} still holds ${{...}} after its variables are filled in. Write "
            f"variables as ${{NAME}}, without a default and without another variable in them"
        )
    return filled
