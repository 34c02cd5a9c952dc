"""Published codes are the weights that transformers makes of them, read whole or kept as they lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from coded_folders import CODED_FAMILIES, coded_folder, fp8_codes
from json_files import read_json, write_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mmtrain.base.errors import UserError
from mmtrain.facts.shapes import llm_shape
from mmtrain.model.llm.attention import ATTENTION, document_positions
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.llm.tiny import VOCABULARY
from mmtrain.model.weights.files import open_tensors, tensor_entries
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import quantised_source

CPU = torch.device("cpu")
POSITIONS = torch.cat([torch.arange(13), torch.arange(9)])[None]
LAYERS = 4


@pytest.fixture(scope="module", params=CODED_FAMILIES)
def folder(request, tmp_path_factory):
    return coded_folder(request.param, tmp_path_factory.mktemp(request.param))


def published(folder):
    return StreamedLayers(quantised_source("published", CPU, str(folder)))


def slices_of(folder, borders, dtype=torch.float32, streamed=None):
    parts = []
    for first, last in itertools.pairwise(borders):
        part = load_decoder_layers(
            str(folder),
            first,
            last,
            embedding=first == 0,
            head=last == LAYERS,
            dtype=dtype,
            streamed=streamed,
            streamed_numbers=range(first, last),
        )
        parts.append(part)
    return parts


def with_gradient(run):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 22, run.width, generator=generator, requires_grad=True)
    logits = run(hidden)
    weights = torch.randn(logits.shape, generator=generator)
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), hidden)[0]


@pytest.mark.slow
@pytest.mark.parametrize("borders", [(0, LAYERS), (0, 1, LAYERS)], ids=["whole", "cut"])
@pytest.mark.parametrize("kept", [False, True], ids=["dequantised", "published"])
def test_logits_and_input_gradient_are_those_of_transformers_dequantised_model(
    folder, borders, kept
):
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()
    stock.set_attn_implementation(ATTENTION)
    stock.requires_grad_(False)
    streamed = published(folder) if kept else None
    parts = slices_of(folder, borders, streamed=streamed)

    def staged(hidden):
        for part in parts:
            hidden = part(hidden, POSITIONS)
        return parts[-1].logits(hidden[0])

    def of_stock(hidden):
        with document_positions(POSITIONS):
            return stock(inputs_embeds=hidden, position_ids=POSITIONS, use_cache=False).logits[0]

    staged.width = of_stock.width = stock.config.hidden_size
    expected = with_gradient(of_stock)
    for ours, theirs in zip(with_gradient(staged), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert expected[0].shape == (22, VOCABULARY)


def test_what_is_kept_are_the_bytes_on_disk_which_are_planned(folder):
    streamed = published(folder)
    slices_of(folder, (0, LAYERS), torch.bfloat16, streamed)
    on_disk = load_file(folder / "model.safetensors")
    coded = sum(t.nbytes for t in on_disk.values() if t.dtype.itemsize == 1)
    coded += sum(t.nbytes for name, t in on_disk.items() if name.endswith("_scale_inv"))
    planned = 0
    kept_bytes = 0
    for number, layer in enumerate(llm_shape(str(folder)).decoder):
        sizes = {p.name: p.coded_bytes for p in layer}
        kept = streamed.layers[number]
        for name, (codes, scales) in zip(kept.names, kept.kept, strict=True):
            assert (scales is None) == (sizes[name] is None), name
            if scales is not None:
                assert codes.nbytes + scales.nbytes == sizes[name], name
                planned += sizes[name]
                kept_bytes += codes.nbytes + scales.nbytes
    assert planned == kept_bytes == coded


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_blocks_at_the_edges_of_a_matrix_are_cut(tmp_path, scale_type):
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scales = fp8_codes(weight)
    scales = scales.to(scale_type)
    save_file({"a": codes, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    read = open_tensors(tensor_entries(tmp_path))["a"][...]
    for rows in (slice(0, 128), slice(128, 200)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
            scale = scales[rows.start // 128, columns.start // 128].float()
            assert torch.equal(read[rows, columns], codes[rows, columns].float() * scale)
    assert (read - weight).norm() <= 0.04 * weight.norm()


def test_nibbles_and_exponents_of_mxfp4_are_read_as_its_standard_says(tmp_path):
    codes = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    codes[0, 1, 0, :2] = torch.tensor([0x21, 0x7F])  # +0.5, +1.0; -6.0, +6.0
    scales = torch.tensor([[[127], [129]]], dtype=torch.uint8)  # 1 and 4
    save_file({"a_blocks": codes, "a_scales": scales}, tmp_path / "model.safetensors")
    read = open_tensors(tensor_entries(tmp_path))["a"][...]
    assert read.shape == (1, 32, 2)
    assert read[0, :4, 1].tolist() == [2.0, 4.0, -24.0, 24.0]
    assert read.count_nonzero() == 4


def test_experts_with_cut_blocks_are_kept_as_matrices_of_their_own(tmp_path):
    # transformers' own reader refuses them
    folder = coded_folder("qwen3_moe", tmp_path, moe_intermediate_size=192)
    streamed = published(folder)
    slices_of(folder, (0, LAYERS), torch.bfloat16, streamed)  # compares each with what was loaded
    layer = streamed.layers[0]
    kept = dict(zip(layer.names, layer.kept, strict=True))
    codes, scales = kept["llm.layers.0.mlp.experts.gate_up_proj"]
    assert (codes.shape, scales.shape) == ((24, 192, 256), (24, 2, 2))


def test_a_matrix_of_which_a_part_has_no_codes_is_kept_whole(tmp_path):
    folder = coded_folder("qwen3_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors[expert] = tensors[expert].bfloat16()
    del tensors[f"{expert}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    streamed = published(folder)
    slices_of(folder, (0, LAYERS), torch.bfloat16, streamed)
    name = "llm.layers.0.mlp.experts.gate_up_proj"
    layer = streamed.layers[0]
    assert layer.kept[layer.names.index(name)].state is None
    planned = {p.name: p.coded_bytes for p in llm_shape(str(folder)).decoder[0]}
    assert planned[name] is None
    assert planned["llm.layers.0.mlp.experts.down_proj"]


def test_an_index_that_names_another_file_is_refused(tmp_path):
    for letter in "ab":
        save_file({letter: torch.ones(2)}, tmp_path / f"{letter}.safetensors")
    files = {"a": "a.safetensors", "b": "a.safetensors", "c": "b.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": files})
    with pytest.raises(UserError, match=r"index\.json names b, which is not in a\.safetensors"):
        tensor_entries(tmp_path)


def test_codes_of_which_the_config_says_nothing_are_refused(tmp_path):
    folder = coded_folder("qwen3", tmp_path)
    config = read_json(folder / "config.json")
    del config["quantization_config"]
    write_json(folder / "config.json", config)
    with pytest.raises(UserError, match=r"FP8 or MXFP4 codes, but config\.json has no quant"):
        llm_shape(str(folder))


def test_codes_that_are_not_the_weights_that_were_loaded_are_refused(tmp_path):
    folder = coded_folder("qwen3", tmp_path / "a")
    other = coded_folder("qwen3", tmp_path / "b")
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"llm\.layers\.2\.mlp\.up_proj\.weight: its codes on disk"):
        slices_of(folder, (0, LAYERS), streamed=published(other))


def without_scales(tensors, name):
    del tensors[f"{name}_scale_inv"]


def with_scales_of_rows(tensors, name):
    tensors[f"{name}_scale_inv"] = torch.ones(len(tensors[name]), 1)


def with_exponents(tensors, name):
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].to(torch.uint8)


def of_one_dimension(tensors, name):
    tensors[name] = tensors[name][0]


def with_integers(tensors, name):
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_scales, r"up_proj\.weight is F8_E4M3 \(384, 256\), but .*_inv, are missing"),
        (with_scales_of_rows, r"scales of F32 or BF16 \(3, 2\), but .*_inv is F32 \(384, 1\)"),
        (with_exponents, r"scales of F32 or BF16 \(3, 2\), but .*_inv is U8 \(3, 2\)"),
        (of_one_dimension, r"is F8_E4M3 \(256,\), which is no matrix of codes"),
        (with_integers, r"up_proj\.weight is stored as I8, .* in FP8 by blocks of 128 x 128"),
    ],
)
def test_other_codes_are_refused_by_the_tensors_name(tmp_path, fault, message):
    file = coded_folder("qwen3", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    fault(tensors, "model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        llm_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, r"qwen3: its weights are quantised \(awq\)"),
        ({"weight_block_size": None}, r"quantised \(fp8 by blocks of None, "),
        ({"weight_block_size": [1, 128]}, r"quantised \(fp8 by blocks of \[1, 128\], "),
        ({"activation_scheme": "static"}, r"\[128, 128\], activations static\)"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, change, message):
    folder = coded_folder("qwen3", tmp_path)
    config = read_json(folder / "config.json")
    config["quantization_config"] |= change
    write_json(folder / "config.json", config)
    with pytest.raises(UserError, match=message):
        llm_shape(str(folder))
