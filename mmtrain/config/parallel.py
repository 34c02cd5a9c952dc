"""Keys of a run's ranks: how many there are, what each holds, and where frozen weights are kept."""

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mmtrain.config.keys import Files, Float, Free, Section, wrong_together
from mmtrain.config.limits import MAX_LAYERS

MAX_MICROBATCHES = 32_768  # of a step, times pipeline ranks; the plan simulates each, 4 s for 8,192
LayerIndex = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
LayerCounts = Literal["auto"] | LayerIndex | tuple[LayerIndex, ...]
Gibibytes = Annotated[Float, Field(gt=0, le=1e6)] | None


class ParallelSection(Section):
    pipeline: Free[int] = Field(1, ge=1, le=MAX_LAYERS)
    """pipeline ranks that share one copy of the model"""
    data: Free[int] = Field(1, ge=1, le=10_000)
    """data-parallel replicas of the whole pipeline"""
    stages_per_rank: Free[Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_LAYERS)]] = "auto"
    """stages per pipeline rank. 1: 1F1B; more: interleaved, which idles less and sends more; auto:
    the fastest in the simulation that fits in memory"""
    encoder_ranks: Free[
        Literal["auto", 0] | Annotated[tuple[LayerIndex, ...], Field(min_length=1)]
    ] = "auto"
    """pipeline ranks that hold blocks of a frozen encoder, e.g. [0, 1, 3]; rank 0 always holds the
    patch embedding. 0: rank 0 holds all blocks; auto: the fastest in the simulation. Results do not
    change"""
    boundaries: Free[tuple[LayerIndex, ...] | None] = None
    """first decoder layer of stage 1, 2, ..., e.g. [8, 16, 24]; null: the planner chooses"""
    device_memory_gib: Free[Gibibytes] = None
    """memory a rank may use, GiB, including 6% for fragmentation; leave 2.5 GiB of a GPU to CUDA
    and NCCL. null: memory of the GPUs here less max(6%, 2.5 GiB), no limit without a GPU"""
    recompute_layers: Free[LayerCounts] = "auto"
    """decoder layers per rank whose activations are recomputed in backward: one number, one per
    pipeline rank, or auto (none if all fits in memory, else as few as needed). A number above the
    layer count means all"""
    streamed_layers: Free[LayerCounts] = 0
    """decoder layers per rank whose frozen weights are fetched right before they compute, not kept
    on the device (adapters stay): one number, one per pipeline rank, or auto (none if all fits in
    memory, else as many as needed, where that costs less than recomputation). A number above the
    layer count means all; results do not change"""
    stream_from: Free[Literal["host", "peers"]] = "host"
    """where the weights of streamed layers are kept. host: in the machine's memory, shared by all
    ranks that stream these layers; peers: in parts on the devices of weight_shards replicas, for
    machines with fast links (NVLink)"""
    weight_shards: Free[Annotated[int, Field(ge=1, le=10_000)] | None] = None
    """replicas that share the weights of streamed layers where stream_from is peers: a divisor of
    parallel.data; null: all replicas"""
    host_memory_gib: Free[Gibibytes] = None
    """machine memory that a rank may use for streamed layers, GiB; null: all that the machine
    has
    """
    calibration: Free[Files[str | None]] = None
    """file of measured costs to plan with; null: the cached file for this run on this device, or
    assumed costs without one"""
    threads_per_rank: Free[Annotated[int, Field(ge=1, le=4096)] | None] = None
    """CPU threads per rank; null: OMP_NUM_THREADS, else as many as the run had that is resumed,
    else cores / local ranks"""
    timeout_seconds: Free[int] = Field(600, ge=1, le=604800)
    """a collective or message that waits longer than this fails"""

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        cuts = self.boundaries
        stages_per_rank = self.stages_per_rank
        if self.pipeline == 1 and stages_per_rank != "auto" and stages_per_rank > 1:
            raise wrong_together(
                f"parallel.stages_per_rank: {stages_per_rank} stages on one rank, but "
                "parallel.pipeline 1 has nothing to interleave. Leave it out"
            )
        if cuts is not None:
            stages = len(cuts) + 1
            wrong = stages % self.pipeline or (self.pipeline == 1 and stages > 1)
            if wrong or (stages_per_rank != "auto" and stages != self.pipeline * stages_per_rank):
                layout = f"parallel.pipeline {self.pipeline}"
                needed = self.pipeline - 1
                if stages_per_rank != "auto" and stages_per_rank > 1:
                    layout += f" and stages_per_rank {stages_per_rank}"
                    needed = self.pipeline * stages_per_rank - 1
                raise wrong_together(
                    f"parallel.boundaries: {list(cuts)} has {len(cuts)} entries; {layout} needs "
                    f"{needed}. List the first decoder layer of every stage except stage 0"
                )
            if any(later <= earlier for earlier, later in itertools.pairwise(cuts)):
                raise wrong_together(
                    f"parallel.boundaries: {list(cuts)} must increase strictly, since every stage "
                    "needs a decoder layer"
                )
        for key in ("recompute_layers", "streamed_layers"):
            counts = getattr(self, key)
            if isinstance(counts, tuple) and len(counts) != self.pipeline:
                raise wrong_together(
                    f"parallel.{key}: {list(counts)} has {len(counts)} entries; parallel.pipeline "
                    f"{self.pipeline} needs {self.pipeline}, one per pipeline rank, or one number "
                    "for all"
                )
        return self

    @model_validator(mode="after")
    def _check_peers(self) -> Self:
        shards = self.weight_shards
        data = self.data
        if self.stream_from == "host":
            if shards not in (None, 1):
                raise wrong_together(
                    f"parallel.weight_shards: {shards}, but parallel.stream_from is host, which "
                    "does not use it. Set stream_from=peers, or leave weight_shards out"
                )
            return self
        layers = self.streamed_layers
        if isinstance(layers, tuple):
            layers = max(layers)
        if layers == 0:
            raise wrong_together(
                "parallel.stream_from: peers, but parallel.streamed_layers is 0, so nothing is "
                "streamed. Set streamed_layers=auto, or leave stream_from out"
            )
        if self.host_memory_gib is not None:
            raise wrong_together(
                f"parallel.host_memory_gib: {self.host_memory_gib:g}, but parallel.stream_from "
                "peers keeps nothing in the machine's memory. Leave one of them out"
            )
        shards = shards or data
        if shards < 2 or data % shards:
            fits = [n for n in range(2, data + 1) if data % n == 0]
            needs = "parallel.data of at least 2"
            if fits:
                more = ", ..." if len(fits) > 6 else ""
                needs = f"one of {', '.join(map(str, fits[:6]))}{more}"
            raise wrong_together(
                f"parallel.weight_shards: {shards}; parallel.stream_from peers with parallel.data "
                f"{data} needs {needs}"
            )
        return self
