"""The doctor's checks of streamed layers: the demo trains as with resident ones, and a fetch hides behind computing."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.doctor.layouts import on_ranks
from mmtrain.doctor.runs import SAME, demo, losses, pipeline_1, worst
from mmtrain.model.streaming import StreamedLayers
from mmtrain.model.weight_sources import HostSource
from mmtrain.processes.rank import Rank

SOURCES = {
    "host": ("parallel.pipeline=1",),
    "peers": ("parallel.pipeline=1", "parallel.data=2", "parallel.stream_from=peers", "parallel.weight_shards=2"),
}
LAYERS = 6
WIDTH = {"cpu": 256, "cuda": 8192}  # 128 MiB a layer in bfloat16
OVERLAPPED = 1.25
"""Times the longer of computing and fetching that both together may take."""


def streamed(here: Here, source: str) -> Seen:
    """The demo with every decoder layer streamed against the demo at pipeline 1: losses of every step, and fetches."""
    expected = losses(pipeline_1(here))
    run = demo(here, f"streamed-{source}", *SOURCES[source], "parallel.streamed_layers=99")
    found = losses(run)
    frozen = json.loads((run.folder / "audit.json").read_text())["ranks"][0]["frozen"]
    off = worst(found, expected)
    facts = {"losses": found, "pipeline_1": expected, "worst": off, "frozen": frozen}
    text = f"{len(found)} steps on {here.device}, {frozen['fetches']} fetches: {off:.1e} off resident layers"
    if not off <= SAME or not frozen["fetches"]:
        raise FailedError(f"{text}, {SAME:.0e} is rounding", facts=facts)
    return Seen(text, facts)


def overlap(here: Here) -> Seen:
    """Layers fetched from page-locked memory while others compute: the time of both, and of each alone."""
    on_ranks(here, 1, functools.partial(measure_overlap, here.folder))
    found = json.loads((here.folder / "fetching.json").read_text())
    longer = max(found["computing_seconds"], found["fetching_seconds"])
    text = (
        f"{found['gigabytes_per_second']:,.1f} GB/s alone, {found['gigabytes_per_second_beside']:,.1f} beside "
        f"computing; both take {found['both_seconds'] / longer:.2f} times the longer"
    )
    if here.gpus and not found["both_seconds"] <= OVERLAPPED * longer:
        raise FailedError(f"{text}, at most {OVERLAPPED:g} is beside each other", facts=found)
    return Seen(text, found)


def measure_overlap(folder: Path, rank: Rank) -> None:
    """What `overlap` measures, to FOLDER/fetching.json; raises RuntimeError if a fetch makes the host wait."""
    device = torch.device(rank.device)
    width = WIDTH[device.type]
    streamed = StreamedLayers(HostSource(device))
    layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        streamed.take(number, layer)
    hidden = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    work = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    size = sum(layer.bytes for layer in streamed.layers.values())

    def compute(_: torch.Tensor) -> torch.Tensor:
        return hidden @ work

    def run(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        streamed.follow(range(LAYERS))
        for number in range(LAYERS):
            streamed.around(number, forward)(hidden)
        streamed.end()

    with torch.no_grad():
        fetching = _seconds(lambda: run(lambda x: x), device)
        once = _seconds(lambda: compute(hidden), device)
        times = max(1, round(fetching / LAYERS / once))  # computing takes about as long as fetching

        def work_of_layer(x: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                compute(x)
            return x

        computing = _seconds(lambda: [work_of_layer(hidden) for _ in range(LAYERS)], device)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises from here on
            run(work_of_layer)
            torch.cuda.set_sync_debug_mode("default")
        both = _seconds(lambda: run(work_of_layer), device)
    (folder / "fetching.json").write_text(
        json.dumps(
            {
                "bytes": size,
                "fetching_seconds": fetching,
                "computing_seconds": computing,
                "both_seconds": both,
                "gigabytes_per_second": size / fetching / 1e9,
                "gigabytes_per_second_beside": size / both / 1e9,
            }
        )
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least of a few times."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    found = []
    for _ in range(5):
        wait()
        began = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - began)
    return min(found)
