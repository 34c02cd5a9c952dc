"""Shards from URLs, asked of servers on 127.0.0.1 (`stores`): a web server, SeaweedFS' S3, a hub."""

import ast
import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from archives import conversation, picture, write_tar
from processes import ran_python
from stores import KEY, SECRET, TOKEN, DataHub, Faults, WebServer, serving, with_tls

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards import remote
from mmtrain.data.shards.index import index_path, read_index
from mmtrain.data.shards.indexing import build_indexes, ensure_indexes, index_headers
from mmtrain.data.shards.remote import remote_tars
from mmtrain.data.shards.shard_list import expand_shards, refuse_empty_shards

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

PLAIN = Tokenization("demo:llm", "plain")
READING = ("example:llava_pp4", "data.template=plain", "data.format=llava")
LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True)
def stores_of_nobody(tmp_path, monkeypatch):
    """No credentials and no endpoint of whoever runs the tests, and none from a cloud's machine."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    files = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    for name in files:
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{LOCAL}:9")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{LOCAL}:9")


def shard(path: Path, seed: int, samples: int = 6, side: int = 5, unread: int = 9) -> Path:
    files = []
    for number in range(samples):
        key = f"{seed}-{number}"
        files.append((f"{key}.json", conversation("<image>\nWhat?", f"It is {'x' * number}.")))
        files.append((f"{key}.png", picture(side + number, side)))
        files.append((f"{key}.bin", random.Random(number).randbytes(unread)))
    return write_tar(path, files)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder org/set/train with four shards, the first two of them with an index."""
    root = tmp_path_factory.mktemp("made")
    folder = root / "org" / "set" / "train"
    (folder / "inside").mkdir(parents=True)
    tars = [shard(folder / f"s-{number:02}.tar", number) for number in (0, 1, 2, 10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        build_indexes(tars[:2], PLAIN)
    shard(folder / "inside" / "deep.tar", 99)
    (folder / "notes.txt").write_text("no tar")
    (folder / "empty.tar.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    return root


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the folder, to be changed."""
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store" / "org" / "set" / "train"


@pytest.fixture
def web(folder):
    with serving(WebServer(folder)) as server:
        yield server


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    with serving(WebServer(folder.parents[2])) as files, serving(DataHub(files)) as server:
        for name, value in server.environment(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def bucket(made, s3):
    s3.upload(made / "org" / "set", "bucket")
    return s3


@pytest.fixture
def at_s3(bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


def names(shards) -> list[str]:
    return [tar.name for tar in expand_shards(shards)]


def paths(server) -> list[str]:
    """Return the paths that a server was asked for, and clear its record."""
    asked = [one.path for one in server.requests]
    server.requests.clear()
    return asked


@pytest.mark.parametrize("store", ["s3", "hub"])
def test_objects_globs_folders_and_braces_of_a_store_expand_in_order(request, store):
    request.getfixturevalue("at_s3" if store == "s3" else "hub")
    root = "s3://bucket" if store == "s3" else "hf://datasets/org/set"
    every = [f"{root}/train/s-{number}.tar" for number in ("00", "01", "02", "10")]
    forms = ("/train", "/train/", "/train/*.tar", "/*/*.tar", "/tr*/s-*.tar")
    found = remote_tars([f"{root}{form}" for form in forms], "data.shards")
    assert [str(tar) for tar in found] == every * len(forms)

    found = remote_tars([f"{root}/train/{form}" for form in ("s-0?.tar", "s-[01]0.tar")], "")
    assert [str(tar) for tar in found] == [*every[:3], every[0], every[3]]
    shards = (every[3], f"{root}/train/s-{{02..00}}.tar")
    assert [str(tar) for tar in expand_shards(shards)] == every[::-1]
    with pytest.raises(UserError, match=r"s-00\.tar is named twice"):
        expand_shards((every[0], f"{root}/train/"))


def test_a_host_may_be_an_address_with_colons():
    remote.refuse_unfit_url("http://[::1]:9/a.tar", "data.shards")


def test_a_bucket_is_a_folder_itself(made, at_s3):
    at_s3.upload(made / "org" / "set" / "train", "rooted")
    for name in ("s3://rooted", "s3://rooted/", "s3://rooted/*.tar"):
        assert names(name) == ["s-00.tar", "s-01.tar", "s-02.tar", "s-10.tar"]


def test_a_web_server_gives_names_and_braces_in_order_also_escaped_ones(web, folder):
    assert names(f"{web.address}/s-{{02..00}}.tar") == ["s-02.tar", "s-01.tar", "s-00.tar"]
    for name, escaped in {"a b.tar": "a%20b.tar", "[a]*?.tar": "%5Ba%5D%2A%3F.tar"}.items():
        shutil.copy(folder / "s-00.tar", folder / name)
        (tar,) = expand_shards(f"{web.address}/{escaped}")
        assert tar.size == (folder / name).stat().st_size
        with tar.open() as stream:
            assert stream.read(tar.size) == (folder / name).read_bytes()


def test_a_store_that_fails_after_it_was_asked_says_why(web, folder):
    (tar,) = expand_shards(f"{web.address}/s-02.tar")
    (folder / "s-02.tar").unlink()
    with pytest.raises(UserError, match=r"s-02\.tar: cannot be read \(there is no such object"):
        build_indexes([tar], PLAIN)
    with pytest.raises(OSError) as refused:
        refuse_empty_shards([tar])
    assert refused.value.filename == tar.url  # as the commands name it


@pytest.mark.nightly
def test_tls_is_spoken_and_why_a_host_cannot_be_reached_is_said_in_seconds(
    folder, tmp_path, monkeypatch
):
    with serving(with_tls(WebServer(folder), tmp_path / "ca.pem")) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert names(f"{server.address}/s-00.tar") == ["s-00.tar"]
        monkeypatch.delenv("SSL_CERT_FILE")
        # each is tried for 5 s
        with ThreadPoolExecutor() as pool:
            answers = [
                (f"{server.address}/s-00.tar", r"cannot be read: .*\(InvalidCertificate"),
                (f"http://{LOCAL}:9/a.tar", r"cannot be read: .*\(Connection refused\)"),
            ]
            for answer in [pool.submit(check_answer, *answer) for answer in answers]:
                answer.result()


def test_an_index_in_the_store_is_copied_once_and_anew_when_it_was_replaced(web, folder):
    url = f"{web.address}/s-{{00..02}}.tar"
    tars = expand_shards(url)
    assert [tar.index.is_file() for tar in tars] == [True, True, False]
    for number in (0, 1):
        beside = folder / f"s-{number:02}.tar.index"
        assert index_path(tars[number]).read_bytes() == beside.read_bytes()
    headers, missing = index_headers(tars, PLAIN.fingerprint)
    assert len(headers) == 2 and missing == [tars[2]]

    paths(web)
    assert expand_shards(url) == tars
    gets = [asked.path for asked in web.requests if asked.method == "GET"]
    assert gets == ["/s-00.tar"]  # one byte

    changed = folder / "s-01.tar.index"
    os.utime(changed, ns=(1, 10**18))
    again = expand_shards(url)
    assert again[1].index != tars[1].index and again[1].index.is_file()
    assert [again[0], again[2]] == [tars[0], tars[2]]


def test_a_cache_that_cannot_be_written_is_named(web, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check_answer(f"{web.address}/s-00.tar", r"index: cannot be written \(Not a directory\)\. Free")


def test_a_damaged_or_stale_index_of_a_store_is_refused_by_its_shards_url(web, folder):
    beside = folder / "s-00.tar.index"
    content = bytearray(beside.read_bytes())
    content[-5] ^= 1
    beside.write_bytes(content)
    shutil.copy(folder / "s-01.tar.index", folder / "s-02.tar.index")
    shard(folder / "s-02.tar", 2, samples=60)
    (damaged,) = expand_shards(f"{web.address}/s-00.tar")
    with pytest.raises(UserError, match=rf"damaged.*{re.escape(str(damaged))}"):
        read_index(damaged)
    (stale,) = expand_shards(f"{web.address}/s-02.tar")
    with pytest.raises(UserError, match=rf"stale.*{re.escape(str(stale))}"):
        ensure_indexes([stale], PLAIN)


def test_a_shard_is_indexed_from_its_stream_as_a_local_one_also_while_requests_fail(
    folder, tmp_path
):
    tars = [shard(folder / f"big-{n}.tar", n, 4, unread=900_000) for n in range(2)]
    tars += [folder / "s-02.tar", folder / "s-10.tar"]
    with serving(WebServer(folder)) as server:
        found = expand_shards([f"{server.address}/{tar.name}" for tar in tars])
        server.faults = faults = Faults(fail=0.4, cut=0.7)
        ensure_indexes(found, PLAIN, workers=1)
        assert faults.failed > 0 and faults.was_cut > 0
        here = [Path(shutil.copy(tar, tmp_path)) for tar in tars]
        ensure_indexes(here, PLAIN, workers=1)
        for own, there in zip(here, found, strict=True):
            assert index_path(there).read_bytes() == index_path(own).read_bytes()
        server.faults = Faults()
        paths(server)
        again = expand_shards([f"{server.address}/{tar.name}" for tar in tars])
        ensure_indexes(again, PLAIN)
        gets = [asked for asked in server.requests if asked.method == "GET"]
        assert [asked.path for asked in gets] == ["/big-0.tar"]  # one byte


def test_a_shard_that_ends_early_is_refused_by_its_url_and_what_is_wrong(web, folder):
    content = (folder / "s-00.tar").read_bytes()
    (folder / "cut.tar").write_bytes(content[:1100])
    (tar,) = expand_shards(f"{web.address}/cut.tar")
    with pytest.raises(UserError) as refused:
        ensure_indexes([tar], PLAIN)
    (folder / "here.tar").write_bytes(content[:1100])
    with pytest.raises(UserError) as local:
        ensure_indexes([folder / "here.tar"], PLAIN)
    assert str(refused.value).replace(tar.url, "X") == str(local.value).replace(
        str(folder / "here.tar"), "X"
    )


def test_the_commands_read_remote_shards(web, folder, capsys):
    url = f"{web.address}/s-{{00..02}}.tar"
    assert main(["index", *READING[:2], url, "--workers", "1"]) == 0
    assert "2 of 3 shards are ready" in capsys.readouterr().out
    assert main(["index", *READING, url]) == 0
    assert "3 of 3 shards are ready" in capsys.readouterr().out

    assert main(["inspect", *READING, url, "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["inspect", *READING, f"{folder}/s-{{00..02}}.tar", "--json"]) == 0
    assert there == json.loads(capsys.readouterr().out)
    assert there["samples"] == 18

    assert main(["inspect", url]) == 0
    assert "18 samples" in capsys.readouterr().out

    assert main(["inspect", *READING, url, "--show", "1-3"]) == 0
    shown = capsys.readouterr().out
    assert f"{web.address}/s-01.tar" in shown and "It is xxx." in shown

    assert main(["inspect", url, "--verify"]) == 0
    content = bytearray((folder / "s-01.tar").read_bytes())
    content[content.index(b"xxx")] ^= 1
    about = (folder / "s-01.tar").stat()
    (folder / "s-01.tar").write_bytes(content)
    os.utime(folder / "s-01.tar", ns=(about.st_atime_ns, about.st_mtime_ns))
    capsys.readouterr()
    assert main(["inspect", url, "--verify"]) == 1
    assert "1-3" in capsys.readouterr().out


def test_the_token_of_the_hub_reaches_the_hub_alone(hub, folder):
    hub.private.add("org/set")
    tars = expand_shards("hf://datasets/org/set@main/train/")
    ensure_indexes(tars, PLAIN, workers=1)
    with tars[0].open() as stream:
        assert stream.read(600) == (folder / "s-00.tar").read_bytes()[:600]
    assert {asked.authorization for asked in hub.requests} == {f"Bearer {TOKEN}"}
    assert len(hub.files.requests) > 4
    assert {asked.authorization for asked in hub.files.requests} == {""}


def test_secrets_of_aws_files_are_read_and_the_environment_goes_first(at_s3, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = wrong\naws_secret_access_key = wrong\n"
        f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = us-east-1\nendpoint_url = {at_s3.address}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert names("s3://bucket/train/s-00.tar") == ["s-00.tar"]  # by the environment's key

    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("KEY", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert names("s3://bucket/train/s-00.tar") == ["s-00.tar"]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UserError, match="access is denied"):
        expand_shards("s3://bucket/train/s-00.tar")


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("{web}/s-*.tar", "a web server does not list its files. Name them"),
        ("{web}/", "names no object"),
        ("{web}/inside/", "a web server does not list its files. Name them"),
        ("s3a://bucket/train", "unknown scheme. Write s3://BUCKET_OR_CONTAINER/PATH"),
        ("abfss://box@account.dfs.core.windows.net/train", "Write az://BUCKET_OR_CONTAINER/PATH"),
        ("msc://profile/train", "Write the store's own URL, for example s3://BUCKET/FOLDER"),
        ("ftp://host/a.tar", "s3://, gs://, az://, https://, http://, hf:// are read"),
        ("s3:/bucket/a.tar", "Write s3://, with two slashes"),
        ("file:///data/a.tar", "is a local file. Write its path alone"),
        ("s3://", "names no object. Write s3://HOST_OR_BUCKET/PATH"),
        ("s3://${{BUCKET}}/a.tar", "variables are filled in in paths, not in URLs"),
        ("a.tar::b.tar", "joins names by ::. Write a list of names"),
        ("{web}/a.tar::{web}/b.tar", "joins names by ::. Write a list of names"),
        ("hf://org/set/train", "Write hf://datasets/ORG/NAME/PATH"),
        ("https://huggingface.co/datasets/org/set/blob/main/a.tar", "is a page of the hub"),
        ("{web}/s-00.tar?X-Amz-Signature=confidential", "has a query, as signed URLs do"),
        ("http://me:confidential@{host}/s-00.tar", "has a login"),
        ("{web}/none.tar", "none.tar: there is no such object. Correct the name"),
        ("{web}/notes.parquet", "is a file of records, not a webdataset tar"),
        ("{web}/notes.txt", r"notes\.txt: ends at byte 6 without an end of archive"),
        ("{web}/empty.tar.gz", r"empty\.tar\.gz: .*compressed"),
        ("{web}/a.zip", r"a\.zip: damaged tar header at byte 0"),
        ("{web}/nothing.tar", r"nothing\.tar is empty \(0 bytes\)"),
        ("{without_ranges}/s-00.tar", "its server ignores ranges of bytes. Use another server"),
        pytest.param(
            "hf://datasets/org/set@v9/train/*.tar",
            "there is no such revision",
            marks=pytest.mark.nightly,
        ),
        ("hf://datasets/org/set@v9/train/s-00.tar", "there is no such revision"),
        ("hf://datasets/org/sets/train/s-00.tar", "there is no such data set"),
        pytest.param(
            "hf://datasets/org/set/trai/", "there is no such object", marks=pytest.mark.nightly
        ),
        ("hf://datasets/org/set/", r"no object \*\.tar"),
        ("hf://datasets/org/set/train/none.tar", "there is no such object"),
    ],
)
def test_what_strangers_type_is_answered_in_seconds_by_what_is_needed(
    web, hub, folder, typed, answer
):
    (folder / "notes.parquet").write_bytes(b"PAR1" * 300)
    (folder / "a.zip").write_bytes(b"PK\3\4" + bytes(range(256)) * 9)
    (folder / "nothing.tar").touch()
    with serving(WebServer(folder, ranges=False)) as without_ranges:
        filled = typed.format(
            web=web.address,
            host=web.address.partition("://")[2],
            without_ranges=without_ranges.address,
        )
        check_answer(filled, answer)


def check_answer(typed: str, answer: str) -> None:
    """Ask the start of a run what it says, within 8 s: a host that does not answer is tried for 5."""
    start = time.monotonic()
    with pytest.raises(UserError) as refused:
        tars = expand_shards(typed, "data.shards")
        refuse_empty_shards(tars)
        ensure_indexes(tars, PLAIN, workers=1)
    message = str(refused.value)
    assert re.search(answer, message), message
    assert "\n" not in message and len(message) < 500
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("s3://bucket/none", "there is no such object"),
        ("s3://bucket/none/*.tar", "no object"),
        ("s3://bucket", r"no object \*\.tar"),
        ("s3://bucket/train/none.tar", "there is no such object"),
        ("s3://buckets/train", "there is no such bucket. Correct its name, or the endpoint"),
    ],
)
def test_what_is_not_in_s3_is_named(at_s3, typed, answer):
    check_answer(typed, rf"^data\.shards: {re.escape(typed)}: {answer}")


def test_a_wrong_key_of_s3_is_access_denied_with_the_variables_that_give_it(at_s3, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "confidential")
    for typed in ("s3://bucket/train", "s3://bucket/train/s-00.tar"):
        check_answer(typed, r"access is denied \(HTTP 403\). Needed: AWS_ACCESS_KEY_ID and")


def test_a_private_data_set_needs_a_token(hub, monkeypatch):
    hub.private.add("org/set")
    monkeypatch.setenv("HF_TOKEN", "")
    check_answer("hf://datasets/org/set/train/", "Needed: a token that may read the data set")


@pytest.mark.parametrize(
    ("typed", "variables", "answer"),
    [
        ("s3://bucket/a.tar", {"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "'127.0.0.1:9' is no URL"),
        ("az://box/a.tar", {}, "Account must be specified"),
        ("gs://box/a.tar", {"GOOGLE_APPLICATION_CREDENTIALS": "/none"}, "/none: No such file"),
        ("hf://datasets/org/set/a.tar", {"HF_TOKEN": "none"}, "Connection refused"),
        ("hf://datasets/org/set/*.tar", {"HF_HUB_OFFLINE": "1"}, "offline mode is enabled"),
        ("http://127.0.0.1:99999/a.tar", {}, "invalid port number"),
    ],
)
def test_stores_that_cannot_be_asked_are_refused_by_what_is_wrong(
    monkeypatch, typed, variables, answer
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_answer(typed, answer)


@pytest.mark.parametrize(
    ("url", "asked"), [("s3://b/a", "latest/api/token"), ("gs://b/a", "computeMetadata/v1")]
)
def test_without_credentials_the_variables_that_give_them_are_named(url, asked):
    """The error is made up: a client without credentials asks its cloud's machine for some."""
    error = f"Error performing PUT http://169.254.169.254/{asked} in 5s - HTTP error: sending"
    code = "import sys; from mmtrain.data.shards.store import StoreError\n"
    code += "print(StoreError.of(OSError(sys.argv[1]), sys.argv[2]))"
    said = ran_python("-c", code, error, url, timeout=60).stdout
    assert re.match(rf"{url}: no credentials were found. Needed: (AWS|GOOGLE)_\w+", said)


def test_without_obstore_the_extra_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        remote.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "obstore" else found(name, *more),
    )
    check_answer("s3://bucket/a.tar", r"need obstore. Run pip install 'mmtrain\[remote\]'")


@contextlib.contextmanager
def commands_seen():
    """Collect the command lines of all processes while the block runs."""
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_secret_is_in_messages_or_in_the_list_of_processes(at_s3, web, hub, monkeypatch, capsys):
    secrets = (SECRET, TOKEN, "confidential")
    host = web.address.partition("://")[2]
    with commands_seen() as seen:
        for typed in (
            "s3://bucket/train/",
            "s3://bucket/none",
            "hf://datasets/org/set/train/",
            "hf://datasets/org/none/train/",
            f"http://me:confidential@{host}/s-00.tar",
            f"{web.address}/s-00.tar?sig=confidential",
            f"http://me:confidential@{host}/s-00.tar?sig=confidential",
            f"ftp://me:confidential@{host}/s-00.tar",
            f"file://me:confidential@{host}/s-00.tar",
            f"http:me:confidential@{host}/s-00.tar?sig=confidential",
            f"{web.address}/a.tar?sig=confidential::b.tar",
            f"{web.address}/a.tar?sig=confidential&x={{",
            f"{web.address}/{{a,b}}.tar?sig=confidential",
        ):
            assert main(["index", *READING, typed, "--workers", "1"]) in (0, 2)
    printed = "".join(capsys.readouterr())
    assert any("mmtrain.data.shards.store" in command for command in seen)
    for secret in secrets:
        assert secret not in printed
        assert not [command for command in seen if secret in command and "pytest" not in command]


@pytest.mark.nightly
def test_no_process_that_forks_imports_the_client_of_stores():
    code = (
        "import sys\n"
        "import mmtrain.launch, mmtrain.training.loop, mmtrain.cli.index, mmtrain.cli.inspect\n"
        "import mmtrain.data.stream.loader, mmtrain.data.stream.fetching\n"
        "import mmtrain.exporting.verify, mmtrain.benchmarks.held_out\n"
        "assert not [name for name in sys.modules if name.startswith('obstore')]\n"
    )
    ran = ran_python("-c", code, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_nothing_that_is_imported_imports_the_client_of_stores():
    root = Path(remote.__file__).parents[3]
    importers = set()
    for file in (root / "mmtrain").rglob("*.py"):
        imported = {
            "obstore": "obstore",
            "mmtrain.data.shards.store": "store",
            "mmtrain.data.stream.fetcher": "fetcher",
        }
        for statement in ast.parse(file.read_text()).body:  # not those inside functions
            if isinstance(statement, ast.Import):
                modules = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                modules = [statement.module]
                modules += [f"{statement.module}.{alias.name}" for alias in statement.names]
            else:
                continue
            for module in modules:
                name = ".".join(module.split(".")[:1]) if module.startswith("obstore") else module
                if name in imported:
                    importers.add((file.relative_to(root).as_posix(), imported[name]))
    assert importers == {
        ("mmtrain/data/shards/store.py", "obstore"),
        ("mmtrain/data/stream/fetcher.py", "store"),
    }
