"""Shapes read without torch agree with the stock models whose files they are read from."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from families import HYBRIDS
from json_files import read_json, write_json
from peft import LoraConfig, inject_adapter_in_model
from processes import ran_python
from safetensors.torch import load_file, save_file
from stock_encoders import ENCODERS
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.facts.families import TIED_BY_DEFAULT, canonical_name, check_family, parameters_on_disk
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.recorded_shapes import FOLDER
from mmtrain.facts.shapes import llm_shape, llm_shape_from, matches_any, vision_shape

logging.set_verbosity_error()
logging.disable_progress_bar()

CLIP_L, TIMM_NAME = (
    "vit_large_patch14_clip_quickgelu_336.openai",
    "vit_small_patch16_dinov3.lvd1689m",
)
WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, **LATENT},
    ),
    "gpt2, tied": ("gpt2", GPT2),
    "gpt2, untied": ("gpt2", {**GPT2, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 48}),
}


def tiny_llm(family: str, folder: Path, **changes):
    """A random stock model of a family, saved into `folder`."""
    widths = {} if family == "gpt2" else WIDTHS
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**widths, **changes}))
    model.save_pretrained(folder)
    return model


def all_parameters(shape) -> dict[str, tuple[int, ...]]:
    groups = (shape.front, *shape.decoder, shape.head)
    return {parameter.name: parameter.shape for group in groups for parameter in group}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llm("llama", folder)
    return folder


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("case", FAMILIES)
def test_names_and_shapes_from_headers_are_those_of_the_stock_model(case, tmp_path):
    family, changes = FAMILIES[case]
    model = tiny_llm(family, tmp_path, **changes)
    shape = llm_shape(str(tmp_path))
    expected = {
        canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert shape.tied == model.config.tie_word_embeddings
    if shape.tied:
        expected["llm.head.weight"] = expected["llm.embedding.weight"]
    assert all_parameters(shape) == expected
    assert (len(shape.decoder), shape.vocab_size, shape.hidden_size, shape.heads) == (3, 64, 32, 4)
    if family == "qwen3_moe":
        assert (shape.kv_heads, shape.head_dim, shape.experts, shape.experts_per_token) == (
            2,
            8,
            4,
            2,
        )
    if family == "deepseek_v3":
        assert shape.head_dim == LATENT["qk_rope_head_dim"] + LATENT["qk_nope_head_dim"]


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [("mistral", {}, 16), ("gemma2", {}, None), ("qwen2", {"use_sliding_window": False}, None)],
)
def test_the_window_is_given_only_if_every_layer_has_one(tmp_path, family, changes, window):
    tiny_llm(family, tmp_path, sliding_window=16, **changes)
    assert llm_shape(str(tmp_path)).window == window


def test_shards_are_read_through_their_index(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert all_parameters(llm_shape(str(tmp_path))) == all_parameters(llm_shape(str(llama)))
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(
        UserError,
        match=rf"1 of \d+ weight files .* missing, e.g. {shard.name}\. Finish the download",
    ):
        llm_shape(str(tmp_path))


def test_files_saved_from_the_inner_model_have_the_same_global_names(tmp_path):
    """The hub's gpt2 has no `transformer.` prefix, and stores masks that are no parameters."""
    model = tiny_llm("gpt2", tmp_path, **GPT2)
    tensors = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "model.safetensors")
    names = set(all_parameters(llm_shape(str(tmp_path))))
    assert names == {canonical_name(name) for name, _ in model.named_parameters()} | {
        "llm.head.weight"
    }


@pytest.mark.parametrize(
    ("stock", "name"),
    [
        ("model.embed_tokens.weight", "llm.embedding.weight"),
        ("transformer.wte.weight", "llm.embedding.weight"),
        ("gpt_neox.embed_in.weight", "llm.embedding.weight"),
        ("model.layers.3.self_attn.q_proj.weight", "llm.layers.3.self_attn.q_proj.weight"),
        ("transformer.h.11.attn.c_attn.bias", "llm.layers.11.attn.c_attn.bias"),
        ("model.decoder.layers.2.fc1.weight", "llm.layers.2.fc1.weight"),
        ("transformer.ln_f.bias", "llm.norm.bias"),
        ("model.final_layernorm.weight", "llm.norm.weight"),
        ("lm_head.weight", "llm.head.weight"),
        ("embed_out.weight", "llm.head.weight"),
        ("transformer.wpe.weight", "llm.transformer.wpe.weight"),
    ],
)
def test_global_names_are_the_same_for_every_family(stock, name):
    assert canonical_name(stock) == name


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("projector.linear_1.weight", "projector", True),
        ("projector_2.weight", "projector", False),
        ("llm.layers.31.mlp.up_proj.weight", "llm.layers.31", True),
        ("llm.layers.3.mlp.up_proj.weight", "llm.layers.31", False),
        ("llm.layers.7.mlp.up_proj.weight", "llm.layers.*.mlp", True),
        ("llm.layers.7.self_attn.q_proj.weight", "llm.layers.*.mlp.*", False),
        ("llm.head.weight", "llm.head", True),
        ("llm.head.weight", "LLM.head", False),
    ],
)
def test_a_pattern_matches_a_name_what_lies_below_it_and_wildcards(name, pattern, expected):
    assert matches_any(name, [pattern]) is expected
    assert matches_any(name, ["nothing", pattern]) is expected


@pytest.mark.parametrize(
    # as the hub's model pages count the tensors of the safetensors release
    ("hub_id", "parameters"),
    [
        ("lmsys/vicuna-7b-v1.5", 6_738_415_616),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("LiquidAI/LFM2-1.2B", 1_170_340_608),
        ("ibm-granite/granite-4.0-h-tiny", 6_939_037_248),
        ("ibm-granite/granite-4.0-h-small", 32_207_337_984),
        ("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", 3_973_556_832),
        # Less the encoder and multi-token prediction, which the page counts, too.
        ("Qwen/Qwen3.5-9B", 9_653_104_368 - 456_010_480 - 243_290_624),
        ("Qwen/Qwen3.5-4B", 4_659_865_088 - 333_514_240 - 120_599_552),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 81_324_862_720 - 1_650_471_424),
    ],
)
def test_recorded_llms_have_their_published_number_of_parameters(hub_id, parameters, empty_cache):
    shape = llm_shape(hub_id)
    groups = (shape.front, *shape.decoder, shape.head)
    tied = shape.head[-1].numel if shape.tied else 0  # the LM head is the embedding once more
    assert sum(parameter.numel for group in groups for parameter in group) - tied == parameters
    assert shape.source == f"recorded {hub_id}"


def test_tensors_that_transformers_does_not_load_are_not_planned():
    names = (
        "model.layers.0.x.weight",
        "mtp.fc.weight",
        "model.mtp.norm.weight",
        "model.layers.0.mlp.mtp_norm.weight",
    )
    kept = parameters_on_disk("qwen3_next", dict.fromkeys(names, (4, 4)))
    assert list(kept) == ["model.layers.0.x.weight", "model.layers.0.mlp.mtp_norm.weight"]


def test_records_are_found_by_alias_and_in_any_case(empty_cache):
    assert llm_shape("qwen/qwen2.5-72b") == llm_shape("Qwen/Qwen2.5-72B-Instruct")
    assert llm_shape("Qwen/Qwen2.5-72B").kv_heads == 8


@pytest.mark.parametrize(
    ("weights", "message"),
    [("pytorch_model.bin", "mmtrain convert {}"), ("none", "mmtrain record {} --id NAME")],
)
def test_a_folder_without_safetensors_is_refused_with_the_command_that_helps(
    tmp_path, weights, message
):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / weights).touch()
    with pytest.raises(UserError, match=message.format(tmp_path)):
        llm_shape(str(tmp_path))


def test_a_missing_folder_and_a_hub_id_that_is_not_cached_are_told_apart(
    tmp_path, empty_cache, monkeypatch
):
    with pytest.raises(
        UserError, match=r"no such folder\. Name the folder of a model, or a hub id"
    ):
        model_folder(str(tmp_path / "absent"))
    with pytest.raises(
        UserError, match=r"a hub id in the local cache .* Download it first: hf download owner/name"
    ):
        model_folder("owner/name")
    with pytest.raises(UserError, match="hf download owner/name"):
        llm_shape("owner/name")
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="models/vicuna: no such folder"):
        model_folder("models/vicuna")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"is a file\. Name the model's folder"):
        model_folder(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        llm_shape(str(tmp_path / "models"))


def test_a_cached_hub_id_is_its_main_snapshot(empty_cache, llama):
    repository = empty_cache / "models--owner--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / "abc").symlink_to(llama)
    assert model_folder("owner/name") == repository / "snapshots" / "abc"
    (repository / "snapshots" / "older").mkdir()
    with pytest.raises(UserError, match="neither a folder nor a hub id in the local cache"):
        model_folder("owner/name")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    assert all_parameters(llm_shape("owner/name")) == all_parameters(llm_shape(str(llama)))
    (repository / "refs" / "main").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="neither a folder nor a hub id in the local cache"):
        model_folder("owner/name")


def altered(source: Path, folder: Path, drop: str = "", **settings: object) -> str:
    """Copy a model without the tensor `drop`, with other settings in its config.json; those that
    are None lack.
    """
    weights = load_file(source / "model.safetensors")
    weights.pop(drop, None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = read_json(source / "config.json") | settings
    kept = {key: value for key, value in content.items() if value is not None}
    write_json(folder / "config.json", kept)
    return str(folder)


@pytest.mark.parametrize("padding", [64, 65, 10**6])
def test_padding_beyond_the_embedding_is_refused_with_its_rows(llama, tmp_path, padding):
    with pytest.raises(
        UserError, match=rf"says pad_token_id {padding}, but the embedding has 64 rows\. Write null"
    ):
        llm_shape(altered(llama, tmp_path, pad_token_id=padding))


@pytest.mark.parametrize(
    "ids",
    [{"pad_token_id": 63}, {"pad_token_id": -1}, {"bos_token_id": 64, "eos_token_id": [64, 2]}],
)
def test_ids_that_no_layer_is_built_for_do_not_matter(llama, tmp_path, ids):
    assert llm_shape(altered(llama, tmp_path, **ids)).vocab_size == 64


def test_a_list_of_padding_tokens_is_refused(llama, tmp_path):
    with pytest.raises(UserError, match=r"says pad_token_id \[0\], which no model has"):
        llm_shape(altered(llama, tmp_path, pad_token_id=[0]))


def test_a_head_that_neither_the_weights_nor_a_tie_give_is_refused(llama, tmp_path):
    with pytest.raises(
        UserError,
        match=r"lack the LM head, .* does not tie it .* Write tie_word_embeddings: true into",
    ):
        llm_shape(altered(llama, tmp_path, "lm_head.weight", tie_word_embeddings=None))
    assert llm_shape(altered(llama, tmp_path, "lm_head.weight", tie_word_embeddings=True)).tied


def test_where_config_json_says_nothing_a_head_is_tied_as_transformers_ties_it():
    families = {family for family, _ in FAMILIES.values()} | {
        *HYBRIDS,
        "gemma",
        "gemma3_text",
        "cohere",
        "smollm3",
    }
    families |= {
        "starcoder2",
        "granite",
        "olmo2",
        "mistral",
        "qwen3",
        "glm4",
        "gpt_oss",
        "qwen3_5_text",
        "minicpm3",
    }
    families.add("gemma4_unified_text")
    for family in sorted(families | TIED_BY_DEFAULT):
        if family in CONFIG_MAPPING:
            assert bool(CONFIG_MAPPING[family]().tie_word_embeddings) == (
                family in TIED_BY_DEFAULT
            ), family


def test_an_encoder_that_lacks_a_tensor_behind_its_selected_block_is_refused(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "less").mkdir()
    ENCODERS["siglip"][0]().save_pretrained(tmp_path / "whole")
    names = load_file(tmp_path / "whole" / "model.safetensors")
    last = max(name for name in names if name.endswith("mlp.fc1.weight") and ".layers." in name)
    with pytest.raises(
        UserError, match=r"its block 3 has other tensors than block 0\. Download the folder again"
    ):
        vision_shape(altered(tmp_path / "whole", tmp_path / "less", last), -2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], r"incomplete safetensors file .\d+ bytes; .*\. Download it again"),
        (lambda raw: raw[:100], r"not a complete safetensors file .100 bytes.\. Download it again"),
        (lambda raw: raw[:5], r"not a complete safetensors file .5 bytes.\. Download it again"),
        (lambda raw: raw[:9] + b"\x00" + raw[10:], "damaged or incomplete safetensors file"),
        (
            lambda raw: b"version https://git-lfs.github.com/spec/v1\n",
            "is a git-lfs pointer, not the weights",
        ),
    ],
)
def test_damaged_weight_files_are_refused_by_name(llama, tmp_path, damage, message):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damage((llama / "model.safetensors").read_bytes()))
    with pytest.raises(UserError, match=rf"{tmp_path}/model.safetensors: .*{message}"):
        llm_shape(str(tmp_path))


def test_weights_with_adapters_beside_them_are_refused(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"not merged \(model\..*\.lora_A\..*\. Merge it first"):
        llm_shape(str(tmp_path))


def test_a_config_that_disagrees_with_the_weights_is_refused(llama, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    facts = read_json(llama / "config.json")
    write_json(tmp_path / "config.json", {**facts, "num_hidden_layers": 4})
    with pytest.raises(
        UserError, match=r"config\.json says 4 decoder layers, but the weights lack layer 3"
    ):
        llm_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        llm_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("config_json", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        ({"model_type": "glm_moe_dsa"}, "glm_moe_dsa .*: its layers choose the tokens"),
        ({"model_type": "falcon"}, "falcon .*: its decoder layers take ALiBi"),
        ({"model_type": "mamba"}, "mamba .*: its recurrent layers carry state from one document"),
        (
            {"model_type": "zamba2"},
            "zamba2 .*: its layers share the weights of one attention block",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "gptq"}},
            r"gpt_oss: its weights are quantised \(gptq\)\. Use a release of it in bfloat16, in FP8 by "
            r"blocks of 128 x 128 or in MXFP4; .* a bfloat16 copy",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            r"llava is a multimodal model around a text model \(llama\)\. "
            r"Name the folder of the text model",
        ),
        (
            {"model_type": "qwen2_vl", "vision_config": {"depth": 2}},
            "qwen2_vl is a multimodal model",
        ),
        ({}, "no model_type"),
    ],
)
def test_what_cannot_be_staged_or_packed_is_refused_by_name(config_json, message):
    with pytest.raises(UserError, match=message):
        check_family(config_json)


def test_latent_attention_without_the_width_of_its_heads_is_refused_by_the_key(tmp_path):
    tiny_llm("deepseek_v3", tmp_path, **FAMILIES["deepseek_v3"][1])
    content = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**content, "qk_nope_head_dim": None})
    with pytest.raises(
        UserError, match=r"config\.json has qk_rope_head_dim, but no qk_nope_head_dim"
    ):
        llm_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_hidden_layers": 2},
            "2 decoder layers, but the weights have 3. Correct num_hidden_layers",
        ),
        (
            {"num_hidden_layers": 1, "num_nextn_predict_layers": 1},
            "1 decoder layers, but the weights have 3",
        ),
        (
            {"rope_parameters": {"mrope_section": [2, 1, 0]}, "head_dim": 3},
            "of 6 features, but a head of 3 rotates 3. Correct head_dim or mrope_section",
        ),
    ],
)
def test_numbers_that_the_weights_contradict_are_refused(llama, tmp_path, changes, said):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    content = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", content | changes)
    with pytest.raises(UserError, match=f"^{tmp_path}: config.json says .*{said}"):
        llm_shape(str(tmp_path))


def test_layers_of_multi_token_prediction_are_left_on_the_disk(llama, tmp_path):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    content = read_json(tmp_path / "config.json")
    write_json(
        tmp_path / "config.json", content | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    )
    assert llm_shape(str(tmp_path)).decoder == llm_shape(str(llama)).decoder[:2]


def test_tensors_of_a_model_that_needs_the_code_in_its_folder_are_answered_with_another_release():
    tensors = {"model.tok_embeddings.weight": (8, 4)}
    with pytest.raises(
        UserError, match=r"no embedding .*\. auto_map in config\.json .* often ends in -hf$"
    ):
        llm_shape_from(
            {"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}}, tensors, "folder"
        )
    with pytest.raises(UserError, match=r"no embedding .*\. Is it a causal LLM\?$"):
        llm_shape_from({"model_type": "own"}, tensors, "folder")


@pytest.mark.parametrize(
    "config_json",
    [
        {"model_type": "llama"},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]},
        {"model_type": "minimax_m2"},
        {
            "model_type": "deepseek_v3",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        },
    ],
)
def test_families_whose_layers_all_attend_pass(config_json):
    check_family(config_json)


@pytest.mark.parametrize("name", [CLIP_L, "openai/clip-vit-large-patch14-336"])
def test_the_recorded_llava_tower_is_clip_large_without_its_last_block(name, empty_cache):
    whole, cut = vision_shape(name, -1), vision_shape(name, -2)
    assert (cut.width, cut.heads, cut.patches_per_image, cut.prefix_tokens) == (1024, 16, 576, 1)
    assert (cut.image_size, cut.patch_size, cut.blocks_run) == (336, 14, 23)
    # qkv, output, two MLP matrices of 4096; their biases and two norms
    block = 12 * 1024**2 + 13 * 1024
    assert sum(p.numel for p in whole.parameters) - sum(p.numel for p in cut.parameters) == block
    assert not any("post_layernorm" in p.name or ".head." in p.name for p in whole.parameters)


@pytest.mark.parametrize(
    "name", ["vit_so400m_patch14_siglip_384.webli", "google/siglip-so400m-patch14-384"]
)
def test_the_recorded_siglip_has_no_prefix_tokens_and_no_pooling_head(name, empty_cache):
    shape = vision_shape(name, -2)
    assert (shape.width, shape.heads, shape.patches_per_image, shape.prefix_tokens) == (
        1152,
        16,
        729,
        0,
    )
    assert shape.blocks_run == 26
    assert not any(
        word in p.name
        for p in shape.parameters
        for word in ("attn_pool", "head.", "post_layernorm")
    )


def test_a_timm_name_that_is_not_recorded_has_the_shapes_of_timms_model(empty_cache):
    shape = vision_shape(TIMM_NAME, -1, final_norm=True)
    with torch.device("meta"):
        model = timm.create_model(TIMM_NAME, pretrained=False)
    model.prune_intermediate_layers([-1], prune_norm=False, prune_head=True)
    expected = {
        f"vision.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert {parameter.name: parameter.shape for parameter in shape.parameters} == expected
    assert (shape.source, shape.width, shape.heads, shape.prefix_tokens) == (
        f"timm's {TIMM_NAME}",
        384,
        6,
        5,
    )
    assert (shape.image_size, shape.patch_size, shape.patches_per_image, shape.blocks_run) == (
        256,
        16,
        256,
        12,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vit_larg_patch14_clip_quickgelu_336.openai",
            "timm knows; the nearest are vit_large_patch14_clip_quickgelu",
        ),
        (
            "vit_large_patch14_clip_quickgelu_336.opnai",
            "for vit_large_patch14_clip_quickgelu_336 it has .*336.openai",
        ),
        (
            "vit_large_patch14_clip_336.openai",
            "trained with QuickGELU.*Use vit_large_patch14_clip_quickgelu_336",
        ),
        (
            "swinv2_tiny_window8_256",
            r"timm's swinv2_tiny_window8_256 is not a plain vision transformer",
        ),
        ("samvit_base_patch16.sa1b", "is not a plain vision transformer"),
        ("resnet18", "is not a plain vision transformer"),
        ("mixer_s32_224", "timm has no weights mixer_s32_224"),
        ("hiera_tiny_224.mae", "is not a plain vision transformer"),
    ],
)
def test_a_timm_name_that_cannot_be_used_is_refused_by_what_it_is(name, message, empty_cache):
    with pytest.raises(UserError, match=message):
        vision_shape(name, -2)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("swin", "has model_type swin, which is not a known vision encoder"),
        (
            "whisper",
            "not a known vision encoder; sound is not read.*RADIO is vit_.*, pixtral, "
            "qwen2_5_vl, qwen2_vl, ",
        ),
        ("lfm3_vl_vision", "has model_type lfm3_vl_vision, which is not a known vision encoder"),
        (["clip"], "which no model has; needed is a text"),
    ],
)
def test_another_model_of_transformers_is_refused_by_its_type(model_type, message, tmp_path):
    write_json(tmp_path / "config.json", {"model_type": model_type})
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        vision_shape(str(tmp_path), -2)


def test_a_layer_below_the_first_block_is_refused_with_the_range():
    with pytest.raises(UserError, match=r"-25 is out of range: .* 24 blocks, so -1 .* down to -24"):
        vision_shape(CLIP_L, -25)


def test_a_record_names_the_scale_that_its_folder_names(make_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("mmtrain.facts.recorded_shapes.FOLDER", tmp_path)
    folder = make_tiny.make_tiny_llm(tmp_path / "llm", "granite", layers=2, logits_scaling=8.0)
    assert main(["record", str(folder), "--id", "me/granite", "--out", str(tmp_path)]) == 0
    assert llm_shape("me/granite").scaled_by == llm_shape(str(folder)).scaled_by == "logits_scaling"


def test_the_tool_records_what_the_files_say(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mmtrain.facts.recorded_shapes.FOLDER", tmp_path)
    assert (
        main(
            ["record", str(llama), "--id", "me/tiny", "--alias", "me/other", "--out", str(tmp_path)]
        )
        == 0
    )
    assert "me/tiny, " in capsys.readouterr().out
    recorded, read = llm_shape("me/other"), llm_shape(str(llama))
    assert all_parameters(recorded) == all_parameters(read)
    same = {"source": "", "front": (), "decoder": (), "head": ()}
    assert replace(recorded, **same) == replace(read, **same)


@pytest.mark.parametrize(
    "kind", [TIMM_NAME, "siglip", "dinov2_registers", "dinov3", "vit_classifier", "internvl"]
)
def test_the_tool_records_an_encoder_as_timm_or_its_folder_has_it(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("mmtrain.facts.recorded_shapes.FOLDER", tmp_path)
    source, name, options = kind, kind, []
    if kind in ENCODERS:
        source, name, options = str(tmp_path / "folder"), "me/tiny", ["--id", "me/tiny"]
        ENCODERS[kind][0]().save_pretrained(source)
    read = vision_shape(source, -2)
    assert main(["record", "--vision", source, *options, "--out", str(tmp_path)]) == 0
    recorded = vision_shape(name, -2)
    assert recorded.source == f"recorded {name}" and set(recorded.parameters) == set(
        read.parameters
    )
    same = {"source": "", "parameters": ()}
    assert replace(recorded, **same) == replace(read, **same)


def test_a_model_recorded_from_its_config_json_alone_is_planned_where_the_installation_cannot_be_written(
    llama, tmp_path, own_cache, capsys
):
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    before = sorted(FOLDER.iterdir())
    assert main(["record", str(tmp_path), "--id", "me/new"]) == 0
    plan = ["plan", "example:llava15_7b_pp4", "model.llm.path=ME/new", "parallel.pipeline=1"]
    assert main(plan) == 0, capsys.readouterr().err
    assert sorted(FOLDER.iterdir()) == before

    shape = llm_shape("me/new")
    record = tmp_path / "cache" / "mmtrain" / "recorded" / "me--new.json"
    # layers without end
    record.write_text(record.read_text().replace('"first": 0', f'"first": {-(10**15)}'))
    assert llm_shape("me/new") == shape
    record.write_text('{"id": 3}')
    with pytest.raises(UserError, match=r"me--new\.json, a record of a model, cannot be used"):
        llm_shape("me/new")


def test_the_tool_refuses_what_cannot_be_recorded(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "falcon"}')
    assert main(["record", str(tmp_path), "--id", "me/falcon", "--out", str(tmp_path)]) == 2
    assert "falcon cannot be staged and packed" in capsys.readouterr().err
    assert main(["record", "--vision", "no_such_vit", "--out", str(tmp_path)]) == 2
    assert (
        "no_such_vit is neither a folder here nor a model that timm knows"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["record", str(tmp_path)])
    assert "--id OWNER/NAME" in capsys.readouterr().err


def test_shapes_are_read_without_torch_and_the_libraries_above_it(llama):
    code = (
        "import sys; from mmtrain.facts.shapes import llm_shape, vision_shape;"
        f"llm_shape(sys.argv[1]); llm_shape('Qwen/Qwen2.5-72B'); vision_shape('{CLIP_L}', -2);"
        "print([m for m in ('torch', 'transformers', 'timm', 'huggingface_hub') if m "
        "in sys.modules])"
    )
    ran = ran_python("-c", code, llama, check=True)
    assert ran.stdout.strip() == "[]"
