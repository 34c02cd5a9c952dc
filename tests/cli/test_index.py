"""mmtrain index: an index beside every shard, and a summary of what cannot be trained on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from archives import conversation, picture, write_tar

from mmtrain.__main__ import main
from mmtrain.data.shards.index import index_path, read_index
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.tokenizer_files import text_fingerprint

PNG = picture(3, 2)
PLAIN = ("example:llava_pp4", "data.template=plain")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two shards of 5 samples, in each one without image and one whose image is none; the longest
    text is s-1's b.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(2):
        files = []
        for key in "abcde":
            answer = "It is red. " * (40 if (number, key) == (1, "b") else 3)
            files.append((f"{key}.json", conversation("<image>What?", answer)))
            files += {"d": [], "e": [("e.png", b"none")]}.get(key, [(f"{key}.png", PNG)])
        write_tar(tmp_path / f"s-{number}.tar", files)
    return tmp_path


def test_shards_are_indexed_once_and_summed_up(folder, capsys):
    assert main(["index", f"{folder}/s-{{0..1}}.tar", *PLAIN, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    fingerprint = text_fingerprint(model_folder("demo:llm"), "plain")
    longest = read_index(folder / "s-1.tar").texts[fingerprint].tokens[1]
    assert longest == max(
        max(read_index(tar).texts[fingerprint].tokens) for tar in folder.glob("*.tar")
    )
    assert "2 shards, 10 samples, 8 images" in printed
    assert (
        f"longest text: {longest:,} tokens of demo:llm, plain, without those of images" in printed
    )
    assert "samples that cannot be trained on: 4\n" in printed
    assert re.search(
        r"^ +2 +image_count: a number of <image> marks that differs", printed, re.MULTILINE
    )
    assert re.search(r"^ +2 +undecodable_image: ", printed, re.MULTILINE)
    assert max(map(len, printed.splitlines()[-4:])) <= 80, "the reasons"
    written = [index_path(tar).stat().st_mtime_ns for tar in folder.glob("*.tar")]
    summary = printed[printed.index("2 shards, 10") :]
    assert main(["index", str(folder), *PLAIN]) == 0
    found = "SHARDS: format llava (KEY.json), as in 8 of the first 10 samples"
    assert (
        capsys.readouterr().out == f"{found}\n2 of 2 shards are ready: left as they are\n{summary}"
    )
    assert [index_path(tar).stat().st_mtime_ns for tar in folder.glob("*.tar")] == written


@pytest.mark.parametrize("command", ["index", "inspect"])
def test_programs_that_the_command_line_allows_are_run(folder, monkeypatch, capsys, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    of_config = ["example:llava_pp4", f"data.shards=pipe:cat {folder}/s-0.tar"]
    of_command = ["example:llava_pp4", f"pipe:cat {folder}/s-1.tar"]
    for words in (of_config, of_command):
        assert main([command, *words]) == 2
        assert "data.allow_pipe allows only none" in capsys.readouterr().err
        assert main([command, *words, "data.allow_pipe=[cat]"]) == 0
        assert "1 shards" in capsys.readouterr().out


def test_a_full_disk_behind_the_output_is_an_error(folder, capsys):
    code = None
    closing = contextlib.suppress(OSError)
    with closing, Path("/dev/full").open("w") as full, contextlib.redirect_stdout(full):
        code = main(["index", str(folder), *PLAIN, "--workers", "1"])
    assert code == 2
    assert (
        capsys.readouterr().err
        == "error: standard output cannot be used: No space left on device\n"
    )


def test_a_stale_index_is_replaced_with_rebuild_only(folder, capsys):
    assert main(["index", str(folder), *PLAIN, "--workers", "1"]) == 0
    files = [(f"{key}.json", conversation("Hi.", "Ho.")) for key in "xyz"]
    write_tar(folder / "s-0.tar", [*files, ("more.json", conversation("Hi.", "Hello. " * 2000))])
    capsys.readouterr()
    assert main(["index", str(folder), *PLAIN]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: .*s-0\.tar\.index: is stale: .*--rebuild .*\n", error)
    assert main(["index", str(folder), *PLAIN, "--rebuild"]) == 0
    assert read_index(folder / "s-0.tar").keys == ["x", "y", "z", "more"]
    assert "2 shards, 9 samples, 4 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none.tar", *PLAIN], r"error: SHARDS: no file .*none\.tar"),
        (["{}", *PLAIN, "model.llm.path={}/none"], r"error: .*none: no such folder"),
        (["{}", *PLAIN, "model.llm.path={}"], r"error: .*holds no tokenizer"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(folder, capsys, arguments, message):
    assert main(["index", *(argument.format(folder) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert re.match(message, captured.err)
    assert captured.err.count("\n") == 1


@pytest.mark.nightly
def test_stopped_at_any_moment_it_leaves_no_half_index_and_goes_on_from_there(
    tmp_path, own_cache, capsys
):
    tars = []
    for number in range(10):
        files = [
            (f"{number}-{key}.json", conversation("What?", "A red door.")) for key in range(200)
        ]
        tars.append(write_tar(tmp_path / f"s-{number}.tar", files))
    command = [sys.executable, "-m", "mmtrain", "index", str(tmp_path), *PLAIN, "--workers", "2"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while not list(tmp_path.glob("*.index")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors == "stopped by Ctrl-C; finished indexes stay, the same command goes on\n"
    assert process.returncode == 130
    finished = [tar for tar in tars if index_path(tar).exists()]
    assert 1 <= len(finished) < 10
    for tar in finished:
        assert len(read_index(tar).keys) == 200
    assert main(["index", str(tmp_path), *PLAIN, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(finished):,} of 10 shards are ready" in printed
    assert "10 shards, 2,000 samples" in printed


SLOW_TO_BEGIN = """
import time
from mmtrain.data.shards import pool

begin_worker = pool._begin

def slowly(*arguments):
    time.sleep(2)
    begin_worker(*arguments)

pool._begin = slowly
with pool.worker_pool(abs, 2) as run:
    print("begun", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_reaches_no_worker_that_has_not_begun():
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_BEGIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == b"begun\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors.count(b"Traceback") == 1, errors.decode()  # the script's own
