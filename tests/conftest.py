"""Shared fixtures: folders of tiny models, made once a session."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# else asking for GPUs keeps forked ranks from using them
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import pytest
import tiny_models
import torch
from gpu_ranks import no_real_gpus, real_gpus, why_no_gpus
from stores import S3, s3_server

from mmtrain.base.cache import cache_folder
from mmtrain.base.printing import logs_shown
from mmtrain.checkpoint.step_folder import StepFolder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job that a shell has put in the background: programs started here would ignore Ctrl-C,
    # which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"
MAIN_JOB = ROOT / "configs" / "llava_pp4.yaml"

# Files that share the demo's run.
DEMO = ("tests/test_main_job.py", "tests/exporting/test_demo_export.py")
# Seconds of each piece when it last ran with --record-seconds: {"daily": {piece: seconds},
# "nightly": ...}.
SECONDS = ROOT / "tests" / "seconds.json"
LEAST = 5  # seconds; pieces below are not recorded
# .ci/run runs one part of the nightly tests, at most 35 minutes. A fifth of them took 18 minutes of
# 2 cores on one machine, and 33 on another.
NIGHTLY_PARTS = 10


def piece_of(nodeid: str) -> str:
    """Return the file that stands for all tests that run in one process, whose fixtures they
    share.
    """
    file = nodeid.partition("::")[0]
    if file in DEMO:
        return DEMO[0]
    return file


def tier_of(config: pytest.Config) -> str:
    """Return the part of SECONDS that concerns this session."""
    if config.option.markexpr == "nightly":
        return "nightly"
    return "daily"


class SecondsRecorder:
    """A plugin that writes SECONDS at the end of a session."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.taken[piece_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Renew the pieces that ran; keep the others, unless their file is gone."""
        record = json.loads(SECONDS.read_text())
        tier = tier_of(session.config)
        seconds = record[tier] | {piece: round(took) for piece, took in self.taken.items()}
        record[tier] = {
            piece: took
            for piece, took in seconds.items()
            if took >= LEAST and (ROOT / piece).exists()
        }
        SECONDS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deals out pieces: `--dist loadgroup` of pytest-xdist 3.8 knows no groups under pytest 9.2,
    and says nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByPiece(LoadScopeScheduling):
        _split_scope = staticmethod(piece_of)

    # the order of collection is the order in which pieces begin
    config.option.loadscopereorder = False
    return ByPiece(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.nightly_turn is not None:
        part = config.option.nightly_turn % NIGHTLY_PARTS
        items[:] = [
            item for item in items if zlib.crc32(item.nodeid.encode()) % NIGHTLY_PARTS == part
        ]

    if hasattr(config, "workerinput"):  # one of several processes
        # The longest pieces begin first, else the last of them would work alone for minutes.
        seconds = json.loads(SECONDS.read_text())[tier_of(config)]
        items.sort(key=lambda item: seconds.get(piece_of(item.nodeid), 0), reverse=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-gpus",
        action="store_true",
        help="run the ranks of tests on GPUs, on fake ones where there are too few",
    )
    parser.addoption(
        "--nightly-turn",
        type=int,
        help=f"with -m nightly: only part (this modulo {NIGHTLY_PARTS}) of it",
    )
    parser.addoption(
        "--record-seconds",
        action="store_true",
        help="write how long each file took: tests/seconds.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.on_gpus:
        os.environ["MMTRAIN_TEST_RANKS"] = "cuda"
    if config.option.record_seconds and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondsRecorder())


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
    """An engine belongs into a forked rank: what DeepSpeed keeps of one hangs every rank that is
    forked afterwards.
    """
    yield
    groups = sys.modules.get("deepspeed.utils.groups")
    assert groups is None or groups.mpu is None, (
        "made in the tests' own process; use ranks.run_ranks"
    )


@pytest.fixture(autouse=True)
def one_thread():
    """Two cores are shared with other tests' processes; more threads are slower and change the
    order of sums.
    """
    torch.set_num_threads(1)


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    """A cache that no other test sees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session", autouse=True)
def no_catalogue_left(tmp_path_factory) -> Iterator[None]:
    """Remove catalogues of this session's shards: they would fill the user's cache with a GB."""
    yield
    shards = str(tmp_path_factory.getbasetemp())
    for paths in cache_folder("catalog").glob("*/*/paths.npy"):
        if str(np.load(paths)[0]).startswith(shards):
            shutil.rmtree(paths.parent, ignore_errors=True)


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
    """A folder to read: llm/ (llama, 8 layers, width 64), vision/ (4 blocks, 16 tokens), shards/
    and config.yaml.

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
    """Makes an LLM's folder with the tiny weights (320 rows), or those of `source`, another
    tokenizer and template.
    """
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
    """llm/ and vision/ of scenes.save_parts, which have a stock LLaVA to be compared with; to be
    read.
    """
    from scenes import save_parts  # DeepSpeed, which takes seconds

    folder = tmp_path_factory.mktemp("parts")
    save_parts(folder)
    return folder


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[S3]:
    """An S3 server of this process, with buckets that tests make by `upload`; it starts in 4 s."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


class DemoRun(NamedTuple):
    """The main job, run by the command line."""

    folder: Path
    ran: subprocess.CompletedProcess


# The main job in half a minute: it learns as much in fewer and smaller steps at twice the rate.
SHORT = ("parallel.pipeline=2", "train.packs_per_step=4", "train.max_steps=32", "optimizer.lr=1e-3")
SHORT += ("eval.every_steps=32", "eval.max_samples=140", "eval.show_answers=2")


def run_demo(folder: Path, cache: Path, *settings: str) -> DemoRun:
    """Run configs/llava_pp4.yaml, as the README starts it, with these settings."""
    command = [
        sys.executable,
        "-m",
        "mmtrain.launch",
        str(MAIN_JOB),
        f"run.dir={folder}",
        *settings,
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("OMP_NUM_THREADS", None)
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=1100
    )
    return DemoRun(folder / "llava_pp4", ran)


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory) -> Path:
    """A cache of its own, so that the demo's data are made from nothing, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def demo_run(demo_cache, tmp_path_factory) -> DemoRun:
    """The short main job, run once a session; its folder is to be read."""
    return run_demo(tmp_path_factory.mktemp("demo"), demo_cache, *SHORT)
