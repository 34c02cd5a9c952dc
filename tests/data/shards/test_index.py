import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_index import TABLES, Parts, compact, put_together

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.data.shards import index as index_module
from mmtrain.data.shards.index import (
    Member,
    MissingIndex,
    ShardIndex,
    TextLengths,
    index_path,
    read_header,
    read_index,
    read_tables,
    write_index,
)
from mmtrain.facts.tokenizer_files import text_fingerprint

BYTES = 4096  # of the tar


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def tar(tmp_path):
    path = tmp_path / "shard-000000.tar"
    path.write_bytes(bytes(BYTES))
    return path


def small_index() -> ShardIndex:
    return ShardIndex(
        tar_bytes=BYTES,
        keys=["a", "é/b", "c"],
        members=[
            (Member("json", 512, 3, 7), Member("jpg", 1536, 700, 2**32 - 1)),
            (Member("json", 3072, 0, 0),),
            (Member("json", 3584, 2, 1), Member("1.png", 4000, 2, 5), Member("0.png", 4010, 86, 9)),
        ],
        image_sizes=[((640, 480),), (), ((1, 2), (0, 0))],
        faults={"llava": {1: ("not_json", "Expecting value \u2028 \udce9")}, "caption": {}},
        texts={
            "f" * 16: TextLengths([12, 0, 300]),
            "0" * 16: TextLengths([9, 0, 0], {2: ("template", "why")}),
        },
    )


def test_what_is_written_is_read_back(tar):
    for index in (small_index(), ShardIndex(BYTES, [], [], [], {"llava": {}})):
        write_index(tar, index)
        assert read_index(tar) == index
        assert [path.name for path in sorted(tar.parent.iterdir())] == [
            tar.name,
            tar.name + ".index",
        ]


def test_the_file_is_as_its_format_says(tar):
    parts = two_samples()
    parts.faults = [["llava", 1, "no_answer", "é"]]
    parts.tables["feed"][1] = 0
    index_path(tar).write_bytes(put_together(parts))
    file = index_path(tar).read_bytes()
    index = read_index(tar)
    assert index == ShardIndex(
        BYTES,
        ["a", "b"],
        [(Member("json", 512, 3, 7), Member("jpg", 1536, 700, 8)), (Member("json", 3072, 1, 9),)],
        [((640, 480),), ()],
        {"llava": {1: ("no_answer", "é")}},
        {"feed": TextLengths([12, 0])},
    )
    write_index(tar, index)
    assert index_path(tar).read_bytes() == file


def test_equal_indexes_are_equal_bytes_whatever_was_put_in_first(tar):
    index = small_index()
    index.faults["llava"][0] = ("no_json", "x")
    write_index(tar, index)
    first = index_path(tar).read_bytes()
    index.texts = dict(reversed(index.texts.items()))
    index.faults = {
        name: dict(reversed(rows.items())) for name, rows in reversed(index.faults.items())
    }
    write_index(tar, index)
    assert index_path(tar).read_bytes() == first


def two_samples() -> Parts:
    """An index of two samples, one with an image, written by hand."""
    hashes = []
    for key in (b"a", b"b"):
        digest = hashlib.blake2b(key, digest_size=8, person=b"held out").digest()
        hashes.append(int.from_bytes(digest, "big"))
    rows = {
        "samples": [(hashes[0], 1, 2, 1), (hashes[1], 1, 1, 0)],
        "members": [(0, 512, 3, 7), (1, 1536, 700, 8), (0, 3072, 1, 9)],
        "images": [(640, 480)],
        "keys": list(b"ab"),
        "suffixes": list(b"json\0jpg\0"),
        "faults": [],
    }
    tables = {name: np.array(of_table, np.dtype(TABLES[name])) for name, of_table in rows.items()}
    header = {
        "format": "mmtrain shard index",
        "version": 4,
        "tar_bytes": BYTES,
        "readings": ["llava"],
        "texts": ["feed"],
    }
    return Parts(header, tables | {"feed": np.array([12, 6], "<u4")}, [])


def with_number(table: str, field: str | None, row: int, value: int) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        column = parts.tables[table]
        if field is not None:
            column = column[field]
        column[row] = value

    return change


def with_numbers(table: str, field: str, *values: int) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts.tables[table][field] = values

    return change


def with_faults(*rows: list) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts.faults = list(rows)

    return change


def without_last(*tables: str) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for name in tables:
            parts.tables[name] = parts.tables[name][:-1]

    return change


def with_suffixes(suffixes: bytes) -> Callable[[Parts], None]:
    return lambda parts: parts.tables.update(suffixes=np.frombuffer(suffixes, np.uint8))


def with_texts(texts: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.header.update(texts=texts)


WRONG = {
    "a key too few": (without_last("keys"), "keys"),
    "a key with a line end": (with_number("keys", None, 1, ord("\n")), "keys"),
    "a key that is no UTF-8": (with_number("keys", None, 1, 0xFF), "utf-8"),
    "an empty key": (with_number("samples", "keys", 0, 0), "keys"),
    "an empty key beside a longer one": (with_numbers("samples", "keys", 0, 2), "keys: a sample"),
    "more keys than there are": (with_number("samples", "keys", 0, 2**32 - 1), "keys"),
    "a sample without members": (with_numbers("samples", "members", 0, 3), "members: a sample"),
    "a member too few": (without_last("members"), "members"),
    "a member beyond the tar": (with_number("members", "offset", 2, BYTES), "members"),
    "an offset that overflows": (with_number("members", "offset", 2, 2**64 - 1), "members"),
    "a size that overflows": (with_number("members", "size", 0, 2**64 - 1), "members"),
    "a suffix that is none": (with_number("members", "suffix", 0, 2), "suffixes"),
    "a suffix with a control character": (with_number("suffixes", None, 0, 7), "suffixes"),
    "a suffix without an end": (without_last("suffixes"), "suffixes"),
    "an image too few": (without_last("images"), "images"),
    "a width below 0": (with_number("images", "width", 0, -1), "width"),
    "an image in the sample without": (with_numbers("samples", "images", 0, 1), "images: sample 0"),
    "no reading": (lambda parts: parts.header.update(readings=[]), "readings"),
    "a reading that is a number": (lambda parts: parts.header.update(readings=[2]), "readings"),
    "a fault twice": (with_faults(*[["llava", 0, "not_json", ""]] * 2), "faults"),
    "a fault without a reason": (with_faults(["llava", 0, "no such reason", ""]), "2: Input"),
    "a fault without a sample": (with_faults(["llava", 2, "not_json", ""]), "faults"),
    "a fault under another text": (with_faults(["f00d", 0, "not_json", ""]), "faults"),
    "a fault that is none": (with_faults([]), "Field required"),
    "a fault with a long detail": (with_faults(["llava", 0, "not_json", "x" * 2**16]), "JSON"),
    "more suffixes than members": (with_suffixes(b"json\0jpg\0" + b"a\0" * 2), "suffixes"),
    "lengths too few": (without_last("feed"), "bytes"),
    "no texts": (with_texts([]), "bytes"),
    "a text that is a number": (with_texts([2]), "texts"),
    "a text twice": (with_texts(["feed", "feed"]), "texts"),
    "a text with a table's name": (with_texts(["samples"]), "texts"),
}


@pytest.mark.parametrize(("change", "named"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_an_error_that_names_it_though_the_checksum_is_right(tar, change, named):
    parts = two_samples()
    index_path(tar).write_bytes(put_together(parts))
    assert read_index(tar).keys == ["a", "b"]
    change(parts)
    index_path(tar).write_bytes(put_together(parts))
    with pytest.raises(
        UserError, match=rf"^{tar}\.index: is damaged \(.*{named}.*--rebuild {tar}$"
    ) as caught:
        read_index(tar)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize("changed", [{"tables": {}}, {"tables": {"samples": 2}}, {"tar_bytes": -1}])
def test_a_first_line_that_cannot_be_is_an_error_that_names_the_file(tar, changed):
    index_path(tar).write_bytes(put_together(two_samples(), **changed))
    with pytest.raises(UserError, match=rf"^{tar}\.index: is damaged"):
        read_index(tar)


def test_json_nested_without_end_is_an_error_that_names_the_file(tar):
    parts = two_samples()
    deep = b"[" * 200_000 + b"]" * 200_000
    index_path(tar).write_bytes(deep + b"\n")
    with pytest.raises(UserError, match=rf"^{tar}\.index: is damaged"):
        read_index(tar)
    parts.faults = ["DEEP"]
    content = put_together(parts)
    line, _, body = content.partition(b"\n")
    header = json.loads(line)
    body = body.replace(b'"DEEP"', deep)
    header["tables"]["faults"] = len(deep) + 1
    del header["crc32"]
    header["crc32"] = zlib.crc32(body, zlib.crc32(compact(header)))
    index_path(tar).write_bytes(compact(header) + b"\n" + body)
    with pytest.raises(UserError, match=rf"^{tar}\.index: is damaged"):
        read_index(tar)


@pytest.mark.parametrize("read", [read_header, read_tables])
@pytest.mark.parametrize("wrong", ["cut", "flipped", "larger than any"])
def test_a_damaged_file_takes_no_more_memory_than_three_of_it(tar, read, wrong):
    many = range(20_000)
    index = ShardIndex(
        BYTES, [f"{n:09}" for n in many], [(Member("json", 512, 3, n),) for n in many],
        [()] * len(many), {"llava": {}}, {"feed": TextLengths([5] * len(many))},
    )  # fmt: skip
    write_index(tar, index)
    content = bytearray(index_path(tar).read_bytes())
    if wrong == "cut":
        del content[-1000:]
    elif wrong == "flipped":
        content[-1000] ^= 1
    else:
        content = content.replace(b'"samples":20000', b'"samples":2000000000')
    index_path(tar).write_bytes(content)
    assert peak_of(read, tar) < 3 * len(content)


def peak_of(read, tar):
    """Bytes that the reading of an index takes."""
    tracemalloc.start()
    try:
        with contextlib.suppress(UserError):
            read(tar)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("table", ["keys", "suffixes", "faults", "a fault"])
def test_a_file_that_somebody_made_up_takes_no_more_memory_than_three_of_it(tar, table):
    parts = two_samples()
    if table == "keys":
        parts.tables["keys"] = np.full(10**6, ord("a"), np.uint8)
        parts.tables["samples"]["keys"] = (1, 10**6 - 1)
    elif table == "suffixes":
        parts.tables["suffixes"] = np.frombuffer(b"a\0" * 10**6, np.uint8)
    elif table == "faults":
        parts.faults = [[]] * 10**6
    else:
        parts.faults = [["llava", 0, "not_json", [[]] * 10**6]]
    content = put_together(parts)
    index_path(tar).write_bytes(content)
    assert peak_of(read_tables, tar) < 3 * len(content)


def test_an_index_of_another_version_is_refused_by_number(tar):
    write_index(tar, small_index())
    index_path(tar).write_bytes(
        index_path(tar).read_bytes().replace(b'"version":4', b'"version":5')
    )
    with pytest.raises(
        UserError,
        match=r"\.index has version 5; this mmtrain reads 4\. Make it again: mmtrain index ",
    ):
        read_index(tar)


def test_a_tar_of_another_size_makes_its_index_stale(tar):
    write_index(tar, small_index())
    tar.write_bytes(bytes(BYTES - 512))
    for read in (read_index, read_header):
        with pytest.raises(
            UserError,
            match=r"is stale: made for a tar of 4,096 bytes, but shard-000000\.tar has 3,584",
        ):
            read(tar)


def test_a_missing_index_and_missing_lengths_are_states_not_errors(tar):
    with pytest.raises(MissingIndex):
        read_header(tar)
    with pytest.raises(MissingIndex, match=r"mmtrain index CONFIG .*\.tar$"):
        read_index(tar)
    write_index(tar, small_index())
    assert read_header(tar).texts == ["0" * 16, "f" * 16]


def test_a_tar_that_is_gone_is_an_error_that_names_it(tar):
    write_index(tar, small_index())
    tar.unlink()
    with pytest.raises(UserError, match=r"shard-000000\.tar: cannot be read \(No such file"):
        read_index(tar)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda path: path.symlink_to(path.name), r"cannot be read \(Too many levels"),
        (lambda path: path.symlink_to("/proc/self/mem"), r"cannot be read \(Input/output error"),
        (os.mkfifo, "is a pipe or device"),
        (Path.mkdir, "is a folder"),
    ],
)
def test_an_index_that_is_no_file_is_an_error_at_once(tar, make, seen):
    make(index_path(tar))
    with pytest.raises(UserError, match=rf"^{tar}\.index: {seen}"):
        read_index(tar)


def become_nobody() -> None:
    if os.geteuid() == 0:  # no mode of a folder stops root
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def write_where_the_folder_is_read_only(tar: Path, report: Connection) -> None:
    become_nobody()
    before = index_path(tar)
    write_index(tar, small_index())
    report.send((before, index_path(tar), read_index(tar)))


def test_where_the_folder_cannot_be_written_the_index_is_kept_in_the_cache(monkeypatch):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to other users
        folder = Path(name)
        (folder / "cache").mkdir()
        (folder / "shards").mkdir()
        (folder / "shards" / "s.tar").write_bytes(bytes(BYTES))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for path, mode in ((folder, 0o755), (folder / "cache", 0o777), (folder / "shards", 0o555)):
            path.chmod(mode)
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        writer = context.Process(
            target=write_where_the_folder_is_read_only, args=(folder / "shards" / "s.tar", sender)
        )
        writer.start()
        sender.close()
        planned, used, index = receiver.recv()
        writer.join()
        assert planned == used
        assert used.parent == folder / "cache" / "mmtrain" / "index"
        assert index == small_index()
        assert [path.name for path in (folder / "shards").iterdir()] == ["s.tar"]
        (folder / "shards").chmod(0o755)


def write_with_a_closed_cache(tar: Path) -> None:
    become_nobody()
    write_index(tar, small_index())
    assert index_path(tar).parent == tar.parent and read_index(tar) == small_index()


def test_a_cache_that_is_closed_to_the_user_does_not_keep_an_index_from_its_place_beside_the_tar(
    monkeypatch,
):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home" / "cache").mkdir(parents=True)
        (folder / "s.tar").write_bytes(bytes(BYTES))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home" / "cache"))
        folder.chmod(0o777)
        (folder / "home").chmod(0)
        writer = multiprocessing.get_context("fork").Process(
            target=write_with_a_closed_cache, args=(folder / "s.tar",)
        )
        writer.start()
        writer.join()
        (folder / "home").chmod(0o700)
        assert writer.exitcode == 0


def test_a_file_whose_name_ends_in_a_dot_is_a_member_like_others(tar):
    index = small_index()
    index.members[1] = (*index.members[1], Member("", 3100, 4, 5))
    write_index(tar, index)
    assert read_index(tar) == index


def test_an_index_in_the_cache_comes_before_the_one_beside_the_tar_until_that_is_written(
    tar, monkeypatch
):
    write_index(tar, small_index())
    beside, other = index_path(tar), dataclasses.replace(small_index(), texts={})
    with monkeypatch.context() as patch:
        # no user may write there
        patch.setattr(index_module, "_beside", lambda tar: Path("/sys/none/s.tar.index"))
        write_index(tar, other)
    assert index_path(tar).parent == cache_folder("index") and read_index(tar) == other
    write_index(tar, small_index())
    assert index_path(tar) == beside and read_index(tar) == small_index()
    assert list(cache_folder("index").iterdir()) == []


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        (folder / name).write_text(name)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    return folder


def test_the_fingerprint_is_one_of_tokenizer_template_and_nothing_else(model, tmp_path):
    plain = text_fingerprint(model, "plain")
    assert plain == "bae09b1d20a38811"  # frozen: lengths indexed before belong to it
    assert text_fingerprint(model, "chat") != plain
    (model / "model.safetensors").write_text("other weights")
    (model / "config.json").write_text('{"hidden_size": 128, "model_type": "llama"}')
    assert text_fingerprint(model, "plain") == plain
    assert text_fingerprint(shutil.copytree(model, tmp_path / "copy"), "plain") == plain


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "tokenizer.jsoN"),
        ("tokenizer_config.json", ""),
        ("chat_template.jinja", "{{ x }}"),
        ("added_tokens.json", "{}"),
        ("special_tokens_map.json", "{}"),
        ("tokenizer.model", "x"),
        ("vocab.json", "{}"),
        ("vocab.txt", "a"),
        ("merges.txt", "a b"),
        ("additional_chat_templates/tool_use.jinja", "x"),
        ("config.json", '{"model_type": "qwen2", "hidden_size": 64}'),
    ],
)
def test_the_fingerprint_changes_with_every_file_that_tokenization_reads(model, file, content):
    before = text_fingerprint(model, "plain")
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text(content)
    assert text_fingerprint(model, "plain") != before


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        text_fingerprint(tmp_path, "plain")


def test_a_file_beside_the_tokenizer_that_no_memory_holds_is_an_error_that_names_it(model):
    (model / "vocab.txt").touch()
    os.truncate(model / "vocab.txt", 50 << 30)  # sparse
    with pytest.raises(UserError, match=r"vocab\.txt: larger than 200,000,000 bytes"):
        text_fingerprint(model, "plain")
