"""Every supported family: slices read from a checkpoint equal the stock model, whole, packed and in
the gradient.
"""

import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, family_config
from peft import LoraConfig, inject_adapter_in_model
from sweeps import sweep
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mmtrain.config.model import LoraSection
from mmtrain.facts.families import canonical_name, scaled_by
from mmtrain.model.llm.bookends import decoder_path
from mmtrain.model.llm.language import DecoderLayers, causal_config, load_decoder_layers
from mmtrain.model.llm.parity import measure_differences, takes_rows
from mmtrain.model.llm.tiny import draw_scales, tiny_model
from mmtrain.model.trained.lora import add_adapters, without_marks
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource

DOCUMENTS = (13, 6, 19)

DAILY = (
    "llama",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "qwen3_moe",
    "granite",
    "falcon_h1",
    "qwen3_5_text",
)
BORDERS = {
    "llama": (0, 0, 2, 6, 6),
    "gemma3_text": (0, 0, 2, 6, 6),
    "gpt2": (0, 0, 2, 6, 6),
    "granite": (0, 0, 6, 6),
}


@pytest.fixture(scope="module", params=sweep(FAMILIES, DAILY))
def checkpoint(request, tmp_path_factory) -> tuple[str, Path]:
    family = request.param
    config = family_config(family, **{"num_hidden_layers": 6, **FAMILIES[family]})
    folder = tmp_path_factory.mktemp(family)
    tiny_model(config, seed=0).save_pretrained(folder)
    return family, folder


def load_all(family: str, folder: Path, dtype: torch.dtype, **options) -> list[DecoderLayers]:
    borders = BORDERS.get(family, (0, 1, 4, 6))
    return [
        load_decoder_layers(
            str(folder),
            first,
            last,
            embedding=i == 0,
            head=i == len(borders) - 2,
            dtype=dtype,
            **options,
        )
        for i, (first, last) in enumerate(itertools.pairwise(borders))
    ]


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize(
    "dtype", sweep((torch.float32, torch.bfloat16), (torch.bfloat16,)), ids=["fp32", "bf16"]
)
def test_the_union_of_slices_is_the_stock_model_tensor_by_tensor(checkpoint, dtype):
    family, folder = checkpoint
    layer_by_layer = (
        {"streamed": StreamedLayers(HostSource(torch.device("cpu")))}
        if dtype is torch.bfloat16
        else {}
    )
    expected = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    seen = {}
    for part in load_all(family, folder, dtype, **layer_by_layer):
        for name, tensor in tensors_of(part.model).items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
            seen[name] = tensor
    assert seen.keys() == expected.keys()


class AnswersOnTheHost(TorchDispatchMode):
    """Fails where a model asks a tensor whether all of it is true: a GPU's host would wait there
    for the answer.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten.all
        return func(*args, **(kwargs or {}))


def run(model, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.detach().requires_grad_()
    logits = model(rows)
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), rows)[0]


def test_staged_and_packed_equals_the_stock_model_on_each_document(checkpoint):
    family, folder = checkpoint
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    slices = load_all(family, folder, torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(stock.config.vocab_size, (2, sum(DOCUMENTS)), generator=generator)
    weights = torch.randn(2, sum(DOCUMENTS), stock.config.vocab_size, generator=generator)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].repeat(2, 1)

    def staged(hidden):
        for part in slices:
            with AnswersOnTheHost():
                hidden = part(hidden, positions)
        return slices[-1].logits(hidden.flatten(0, 1)).unflatten(0, (2, -1))

    logits, gradient = run(staged, slices[0].embed(ids), weights)
    embeddings = stock.get_input_embeddings()(ids)
    for row in range(2):
        begin = 0
        for length in DOCUMENTS:
            part = (slice(row, row + 1), slice(begin, begin + length))
            reference = run(
                lambda x: stock(inputs_embeds=x).logits, embeddings[part], weights[part]
            )
            for ours, theirs in zip((logits[part], gradient[part]), reference, strict=True):
                assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
            begin += length


# Every family whose config has a scale or a cap.
SCALED = (
    "afmoe",
    "axk1",
    "bailing_hybrid",
    "beam",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "deepseek_v3",
    "exaone_moe",
    "falcon_h1",
    "gemma2",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hy_v3",
    "hyperclovax",
    "kimi_linear",
    "laguna",
    "llama4_text",
    "mimo_v2_flash",
    "minicpm3",
    "minimax",
    "minimax_m3_vl_text",
    "nemotron_h",
    "solar_open",
    "vaultgemma",
)


def scaled_config(family: str, **values) -> PreTrainedConfig:
    config = family_config(family, **{"num_hidden_layers": 6, **FAMILIES.get(family, {}), **values})
    return draw_scales(config, seed=1)


@pytest.mark.parametrize("family", sweep(SCALED, DAILY))
def test_first_losses_at_scales_other_than_1_are_the_stock_classs_on_each_document(
    family, tmp_path
):
    tiny_model(scaled_config(family), seed=0).save_pretrained(tmp_path)
    # Eager: before 5.18 transformers let gemma2's soft cap out of its other attention.
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    slices = load_all(family, tmp_path, torch.float32)
    ids = torch.randint(
        stock.config.vocab_size, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        hidden = slices[0].embed(ids)
        for part in slices:
            hidden = part(hidden, torch.cat([torch.arange(n) for n in DOCUMENTS])[None])
        logits = slices[-1].logits(hidden[0])
        for row, document in zip(logits.split(DOCUMENTS), ids[0].split(DOCUMENTS), strict=True):
            ours = cross_entropy(row[:-1], document[1:])
            theirs = stock(input_ids=document[None], labels=document[None], use_cache=False).loss
            print(
                f"{family}: {ours:.6f} against {theirs:.6f}, relative {abs(ours / theirs - 1):.1e}"
            )
            assert abs(ours - theirs) <= 1e-6 * theirs


@pytest.mark.nightly
@pytest.mark.parametrize("family", SCALED)
def test_what_multimodal_classes_leave_out_is_named_by_the_key_that_says_it(family):
    config = scaled_config(family)
    model = tiny_model(config, seed=0)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        decoder = model.get_submodule(decoder_path(model)[0])
        hidden = decoder(
            inputs_embeds=model.get_input_embeddings()(ids), use_cache=False
        ).last_hidden_state
        plain, own = model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits
    differs = bool((plain - own).abs().max() > 1e-6 * own.abs().max())
    assert bool(scaled_by(config.to_dict())) == differs
    default = CONFIG_MAPPING[family]().to_dict()
    assert scaled_by({"model_type": family}) == scaled_by(default)


EXPERTS = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "jamba",
    "kimi_linear",
    "minimax",
    "mixtral",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
# that of float32, which norms of recurrent layers enlarge
ROUNDING = {"qwen3_next": 3e-5, "qwen3_5_moe_text": 3e-5, "bamba": 3e-5}


def gradients_of(named, backward) -> dict[str, torch.Tensor]:
    """Of every adapter, by global name; all of them begin alike, and none with zeros, for which A
    has no gradient.
    """
    adapters = {canonical_name(without_marks(name)): p for name, p in named if ".lora_" in name}
    for name, parameter in adapters.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.uniform_(-0.3, 0.3, generator=generator)
        parameter.requires_grad_(True)
    backward()
    return {name: parameter.grad for name, parameter in adapters.items()}


@pytest.mark.slow
def test_lora_in_slices_is_that_of_peft_on_the_stock_model(checkpoint):
    """Staged and packed, the last layer for some tokens alone, against one document after the
    other.

    Of MoE models every linear layer but those of layer 1 has an adapter: peft alone would adapt all
    layers or none.
    """
    family, folder = checkpoint
    # Eager: before 5.18 transformers let gemma2's soft cap out of its other attention.
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    linear = [name for name, module in stock.named_modules() if type(module) in (nn.Linear, Conv1D)]
    # jamba's uses the weight without a call
    linear = [name for name in linear if not name.endswith(".dt_proj")]
    if family in EXPERTS:
        linear = [name for name in linear if ".layers.1." not in name]
    linear = [name for name in linear if canonical_name(f"{name}.weight").startswith("llm.layers.")]
    targets = (
        tuple(canonical_name(f"{name}.weight") for name in linear)
        if family in EXPERTS
        else ("llm.layers.*",)
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(stock.config.vocab_size, (1, sum(DOCUMENTS)), generator=generator)
    places = torch.arange(2, sum(DOCUMENTS), 3)
    weights = torch.zeros(sum(DOCUMENTS), stock.config.vocab_size)
    weights[places] = torch.randn(len(places), stock.config.vocab_size, generator=generator)

    slices = load_all(family, folder, torch.float32)
    for part in slices:
        add_adapters(
            part.model, LoraSection(r=4, alpha=8.0, targets=targets), canonical_name, seed=0
        )
    if slices[-1].first < slices[-1].last and takes_rows(causal_config(folder)):
        slices[-1].narrow_last_layer()

    def staged():
        positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        hidden = slices[0].embed(ids)
        for part in slices[:-1]:
            hidden = part(hidden, positions)
        logits = slices[-1].logits(slices[-1].forward_rows(hidden, positions, places))
        (logits * weights[places]).sum().backward()

    config = LoraConfig(r=4, lora_alpha=8, target_modules=[f"0.{name}" for name in linear])
    # in a list peft takes the names as they are
    inject_adapter_in_model(config, nn.ModuleList([stock]))

    def separate():
        for row, its_weights in zip(ids[0].split(DOCUMENTS), weights.split(DOCUMENTS), strict=True):
            (stock(input_ids=row[None], use_cache=False).logits[0] * its_weights).sum().backward()

    found = gradients_of(
        [entry for part in slices for entry in part.model.named_parameters()], staged
    )
    expected = gradients_of(stock.named_parameters(), separate)
    assert found.keys() == expected.keys() and len(found) == 2 * len(linear)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= ROUNDING.get(family, 1e-5) * gradient.norm(), name


@pytest.mark.slow
def test_layers_that_are_whole_only_while_they_compute_are_the_same_to_the_bit(checkpoint):
    _, folder = checkpoint
    assert measure_differences(causal_config(folder), (1, 4), streams=True).staged == 0
