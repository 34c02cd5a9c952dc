"""Refusals of the planner: an error says what was seen, what is needed, and what to change."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, escape, first_few
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import DataSection, OptimizerGroupSection, RunConfig
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.models import Models
from mmtrain.facts.quantised import QUANTISATIONS, Quantisation
from mmtrain.facts.shapes import VisionShape, matches_any
from mmtrain.facts.tokenizer_files import refuse_missing_marks
from mmtrain.facts.vision_files import check_preprocessing, unfit_filter
from mmtrain.layouts.layout import ImageLayout
from mmtrain.plan.costs import expected_image, typical_tiling
from mmtrain.plan.cuts import Cut, given_cut
from mmtrain.plan.plan import RankPlan, stage_of
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import RESERVED_SHARE, RankCost, StageCosts, limit_on_gpu
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
        name = config.model.vision.name
        check_preprocessing(name)
        if config.data.resize == "torchvision" and (unfit := unfit_filter(name)):
            raise UserError(f"data.resize: torchvision, but {unfit}. Set data.resize=pillow")
    trainable = config.model.trainable
    names = [p.name for p in models.parameters]
    trained = [name for name in names if matches_any(name, trainable)]
    _check_layout(config.parallel, models)
    _check_positions(config.data.pack_length, models)
    if models.layout.takes_images:
        _check_images(config.data, models.layout)
    _check_trainable(names, models)
    _check_groups(config.optimizer.groups, names, trained, trainable)
    _check_encoder_ranks(config.parallel, models.vision, trainable)
    _check_streaming(config.parallel, config.model.llm.quantize, models)
    check_export_format(config.export.format, models, trained)
    refuse_missing_marks(config)


def _check_layout(parallel: ParallelSection, models: Models) -> None:
    decoder = len(models.llm.decoder)
    model = models.section.llm.path
    pipeline = parallel.pipeline
    stages_per_rank = parallel.stages_per_rank
    placed = f"{model} has {decoder + 2} layers to place (front, {decoder} decoder layers, head)"
    first = models.first_layers - 1
    most = decoder + 2 - first
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
            f"{placed}: at most {most // pipeline}"
        )

    boundaries = parallel.boundaries
    if boundaries and boundaries[0] < first:
        raise UserError(
            f"parallel.boundaries: {list(boundaries)}, but {placed}. "
            f"Begin stage 1 at layer {first} or later."
        )
    if boundaries and boundaries[-1] > decoder:
        raise UserError(
            f"parallel.boundaries: {list(boundaries)}, but {model} has {decoder} decoder layers. "
            f"The last stage must begin at layer {decoder} (the head alone) or earlier."
        )


def _check_positions(pack_length: int, models: Models) -> None:
    for table in models.llm.front:
        if not _LEARNED_POSITIONS.search(table.name):
            continue
        positions = table.shape[0]
        if models.llm.model_type == "opt":
            positions -= 2  # its first two rows are unused
        if pack_length > positions:
            raise UserError(
                f"data.pack_length: {pack_length} tokens, but {models.section.llm.path} has "
                f"learned {positions} positions ({table.name}): at most {positions}"
            )


def _check_images(data: DataSection, layout: ImageLayout) -> None:
    if data.expected_attended_tiles is not None and not layout.attends_across:
        raise UserError(
            f"data.expected_attended_tiles: {data.expected_attended_tiles:g}, but with "
            f"model.vision.layout {layout.name} the encoder sees each tile by itself. "
            "Leave it out (=null removes it)."
        )
    if data.expected_image_tiles is not None and not layout.is_sized:
        raise UserError(
            f"data.expected_image_tiles: {data.expected_image_tiles:g} and "
            f"data.expected_image_positions: {data.expected_image_positions:g}, but with "
            f"model.vision.layout {layout.name} every image is one tile and "
            f"{layout.positions_per_tile} positions. Leave both out (=null removes them)."
        )

    tiles, positions = expected_image(data, layout)
    image = math.ceil(max(typical_tiling(data, layout).positions, positions))
    if data.pack_length <= image:
        hint = ""
        if layout.is_sized:
            hint = (
                " If images are smaller, set data.expected_image_positions as mmtrain "
                "inspect prints it."
            )
        raise UserError(
            f"data.pack_length: {data.pack_length} tokens, but a typical image of "
            f"model.vision.layout {layout.name} takes {image}. A pack must hold an image and its "
            f"text, e.g. {2 ** image.bit_length()} tokens.{hint}"
        )

    if data.max_tiles_per_pack is not None and data.max_tiles_per_pack < tiles:
        raise UserError(
            f"data.max_tiles_per_pack: {data.max_tiles_per_pack}, but a typical image of "
            f"model.vision.layout {layout.name} is {tiles:g} tiles. "
            f"Set at least {math.ceil(tiles)}, or leave it out."
        )


def _check_encoder_ranks(
    parallel: ParallelSection,
    vision: VisionShape,
    trainable: Sequence[str],
) -> None:
    ranks = parallel.encoder_ranks
    pipeline = parallel.pipeline
    if ranks in ("auto", 0):
        return
    if max(ranks) >= pipeline or len(set(ranks)) < len(ranks):
        raise UserError(
            f"parallel.encoder_ranks: {escape(str(list(ranks)))}, but parallel.pipeline "
            f"{pipeline} has ranks 0 to {pipeline - 1}. Name each at most once."
        )
    if vision.blocks_run == 0 or set(ranks) == {0}:
        return

    trained = next((p.name for p in vision.parameters if matches_any(p.name, trainable)), None)
    if trained is not None:
        raise UserError(
            f"parallel.encoder_ranks: {list(ranks)}, but {trained} trains. "
            "A trained encoder stays whole on rank 0: use auto or 0."
        )
    if vision.whole_because:
        raise UserError(
            f"parallel.encoder_ranks: {list(ranks)}, but {vision.source} {vision.whole_because}, "
            "and stays whole on rank 0: use auto or 0."
        )
    if len(ranks) > vision.blocks_run:
        raise UserError(
            f"parallel.encoder_ranks: {len(ranks)} ranks, but {vision.source} runs "
            f"{vision.blocks_run} blocks. Name at most one rank per block"
        )


def _check_streaming(
    parallel: ParallelSection,
    quantisation: Quantisation | None,
    models: Models,
) -> None:
    key = "parallel.streamed_layers"
    value = parallel.streamed_layers
    streams = value not in (0, "auto")
    if isinstance(value, tuple):
        streams = any(value)
    if quantisation is not None:
        if streams or value == "auto":
            raise UserError(
                f"{key}: {escape(str(value))}, but model.llm.quantize {quantisation} keeps decoder "
                "layers on the device in fewer bits. Leave one of them out."
            )
        key = "model.llm.quantize"
        value = quantisation
        if value == "published" and not models.llm.has_published_codes:
            raise UserError(
                f"{key}: published needs the files of an LLM whose decoder layers have FP8 or "
                f"MXFP4 codes; {models.llm.source} has none. Leave it out, or use nf4, int8 or fp8"
            )
    elif not streams:
        return

    trained = ""
    for layer in models.llm.decoder:
        names = (p.name for p in layer if not is_adapter(p.name))
        here = next((x for x in names if matches_any(x, models.section.trainable)), None)
        if here is None:
            return
        trained = trained or here
    raise UserError(
        f"{key}: {escape(str(value))}, but something besides adapters trains in every decoder "
        f"layer, such as {trained}, and what trains stays on the device. "
        f"Leave {key.rpartition('.')[2]} out, or train adapters (model.lora)."
    )


def check_environment(pipeline: int, environment: Mapping[str, str]) -> None:
    """Raises UserError for environment variables with which the ranks of a pipeline on GPUs can
    deadlock.

    tests/deadlocks.py computes which: a receive that is posted ahead must not hold up other work of
    its GPU.
    """
    if pipeline == 1:
        return
    for name, harm in _HANGS.items():
        value = environment.get(name, "").strip()
        hangs = value not in ("", "0")
        if name == _CONNECTIONS:
            hangs = value.isdigit() and int(value) < _LEAST_CONNECTIONS
        if hangs:
            raise UserError(
                f"{name}={value} in the environment: {harm}, so the {pipeline} stages of a "
                "pipeline can wait for each other forever. "
                "Unset it on every machine, or use parallel.pipeline=1"
            )


def _check_trainable(names: Sequence[str], models: Models) -> None:
    model = models.section
    for name in names:
        if is_adapter(name) and not matches_any(name, model.trainable):
            adapters = "vision.*.lora_*" if name.startswith("vision.") else "llm.layers.*.lora_*"
            raise UserError(
                f"model.trainable: {name} would not train, and a frozen adapter changes nothing. "
                f"Add {adapters} to it, or give the layer no adapter in model.lora.targets."
            )

    for pattern in model.trainable:
        matching = [name for name in names if matches_any(name, (pattern,))]
        if not matching and model.lora is None and "lora" in pattern:
            raise UserError(
                f"model.trainable: {pattern!r} names adapters, but model.lora is null, so "
                "there are none. Set model.lora.r=16, in model.lora.targets the layers that get "
                "one, and here llm.layers.*.lora_*"
            )
        if not matching:
            raise UserError(
                f"model.trainable: {pattern!r} matches no parameter that runs; "
                f"{_nearest(pattern, names)}"
            )
        tied = [name for name in matching if name in ("llm.embedding.weight", "llm.head.weight")]
        if models.llm.tied and tied:
            raise UserError(
                f"model.trainable: {pattern} matches {tied[0]}, but {model.llm.path} ties its LM "
                "head to its embedding. The first and the last stage each hold a copy, and "
                "training would make them differ. "
                "Leave both frozen, or use a model with tie_word_embeddings: false."
            )


def _check_groups(
    groups: Sequence[OptimizerGroupSection],
    names: Sequence[str],
    trained: Sequence[str],
    trainable: Sequence[str],
) -> None:
    for number, group in enumerate(groups):
        for pattern in group.match:
            matching = [name for name in names if matches_any(name, (pattern,))]
            if not set(matching).isdisjoint(trained):
                continue
            key = f"optimizer.groups.{number}.match: {pattern!r}"
            if matching:
                raise UserError(
                    f"{key} matches {first_few(matching, _NAMES_SHOWN)}, frozen by model.trainable="
                    f"[{', '.join(trainable)}]. Add it there, or leave the group out"
                )
            raise UserError(f"{key} matches no parameter that trains; {_nearest(pattern, trained)}")
    for name in trained:
        members = []
        for number, group in enumerate(groups):
            if matches_any(name, group.match):
                members.append(f"{number} ({', '.join(group.match)})")
        if len(members) > 1:
            raise UserError(
                f"optimizer.groups: {name} is in the groups {' and '.join(members)}. "
                "Narrow the patterns so that each parameter is in one group."
            )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Name parameters and modules like a pattern; with a wildcard also the names of all layers at
    once.
    """
    candidates: dict[str, None] = {}
    for name in names:
        if "*" in pattern:
            name = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            candidates[".".join(parts[:length])] = None
    near = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.6)
    if near:
        return f"nearest: {', '.join(near)}"
    return f"names look like {first_few(names, _NAMES_SHOWN)}"


def does_not_fit(parallel: ParallelSection, search: Search, limit: int | None) -> str:
    """Return the message for a plan beyond a memory limit: the needs of each rank of the nearest
    cut.
    """
    stages_per_rank = 1
    if parallel.stages_per_rank != "auto":
        stages_per_rank = parallel.stages_per_rank
    given = None
    need = "the nearest cut needs"
    if parallel.boundaries is not None:
        given = given_cut(parallel.boundaries, search.costs)
        need = "the given boundaries need"
    cut, ranks = search.nearest(stages_per_rank, given)

    on_host = search.costs.setting.streaming.host_bytes
    for rank, cost in enumerate(ranks):
        if on_host is not None and cost.host_bytes > on_host:
            return (
                f"parallel.host_memory_gib: {parallel.host_memory_gib:g} GiB, but rank {rank} "
                f"would keep {bytes_text(cost.host_bytes)} of streamed layers in its machine's "
                "memory. Stream fewer, or raise it"
            )
    source = "the GPU's memory without that of CUDA and NCCL"
    if parallel.device_memory_gib is not None:
        source = "parallel.device_memory_gib"

    lines = [
        f"This run does not fit: a rank may use {bytes_text(limit)} ({source}), "
        f"{RESERVED_SHARE:.0%} of it for fragmentation; {need}"
    ]
    for rank, cost in enumerate(ranks):
        lines.append(_needs(range(rank, len(cut) - 1, len(ranks)), cut, cost, search.costs))
    if all(map(search.costs.fits, ranks)):
        lines.append(
            "These fit, but not together with encoder outputs that wait between slices "
            "or for their use"
        )
    return "\n".join(lines)


def _needs(stages: range, cut: Cut, cost: RankCost, costs: StageCosts) -> str:
    """Tell the memory that a rank with these stages needs, part by part."""
    layers = ", ".join(stage_of(cut, stage).summary for stage in stages)
    noun = "stages" if len(stages) > 1 else "stage"
    text = (
        f"  {noun} {', '.join(map(str, stages))} ({layers}): "
        f"{bytes_text(cost.total_bytes)} = weights {bytes_text(cost.weight_bytes)}"
    )
    if cost.streamed_count:
        how = "quantised" if costs.setting.streaming.source in QUANTISATIONS else "streamed"
        text += f" ({cost.streamed_count} layers {how})"
    text += (
        f" + optimizer {bytes_text(cost.state_bytes)}"
        f" + activations {bytes_text(cost.activation_bytes)}"
    )
    recomputed = sum(cost.recompute_layers)
    if recomputed:
        text += f" ({recomputed} layers recomputed)"
    text += f" + workspace {bytes_text(cost.working_bytes)}"
    if not costs.fits(cost):
        text += "  <- too much"
    return text


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
    limit = memory.total - others
    if not memory.cached:  # later CUDA itself is among the others
        limit = limit_on_gpu(limit)
    raise UserError(
        f"rank {rank.rank} (stage {', '.join(str(stage.stage) for stage in rank.stages)}) does "
        f"not fit on {gpu}: {bytes_text(available)} of {bytes_text(memory.total)} are free, but "
        f"the plan still needs {bytes_text(needed)}. CUDA itself and other processes hold "
        f"{bytes_text(others)} (see nvidia-smi). End those, choose other GPUs by "
        "CUDA_VISIBLE_DEVICES, or plan for less with parallel.device_memory_gib="
        f"{math.floor(limit / 2**30 * 10) / 10:g}"
    )
