"""The documentation's site in a browser: every page fits a phone and a screen, and axe finds
nothing.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest
from test_docs import DOCS, PAGES, build_site

Axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="the test extra is not installed"
).Axe
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the test extra's playwright is not installed"
)
pytest.importorskip("zensical")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


CUT = (
    "[...document.querySelectorAll('pre > code')].filter((x) => x.scrollWidth > "
    "x.clientWidth).map((x) => x.innerText)"
)
BROKEN = (
    "[...document.querySelectorAll('td code')].filter((x) => x.getClientRects().length > "
    "1).map((x) => x.innerText)"
)


@pytest.fixture(scope="module")
def address():
    build_site()
    handler = functools.partial(_Quiet, directory=DOCS / "site")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_and_shuts_nobody_out(address, width, scheme):
    pages = [
        "",
        *sorted(f"{file.parent.name}/" for file in Path(DOCS, "site").glob("*/index.html")),
    ]
    assert len(pages) == len(PAGES) + len(("keys", "commands"))
    asked: set[str] = set()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: asked.add(request.url))
        for name in pages:
            page.goto(f"{address}/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(BROKEN) == [], name
            assert width < 1280 or page.evaluate(CUT) == [], name
            assert [
                (found["id"], found["nodes"][0]["html"])
                for found in Axe().run(page).response["violations"]
            ] == []
        browser.close()
    assert [url for url in asked if not url.startswith((address, "data:"))] == [], "another server"
