"""Exports go to a model hub, and models come from one. The server is ours (hub_server), the client huggingface_hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, hub_server


@pytest.fixture(scope="module")
def hub():
    with hub_server() as server:
        yield server


def mmtrain(hub: Hub, folder: Path, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody whom the hub knows, or not, with an empty cache in `folder`."""
    own = {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "mmtrain", *arguments]
    return subprocess.run(command, env={**os.environ, **own}, cwd=folder, capture_output=True, text=True)


def test_an_export_is_pushed_into_a_private_repository_and_comes_back_without_what_runs(hub, checkpoint, tmp_path):
    out = tmp_path / "out"
    export = ["export", str(checkpoint.path), "--format", "hf", "--out", str(out), "--push", "my-org/mine"]
    done = mmtrain(hub, tmp_path, *export)
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.address}/my-org/mine/commit/" in done.stdout
    assert hub.private == {"my-org/mine"}
    pushed = dict(hub.repositories["my-org/mine"])
    assert pushed == {file.name: file.read_bytes() for file in out.iterdir()}

    hub.repositories["my-org/mine"] |= {
        "pytorch_model.bin": b"a pickle",
        "modeling.py": b"code",
        "\x1b[31m.json": b"{}",
    }
    train = ["train", "example:llava_pp4", "model.llm.path=my-org/mine", "--plan"]
    refused = mmtrain(hub, tmp_path, *train)
    assert refused.returncode == 2 and "hf download my-org/mine, or mmtrain train CONFIG --download" in refused.stderr
    planned = mmtrain(hub, tmp_path, *train, "--download")
    assert "my-org/mine" in planned.stdout and "Traceback" not in planned.stderr
    assert set(hub.asked_for) == {name for name in pushed if name.endswith((".safetensors", ".json", ".jinja", ".md"))}


@pytest.mark.parametrize(("token", "said"), [("", "hf auth login"), ("hf_wrong", "Invalid user token")])
def test_whom_the_hub_does_not_know_is_told_before_the_export(hub, checkpoint, tmp_path, token, said):
    export = ["export", str(checkpoint.path), "--format", "hf", "--out", "out", "--push", "my-org/other"]
    done = mmtrain(hub, tmp_path, *export, token=token)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and "my-org/other" not in hub.repositories


def test_a_model_that_the_hub_does_not_have_is_named(hub, tmp_path):
    done = mmtrain(hub, tmp_path, "train", "example:llava_pp4", "model.llm.path=my-org/none", "--plan", "--download")
    assert done.returncode == 2 and "my-org/none on the hub" in done.stderr and "Traceback" not in done.stderr
