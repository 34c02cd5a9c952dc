"""The last decoder layer for some tokens alone: what the stock model gives at these tokens, and no
more work.
"""

import pytest
import torch
from families import HYBRIDS, family_config
from sweeps import sweep
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmtrain.facts.families import WHOLE_LAST_LAYER
from mmtrain.facts.shapes import llm_shape
from mmtrain.model.llm.attention import Documents
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.language import DecoderLayers, slice_of
from mmtrain.model.llm.last_layer import Rows
from mmtrain.model.llm.parity import ROWS_BOUND, rows_difference, takes_rows
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.plan.block_costs import Block

pytestmark = pytest.mark.slow

DOCUMENTS = ((13, 6, 19), (30, 8))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
LENGTH = 38
# Answers at the end of documents, in the middle, of one token, a whole document; none in the first
# row's second one.
PLACES = torch.tensor(
    [6, 7, 8, 11, 22, 23, 24, 33, 34, 36, 37, *(LENGTH + t for t in (0, 9, 10, 28, *range(30, 38)))]
)
LAYERS = 4
# They differ in attention (windows, soft caps, sinks, latent, fused), norms, rotations, experts,
# parallel parts.
ON_ROWS = [
    *(
        "llama",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "olmo2",
        "granite",
        "cohere2",
        "smollm3",
        "gpt_oss",
    ),
    *(
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "starcoder2",
        "opt",
        "gpt_neox",
        "phi",
        "stablelm",
        "exaone4",
    ),
    *("ernie4_5", "minimax_m2"),
]
DAILY = (
    "llama",
    "phi3",
    "gemma3_text",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "granite",
    "qwen3_5_text",
    "lfm2",
)
OPTIONS = {
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
}


def model_of(family: str, **options) -> PreTrainedModel:
    return tiny_model(
        family_config(
            family, **{"num_hidden_layers": LAYERS, **OPTIONS.get(family, {}), **options}
        ),
        0,
    )


def narrow_slice(model: PreTrainedModel, first: int = 0) -> DecoderLayers:
    part = slice_of(model, first, LAYERS, embedding=first == 0, head=True)
    part.narrow_last_layer()
    return part


def embeddings_of(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(128, POSITIONS.shape, generator=torch.Generator().manual_seed(1))
    return model.get_input_embeddings()(ids).detach().requires_grad_()


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))


def stock_logits(model: PreTrainedModel, embeddings: torch.Tensor) -> torch.Tensor:
    """Logits (S, V) at PLACES, of the stock model and its own attention on each document alone.

    Eager: in transformers 5.17 the other one leaves gemma2's soft cap out.
    """
    model.set_attn_implementation("eager")
    documents = [
        part
        for row, lengths in zip(embeddings, DOCUMENTS, strict=True)
        for part in row.split(lengths)
    ]
    logits = model(inputs_embeds=pad_sequence(documents, batch_first=True)).logits
    return torch.cat([row[: len(part)] for row, part in zip(logits, documents, strict=True)])[
        PLACES
    ]


def close(ours: torch.Tensor, stock: torch.Tensor) -> bool:
    return bool((ours - stock).abs().max() <= 1e-5 * stock.abs().max())


@pytest.mark.parametrize("family", sweep(ON_ROWS, DAILY))
def test_logits_and_input_gradient_are_those_of_the_stock_model(family):
    model = model_of(family)
    embeddings = embeddings_of(model)
    expected = stock_logits(model, embeddings)
    (expected_gradient,) = torch.autograd.grad((expected * weights_of(expected)).sum(), embeddings)
    part = narrow_slice(model)
    logits = part.logits(part.forward_rows(embeddings, POSITIONS, PLACES))
    (gradient,) = torch.autograd.grad((logits * weights_of(logits)).sum(), embeddings)
    assert close(logits, expected) and close(gradient, expected_gradient)
    assert takes_rows(model.config) and family not in WHOLE_LAST_LAYER


@pytest.mark.parametrize("family", sorted(WHOLE_LAST_LAYER))
def test_families_that_are_planned_with_a_whole_last_layer_run_one(family):
    assert not takes_rows(CONFIG_MAPPING[family](num_hidden_layers=LAYERS))


@pytest.mark.parametrize("family", sweep(sorted(HYBRIDS.keys() - WHOLE_LAST_LAYER), DAILY))
def test_a_hybrids_last_layer_runs_for_some_tokens_where_the_plan_says_so(family, tmp_path):
    model = model_of(family, **{**HYBRIDS[family], "num_hidden_layers": 6})
    model.save_pretrained(tmp_path)
    shape = llm_shape(str(tmp_path))
    block = Block(
        shape.decoder[-1],
        "llm.layers.5.",
        shape.hidden_size,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
    )
    assert takes_rows(model.config) == (block.attends and block.mixer is None)


def test_a_family_that_cannot_be_run_so_is_found_and_runs_for_all_tokens():
    model = model_of("gpt2")  # wants the whole length behind its layers
    assert not takes_rows(model.config)
    part = slice_of(model, 0, LAYERS, embedding=True, head=True)
    embeddings = embeddings_of(model)
    rows = part.forward_rows(embeddings, POSITIONS, PLACES)
    assert torch.equal(rows, part(embeddings, POSITIONS).flatten(0, 1)[PLACES])


def test_a_trainable_last_layer_gets_the_stock_models_gradients():
    model = model_of("llama")
    trained = decoder_layers(model)[-1].requires_grad_(True)
    embeddings = embeddings_of(model).detach()
    stock = stock_logits(model, embeddings)
    (stock * weights_of(stock)).sum().backward()
    expected = {name: parameter.grad for name, parameter in trained.named_parameters()}
    part = narrow_slice(model)
    layer = decoder_layers(part.model)[-1].requires_grad_(True)
    logits = part.logits(part.forward_rows(embeddings, POSITIONS, PLACES))
    (logits * weights_of(logits)).sum().backward()
    assert len(expected) == 9
    for name, parameter in layer.named_parameters():
        assert close(parameter.grad, expected[name]), name


def matrix_products(part: DecoderLayers, hidden: torch.Tensor) -> int:
    """FLOPs of all linear layers, forward and backward; rotations are bmm in some versions of
    transformers.
    """
    with FlopCounterMode(display=False) as counter:
        part.forward_rows(hidden, POSITIONS, PLACES).sum().backward()
    linear = {"aten.mm", "aten.addmm"}
    return sum(
        flops
        for operator, flops in counter.get_flop_counts()["Global"].items()
        if str(operator) in linear
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_nothing_is_multiplied_that_has_no_part_in_the_result(family):
    model = model_of(family)
    hidden = embeddings_of(model)
    layer = decoder_layers(model)[-1]
    sizes = {name: p.numel() for name, p in layer.named_parameters() if p.ndim == 2}
    keys = sum(size for name, size in sizes.items() if name.split(".")[-2] in ("k_proj", "v_proj"))
    others = sum(sizes.values()) - keys
    # Forward and the gradient of the input: twice two operations for each weight and token.
    expected = 4 * (POSITIONS.numel() * keys + len(PLACES) * others)
    assert matrix_products(narrow_slice(model, LAYERS - 1), hidden) == expected


def test_a_head_without_layers_norms_its_rows_alone():
    model = model_of("llama")
    part = slice_of(model, LAYERS, LAYERS, embedding=False, head=True)
    norm, tokens = part.model.model.norm, []
    norm.register_forward_pre_hook(
        lambda _, inputs: tokens.append(inputs[0].numel() // inputs[0].shape[-1])
    )
    hidden = embeddings_of(model)
    assert torch.equal(
        part.forward_rows(hidden, POSITIONS, PLACES), model.model.norm(hidden.flatten(0, 1)[PLACES])
    )
    assert tokens == [len(PLACES)]


@pytest.mark.parametrize("first", [0, LAYERS])
def test_without_rows_the_result_is_empty_and_gradients_are_zeros(first):
    model = model_of("mixtral")
    part = slice_of(model, first, LAYERS, embedding=False, head=True)
    if first == 0:
        part.narrow_last_layer()
    part.model.requires_grad_(True)
    hidden = embeddings_of(model)
    rows = part.forward_rows(hidden, POSITIONS, PLACES[:0])
    assert rows.shape == (0, part.hidden_size)
    rows.sum().backward()
    assert not hidden.grad.any()
    norm = part.model.model.norm.weight.grad
    assert norm is not None and not norm.any()


@pytest.mark.parametrize("recomputed", [LAYERS - 1, LAYERS])
def test_recomputation_changes_no_bit_and_takes_the_rows_of_its_own_micro_batch(recomputed):
    model = model_of("gemma2")
    results = []
    for count in (0, recomputed):
        part = narrow_slice(model)
        part.recompute(count)
        inputs = [embeddings_of(model), embeddings_of(model)]
        batches = zip(inputs, (PLACES, PLACES[5:9]), strict=True)
        in_flight = [part.forward_rows(hidden, POSITIONS, places) for hidden, places in batches]
        for rows in in_flight:
            (rows * weights_of(rows)).sum().backward()
        results.append(
            [*(rows.detach() for rows in in_flight), *(hidden.grad for hidden in inputs)]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_all_tokens_run_as_ever_after_rows_and_after_an_error():
    model = model_of("llama")
    part = narrow_slice(model)
    hidden = embeddings_of(model)
    expected = slice_of(model, 0, LAYERS, embedding=True, head=True)(hidden, POSITIONS)
    part.forward_rows(hidden, POSITIONS, PLACES)
    assert torch.equal(part(hidden, POSITIONS), expected)
    with pytest.raises(IndexError):
        part.forward_rows(hidden, POSITIONS, torch.tensor([POSITIONS.numel()]))
    assert torch.equal(part(hidden, POSITIONS), expected)


def one_token_too_far(documents: Documents, places: torch.Tensor) -> Documents:
    """Queries that are thought to be one token further on in their document than they are."""
    right = documents_at(documents, places)
    runs = tuple((row, begin, a - (a > begin), b - (a > begin)) for row, begin, a, b in right.runs)
    return Documents(runs, right.window)


documents_at = Documents.at


def first_tokens(rows: Rows, tensor: torch.Tensor) -> torch.Tensor:
    """Rotations of a row's first tokens instead of the rows' own."""
    return (
        tensor[:1, : len(rows.places)]
        if tensor.ndim == 3 and tensor.shape[-1] == 16
        else of_tensor(rows, tensor)
    )


of_tensor = Rows.of_tensor


@pytest.mark.parametrize(
    ("owner", "method", "fault"),
    [(Documents, "at", one_token_too_far), (Rows, "of_tensor", first_tokens)],
)
def test_a_wrong_mask_or_rotation_is_found(monkeypatch, owner, method, fault):
    config = model_of("llama").config
    assert rows_difference(config, 0) <= ROWS_BOUND
    monkeypatch.setattr(owner, method, fault)
    assert 1e-2 < rows_difference(config, 0) < float("inf")
    assert not takes_rows(config)
