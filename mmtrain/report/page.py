"""Page of a run: one HTML file that needs no network. No text of the run becomes markup or script.

sections --page.html.jinja, which escapes--> HTML, with echarts, page.css and page.js inside
charts --JSON that cannot end its element--> page.js, which sets text as text

A Content-Security-Policy lets only these scripts and styles run, by their hashes, and lets the page
fetch nothing.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.version import VERSION
from mmtrain.report.comparison import compared
from mmtrain.report.elements import Finding, Section, chart_data
from mmtrain.report.headline import headline, status
from mmtrain.report.records import read_run
from mmtrain.report.sections import sections

HERE = Path(__file__).parent
MAX_RUNS = 8


def make_page(folders: Sequence[Path]) -> str:
    """Return the page of a run, or of several side by side; raises UserError for a folder that is
    no run.
    """
    if len(folders) > MAX_RUNS:
        raise UserError(
            f"{len(folders)} runs do not fit on a page; at most {MAX_RUNS} do. Name fewer runs."
        )
    if len(folders) > 1:
        title, says, parts = compared(folders)
        return _render(title, says, {}, parts)
    run = read_run(folders[0])
    return _render(run.name, status(run), headline(run), sections(run))


def write_page(folders: Sequence[Path], file: Path) -> Path:
    """Write the page of these runs as `file`, whole or not at all; raises UserError."""
    page = make_page(folders)
    try:
        write_whole(file, page)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror}. Choose another place with --out FILE."
        ) from error
    return file


def _render(
    title: str,
    says: str,
    findings: Mapping[str, Finding],
    parts: Sequence[Section],
) -> str:
    scripts = _asset("echarts/echarts.common.min.js"), _asset("page.js")
    style = _asset("page.css")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return _template().render(
        title=title,
        says=says,
        findings=findings,
        sections=parts,
        scripts=scripts,
        style=style,
        policy="; ".join(f"{key} {value}" for key, value in policy.items()),
        data=_inside_script(
            {chart.id: chart_data(chart) for section in parts for chart in section.charts}
        ),
        version=VERSION,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(_asset("page.html.jinja"))


@functools.cache
def _asset(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _hash(content: str) -> str:
    """Return a source expression of Content-Security-Policy:
    https://www.w3.org/TR/CSP3/#grammardef-hash-source.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _inside_script(value: Any) -> str:
    """Return JSON without the characters of HTML: no text can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
