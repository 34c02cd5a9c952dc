"""Parsers of all commands: help that teaches by example, exit codes, numbers above 0."""

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

EXITS = {0: "done", 2: "wrong input; the message says what to do", 130: "stopped by Ctrl-C"}


def command_parser(
    command: str,
    description: str | None,
    examples: str,
    exits: Mapping[int, str] | None = None,
    **ending: Any,
) -> argparse.ArgumentParser:
    """Make the parser of `mmtrain COMMAND`. Its help shows `examples` and the exit codes, those of
    `exits` included.

    `ending`: keywords of `base.printing.run_command`, kept in the options for it.
    """
    rows = (f"  {code:<5}{text}" for code, text in sorted({**EXITS, **(exits or {})}.items()))
    parser = argparse.ArgumentParser(
        prog=f"mmtrain {command}",
        description=description,
        epilog="\n".join([f"examples:\n{examples}\nexit codes:", *rows]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(ending=ending)
    return parser


def share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: a share from 0 to 1 is needed")


def positive(kind: type[int] | type[float], most: float = math.inf) -> Callable[[str], int | float]:
    """Return the `type` of an argument that is a number above 0, and at most `most`."""

    needed = "a number above 0"
    if kind is int:
        needed = "a whole number, at least 1,"
    if most < math.inf:
        needed += f" and at most {most:,},"

    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text}: {needed} is needed")

    return parse
