"""A page: one HTML file that needs no network, in which no text of a run becomes markup or script.

sections --page.html.jinja, which escapes--> HTML, with echarts, page.css and page.js inside
charts --JSON that cannot end its element--> page.js, which makes text of text

A Content-Security-Policy lets only these scripts and styles run, by their hashes, and nothing be fetched.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

import mmtrain
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.report.comparison import compared
from mmtrain.report.elements import Finding, Section
from mmtrain.report.fitting import HALVINGS, cut, with_pictures
from mmtrain.report.headline import headline, status
from mmtrain.report.records import read_run
from mmtrain.report.sections import sections

HERE = Path(__file__).parent
MOST_RUNS = 8
MOST_BYTES = 2_000_000


def make_page(folders: Sequence[Path], *, tag: str | None = None) -> str:
    """The page of a run, or of several side by side; with a `tag` it asks its server for a newer one.

    Raises UserError for what is no run.
    """
    if len(folders) == 1:
        run = read_run(folders[0])
        return _fitted(run.name, status(run), headline(run), sections(run), tag)
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs: at most {MOST_RUNS} fit on a page; give fewer")
    title, says, parts = compared(folders)
    return _fitted(title, says, (), parts, tag)


def write_page(folders: Sequence[Path], file: Path) -> Path:
    """Write the page of these runs as `file`, whole or not at all; raises UserError."""
    page = make_page(folders)
    try:
        write_whole(file, page)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; --out FILE says where it goes") from error
    return file


def _fitted(title: str, says: str, findings: Sequence[Finding], parts: Sequence[Section], tag: str | None) -> str:
    """The page of these sections, cut until it is at most MOST_BYTES; pictures get what is left."""
    for halvings in range(HALVINGS + 1):
        smaller = [cut(part, halvings) for part in parts]
        page = _render(title, says, findings, [with_pictures(part, 0) for part in smaller], tag)
        left = MOST_BYTES - len(page.encode())
        if left >= 0:
            break
    if not any(picture.source for part in smaller for asked in part.questions for picture in asked.pictures):
        return page
    return _render(title, says, findings, [with_pictures(part, left) for part in smaller], tag)


def _render(title: str, says: str, findings: Sequence[Finding], parts: Sequence[Section], tag: str | None) -> str:
    scripts = _asset("echarts/echarts.common.min.js"), _asset("page.js")
    style = _asset("page.css")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'none'" if tag is None else "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    charts = {chart.id: chart.data() for section in parts for chart in section.charts}
    return _template().render(
        title=title,
        says=says,
        findings=findings,
        sections=parts,
        scripts=scripts,
        style=style,
        policy="; ".join(f"{key} {value}" for key, value in policy.items()),
        data=_inside_script({"tag": tag, "charts": charts}),
        version=mmtrain.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((HERE / "page.html.jinja").read_text("utf-8"))


@functools.cache
def _asset(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _hash(content: str) -> str:
    """A source expression of Content-Security-Policy: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _inside_script(value: Any) -> str:
    """JSON without any character that means something to HTML: no text can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
