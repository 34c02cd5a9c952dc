"""Costs of layers against torch's own counts: FLOPs of real modules, bytes that autograd really
saves, hand sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from stock_encoders import ENCODERS
from sweeps import sweep
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mmtrain.config.model import LoraSection, ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.connectors import CONNECTORS
from mmtrain.facts.chunks import LOGITS_PER_CHUNK
from mmtrain.facts.models import models_of
from mmtrain.facts.projector import connector, connector_parameters, has_deepstack
from mmtrain.facts.shapes import ParameterShape, matches_any
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.llm.last_layer import LastLayer, Rows
from mmtrain.model.trained.lora import add_adapters, without_marks
from mmtrain.model.trained.projector import make_projector
from mmtrain.plan.block_costs import Block, Flops, block_parts, keys_seen, sublayer_of, total
from mmtrain.plan.calibration import CPU, GPU, assumed_timings
from mmtrain.plan.costs import (
    LayerCost,
    RunCosts,
    Workload,
    minimal_flops,
    run_costs,
)

VICUNA, CLIP = "lmsys/vicuna-7b-v1.5", "vit_large_patch14_clip_quickgelu_336.openai"
TOKENS = 32


def make_config(**values: object) -> RunConfig:
    """A run of Vicuna-7B with CLIP; `section__key` overrides."""
    raw: dict = {
        "run": {"name": "costs"},
        "model": {"llm": {"path": VICUNA}, "vision": {"name": CLIP}},
        "data": {"shards": "none.tar"},
        "train": {"packs_per_step": 8, "max_steps": 1},
    }
    for path, value in values.items():
        *sections, key = path.split("__")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return RunConfig.model_validate(raw)


def costs_of(**values: object) -> RunCosts:
    config = make_config(**values)
    return run_costs(config, models_of(config))


def layers_of(**values: object) -> tuple[LayerCost, ...]:
    """Front, decoder layers, head; the last decoder layer as it is where the head is on another
    stage.
    """
    costs = costs_of(**values)
    return (*costs.layers[:-2], costs.whole_last, costs.layers[-1])


# ---- FLOPs of real modules


def one_layer(family: str, **values: object) -> nn.Module:
    """A stock base model with one decoder layer and eager attention, whose matrix products torch
    counts exactly.
    """
    config = transformers.AutoConfig.for_model(
        family,
        **{
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 32,
            "pad_token_id": 0,
            **values,
        },
    )
    # fused kernels count as nothing
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return (
        AutoModel.from_config(config, dtype=torch.float32, **options).eval().requires_grad_(False)
    )


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLA = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}
GLM_MOE = MLA | {"first_k_dense_replace": 0, "use_qk_norm": True, "attention_bias": True}
MLA |= {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
MLA |= {"num_key_value_heads": 8, "head_dim": 16}
GLM_MLA = MLA | {"mlp_layer_types": ["sparse"]}
MLA |= {"first_k_dense_replace": 0}


def block_of(
    model: nn.Module,
    trained: Sequence[str] = (),
    rows: int = TOKENS,
    tokens: int = TOKENS,
    size: int = 4,
) -> list:
    """Parts of the model's only decoder layer, heads 32 wide; eager attention computes the full
    square of scores.
    """
    prefix = "layers.0."
    named = [(without_marks(n), p) for n, p in model.named_parameters()]
    parameters = [ParameterShape(n, tuple(p.shape)) for n, p in named if n.startswith(prefix)]
    config = model.config
    block = Block(
        parameters,
        prefix,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim=32,
        experts=getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0) or 0,
        experts_per_token=getattr(config, "num_experts_per_tok", 0) or 0,
    )
    return block_parts(block, trained, size, tokens, rows, context=tokens, document=tokens)


def counted(run: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """FLOPs of (forward, backward), the latter 0 where nothing needs a gradient."""
    with FlopCounterMode(display=False) as forward:
        output = run()
    with FlopCounterMode(display=False) as backward:
        if output.requires_grad:
            output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def hidden_states(model: nn.Module, *, input_gradient: bool) -> torch.Tensor:
    return torch.ones(1, TOKENS, model.config.hidden_size, requires_grad=input_gradient)


def measured(model: nn.Module, *, input_gradient: bool) -> tuple[int, int]:
    """FLOPs of a forward pass from embeddings, and of its backward."""
    hidden = hidden_states(model, input_gradient=input_gradient)
    return counted(lambda: model(inputs_embeds=hidden, use_cache=False).last_hidden_state)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"num_key_value_heads": 8}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("glm", {}),
        ("glm4", {}),
        ("glm4_moe", GLM_MOE),
        ("glm4_moe_lite", GLM_MLA),
        ("granite", {}),
        ("olmo2", {}),
        ("starcoder2", {}),
        ("cohere2", {}),
        ("qwen3_moe", MOE),
        ("deepseek_v3", MLA),
    ],
)
def test_flops_are_those_that_torch_counts(family: str, values: dict) -> None:
    model = one_layer(family, **values)
    parts = block_of(model)
    forward, dgrad = measured(model, input_gradient=True)
    frozen, _ = total(parts, True)
    assert frozen.forward == pytest.approx(forward, rel=0.02)
    assert frozen.dgrad == pytest.approx(dgrad, rel=0.02)
    assert frozen.wgrad == 0
    assert total(parts, False)[0] == Flops(frozen.forward, 0, 0), (
        "nothing trains here or before: no backward"
    )

    layer = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.0.")]
    for _, parameter in layer:
        parameter.requires_grad_(True)
    _, backward = measured(model, input_gradient=True)
    trained, _ = total(block_of(model, [n for n, _ in layer]), True)
    assert trained.dgrad == frozen.dgrad
    assert trained.dgrad + trained.wgrad == pytest.approx(backward, rel=0.02)


def training_each_alone(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int, Flops]]:
    """Each parameter of the layer, with torch's count of the backward and ours when it alone
    trains.
    """
    for name, parameter in model.named_parameters():
        if name.startswith("layers.0."):
            parameter.requires_grad_(True)
            _, backward = measured(model, input_gradient=False)
            parameter.requires_grad_(False)
            yield name, parameter, backward, total(block_of(model, [name]), False)[0]


@pytest.mark.parametrize(
    "family",
    sweep(
        ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "starcoder2"],
        ["llama", "gemma3_text", "phi3"],
    ),
)
def test_training_any_one_matrix_costs_the_gradients_behind_it_and_its_own(family: str) -> None:
    """Nothing upstream trains: each parameter alone decides how far back the layer's backward
    goes.
    """
    for name, parameter, backward, flops in training_each_alone(one_layer(family)):
        # of attention's four gradients; v_proj alone needs one of them
        unneeded = 3 * 2 * 256 * TOKENS * TOKENS
        assert backward * 0.98 <= flops.dgrad + flops.wgrad <= backward * 1.02 + unneeded, name
        assert flops.wgrad == (2 * parameter.numel() * TOKENS if parameter.ndim > 1 else 0), name


ROWS = 5


def measured_on_rows(model: nn.Module, *, input_gradient: bool) -> tuple[int, int]:
    """FLOPs of the decoder layer run for its last ROWS tokens alone, as the engine runs it."""
    hidden = hidden_states(model, input_gradient=input_gradient)
    layer, positions = model.layers[0], torch.arange(TOKENS)[None]
    seen: dict = {}
    handle = layer.register_forward_pre_hook(
        lambda _, args, options: seen.update(options), with_kwargs=True
    )
    with torch.no_grad():
        model(inputs_embeds=hidden, position_ids=positions, use_cache=False)
    handle.remove()
    options = {
        k: v for k, v in seen.items() if k not in ("hidden_states", "past_key_values", "use_cache")
    }
    options["attention_mask"] = None
    last_layer = LastLayer(layer, recompute=False)
    last_layer.rows = Rows(torch.arange(TOKENS - ROWS, TOKENS), torch.device("cpu"))

    def run() -> torch.Tensor:
        output = last_layer(hidden, **options)
        return output[0] if isinstance(output, tuple) else output

    return counted(run)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        *(
            (family, {})
            for family in ("llama", "qwen3", "gemma2", "phi3", "glm", "glm4", "olmo2", "starcoder2")
        ),
        *(("deepseek_v3", MLA), ("glm4_moe", GLM_MOE), ("glm4_moe_lite", GLM_MLA)),
    ],
)
def test_flops_of_the_last_layer_on_rows_are_those_that_torch_counts(
    family: str, values: dict
) -> None:
    model = one_layer(family, **values)
    frozen, _ = total(block_of(model, rows=ROWS), True)
    forward, dgrad = measured_on_rows(model, input_gradient=True)
    assert frozen.forward == pytest.approx(forward, rel=0.02)
    assert frozen.dgrad == pytest.approx(dgrad, rel=0.02)
    layer = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.0.")]
    for _, parameter in layer:
        parameter.requires_grad_(True)
    _, backward = measured_on_rows(model, input_gradient=True)
    trained, _ = total(block_of(model, [n for n, _ in layer], ROWS), True)
    assert trained.dgrad + trained.wgrad == pytest.approx(backward, rel=0.02)


def give_adapters(model: nn.Module, targets: str) -> list[str]:
    """Trained adapters of rank 8 in the linear layers that the pattern names; the names of their
    parameters.
    """
    add_adapters(model, LoraSection(r=8, targets=(targets,)), "llm.{}".format, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return [without_marks(name) for name, _ in model.named_parameters() if ".lora_" in name]


@pytest.mark.parametrize("rows", [TOKENS, ROWS])
@pytest.mark.parametrize("targets", ["llm.layers.*", "*attn", "*mlp", "*.o_proj"])
@pytest.mark.parametrize("family", sweep(["llama", "phi3", "glm4", "gemma2"], ["phi3"]))
def test_flops_of_a_layer_with_adapters_are_those_that_torch_counts(
    family: str, targets: str, rows: int
) -> None:
    model = one_layer(family)
    adapters = give_adapters(model, targets)
    measure = measured if rows == TOKENS else measured_on_rows
    for upstream in (False, True):
        forward, backward = measure(model, input_gradient=upstream)
        flops, _ = total(block_of(model, adapters, rows), upstream)
        # of at most 16 frequencies, which older transformers multiply as matrices
        rotary = 2 * 16 * TOKENS
        assert flops.dgrad + flops.wgrad == backward
        assert flops.forward <= forward <= flops.forward + rotary * (rows == TOKENS)


def test_the_last_tokens_of_a_document_see_more_than_the_others() -> None:
    some = ((7, 2, None), (7, 3, 4), (656, 80, 128), (656, 80, None))
    every = ((1, 1, None), (7, 7, None), (7, 7, 3), (7, 7, 7), (7, 7, 100), (656, 656, 128))
    for document, last, window in (*some, *every):
        seen = [min(i, window or document) for i in range(1, document + 1)]
        assert keys_seen(document, last, window) == pytest.approx(sum(seen[-last:]) / last)


@pytest.mark.parametrize(
    "order",
    [
        "layernorm_before attention.attention.query attention.output.dense layernorm_after "
        "intermediate.dense "
        "output.dense",  # ViT
        "norm1 attention.attention.key attention.output.dense layer_scale1 mlp.weights_in "
        "mlp.weights_out layer_scale2",
        # DINOv3
        "norm1 attention.v_proj attention.o_proj norm2 mlp.up_proj mlp.down_proj layer_scale2",
        "layernorm_before attention.q_proj attention.q_norm attention.projection_layer lambda_1 "
        "mlp.fc1 mlp.fc2 "
        "lambda_2",  # InternViT
    ],
)
def test_parameters_of_encoders_stand_where_their_blocks_use_them(order: str) -> None:
    places = [sublayer_of(f"{name}.weight") for name in order.split()]
    assert places == sorted(places) and len(set(places)) == len(places)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoders_forward_is_what_torch_counts(kind: str, tmp_path: Path) -> None:
    make, _, _ = ENCODERS[kind]
    make().save_pretrained(tmp_path)
    tower = load_vision(str(tmp_path), -2, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        forward, _ = counted(lambda: tower(torch.zeros(3, 3, tower.image_size, tower.image_size)))
    costs = costs_of(model__vision__name=str(tmp_path))
    assert costs.encoder.forward / costs.work.tiles == pytest.approx(forward / 3, rel=1e-6)


# ---- bytes that autograd saves


def saved_bytes(run: Callable[[], torch.Tensor], owned: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages that `run`'s graph keeps, without `owned`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in owned}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known:
            kept[pointer] = tensor  # alive, so that no other tensor gets this address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("dtype", "trained", "kv_heads"),
    sweep(
        itertools.product((torch.bfloat16, torch.float32), (False, True), (8, 2)),
        [(torch.bfloat16, True, 2), (torch.float32, False, 8)],
    ),
)
def test_a_llama_layer_saves_the_bytes_that_torch_saves(
    dtype: torch.dtype, trained: bool, kv_heads: int
) -> None:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    layer = LlamaDecoderLayer(config, 0).to(dtype).eval().requires_grad_(trained)
    hidden = torch.randn(1, 128, 512, dtype=dtype, requires_grad=True)
    # shared by all layers
    positions = LlamaRotaryEmbedding(config)(hidden, torch.arange(128)[None])
    actual = saved_bytes(
        lambda: layer(hidden, position_embeddings=positions), [*layer.parameters(), *positions]
    )

    names = [ParameterShape(f"x.{name}", tuple(p.shape)) for name, p in layer.named_parameters()]
    block = Block(names, "x.", width=512, heads=8, kv_heads=kv_heads, head_dim=64)
    parts = block_parts(
        block,
        [p.name for p in names] if trained else [],
        dtype.itemsize,
        128,
        128,
        context=64.5,
        document=128,
    )
    expected = total(parts, True)[1]
    print(
        f"{dtype}, trained {trained}: {expected / 128:,.0f} expected, {actual / 128:,.0f} bytes "
        "per token saved"
    )
    assert expected == pytest.approx(actual, rel=0.08)  # 0.15 was asked for


def connectors_and_what_trains() -> Iterator[tuple[str, str]]:
    """Yield each connector for one encoder's features, whole, and its biases where it has some."""
    for kind in CONNECTORS:
        section = ProjectorSection(type=kind)
        if has_deepstack(section):
            continue
        yield kind, "projector"
        names = [parameter.name for parameter in connector_parameters(connector(section, 1, 2))]
        if any(name.endswith(".bias") for name in names):
            yield kind, "projector.*.bias"


@pytest.mark.parametrize(("kind", "trained"), connectors_and_what_trains())
def test_a_connector_costs_the_flops_and_bytes_that_torch_counts(kind: str, trained: str) -> None:
    demo = {
        "model__llm__path": "demo:llm",
        "model__vision": {"name": "demo:vision", "select_layer": -1},
    }
    demo["model__projector"] = {"type": kind}
    front, images = layers_of(**demo, model__trainable=(trained,))[0], costs_of(**demo).work.tiles
    projector = make_projector(connector(ProjectorSection(type=kind), 128, 128), seed=0)
    for name, parameter in projector.named_parameters():
        parameter.requires_grad_(matches_any(f"projector.{name}", (trained,)))
    features = torch.randn(1, 16, 128)
    forward, backward = counted(lambda: projector(features))
    assert front.flops.forward == pytest.approx(forward * images)
    assert front.flops.dgrad + front.flops.wgrad == pytest.approx(backward * images)
    kept = saved_bytes(lambda: projector(features), list(projector.parameters()))
    assert front.kept_bytes == pytest.approx(kept * images, rel=0.02)


def test_a_vicuna_layer_keeps_132_kilobytes_a_token_frozen_and_195_trained() -> None:
    tokens = 2048
    frozen = layers_of()[1].kept_bytes / tokens
    # Two norms in fp32 with a factor per row; query, key, value, result; 32 log-sums; gate, its
    # activation, up.
    assert frozen == 2 * (4 * 4096 + 4) + 4 * 4096 * 2 + 4 * 32 + 3 * 11008 * 2 == 131_720
    layer = layers_of(model__trainable=("llm.layers.0",))[1]
    upstream = layers_of(model__trainable=("projector", "llm.layers.0"))[1]
    trained = upstream.kept_bytes / tokens
    # In addition the inputs of all matrices and the normed inputs of both norms.
    assert trained == frozen + 2 * (2 * 4096 + 4096 + 2 * 4096 + 11008) == 194_696
    assert layer.kept_bytes == upstream.kept_bytes - tokens * (4 * 4096 + 4), (
        "with nothing trainable upstream the input norm passes no gradient on; "
        "its own weight's needs the normed input"
    )
    assert upstream.kept_bytes_recomputing == tokens * 4096 * 2


# ---- layers of a run, by hand


def test_vicuna_by_hand() -> None:
    front, *decoder, head = layers_of()
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert matrices == 202_375_168
    attention = 4 * 4096 * (656 + 1) / 2  # documents of 576 + 80 tokens
    assert decoder[0].flops == Flops(
        round(2048 * (2 * matrices + attention)), round(2048 * (2 * matrices + 2 * attention)), 0
    )
    assert all(layer == decoder[0] for layer in decoder)
    assert decoder[0].weight_bytes == 2 * (matrices + 2 * 4096)
    assert head.weight_bytes == 2 * (32000 * 4096 + 4096)
    supervised = round(2 * 32000 * 4096 * 2048 * 0.12)
    assert head.flops == Flops(supervised, supervised, 0)
    assert head.kept_bytes == round(2048 * 0.12 * (4 * 4096 + 4 + 4096 * 2)), (
        "norm and head see supervised rows"
    )

    projector = 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert front.trainable == projector == 20_979_712
    assert front.trainable_names == tuple(
        f"projector.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    )
    assert front.weight_bytes == 2 * 32000 * 4096 + 4 * projector
    assert front.state_bytes == 12 * projector, (
        "16 bytes a parameter with its weight, which is fp32 anyway"
    )
    images = 2048 / 656
    encoder = images * (23 * 577 * (2 * 12 * 1024**2 + 4 * 1024 * 577) + 576 * 2 * 1024 * 3 * 14**2)
    linear_1, linear_2 = (2 * 576 * images * n * 4096 for n in (1024, 4096))
    assert costs_of().encoder.forward == pytest.approx(encoder)
    assert front.flops.forward == pytest.approx(linear_1 + linear_2)
    assert front.flops.dgrad == round(linear_2), "only what lies behind linear_1"
    assert front.flops.wgrad == round(linear_1 + linear_2)
    assert front.kept_bytes == round(4 * (1024 + 4096 + 4096) * 576 * images), (
        "inputs of linear_1, gelu, linear_2"
    )


def test_the_projector_computes_in_fp32_and_all_else_as_it_is_stored() -> None:
    costs = costs_of()
    front, *others = costs.layers
    assert front.fp32_flops == front.flops and front.flops.total > 0, (
        "the embedding's look-up costs nothing"
    )
    assert (
        all(layer.fp32_flops == Flops() for layer in (*others, costs.whole_last))
        and not costs.encoder.in_fp32
    )
    costs = costs_of(model__llm__dtype="float32")
    assert (
        all(layer.fp32_flops == layer.flops for layer in (*costs.layers, costs.whole_last))
        and costs.encoder.in_fp32
    )
    trained = costs_of(model__trainable=("vision", "projector")).layers[0]
    # linear_1 needs an input gradient, too
    projector = front.flops.forward + front.flops.wgrad + front.flops.forward
    assert (
        trained.fp32_flops.total == pytest.approx(projector) and trained.flops.total > 2 * projector
    )


def test_a_gpu_is_assumed_to_take_ten_times_as_long_in_fp32_and_a_cpu_as_long_as_in_bfloat16() -> (
    None
):
    """Seconds of the front, whose projector is fp32, of a decoder layer and of the encoder, from
    their FLOPs.
    """
    costs = costs_of(model__llm__dtype="bfloat16", model__vision__dtype="float32")
    for device, rate, slower in ((GPU, 150e12, 10), (CPU, 100e9, 1)):
        timings = assumed_timings(costs, 1, device)
        front, layer = costs.layers[0].flops, costs.layers[1].flops
        assert timings.layers[0].forward == slower * front.forward / rate
        assert timings.layers[0].backward == slower * (front.dgrad + front.wgrad) / rate
        assert timings.layers[1].forward == layer.forward / rate
        assert timings.layers[1].backward == layer.dgrad / rate
        assert timings.encode == pytest.approx(slower * costs.encoder.forward / rate)


def test_minimal_flops_are_the_sum_of_what_cannot_be_left_out() -> None:
    """A step of three documents by hand: one linear attention sum for all of them, rows of the last
    layer, the head.
    """
    models = models_of(make_config())
    lengths, supervised = (656, 700, 600), 240
    tokens = sum(lengths)
    work = Workload(tokens, sum(n * n for n in lengths) / tokens, 3, 0, supervised)
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008
    scores = sum(4 * 4096 * n * (n + 1) / 2 for n in lengths)
    layer = 2 * matrices * tokens + scores, 2 * matrices * tokens + 2 * scores
    last_matrices = 2 * (2 * 4096**2 * tokens + (2 * 4096**2 + 3 * 4096 * 11008) * supervised)
    head = 2 * 32000 * 4096 * supervised
    patches = 3 * 576
    linear_1, linear_2 = (2 * patches * n * 4096 for n in (1024, 4096))
    encoder = 3 * (23 * 577 * (2 * 12 * 1024**2 + 4 * 1024 * 577) + 576 * 2 * 1024 * 3 * 14**2)
    minimal = minimal_flops(models, ("projector",), work)
    last_scores = 4 * 4096 * supervised * 650  # what the last tokens of documents of about 650 see
    assert minimal.forward == pytest.approx(
        encoder + linear_1 + linear_2 + 31 * layer[0] + last_matrices + last_scores + head, rel=2e-4
    )
    assert minimal.dgrad == pytest.approx(
        linear_2 + 31 * layer[1] + last_matrices + 2 * last_scores + head, rel=2e-4
    )
    assert minimal.wgrad == linear_1 + linear_2
    half = minimal_flops(models, ("llm.layers.31",), work)
    assert half.dgrad < 0.02 * minimal.dgrad and half.wgrad == pytest.approx(
        last_matrices, rel=1e-6
    )


def test_kinds_tell_layers_apart_that_cost_differently() -> None:
    def kinds(*trainable: str) -> list[tuple[str, bool, bool]]:
        costs = costs_of(model__trainable=trainable)
        found = costs.kinds
        assert {layer.kind for layer in costs.layers} <= {kind.name for kind in found}
        return [(kind.name, kind.input_gradient, bool(kind.trainable_names)) for kind in found]

    encoder, head = ("encoder", False, False), ("head", True, False)
    last = ("llm.layers.31 on rows", True, False)
    assert kinds("projector") == [
        encoder,
        ("front", False, True),
        ("llm.layers.0", True, False),
        last,
        head,
    ]
    middle = [(f"llm.layers.{i}", i == 17, i == 16) for i in (0, 16, 17)]
    assert kinds("llm.layers.16") == [encoder, ("front", False, False), *middle, last, head]
    assert kinds("vision", "projector")[:2] == [("encoder", False, True), ("front", True, True)]


def test_the_head_makes_logits_of_at_most_a_chunk() -> None:
    many = layers_of(data__pack_length=8192, data__expected_supervised_fraction=0.5)[-1]
    assert many.forward_working_bytes == LOGITS_PER_CHUNK * (2 + 3 * 4)
    few = layers_of(data__pack_length=1000)[-1]
    assert few.forward_working_bytes == 120 * 32000 * (2 + 3 * 4), "of supervised tokens alone"
