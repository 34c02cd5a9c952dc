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
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import matches_any
from mmtrain.facts.tokenizer_files import refuse_missing_marks
from mmtrain.facts.vision_files import check_preprocessing
from mmtrain.layouts.layout import ImageLayout
from mmtrain.plan.costs import expected_image, typical_tiling
from mmtrain.plan.cuts import given_cut
from mmtrain.plan.plan import RankPlan, stage_of
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import RESERVED_SHARE, limit_on_gpu
from mmtrain.stock.exporters import check_export_format

_LEARNED_POSITIONS = re.compile(r"\.(wpe|embed_positions|position_embeddings)\.weight$")
_NAMES_SHOWN = 3
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# CUDA's own default; streams of a rank: computes, four channels, replicas, statistics, copies
_LEAST_CONNECTIONS = 8
# What each does to the order of work on a GPU; see `Ordering` in tests/deadlocks.py.
_HANGS = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel, even one that waits for a message",
    _CONNECTIONS: "streams that share a queue wait for each other",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "messages in one direction wait for those in the other",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each freed tensor makes the GPU wait for all its work",
}


def check_run(config: RunConfig, models: Models) -> None:
    """Raises UserError for a config that no plan can satisfy, whatever memory there is."""
    if config.model.vision is not None:
        check_preprocessing(config.model.vision.name)
    for check in (
        _check_layout,
        _check_trainable,
        _check_groups,
        _check_encoder_ranks,
        _check_streaming,
    ):
        check(config, models)
    trained = [p.name for p in models.parameters if matches_any(p.name, config.model.trainable)]
    check_export_format(config.export.format, models, trained)
    refuse_missing_marks(config)


def _check_layout(config: RunConfig, models: Models) -> None:
    decoder, model = len(models.llm.decoder), config.model.llm.path
    pipeline, stages_per_rank = config.parallel.pipeline, config.parallel.stages_per_rank
    placed = f"{model} has {decoder + 2} layers to place (front, {decoder} decoder layers, head)"
    most, first = decoder + 3 - models.first_layers, models.first_layers - 1
    if first:
        placed += (
            f", and stage 0 holds the front and the {first} decoder layers behind which "
            "DeepStack adds features"
        )
    if pipeline > most:
        raise UserError(
            f"parallel.pipeline: {pipeline} stages, but {placed}: at most {most} stages"
        )
    if stages_per_rank != "auto" and pipeline * stages_per_rank > most:
        raise UserError(
            f"parallel.stages_per_rank: {pipeline} ranks of {stages_per_rank} stages, but "
            f"{placed}: at most "
            f"{most // pipeline}"
        )
    boundaries = config.parallel.boundaries
    if boundaries and boundaries[0] < first:
        raise UserError(
            f"parallel.boundaries: {list(boundaries)}, but {placed}. "
            f"Begin stage 1 at layer {first} or later."
        )
    if boundaries and boundaries[-1] > decoder:
        raise UserError(
            f"parallel.boundaries: {list(boundaries)}, but {model} has {decoder} decoder layers. "
            "The last stage "
            f"must begin at layer {decoder} (the head alone) or earlier."
        )
    for table in models.llm.front:
        if _LEARNED_POSITIONS.search(table.name):
            # opt's first two rows are unused
            positions = table.shape[0] - (2 if models.llm.model_type == "opt" else 0)
            if config.data.pack_length > positions:
                raise UserError(
                    f"data.pack_length: {config.data.pack_length} tokens, but {model} has "
                    f"learned {positions} "
                    f"positions ({table.name}): at most {positions}"
                )
    if models.layout.takes_images:
        _check_images(config, models.layout)


def _check_images(config: RunConfig, layout: ImageLayout) -> None:
    data = config.data
    if data.expected_attended_tiles is not None and not layout.attends_across:
        raise UserError(
            f"data.expected_attended_tiles: {data.expected_attended_tiles:g}, but with "
            "model.vision.layout "
            f"{layout.name} the encoder sees each tile by itself. Leave it out (=null removes it)."
        )
    if data.expected_image_tiles is not None and not layout.is_sized:
        raise UserError(
            f"data.expected_image_tiles: {data.expected_image_tiles:g} and "
            "data.expected_image_positions: "
            f"{data.expected_image_positions:g}, but with model.vision.layout {layout.name} "
            "every image is "
            f"one tile and {layout.positions_per_tile} positions. "
            "Leave both out (=null removes them)."
        )
    tiles, positions = expected_image(data, layout)
    image = math.ceil(max(typical_tiling(data, layout).positions, positions))
    if data.pack_length <= image:
        hint = (
            " If images are smaller, set data.expected_image_positions as mmtrain "
            "inspect prints it."
        )
        raise UserError(
            f"data.pack_length: {data.pack_length} tokens, but a typical image of "
            f"model.vision.layout {layout.name} "
            f"takes {image}. A pack must hold an image and its text, e.g. "
            f"{2 ** image.bit_length()} tokens."
            f"{hint * layout.is_sized}"
        )
    if data.max_tiles_per_pack is not None and data.max_tiles_per_pack < tiles:
        raise UserError(
            f"data.max_tiles_per_pack: {data.max_tiles_per_pack}, but a typical image of "
            "model.vision.layout "
            f"{layout.name} is {tiles:g} tiles. Set at least {math.ceil(tiles)}, or leave it out."
        )


def _check_encoder_ranks(config: RunConfig, models: Models) -> None:
    ranks, pipeline, vision = config.parallel.encoder_ranks, config.parallel.pipeline, models.vision
    if ranks in ("auto", 0):
        return
    if max(ranks) >= pipeline or len(set(ranks)) < len(ranks):
        raise UserError(
            f"parallel.encoder_ranks: {escape(str(list(ranks)))}, but parallel.pipeline "
            f"{pipeline} has ranks 0 "
            f"to {pipeline - 1}. Name each at most once."
        )
    if vision.blocks_run == 0 or set(ranks) == {0}:
        return
    trained = next(
        (p.name for p in vision.parameters if matches_any(p.name, config.model.trainable)), None
    )
    if trained is not None:
        raise UserError(
            f"parallel.encoder_ranks: {list(ranks)}, but {trained} trains. "
            "A trained encoder stays whole on rank "
            "0: use auto or 0."
        )
    if vision.whole_because:
        raise UserError(
            f"parallel.encoder_ranks: {list(ranks)}, but {vision.source} {vision.whole_because}, "
            "and stays whole on "
            "rank 0: use auto or 0."
        )
    if len(ranks) > vision.blocks_run:
        raise UserError(
            f"parallel.encoder_ranks: {len(ranks)} ranks, but {vision.source} runs "
            f"{vision.blocks_run} blocks. Name "
            "at most one rank per block"
        )


def _check_streaming(config: RunConfig, models: Models) -> None:
    key, value = "parallel.streamed_layers", config.parallel.streamed_layers
    quantisation = config.model.llm.quantize
    streams = any(value) if isinstance(value, tuple) else value != 0
    if quantisation is not None and streams:
        raise UserError(
            f"{key}: {escape(str(value))}, but model.llm.quantize {quantisation} keeps decoder "
            "layers on the device "
            "in fewer bits. Leave one of them out."
        )
    if quantisation is not None:
        key, value = "model.llm.quantize", quantisation
    elif value == "auto" or not streams:
        return
    trained = [
        next(
            (
                p.name
                for p in layer
                if not is_adapter(p.name) and matches_any(p.name, config.model.trainable)
            ),
            None,
        )
        for layer in models.llm.decoder
    ]
    if all(trained):
        raise UserError(
            f"{key}: {escape(str(value))}, but something besides adapters trains in every decoder "
            "layer, such as "
            f"{trained[0]}, and what trains stays on the device. "
            f"Leave {key.rpartition('.')[2]} out, or train "
            "adapters (model.lora)."
        )


def check_environment(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Raises UserError for environment variables with which the ranks of a pipeline on GPUs can
    deadlock.

    tests/deadlocks.py computes which: a receive that is posted ahead must not hold up other work of
    its GPU.
    """
    if config.parallel.pipeline == 1:
        return
    for name, harm in _HANGS.items():
        value = environment.get(name, "").strip()
        few = name == _CONNECTIONS and value.isdigit() and int(value) < _LEAST_CONNECTIONS
        if few or (name != _CONNECTIONS and value not in ("", "0")):
            raise UserError(
                f"{name}={value} in the environment: "
                f"{harm}, so the {config.parallel.pipeline} stages of a "
                "pipeline can wait for each other forever. "
                "Unset it on every machine, or use parallel.pipeline=1"
            )


def _check_trainable(config: RunConfig, models: Models) -> None:
    names = [p.name for p in models.parameters]
    idle = next(
        (
            name
            for name in names
            if is_adapter(name) and not matches_any(name, config.model.trainable)
        ),
        None,
    )
    if idle is not None:
        adapters = "vision.*.lora_*" if idle.startswith("vision.") else "llm.layers.*.lora_*"
        raise UserError(
            f"model.trainable: {idle} would not train, and a frozen adapter changes nothing. Add "
            f"{adapters} to it, or give the layer no adapter in model.lora.targets."
        )
    for pattern in config.model.trainable:
        matching = [name for name in names if matches_any(name, (pattern,))]
        if not matching and config.model.lora is None and "lora" in pattern:
            raise UserError(
                f"model.trainable: {pattern!r} names adapters, but model.lora is null, so "
                "there are none. Set "
                "model.lora.r=16, in model.lora.targets the layers that get one, and here "
                "llm.layers.*.lora_*"
            )
        if not matching:
            raise UserError(
                f"model.trainable: {pattern!r} matches no parameter that runs; "
                f"{_nearest(pattern, names)}"
            )
        tied = [name for name in matching if name in ("llm.embedding.weight", "llm.head.weight")]
        if models.llm.tied and tied:
            raise UserError(
                f"model.trainable: {pattern} matches {tied[0]}, but {config.model.llm.path} ties "
                "its LM head to its "
                "embedding. The first and the last stage each hold a copy, and training would "
                "make them differ. "
                "Leave both frozen, or use a model with tie_word_embeddings: false."
            )


def _check_groups(config: RunConfig, models: Models) -> None:
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
                    f"{key} matches {first_few(frozen, _NAMES_SHOWN)}, frozen by model.trainable="
                    f"[{', '.join(config.model.trainable)}]. Add it there, or leave the group out"
                )
            raise UserError(f"{key} matches no parameter that trains; {_nearest(pattern, trained)}")
    for name in trained:
        members = [
            f"{i} ({', '.join(group.match)})"
            for i, group in enumerate(groups)
            if matches_any(name, group.match)
        ]
        if len(members) > 1:
            raise UserError(
                f"optimizer.groups: {name} is in the groups {' and '.join(members)}. "
                "Narrow the patterns so that each "
                "parameter is in one group."
            )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Name parameters and modules like a pattern; with a wildcard also the names of all layers at
    once.
    """
    candidates: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            candidates[".".join(parts[:length])] = None
    if "*" in pattern:
        candidates = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in candidates)
    near = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.6)
    return (
        f"nearest: {', '.join(near)}"
        if near
        else f"names look like {first_few(names, _NAMES_SHOWN)}"
    )


def does_not_fit(config: RunConfig, search: Search, limit: int | None) -> str:
    """Return the message for a plan beyond a memory limit: what each rank of the nearest cut
    needs.
    """
    by_hand, stages_per_rank = (
        config.parallel.boundaries is not None,
        config.parallel.stages_per_rank,
    )
    cut, ranks = search.nearest(
        1 if stages_per_rank == "auto" else stages_per_rank,
        given_cut(config, search.costs) if by_hand else None,
    )
    on_host = search.costs.setting.streaming.host_bytes
    for rank, cost in enumerate(ranks):
        if on_host is not None and cost.host_bytes > on_host:
            return (
                f"parallel.host_memory_gib: {config.parallel.host_memory_gib:g} GiB, but rank "
                f"{rank} would keep "
                f"{bytes_text(cost.host_bytes)} of streamed layers in its machine's memory. "
                "Stream fewer, or raise it"
            )
    assert limit is not None
    stated = config.parallel.device_memory_gib is not None
    source = (
        "parallel.device_memory_gib" if stated else "the GPU's memory without that of CUDA and NCCL"
    )
    lines = [
        f"This run does not fit: a rank may use {bytes_text(limit)} ({source}), "
        f"{RESERVED_SHARE:.0%} of it for "
        f"fragmentation; {'the given boundaries need' if by_hand else 'the nearest cut needs'}"
    ]
    for rank, cost in enumerate(ranks):
        stages = range(rank, len(cut) - 1, config.parallel.pipeline)
        layers = ", ".join(stage_of(cut, stage).summary for stage in stages)
        recompute = sum(cost.recompute_layers)
        how = "streamed" if config.model.llm.quantize is None else "quantised"
        lines.append(
            f"  stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} ({layers}): "
            f"{bytes_text(cost.total_bytes)} = weights {bytes_text(cost.weight_bytes)}"
            f"{f' ({cost.streamed_count} layers {how})' if cost.streamed_count else ''} + "
            f"optimizer {bytes_text(cost.state_bytes)} + activations "
            f"{bytes_text(cost.activation_bytes)}"
            f"{f' ({recompute} layers recomputed)' if recompute else ''} + workspace "
            f"{bytes_text(cost.working_bytes)}"
            f"{'' if search.costs.fits(cost) else '  <- too much'}"
        )
    if all(map(search.costs.fits, ranks)):
        lines.append(
            "These fit, but not together with encoder outputs that wait between slices "
            "or for their use"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class GpuMemory:
    total: int
    free: int  # that no process holds
    allocated: int = 0  # by the rank's tensors
    cached: int = 0  # by its allocator, tensors included


def refuse_short_memory(rank: RankPlan, gpu: str, memory: GpuMemory) -> None:
    """Raises UserError for a GPU on which less is free than the plan still needs; others may hold
    the rest of it.

    Once the models are loaded, frozen and master weights are allocated; activations, workspace and
    moments are not.
    """
    needed = rank.total_bytes - memory.allocated
    available = memory.free + memory.cached - memory.allocated
    if needed <= available:
        return
    others = memory.total - memory.free - memory.cached
    most = memory.total - others
    # later CUDA itself is among the others
    limit = (most if memory.cached else limit_on_gpu(most)) / 2**30
    raise UserError(
        f"rank {rank.rank} (stage {', '.join(str(stage.stage) for stage in rank.stages)}) does "
        f"not fit on {gpu}: "
        f"{bytes_text(available)} of {bytes_text(memory.total)} are free, but the plan still needs "
        f"{bytes_text(needed)}. CUDA itself and other processes hold {bytes_text(others)} (see "
        "nvidia-smi). End those, "
        "choose other GPUs by CUDA_VISIBLE_DEVICES, or plan for less with "
        "parallel.device_memory_gib="
        f"{math.floor(limit * 10) / 10:g}"
    )
