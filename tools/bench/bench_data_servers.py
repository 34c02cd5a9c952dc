"""Servers for `bench.py data --remote`, on 127.0.0.1: HTTP with ranges, S3 (SeaweedFS), slow lines.

python bench_data_servers.py serve FOLDER --> its port, then answers of HEAD and GET
python bench_data_servers.py line PORT LINE --> the port of a proxy for that server

LINE is a `Line` as a JSON array. What a client sends at once is a request, which holds for GETs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from mmtrain.base.printing import print_result
from mmtrain.runtime.child import die_with_parent, python_child

HOST = "127.0.0.1"
BUCKET = "bench"
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}
_START_SECONDS = 60
_CHUNK = 1 << 20  # bytes
_CUT_WITHIN = 4 << 20  # first bytes of an answer among which it is cut
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Line(NamedTuple):
    """Delay, faults and bandwidth between a client and a server."""

    seconds: float = 0.0  # before each request
    failed: float = 0.0  # share of requests that get 503, or a closed connection
    cut: float = 0.0  # share of answers that end early
    bytes_per_second: float = 0.0  # of all connections together; 0: no limit


class Handler(BaseHTTPRequestHandler):
    """Answers with whole files and ranges. Without an ETag a client cannot go on after a cut."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = Path(self.path.lstrip("/"))
        if not path.is_file():
            self._head(404, 0)
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin, end = 0, size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None:
                self._head(200, size)
            else:
                begin, end = int(asked[1]), min(int(asked[2]) + 1, size)
                self._head(206, end - begin, f"bytes {begin}-{end - 1}/{size}")
            if self.command == "HEAD":
                return
            self.wfile.flush()
            try:
                while begin < end:
                    begin += os.sendfile(
                        self.connection.fileno(), file.fileno(), begin, end - begin
                    )
            except OSError:
                self.close_connection = True

    def _head(self, status: int, size: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Last-Modified", self.date_time_string(0))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()


class Server(ThreadingHTTPServer):
    """A server that many connect to at once."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Print nothing: clients that are killed are part of the cases."""


class Proxy:
    """Passes connections on to a server, over a line."""

    def __init__(self, port: int, line: Line) -> None:
        self.port = port
        self.line = line
        self.draw = random.Random(0)
        self.free_at = 0.0  # the line is used until then

    async def serve(self) -> None:
        server = await asyncio.start_server(self.pass_on, HOST, 0, limit=_CHUNK)
        print_result(str(server.sockets[0].getsockname()[1]))
        await server.serve_forever()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        up_reader, up_writer = await asyncio.open_connection(HOST, self.port, limit=_CHUNK)
        left = [float("inf")]  # bytes of the answer until it is cut
        answers = asyncio.ensure_future(self.answer(up_reader, writer, left))
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await asyncio.sleep(self.line.seconds)
                if self.draw.random() < self.line.failed:
                    if self.draw.random() < 0.5:
                        writer.write(_BUSY)
                    break
                if data.startswith(b"GET ") and self.draw.random() < self.line.cut:
                    left[0] = self.draw.randrange(_CUT_WITHIN)
                up_writer.write(data)
                await up_writer.drain()
        writer.close()
        up_writer.close()
        await answers

    async def answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: list[float],
    ) -> None:
        """Pass answers back, until one is cut."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self.line.bytes_per_second:
                    now = time.monotonic()
                    self.free_at = max(self.free_at, now)
                    self.free_at += len(data) / self.line.bytes_per_second
                    await asyncio.sleep(self.free_at - now)
                if left[0] < len(data):
                    writer.write(data[: int(left[0])])
                    break
                left[0] -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[int]:
    """Run this file with arguments; yield the port that it prints."""
    command = python_child(__file__, *arguments)
    with subprocess.Popen(**command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def weed_command() -> str | None:
    """Return SeaweedFS's command, of this environment or the PATH; None where there is none."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextlib.contextmanager
def serving_s3(folder: Path, files: list[Path]) -> Iterator[int]:
    """Run SeaweedFS in an empty folder; yield the port of its S3, whose bucket holds the files."""
    folder.mkdir()
    key, secret = KEYS.values()
    identities = [
        {
            "name": "bench",
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": ["Admin"],
        },
        {"name": "anonymous", "actions": ["Admin"]},  # who uploads
    ]
    settings = folder / "s3.json"
    settings.write_text(json.dumps({"identities": identities}))
    options = {
        "dir": folder,
        "s3": "true",
        "s3.config": settings,
        "ip": HOST,
        "ip.bind": HOST,
        "master.telemetry": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.allowEmptyFolder": "true",
    }
    for name in ("master", "volume", "filer", "s3"):
        options[f"{name}.port"] = free_port()
        options[f"{name}.port.grpc"] = free_port()
    command = [weed_command(), "server", *(f"-{name}={value}" for name, value in options.items())]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            bucket = f"http://{HOST}:{options['s3.port']}/{BUCKET}"
            _put(bucket, b"", time.monotonic() + _START_SECONDS)
            for file in files:
                _put(f"{bucket}/{file.name}", file.read_bytes(), time.monotonic() + _START_SECONDS)
            yield options["s3.port"]
        finally:
            process.kill()


def _put(url: str, content: bytes, deadline: float) -> None:
    """Write an object; a server that has just been started refuses it at first."""
    while True:
        try:
            request = urllib.request.Request(url, content, method="PUT")
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def main(act: str, *arguments: str) -> None:
    """Serve until the parent ends."""
    die_with_parent()
    if act == "line":
        port, line = arguments
        asyncio.run(Proxy(int(port), Line(*json.loads(line))).serve())
    os.chdir(arguments[0])
    server = Server((HOST, 0), Handler)
    print_result(str(server.server_port))
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
