"""A model hub on 127.0.0.1: as much of its API as huggingface_hub asks for when it uploads and
downloads.

It was written from what the client sends, and not compared with the hub.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
COMMIT = "0" * 40
SIZE = 737


@dataclass
class Attack:
    """Return a hostile hub's answer about a repository of `names`, each with SIZE bytes."""

    names: Iterable[str] = ("config.json",)
    sha: str = COMMIT
    status: int = 200  # of the answer to HEAD
    headers: Mapping[str, str] = field(default_factory=dict)  # of answers about files
    # from byte `start` on
    body: Callable[[int], Iterable[bytes]] = lambda start: [b"x" * (SIZE - start)]
    breaks: bool = False  # whether the connection ends before the first answer does


class Hub(ThreadingHTTPServer):
    """Repositories in memory: {"ORG/NAME": {file: bytes}}; `private` are names of those made so."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.uploads: dict[str, bytes] = {}  # by SHA-256, before the commit that names them
        self.asked_for: list[str] = []  # files that were downloaded
        self.attacks: dict[str, Attack] = {}  # by repository

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object = None, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def start(self) -> int:
        """The first byte that is asked for."""
        return int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_POST(self) -> None:
        body, path = self.read(), urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in self.server.repositories:
                return self.answer({"url": f"{self.server.address}/{name}"}, 409)
            self.server.repositories[name] = {}
            if wanted.get("private") or wanted.get("visibility") == "private":
                self.server.private.add(name)
            return self.answer({"url": f"{self.server.address}/{name}"})
        if path.endswith("/info/lfs/objects/batch"):
            upload = lambda oid: {"upload": {"href": f"{self.server.address}/upload/{oid}"}}  # noqa: E731
            objects = [
                {**wanted, "actions": upload(wanted["oid"])}
                for wanted in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            mode = lambda file: "lfs" if file["path"].endswith(".safetensors") else "regular"  # noqa: E731
            files = [
                {"path": file["path"], "uploadMode": mode(file), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        for line in map(json.loads, body.splitlines()):  # of a commit
            value = line["value"]
            if line["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.repositories[name][value["path"]] = self.server.uploads[value["oid"]]
        return self.answer(
            {"commitUrl": f"{self.server.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        )

    def do_PUT(self) -> None:
        body = self.read()
        self.server.uploads[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def send_parts(
        self, parts: Iterable[bytes], status: int = 200, breaks: bool = False, **headers: str
    ) -> None:
        """Send a body without a length, until the client leaves."""
        self.send_response(status)
        for name, value in {"Transfer-Encoding": "chunked", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            if not breaks:
                self.wfile.write(b"0\r\n\r\n")

    def attack(self, attack: Attack, path: str) -> None:
        if path.startswith("/api/"):
            key, start = (
                ("path", "[")
                if "/tree/" in path
                else ("rfilename", f'{{"sha": "{attack.sha}", "siblings": [')
            )
            parts = (
                json.dumps({key: name, "type": "file", "size": SIZE, "oid": COMMIT})
                for name in attack.names
            )
            end = "]" if key == "path" else '], "id": "my-org/hostile"}'
            first = iter([start])
            listed = (f"{next(first, ', ')}{part}".encode() for part in parts)
            return self.send_parts(itertools.chain(listed, [end.encode()]))
        headers = {"ETag": f'"{COMMIT}"', "X-Repo-Commit": COMMIT, **attack.headers}
        if self.command == "HEAD":
            return self.answer(b"x" * SIZE, attack.status, **headers)
        self.server.asked_for.append(path)
        return self.send_parts(
            attack.body(self.start),
            206 if self.start else 200,
            attack.breaks and not self.start,
            **headers,
        )

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for name, attack in self.server.attacks.items():
            if path.startswith((f"/{name}/", f"/api/models/{name}")):
                return self.attack(attack, path)
        if path == "/api/whoami-v2":
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.answer(
                {"name": "tester", "type": "user"} if is_known else {"error": "Invalid"},
                200 if is_known else 401,
            )
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            files = self.server.repositories.get(name)
            if files is None:
                return self.answer(
                    {"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound"
                )
            if "/tree/" in path:
                listed = [
                    {"type": "file", "path": file, "size": len(content), "oid": COMMIT}
                    for file, content in files.items()
                ]
                return self.answer(listed)
            return self.answer(
                {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            )
        if path.startswith("/stored/"):
            return self.stored(path.removeprefix("/stored/"))
        if "/resolve/" not in path:
            return self.answer({"error": "Not found"}, 404)
        name, _, file = path[1:].partition("/resolve/")
        file = file.partition("/")[2]
        content = self.server.repositories[name][file]
        if self.command == "GET":
            self.server.asked_for.append(file)
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        if not file.endswith(".safetensors"):
            return self.answer(content, ETag=etag, X_Repo_Commit=COMMIT)
        # for the client another machine
        place = f"http://localhost:{self.server.server_port}/stored/{name}/{file}"
        of_file = {
            "X-Linked-Etag": etag,
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": COMMIT,
            "Location": place,
        }
        xet = {"X-Xet-Hash": "0" * 64, "Link": f'<{self.server.address}/api/xet>; rel="xet-auth"'}
        return self.answer(f"Found. It is at {place}".encode() * 50, 302, **of_file, **xet)

    def stored(self, place: str) -> None:
        """Send a large file, as the hub's store does."""
        organisation, name, file = place.split("/", 2)
        content = self.server.repositories[f"{organisation}/{name}"][file]
        self.answer(content[self.start :], 206 if self.start else 200, ETag='"of-a-store-12"')

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty hub until the block ends."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
