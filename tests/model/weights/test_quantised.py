"""Decoder layers in fewer bits: what computes are the weights that bitsandbytes' own functions
give, nothing else.
"""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from fp8_products import needs_fp8_products
from sweeps import sweep
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from mmtrain.facts.quantised import quantised_bytes
from mmtrain.model.llm.attention import ATTENTION, document_positions
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.llm.tiny import VOCABULARY, tiny_model
from mmtrain.model.weights.fp8 import Fp8Linears, Product, cast
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import quantised_source

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
POSITIONS = torch.cat([torch.arange(13), torch.arange(9)])[None]
LAYERS = 6


@pytest.fixture(
    scope="module", params=sweep(["llama", "mixtral", "gpt2", "gemma2"], ["llama", "mixtral"])
)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIG_MAPPING[request.param](num_hidden_layers=LAYERS)
    tiny_model(config, seed=0).save_pretrained(folder)
    return folder


def stock(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=ATTENTION
    ).requires_grad_(False)


def matrices(model):
    """Of linear layers, and of experts that are one tensor, in the decoder layers of a stock
    model.
    """
    for module in decoder_layers(model).modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield module.weight
        yield from (p for p in module.parameters(recurse=False) if p.ndim == 3)


def through(weight, quantisation):
    if quantisation == "nf4":
        codes, state = bnb.quantize_4bit(
            weight, blocksize=64, compress_statistics=False, quant_type="nf4"
        )
        return bnb.dequantize_4bit(codes, state)
    if quantisation == "fp8":
        scales = weight.float().abs().amax(-1, keepdim=True) / 448
        return (weight.float() / scales).to(torch.float8_e4m3fn).float() * scales
    return bnb.dequantize_blockwise(*bnb.quantize_blockwise(weight, blocksize=256))


def streamed_model(folder, dtype, quantisation):
    """All of a causal LM as one slice whose layers are quantised."""
    streamed = StreamedLayers(quantised_source(quantisation, CPU))
    ends = {"embedding": True, "head": True, "dtype": dtype}
    return load_decoder_layers(
        str(folder), 0, LAYERS, **ends, streamed=streamed, streamed_numbers=range(LAYERS)
    )


def with_gradient(forward, embed, dtype):
    """Logits and the input's gradient, of two documents in a pack."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, POSITIONS.shape, generator=generator)
    hidden = embed(ids).detach().requires_grad_()
    logits = forward(hidden)
    weights = torch.randn(logits.shape, generator=generator).to(dtype)
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), hidden)[0]


def of_slice(part, dtype):
    return with_gradient(lambda hidden: part.logits(part(hidden, POSITIONS)[0]), part.embed, dtype)


def of_stock(model, dtype):
    def forward(hidden):
        with document_positions(POSITIONS):
            return model(inputs_embeds=hidden, position_ids=POSITIONS, use_cache=False).logits[0]

    return with_gradient(forward, model.get_input_embeddings(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("quantisation", ["nf4", "int8", "fp8"])
def test_outputs_and_gradients_are_those_of_the_stock_model_with_the_same_weights(
    checkpoint, quantisation, dtype
):
    part = streamed_model(checkpoint, dtype, quantisation)
    found = of_slice(part, dtype)
    exact = of_stock(model := stock(checkpoint, dtype), dtype)
    for weight in matrices(model):
        weight.copy_(through(weight, quantisation))
    for seen, expected, whole in zip(found, of_stock(model, dtype), exact, strict=True):
        assert torch.equal(seen, expected) or (seen - expected).norm() <= 1e-5 * expected.norm()
        assert not torch.equal(seen, whole)
    kept = [x for layer in part.streamed.layers.values() for x in layer.kept]
    assert all(state is not None for codes, state in kept if codes.dtype == torch.uint8)


@pytest.mark.parametrize("quantisation", ["nf4", "int8", "fp8"])
def test_what_is_kept_takes_the_bytes_that_are_planned(tmp_path, quantisation):
    config = CONFIG_MAPPING["llama"](num_hidden_layers=LAYERS)
    tiny_model(config, seed=0).save_pretrained(tmp_path)
    part = streamed_model(tmp_path, torch.bfloat16, quantisation)
    for layer in part.streamed.layers.values():
        for parameter, (codes, state) in zip(layer.parameters, layer.kept, strict=True):
            if state is None:
                assert parameter.ndim == 1 and codes.nbytes == 2 * parameter.numel()
            else:
                scales = getattr(state, "absmax", state)
                assert codes.nbytes + scales.nbytes == quantised_bytes(
                    tuple(parameter.shape), quantisation
                )


def test_a_fingerprint_is_of_codes_and_scales(tmp_path):
    tiny_model(CONFIG_MAPPING["llama"](num_hidden_layers=LAYERS), seed=0).save_pretrained(tmp_path)
    prints = {}
    for quantisation in ("nf4", "int8", "fp8"):
        streamed = streamed_model(tmp_path, torch.float32, quantisation).streamed
        layer = streamed.layers[0]
        prints[quantisation] = streamed.source.fingerprints(layer)
        place = next(i for i, name in enumerate(layer.names) if name.endswith("q_proj.weight"))
        state = layer.kept[place].state
        getattr(state, "absmax", state)[0] *= 2
        assert [
            a != b
            for a, b in zip(prints[quantisation], streamed.source.fingerprints(layer), strict=True)
        ] == [i == place for i in range(len(layer.names))]
    same = [a == b == c for a, b, c in zip(*prints.values(), strict=True)]
    assert same == [name.endswith("layernorm.weight") for name in layer.names]


def rounded(rows):
    """Return what FP8 keeps of rows, in float32, by its definition."""
    scales = rows.abs().amax(-1, keepdim=True).float() / 448
    return (rows.float() / scales).to(torch.float8_e4m3fn).float() * scales


@needs_fp8_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fp8_products_are_those_of_rounded_factors_in_both_directions(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    # of channels that differ a thousandfold, and rows of zeros
    weight *= torch.logspace(-2, 1, 48)[:, None]
    x = torch.randn(37, 64, generator=generator).to(dtype)
    x[5] = 0
    upstream = torch.randn(37, 48, generator=generator).to(dtype)
    codes, scales = cast(weight)
    x.requires_grad_()
    product = Product.apply(x, codes, scales)
    (gradient,) = torch.autograd.grad(product, x, upstream)
    assert product.dtype == gradient.dtype == dtype
    dequantised = codes.float() * scales
    factors = (rounded(x.detach().nan_to_num()).nan_to_num(), dequantised.t())
    turned = (rounded(upstream.float() * scales.t()), codes.float())
    for ours, expected in ((product, factors[0] @ factors[1]), (gradient, turned[0] @ turned[1])):
        assert (ours.float() - expected).norm() <= 4e-3 * expected.norm()  # a result is bfloat16
    exact = upstream.float() @ weight
    assert (gradient.float() - exact).norm() <= 0.06 * exact.norm()


@needs_fp8_products
def test_a_weight_that_is_multiplied_in_fp8_is_never_made_whole(tmp_path):
    tiny_model(CONFIG_MAPPING["llama"](num_hidden_layers=LAYERS), seed=0).save_pretrained(tmp_path)
    part = streamed_model(tmp_path, torch.float32, "fp8")
    streamed = part.streamed
    layer = decoder_layers(part.model)[2]
    before = streamed.source.fingerprints(streamed.layers[2])
    linears = Fp8Linears(layer, streamed.layers[2])
    with streamed.whole(2):
        expected = layer.mlp(hidden := torch.randn(9, 64))
    linears.multiply()
    kept = streamed.layers[2]
    whole = [i for i, name in enumerate(kept.names) if name.endswith("layernorm.weight")]
    assert kept.unfetched == set(range(len(kept.names))) - set(whole)
    with streamed.whole(2):
        assert all(home.isfinite().all() for home in kept.homes), "an audit reads all of it"
    streamed.follow([2])
    for place, home in enumerate(kept.homes):
        if place in kept.unfetched:
            home.fill_(float("nan"))
    ours = streamed.around(2, lambda: layer.mlp(hidden))()
    streamed.end()
    assert 1e-3 < (ours - expected).norm() / expected.norm() < 0.1
    assert streamed.source.fingerprints(streamed.layers[2]) == before
    linears.dequantise()
    with streamed.whole(2):
        assert torch.equal(layer.mlp(hidden), expected)
