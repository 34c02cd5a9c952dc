"""Costs of each layer that the planner places, per micro-batch: FLOPs, weight bytes, bytes kept for
backward.

config, image layout --workload--> tokens, tiles and positions of a micro-batch
    --run_costs--> front (projector, embedding), decoder layers, head (final norm, LM head), and the
        vision encoder

The forward of a frozen encoder is no part of the front, since it may run at another time and on
other ranks. The last decoder layer and the head run for supervised tokens only. `block_costs` says
which layers run backward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mmtrain.config.schema import DataSection, RunConfig, TrainSection
from mmtrain.connectors import Branch, Linear, Operation, Shuffle
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.chunks import LOGITS_PER_CHUNK, tiles_per_call
from mmtrain.facts.encoders import ENCODER_BLOCK
from mmtrain.facts.families import WHOLE_LAST_LAYER
from mmtrain.facts.models import Models
from mmtrain.facts.quantised import Quantisation, is_quantised, quantised_bytes
from mmtrain.facts.shapes import ParameterShape, VisionShape, matches_any
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.plan.block_costs import Block, Flops, Part, Sublayer, block_parts, keys_seen, total
from mmtrain.plan.instructions import offsets_of
from mmtrain.plan.optimizer_kinds import ADAMW, FP32, OptimizerKind, optimizer_of

BYTES = {"float32": 4, "bfloat16": 2}
INTEGER = 8  # bytes of a token id, position or label
TYPICAL_SIZE = 640, 480  # pixels of an image of which nothing else is known


# ---- what a micro-batch holds


@dataclass(frozen=True)
class Workload:
    """The data that is computed on: a micro-batch in expectation, or a measured step."""

    tokens: float  # positions of all its packs; in a measured step those that documents fill
    # tokens of a typical document; of several the sum of their squares over their sum
    document: float
    tiles: float  # squares that the encoder sees
    image_positions: float
    supervised: float  # tokens with a label
    # tiles that a tile's patches attend to: those of its image under layout native, on average
    attended: float = 1.0
    position_rows: int = 1  # 4 with M-RoPE


def workload(train: TrainSection, data: DataSection, layout: ImageLayout) -> Workload:
    """Expected contents of a micro-batch: documents of one image, or none, and the expected text,
    without padding.
    """
    tokens = train.packs_per_microbatch * data.pack_length
    tiles, positions = expected_image(data, layout)
    document = min(data.pack_length, positions + data.expected_text_tokens)
    images = tokens / document
    attended = 1.0
    if layout.attends_across:
        attended = data.expected_attended_tiles or tiles
    return Workload(
        tokens,
        document,
        images * tiles,
        images * positions,
        tokens * data.expected_supervised_fraction,
        attended,
        position_rows=4 if layout.has_grid_positions else 1,
    )


def expected_image(data: DataSection, layout: ImageLayout) -> tuple[float, float]:
    """Tiles and positions of a typical image, from the configuration or for TYPICAL_SIZE."""
    if not layout.takes_images:
        return 0.0, 0.0
    if data.expected_image_tiles is None or data.expected_image_positions is None:
        typical = layout.tiling(*TYPICAL_SIZE)
        return typical.tiles, typical.positions
    return data.expected_image_tiles, data.expected_image_positions


def typical_tiling(data: DataSection, layout: ImageLayout) -> Tiling | None:
    """Tiling nearest to the expected image among those that leave a pack room for text; if none
    does, the smallest.

    None for a run without images.
    """
    if not layout.takes_images:
        return None
    tiles, positions = expected_image(data, layout)
    tilings = [layout.tiling(*TYPICAL_SIZE)]
    if layout.is_sized:
        tilings += [layout.tiling(*size) for size in layout.trial_sizes]
    fitting = [x for x in tilings if x.positions < data.pack_length]
    if not fitting:
        return min(tilings, key=lambda x: x.positions)
    return min(fitting, key=lambda x: abs(x.tiles / tiles - 1) + abs(x.positions / positions - 1))


def _arranged_positions(work: Workload, layout: ImageLayout) -> float:
    """The most positions that live at once while tiles are put in lines with newlines; 0 without
    newlines.
    """
    if not layout.has_newlines:
        return 0.0
    images = work.tokens / work.document
    made = work.tiles * layout.positions_per_tile
    overviews = images * layout.positions_per_tile
    return max(
        0.0, made + (made - overviews) / max(images, 1.0) + 2 * work.image_positions - overviews
    )


# ---- what layers cost


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal costs: equal shapes, trained parameters and need of an input gradient."""

    # "encoder", "front", "head", "llm.layers.I" by the first of its kind, "llm.layers.I on rows"
    name: str
    layer: int | None  # number of that decoder layer
    input_gradient: bool  # something before it trains
    trainable_names: tuple[str, ...]  # what trains in `layer`
    on_rows: bool = False  # it runs for supervised tokens only, on the stage that has the head

    @property
    def runs_backward(self) -> bool:
        return self.input_gradient or bool(self.trainable_names)


@dataclass(frozen=True)
class LayerCost:
    """One layer the planner may place; FLOPs and activation bytes are those of one micro-batch.

    Working bytes are the peak while the layer runs, beyond what was there before and, in forward,
    what it keeps.
    """

    kind: str  # name of its LayerKind
    trainable_names: tuple[str, ...]
    trainable: int  # elements
    flops: Flops
    needed_flops: Flops  # part of `flops` whose result is used
    weight_bytes: int
    state_bytes: int  # master weights, gradients and optimizer moments
    kept_bytes: int  # from forward to backward
    kept_bytes_recomputing: int  # if the layer recomputes its activations
    forward_working_bytes: int
    backward_working_bytes: int
    # the backward's if the layer recomputes, what it makes again included
    recomputing_working_bytes: int
    fp32_flops: Flops = field(default_factory=Flops)  # part of `flops` that is computed in fp32
    # part of `weight_bytes` that need not stay on the device; 0: all must
    streamed_weight_bytes: int = 0
    streamed_bytes: int = 0  # of the one buffer that this part is fetched into
    quantised_bytes: int = 0  # of this part in fewer bits, where the run asks for that


@dataclass(frozen=True)
class RunCosts:
    """All that a plan is made of; layers in the order in which they run: front, decoder layers,
    head.
    """

    layers: tuple[LayerCost, ...]
    # the last decoder layer where the head is on another stage: it runs for all tokens
    whole_last: LayerCost
    encoder: EncoderCost
    work: Workload
    hidden_bytes: int  # hidden states of a micro-batch, which cross every border between stages
    integer_bytes: int  # positions and labels, which cross it with them
    # whether a stage's input is kept beside what its first layer keeps of it (not in fp32)
    keeps_input: bool
    # weights that front and head share if they are on one stage (tied embeddings)
    shared_ends_bytes: int
    kinds: tuple[LayerKind, ...]
    optimizer: OptimizerKind = ADAMW
    # that stage 0 holds at least: the front, and those behind which DeepStack adds its features
    first_layers: int = 1


def run_costs(config: RunConfig, models: Models) -> RunCosts:
    model = config.model
    work = workload(config.train, config.data, models.layout)
    sizes = BYTES[model.llm.dtype], BYTES[model.vision_dtype]
    optimizer = optimizer_of(config.optimizer)
    costs = _LayerCosts(models, model.trainable, work, *sizes, model.llm.quantize, optimizer)
    return costs.costs()


def minimal_flops(models: Models, trainable: Sequence[str], work: Workload) -> Flops:
    """FLOPs that any exact way of training must compute for this work: nothing recomputed, nothing
    thrown away.
    """
    costs = _LayerCosts(models, trainable, work).costs(rows_alone=True)
    return sum((layer.needed_flops for layer in costs.layers), Flops(costs.encoder.forward))


@dataclass
class _LayerCosts:
    """Costs of the layers of a run; sizes are bytes of an element of the LLM and of the vision
    encoder.
    """

    models: Models
    trainable: Sequence[str]
    work: Workload
    llm_size: int = 2
    vision_size: int = 2
    quantisation: Quantisation | None = None
    optimizer: OptimizerKind = ADAMW
    # every kind of decoder layer
    decoder: dict[tuple, tuple[LayerKind, LayerCost]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (p.name for p in self.models.parameters)
        self.trained = frozenset(name for name in names if matches_any(name, self.trainable))

    def costs(self, *, rows_alone: bool = False) -> RunCosts:
        """Return all costs; `rows_alone`: the last layer on supervised tokens even where a family
        does not allow it.
        """
        llm = self.models.llm
        work = self.work
        encoder = encoder_costs(self.models.vision, self.trained, work, self.vision_size)
        front = self.front(encoder)
        layers = [front]
        upstream = bool(front.trainable_names)
        for i in range(len(llm.decoder)):
            layers.append(self.decoder_layer(i, upstream, on_rows=False))
            whole_last = layers[-1]
            upstream_of_last = upstream
            upstream = upstream or bool(whole_last.trainable_names)
        last = self.block(i)
        may_run_on_rows = llm.model_type not in WHOLE_LAST_LAYER and last.attends
        if rows_alone or (may_run_on_rows and last.mixer is None):
            layers[-1] = self.decoder_layer(i, upstream_of_last, on_rows=True)
        layers.append(self.head(upstream))

        of_encoder = tuple(name for name in front.trainable_names if name.startswith("vision."))
        of_front = front.trainable_names[len(of_encoder) :]
        shared = 0
        if llm.tied:
            shared = sum(p.numel for p in llm.head if p.name == "llm.head.weight")
        return RunCosts(
            layers=tuple(layers),
            whole_last=whole_last,
            encoder=encoder,
            work=work,
            hidden_bytes=round(work.tokens * self.llm_size * llm.hidden_size),
            integer_bytes=round(work.tokens * (work.position_rows + 1) * INTEGER),
            keeps_input=self.llm_size != FP32,
            shared_ends_bytes=self.llm_size * shared,
            kinds=(
                LayerKind("encoder", None, False, of_encoder),
                LayerKind("front", None, bool(of_encoder), of_front),
                *(kind for kind, _ in self.decoder.values()),
                LayerKind("head", None, upstream, layers[-1].trainable_names),
            ),
            optimizer=self.optimizer,
            first_layers=self.models.first_layers,
        )

    def decoder_layer(self, index: int, upstream: bool, *, on_rows: bool) -> LayerCost:
        """Decoder layer `index`, for all tokens or for supervised ones; layers of one kind are
        counted once.
        """
        name = f"llm.layers.{index}"
        shapes = []
        trained = []
        for p in self.models.llm.decoder[index]:
            own_name = p.name.removeprefix(name)
            shapes.append((own_name, p.shape, p.coded_bytes, p.name in self.trained))
            if p.name in self.trained:
                trained.append(p.name)
        key = tuple(shapes), upstream, on_rows
        names = tuple(trained)
        if key not in self.decoder:
            if on_rows:
                name += " on rows"
            kind = LayerKind(name, index, upstream, names, on_rows)
            self.decoder[key] = kind, self.decoder_kind(kind)
        return replace(self.decoder[key][1], trainable_names=names)

    def block(self, index: int) -> Block:
        llm = self.models.llm
        return Block(
            llm.decoder[index],
            f"llm.layers.{index}.",
            llm.hidden_size,
            llm.heads,
            llm.kv_heads,
            llm.head_dim,
            llm.experts,
            llm.experts_per_token,
            llm.mixer_state,
            llm.mixer_chunk,
        )

    def decoder_kind(self, kind: LayerKind) -> LayerCost:
        llm = self.models.llm
        work = self.work
        size = self.llm_size
        # the last tokens of their documents
        rows = work.supervised if kind.on_rows else work.tokens
        parameters = llm.decoder[kind.layer]
        block = self.block(kind.layer)
        context = keys_seen(work.document, rows / work.tokens * work.document, llm.window)
        parts = block_parts(block, self.trained, size, work.tokens, rows, context, work.document)
        flops, kept = total(parts, kind.input_gradient)
        needed, _ = total(parts, kind.input_gradient, with_waste=False)
        made = total(parts, True)[1]  # bytes that a recomputed layer holds in its backward

        # The widest moment: inner features of the MLP two to four times (gate, up, product, or
        # their gradients), and the residual stream with its normed copy and gradients.
        widest = forward = round(rows * size * 4 * (block.mlp_width + llm.hidden_size))
        if kept:
            forward //= 2
        working = forward, widest, made + widest
        layer = replace(
            self.layer(kind.name, [(parameters, size)], flops, self.in_fp32(flops), kept, working),
            needed_flops=needed,
            kept_bytes_recomputing=min(kept, round(size * llm.hidden_size * work.tokens)),
        )

        own = [p for p in parameters if not is_adapter(p.name)]
        # where an update would have to go back is not built
        if any(p.name in self.trained for p in own):
            return layer
        sizes = [size * p.numel for p in own]
        return replace(
            layer,
            streamed_weight_bytes=sum(sizes),
            streamed_bytes=offsets_of(sizes)[1],
            quantised_bytes=sum(map(self.fewer_bytes, own)),
        )

    def in_fp32(self, flops: Flops) -> Flops:
        """The part of the LLM's FLOPs that is computed in fp32: all or nothing."""
        return flops if self.llm_size == FP32 else Flops()

    def fewer_bytes(self, parameter: ParameterShape) -> int:
        whole = self.llm_size * parameter.numel
        if self.quantisation == "published":
            return parameter.coded_bytes or whole
        if self.quantisation is None or not is_quantised(parameter.name, parameter.shape):
            return whole
        return quantised_bytes(parameter.shape, self.quantisation)

    def layer(
        self,
        kind: str,
        stored: Sequence[tuple[Sequence[ParameterShape], int]],
        flops: Flops,
        fp32_flops: Flops,
        kept_bytes: int,
        working_bytes: tuple[int, int, int],
    ) -> LayerCost:
        """`stored`: parameters with the bytes of an element; below fp32, what trains has a master
        weight besides.

        `working_bytes` in forward, in backward, and in a backward that recomputes.
        """
        names = []
        trainable = weights = state = 0
        for parameters, size in stored:
            for p in parameters:
                weights += size * p.numel
                if p.name in self.trained:
                    names.append(p.name)
                    trainable += p.numel
                    state += self.optimizer.state_bytes(size) * p.numel
        return LayerCost(
            kind,
            tuple(names),
            trainable,
            flops,
            flops,
            weights,
            state,
            kept_bytes,
            kept_bytes,
            *working_bytes,
            fp32_flops,
        )

    def front(self, encoder: EncoderCost) -> LayerCost:
        """The front: projector, embedding (0 FLOPs), and weights and backward of an encoder that
        trains.
        """
        llm = self.models.llm
        vision = self.models.vision
        work = self.work
        upstream = not encoder.frozen
        stored = [(self.models.projector, FP32), (llm.front, self.llm_size)]
        if upstream:  # slices hold those of a frozen one
            stored.insert(0, (vision.parameters, self.vision_size))
        projector, kept_here = total(self.projector_parts(), upstream)
        # Only a matrix between embedding and hidden width costs anything here, all else is lookup
        # and addition. Text does not pass the encoder: what trains there gives it no gradient.
        embedding = []
        for p in llm.front:
            flops = 2 * p.numel * work.tokens if ".project_in." in p.name else 0.0
            embedding.append(Part(0, flops, trained=p.name in self.trained))
        inputs, kept_for_inputs = total(embedding, False)

        # Image embeddings in fp32 and in the LLM's type, and hidden states before and after they
        # are put in.
        hidden = round(work.image_positions * llm.hidden_size) * (1 + len(vision.deepstack))
        embedded = round(work.tokens * llm.hidden_size) * self.llm_size
        arranged = round(_arranged_positions(work, self.models.layout) * llm.hidden_size) * FP32
        fused = hidden * (FP32 + self.llm_size) + 2 * embedded
        # Gradients of linear layers' results.
        widest = 0.0
        for operation, rows in self.connector_rows():
            if isinstance(operation, Linear):
                widest = max(widest, rows * operation.outputs)
        backward_working = round(3 * widest) * FP32 + encoder.backward_working_bytes
        in_fp32 = projector + self.in_fp32(inputs)
        if encoder.in_fp32:
            in_fp32 += encoder.backward
        return self.layer(
            "front",
            stored,
            inputs + encoder.backward + projector,
            in_fp32,
            encoder.kept_bytes + kept_here + kept_for_inputs,
            (max(fused, embedded + arranged), backward_working, backward_working),
        )

    def projector_parts(self) -> list[Part]:
        """The connector's operations at slots 0, 1, 2, ...; all in fp32."""
        parts = []
        for slot, (operation, rows) in enumerate(self.connector_rows()):
            own = operation.shapes()
            trained = [name for name in own if f"projector.{name}" in self.trained]
            parts += [Part(slot, trained=name in trained) for name in own]
            cost = operation.cost(trained)
            flops = 2 * cost.products * rows
            for_dgrad = FP32 * cost.for_input * rows
            for_wgrad = FP32 * cost.for_weights * rows
            parts.append(Part(slot, flops, 1.0, cost.trained, Flops(), for_dgrad, for_wgrad))
        return parts

    def connector_rows(self) -> Iterator[tuple[Operation, float]]:
        """The connector's operations, each with the rows that it makes, or takes where it changes
        their number.
        """
        rows = self.work.tiles * self.models.vision.features_per_image
        merged = rows
        for operation in self.models.connector:
            if isinstance(operation, Branch):
                merged = rows
            elif isinstance(operation, Shuffle):
                merged /= operation.factor**2
            yield operation, merged

    def head(self, upstream: bool) -> LayerCost:
        """Final norm, LM head and loss on supervised tokens; the loss makes its gradients in
        forward.
        """
        llm = self.models.llm
        rows = self.work.supervised
        size = self.llm_size
        parts = [Part(2, saved_for_dgrad=rows * llm.hidden_size * size)]  # the rows' gradient
        head_bytes = 0  # fp32 gradients of a trained LM head, made chunk by chunk
        for p in llm.head:
            is_trained = p.name in self.trained
            read = rows if p.name.endswith("weight") else 0.0  # biases take no time and no memory
            if p.name.startswith("llm.head."):
                gradient = FP32 * p.numel
                parts.append(
                    Part(2, 2 * p.numel * read, trained=is_trained, saved_for_wgrad=gradient)
                )
                if is_trained:
                    head_bytes += gradient
            elif len(p.shape) > 1:
                parts.append(Part(1, 2 * p.numel * rows, trained=is_trained))
            else:
                kept = read * (4 * p.numel + 4)
                kept_trained = rows * size * p.numel
                parts.append(
                    Part(0, trained=is_trained, saved_for_dgrad=kept, saved_for_wgrad=kept_trained)
                )

        flops, saved = total(parts, upstream)
        # A chunk's logits in the model's type and in fp32, softmax, gradient; two more copies of a
        # trained head's gradient.
        logits = min(LOGITS_PER_CHUNK, round(rows * llm.vocab_size))
        forward = logits * (size + 3 * 4) + 2 * head_bytes
        # The rows' gradient, on its way to hidden states.
        backward = round(rows * llm.hidden_size) * (size + 2 * FP32) + head_bytes
        working = forward, backward, backward
        return self.layer("head", [(llm.head, size)], flops, self.in_fp32(flops), saved, working)


# ---- the vision encoder


@dataclass(frozen=True)
class EncoderCost:
    """The vision encoder for one micro-batch: a stem (patches, positions, last norm) and blocks,
    which are alike.
    """

    forward: int  # FLOPs of stem and blocks
    frozen: bool  # one that trains is not prefetched, and is whole on stage 0
    working_bytes: int  # of one ENCODE: tiles go through all slices in the same groups
    feature_bytes: int  # from ENCODE to FORWARD
    batch_bytes: int  # from LOAD to FORWARD, without pixels
    pixel_bytes: int = 0  # from LOAD to ENCODE
    in_fp32: bool = False
    can_be_cut: bool = True  # into slices on several ranks, if it is frozen
    blocks: int = 0  # that run
    block_forward: int = 0  # FLOPs of one
    # weights of one; 0 if the encoder trains: its weights are the front layer's
    block_bytes: int = 0
    stem_bytes: int = 0  # weights of the stem, which every slice holds; 0 if the encoder trains
    hidden_bytes: int = 0  # between two slices; features have no prefix tokens
    # of an ENCODE of a first slice without blocks, if measured
    stem_working_bytes: int | None = None
    later_working_bytes: int | None = None  # of an ENCODE of a later slice, if measured
    # these three: what an encoder that trains adds to the front
    backward: Flops = field(default_factory=Flops)
    kept_bytes: int = 0
    backward_working_bytes: int = 0

    @property
    def stem_forward(self) -> int:
        return self.forward - self.blocks * self.block_forward

    def working_of(self, blocks: int, *, first: bool) -> int:
        """Bytes of one ENCODE of a slice with `blocks` blocks, as measured, else those of the whole
        encoder.
        """
        measured: int | None = self.working_bytes
        if not first:
            measured = self.later_working_bytes
        elif blocks == 0:
            measured = self.stem_working_bytes
        return self.working_bytes if measured is None else measured


def encoder_costs(
    vision: VisionShape,
    trained: Collection[str],
    work: Workload,
    size: int,
) -> EncoderCost:
    """Return the encoder's costs, stored in `size` bytes an element; parameters named in `trained`
    train.
    """
    tokens = work.tiles * (vision.patches_per_image + vision.prefix_tokens)
    flops = Flops()
    kept = in_blocks = 0
    trains = False
    for parts, is_block in _encoder_parts(vision, trained, tokens, work, size):
        flops_here, kept_here = total(parts, trains)
        flops += flops_here
        kept += kept_here
        if is_block:
            in_blocks += flops_here.forward
        trains |= any(part.trained for part in parts)
    pixels = round(3 * vision.image_size**2 * work.tiles)
    features = round(work.tiles * vision.features_per_image * vision.feature_width) * size

    at_once = 1.0  # share of the tiles
    if work.tiles and not trains:
        tiles = max(work.attended, tiles_per_call(vision.patches_per_image))
        at_once = min(1.0, tiles / work.tiles)
    # While a block runs: residual, normed, query, key, value, result, and the MLP's inner width
    # (4x) twice.
    block_working = round(14 * vision.width * tokens * at_once) * size
    working = round(pixels * at_once) * FP32 + block_working
    if at_once < 1:  # beside the tensor of all features
        working += features

    blocks = max(1, vision.blocks_run)
    cost = EncoderCost(
        flops.forward,
        frozen=not trains,
        working_bytes=working,
        feature_bytes=features,
        # with token ids and labels
        batch_bytes=round((work.position_rows + 2) * INTEGER * work.tokens),
        can_be_cut=not vision.whole_because,
        pixel_bytes=pixels,
        in_fp32=size == FP32,
        blocks=vision.blocks_run,
        block_forward=in_blocks // blocks,
        hidden_bytes=round(tokens * vision.width) * size,
    )
    if trains:
        return replace(
            cost,
            backward=replace(flops, forward=0),
            kept_bytes=kept,
            backward_working_bytes=2 * block_working,
        )
    weights = size * sum(p.numel for p in vision.parameters)
    of_blocks = sum(p.numel for p in vision.parameters if ENCODER_BLOCK.match(p.name))
    block_bytes = size * of_blocks // blocks
    return replace(
        cost,
        block_bytes=block_bytes,
        stem_bytes=weights - vision.blocks_run * block_bytes,
    )


_NORM = re.compile(r"vision\.(?:vision_model\.)?(?:norm|layernorm|post_layernorm)\.")


def _encoder_parts(
    vision: VisionShape,
    trained: Collection[str],
    tokens: float,
    work: Workload,
    size: int,
) -> Iterator[tuple[list[Part], bool]]:
    """Yield parts and whether they are a block: patches and positions, each block, the norm behind
    them.
    """
    stem = []
    norm = []
    patches = work.tiles * vision.patches_per_image
    rows = work.tiles * vision.features_per_image
    blocks: dict[int, tuple[str, list[ParameterShape]]] = {}
    for parameter in vision.parameters:
        is_trained = parameter.name in trained
        elements = parameter.numel
        if block := ENCODER_BLOCK.match(parameter.name):
            blocks.setdefault(int(block[1]), (block[0], []))[1].append(parameter)
        elif parameter.name.startswith("vision.merger.") and len(parameter.shape) == 2:
            kept = rows * parameter.shape[0] * size  # by the GELU between the two
            if parameter.name.endswith(vision.family.native.merged):
                kept = 0
            norm.append(Part(1, 2 * elements * rows, trained=is_trained, saved_for_dgrad=kept))
        elif parameter.name.startswith("vision.merger."):
            norm.append(Part(0, trained=is_trained, saved_for_dgrad=2 * elements * rows))
        elif _NORM.match(parameter.name):  # it keeps its input in fp32
            norm.append(Part(0, trained=is_trained, saved_for_dgrad=2 * elements * tokens))
        else:
            is_matrix = parameter.name == f"vision.{vision.family.patches}"
            flops = 2 * elements * patches if is_matrix else 0.0
            stem.append(Part(0, flops, trained=is_trained))

    yield stem, False
    head_dim = vision.width // vision.heads
    for number, (prefix, parameters) in sorted(blocks.items()):
        block = Block(parameters, prefix, vision.width, vision.heads, vision.heads, head_dim)
        keys = work.attended * vision.patches_per_image + vision.prefix_tokens
        if vision.window is not None and number not in vision.full_blocks:
            keys = min(keys, vision.window)
        parts = block_parts(block, trained, size, tokens, tokens, keys, tokens)
        if vision.family.native is not None and vision.family.native.images == "packed":
            # Attention of each image is joined; beside rotated queries and keys a fused projection
            # keeps those before.
            is_fused = any(".qkv." in p.name or "wqkv" in p.name for p in parameters)
            more = 3 if is_fused else 1
            saved = more * vision.width * tokens * size
            parts.append(Part(Sublayer.ATTENTION, saved_for_dgrad=saved))
        yield parts, True
    yield norm, False
