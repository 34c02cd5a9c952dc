"""What the planner refuses: an error says what was seen, what is needed, and what to change."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, escape, first_few
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.adapters import is_adapter
from mmtrain.models.facts.shapes import matches_any
from mmtrain.models.layouts.layout import ImageLayout
from mmtrain.plan.costs import Models
from mmtrain.plan.cuts import given_cut
from mmtrain.plan.plan import RankPlan, stage_of
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import RESERVED_SHARE, limit_on_gpu
from mmtrain.plan.workload import expected_image, typical_tiling

_LEARNED_POSITIONS = re.compile(r"\.(wpe|embed_positions|position_embeddings)\.weight$")

_NAMES_SHOWN = 3
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_LEAST_CONNECTIONS = 8  # CUDA's own default; streams of a rank: computes, four channels, replicas, statistics, copies
# What each does to the order of work on a GPU; see `Ordering` in tests/deadlocks.py.
_HANGS = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for, also one that waits for a message",
    _CONNECTIONS: "streams that share a queue wait for each other",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "messages of one direction wait for those of the other",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor that is freed makes the GPU wait for all of its work",
}


def check_layout(config: RunConfig, models: Models) -> None:
    """Raises UserError for more stages than layers, boundaries past the last layer, unfit packs."""
    decoder = len(models.llm.decoder)
    pipeline, stages_per_rank = config.parallel.pipeline, config.parallel.stages_per_rank
    model = config.model.llm.path
    placed = f"{model} has {decoder + 2} layers to place (front, {decoder} decoder layers, head)"
    if pipeline > decoder + 2:
        raise UserError(f"parallel.pipeline: {pipeline} stages, but {placed}: at most {decoder + 2} stages")
    if stages_per_rank != "auto" and pipeline * stages_per_rank > decoder + 2:
        most = (decoder + 2) // pipeline
        raise UserError(
            f"parallel.stages_per_rank: {pipeline} ranks of {stages_per_rank} stages, but {placed}: at most {most}"
        )
    boundaries = config.parallel.boundaries
    if boundaries and boundaries[-1] > decoder:
        raise UserError(
            f"parallel.boundaries: {list(boundaries)}, but {model} has {decoder} decoder layers. The last stage "
            f"begins at layer {decoder} (the head alone) at the latest."
        )
    for table in models.llm.front:
        if _LEARNED_POSITIONS.search(table.name):
            positions = table.shape[0] - (2 if models.llm.model_type == "opt" else 0)  # opt's first two rows are unused
            if config.data.pack_length > positions:
                raise UserError(
                    f"data.pack_length: {config.data.pack_length} tokens, but {model} has learned {positions} "
                    f"positions ({table.name}): at most {positions}"
                )
    if models.layout.takes_images:
        _check_expected_image(config, models.layout)
        _check_packs(config, models.layout)


def _check_expected_image(config: RunConfig, layout: ImageLayout) -> None:
    if config.data.expected_image_tiles is not None and not layout.is_sized:
        raise UserError(
            f"data.expected_image_tiles: {config.data.expected_image_tiles:g} and data.expected_image_positions: "
            f"{config.data.expected_image_positions:g}, but with model.vision.layout {layout.name} every image is "
            f"one tile and {layout.positions_per_tile} positions. Leave both out (=null removes them)."
        )


def _check_packs(config: RunConfig, layout: ImageLayout) -> None:
    data = config.data
    image = math.ceil(max(typical_tiling(config, layout).positions, expected_image(config, layout)[1]))
    if data.pack_length <= image:
        asked = "an image of " + config.model.vision.name
        hint = ""
        if layout.is_sized:
            asked = f"a typical image of model.vision.layout {layout.name}"
            hint = " If images are smaller, set data.expected_image_positions as mmtrain inspect prints it."
        raise UserError(
            f"data.pack_length: {data.pack_length} tokens, but {asked} takes {image}. A pack must hold an image and "
            f"its text, e.g. {2 ** image.bit_length()} tokens.{hint}"
        )
    tiles = expected_image(config, layout)[0]
    if data.max_tiles_per_pack is not None and data.max_tiles_per_pack < tiles:
        raise UserError(
            f"data.max_tiles_per_pack: {data.max_tiles_per_pack}, but a typical image of model.vision.layout "
            f"{layout.name} is {tiles:g} tiles. Set at least {math.ceil(tiles)}, or leave it out."
        )


def _trained_of_encoder(config: RunConfig, models: Models) -> str | None:
    """The first of the encoder's parameters that trains."""
    return next((p.name for p in models.vision.parameters if matches_any(p.name, config.model.trainable)), None)


def check_encoder_ranks(config: RunConfig, models: Models) -> None:
    """Raises UserError where the encoder trains, for ranks that are not there, and for more ranks than blocks."""
    ranks, pipeline = config.parallel.encoder_ranks, config.parallel.pipeline
    if ranks in ("auto", 0):
        return
    wrong = [rank for rank in ranks if rank >= pipeline]
    if wrong or len(set(ranks)) < len(ranks):
        raise UserError(
            f"parallel.encoder_ranks: {escape(str(list(ranks)))}, but parallel.pipeline {pipeline} has ranks 0 "
            f"to {pipeline - 1}. Name each once at most."
        )
    if models.vision.blocks_run == 0 or set(ranks) == {0}:
        return
    trained = _trained_of_encoder(config, models)
    if trained is not None:
        raise UserError(
            f"parallel.encoder_ranks: {list(ranks)}, but {trained} trains. An encoder that trains is whole on rank "
            "0: use auto or 0."
        )
    if len(ranks) > models.vision.blocks_run:
        raise UserError(
            f"parallel.encoder_ranks: {len(ranks)} ranks, but {models.vision.source} runs "
            f"{models.vision.blocks_run} blocks: at most one rank a block"
        )


def check_streaming(config: RunConfig, models: Models) -> None:
    """Raises UserError where layers are to be streamed, or quantised, and none can be."""
    asked, quantisation = config.parallel.streamed_layers, config.model.llm.quantize
    streams = any(asked) if isinstance(asked, tuple) else asked != 0
    if quantisation is not None and streams:
        raise UserError(
            f"parallel.streamed_layers: {escape(str(asked))}, but model.llm.quantize {quantisation} keeps decoder "
            "layers on the device in fewer bits. Leave one of them out."
        )
    if quantisation is None and (asked == "auto" or not streams):
        return
    trained = [
        next((p.name for p in layer if not is_adapter(p.name) and matches_any(p.name, config.model.trainable)), None)
        for layer in models.llm.decoder
    ]
    if all(trained):
        key, value = (
            ("parallel.streamed_layers", asked) if quantisation is None else ("model.llm.quantize", quantisation)
        )
        raise UserError(
            f"{key}: {escape(str(value))}, but something besides adapters trains in every decoder layer, such as "
            f"{trained[0]}, and what trains stays on the device. Leave {key.rpartition('.')[2]} out, or train "
            "adapters (model.lora)."
        )


def check_environment(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Raises UserError for environment variables with which the ranks of a pipeline on GPUs can deadlock.

    tests/deadlocks.py computes which: a receive that is posted ahead must not hold up other work of its GPU.
    """
    if config.parallel.pipeline == 1:
        return
    for name, harm in _HANGS.items():
        value = environment.get(name, "").strip()
        few = name == _CONNECTIONS and value.isdigit() and int(value) < _LEAST_CONNECTIONS
        if few or (name != _CONNECTIONS and value not in ("", "0")):
            remedy = f"unset it, or set {_LEAST_CONNECTIONS} to 32" if few else "unset it"
            raise UserError(
                f"{name}={value} in the environment: {harm}, so that the {config.parallel.pipeline} stages of a "
                f"pipeline can wait for each other for ever; {remedy} on every machine, or use parallel.pipeline=1"
            )


def check_trainable(config: RunConfig, models: Models) -> None:
    """Raises UserError for a pattern that matches nothing, for a trainable tied embedding, and for idle adapters."""
    names = [p.name for p in models.parameters]
    idle = next((name for name in names if is_adapter(name) and not matches_any(name, config.model.trainable)), None)
    if idle is not None:
        all_of_them = "vision.*.lora_*" if idle.startswith("vision.") else "llm.layers.*.lora_*"
        raise UserError(
            f"model.trainable: {idle} would not train, and an adapter that does not train changes nothing. Add "
            f"{all_of_them} to it, or give the layer no adapter in model.lora.targets."
        )
    for pattern in config.model.trainable:
        matching = [name for name in names if matches_any(name, (pattern,))]
        if not matching and config.model.lora is None and "lora_" in pattern:
            raise UserError(
                f"model.trainable: {pattern!r} names adapters, but model.lora is null, so there are none. Set "
                "model.lora.r=16, and in model.lora.targets the layers that get one."
            )
        if not matching:
            nearest = nearest_names(pattern, names)
            raise UserError(
                f"model.trainable: {pattern!r} matches no parameter that runs; "
                + (f"nearest: {', '.join(nearest)}" if nearest else f"names look like {names[0]} and {names[-1]}")
            )
        tied = [name for name in matching if name in ("llm.embedding.weight", "llm.head.weight")]
        if models.llm.tied and tied:
            raise UserError(
                f"model.trainable: {pattern} matches {tied[0]}, but {config.model.llm.path} ties its LM head to its "
                "embedding. The first and the last stage each hold a copy, and training would let them drift apart. "
                "Leave both frozen, or use a model with tie_word_embeddings: false."
            )


def check_groups(config: RunConfig, models: Models) -> None:
    """Raises UserError for a pattern of `optimizer.groups` that matches nothing that trains, and for overlaps."""
    groups = config.optimizer.groups
    names = [p.name for p in models.parameters]
    trained = [name for name in names if matches_any(name, config.model.trainable)]
    for number, group in enumerate(groups):
        for pattern in group.match:
            if any(matches_any(name, (pattern,)) for name in trained):
                continue
            key = f"optimizer.groups.{number}.match: {pattern!r}"
            if frozen := [name for name in names if matches_any(name, (pattern,))]:
                raise UserError(
                    f"{key} matches {first_few(frozen, _NAMES_SHOWN)}, frozen by model.trainable, which is "
                    f"[{', '.join(config.model.trainable)}]; add it there, or leave the group out"
                )
            near = nearest_names(pattern, trained)
            raise UserError(
                f"{key} matches no parameter that trains; "
                + (f"nearest: {', '.join(near)}" if near else f"these train: {first_few(trained, _NAMES_SHOWN)}")
            )
    for name in trained:
        members = [
            f"{i} ({', '.join(group.match)})" for i, group in enumerate(groups) if matches_any(name, group.match)
        ]
        if len(members) > 1:
            raise UserError(
                f"optimizer.groups: {name} is in the groups {' and '.join(members)}. Narrow the patterns until each "
                "parameter is in one group."
            )


def nearest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Parameters and modules with a similar name; with a wildcard also the names of all layers at once."""
    candidates: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            candidates[".".join(parts[:length])] = None
    if "*" in pattern:
        candidates = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in candidates)
    return difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.6)


def does_not_fit(config: RunConfig, models: Models, search: Search, limit: int | None) -> str:
    """The message for a plan beyond the memory limit: what the smallest cut needs on each rank, and what takes less."""
    pipeline, by_hand = config.parallel.pipeline, config.parallel.boundaries is not None
    stages_per_rank = 1 if config.parallel.stages_per_rank == "auto" else config.parallel.stages_per_rank
    tightest = Search(search.costs.without_memory(), 0, search.encoder_ranks)
    cut, costs = tightest.smallest(stages_per_rank, given_cut(config, search.costs) if by_hand else None)
    on_host = search.costs.setting.streaming.host_bytes
    for rank, cost in enumerate(costs):
        if on_host is not None and cost.host_bytes > on_host:
            return (
                f"parallel.host_memory_gib: {config.parallel.host_memory_gib:g} GiB, but rank {rank} would keep "
                f"{bytes_text(cost.host_bytes)} of streamed layers in its machine's memory. Stream fewer "
                "(parallel.streamed_layers=auto streams as many as there is room for), or raise it."
            )
    assert limit is not None
    stated = config.parallel.device_memory_gib is not None
    source = "parallel.device_memory_gib" if stated else "the GPU's memory, less what CUDA and NCCL take"
    lines = [
        f"This run does not fit: a rank may use {bytes_text(limit)} ({source}), {RESERVED_SHARE:.0%} of it left to "
        f"fragmentation; {'the given boundaries need' if by_hand else 'the smallest cut needs'}"
    ]
    for rank, cost in enumerate(costs):
        stages = range(rank, len(cut) - 1, pipeline)
        layers = ", ".join(stage_of(cut, stage).summary for stage in stages)
        name = f"stage {rank}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        recompute = sum(cost.recompute_layers)
        how = "streamed" if config.model.llm.quantize is None else "quantised"
        away = f" ({cost.streamed_count} layers {how})" if cost.streamed_count else ""
        lines.append(
            f"  {name} ({layers}): {bytes_text(cost.total_bytes)} = weights {bytes_text(cost.weight_bytes)}{away} + "
            f"optimizer {bytes_text(cost.state_bytes)} + activations {bytes_text(cost.activation_bytes)}"
            f"{f' ({recompute} layers recomputing)' if recompute else ''} + workspace {bytes_text(cost.working_bytes)}"
            f"{'' if search.costs.fits(cost) else '  <- too much'}"
        )
    if all(map(search.costs.fits, costs)):
        lines.append("These fit, but not with what waits between slices of the encoder, or for its use")
    lines.append(f"To take less memory (none of it was planned): {'; '.join(_hints(config, models))}")
    return "\n".join(lines)


def _hints(config: RunConfig, models: Models) -> list[str]:
    """Changes that take less memory, as overrides where one value is best. Which of them is enough is not known."""
    parallel = config.parallel
    automatic = {"boundaries": None, "stages_per_rank": "auto", "recompute_layers": "auto", "encoder_ranks": "auto"}
    hints = [
        f"parallel.{key}={'null' if value is None else value}"
        for key, value in automatic.items()
        if getattr(parallel, key) != value
    ]
    if parallel.streamed_layers != "auto":
        resident = "" if config.model.llm.quantize is None else "model.llm.quantize=null "
        hints.append(f"{resident}parallel.streamed_layers=auto")
    if config.model.llm.dtype == "float32":
        hints.append("model.llm.dtype=bfloat16")
    if config.train.packs_per_microbatch > 1:
        hints.append("fewer train.packs_per_microbatch")
    if parallel.pipeline < len(models.llm.decoder) + 2:  # front and head are layers, too
        hints.append(f"parallel.pipeline above {parallel.pipeline}")
    return [*hints, "a smaller data.pack_length", "devices with more memory"]


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a rank's GPU."""

    total: int
    free: int  # that no process holds
    allocated: int = 0  # by the rank's tensors
    cached: int = 0  # by its allocator, tensors included


def refuse_short_memory(rank: RankPlan, gpu: str, memory: GpuMemory) -> None:
    """Raises UserError for a GPU on which less is free than the plan still needs; others may hold the rest of it.

    Once the models are loaded, frozen and master weights are allocated; activations, workspace and moments are not.
    """
    needed = rank.total_bytes - memory.allocated
    available = memory.free + memory.cached - memory.allocated
    if needed <= available:
        return
    others = memory.total - memory.free - memory.cached
    stages = ", ".join(str(stage.stage) for stage in rank.stages)
    most = memory.total - others
    limit = (most if memory.cached else limit_on_gpu(most)) / 2**30  # later CUDA itself is among the others
    loaded = f" beside the {bytes_text(memory.allocated)} that the rank has loaded" if memory.allocated else ""
    raise UserError(
        f"rank {rank.rank} (stage {stages}) does not fit on {gpu}: {bytes_text(available)} of "
        f"{bytes_text(memory.total)} are free, and the plan still needs {bytes_text(needed)}{loaded}; "
        f"{bytes_text(others)} are held by CUDA itself and by other processes (see nvidia-smi): end those, choose "
        f"other GPUs by CUDA_VISIBLE_DEVICES, or plan for less with parallel.device_memory_gib="
        f"{math.floor(limit * 10) / 10:g}"
    )
