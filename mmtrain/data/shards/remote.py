"""Tars in object stores, on web servers and on the Hugging Face hub.

URLs --`remote_tars`--> RemoteTar: size and version; its index, if the store has it, in the cache
RemoteTar --open--> its bytes, read forward

Only a process of its own talks to stores (`store`). Their client does not survive a fork, so no
process that forks may import it. Ranks read copies, which `stream.fetcher` makes.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.base.printing import disclosed
from mmtrain.runtime.child import python_child

_log = logging.getLogger(__name__)
SCHEMES = ("s3", "gs", "az", "https", "http", "hf")
WEB = ("https", "http")
# what other tools call the same stores
_OTHER_NAMES = {
    **dict.fromkeys(("s3a", "s3n"), "s3"),
    **dict.fromkeys(("gcs", "gc"), "gs"),
    **dict.fromkeys(("abfs", "abfss", "adl", "azure", "wasb", "wasbs"), "az"),
}
_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, order=True)
class RemoteTar:
    """A tar that a store holds. It has the methods of a Path that readers of shards call."""

    url: str
    size: int  # bytes
    version: str  # changes when the object is replaced
    index_version: str  # of URL.index; empty if the store has none

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def index(self) -> Path:
        """Path of its index in the cache: a copy of URL.index if the store has it, else made."""
        name = hashlib.sha256(f"{self.url} {self.index_version}".encode()).hexdigest()[:24]
        return cache_folder("index") / f"{name}.index"

    def stat(self) -> SimpleNamespace:
        """Return the size, and a number of its version as the time of the last change."""
        version = hashlib.sha256(self.version.encode()).hexdigest()
        return SimpleNamespace(st_size=self.size, st_mtime_ns=int(version[:15], 16))

    def absolute(self) -> Self:
        return self

    def resolve(self) -> Self:
        return self

    def open(self, mode: str = "rb", buffering: int = -1) -> "RemoteStream":
        """Open it for reading forward; the arguments are those of `Path.open`, without effect."""
        return RemoteStream(self.url, 0, self.size)


Tar = Path | RemoteTar


def is_remote(name: str) -> bool:
    """Tell whether a name of shards is the URL of a store."""
    return name.partition("://")[0] in SCHEMES


def refuse_unfit_url(url: str, key: str) -> None:
    """Raise UserError for a URL that no store can answer. A path passes."""
    scheme, _, rest = url.partition(":")
    shown = repr(disclosed(url))
    place = rest[2:]
    host, _, path = place.partition("/")
    names = url
    if rest.startswith("//"):
        names = path  # a host may be [::1]
    if "::" in names and not Path(url).exists():
        raise UserError(f"{key}: {shown} joins names by ::. Write a list of names")
    if not rest.startswith("//"):
        if scheme in SCHEMES:
            raise UserError(f"{key}: {scheme}: begins a URL. Write {scheme}://, with two slashes")
        return
    if scheme == "file":
        raise UserError(f"{key}: {shown} is a local file. Write its path alone")
    if scheme not in SCHEMES:
        advice = f"{', '.join(f'{name}://' for name in SCHEMES)} are read"
        if scheme in _OTHER_NAMES:
            advice = f"Write {_OTHER_NAMES[scheme]}://BUCKET_OR_CONTAINER/PATH"
        elif scheme == "msc":
            advice = "Write the store's own URL, for example s3://BUCKET/FOLDER"
        raise UserError(f"{key}: {shown} has an unknown scheme. {advice}")
    if "@" in host:
        raise UserError(
            f"{key}: {shown} has a login, which records would show. "
            "Give credentials by the environment or the store's own files"
        )
    if "${" in url:
        raise UserError(f"{key}: {shown}: variables are filled in in paths, not in URLs")
    if scheme == "hf":
        kind, *parts = place.split("/")
        if kind != "datasets" or len(parts) < 3 or not all(parts[:2]):
            raise UserError(
                f"{key}: {shown} names no files of a data set. "
                "Write hf://datasets/ORG/NAME/PATH or hf://datasets/ORG/NAME@REVISION/PATH"
            )
    elif not host or (scheme in WEB and not path):
        raise UserError(f"{key}: {shown} names no object. Write {scheme}://HOST_OR_BUCKET/PATH")
    if scheme not in WEB:
        return
    if "?" in url or "#" in url:
        raise UserError(
            f"{key}: {shown} has a query, as signed URLs do, which is not sent. Use the store's "
            "own URL (s3://, gs://, az://, hf://) with credentials, or pipe:curl -sSf URL"
        )
    if "*" in path or "[" in path or url.endswith("/"):
        raise UserError(
            f"{key}: {shown}: a web server does not list its files. "
            "Name them, for example by a brace range: shard-{000000..000099}.tar"
        )
    if "/datasets/" in url and ("/blob/" in url or "/tree/" in url):
        raise UserError(
            f"{key}: {shown} is a page of the hub, not a file. Write hf://datasets/ORG/NAME/PATH"
        )


def remote_tars(names: Sequence[str], key: str) -> list[RemoteTar]:
    """Return the tars that URLs name, and copy their indexes into the cache.

    A URL names an object or a folder, or has wildcards. `key` is the configuration's name for the
    URLs. Raises UserError for what a store refuses or does not have.
    """
    for name in names:
        refuse_unfit_url(name, key)
    with _store_process("describe") as process:
        process.stdin.write(json.dumps(names).encode())
        process.stdin.close()
        reply: dict[str, Any] = {}
        for line in process.stdout:
            reply = json.loads(line)
            if "note" in reply:
                _log.info(f"{key}: {reply['note']}")
        if process.wait() != 0:
            raise UserError(f"{key}: {_words_of(process)}")
    return [RemoteTar(*fields) for fields in reply["tars"]]


def _store_process(act: str) -> subprocess.Popen:
    """Start a process that talks to stores. Raises UserError where their client is missing."""
    if importlib.util.find_spec("obstore") is None:
        raise UserError("shards from URLs need obstore. Run pip install 'mmtrain[remote]'")
    child = python_child("-m", "mmtrain.data.shards.store", act)
    child |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(**child)


def _words_of(process: subprocess.Popen) -> str:
    """Return the last line that a failed process has written to stderr."""
    words = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    return words or f"the process that asks the store ended with {process.returncode}"


class RemoteStream:
    """Bytes [begin, end) of a URL, which a process of its own fetches and hands over.

    They can be read forward only. Bytes that are skipped are fetched, too. Reading raises OSError
    if the store fails.
    """

    def __init__(self, url: str, begin: int, end: int) -> None:
        self._url = url
        self._end = end
        self._process: subprocess.Popen | None = None
        self._given = begin  # end of what the process has handed over
        self._wanted = begin  # the next byte to read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.__exit__(None, None, None)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 2:
            offset += self._end
        self._wanted = offset
        return offset

    def read(self, size: int) -> bytes:
        if self._process is None:
            self._process = _store_process("read")
            self._process.stdin.write(json.dumps([self._url, self._given]).encode())
            self._process.stdin.close()
        assert self._wanted >= self._given, "it is read forward only"
        # Skip what lies before the wanted byte.
        while skipped := min(self._wanted - self._given, _CHUNK):
            self._take(skipped)
        content = self._take(min(size, self._end - self._wanted))
        self._wanted = self._given
        return content

    def _take(self, size: int) -> bytes:
        content = self._process.stdout.read(size)
        self._given += len(content)
        if len(content) < size:
            self._process.wait()
            words = _words_of(self._process).removeprefix(f"{self._url}: ")
            raise OSError(errno.EIO, words, self._url)
        return content
