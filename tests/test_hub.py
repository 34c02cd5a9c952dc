"""Exports go to a model hub, and models come from one. The server is ours (hub_server), the client
huggingface_hub.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import SIZE, TOKEN, Attack, Hub, hub_server
from processes import listen_to_ctrl_c, ran_python, wait_for
from tiers import nightly

from mmtrain.checkpoint.step_folder import StepFolder


@pytest.fixture(scope="module")
def hub():
    with hub_server() as server:
        yield server


def mmtrain(
    hub: Hub, folder: Path, *arguments: str, token: str = TOKEN
) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody whom the hub knows, or not, with an empty cache in `folder`."""
    own = {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": token,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    return ran_python("-m", "mmtrain", *arguments, env={**os.environ, **own}, cwd=folder)


def pushing(checkpoint: StepFolder, form: str, repository: str) -> list[str]:
    """Return the words of a command that exports into `out` and pushes."""
    words = ["export", str(checkpoint.path), "--format", form, "--out", "out", "--push"]
    return [*words, repository]


@pytest.mark.parametrize("form", ["safetensors", nightly("hf")])
def test_an_export_is_pushed_into_a_private_repository(hub, checkpoint, tmp_path, form):
    done = mmtrain(hub, tmp_path, *pushing(checkpoint, form, f"my-org/{form}"))
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.address}/my-org/{form}/commit/" in done.stdout
    assert f"my-org/{form}" in hub.private
    made = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.repositories[f"my-org/{form}"] == made


@pytest.mark.nightly
def test_a_model_comes_from_the_hub_without_what_runs(hub, checkpoint, tmp_path):
    assert mmtrain(hub, tmp_path, *pushing(checkpoint, "hf", "my-org/mine")).returncode == 0
    pushed = dict(hub.repositories["my-org/mine"])

    hub.repositories["my-org/mine"] |= {
        "pytorch_model.bin": b"a pickle",
        "modeling.py": b"code",
        "\x1b[31m.json": b"{}",
    }
    train = ["train", "example:llava_pp4", "model.llm.path=my-org/mine", "--plan"]
    refused = mmtrain(hub, tmp_path, *train)
    assert (
        refused.returncode == 2
        and "hf download my-org/mine, or mmtrain train CONFIG --download" in refused.stderr
    )
    planned = mmtrain(hub, tmp_path, *train, "--download")
    assert "my-org/mine" in planned.stdout and "Traceback" not in planned.stderr
    assert set(hub.asked_for) == {
        name for name in pushed if name.endswith((".safetensors", ".json", ".jinja", ".md"))
    }


@pytest.mark.parametrize(
    ("token", "said"), [("", "hf auth login"), nightly("hf_wrong", "Invalid user token")]
)
def test_whom_the_hub_does_not_know_is_told_before_the_export(
    hub, checkpoint, tmp_path, token, said
):
    done = mmtrain(hub, tmp_path, *pushing(checkpoint, "hf", "my-org/other"), token=token)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and "my-org/other" not in hub.repositories


def test_a_model_that_the_hub_does_not_have_is_named(hub, tmp_path):
    done = mmtrain(
        hub,
        tmp_path,
        "train",
        "example:llava_pp4",
        "model.llm.path=my-org/none",
        "--plan",
        "--download",
    )
    assert (
        done.returncode == 2
        and "my-org/none on the hub" in done.stderr
        and "Traceback" not in done.stderr
    )


OUT = "../../../../out"  # from blobs/ or snapshots/ of a repository: beside the cache
MEGABYTE = b"x" * 2**20


def slow(_: int) -> Iterator[bytes]:
    """A file that comes byte by byte."""
    for _ in range(SIZE):
        yield b"x"
        time.sleep(0.5)


ATTACKS = {
    "etag": Attack(headers={"ETag": f'"{OUT}-etag"'}),
    "linked_etag": Attack(
        status=302, headers={"X-Linked-Etag": f"{OUT}-linked", "X-Linked-Size": "737"}
    ),
    "weak_etag": Attack(headers={"ETag": f"W/{OUT}-weak"}),
    "commit": Attack(headers={"X-Repo-Commit": f"{OUT}-commit"}),
    "commit_of_missing": Attack(
        status=404, headers={"X-Repo-Commit": f"{OUT}-missing", "X-Error-Code": "EntryNotFound"}
    ),
    "listed_commit": Attack(sha=f"{OUT}-listed"),
    "no_commit": Attack(sha="main"),
    "names": Attack(
        [
            f"{OUT}-name.json",
            "/tmp/out-name.json",
            f"a/{OUT}-name.json",
            ".hidden.json",
            "a//b.json",
        ]
    ),
    "long_body": Attack(body=lambda _: itertools.repeat(MEGABYTE, 200)),
    "long_in_pieces": Attack(body=lambda _: [b"x" * (SIZE - 1)], breaks=True),
    "no_attack_but_lost_connections": Attack(
        body=lambda start: [b"x" * min(500, SIZE - start)], breaks=True
    ),
    "compressed": Attack(
        headers={"Content-Encoding": "gzip"}, body=lambda _: [gzip.compress(MEGABYTE * 50)]
    ),
    "many_files": Attack([f"{number}.json" for number in range(3000)]),
    "long_list": Attack(["x" * 20_000] * 5_000),
    "slow": Attack(body=slow),
}
ONE_AFTER_ANOTHER = """
import sys
import time
from huggingface_hub import constants
from mmtrain.__main__ import main
constants.DOWNLOAD_CHUNK_SIZE = 100  # so that a part of a small file is written
time.sleep = lambda seconds: None  # before a lost connection is tried again
for name in sys.argv[1:]:
    print("begin", name, file=sys.stderr)
    download = ["train", "example:llava_pp4", f"model.llm.path=my-org/{name}", "--plan", "--download"]
    print("end", main(download), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def attacked(hub, tmp_path_factory) -> tuple[dict[str, list[str]], Path]:
    """Return the lines that one process printed about each attack, and the folder of its cache."""
    folder = tmp_path_factory.mktemp("attacked")
    hub.attacks = {f"my-org/{name}": attack for name, attack in ATTACKS.items()}
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf")}
    with (folder / "stderr").open("w+") as stderr:
        command = [sys.executable, "-c", ONE_AFTER_ANOTHER, *ATTACKS]
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=listen_to_ctrl_c,
        )
        try:
            wait_for(
                lambda: any("/slow/" in path for path in hub.asked_for), 120, "the last download"
            )
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        sections = stderr.read().split("begin ")[1:]
    return {lines[0]: lines[1:] for lines in map(str.splitlines, sections)}, folder


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_hub_is_refused_in_one_line(attacked, name):
    *said, end = attacked[0][name]
    assert end == ("end 130" if name == "slow" else "end 2")
    assert len(said) == 1, said


def test_a_hostile_hub_writes_little_and_only_into_the_cache(attacked):
    _, folder = attacked
    written = [path for path in folder.rglob("*") if path.name != "stderr"]
    hub_cache = folder / "hf" / "hub"
    outside = [
        path
        for path in written
        if not path.is_relative_to(hub_cache) and path not in hub_cache.parents
    ]
    assert not outside
    assert not list(Path("/tmp").glob("out-name*"))
    (blob,) = hub_cache.glob("models--my-org--no_attack*/blobs/*")
    assert blob.read_bytes() == b"x" * SIZE
    names = [f"models--my-org--{name}" for name in ATTACKS]
    assert {path.name for path in hub_cache.iterdir()} <= {*names, ".locks", "CACHEDIR.TAG"}
    assert sum(path.stat().st_size for path in written if path.is_file()) < 100_000


def test_one_ctrl_c_ends_a_download(attacked):
    assert attacked[0]["slow"] == ["stopped by Ctrl-C before the ranks were started", "end 130"]
