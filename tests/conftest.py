"""Shared fixtures: folders of tiny models, made once a session."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for GPUs keeps forked ranks from using them

import pytest
import tiny_models
import torch
from gpu_ranks import no_real_gpus, real_gpus, why_no_gpus

from mmtrain.base.printing import logs_shown
from mmtrain.checkpoint.step_folder import StepFolder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell has put in the background: programs started here would ignore Ctrl-C, which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOOLS = Path(__file__).parent.parent / "tools"
MAIN_JOB = Path(__file__).parent.parent / "configs" / "llava_pp4.yaml"


# Work for pytest-xdist: files that share the demo's run are one piece of it; the longest pieces begin first, else the
# last of them would work alone for minutes.
DEMO = ("tests/test_main_job.py", "tests/exporting/test_demo_export.py")
LONGEST = (
    *("demo", "tests/checkpoint/test_resume.py", "tests/test_launch.py", "tests/runtime/test_supervise.py"),
    *("tests/api/test_api.py", "tests/test_parity.py", "tests/runtime/test_gpus.py", "tests/cli/test_doctor.py"),
    *("tests/checkpoint/test_resume_pairs.py", "tests/training/test_loop.py", "tests/model/test_probe.py"),
    *("tests/test_mixes.py", "tests/engine/test_engine.py", "tests/test_trainable_anywhere.py"),
    *("tests/exporting/test_hf.py", "tests/test_connectors.py"),
)


def piece_of(nodeid: str) -> str:
    """What runs in one process, whose fixtures it shares."""
    file = nodeid.partition("::")[0]
    return "demo" if file in DEMO else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deals out pieces: `--dist loadgroup` of pytest-xdist 3.8 knows no groups under pytest 9.2, and says nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPiece(LoadScopeScheduling):
        _split_scope = staticmethod(piece_of)

    config.option.loadscopereorder = False  # the order of collection is the order in which pieces begin
    return ByPiece(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        order = {piece: i for i, piece in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(piece_of(item.nodeid), len(order)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-gpus", action="store_true", help="run the ranks of tests on GPUs, on fake ones where there are too few"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.on_gpus:
        os.environ["MMTRAIN_TEST_RANKS"] = "cuda"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.on_gpus and item.get_closest_marker("cpu_ranks"):
        pytest.skip("about ranks on the CPU alone")
    if marker := item.get_closest_marker("gpu"):
        needed = marker.kwargs.get("count", 1)
        reason = no_real_gpus(needed) if marker.kwargs.get("real") else why_no_gpus(needed)
        if marker.kwargs.get("fake") and real_gpus():
            reason = "about the fake CUDA, and this machine has a GPU"
        if reason:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_engine_here():
    """An engine belongs into a forked rank: what DeepSpeed keeps of one hangs every rank that is forked afterwards."""
    yield
    groups = sys.modules.get("deepspeed.utils.groups")
    assert groups is None or groups.mpu is None, "made in the tests' own process; use ranks.run_ranks"


@pytest.fixture(autouse=True)
def one_thread():
    """Two cores are shared with other tests' processes; more threads are slower and change the order of sums."""
    torch.set_num_threads(1)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What mmtrain's libraries log while the test runs."""
    lines: list[str] = []
    with logs_shown(lines.append):
        yield lines


@pytest.fixture(scope="session")
def make_tiny() -> ModuleType:
    """tiny_models: make_tiny_llm, make_tiny_vision, make_tiny_shards, make_config, ..."""
    return tiny_models


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


@pytest.fixture(scope="session")
def llm_with(make_tiny, tiny, tmp_path_factory) -> Callable[..., Path]:
    """Makes an LLM's folder with the tiny weights (320 rows), or those of `source`, another tokenizer and template."""
    from chat_styles import sentencepiece_like
    from tokenizers import AddedToken

    def make(
        template: str | None,
        marks: tuple[str, ...] = (),
        kind: str = "byte_level",
        source: Path | None = None,
        **generation,
    ) -> Path:
        folder = tmp_path_factory.mktemp("llm") / "llm"
        shutil.copytree(source or tiny / "llm", folder)
        tokenizer = sentencepiece_like() if kind == "sentencepiece" else make_tiny.make_tokenizer()
        added = [AddedToken(mark, special=True, normalized=False) for mark in marks]
        tokenizer.add_tokens(added, special_tokens=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(tiny, tmp_path_factory) -> StepFolder:
    """Of a run over the tiny folder that was never trained; to be read."""
    from untrained_runs import config_of, make_checkpoint  # the exports, which few tests need

    return make_checkpoint(tmp_path_factory.mktemp("run") / "tiny", config_of(tiny))


@pytest.fixture(scope="session")
def parts(tmp_path_factory) -> Path:
    """llm/ and vision/ of scenes.save_parts, which have a stock LLaVA to be compared with; to be read."""
    from scenes import save_parts  # DeepSpeed, which takes seconds

    folder = tmp_path_factory.mktemp("parts")
    save_parts(folder)
    return folder


class DemoRun(NamedTuple):
    """The main job, run by the command line."""

    folder: Path
    ran: subprocess.CompletedProcess


# The main job in half a minute: it learns as much in fewer and smaller steps at twice the rate.
SHORT = ("parallel.pipeline=2", "train.packs_per_step=4", "train.max_steps=48", "optimizer.lr=1e-3")
SHORT += ("eval.every_steps=48", "eval.max_samples=140", "eval.show_answers=2")


def run_demo(folder: Path, cache: Path, *settings: str) -> DemoRun:
    """Run configs/llava_pp4.yaml, as the README starts it, with these settings."""
    command = [sys.executable, "-m", "mmtrain.launch", str(MAIN_JOB), f"run.dir={folder}", *settings]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("OMP_NUM_THREADS", None)
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=1100)
    return DemoRun(folder / "llava_pp4", ran)


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory) -> Path:
    """A cache of its own, so that the demo's data are made from nothing, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_run(demo_cache, tmp_path_factory) -> DemoRun:
    """The short main job, run once a session; its folder is to be read."""
    return run_demo(tmp_path_factory.mktemp("demo"), demo_cache, *SHORT)
