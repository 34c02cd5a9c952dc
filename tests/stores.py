"""Stores of shards on 127.0.0.1: a web server, SeaweedFS' S3 server, and a hub of data sets.

The hub was written from what its client asks for, and not compared with the one on the internet.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from mmtrain.runtime.child import die_with_parent

KEY = "testkey"
SECRET = "secret-of-the-tests"
TOKEN = "hf_of_the_tests"
COMMIT = "0" * 40
_CHUNK = 1 << 16  # bytes


class Asked(NamedTuple):
    """A request as a server has seen it."""

    method: str
    path: str
    range: str
    authorization: str


@dataclass
class Faults:
    """Shares of requests that go wrong, drawn from a seed."""

    fail: float = 0.0  # answered by 503, or by closing the connection
    cut: float = 0.0  # of GETs: their body ends in the middle
    failed: int = 0  # requests so far
    was_cut: int = 0
    draw: random.Random = field(default_factory=partial(random.Random, 0))


class Server(ThreadingHTTPServer):
    """A server on 127.0.0.1 that records its requests."""

    daemon_threads = True
    request_queue_size = 128
    scheme = "http"

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[Asked] = []

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that leave."""


class WebServer(Server):
    """The files of a folder: HEAD and GET, with ranges of bytes unless `ranges` is False."""

    def __init__(self, folder: Path, ranges: bool = True, faults: Faults | None = None) -> None:
        super().__init__(_FileHandler)
        self.folder = folder
        self.ranges = ranges
        self.faults = faults or Faults()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def parse_request(self) -> bool:
        is_one = super().parse_request()
        if is_one:
            names = ("Range", "Authorization")
            self.server.requests.append(
                Asked(self.command, self.path, *(self.headers.get(name, "") for name in names))
            )
        return is_one

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _FileHandler(_Handler):
    server: WebServer

    def do_GET(self) -> None:
        faults = self.server.faults
        if faults.draw.random() < faults.fail:
            self.close_connection = True
            faults.failed += 1
            if faults.draw.random() < 0.5:
                self.answer(503)
            return
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if ".." in path.parts or not path.is_file():
            self.answer(404)
            return
        with path.open("rb") as stream:
            self.send_file(stream)

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def send_file(self, stream) -> None:
        about = os.fstat(stream.fileno())
        size = about.st_size
        begin, end, status = 0, size, 200
        headers = {
            "ETag": f'"{about.st_mtime_ns:x}-{size:x}"',
            "Last-Modified": self.date_time_string(about.st_mtime),
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if self.server.ranges:
            headers["Accept-Ranges"] = "bytes"
        if self.server.ranges and asked:
            begin = int(asked[1])
            end = min(int(asked[2] or size - 1) + 1, size)
            if begin >= size:
                self.answer(416)
                return
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, value in {"Content-Length": str(end - begin), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        faults = self.server.faults
        if end > begin and faults.draw.random() < faults.cut:
            faults.was_cut += 1
            end = begin + faults.draw.randrange(end - begin)
            self.close_connection = True
        stream.seek(begin)
        while chunk := stream.read(min(_CHUNK, end - begin)):
            begin += len(chunk)
            self.wfile.write(chunk)


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes that a folder's files take, while others remove some."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512
    return total


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve until the block ends."""
    thread = threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def with_tls(server: Server, ca_file: Path) -> Server:
    """Return the server, speaking TLS with a certificate of a new authority, which is written."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    server.scheme = "https"
    return server


class DataHub(Server):
    """Data sets of a hub: {"ORG/NAME": folder}, whose contents `files`, a second server, sends.

    `private` ones need the token.
    """

    def __init__(self, files: WebServer) -> None:
        super().__init__(_HubHandler)
        self.files = files  # it serves the folder that holds ORG/NAME
        self.private: set[str] = set()
        self.revisions = {"main", COMMIT}

    def environment(self, cache: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Return variables that send huggingface_hub here, and nowhere else."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(cache / "hf"),
            "HF_HUB_CACHE": str(cache / "hf" / "hub"),
            "HF_TOKEN_PATH": str(cache / "hf" / "token"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": token or "",
        }


class _HubHandler(_Handler):
    server: DataHub

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b'{"error": "refused"}', X_Error_Code=code)

    def folder_of(self, name: str, revision: str) -> Path | None:
        """Return the folder of a data set; None, and an answer, where it may not be read."""
        folder = self.server.files.folder / name
        is_private = name in self.server.private
        may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not folder.is_dir() or (is_private and not may_read):
            self.refuse(404 if may_read else 401, "RepoNotFound")
        elif revision not in self.server.revisions:
            self.refuse(404, "RevisionNotFound")
        else:
            return folder
        return None

    def describe(self, folder: Path, paths: Iterable[Path]) -> None:
        found = []
        for path in sorted(paths):
            name = path.relative_to(folder).as_posix()
            if path.is_dir():
                found.append({"type": "directory", "path": name, "oid": COMMIT})
                continue
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            about = {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}
            found.append(about)
        self.answer(200, json.dumps(found).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        _, _, _, organisation, name, kind, revision = urlsplit(self.path).path.split("/")
        folder = self.folder_of(f"{organisation}/{name}", unquote(revision))
        if folder is None:
            return
        assert kind == "paths-info"
        asked = (folder / path for path in parse_qs(body)["paths"])
        self.describe(folder, [path for path in asked if path.exists()])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            name, revision, inside = found.groups()
            folder = self.folder_of(name, revision)
            if folder is None:
                return
            if not (folder / inside).is_dir():
                self.refuse(404, "EntryNotFound")
                return
            self.describe(folder, (folder / inside).rglob("*"))
            return
        found = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        assert found, path
        name, revision, inside = found.groups()
        folder = self.folder_of(name, revision)
        if folder is None:
            return
        if not (folder / inside).is_file():
            self.refuse(404, "EntryNotFound")
            return
        self.answer(302, Location=f"{self.server.files.address}/{name}/{inside}?signature=of-hub")

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name


class S3(NamedTuple):
    """An S3 server: KEY and SECRET may do everything."""

    address: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def upload(self, folder: Path, bucket: str) -> None:
        """Put all files of a folder into a bucket, which is made.

        By a process of its own: obstore does not survive the forks of other tests.
        """
        code = (
            "import sys; from pathlib import Path; import obstore\n"
            "from obstore.store import S3Store\n"
            "folder, bucket = Path(sys.argv[1]), sys.argv[2]\n"
            "store = S3Store(bucket, client_options={'allow_http': True})\n"
            "for file in folder.rglob('*'):\n"
            "    if file.is_file():\n"
            "        obstore.put(store, str(file.relative_to(folder)), file)\n"
        )
        command = [sys.executable, "-c", code, str(folder), bucket]
        subprocess.run(command, env=os.environ | self.environment, check=True, timeout=60)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Run SeaweedFS with its data in a folder, on ports that nobody has: 4 s to the first answer.

    It would report itself to its authors (master.telemetry), and serve Iceberg and Lance.
    """
    weed = Path(sys.executable).with_name("weed")
    folder.mkdir(parents=True, exist_ok=True)
    access = {"accessKey": KEY, "secretKey": SECRET}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "credentials": [access], "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(names))
    command = [
        str(weed),
        "server",
        "-s3",
        f"-s3.config={folder}/s3.json",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-filer.localSocket={folder}/filer.sock",
        f"-s3.localSocket={folder}/s3.sock",
    ]
    for name, port, grpc in zip(names, ports[::2], ports[1::2], strict=True):
        command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    environment = os.environ | {"HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            preexec_fn=die_with_parent,
        )
    try:
        _wait_until_it_answers(process, ports[-2], folder / "log")
        yield S3(f"http://127.0.0.1:{ports[-2]}")
    finally:
        process.kill()
        process.wait()
        for name, grpc in zip(names, ports[1::2], strict=True):
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
            connection.request("GET", "/status")
            connection.getresponse()
            return
        time.sleep(0.05)
