"""Ask stores for tars: a process of its own, since obstore, their client, does not survive a fork.

    python -m mmtrain.data.shards.store describe
        names as JSON on stdin --> {"tars": [[URL, size, version, version of its index], ...]}
        on stdout, and copies of the indexes in the cache
    python -m mmtrain.data.shards.store read
        [URL, offset] on stdin --> the bytes from there on

Credentials come from the environment, the store's own files and the hub's token. They are in no
argument and no output. A failure is one line on stderr, and exit code 1.
"""

import configparser
import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import obstore
from obstore.exceptions import BaseError, NotSupportedError
from obstore.store import AzureStore, GCSStore, HTTPStore, ObjectStore, S3Store

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.data.shards.remote import WEB, RemoteTar
from mmtrain.runtime.child import die_with_parent

THREADS = 16
HUB_NAMES = 500  # files that the hub is asked about at once
# seconds for which a failed request is tried again
IMPATIENT = 5.0  # as a run begins, where a name may be wrong
PATIENT = 60.0  # while a whole tar is read
_SECONDS_BETWEEN_NOTES = 5.0
_PAUSE = 0.1  # seconds, after an answer that was cut off
_MISSING = 404  # HTTP's codes
_DENIED = (401, 403)
_BEYOND = 416
_METADATA = "169.254.169.254"  # the clouds' host, which obstore asks when it has no credentials
# why a host cannot be reached, in the text of an error of obstore
_CAUSE = re.compile(r'(?<=message: ")[^"]+|InvalidCertificate\(\s*\w+|TimedOut|TooManyRedirects')
_WILDCARD = re.compile(r"[*?\[]")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials; "
    "for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login; "
    "for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or "
    "AZURE_STORAGE_SAS_TOKEN; for a public container AZURE_SKIP_SIGNATURE=true",
    "hf": "a token that may read the data set: hf auth login, or HF_TOKEN",
}
Objects = dict[str, tuple[int, str]]  # path -> size in bytes, version


class StoreError(UserError):
    """A store's refusal, as one line for people; `code` is HTTP's, 0 if there is none."""

    code = 0

    @classmethod
    def of(cls, error: Exception, url: str) -> Self:
        """Describe an error of obstore or huggingface_hub: what was seen, what to do."""
        text = str(error).partition("Debug source")[0]
        code = getattr(getattr(error, "response", None), "status_code", 0)
        if status := re.search(r"status code: (\d+)", text):
            code = int(status[1])
        if isinstance(error, FileNotFoundError):
            code = 404
        needed = _CREDENTIALS.get(url.partition("://")[0], "the store's own URL, and credentials")
        kind = type(error).__name__  # tells errors of huggingface_hub apart: its import takes 0.2 s
        # obstore writes the request, " - ", the failure, and then a page of its own structures
        line = text.rpartition(" - ")[2].strip().partition("\n")[0]
        cause = _CAUSE.search(str(error))
        if cause is not None and cause[0] not in line:
            line += f" ({cause[0]})"
        seen = f"cannot be read: {escape(line)}"
        if isinstance(error, NotSupportedError):
            seen = "its server ignores ranges of bytes. Use another server, or download the file"
        elif _METADATA in text:
            seen = f"no credentials were found. Needed: {needed}"
        elif "NoSuchBucket" in text:
            seen = "there is no such bucket. Correct its name, or the endpoint"
        elif kind == "RevisionNotFoundError":
            seen = "there is no such revision. Correct what follows @"
        elif kind == "RepositoryNotFoundError":
            seen = f"there is no such data set, or access is denied (HTTP {code}). Needed: {needed}"
        elif code in _DENIED:
            seen = f"access is denied (HTTP {code}). Needed: {needed}"
        elif code == _MISSING:
            seen = "there is no such object. Correct the name"
        made = cls(f"{url}: {seen}")
        made.code = code
        return made


def located(url: str) -> tuple[str, str]:
    """Split a URL into the root of its store and the object's path there."""
    scheme, _, place = url.partition("://")
    parts = place.split("/")
    names = 3 if scheme == "hf" else 1
    path = "/".join(parts[names:])
    if scheme in WEB:
        path = unquote(path)
    return f"{scheme}://{'/'.join(parts[:names])}", path


@functools.cache
def store_of(root: str, retry_seconds: float = IMPATIENT) -> ObjectStore:
    """Open the store with this root."""
    scheme, _, place = root.partition("://")
    # `timeout` bounds a whole request, and a tar may take long; `read_timeout` bounds each read.
    options: dict[str, Any] = {
        "allow_http": True,
        "timeout": timedelta(hours=1),
        "read_timeout": timedelta(seconds=30),
    }
    settings: Any = {
        "client_options": options,
        "retry_config": {"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_seconds)},
    }
    if scheme == "s3":
        files = _aws_files()
        endpoint = os.environ.get("AWS_ENDPOINT_URL", files.get("endpoint_url", "https://"))
        if not endpoint.startswith(("http://", "https://")):  # the client would panic
            raise StoreError(f"AWS_ENDPOINT_URL: {endpoint!r} is no URL. Write https:// before it")
        return S3Store(place, config=files, **settings)
    if scheme == "gs":
        return GCSStore(place, **settings)
    if scheme == "az":
        return AzureStore(place, **settings)
    if scheme == "hf":
        from huggingface_hub import constants, get_token  # 0.2 s

        name, revision = _data_set(root)
        root = f"{constants.ENDPOINT}/datasets/{name}/resolve/{quote(revision, safe='')}"
        if token := get_token():
            options["default_headers"] = {"Authorization": f"Bearer {token}"}
    return HTTPStore.from_url(root, **settings)


def _data_set(root: str) -> tuple[str, str]:
    """Return ORG/NAME and the revision of a data set on the hub."""
    name, _, revision = root.removeprefix("hf://datasets/").partition("@")
    return name, revision or "main"


def _aws_files() -> dict[str, str]:
    """Return settings of ~/.aws, which obstore does not read, but for those in the environment."""
    files = configparser.ConfigParser(interpolation=None)
    for variable, name in (("CONFIG_FILE", "config"), ("SHARED_CREDENTIALS_FILE", "credentials")):
        path = os.environ.get(f"AWS_{variable}", f"~/.aws/{name}")
        files.read(Path(path).expanduser())
    profile = os.environ.get("AWS_PROFILE", "default")
    names = ["region", "endpoint_url"]
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        names += ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
    config = {}
    for section in (f"profile {profile}", profile):
        for name in names:
            variable = f"AWS_{name.removeprefix('aws_').upper()}"
            if files.has_option(section, name) and variable not in os.environ:
                config[name] = files[section][name]
    return config


@contextlib.contextmanager
def _refusals(url: str) -> Iterator[None]:
    """Raise StoreError in place of the errors of obstore."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise StoreError.of(error, url) from error


def describe(names: Sequence[str]) -> list[RemoteTar]:
    """Return the tars that URLs name, in order, and copy their indexes into the cache.

    A name is the URL of an object or a folder, or has wildcards. Raises StoreError.
    """
    # A name that may be an object is asked for, with its index: all names of a store together.
    # Names of objects may hold wildcards.
    paths: dict[str, list[str]] = {}  # by root
    for name in names:
        root, path = located(name)
        of_root = paths.setdefault(root, [])
        if path and not path.endswith("/"):
            of_root += [path, f"{path}.index"]
    found = {root: _objects(root, of_root) for root, of_root in paths.items()}

    # Any other name is a folder or has wildcards: its objects are listed.
    tars = []
    for name in names:
        root, path = located(name)
        objects = found[root]
        urls = {path: name}
        if path not in objects:
            objects = _listed(root, path, name)
            urls = {each: f"{root}/{each}" for each in sorted(objects) if each.endswith(".tar")}
        for each, url in urls.items():
            index_bytes, index_version = objects.get(f"{each}.index", (0, ""))
            tar = RemoteTar(url, *objects[each], index_version)
            if index_bytes > tar.size:
                raise StoreError(f"{url}.index: is larger than its tar. Make it again")
            if not url.isprintable():
                raise StoreError(f"{url!r}: the name holds control characters. Rename the object")
            tars.append(tar)

    # One byte of each store is read: a server that ignores ranges, or credentials that may list
    # objects but not read them, fail here, before a run starts.
    for root in found:
        first = next((tar for tar in tars if located(tar.url)[0] == root and tar.size), None)
        if first is not None:
            read_range(first.url, 0, 1)
    _copy_indexes([tar for tar in tars if tar.index_version and not tar.index.is_file()])
    return tars


def _objects(root: str, paths: Sequence[str]) -> Objects:
    """Return the objects, of these paths, that the store has."""
    found: Objects = {}
    if root.startswith("hf:"):
        for begin in range(0, len(paths), HUB_NAMES):
            found |= _hub_files(root, "get_paths_info", paths[begin : begin + HUB_NAMES])
        return found

    def head(path: str) -> None:
        url = f"{root}/{path}"
        try:
            with _refusals(url):
                found[path] = _described(obstore.head(store_of(root), path))
        except StoreError as error:
            # Without the right to list a bucket, S3 denies access to what is not there.
            is_index = path.endswith(".index")
            if not (error.code == _MISSING or (is_index and error.code in _DENIED)):
                raise

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(head, paths):
            pass
    return found


def _described(about: Any) -> tuple[int, str]:
    """Return size and version of an object, from obstore's description."""
    return about["size"], f"{about['e_tag']} {about['last_modified']}"


def _hub_files(root: str, question: str, *about: Any, **more: Any) -> Objects:
    """Return the files in the hub's answer; `question` is the name of a method of HfApi."""
    from huggingface_hub import HfApi, errors  # 0.2 s

    name, revision = _data_set(root)
    ask = getattr(HfApi(), question)
    try:
        files = list(ask(name, *about, revision=revision, repo_type="dataset", **more))
    except (errors.HTTPError, ValueError) as error:
        raise StoreError.of(error, root) from error
    return {file.path: (file.size, file.blob_id) for file in files if hasattr(file, "size")}


def _listed(root: str, path: str, name: str) -> Objects:
    """Return the tars and indexes that a folder or a path with wildcards names.

    Raises StoreError if there is no tar.
    """
    if root.partition("://")[0] in WEB:
        raise StoreError(f"{name}: there is no such object. Correct the name")
    wildcard = _WILDCARD.search(path)
    pattern = path
    if wildcard is None:
        pattern = f"{path.rstrip('/')}/*.tar".lstrip("/")
    prefix = pattern[: _WILDCARD.search(pattern).start()].rpartition("/")[0]
    objects: Objects = {}
    if root.startswith("hf:"):
        objects = _hub_files(root, "list_repo_tree", prefix or None, recursive=True)
    else:
        with _refusals(name):
            for chunk in obstore.list(store_of(root), f"{prefix}/" if prefix else None):
                for about in chunk:
                    objects[about["path"]] = _described(about)
    parts = pattern.split("/")
    fitting: Objects = {}
    for each, description in objects.items():
        own = each.removesuffix(".index").split("/")
        if len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            fitting[each] = description
    if not any(each.endswith(".tar") for each in fitting):
        if wildcard is None and not objects:
            raise StoreError(f"{name}: there is no such object. Correct the name")
        raise StoreError(f"{name}: no object *.tar among {len(objects):,}. Name others")
    return fitting


def _copy_indexes(tars: Sequence[RemoteTar]) -> None:
    """Copy the indexes of these tars into the cache. Readers of an index check its content."""
    noted = time.monotonic()

    def copy(tar: RemoteTar) -> None:
        url = f"{tar.url}.index"
        root, path = located(url)
        with _refusals(url):
            content = obstore.get(store_of(root), path).bytes()
        try:
            tar.index.parent.mkdir(parents=True, exist_ok=True)
            write_whole(tar.index, bytes(content))
        except OSError as error:
            raise StoreError(
                f"{tar.index}: cannot be written ({error.strerror}). Free space, "
                "or set XDG_CACHE_HOME to a folder that can be written"
            ) from error

    with ThreadPoolExecutor(THREADS) as pool:
        for done, _ in enumerate(pool.map(copy, tars), 1):
            if time.monotonic() - noted > _SECONDS_BETWEEN_NOTES:
                noted = time.monotonic()
                _reply(note=f"{done:,} of {len(tars):,} indexes copied into the cache")


def read_range(url: str, begin: int, end: int, retry_seconds: float = IMPATIENT) -> memoryview:
    """Return bytes [begin, end) of an object, fewer if it ends before. Raises StoreError."""
    root, path = located(url)
    store = store_of(root, retry_seconds)
    deadline = time.monotonic() + retry_seconds
    while True:
        try:
            with _refusals(url):
                return memoryview(obstore.get_range(store, path, start=begin, end=end))
        except StoreError as error:
            if error.code == _BEYOND:
                return memoryview(b"")
            # obstore repeats an answer that was cut off only if the server gives an ETag.
            is_cut = "response body" in str(error)
            if not is_cut or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def _reply(**values: Any) -> None:
    sys.stdout.write(f"{json.dumps(values)}\n")
    sys.stdout.flush()


def main(act: str) -> None:
    """Do what the parent process asks for on stdin: `describe` or `read`."""
    die_with_parent()
    asked = json.load(sys.stdin)
    try:
        if act == "describe":
            _reply(tars=[list(vars(tar).values()) for tar in describe(asked)])
            return
        url, offset = asked
        root, path = located(url)
        with _refusals(url):
            options: Any = {"range": {"offset": offset}}
            stream = obstore.get(store_of(root, PATIENT), path, options=options)
            for chunk in stream.stream(min_chunk_size=1 << 20):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    except StoreError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
