"""Serves the page of a run that goes on, to this machine alone.

GET / --made anew, at most once a second, when the records have grown--> the page, which asks again and reloads itself

It listens on 127.0.0.1. Whoever may open a connection there, as every user of this machine, can read the page; a page
of another site cannot: a request that does not name this very address is refused, whatever name points to it.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import message
from mmtrain.checkpoint.run_folder import ANSWERS, AUDIT, BAD_STEPS, CONFIG, DISCARDED, METRICS, PLAN, QUARANTINE
from mmtrain.report.page import make_page

HOST = "127.0.0.1"
FILES = (CONFIG, PLAN, AUDIT, METRICS, BAD_STEPS, DISCARDED, QUARANTINE, ANSWERS)
LEAST_SECONDS = 1.0  # between two pages
SHARE_OF_TIME = 0.1  # at most, that goes into making pages: of a very long run one takes seconds
PATIENCE = 10.0  # seconds for a request that does not come


class Watched:
    """The page of runs, as new as their records, and a tag of it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Make it; raises UserError for what is no run."""
        self._folders = folders
        self._lock = threading.Lock()
        self._rests_until = 0.0
        self._tag, self._page, self._problem = "", b"", ""
        self._make(self._seen())

    def newest(self) -> tuple[str, bytes]:
        """The tag, and the page in UTF-8; raises UserError while none can be made."""
        with self._lock:
            if time.monotonic() >= self._rests_until and ((tag := self._seen()) != self._tag or self._problem):
                self._make(tag)
            elif self._problem:
                raise UserError(self._problem)
            return self._tag, self._page

    def _make(self, tag: str) -> None:
        begin = time.monotonic()
        try:
            page = make_page(self._folders, tag=tag).encode()
            self._tag, self._page, self._problem = tag, page, ""
        except UserError as error:
            self._problem = str(error)
            raise
        finally:
            end = time.monotonic()
            self._rests_until = end + max(LEAST_SECONDS, (end - begin) / SHARE_OF_TIME)

    def _seen(self) -> str:
        """Another one whenever a record has grown, or is another file."""
        seen = []
        for folder in self._folders:
            for name in FILES:
                try:
                    about = (folder / name).stat()
                except OSError:
                    continue
                seen.append((str(folder), name, about.st_ino, about.st_size, about.st_mtime_ns))
        return f'"{hashlib.sha256(repr(seen).encode()).hexdigest()[:32]}"'


def server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the runs' page that listens, port 0: on a free one. Raises UserError."""
    runs = Watched(folders)

    class Handler(_Handler):
        watched = runs

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another one, or 0 for a free one") from error


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has left is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    watched: Watched
    timeout = PATIENCE
    server_version, sys_version = "mmtrain", ""

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN, b"This address is not of this server.\n")
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"There is nothing but /.\n")
        else:
            try:
                tag, page = self.watched.newest()
            except UserError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, message(f"{error}\n").encode())
                return
            is_known = self.headers.get("If-None-Match") == tag
            self._answer(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK, page, tag)

    def _answer(self, status: HTTPStatus, content: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'plain' if tag is None else 'html'}; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        if tag is not None:
            self.send_header("ETag", tag)
        if status is HTTPStatus.NOT_MODIFIED:
            self.end_headers()
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: who watches a run asks every second."""
