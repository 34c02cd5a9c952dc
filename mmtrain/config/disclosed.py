"""Values of a configuration for who may look at a run: its page, trackers. config.yaml itself has them as they are."""

from __future__ import annotations

import re
from typing import Any

# The arguments of a `pipe:` URL hold headers and signed addresses.
_ARGUMENTS = re.compile(r"((?:^\s*pipe:\s*|\bpipe:)\S+)\s.*", re.DOTALL)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password of an address


def disclosed(value: Any) -> Any:
    """The same with `pipe:PROGRAM ...` for each `pipe:` URL, and addresses without login, however deep they stand."""
    if isinstance(value, dict):
        return {disclosed(key): disclosed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [disclosed(inner) for inner in value]
    return _LOGIN.sub("", _ARGUMENTS.sub(r"\1 ...", value)) if isinstance(value, str) else value
