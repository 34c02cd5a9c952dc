"""What each layer that the planner places costs, per micro-batch: FLOPs, weight bytes, bytes kept for backward.

Layers are the front (projector, embedding; the frozen vision encoder's forward is told apart, since it may run at
another time), each decoder layer, and the head (final norm, LM head). The last decoder layer and the head run for
supervised tokens only. Only what lies behind something trainable runs backward; `block_costs` says how that is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmtrain.config.schema import RunConfig
from mmtrain.plan.block_costs import (
    Attention,
    Flops,
    Part,
    Place,
    block_parts,
    last_context,
    mean_context,
    place_of,
    total,
)
from mmtrain.pretrained.families import WHOLE_LAST_LAYER
from mmtrain.pretrained.shapes import LlmShape, ParameterShape, VisionShape, matches

BYTES = {"float32": 4, "bfloat16": 2}
FP32 = 4  # bytes an element: the projector, master weights, gradients and AdamW's two moments
INTEGER = 8  # bytes of a token id, position or label
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
    """What is computed on: a micro-batch in expectation, or a whole step as it came."""

    tokens: float  # positions of all its packs; of a step that is measured those that documents fill
    document: float  # tokens of a typical document; of several their squares' sum over their sum
    images: float
    supervised: float  # tokens with a label


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that cost the same: equal shapes, equal parameters that train, equal need of an input gradient."""

    name: str  # "encoder", "front", "head", "llm.layers.I" by the first of its kind, "llm.layers.I on rows"
    layer: int | None  # that decoder layer
    input_gradient: bool  # something before it trains
    trainable_names: tuple[str, ...]  # what trains in `layer`
    on_rows: bool = False  # it runs for supervised tokens only, on the stage that has the head

    @property
    def runs_backward(self) -> bool:
        """Whether it has a backward at all; one that has none runs without a graph."""
        return self.input_gradient or bool(self.trainable_names)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer the planner may place; FLOPs and activation bytes are those of one micro-batch.

    Working bytes are the most that lives at once while the layer runs, beyond what was there when it began and, in
    forward, beyond what it keeps.
    """

    name: str
    kind: str  # name of its LayerKind
    trainable_names: tuple[str, ...]
    trainable: int  # elements
    flops: Flops
    wasted: Flops  # part of `flops` that is thrown away
    weight_bytes: int
    state_bytes: int  # master weights, gradients and optimizer moments
    kept_bytes: int  # from forward to backward
    kept_bytes_recomputing: int  # if the layer recomputes its activations
    forward_working_bytes: int
    backward_working_bytes: int
    recomputing_working_bytes: int  # the backward's if the layer recomputes, what it makes again included
    fp32_flops: Flops = field(default_factory=Flops)  # part of `flops` that is computed in fp32


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """The vision encoder's forward, an instruction of its own on stage 0."""

    forward: int  # FLOPs
    frozen: bool  # else it belongs to the step, and may not run ahead
    working_bytes: int
    feature_bytes: int  # what a micro-batch's features take until its forward
    batch_bytes: int  # what a loaded micro-batch takes until its forward
    in_fp32: bool = False


@dataclass(frozen=True, slots=True)
class RunCosts:
    """All that a plan is made of; layers in the order in which they run: front, decoder layers, head."""

    layers: tuple[LayerCost, ...]
    whole_last: LayerCost  # the last decoder layer where the head is on another stage: it runs for all tokens
    encoder: EncoderCost
    work: Workload
    hidden_bytes: int  # hidden states of a micro-batch, which cross every border between stages
    integer_bytes: int  # position ids and labels, which cross it with them
    keeps_input: bool  # whether a stage's input is kept beside what its first layer keeps of it (not in fp32)
    shared_ends_bytes: int  # weights that front and head share if they are on one stage (tied embeddings)
    kinds: tuple[LayerKind, ...]


def workload(config: RunConfig, vision: VisionShape) -> Workload:
    """Expected contents of a micro-batch: documents of one image and `data.expected_text_tokens`, without padding."""
    tokens = config.train.packs_per_microbatch * config.data.pack_length
    document = min(config.data.pack_length, vision.tokens_per_image + config.data.expected_text_tokens)
    return Workload(tokens, document, tokens / document, tokens * config.data.expected_supervised_fraction)


def document_of(lengths: Iterable[int]) -> float:
    """The document length of a Workload that has the attention of these documents: sum of squares over sum."""
    lengths = list(lengths)
    return sum(n * n for n in lengths) / max(1, sum(lengths))


@dataclass(frozen=True, slots=True)
class _Types:
    """Bytes an element, by part of the model."""

    llm: int
    vision: int


def run_costs(config: RunConfig, models: Models) -> RunCosts:
    """Costs of a micro-batch of the expected contents."""
    types = _Types(BYTES[config.model.llm.dtype], BYTES[config.model.vision.dtype or config.model.llm.dtype])
    whole = models.llm.model_type in WHOLE_LAST_LAYER
    costs = _run_costs(models, config.model.trainable, workload(config, models.vision), types, whole_last=whole)
    # What is loaded for a micro-batch: token ids, positions, labels, and images as bytes.
    images = round(3 * models.vision.image_size**2 * costs.work.images)
    batch = round(3 * INTEGER * costs.work.tokens) + images
    return replace(costs, encoder=replace(costs.encoder, batch_bytes=batch))


def minimal_flops(models: Models, trainable: Sequence[str], work: Workload) -> Flops:
    """FLOPs that any exact way of training must compute for this work: nothing recomputed, nothing thrown away.

    The encoder as far as the selected block, the projector, every decoder layer; of the last one queries, output and
    MLP for supervised tokens only, and so the head; gradients of inputs behind what trains, weight gradients of that.
    """
    costs = _run_costs(models, trainable, work, _Types(2, 2))
    flops = Flops(costs.encoder.forward)
    for layer in costs.layers:
        flops += layer.flops - layer.wasted
    return flops


def layer_kinds(config: RunConfig, models: Models) -> tuple[LayerKind, ...]:
    """Every kind of layer that some cut of this run contains, each once: what a calibration measures."""
    return run_costs(config, models).kinds


def _run_costs(
    models: Models, trainable: Sequence[str], work: Workload, types: _Types, *, whole_last: bool = False
) -> RunCosts:
    llm = models.llm
    trained = frozenset(p.name for p in models.parameters if matches(p.name, trainable))
    encoder, front = _encoder_and_front(models, work, trained, types)
    kinds: dict[tuple, LayerKind] = {}
    layers = [front]
    upstream = bool(front.trainable_names)
    for i in range(len(llm.decoder)):
        whole = _decoder_layer(llm, i, work, trained, types.llm, upstream, kinds, rows=None)
        on_rows = i == len(llm.decoder) - 1 and not whole_last
        layers.append(
            _decoder_layer(llm, i, work, trained, types.llm, upstream, kinds, rows=work.supervised)
            if on_rows
            else whole
        )
        upstream = upstream or bool(whole.trainable_names)
    head_needs = upstream
    layers.append(_head(llm, work, trained, types.llm, upstream))
    encoder_names = tuple(name for name in front.trainable_names if name.startswith("vision."))
    return RunCosts(
        layers=tuple(layers),
        whole_last=whole,
        encoder=encoder,
        work=work,
        hidden_bytes=round(work.tokens * types.llm * llm.hidden_size),
        integer_bytes=round(work.tokens * 2 * INTEGER),
        keeps_input=types.llm != FP32,
        shared_ends_bytes=sum(types.llm * p.numel for p in llm.head if p.name == "llm.head.weight") * llm.tied,
        kinds=(
            LayerKind("encoder", None, False, encoder_names),
            LayerKind("front", None, bool(encoder_names), front.trainable_names[len(encoder_names) :]),
            *kinds.values(),
            LayerKind("head", None, head_needs, layers[-1].trainable_names),
        ),
    )


def _decoder_layer(
    llm: LlmShape,
    index: int,
    work: Workload,
    trained: frozenset[str],
    size: int,
    upstream: bool,
    kinds: dict[tuple, LayerKind],
    *,
    rows: float | None,
) -> LayerCost:
    """Decoder layer `index`, for all tokens or with `rows` for so many; a new kind of layer is added to `kinds`."""
    parameters, prefix = llm.decoder[index], f"llm.layers.{index}."
    context = mean_context(work.document, llm.window)
    if rows is not None:  # supervised tokens are the last of their documents
        context = last_context(work.document, rows / work.tokens * work.document, llm.window)
    parts = block_parts(
        parameters,
        prefix,
        trained,
        Attention(llm.heads, llm.kv_heads, llm.head_dim, context),
        llm.hidden_size,
        work.tokens,
        size,
        experts=llm.experts,
        experts_per_token=llm.experts_per_token,
        rows=rows,
    )
    names = tuple(p.name for p in parameters if p.name in trained)
    shapes = tuple((p.name.removeprefix(prefix), p.shape) for p in parameters)
    signature = (shapes, tuple(name.removeprefix(prefix) for name in names), upstream, rows is not None)
    kind = kinds.setdefault(
        signature,
        LayerKind(prefix[:-1] + (" on rows" if rows is not None else ""), index, upstream, names, rows is not None),
    )
    kept = total(parts, upstream)[1]
    whole = total(parts, True)[1]  # what a recomputed layer holds while its backward runs
    tokens = work.tokens if rows is None else rows
    # The widest moment: inner features of the MLP two to four times (gate, up, product, or their gradients), and the
    # residual stream with its normed copy and gradients.
    widest = round(tokens * size * 4 * (inner_width(parameters, prefix, llm) + llm.hidden_size))
    return _layer(
        prefix[:-1],
        kind.name,
        [_Stored(parameters, size)],
        trained,
        parts,
        upstream,
        kept_bytes_recomputing=min(kept, round(size * llm.hidden_size * work.tokens)),  # its input alone
        working_bytes=(widest if kept == 0 else widest // 2, widest, whole + widest),
    )


def inner_width(parameters: Sequence[ParameterShape], prefix: str, llm: LlmShape) -> float:
    """Inner features of a decoder layer's MLPs that a token passes, each MLP counted."""
    width = 0.0
    for parameter in parameters:
        if len(parameter.shape) > 1 and place_of(parameter.name.removeprefix(prefix)) == Place.MLP_OUT:
            routed = ".experts." in parameter.name and llm.experts_per_token
            width += parameter.numel / llm.hidden_size * (llm.experts_per_token / llm.experts if routed else 1)
    return width


@dataclass(frozen=True, slots=True)
class _Stored:
    """Parameters stored in `size` bytes an element; below fp32, what trains has a master weight besides."""

    parameters: Sequence[ParameterShape]
    size: int


def _layer(
    name: str,
    kind: str,
    stored: Iterable[_Stored],
    trained: frozenset[str],
    parts: Sequence[Part],
    upstream: bool,
    *,
    kept_bytes_recomputing: int | None = None,
    working_bytes: tuple[int, int, int],
) -> LayerCost:
    """`working_bytes` in forward, in backward, and in a backward that recomputes; it computes in what it is stored."""
    stored = tuple(stored)
    weight_bytes = state_bytes = elements = 0
    names: list[str] = []
    for group in stored:
        for parameter in group.parameters:
            weight_bytes += group.size * parameter.numel
            if parameter.name in trained:
                names.append(parameter.name)
                elements += parameter.numel
                state_bytes += (3 if group.size == FP32 else 4) * FP32 * parameter.numel
    flops, kept = total(parts, upstream)
    needed, _ = total(parts, upstream, with_waste=False)
    return LayerCost(
        name,
        kind,
        tuple(names),
        elements,
        flops,
        flops - needed,
        weight_bytes,
        state_bytes,
        kept,
        kept if kept_bytes_recomputing is None else kept_bytes_recomputing,
        *working_bytes,
        fp32_flops=flops if all(group.size == FP32 for group in stored) else Flops(),
    )


_VISION_BLOCK = re.compile(r"vision\.(?:.*\.)?(?:blocks|layers)\.(\d+)\.")


def _encoder_and_front(
    models: Models, work: Workload, trained: frozenset[str], types: _Types
) -> tuple[EncoderCost, LayerCost]:
    """The encoder's forward; and the front: the encoder's backward if it trains, projector, embedding (0 FLOPs)."""
    llm, vision, projector = models.llm, models.vision, models.projector
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
        sequence.append(block_parts(parameters, prefix, trained, attention, vision.width, tokens, types.vision))
    encoder_parts = len(sequence)
    sequence.append(_projector_parts(projector, patches, trained))
    # Only a matrix between embedding and hidden width costs anything here, all else is lookup and addition.
    inputs = [
        Part(0, 2 * p.numel * work.tokens if ".project_in." in p.name else 0.0, trained=p.name in trained)
        for p in llm.front
    ]

    flops, kept = total(inputs, False)  # text does not pass the encoder: what trains there gives it no gradient
    fp32_flops = flops if types.llm == FP32 else Flops()
    encoder = 0
    upstream = False
    for i, parts in enumerate(sequence):
        part_flops, part_kept = total(parts, upstream)
        flops, kept = flops + part_flops, kept + part_kept
        if i < encoder_parts:
            encoder += part_flops.forward
            part_flops = replace(part_flops, forward=0)  # an instruction of its own
        if i == encoder_parts or types.vision == FP32:
            fp32_flops += part_flops
        upstream = upstream or any(part.trained for part in parts)
    frozen = not any(p.name in trained for p in vision.parameters)
    pixels = round(3 * vision.image_size**2 * work.images) * FP32
    # While a block runs: residual, normed, query, key, value, result, and the MLP's inner width (4x) twice.
    block_working = round(14 * vision.width * tokens) * types.vision
    # Image embeddings in fp32 and in the LLM's type, and hidden states before and after they are put in.
    fused = round(patches * llm.hidden_size) * (FP32 + types.llm) + round(2 * work.tokens * llm.hidden_size) * types.llm
    projected = 3 * round(patches * llm.hidden_size) * FP32  # gradients of both linear layers' results
    layer = _layer(
        "front",
        "front",
        [_Stored(vision.parameters, types.vision), _Stored(projector, FP32), _Stored(llm.front, types.llm)],
        trained,
        [],
        False,
        working_bytes=(fused, *(2 * [projected + (0 if frozen else 2 * block_working)])),
    )
    without_encoder = Flops(flops.forward - encoder, flops.dgrad, flops.wgrad)
    return (
        EncoderCost(
            encoder,
            frozen,
            pixels + block_working,
            feature_bytes=round(patches * vision.width) * types.vision,
            batch_bytes=0,
            in_fp32=types.vision == FP32,
        ),
        replace(layer, flops=without_encoder, kept_bytes=kept, kept_bytes_recomputing=kept, fp32_flops=fp32_flops),
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
    """Final norm, LM head and loss on supervised tokens; the loss makes its gradients in forward."""
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
            parts.append(Part(1, 2 * parameter.numel * work.supervised, trained=is_trained))
        else:
            kept = work.supervised * (4 * parameter.numel + 4) if parameter.name.endswith("weight") else 0.0
            parts.append(
                Part(
                    0,
                    trained=is_trained,
                    saved_for_dgrad=kept,
                    saved_for_wgrad=work.supervised * size * parameter.numel,
                )
            )
    parts.append(Part(2, saved_for_dgrad=work.supervised * llm.hidden_size * size))  # the rows' gradient
    # A chunk's logits in the model's type and in fp32, softmax, gradient; two more copies of a trained head's gradient.
    logits = min(LOGITS_PER_CHUNK, round(work.supervised * llm.vocab_size))
    working = logits * (size + 3 * 4) + 2 * head_bytes
    rows = round(work.supervised * llm.hidden_size) * (
        size + 2 * FP32
    )  # the rows' gradient, on its way to hidden states
    return _layer(
        "head",
        "head",
        [_Stored(llm.head, size)],
        trained,
        parts,
        upstream,
        working_bytes=(working, rows + head_bytes, rows + head_bytes),
    )
