"""The processes of a run, as their launcher describes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.runtime.log import log_name

Agreement = tuple[str, dict[str, Any]]
"""A digest of all that ranks of several nodes must share, and the keys to name where it differs."""


@dataclass(frozen=True)
class Job:
    """The processes of a run. `places[r]` names the place of global rank r in the pipeline, for
    messages.

    Each rank calls `target`, "module:function", with `rank` and the `arguments`. It may return a
    stopped run's message.
    """

    places: tuple[str, ...]
    folder: Path
    threads: int
    timeout_seconds: int
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # where ranks compute. CPU ranks are forked from a process that has all imported
    on_gpus: bool = False
    preload: tuple[str, ...] = ()  # modules that this process imports
    nodes: int = 1
    node: int = 0
    endpoint: str | None = None
    agreement: Agreement | None = None  # which ranks of several nodes compare first
    how_to_resume: str = ""  # what follows the message of a stopped run
    # SIGTERM and SIGUSR1 ask its ranks to save and end; otherwise they end it at once
    saves_when_asked: bool = False

    @property
    def log(self) -> Path:
        return self.folder / log_name(self.node)

    @property
    def local_ranks(self) -> range:
        """Return the global numbers of this node's ranks."""
        number = len(self.places) // self.nodes
        return range(self.node * number, (self.node + 1) * number)
