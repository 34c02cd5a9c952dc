"""Exports of untrained runs, read by stock transformers, by LLaVA's rules, and by hand."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import load_tool
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration
from untrained_runs import make_checkpoint, make_tower

from mmtrain.config import load_config
from mmtrain.data.catalog import is_held_out
from mmtrain.errors import UserError
from mmtrain.export import hf
from mmtrain.export.hf import export_hf
from mmtrain.export.language import language_for_export
from mmtrain.export.stock import refuse_loading_faults, refuse_unfit_family
from mmtrain.export.tensors import INDEX, in_memory
from mmtrain.export.verify import compare_logits, sample_batches
from mmtrain.step_folder import StepFolder

SHARD = 5 * 10**9
TOWERS = {
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "quickgelu clip": ("vit_base_patch16_clip_quickgelu_224", {}),
    "averaging vit": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "vit with a class token": ("vit_tiny_patch16_224", {}),
}
FAMILIES = {
    "llama": {},
    "tied qwen2": {"tied": True},
    "tied gemma3_text": {"tied": True},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "phi3": {},
}
UNFIT = {
    "gemma2": ({}, "logits differ"),
    "cohere2": ({}, "logits differ"),
    "granite": ({"logits_scaling": 8.0}, "logits differ"),
    "gpt2": ({}, "does not fit"),
    "phi": ({}, "head has a bias"),
}


@pytest.fixture(scope="session")
def export_tool():
    return load_tool("export_projector")


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory) -> StepFolder:
    return make_checkpoint(tmp_path_factory.mktemp("run") / "tiny", load_config(tiny / "config.yaml"))


def config_of(tiny: Path, *overrides: str):
    return load_config(tiny / "config.yaml", overrides)


def load(folder: Path, **options) -> LlavaForConditionalGeneration:
    """The stock model; nothing may be missing, unexpected or mismatched."""
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True, **options)
    assert {kind: set(entries) for kind, entries in info.items() if entries} == {}
    return model.eval()


def export(checkpoint: StepFolder, folder: Path, dtype: torch.dtype = torch.float32, shard_bytes: int = SHARD):
    folder.mkdir(parents=True, exist_ok=True)
    return export_hf(checkpoint, folder, dtype, shard_bytes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# --- a Hugging Face folder


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("select_layer", [-1, -2])
def test_stock_logits_are_mmtrains_whatever_the_encoder(tiny, tmp_path, tower, select_layer):
    vision = make_tower(tmp_path / "vision", *TOWERS[tower])
    config = config_of(tiny, f"model.vision.name={vision}", f"model.vision.select_layer={select_layer}")
    checkpoint = make_checkpoint(tmp_path / "run", config)
    exported = export(checkpoint, tmp_path / "out")
    load(tmp_path / "out")
    found = compare_logits(checkpoint, tmp_path / "out", exported, torch.float32, 8)
    assert found.samples == 8 and found.tokens >= 40
    assert found.difference <= 1e-4 and found.agreeing == found.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_logits_are_mmtrains_whatever_the_llm(tiny, make_tiny, tmp_path, family):
    *_, name = family.split()
    make_tiny.make_tiny_llm(tmp_path / "llm", name, layers=3, max_shard_size="150KB", **FAMILIES[family])
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}"))
    exported = export(checkpoint, tmp_path / "out", shard_bytes=200_000)
    assert exported.files > 1 and (tmp_path / "out" / INDEX).is_file()
    load(tmp_path / "out")
    found = compare_logits(checkpoint, tmp_path / "out", exported, torch.float32, 4)
    assert found.difference <= 1e-4 and found.agreeing == found.tokens > 20


def test_every_tensor_is_the_published_one_and_the_projector_is_bitwise_the_trained_one(tiny, checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    found = weights(tmp_path / "out")
    trained = load_file(checkpoint.tensors_file)
    expected = {f"multi_modal_{name}": tensor for name, tensor in trained.items()}
    for name, tensor in load_file(tiny / "llm" / "model.safetensors").items():
        expected[f"language_model.{name}"] = tensor
    assert expected.keys() == {name for name in found if not name.startswith("vision_tower.")}
    assert all(torch.equal(found[name].view(torch.int32), expected[name].view(torch.int32)) for name in expected)


def test_what_was_trained_besides_the_projector_lies_in_its_place(tiny, tmp_path):
    generator = torch.Generator().manual_seed(3)
    llm = load_file(tiny / "llm" / "model.safetensors")
    places = {
        "llm.layers.7.mlp.down_proj.weight": "model.layers.7.mlp.down_proj.weight",
        "llm.norm.weight": "model.norm.weight",
        "llm.head.weight": "lm_head.weight",
    }
    others = {name: torch.randn(llm[place].shape, generator=generator) for name, place in places.items()}
    vision = load_file(tiny / "vision" / "model.safetensors")
    others["vision.blocks.2.attn.qkv.weight"] = torch.randn(vision["blocks.2.attn.qkv.weight"].shape)
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), others)
    exported = export(checkpoint, tmp_path / "out")
    found = weights(tmp_path / "out")
    for name, place in places.items():
        assert torch.equal(found[f"language_model.{place}"], others[name])
    untouched = "model.layers.6.mlp.down_proj.weight"
    assert torch.equal(found[f"language_model.{untouched}"], llm[untouched])
    compared = compare_logits(checkpoint, tmp_path / "out", exported, torch.float32, 4)
    assert compared.difference <= 1e-4


@pytest.mark.parametrize(
    "name,why",
    [
        ("llm.layers.0.mlp.experts.gate_up_proj", "no one tensor of this name"),
        ("llm.layers.9.mlp.down_proj.weight", "no one tensor of this name"),
        ("llm.norm.weight", "another model lies there"),
        ("vision.blocks.77.norm1.weight", "vision.blocks.77"),
    ],
)
def test_a_trained_tensor_without_a_place_is_refused(tiny, tmp_path, name, why):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), {name: torch.ones(3, 3)})
    with pytest.raises(UserError, match=why):
        export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_a_cast_of_every_tensor_and_logits_are_those_of_rounded_weights(checkpoint, tmp_path, dtype):
    exported = export(checkpoint, tmp_path / "cast", dtype)
    export(checkpoint, tmp_path / "exact")
    exact = weights(tmp_path / "exact")
    for name, tensor in weights(tmp_path / "cast").items():
        assert torch.equal(tensor, exact[name].to(dtype)), name
    assert load(tmp_path / "cast", dtype="auto").dtype == dtype
    found = compare_logits(checkpoint, tmp_path / "cast", exported, dtype, 4)
    assert found.difference <= 1e-4 and found.passed


def test_what_transformers_keeps_in_float32_is_not_rounded(tiny, make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "deepseek_v3", layers=2)
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}"))
    exported = export(checkpoint, tmp_path / "out", torch.bfloat16)
    found = weights(tmp_path / "out")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == set(exported.kept_in_float32) and len(kept) == 1
    assert "e_score_correction_bias" in kept.pop()
    load(tmp_path / "out", dtype="auto")


@pytest.mark.parametrize("family", UNFIT)
def test_a_family_that_the_stock_model_would_compute_wrongly_is_refused(make_tiny, tmp_path, family):
    values, why = UNFIT[family]
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2, **values)
    with pytest.raises(UserError, match=f"{why}.*--format safetensors exports any"):
        refuse_unfit_family(tmp_path / "llm")


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma", "glm4", "granite", "smollm3", "olmo2", "starcoder2"])
def test_families_that_fit_are_not_refused(make_tiny, tmp_path, family):
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2)
    refuse_unfit_family(tmp_path / "llm")


def test_a_projector_that_the_stock_model_does_not_have_is_refused_with_the_formats_that_work(tiny, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, "model.projector.type=linear"))
    with pytest.raises(UserError, match=r"two layers.*linear; --format safetensors .*--format llava"):
        export(checkpoint, tmp_path / "out")


def test_a_tensor_too_many_too_few_or_of_another_shape_is_found_before_anything_is_written(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = {name: in_memory(tensor) for name, tensor in weights(tmp_path / "out").items()}
    refuse_loading_faults(config, tensors)
    norm = "language_model.model.norm.weight"
    with pytest.raises(UserError, match=r"missing_keys: model\.language_model\.norm\.weight"):
        refuse_loading_faults(config, {name: source for name, source in tensors.items() if name != norm})
    with pytest.raises(UserError, match=r"unexpected_keys: .*extra"):
        refuse_loading_faults(config, {**tensors, "language_model.model.extra": tensors[norm]})
    with pytest.raises(UserError, match=r"mismatched_keys: .*norm"):
        refuse_loading_faults(config, {**tensors, norm: in_memory(torch.ones(3))})


# --- the row of <image>


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def without_spare_row(request, tiny, make_tiny, tmp_path_factory):
    """An LLM whose embedding is full, and its export."""
    folder = tmp_path_factory.mktemp("full")
    size = len(make_tiny.make_tokenizer())
    make_tiny.make_tiny_llm(folder / "llm", "llama", layers=2, tied=request.param, vocab_size=size)
    checkpoint = make_checkpoint(folder / "run", config_of(tiny, f"model.llm.path={folder / 'llm'}"))
    return checkpoint, export(checkpoint, folder / "out"), folder / "out", size, request.param


def test_a_full_embedding_gains_a_row_and_all_else_stays(without_spare_row):
    checkpoint, exported, out, size, tied = without_spare_row
    assert (exported.added_rows, exported.image_token_id) == (1, size)
    model = load(out)
    own = AutoModelForCausalLM.from_pretrained(checkpoint.config.model.llm.path)
    for matrix, before in (
        (model.get_input_embeddings().weight, own.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, own.get_output_embeddings().weight),
    ):
        assert torch.equal(matrix[:size], before)
        assert torch.allclose(matrix[size], before.mean(0), atol=1e-6) and len(matrix) == size + 1
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    found = compare_logits(checkpoint, out, exported, torch.float32, 4)
    assert found.difference <= 1e-4 and found.agreeing == found.tokens
    assert "gained 1" in (out / "README.md").read_text()


def test_the_new_row_is_never_said_whatever_the_hidden_state(without_spare_row):
    _, exported, out, size, _ = without_spare_row
    model = load(out)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-2, 1.0, 100.0):
        # Among them the states for which a row of zeros would win: all other logits below 0.
        hidden = torch.randn(20_000, model.lm_head.in_features, generator=generator) * scale
        hidden = torch.cat([hidden, -model.lm_head.weight[:size].mean(0, keepdim=True) * scale])
        assert not (model.lm_head(hidden).argmax(-1) == exported.image_token_id).any()
    ids = torch.randint(0, size, (16, 4), generator=generator)
    torch.manual_seed(0)
    said = model.generate(ids, do_sample=True, temperature=5.0, max_new_tokens=60)[:, 4:]
    assert not (said == exported.image_token_id).any()
    assert len(said.unique()) > 100, "the temperature makes everything else likely"


def test_a_spare_row_is_used_before_one_is_added(checkpoint, tmp_path):
    exported = export(checkpoint, tmp_path / "out")
    assert exported.added_rows == 0
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    own = json.loads((Path(checkpoint.config.model.llm.path) / "config.json").read_text())
    assert exported.image_token_id < text["vocab_size"] == own["vocab_size"]
    assert "gained" not in (tmp_path / "out" / "README.md").read_text()


def test_buffers_of_old_files_are_left_out_and_named(tiny, make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "llama", layers=2)
    tensors = load_file(tmp_path / "llm" / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file(tensors, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}"))
    export(checkpoint, tmp_path / "out")
    load(tmp_path / "out")
    assert "2 tensors of the LLM's files were left out" in (tmp_path / "out" / "README.md").read_text()


def test_files_saved_without_the_head_get_their_full_names(make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "llama", layers=2, tied=True)
    tensors = load_file(tmp_path / "llm" / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    found = language_for_export(tmp_path / "llm", {}, 0, "float32").tensors
    assert found.keys() == {f"language_model.{name}" for name in tensors}


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_settings_that_only_version_5_reads_are_also_written_for_version_4(make_tiny, tmp_path, scaled):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5} if scaled else {"rope_theta": 5e5}
    make_tiny.make_tiny_llm(tmp_path / "llm", "llama", layers=1, rope_parameters={"rope_type": "default", **rope})
    written = language_for_export(tmp_path / "llm", {}, 0, "float32").config
    assert written["rope_theta"] == 5e5
    assert ("rope_scaling" in written) == scaled and (not scaled or written["rope_scaling"]["factor"] == 2.0)


# --- whole or not at all


def test_an_export_that_fails_leaves_nothing(export_tool, tiny, make_tiny, tmp_path, capsys):
    shutil.copytree(tiny / "llm", tmp_path / "llm")
    make_checkpoint(tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}"))
    with (tmp_path / "llm" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    options = ["--checkpoint", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "out")]
    assert export_tool.main(options) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llm", "run"]


def test_a_folder_that_holds_something_is_never_written_into(export_tool, checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for form in ("safetensors", "llava", "hf"):
        options = ["--checkpoint", str(checkpoint.path), "--format", form, "--out", str(tmp_path / "out")]
        assert export_tool.main(options) == 2
        assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_taken_and_what_a_killed_export_left_is_cleared(export_tool, checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "model.safetensors").write_text("half")
    options = ["--checkpoint", str(checkpoint.path.parent.parent), "--format", "hf", "--out", str(tmp_path / "out")]
    assert export_tool.main(options) == 0
    load(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_export_that_is_stopped_leaves_nothing(export_tool, checkpoint, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "check_written", stopped)  # when all is written, and not yet read again
    options = ["--checkpoint", str(checkpoint.path), "--format", "hf", "--out", str(tmp_path / "out")]
    assert export_tool.main(options) == 130
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 2 MB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no right to mount here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("form", ["hf", "hf, its size unknown", "safetensors", "llava"])
def test_a_full_disk_is_one_line_and_nothing_is_left(
    export_tool, checkpoint, tiny, small_disk, monkeypatch, capsys, form
):
    if form == "hf, its size unknown":  # as when another program fills the disk meanwhile
        monkeypatch.setattr(hf, "require_space", lambda folder, size: None)
        (small_disk / "full").write_bytes(bytes(1 << 20))
    if form in ("safetensors", "llava"):
        (small_disk / "full").write_bytes(bytes((2 << 20) - 20_480))
    before = sorted(small_disk.iterdir())
    options = ["--checkpoint", str(checkpoint.path), "--format", form.split(",")[0], "--out", str(small_disk / "out")]
    assert export_tool.main(options) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and str(small_disk) in error
    assert ("GB are needed" if form in ("hf", "llava") else "no space is left") in error
    assert sorted(small_disk.iterdir()) == before


# --- the tool


def test_verify_refuses_a_model_that_computes_something_else(export_tool, checkpoint, tmp_path, monkeypatch, capsys):
    """A tensor in the wrong place, which no check of names and shapes can see."""
    right = hf.language_for_export

    def swapped(*arguments):
        language = right(*arguments)
        first, second = (f"language_model.model.layers.{i}.mlp.up_proj.weight" for i in (2, 3))
        tensors = {**language.tensors, first: language.tensors[second], second: language.tensors[first]}
        return hf.ExportedLanguage(language.config, tensors, language.added_rows, language.left_out)

    monkeypatch.setattr(hf, "language_for_export", swapped)
    options = ["--checkpoint", str(checkpoint.path), "--format", "hf", "--out", str(tmp_path / "out"), "--verify", "3"]
    assert export_tool.main(options) == 1
    assert "nothing was exported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_verify_says_what_it_compared(export_tool, checkpoint, tmp_path, capsys):
    options = ["--checkpoint", str(checkpoint.path), "--format", "hf", "--out", str(tmp_path / "out"), "--verify"]
    assert export_tool.main(options) == 0
    said = capsys.readouterr().out
    found = re.search(
        r"logits of (\d+) answer tokens in 8 samples: largest difference (\S+) .* at (\d+) of (\d+)", said
    )
    assert found and float(found[2]) <= 1e-4 and found[1] == found[3] == found[4]


def test_verify_asks_about_samples_that_the_run_holds_out_and_else_about_its_data(tiny):
    held_out = sample_batches(config_of(tiny, "eval.fraction=0.3"), 5)
    assert len(held_out) == 5 and all(is_held_out(batch.keys[0], 0.3) for batch in held_out)
    shard = sorted((tiny / "shards").glob("*.tar"))[1]
    of_shard = sample_batches(config_of(tiny, f"eval.shards={shard}"), 100)
    assert [batch.keys[0] for batch in of_shard] == [f"{number:06d}" for number in range(48, 96)]
    first = sample_batches(config_of(tiny), 3)
    assert [batch.keys[0] for batch in first] == ["000000", "000001", "000002"]
    assert all(batch.input_ids.shape == (1, batch.tokens) for batch in first), "nothing is padded"


@pytest.mark.parametrize("form", ["safetensors", "llava"])
def test_verify_is_refused_where_there_is_no_model_to_run(export_tool, checkpoint, tmp_path, capsys, form):
    options = ["--checkpoint", str(checkpoint.path), "--format", form, "--out", str(tmp_path / "out"), "--verify"]
    assert export_tool.main(options) == 2 and "--format hf" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_never_exported(export_tool, tiny, tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny))
    content = bytearray(checkpoint.tensors_file.read_bytes())
    content[-1] ^= 1
    checkpoint.tensors_file.write_bytes(content)
    options = ["--checkpoint", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "out")]
    assert export_tool.main(options) == 2
    assert "projector.safetensors is damaged" in capsys.readouterr().err


def test_the_code_in_the_model_card_runs_as_it_stands(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / "out" / "picture.png")
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr


# --- the projector alone


def test_the_projector_file_says_what_it_belongs_to(checkpoint, export_tool, tmp_path):
    options = ["--checkpoint", str(checkpoint.path), "--format", "safetensors", "--out", str(tmp_path / "out")]
    assert export_tool.main(options) == 0
    content = (tmp_path / "out" / "projector.safetensors").read_bytes()
    about = json.loads((tmp_path / "out" / "projector.json").read_text())
    assert about["sha256"] == {"projector.safetensors": hashlib.sha256(content).hexdigest()}
    trained, found = load_file(checkpoint.tensors_file), load_file(tmp_path / "out" / "projector.safetensors")
    assert found.keys() == trained.keys() == set(about["trained"])
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    config = checkpoint.config
    assert (about["llm"], about["vision"]) == (config.model.llm.path, config.model.vision.name)
    assert (about["llm_width"], about["vision_width"], about["vision_select_layer"]) == (64, 48, -2)
    assert (about["projector_type"], about["dtype"], about["steps"]) == ("mlp2x_gelu", "float32", 20)
    assert about["data_fingerprint"] == "d" * 64 and about["versions"]["torch"] == "2"


def test_all_that_was_trained_is_in_the_projector_file_in_the_dtype_asked_for(export_tool, tiny, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), {"llm.norm.weight": torch.linspace(0, 1, 64)})
    options = ["--checkpoint", str(checkpoint.path), "--format", "safetensors", "--out", str(tmp_path / "out")]
    assert export_tool.main([*options, "--dtype", "float16"]) == 0
    found = load_file(tmp_path / "out" / "projector.safetensors")
    assert torch.equal(found["llm.norm.weight"], torch.linspace(0, 1, 64).half())
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}


def llava_module(kind: str, vision_width: int, llm_width: int) -> nn.Module:
    """As LLaVA's build_vision_projector makes it."""
    if kind == "linear":
        return nn.Linear(vision_width, llm_width)
    return nn.Sequential(nn.Linear(vision_width, llm_width), nn.GELU(), nn.Linear(llm_width, llm_width))


@pytest.mark.parametrize("kind", ["linear", "mlp2x_gelu"])
def test_llavas_own_way_of_loading_gets_the_trained_projector_bit_for_bit(export_tool, tiny, tmp_path, kind):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, f"model.projector.type={kind}"))
    options = ["--checkpoint", str(checkpoint.path), "--format", "llava", "--out", str(tmp_path / "llava")]
    assert export_tool.main(options) == 0
    content = torch.load(tmp_path / "llava" / "mm_projector.bin", map_location="cpu", weights_only=True)
    assert type(content) is dict and all(name.startswith("model.mm_projector.") for name in content)
    config = json.loads((tmp_path / "llava" / "config.json").read_text())
    module = llava_module(config["mm_projector_type"], config["mm_hidden_size"], config["hidden_size"])
    # initialize_vision_modules takes what follows `mm_projector.` in each name
    module.load_state_dict({name.split("mm_projector.")[1]: tensor for name, tensor in content.items()})
    trained = load_file(checkpoint.tensors_file)
    features = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(0))
    layers = [module] if kind == "linear" else [module[0], module[2]]
    for number, layer in enumerate(layers, 1):
        for part in ("weight", "bias"):
            expected = trained[f"projector.linear_{number}.{part}"]
            assert torch.equal(getattr(layer, part).view(torch.int32), expected.view(torch.int32))
    assert module(features).shape == (3, 5, 64)


def test_the_llava_config_says_what_llavas_code_asks_for(export_tool, checkpoint, tiny, tmp_path):
    options = ["--checkpoint", str(checkpoint.path), "--format", "llava", "--out", str(tmp_path / "llava")]
    assert export_tool.main([*options, "--dtype", "bfloat16"]) == 0
    config = json.loads((tmp_path / "llava" / "config.json").read_text())
    expected = {
        "model_type": "llava_llama",
        "use_mm_proj": True,
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 48,
        "mm_vision_tower": str(tiny / "vision"),
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "cls_patch",  # the tiny encoder has no class token to drop
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "image_aspect_ratio": "pad",
    }
    assert expected.items() <= config.items()
    content = torch.load(tmp_path / "llava" / "mm_projector.bin", weights_only=True)
    assert {tensor.dtype for tensor in content.values()} == {torch.bfloat16}


def test_llavas_file_has_no_place_for_other_trained_tensors(tiny, export_tool, tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), {"llm.norm.weight": torch.ones(64)})
    options = ["--checkpoint", str(checkpoint.path), "--format", "llava", "--out", str(tmp_path / "llava")]
    assert export_tool.main(options) == 2
    error = capsys.readouterr().err
    assert "llm.norm.weight was trained too" in error and "--format hf" in error


def test_a_run_that_did_not_train_its_projector_has_none_to_export(tiny, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, "model.trainable=[llm.norm]"))
    save_file({"llm.norm.weight": torch.ones(64)}, checkpoint.tensors_file)
    with pytest.raises(UserError, match="did not train its projector"):
        export(checkpoint, tmp_path / "out")
