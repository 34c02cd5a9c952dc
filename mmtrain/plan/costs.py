"""What each layer that the planner places costs, per micro-batch: FLOPs, weight bytes, bytes kept for backward.

Layers are the front (vision encoder, projector, embedding), each decoder layer, and the head (final norm, LM head on
supervised tokens). Only what lies behind something trainable runs backward; `block_costs` says how that is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mmtrain.config import RunConfig
from mmtrain.plan.block_costs import Attention, Flops, Part, block_parts, mean_context, total
from mmtrain.plan.shapes import LlmShape, ParameterShape, VisionShape, matches

BYTES = {"float32": 4, "bfloat16": 2}
FP32 = 4  # bytes an element: the projector, master weights, gradients and AdamW's two moments
LOGITS_PER_CHUNK = 2**24  # elements; the loss makes logits in chunks of this size


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of everything a run holds."""

    llm: LlmShape
    vision: VisionShape
    projector: tuple[ParameterShape, ...]

    @property
    def parameters(self) -> Iterator[ParameterShape]:
        """All parameters, in the order in which they are used."""
        yield from self.vision.parameters
        yield from self.projector
        yield from self.llm.front
        for layer in self.llm.decoder:
            yield from layer
        yield from self.llm.head


@dataclass(frozen=True, slots=True)
class Workload:
    """What one micro-batch brings, in expectation."""

    tokens: int  # positions of all its packs
    document: int  # tokens of a typical document
    images: float
    supervised: float  # tokens with a label


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer the planner may place; FLOPs and activation bytes are those of one micro-batch."""

    name: str
    trainable_names: tuple[str, ...]
    trainable: int  # elements
    flops: Flops
    weight_bytes: int
    state_bytes: int  # master weights, gradients and optimizer moments
    saved_bytes: int  # kept from forward to backward
    recomputed_bytes: int  # kept if the layer recomputes its activations
    workspace_bytes: int  # most that lives while the layer runs, beyond what is kept


def workload(config: RunConfig, vision: VisionShape) -> Workload:
    """Expected contents of a micro-batch: documents of one image and `data.expected_text_tokens`, without padding."""
    tokens = config.train.packs_per_microbatch * config.data.pack_length
    document = min(config.data.pack_length, vision.tokens_per_image + config.data.expected_text_tokens)
    return Workload(tokens, document, tokens / document, tokens * config.data.expected_supervised_fraction)


def layer_costs(config: RunConfig, models: Models) -> tuple[LayerCost, ...]:
    """Costs of the front, every decoder layer and the head, in the order in which they run."""
    llm = models.llm
    work = workload(config, models.vision)
    size = BYTES[config.model.llm.dtype]
    trained = frozenset(p.name for p in models.parameters if matches(p.name, config.model.trainable))
    attention = Attention(llm.heads, llm.kv_heads, llm.head_dim, mean_context(work.document, llm.window))

    layers = [_front(config, models, work, trained)]
    upstream = bool(layers[0].trainable_names)
    for i, parameters in enumerate(llm.decoder):
        parts = block_parts(
            parameters,
            f"llm.layers.{i}.",
            trained,
            attention,
            llm.hidden_size,
            work.tokens,
            size,
            experts=llm.experts,
            experts_per_token=llm.experts_per_token,
        )
        flops, saved = total(parts, upstream)
        layers.append(
            _layer(
                f"llm.layers.{i}",
                [_Stored(parameters, size)],
                trained,
                flops,
                saved,
                recomputed_bytes=min(saved, size * llm.hidden_size * work.tokens),  # its input alone
                workspace_bytes=total(parts, True)[1],  # what a recomputed layer holds while its backward runs
            )
        )
        upstream = upstream or bool(layers[-1].trainable_names)
    layers.append(_head(llm, work, trained, size, upstream))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Parameters stored in `size` bytes an element; below fp32, what trains has a master weight besides."""

    parameters: Sequence[ParameterShape]
    size: int


def _layer(
    name: str,
    stored: Iterable[_Stored],
    trained: frozenset[str],
    flops: Flops,
    saved_bytes: int,
    *,
    recomputed_bytes: int,
    workspace_bytes: int,
) -> LayerCost:
    weight_bytes = state_bytes = elements = 0
    names: list[str] = []
    for group in stored:
        for parameter in group.parameters:
            weight_bytes += group.size * parameter.numel
            if parameter.name in trained:
                names.append(parameter.name)
                elements += parameter.numel
                state_bytes += (3 if group.size == FP32 else 4) * FP32 * parameter.numel
    return LayerCost(
        name,
        tuple(names),
        elements,
        flops,
        weight_bytes,
        state_bytes,
        saved_bytes,
        recomputed_bytes,
        workspace_bytes,
    )


_VISION_BLOCK = re.compile(r"vision\.(?:.*\.)?(?:blocks|layers)\.(\d+)\.")


def _front(config: RunConfig, models: Models, work: Workload, trained: frozenset[str]) -> LayerCost:
    """Vision encoder (without backward unless it trains), projector, embedding lookup (0 FLOPs)."""
    llm, vision, projector = models.llm, models.vision, models.projector
    llm_size = BYTES[config.model.llm.dtype]
    size = BYTES[config.model.vision.dtype or config.model.llm.dtype]
    patches = work.images * vision.tokens_per_image
    tokens = work.images * (vision.tokens_per_image + vision.prefix_tokens)

    stem: list[Part] = []  # patch convolution, class token, position embeddings
    blocks: dict[int, tuple[str, list[ParameterShape]]] = {}
    for parameter in vision.parameters:
        if block := _VISION_BLOCK.match(parameter.name):
            blocks.setdefault(int(block[1]), (block[0], []))[1].append(parameter)
        else:
            convolution = len(parameter.shape) == 4
            flops = 2 * parameter.numel * patches if convolution else 0.0
            stem.append(Part(0, flops, trained=parameter.name in trained))
    sequence = [stem]
    keys = vision.tokens_per_image + vision.prefix_tokens
    attention = Attention(vision.heads, vision.heads, vision.width // vision.heads, keys)
    for _, (prefix, parameters) in sorted(blocks.items()):
        sequence.append(block_parts(parameters, prefix, trained, attention, vision.width, tokens, size))
    sequence.append(_projector_parts(projector, patches, trained))
    # Only a matrix between embedding and hidden width costs anything here, all else is lookup and addition.
    inputs = [
        Part(0, 2 * p.numel * work.tokens if ".project_in." in p.name else 0.0, trained=p.name in trained)
        for p in llm.front
    ]

    flops, saved = total(inputs, False)  # text does not pass the encoder: what trains there gives it no gradient
    upstream = False
    for parts in sequence:
        part_flops, part_saved = total(parts, upstream)
        flops, saved = flops + part_flops, saved + part_saved
        upstream = upstream or any(part.trained for part in parts)
    pixels = round(3 * vision.image_size**2 * work.images) * 4
    # While a block runs: residual, normed, query, key, value, result, and the MLP's inner width (4x) twice.
    block_workspace = round(14 * vision.width * tokens) * size
    return _layer(
        "front",
        [_Stored(vision.parameters, size), _Stored(projector, FP32), _Stored(llm.front, llm_size)],
        trained,
        flops,
        saved,
        recomputed_bytes=saved,
        workspace_bytes=pixels + block_workspace,
    )


def _projector_parts(projector: Sequence[ParameterShape], patches: float, trained: frozenset[str]) -> list[Part]:
    """linear_1, gelu, linear_2, ... at places 0, 1, 2, ...; all in fp32."""
    modules = list(dict.fromkeys(p.name.rpartition(".")[0] for p in projector))
    parts = []
    for parameter in projector:
        place = 2 * modules.index(parameter.name.rpartition(".")[0])
        is_trained = parameter.name in trained
        if len(parameter.shape) == 1:
            parts.append(Part(place, trained=is_trained))
            continue
        outputs, inputs = parameter.shape
        flops = 2 * parameter.numel * patches
        parts.append(Part(place, flops, trained=is_trained, saved_for_wgrad=4 * inputs * patches))
        if place // 2 + 1 < len(modules):
            parts.append(Part(place + 1, saved_for_dgrad=4 * outputs * patches))
    return parts


def _head(llm: LlmShape, work: Workload, trained: frozenset[str], size: int, upstream: bool) -> LayerCost:
    """Final norm on all tokens, LM head and loss on supervised tokens; the loss makes its gradients in forward."""
    parts = []
    head_bytes = 0  # fp32 gradients of a trained LM head, made chunk by chunk
    for parameter in llm.head:
        is_trained = parameter.name in trained
        if parameter.name.startswith("llm.head."):
            flops = 2 * parameter.numel * work.supervised if parameter.name.endswith("weight") else 0.0
            gradient = FP32 * parameter.numel
            parts.append(Part(2, flops, trained=is_trained, saved_for_wgrad=gradient))
            head_bytes += gradient if is_trained else 0
        elif len(parameter.shape) > 1:
            parts.append(Part(1, 2 * parameter.numel * work.tokens, trained=is_trained))
        else:
            kept = work.tokens * (4 * parameter.numel + 4) if parameter.name.endswith("weight") else 0.0
            parts.append(
                Part(
                    0,
                    trained=is_trained,
                    saved_for_dgrad=kept,
                    saved_for_wgrad=work.tokens * size * parameter.numel,
                )
            )
    parts.append(Part(2, saved_for_dgrad=work.supervised * llm.hidden_size * size))  # the rows' gradient
    flops, saved = total(parts, upstream)
    # A chunk's logits in the model's type and in fp32, softmax, gradient; two more copies of a trained head's gradient.
    logits = min(LOGITS_PER_CHUNK, work.tokens * llm.vocab_size)
    workspace = logits * (size + 3 * 4) + 2 * head_bytes
    return _layer(
        "head",
        [_Stored(llm.head, size)],
        trained,
        flops,
        saved,
        recomputed_bytes=saved,
        workspace_bytes=workspace,
    )
