"""What `pip install .` brings is all that a user needs: commands, the demo, licences, types; no
checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ran_python

ROOT = Path(__file__).parent.parent
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "configs", "mmtrain")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with nothing but the installed package, made from a copy: building leaves files
    behind.
    """
    pytest.importorskip("setuptools", "77")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                source / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            shutil.copy(ROOT / name, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", target, source], check=True, timeout=120, cwd=target)
    return target


def run(installed: Path, folder: Path, *arguments: object) -> str:
    """What the installed command prints, run in `folder`."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    ran = ran_python(installed / "bin" / "mmtrain", *arguments, cwd=folder, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_files_that_are_not_python_come_with_it(installed):
    package = installed / "mmtrain"
    config = (ROOT / "configs" / "llava_pp4.yaml").read_bytes()
    assert (package / "examples" / "llava_pp4.yaml").read_bytes() == config and (
        package / "py.typed"
    ).exists()
    shipped = {
        path.relative_to(ROOT)
        for path in (ROOT / "mmtrain").rglob("*.json")
        if "docs" not in path.parts
    }
    assert shipped <= {path.relative_to(installed) for path in package.rglob("*.json")}
    assert {path.name for path in installed.glob("*.dist-info/licenses/*")} == {"LICENSE", "NOTICE"}


def test_it_plans_and_shards(installed, tmp_path):
    assert "mmtrain train example:llava_pp4" in run(installed, tmp_path, "--help")
    assert "demo:vision -> projector -> demo:llm" in run(
        installed, tmp_path, "plan", "example:llava_pp4"
    )
    record = {
        "id": "a",
        "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}],
    }
    (tmp_path / "a.json").write_text(json.dumps([record]))
    assert "1 samples" in run(
        installed, tmp_path, "shard", "--json", "a.json", "--images", ".", "--out", "shards"
    )


@pytest.mark.nightly
def test_it_trains_the_demo(installed, tmp_path):
    short = (
        "parallel.pipeline=1",
        "train.max_steps=2",
        "eval.shards=null",
        "parallel.threads_per_rank=1",
    )
    said = run(installed, tmp_path, "train", "example:llava_pp4", *short)
    assert "results: runs/llava_pp4" in said and "report: runs/llava_pp4/report.html" in said


@pytest.mark.nightly
def test_every_shipped_configuration_plans_outside_a_checkout(installed, tmp_path):
    code = (
        "from mmtrain.__main__ import main; from mmtrain.config.load import example_names\n"
        "print([(name, main(['plan', f'example:{name}'])) for name in example_names()])"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    ran = ran_python("-c", code, cwd=tmp_path, env=environment)
    names = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
    assert ran.stdout.splitlines()[-1:] == [str([(name, 0) for name in names])], ran.stderr


def test_the_page_on_a_package_index_has_no_link_that_needs_a_checkout(installed):
    (metadata,) = installed.glob("mmtrain-*.dist-info/METADATA")
    description = metadata.read_text().partition("\n\n")[2]
    assert "mmtrain train example:llava_pp4" in description
    assert re.findall(r"\]\((?!https://|#)[^)]*\)|src=", description) == []


def test_a_folder_called_mmtrain_hides_nothing_of_what_setup_installed(tmp_path):
    (tmp_path / "mmtrain").mkdir()  # as in the folder that a clone was made in
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = ran_python("-m", "mmtrain", "plan", "--help", cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr


def test_the_image_is_made_of_what_its_dockerfile_copies_and_no_command_gives_it_the_hubs_token():
    dockerfile = (ROOT / "scripts" / "Dockerfile").read_text()
    copied = {
        name for line in re.findall(r"(?m)^COPY (.+) \S+$", dockerfile) for name in line.split()
    }
    first, *others = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert first == "*" and {line[1:] for line in others if line[0] == "!"} == copied
    assert "**/.*" in others[len(copied) :]  # after what is let in: .env, .git
    mounted = re.findall(r"-v (\S+):\S+", dockerfile)
    assert mounted == ['"$PWD"', "~/.cache/huggingface/hub"]
