"""List the layouts that a run may have on a number of devices, each as changes to its config.

config, N --pipeline x replicas = N--> --each axis of AXES in turn--> changes, as overrides on a command line set them

Candidates do not change what a step computes, except those that quantise frozen layers (see `is_exact`). Keys that
belong to one layout, such as boundaries, are left to the planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.config.parallel import MAX_MICROBATCHES
from mmtrain.config.schema import MAX_RANKS, RunConfig
from mmtrain.pretrained.quantised import BITS

MOST_TOKENS = 2**16
"""Of a micro-batch that has several packs: from 10,000 on every fetch of weights hides behind computing."""
MOST_SHARDS = 8
"""Replicas that keep a part each of streamed layers: the GPUs of a machine with NVLink."""
MOST_REPLICAS = 10_000  # that parallel.data may be
BY_HAND: dict[str, Any] = {
    "parallel.boundaries": None,
    "parallel.stages_per_rank": "auto",
    "parallel.recompute_layers": "auto",
    "parallel.encoder_ranks": "auto",
}
"""Keys that belong to one layout, and the value that leaves each to the planner."""

QUANTIZE = "model.llm.quantize"
Changes = dict[str, Any]
"""Values by key; some may be the config's own."""


def candidates(config: RunConfig, decoder_layers: int, devices: int) -> list[Changes]:
    """List all layouts that use `devices` devices, whether or not they fit in memory.

    Raises UserError if there is none, saying what would have to change.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise UserError(f"{devices} devices: layouts are suggested for 1 to {MAX_RANKS:,}")
    sizes = [(devices // data, data) for data in _divisors(devices)]
    sizes = [(pipeline, data) for pipeline, data in sizes if pipeline <= decoder_layers + 2 and data <= MOST_REPLICAS]
    layouts: list[Changes] = [{"parallel.pipeline": pipeline, "parallel.data": data} for pipeline, data in sizes]
    for axis in AXES:
        layouts = [changes | more for changes in layouts for more in axis(config.changed(changes))]
    if not layouts:
        raise UserError(_no_layout(config, decoder_layers, devices, [data for _, data in sizes]))
    return [changes | BY_HAND for changes in layouts]


def _packs(config: RunConfig) -> Iterator[Changes]:
    """Vary packs a micro-batch: more of them hide fetches, and take more memory."""
    packs, data = config.train.packs_per_step, config.parallel.data
    for count in _divisors(packs // data) if packs % data == 0 else ():
        tokens, microbatches = count * config.data.pack_length, packs // data // count
        may_be = count in (1, config.train.packs_per_microbatch) or tokens <= MOST_TOKENS
        if may_be and microbatches * config.parallel.pipeline <= MAX_MICROBATCHES:
            yield {"train.packs_per_microbatch": count}


def _streaming(config: RunConfig) -> Iterator[Changes]:
    """Vary where frozen decoder layers are kept: on the devices, or fetched before they compute."""

    def kept(layers: Any, source: str = "host", shards: int | None = None) -> Changes:
        keys = "streamed_layers", "stream_from", "weight_shards"
        return {f"parallel.{key}": value for key, value in zip(keys, (layers, source, shards), strict=True)}

    yield kept(0)
    if config.model.llm.quantize is None:
        yield from (kept(0) | {QUANTIZE: bits} for bits in BITS)
        yield kept("auto")
        is_for_host = config.parallel.host_memory_gib is not None
        for shards in _divisors(config.parallel.data)[1:]:
            if shards <= MOST_SHARDS and not is_for_host:
                yield kept("auto", "peers", shards)


AXES: tuple[Callable[[RunConfig], Iterator[Changes]], ...] = (_packs, _streaming)
"""Each takes the config as earlier axes have changed it, and yields further changes."""


def is_exact(config: RunConfig, changes: Changes) -> bool:
    """Whether the LLM keeps its bits."""
    return QUANTIZE not in overrides(config, changes)


def by_hand(config: RunConfig) -> list[str]:
    """Return the keys that the config sets and a suggestion leaves to the planner."""
    return [key for key, value in BY_HAND.items() if config.value_at(tuple(key.split("."))) != value]


def overrides(config: RunConfig, changes: Changes) -> Changes:
    """Return the changes that differ from the config."""
    return {key: value for key, value in changes.items() if config.value_at(tuple(key.split("."))) != value}


def as_options(changes: Changes) -> list[str]:
    """Write changes as a command line takes them behind CONFIG."""
    return [f"{key}={'null' if value is None else value}" for key, value in changes.items()]


def _no_layout(config: RunConfig, decoder_layers: int, devices: int, replicas: list[int]) -> str:
    packs, most = config.train.packs_per_step, decoder_layers + 2
    model = config.model.llm.path
    placed = f"{model} has {most} layers for pipeline ranks (front, {decoder_layers} decoder layers, head)"
    if not replicas:
        return (
            f"{devices:,} devices: no layout uses all of them. {placed}, and parallel.data is at most "
            f"{MOST_REPLICAS:,}. Take a number of devices that is such a product"
        )
    dividing = [data for data in replicas if packs % data == 0]
    if dividing:
        return (
            f"train.packs_per_step: {packs:,} packs are more than {MAX_MICROBATCHES:,} micro-batches on the ranks of "
            f"any layout of {devices:,} devices. Take fewer packs, or more devices"
        )
    nearest = {packs // data * data for data in replicas} | {-(-packs // data) * data for data in replicas}
    below, above = max((n for n in nearest if 0 < n < packs), default=None), min(n for n in nearest if n > packs)
    would = f"{above:,}" if below is None else f"{below:,} or {above:,}"
    several = "replicas" if len(replicas) == 1 else "replicas at least"
    return (
        f"train.packs_per_step: {packs:,} packs cannot be shared out over {devices:,} devices. {placed}, so there "
        f"are {min(replicas):,} {several}, each with the same number of packs. Set train.packs_per_step={would}; no "
        "suggestion changes it, since it defines the optimisation"
    )


def _divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
