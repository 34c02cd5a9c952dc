"""Cost of a transformer block: FLOPs and bytes kept for backward, from its parameters' shapes.

A block is a list of parts (a matrix, a norm, attention itself), each with its slot in the order of
work. A part needs an input gradient only if something trainable lies before it, in this block or
upstream; a weight gradient is counted for trainable matrices only. So freezing attention alone, or
training the last layer alone, is costed as it runs.

The last decoder layer runs for the supervised tokens (`rows`): keys and values of all tokens, the
rest for these rows alone. Some of what runs is thrown away (`wasted`), as model/llm/last_layer.py
does it.

FLOPs count matrix products (2 per multiply-add), as torch.utils.flop_counter does; norms,
activations and rotary positions count 0. Bytes follow what torch saves for a llama-like layer with
fused attention.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from mmtrain.base.errors import UserError
from mmtrain.facts.adapters import LORA_A, LORA_B, adapted_layer, is_adapter
from mmtrain.facts.shapes import ParameterShape, Shape


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating point operations of forward, input gradient and weight gradient."""

    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.dgrad + self.wgrad

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.forward + other.forward,
            self.dgrad + other.dgrad,
            self.wgrad + other.wgrad,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.forward * times, self.dgrad * times, self.wgrad * times)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a layer's work. Parts of an equal `slot` do not feed one another."""

    slot: float
    flops: float = 0.0  # forward
    dgrad_factor: float = 1.0  # input gradient's FLOPs, times the forward's
    trained: bool = False
    # FLOPs that are computed besides and thrown away, where the part's kind of work runs at all
    wasted: Flops = Flops()
    saved_for_dgrad: float = 0.0  # bytes kept if an input gradient flows through it
    saved_for_wgrad: float = 0.0  # bytes kept if it is trained


class Sublayer(IntEnum):
    """Order of work inside a transformer block."""

    INPUT_NORM = 0
    PROJECT_IN = 1
    INNER_NORM = 2  # of queries and keys, or of deepseek's latents
    PROJECT_LATENT = 3
    ATTENTION = 4
    PROJECT_OUT = 5
    MIDDLE_NORM = 6
    MLP_IN = 7
    MLP_OUT = 8
    OUTPUT_NORM = 9


@dataclass(frozen=True, slots=True)
class Block:
    """A transformer block. Its parameters are recognised by their stock names below `prefix` (see
    `sublayer_of`).
    """

    parameters: Sequence[ParameterShape]
    prefix: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    mixer_state: int | None = None  # see LlmShape
    mixer_chunk: int = 64

    @property
    def mixer(self) -> Mixer | None:
        return find_mixer(self.parameters, self.prefix)

    @property
    def attends(self) -> bool:
        """Whether it attends: alone, or beside a recurrent mixer."""
        mixer = self.mixer
        for parameter in self.parameters:
            name = parameter.name.removeprefix(self.prefix)
            is_own = mixer is None or not name.startswith(mixer.prefix)
            if is_own and sublayer_of(name) == Sublayer.PROJECT_IN:
                return True
        return False

    def inner_width(self, parameter: ParameterShape) -> float:
        """The other side of a matrix between `width` and something else, as far as a token passes
        it.
        """
        passed = parameter.numel
        if ".experts." in parameter.name and self.experts_per_token:
            passed *= self.experts_per_token / self.experts
        return passed / self.width

    @property
    def mlp_width(self) -> float:
        """Inner features of its MLPs that a token passes, each MLP counted."""
        width = 0.0
        for parameter in self.parameters:
            is_matrix = len(parameter.shape) > 1 and not is_adapter(parameter.name)
            sublayer = sublayer_of(parameter.name.removeprefix(self.prefix))
            if is_matrix and sublayer == Sublayer.MLP_OUT:
                width += self.inner_width(parameter)
        return width


@dataclass(frozen=True, slots=True)
class Mixer:
    """A recurrent mixer: a convolution over a few tokens, and a state that each token changes, if
    it has one.
    """

    prefix: str  # of its parameters' names inside the block
    shapes: Mapping[str, Shape]  # of its parameters, by their last names

    @property
    def convolution(self) -> Shape:
        return next(shape for shape in self.shapes.values() if _is_convolution(shape))

    @property
    def inner(self) -> int:
        """Features that its last matrix reads."""
        return next(shape[1] for name, shape in self.shapes.items() if name in _OUT)

    def parts(
        self,
        block: Block,
        size: int,
        tokens: float,
        document: float,
    ) -> list[Part]:
        """Parts of its work besides matrices, over documents of one length.

        FLOPs are those that torch counts of transformers' code without a library's kernels. Bytes
        are fits to what it keeps, within 4% for the delta rule over several chunks and Mamba 2, 8%
        for Mamba, 12% for short convolutions.
        """
        channels, _, width = self.convolution
        convolved = 2 * channels * width * tokens * (1 + (width - 1) / document)
        kept = _CONVOLVED * size * channels
        decay = self.shapes.get("A_log")
        scan = []
        if decay is None:  # a short convolution; its gates are products with it
            saved = kept + 2 * size * channels
        elif len(decay) == 2:  # Mamba: token by token
            states = math.prod(decay)
            convolved += 2 * states * tokens
            saved = 13.2 * states + 26 * self.inner
        else:
            flops, dgrad_factor, saved = self._chunked(block, size, kept, tokens, document)
            scan = [Part(Sublayer.ATTENTION, flops, dgrad_factor)]
        return [Part(Sublayer.ATTENTION, convolved, saved_for_dgrad=saved * tokens), *scan]

    def _chunked(
        self,
        block: Block,
        size: int,
        kept: int,
        tokens: float,
        document: float,
    ) -> tuple[float, float, float]:
        """Return FLOPs, their factor for an input gradient, and bytes kept of a token, by a mixer
        that works chunk by chunk.
        """
        heads = math.prod(self.shapes["A_log"])
        chunk = block.mixer_chunk
        values = self.inner // heads
        state = block.mixer_state or values
        chunks = math.ceil(document / chunk)
        documents = tokens / document

        if "D" in self.shapes:  # Mamba 2: chunks, then a sum over all chunks before
            of_chunk = 2 * chunk**2 * (state + values) + 4 * chunk * state * values
            flops = heads * documents * (chunks * of_chunk + 2 * (chunks + 1) ** 2 * state * values)
            saved = (
                kept
                + (38 - 2 * size) * self.inner
                + heads * (20 * state + 12 * chunk + 8 * values * state / chunk)
            )
            return flops, 2.0, saved

        # the gated delta rule; its state has a row for each feature of a key
        inside = 2 * chunk**2 * (2 * state + values)
        across = 6 * chunk * state * values
        flops = heads * documents * chunks * (inside + across)
        # A triangular system's gradient; the first chunk's state and what the last one hands on
        # need none.
        more = (
            heads
            * documents
            * (chunks * 2 * chunk**2 * (state + values) - 8 * chunk * state * values)
        )
        # kimi_linear's keys decay each by itself
        decays = state if math.prod(self.shapes["dt_bias"]) > heads else 0
        padded = chunks * chunk / document
        of_chunks = (21 + 17 * decays) * chunk * padded  # (chunk, chunk) matrices
        saved = kept + heads * (
            (20 + 6 * size) * state + 24 * values + of_chunks + 4 * state * values / chunk
        )
        return flops, 2.0 + more / flops, saved


_CONVOLVED = 3  # elements that a convolution and what follows keep of each channel


def find_mixer(parameters: Sequence[ParameterShape], prefix: str) -> Mixer | None:
    """Return the recurrent mixer of a block, found by its convolution; None where it has none.

    Raises UserError for one whose other tensors no known family has.
    """
    names = {parameter.name.removeprefix(prefix): parameter.shape for parameter in parameters}
    convolution = next((name for name, shape in names.items() if _is_convolution(shape)), None)
    if convolution is None:
        return None
    inside = convolution.rsplit(".", 2)[0] + "."
    shapes = {}
    for name, shape in names.items():
        if name.startswith(inside):
            shapes[name.removesuffix(".weight").rpartition(".")[2]] = shape

    is_read = any(len(shape) == 2 for name, shape in shapes.items() if name in _OUT)
    has_state = "A_log" not in shapes or (
        math.prod(shapes["A_log"]) and not shapes.keys().isdisjoint(("D", "dt_bias"))
    )
    if not (is_read and has_state):
        raise UserError(
            f"{prefix}{inside.rstrip('.')} has a convolution, but not the matrices and the state "
            "of a known recurrent layer. Download the weights again, or use another LLM"
        )
    return Mixer(inside, shapes)


def _is_convolution(shape: Shape) -> bool:
    return len(shape) == 3 and shape[1] == 1


def keys_seen(document: float, last: float, window: int | None) -> float:
    """Keys that the last tokens of a causal document see on average: token i sees min(i, window), i
    from 1.
    """

    def seen(length: float) -> float:
        most = min(length, window or length)
        return most * (most + 1) / 2 + (length - most) * most

    last = min(max(last, 1.0), document)
    return (seen(document) - seen(document - last)) / last


def total(
    parts: Sequence[Part],
    upstream: bool,
    *,
    with_waste: bool = True,
) -> tuple[Flops, int]:
    """FLOPs and saved bytes of a layer; `upstream` says whether anything before the layer
    trains.
    """
    first = min((part.slot for part in parts if part.trained), default=math.inf)
    if upstream:
        first = -math.inf
    forward = dgrad = wgrad = saved = 0.0
    for part in parts:
        wasted = part.wasted if with_waste else Flops()
        forward += part.flops + wasted.forward
        if first < part.slot:
            dgrad += part.flops * part.dgrad_factor + wasted.dgrad
            saved += part.saved_for_dgrad
        if part.trained:
            wgrad += part.flops + wasted.wgrad
            saved += part.saved_for_wgrad
    return Flops(round(forward), round(dgrad), round(wgrad)), round(saved)


def block_parts(
    block: Block,
    trained: Collection[str],
    size: int,
    tokens: float,
    rows: float,
    context: float,
    document: float,
) -> list[Part]:
    """Parts of one transformer block over `tokens` tokens, stored in `size` bytes an element.

    `rows` is the number of tokens whose output is used, `context` the number of keys that one of
    those sees, `document` the tokens of a document, which a recurrent mixer takes one by one.
    """
    query = block.heads * block.head_dim
    key = block.kv_heads * block.head_dim
    mixer = block.mixer
    parts = []
    if mixer is not None:
        parts += mixer.parts(block, size, tokens, document)
    if block.attends:
        # query, key, value, result and the softmax's log-sum (fp32): fused attention keeps no
        # scores
        saved = size * (2 * query * rows + 2 * key * tokens) + 4 * block.heads * rows
        # scores, and values weighted by them
        flops = 4 * query * context * rows
        parts.append(Part(Sublayer.ATTENTION, flops, 2.0, saved_for_dgrad=saved))
    query_share = query / (query + 2 * key)
    made = _BlockParts(block, mixer, trained, size, tokens, rows, query_share, parts)
    for parameter in block.parameters:
        made.add(parameter)

    for (sublayer, elements, seen, _), is_trained in made.shared_inputs.items():
        saved = seen * size * elements
        parts.append(Part(sublayer, trained=is_trained, saved_for_wgrad=saved))
    for mlp in made.mlps.values():
        kept = mlp[Sublayer.MLP_IN]
        # gate and up against down: the activated gate is kept too, for the product
        if kept > 1.5 * mlp[Sublayer.MLP_OUT]:
            kept += mlp[Sublayer.MLP_OUT]
        parts.append(Part(Sublayer.MLP_OUT, saved_for_dgrad=rows * size * kept))
    return parts


@dataclass
class _BlockParts:
    """The parts of a block so far, made of one parameter after the other."""

    block: Block
    mixer: Mixer | None  # the block's
    trained: Collection[str]
    size: int
    tokens: float
    rows: float
    query_share: float  # of a fused projection's features
    parts: list[Part]
    # whether a matrix trains that reads it; an input of several matrices is kept once
    shared_inputs: dict[tuple[Sublayer, float, float, str], bool] = field(default_factory=dict)
    mlps: dict[str, dict[Sublayer, float]] = field(default_factory=dict)  # inner widths, by module

    def add(self, parameter: ParameterShape) -> None:
        local = parameter.name.removeprefix(self.block.prefix)
        sublayer = sublayer_of(local)
        is_trained = parameter.name in self.trained
        in_mixer = self.mixer is not None and local.startswith(self.mixer.prefix)
        is_matrix = len(parameter.shape) == 2 and parameter.name.endswith(".weight")
        if in_mixer:
            is_last = is_matrix and adapted_layer(local).rpartition(".")[2] in _OUT
            sublayer = Sublayer.PROJECT_OUT if is_last else Sublayer.PROJECT_IN
        if parameter.name.endswith("bias") or (in_mixer and not is_matrix):
            self.parts.append(Part(sublayer, trained=is_trained))
        elif len(parameter.shape) == 1:
            self.parts.append(self._norm(parameter.numel, local, sublayer, is_trained))
        else:
            self._add_matrix(parameter, local, sublayer, in_mixer)

    def _norm(
        self,
        elements: int,
        local: str,
        sublayer: Sublayer,
        is_trained: bool,
    ) -> Part:
        """Return a norm's part: it keeps its input in fp32 and one factor per row; training its
        weight keeps the normed input too.
        """
        seen = self.rows
        if sublayer == Sublayer.INNER_NORM:
            if elements == self.block.head_dim:  # one norm for all heads
                elements *= self.block.heads if "q" in local else self.block.kv_heads
            if not local.split(".")[-2].startswith("q"):
                seen = self.tokens
        elif sublayer == Sublayer.INPUT_NORM and self.rows < self.tokens:
            # once for the keys, once for the rows
            seen = self.tokens + self.rows
        return Part(
            sublayer,
            trained=is_trained,
            saved_for_dgrad=seen * (4 * elements + 4),
            saved_for_wgrad=seen * self.size * elements,
        )

    def _add_matrix(
        self,
        parameter: ParameterShape,
        local: str,
        sublayer: Sublayer,
        in_mixer: bool,
    ) -> None:
        block = self.block
        is_trained = parameter.name in self.trained
        is_a = parameter.name.endswith(LORA_A)
        seen = self.rows
        inner = block.inner_width(parameter)
        matrix = 2 * inner * block.width  # FLOPs of one token
        wasted = Flops()
        if self.rows < self.tokens and sublayer in (Sublayer.PROJECT_IN, Sublayer.PROJECT_LATENT):
            # The output of an adapter's A is for all that its layer does.
            query_share = 0.0 if is_a else self.query_share
            seen, wasted = _projected(local, matrix, query_share, self.tokens, self.rows)
        if parameter.name.endswith(LORA_B):  # it alone reads its A's output
            kept = seen * self.size * parameter.shape[1]
            self.parts.append(
                Part(sublayer + BEHIND, matrix * seen, 1.0, is_trained, wasted, 0.0, kept)
            )
            return
        self.parts.append(Part(sublayer, matrix * seen, 1.0, is_trained, wasted))

        # Experts: each of a token's has its copies.
        copies = 1
        if ".experts." in parameter.name:
            copies = max(1, block.experts_per_token)
        is_out = sublayer in (Sublayer.PROJECT_OUT, Sublayer.MLP_OUT)
        if is_a or sublayer == Sublayer.PROJECT_LATENT:
            reads = parameter.shape[-1]
        elif not is_out:
            reads = block.width * copies
        elif in_mixer:
            reads = self.mixer.inner
        elif sublayer == Sublayer.PROJECT_OUT:
            reads = block.heads * block.head_dim
        else:
            reads = inner
        module = adapted_layer(parameter.name) if is_out else ""
        read = (sublayer, reads, seen, module)
        self.shared_inputs[read] = self.shared_inputs.get(read, False) or is_trained

        in_mlp = sublayer in (Sublayer.MLP_IN, Sublayer.MLP_OUT)
        if in_mlp and not is_adapter(parameter.name):
            module = local.removesuffix(".weight").rpartition(".")[0]
            self.mlps.setdefault(module, defaultdict(float))[sublayer] += inner
        # an expert's result is kept for the gradient of its routing weight
        if ".experts." in parameter.name and sublayer == Sublayer.MLP_OUT:
            saved = self.rows * self.size * block.width * copies
            self.parts.append(Part(Sublayer.OUTPUT_NORM, saved_for_dgrad=saved))


def _projected(
    local_name: str,
    matrix: float,
    query_share: float,
    tokens: float,
    rows: float,
) -> tuple[float, Flops]:
    """(tokens that a matrix before attention is needed for, FLOPs that are thrown away) where only
    `rows` are asked.

    The layer runs as far as its keys and values for all tokens, then once more for the rows. One
    matrix for query, key and value is needed for a share of both, and its gradients are made for
    all of both.
    """
    module = adapted_layer(local_name).rpartition(".")[2]
    if module in _FUSED:
        needed = query_share * rows + (1 - query_share) * tokens
        unneeded = round(matrix * (tokens + rows - needed))
        return needed, Flops(unneeded, unneeded, unneeded)
    needed = tokens
    other = rows
    if module in _QUERY:
        needed = rows
        other = tokens
    if module in _LEFT_OUT:
        return needed, Flops()
    return needed, Flops(forward=round(matrix * other))


BEHIND = 0.5  # slots from A of an adapter to its B
# Of the run that does not need them (see last_layer.py); kv_b_proj lies behind the cache, which the
# first ends at.
_LEFT_OUT = {"q_proj", "q_b_proj", "k_proj", "v_proj", "kv_b_proj"}
_QUERY = {"q_proj", "q_a_proj", "q_b_proj", "query"}
_FUSED = {"qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv"}
_OUT = {"o_proj", "out_proj", "dense", "c_proj", "proj", "wo", "projection_layer"}


_LATENT = {"q_b_proj", "kv_b_proj"}
_DOWN = {"down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h", "output_linear", "weights_out"}


_MLP = {"mlp", "mixer", "feed_forward", "block_sparse_moe", "shared_mlp", "fc1", "fc2"}
_MIDDLE = (
    "post_attention",
    "post_self_attn",
    "pre_feedforward",
    "pre_ff_",
    "pre_mlp",
    "final_layer_norm",
    "ffn_norm",
)
_MIDDLE_EXACT = {
    "ln_2",
    "norm2",
    "layer_norm2",
    "layernorm_after",
    "ls1",
    "layer_scale1",
    "lambda_1",
}
_OUTPUT = ("post_feedforward", "post_mlp", "ls2", "layer_scale2", "lambda_2")


def sublayer_of(local_name: str) -> Sublayer:
    """The sublayer in which a parameter acts, from its stock name below the block
    (`self_attn.q_proj.weight`).

    An unknown name counts as the block's beginning: if it trains, FLOPs can only be overestimated.
    """
    modules = [m for m in local_name.split(".") if m not in ("weight", "bias", "lora_A", "lora_B")]
    first = modules[0]
    last = modules[-1].removesuffix("_bias")
    if "norm" in first or first.startswith(("ln_", "ls", "layer_scale", "lambda_")):
        if first.startswith(_MIDDLE) or first in _MIDDLE_EXACT:
            return Sublayer.MIDDLE_NORM
        return Sublayer.OUTPUT_NORM if first.startswith(_OUTPUT) else Sublayer.INPUT_NORM

    is_expert = "expert" in local_name
    # nemotron_h
    if first == "mixer" and last not in _DOWN | {"up_proj", "gate"} and not is_expert:
        first = "attention"
    if "attn" in first or "attention" in first:
        if last in _OUT:
            return Sublayer.PROJECT_OUT
        if "norm" in last or last == "sinks":
            return Sublayer.INNER_NORM
        return Sublayer.PROJECT_LATENT if last in _LATENT else Sublayer.PROJECT_IN

    # transformers' ViT, whose attention has an `output` of its own
    if first == "output":
        return Sublayer.MLP_OUT
    if first == "intermediate":
        return Sublayer.MLP_IN
    if first in _MLP or "expert" in first:
        return Sublayer.MLP_OUT if last in _DOWN else Sublayer.MLP_IN
    return Sublayer.INPUT_NORM
