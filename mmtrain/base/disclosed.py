"""Redact what a run's configuration and messages may hold of secrets: logins, and arguments of programs.

config.yaml itself has the values as they are.
"""

from __future__ import annotations

import re
from typing import Any

# The arguments of a `pipe:` URL hold headers and signed addresses.
_ARGUMENTS = re.compile(r"((?:^\s*pipe:\s*|\bpipe:)\S+)\s.*", re.DOTALL)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password of an address


def without_logins(text: str) -> str:
    """Return a text whose addresses have no user and password."""
    return _LOGIN.sub("", text)


def disclosed(value: Any) -> Any:
    """Return a copy of JSON-like values without logins, and with `pipe:PROGRAM ...` for each `pipe:` URL."""
    if isinstance(value, dict):
        return {disclosed(key): disclosed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [disclosed(inner) for inner in value]
    return without_logins(_ARGUMENTS.sub(r"\1 ...", value)) if isinstance(value, str) else value
