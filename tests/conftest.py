"""Shared fixtures: the tools as modules, and one tiny model folder made once a session."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from mmtrain.commands import tiny as tiny_command

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell has put in the background: programs started here would ignore Ctrl-C, which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOOLS = Path(__file__).parent.parent / "tools"
MAIN_JOB = Path(__file__).parent.parent / "configs" / "llava_pp4.yaml"


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py as a module (tools is no package)."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, a file's run in one, whose fixtures they share; so do all of the demo's."""
    for item in items:
        group = "demo" if "demo_run" in item.fixturenames else item.path.relative_to(TOOLS.parent).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def one_thread():
    """Two cores are shared with other tests' processes; more threads are slower and change the order of sums."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_tiny() -> ModuleType:
    """mmtrain tiny: make_tiny_llm, make_tiny_vision, make_tiny_shards, make_config, ..."""
    return tiny_command


@pytest.fixture(scope="session")
def tiny(make_tiny, tmp_path_factory) -> Path:
    """A folder to read: llm/ (llama, 8 layers, width 64), vision/ (4 blocks, 16 tokens), shards/ and config.yaml.

    96 samples in 2 shards; 12 or so have no image, 12 or so have two.
    """
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny.make_tiny_llm(folder / "llm")
    make_tiny.make_tiny_vision(folder / "vision")
    make_tiny.make_tiny_shards(folder / "shards", two_image_fraction=0.125)
    make_tiny.make_config(folder, "tiny")
    return folder


class DemoRun(NamedTuple):
    """The main job, run once a session: a minute or two."""

    folder: Path
    ran: subprocess.CompletedProcess


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory) -> Path:
    """A cache of its own, so that the demo's data are made from nothing, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_run(demo_cache, tmp_path_factory) -> DemoRun:
    """configs/llava_pp4.yaml, as the README starts it; its folder is to be read."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "mmtrain.launch", str(MAIN_JOB), f"run.dir={folder}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(demo_cache)}
    environment.pop("OMP_NUM_THREADS", None)
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=1100)
    return DemoRun(folder / "llava_pp4", ran)
