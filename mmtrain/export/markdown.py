"""Names from configurations and model folders in Markdown: shown as they are, never obeyed."""

from __future__ import annotations

import re

from mmtrain.base.printing import harmless

PLAIN = re.compile(r"(?!www\.)[A-Za-z0-9]+([ .,+/_-][A-Za-z0-9]+)*")  # nothing that Markdown or HTML reads


def name(text: str) -> str:
    """A name on one line: as it stands where nothing in it is markup, else as code."""
    return text if PLAIN.fullmatch(text) else code(text)


def code(text: str) -> str:
    """A code span, whose fence is longer than any in the text; what is not printable is escaped."""
    shown = harmless(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown else ""
    return f"{fence}{space}{shown}{space}{fence}"


def table(rows: dict[str, str]) -> str:
    """Rows of a name and a Markdown text; a bar would begin another cell, even in code."""
    escaped = {title: value.replace("|", r"\|") for title, value in rows.items()}
    lines = (f"| {title} | {value} |" for title, value in escaped.items())
    return "\n".join(["| | |", "|---|---|", *lines])
