"""Packed attention against attention over an explicit (L, L) mask, and against torch's documented
GPU kernel.
"""

import inspect
import itertools
from unittest.mock import Mock

import pytest
import torch
from scenes import as_batch, make_config, make_document
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn
from transformers import LlamaConfig
from transformers.masking_utils import (
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from mmtrain.model.llm import attention
from mmtrain.model.llm.attention import (
    ATTENTION,
    Documents,
    attend_by_document,
    attend_flash,
    document_positions,
    flash_agrees,
    flash_varlen_attn,
    packed_attention,
    packed_mask,
)
from mmtrain.model.llm.kernels import Backend, describe_backends, record_backends
from mmtrain.model.stage import build_stage
from mmtrain.plan.planner import make_plan

LENGTHS = ((13, 6, 1, 12), (20, 12))  # two rows of 32 tokens
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
WINDOW = 8
HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 16, 12


def make_documents(make_mask, **options) -> Documents:
    """What the stock mask functions return for packed rows when the packed attention is chosen."""
    config = LlamaConfig(**options)
    config._attn_implementation = ATTENTION
    with document_positions(POSITIONS):
        # position_ids are withheld, as gpt_oss does: documents must not depend on the model handing
        # them on.
        return make_mask(config, torch.zeros(2, 32, 4), None, None, position_ids=None)


def states(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, VALUE_WIDTH))
    return [
        torch.randn(2, heads, 32, width, generator=generator).to(dtype) for heads, width in sizes
    ]


def attend_densely(query, key, value, *, window=None, chunk=None, softcap=None, sinks=None, scale):
    """The definition, in float64: softmax over the tokens of the own document that are not later,
    (B, L, H, E).
    """
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in LENGTHS]
    )
    seen = document[:, :, None] == document[:, None, :]
    distance = POSITIONS[:, :, None] - POSITIONS[:, None, :]
    seen &= distance >= 0
    if window:
        seen &= distance < window
    if chunk:
        seen &= POSITIONS[:, :, None] // chunk == POSITIONS[:, None, :] // chunk
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen[:, None], scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / total @ v).transpose(1, 2)


SOME = torch.tensor(
    [0, 4, 5, 6, 12, 13, 19, 20, 30, 31, 32 + 3, 32 + 18, 32 + 19, 32 + 20, 32 + 30]
)


def assert_same_with_gradients(ours, expected, inputs):
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((ours * weights).sum(), inputs)
    for gradient, wanted in zip(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [None, SOME], ids=["all tokens", "some"])
@pytest.mark.parametrize(
    ("mask", "config", "reference"),
    [
        (create_causal_mask, {}, {}),
        (create_sliding_window_causal_mask, {"sliding_window": WINDOW}, {"window": WINDOW}),
        (create_sliding_window_causal_mask, {"sliding_window": 1}, {"window": 1}),
        (create_chunked_causal_mask, {"attention_chunk_size": WINDOW}, {"chunk": WINDOW}),
    ],
    ids=["full", "window", "window of one", "chunk"],
)
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 2.0}, {"s_aux": True}], ids=["plain", "softcap", "sinks"]
)
def test_equals_attention_over_an_explicit_mask(mask, config, reference, extra, places):
    documents = make_documents(mask, **config)
    inputs = [x.requires_grad_() for x in states()]
    sinks = (
        torch.randn(HEADS, generator=torch.Generator().manual_seed(1)) if "s_aux" in extra else None
    )
    query, softcap = inputs[0], extra.get("softcap")
    expected = attend_densely(*inputs, scale=0.3, softcap=softcap, sinks=sinks, **reference)
    if places is not None:
        query, documents = at(query, places), documents.at(places)
        expected = expected.flatten(0, 1)[places][None]
    ours, _ = packed_attention(
        torch.nn.Module(), query, *inputs[1:], documents, 0.3, softcap=softcap, s_aux=sinks
    )
    assert_same_with_gradients(ours, expected, inputs)


def at(query, places):
    """The queries (1, H, S, D) of some of the tokens of (B, H, L, D)."""
    return query.transpose(1, 2).flatten(0, 1)[places].transpose(0, 1)[None]


@pytest.mark.parametrize("length", [8, 32], ids=["several in a row", "one in a row"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_documents_of_one_length_are_attended_to_in_one_call_as_one_by_one(
    monkeypatch, length, window, softcap
):
    runs = tuple(
        (row, begin, begin, begin + length) for row in range(2) for begin in range(0, 32, length)
    )
    offsets = torch.arange(0, 65, length, dtype=torch.int32)
    inputs = [x.requires_grad_() for x in states()]
    one_by_one = attend_by_document(*inputs, Documents(runs, window), 0.3, softcap)
    attend = Mock(wraps=attention._attend)
    monkeypatch.setattr(attention, "_attend", attend)
    together = attend_by_document(*inputs, Documents(runs, window, offsets, length), 0.3, softcap)
    assert together.is_contiguous() and attend.call_count == 1
    assert_same_with_gradients(together, one_by_one.double(), inputs)


def test_some_queries_are_runs_that_end_where_documents_do():
    some = make_documents(create_sliding_window_causal_mask, sliding_window=WINDOW).at(SOME)
    expected = [
        (0, 0, 0, 1),
        (0, 0, 4, 7),
        (0, 0, 12, 13),
        (0, 13, 13, 14),
        (0, 19, 19, 20),
        (0, 20, 20, 21),
    ]
    expected += [(0, 20, 30, 32), (1, 0, 3, 4), (1, 0, 18, 20), (1, 20, 20, 21), (1, 20, 30, 31)]
    assert list(some.runs) == expected and some.window == WINDOW


def test_documents_end_where_positions_restart_and_the_gpu_borders_run_over_all_rows():
    documents = make_documents(create_sliding_window_causal_mask, sliding_window=WINDOW)
    spans = [(0, 0, 13), (0, 13, 19), (0, 19, 20), (0, 20, 32), (1, 0, 20), (1, 20, 32)]
    assert documents.runs == tuple((row, begin, begin, end) for row, begin, end in spans)
    assert documents.window == WINDOW
    assert documents.offsets.tolist() == [0, 13, 19, 20, 32, 52, 64]
    assert documents.offsets.dtype == torch.int32
    assert documents.longest == 20


def documented_kernel(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """torch.nn.attention.varlen.varlen_attn by its documentation, sequence by sequence; q (T, H, D)
    to (T, H, D).

    Where a sequence has fewer queries than keys, flash attention takes them for its last tokens.
    """
    # A call that torch's own function would refuse must fail here too.
    options = {"scale": scale, "window_size": window_size} | (
        {"enable_gqa": True} if enable_gqa else {}
    )
    inspect.signature(varlen_attn).bind(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options
    )
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.ndim == key.ndim == value.ndim == 3
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    left, right = window_size
    outputs = []
    for queries, keys in zip(spans(cu_seq_q), spans(cu_seq_k), strict=True):
        q, k, v = (
            x[part].transpose(0, 1) for x, part in ((query, queries), (key, keys), (value, keys))
        )
        assert q.shape[1] <= max_q and k.shape[1] <= max_k
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
        distance = torch.arange(k.shape[1])[-q.shape[1] :, None] - torch.arange(k.shape[1])
        seen = distance >= -right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance <= left
        scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def spans(offsets):
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets.tolist())]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_the_gpu_kernel_is_called_as_documented(monkeypatch, window):
    monkeypatch.setattr(attention, "flash_varlen_attn", documented_kernel)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    documents = make_documents(make, **({} if window is None else {"sliding_window": window}))
    query, key, value = states()
    expected = attend_densely(query, key, value, scale=0.3, window=window)
    torch.testing.assert_close(
        attend_flash(query, key, value, documents, 0.3).double(), expected, rtol=1e-5, atol=1e-5
    )
    ours = attend_flash(at(query, SOME), key, value, documents.at(SOME), 0.3)
    torch.testing.assert_close(
        ours.double(), expected.flatten(0, 1)[SOME][None], rtol=1e-5, atol=1e-5
    )


def one_token_too_many(*arguments, window_size, **options):
    return documented_kernel(*arguments, window_size=(window_size[0] + 1, 0), **options)


def one_document_too_few(query, key, value, cu_seq_q, cu_seq_k, *_, **options):
    fewer = [torch.cat([offsets[:1], offsets[2:]]) for offsets in (cu_seq_q, cu_seq_k)]
    return documented_kernel(query, key, value, *fewer, len(query), len(key), **options)


def unsupported(*_, **__):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


class WrongBackward(torch.autograd.Function):
    """The documented kernel with the gradients that another call has: of `change(arguments,
    options)`.
    """

    @staticmethod
    def forward(ctx, change, options, *arguments):
        ctx.change, ctx.options, ctx.arguments = change, options, arguments
        return documented_kernel(*arguments, **options)

    @staticmethod
    def backward(ctx, upstream):
        qkv = [tensor.detach().requires_grad_() for tensor in ctx.arguments[:3]]
        with torch.enable_grad():
            seen = ctx.change(*qkv, *ctx.arguments[3:], **ctx.options)
        return None, None, *torch.autograd.grad(seen, qkv, upstream), *(4 * [None])


def backward_of(change):
    return lambda *arguments, **options: WrongBackward.apply(change, options, *arguments)


def gradient_of_keys_is_lost(query, key, *arguments, **options):
    return documented_kernel(query, key.detach() + 0 * key, *arguments, **options)


def not_a_number(*arguments, **options):
    return torch.nan * documented_kernel(*arguments, **options)


@pytest.fixture
def no_comparisons():
    """Forget what flash attention was compared with."""
    flash_agrees.cache_clear()
    yield
    flash_agrees.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "windowed", "agrees"),
    [
        (documented_kernel, (False, True), True),
        (one_token_too_many, (True,), False),
        (one_document_too_few, (False, True), False),
        (unsupported, (False,), False),
        (not_a_number, (False,), False),
        (backward_of(documented_kernel), (False, True), True),
        (backward_of(one_token_too_many), (True,), False),
        (backward_of(one_document_too_few), (False,), False),
        (backward_of(gradient_of_keys_is_lost), (False,), False),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_gpu_kernel_that_is_wrong_or_missing_is_not_used(
    monkeypatch, no_comparisons, kernel, windowed, agrees, grouped
):
    monkeypatch.setattr(attention, "flash_varlen_attn", kernel)
    assert all(
        flash_agrees(grouped, 16, each, torch.bfloat16, "cpu") is agrees for each in windowed
    )


def test_bf16_stays_close_to_the_definition():
    documents = make_documents(create_sliding_window_causal_mask, sliding_window=WINDOW)
    for options in ({}, {"softcap": 2.0}):
        ours, _ = packed_attention(
            torch.nn.Module(), *states(torch.bfloat16), documents, scaling=0.3, **options
        )
        assert ours.dtype == torch.bfloat16
        expected = attend_densely(*states(torch.bfloat16), scale=0.3, window=WINDOW, **options)
        torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1)},
        {"is_causal": False},
        {"block_table": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_it_does_not_know_are_refused(options):
    documents = make_documents(create_causal_mask)
    with pytest.raises(TypeError, match=next(iter(options))):
        packed_attention(torch.nn.Module(), *states(), documents, **options)


def test_a_mask_that_did_not_come_from_us_is_refused():
    with pytest.raises(TypeError, match="Tensor instead of its documents"):
        packed_attention(torch.nn.Module(), *states(), torch.ones(1, 1, 32, 32, dtype=torch.bool))


def test_padding_and_bidirectional_models_are_refused():
    config = LlamaConfig()
    config._attn_implementation = ATTENTION
    hidden = torch.zeros(2, 32, 4)
    # as opt does
    assert (
        create_causal_mask(config, hidden, torch.ones(2, 32, dtype=torch.long), None).longest == 32
    )
    with pytest.raises(ValueError, match="no padding mask"):
        create_causal_mask(config, hidden, torch.ones(2, 32, dtype=torch.long).triu(), None)
    with pytest.raises(ValueError, match="see later ones"):
        create_causal_mask(
            config, hidden, None, None, block_sequence_ids=torch.zeros(2, 32, dtype=torch.long)
        )
    config.is_causal = False
    with pytest.raises(ValueError, match="see later ones"):
        create_causal_mask(config, hidden, None, None)


def test_positions_are_forgotten_behind_the_context_even_after_an_error():
    with pytest.raises(RuntimeError), document_positions(POSITIONS):
        raise RuntimeError
    documents = packed_mask(2, 32, 32, mask_function=causal_mask_function)
    assert documents.runs == ((0, 0, 0, 32), (1, 0, 0, 32))


@pytest.mark.skipif(
    not hasattr(varlen, "_select_backend"), reason="this torch has flash attention alone"
)
def test_flash_attention_computes_where_torch_would_take_cudnn(monkeypatch):
    chosen = []

    def recorded(query, *arguments):
        chosen.append(arguments[-1])
        return query, query, query

    # as on Hopper, with a recent cuDNN
    monkeypatch.setattr(varlen, "_cudnn_rejection_reasons", lambda *_: [])
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", recorded)
    tokens = torch.zeros(8, 2, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    for kernel in (varlen_attn, flash_varlen_attn):
        kernel(tokens, tokens, tokens, offsets, offsets, 8, 8, scale=0.25, window_size=(-1, 0))
    assert chosen == [
        torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value,
        varlen._FLASH_ATTENTION_BACKEND,
    ]


def test_the_gpu_kernel_is_compared_before_a_recomputed_layer_uses_it(
    parts, monkeypatch, no_comparisons
):
    """Comparing inside such a layer ends in CheckpointError: recomputation does not save what the
    comparison saved.
    """
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention, "flash_varlen_attn", documented_kernel)
    losses, gradients = [], []
    for recomputed in (6, 0):
        layers = {"parallel__pipeline": 1, "parallel__recompute_layers": recomputed}
        config = make_config(parts, model__llm__dtype="bfloat16", data__pack_length=64, **layers)
        stage = build_stage(config, make_plan(config).ranks[0].stages[0])
        batch = as_batch(([make_document(1), make_document(2)], [make_document(3)]), 64)
        loss, _ = stage.loss(stage.start(batch), batch.position_ids, batch.labels)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in stage.global_parameters() if p.requires_grad})
    assert stage.kernels == {Backend("attention", "flash", None, False)}
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_it_is_known_how_attention_was_computed():
    documents = make_documents(create_causal_mask)
    with record_backends() as found:
        packed_attention(torch.nn.Module(), *states(), documents)
        packed_attention(torch.nn.Module(), *states(), documents)
    assert found == {Backend("attention", "document", "flash attention needs a GPU", False)}
    packed_attention(torch.nn.Module(), *states(), documents)
    assert len(found) == 1, "only within the context"


def test_a_slow_way_is_said_with_its_reason_and_ranks():
    fast, wide = (
        Backend("attention", "flash", None, False),
        Backend("attention", "document", "heads are 256 wide", True),
    )
    records, lines = describe_backends([{fast}, {fast, wide}, set()])
    assert lines == [
        "attention: flash attention, all documents in one call (ranks 0, 1)",
        "attention: documents one by one, which is slow: heads are 256 wide (ranks 1)",
    ]
    assert records == [
        {**fast._asdict(), "ranks": [0, 1]},
        {**wide._asdict(), "ranks": [1]},
    ]
    assert describe_backends([{fast}, {fast}])[1] == [
        "attention: flash attention, all documents in one call"
    ]


def test_a_compiled_class_is_said_with_the_least_gain_and_the_longest_compilation_of_all_ranks():
    compiled = [Backend("L", "compiled", factor=f, seconds=s) for f, s in ((1.3, 4), (1.25, 31))]
    eager = Backend("L", "eager", "no compiler", slow=True)
    records, lines = describe_backends([{compiled[0]}, {compiled[1]}, {eager}])
    assert lines == [
        "L: compiled, 1.25 times as fast, after 31 s of compiling (ranks 0, 1)",
        "L: not compiled, which is slow: no compiler (ranks 2)",
    ]
    assert (records[0]["factor"], records[0]["seconds"]) == (1.25, 31)
