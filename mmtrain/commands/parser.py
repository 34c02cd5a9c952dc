"""What the command lines of all commands have in common: help that teaches by example, and numbers from 1 on."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def command_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of `mmtrain COMMAND`; its help shows both texts as they are written."""
    return argparse.ArgumentParser(
        prog=f"mmtrain {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """The `type` of an argument that is a number above 0."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not value > 0:
            least = "a whole number, at least 1," if kind is int else "a number above 0"
            raise argparse.ArgumentTypeError(f"{text}: {least} is needed")
        return value

    return parse
