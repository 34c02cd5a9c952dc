"""mmtrain convert: pickled checkpoints and GGUF files become safetensors, or are refused
untouched.
"""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from mmtrain.__main__ import main
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.llm.tiny import tiny_model


def save_pickled(
    folder: Path, shards: int, *, legacy: bool = False, **options
) -> dict[str, torch.Tensor]:
    """A checkpoint as they were published before safetensors; returns its tensors."""
    model = tiny_model(LlamaConfig(num_hidden_layers=4, **options), seed=0)
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    tensors = dict(model.state_dict())
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = (
            "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        )
        part = {name: tensors[name] for name in names[i::shards]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not legacy)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return {name: tensor.clone() for name, tensor in tensors.items()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("shards", "options"),
    [(3, {}), (1, {"tie_word_embeddings": True}), (2, {"legacy": True})],
    ids=["sharded", "single and tied", "legacy pickle"],
)
def test_every_tensor_is_the_same_and_slices_equal_from_pretrained(tmp_path, shards, options):
    expected = save_pickled(tmp_path, shards, **options)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert main(["convert", str(tmp_path)]) == 0
    converted = stored(tmp_path)
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    parts = dict(stock.named_parameters(remove_duplicate=False))
    for first, last in ((0, 2), (2, 4)):
        part = load_decoder_layers(
            str(tmp_path), first, last, embedding=first == 0, head=last == 4, dtype=torch.float32
        )
        for name, parameter in part.model.named_parameters():
            assert torch.equal(parameter, parts[name]), name
    assert not list(tmp_path.glob("*.tmp"))


def test_weights_of_a_quantised_model_are_refused_and_leave_nothing(tmp_path, capsys):
    torch.save({"a": torch.ones(2).to(torch.float8_e5m2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    assert main(["convert", str(tmp_path)]) == 2
    assert (
        "a is stored as float8_e5m2. Use a release of it in bfloat16, in FP8 by blocks of 128 x 128"
        in capsys.readouterr().err
    )
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "pytorch_model.bin"}


def test_a_new_folder_gets_config_and_tokenizer_and_no_pickles(tmp_path, capsys):
    save_pickled(tmp_path / "old", 2)
    (tmp_path / "old" / "training_args.bin").write_bytes(b"pickle")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "old").iterdir()}
    assert main(["convert", str(tmp_path / "old"), "--out", str(tmp_path / "new")]) == 0
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "old").iterdir()} == before
    assert (
        "1/2 pytorch_model-00001-of-00002.bin -> model-00001-of-00002.safetensors"
        in capsys.readouterr().out
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")


def test_views_are_stored_without_what_surrounds_them(tmp_path):
    base = torch.arange(1000.0)
    tensors = {
        "left": base[:10],
        "right": base[10:20],
        "columns": base.view(10, 100)[:, 3],
        "one": torch.tensor(7),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert main(["convert", str(tmp_path)]) == 0
    converted = stored(tmp_path)
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 1000


def refused(capsys, *arguments: Path | str) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_nothing_that_exists_is_overwritten(tmp_path, capsys):
    save_pickled(tmp_path / "model", 1)
    assert main(["convert", str(tmp_path / "model")]) == 0
    assert "model.safetensors is there already" in refused(capsys, tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("keep")
    save_pickled(tmp_path / "again", 1)
    assert "is not empty" in refused(capsys, tmp_path / "again", "--out", tmp_path / "other")
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_an_interrupted_conversion_is_invisible_and_can_be_repeated(tmp_path, capsys):
    expected = save_pickled(tmp_path, 2)
    second = tmp_path / "pytorch_model-00002-of-00002.bin"
    intact = second.read_bytes()
    second.write_bytes(intact[: len(intact) // 2])
    assert "damaged" in refused(capsys, tmp_path)
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert not (tmp_path / "model.safetensors.index.json").exists()
    second.write_bytes(intact)
    assert main(["convert", str(tmp_path)]) == 0
    assert stored(tmp_path).keys() == expected.keys()


def test_missing_files_are_named(tmp_path, capsys):
    assert "lacks pytorch_model.bin" in refused(capsys, tmp_path)
    save_pickled(tmp_path, 2)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    assert "pytorch_model-00002-of-00002.bin" in refused(capsys, tmp_path)


# as many as a tiny model has
TOKENS = ["<end>", *"abcdefgh", "ab", *(f"token {i}" for i in range(118))]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
    "lm_head": "output",
}


def save_gguf(
    file: Path, *, leave_out: str | None = None, **settings: float
) -> dict[str, torch.Tensor]:
    """Write a Qwen2 as llama.cpp does, with further settings; returns its tensors by transformers'
    names.
    """
    model = tiny_model(Qwen2Config(num_hidden_layers=2), seed=0)
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for key, value in settings.items():
        writer.add_float32(f"qwen2.{key.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if name == leave_out:
            continue
        for theirs, llama_cpp in GGUF_NAMES.items():
            name = name.replace(theirs, llama_cpp)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_becomes_a_folder_with_weights_in_bfloat16_and_a_tokenizer(tmp_path):
    expected = save_gguf(tmp_path / "tiny.gguf")
    assert main(["convert", str(tmp_path / "tiny.gguf"), "--out", str(tmp_path / "out")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("abc") == [9, 3]


def test_of_a_gguf_files_folder_nothing_else_is_read_and_a_used_folder_is_refused_at_once(
    tmp_path, capsys
):
    file, out, used = tmp_path / "tiny.gguf", tmp_path / "new" / "out", tmp_path / "used"
    save_gguf(file)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "x"}'
    )
    assert (
        main(["convert", str(file), "--out", str(out)]) == 0
        and (out / "model.safetensors").is_file()
    )
    used.mkdir()
    (used / "notes.txt").touch()
    assert "used exists and is not empty" in refused(capsys, file, "--out", used)


def test_a_gguf_file_that_transformers_would_misread_or_not_read_is_refused(tmp_path, capsys):
    scaled, half, out = tmp_path / "scaled.gguf", tmp_path / "half.gguf", tmp_path / "out"
    save_gguf(scaled, rope__scaling__factor=4.0)
    assert "transformers ignores its qwen2.rope.scaling.factor" in refused(
        capsys, scaled, "--out", out
    )
    half.write_bytes(scaled.read_bytes()[:4000])
    assert "half.gguf: cannot be converted" in refused(capsys, half, "--out", out)
    half.write_bytes(b"no GGUF")
    assert "half.gguf: cannot be converted" in refused(capsys, half, "--out", out)
    save_gguf(half, leave_out="model.layers.1.mlp.up_proj.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight" in refused(capsys, half, "--out", out)
    assert "name a new folder" in refused(capsys, scaled)
    assert not out.exists()
