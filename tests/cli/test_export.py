"""mmtrain export: whole or not at all, and --verify, which must not believe what only looks
right.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil

import pytest
import torch
from catalogs import is_held_out
from json_files import read_json
from PIL import Image
from rank_runs import train
from safetensors.torch import load_file, save_file
from small_disk import small_disk
from untrained_runs import compared, config_of, export, load_stock, make_checkpoint, run_export

from mmtrain.api.generate import generate
from mmtrain.base.errors import UserError
from mmtrain.exporting import hf, tensors
from mmtrain.exporting.verify import read_samples


def test_an_export_that_fails_leaves_nothing(tiny, tmp_path, capsys):
    shutil.copytree(tiny / "llm", tmp_path / "llm")
    make_checkpoint(tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}"))
    with (tmp_path / "llm" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    assert run_export(tmp_path / "run", "hf", tmp_path / "out") == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llm", "run"]


def test_a_folder_that_holds_something_is_never_written_into(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for form in ("safetensors", "llava", "hf"):
        assert run_export(checkpoint.path, form, tmp_path / "out") == 2
        assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_taken_and_what_a_killed_export_left_is_cleared(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.0123abcd.tmp").mkdir()
    (tmp_path / ".out.0123abcd.tmp" / "model.safetensors").write_text("half")
    os.utime(tmp_path / ".out.0123abcd.tmp", (0, 0))  # more than a day ago
    assert run_export(checkpoint.path.parent.parent, "hf", tmp_path / "out") == 0
    load_stock(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_export_that_is_stopped_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def stopped(*_, **context):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "write_card", stopped)  # when all else is written
    assert run_export(checkpoint.path, "hf", tmp_path / "out") == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["hf", "hf, its size unknown", "safetensors", "llava"])
def test_a_full_disk_is_one_line_and_nothing_is_left(
    checkpoint, tmp_path, monkeypatch, capsys, form
):
    with small_disk(tmp_path / "disk", kilobytes=2048) as disk:
        if form == "hf, its size unknown":  # as when another program fills the disk meanwhile
            monkeypatch.setattr(tensors, "require_space", lambda folder, size: None)
            (disk / "full").write_bytes(bytes(1 << 20))
        if form in ("safetensors", "llava"):
            (disk / "full").write_bytes(bytes((2 << 20) - 20_480))
        before = sorted(disk.iterdir())
        assert run_export(checkpoint.path, form.split(",")[0], disk / "out") == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error and str(disk) in error
        assert ("GB are needed" if form in ("hf", "llava") else "no space is left") in error
        assert sorted(disk.iterdir()) == before


def test_verify_says_what_it_compared(checkpoint, tmp_path, capsys):
    assert run_export(checkpoint.path, "hf", tmp_path / "out", "--verify") == 0
    said = capsys.readouterr().out
    found = re.search(
        r"logits of (\d+) answer tokens in 8 samples: "
        r"largest difference (\S+) .* at (\d+) of (\d+)",
        said,
    )
    assert found and float(found[2]) <= 1e-4 and found[1] == found[3] == found[4]
    assert "3 prompts of different lengths get equal answers in one batch and one at a time" in said


def test_verify_refuses_a_model_that_computes_something_else(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """A tensor in the wrong place, which no check of names and shapes can see."""
    right = hf.language_for_export

    def swapped(*arguments):
        language = right(*arguments)
        if arguments[3] == 0:  # rows needed: the trial of the family, whose weights are its own
            return language
        first, second = (f"language_model.model.layers.{i}.mlp.up_proj.weight" for i in (2, 3))
        tensors = {
            **language.tensors,
            first: language.tensors[second],
            second: language.tensors[first],
        }
        return dataclasses.replace(language, tensors=tensors)

    monkeypatch.setattr(hf, "language_for_export", swapped)
    assert run_export(checkpoint.path, "hf", tmp_path / "out", "--verify", "3") == 1
    assert "nothing was exported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_verify_refuses_a_folder_that_answers_batches_otherwise(
    tiny, tmp_path, monkeypatch, capsys
):
    shutil.copytree(tiny / "llm", tmp_path / "llm")
    (tmp_path / "llm" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '\\n' + message.role + ': "
        "' + message.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nassistant: ' }}{% endif %}"
    )
    config = config_of(tiny, f"model.llm.path={tmp_path / 'llm'}", "data.template=chat")
    make_checkpoint(tmp_path / "run", config)
    right = hf.write_card

    def padded_right(folder, *arguments, **context):
        file = folder / "tokenizer_config.json"
        file.write_text(
            file.read_text().replace('"padding_side": "left"', '"padding_side": "right"')
        )
        right(folder, *arguments, **context)

    arguments = (tmp_path / "run", "hf", tmp_path / "out", "--verify", "3")
    with monkeypatch.context() as patch:
        patch.setattr(hf, "write_card", padded_right)
        assert run_export(*arguments) == 1
    assert (
        "batches are answered wrongly: a batch of 3 prompts is answered '"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert run_export(*arguments) == 0


def test_verify_refuses_logits_that_are_no_numbers(checkpoint, tmp_path):
    exported = export(checkpoint, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["language_model.model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not compared(checkpoint, exported, torch.float32, 2).passed


@pytest.mark.nightly
def test_models_that_were_replaced_since_the_run_are_not_exported_or_asked(
    tiny, make_tiny, tmp_path, own_cache, capsys
):
    make_tiny.make_tiny_llm(tmp_path / "llm", layers=2)
    shutil.copytree(tiny / "vision", tmp_path / "vision")
    models = [f"model.llm.path={tmp_path / 'llm'}", f"model.vision.name={tmp_path / 'vision'}"]
    lora = ["model.lora.r=4", "model.lora.alpha=8", "model.lora.targets=[llm.layers.*.self_attn]"]
    keys = [
        "model.trainable=[projector, llm.layers.*.lora_*]",
        "model.llm.dtype=bfloat16",
        "parallel.pipeline=2",
    ]
    run = train(
        tiny / "config.yaml", f"run.dir={tmp_path}", *models, *lora, *keys, "train.max_steps=1"
    ).folder

    def exported(*options: str) -> str | None:
        """The error; None: there is none, and what was written is deleted again."""
        if code := run_export(run, options[0], tmp_path / "out", *options[1:]):
            assert code == 2 and not (tmp_path / "out").exists()
            return capsys.readouterr().err
        shutil.rmtree(tmp_path / "out")
        return None

    copying = ["hf"], ["peft", "--base", "hf"]
    others = ["safetensors"], ["peft", "--base", "llm"]
    assert exported("hf") is None
    for part, tensor, name in (
        ("llm", "model.layers.1.mlp.up_proj.weight", "llm.layers.1.mlp.up_proj.weight"),
        ("vision", "blocks.0.attn.qkv.weight", "vision.blocks.0.attn.qkv.weight"),
    ):
        file = tmp_path / part / "model.safetensors"
        kept, tensors = file.read_bytes(), load_file(file)
        tensors[tensor][0] *= 2
        save_file(tensors, file, metadata={"format": "pt"})
        said = f"{tmp_path / part}: {name} is not what the run was trained with. Restore"
        assert all(said in (exported(*options) or "") for options in copying)
        with pytest.raises(
            UserError, match=f"cannot be exported, so it cannot be asked: {re.escape(said)}"
        ):
            generate(run, Image.new("RGB", (28, 28), "red"))
        if part == "llm":
            assert [exported(*options) for options in others] == [None, None], (
                "these copy nothing of the models"
            )
        file.write_bytes(kept)

    settings, weights = tmp_path / "llm" / "config.json", tmp_path / "llm" / "model.safetensors"
    content, tensors = read_json(settings), load_file(weights)
    settings.write_text(json.dumps(content | {"rms_norm_eps": 0.1}))
    assert "llm: its config.json, or that of the encoder, is not what" in exported("hf")
    save_file(
        {name: x for name, x in tensors.items() if "layers.1." not in name},
        weights,
        {"format": "pt"},
    )
    settings.write_text(json.dumps(content | {"num_hidden_layers": 1}))
    assert "llm.layers.1." in exported("hf"), "a layer that is not there any more"


def test_verify_asks_about_samples_that_the_run_holds_out_and_else_about_its_data(tiny):
    held_out = [batch for _, batch in read_samples(config_of(tiny, "eval.fraction=0.3"), 5)]
    assert len(held_out) == 5 and all(is_held_out(batch.keys[0], 0.3) for batch in held_out)
    shard = sorted((tiny / "shards").glob("*.tar"))[1]
    of_shard = [batch for _, batch in read_samples(config_of(tiny, f"eval.shards={shard}"), 100)]
    assert [batch.keys[0] for batch in of_shard] == [f"{number:06d}" for number in range(48, 96)]
    first = [batch for _, batch in read_samples(config_of(tiny), 3)]
    assert [batch.keys[0] for batch in first] == ["000000", "000001", "000002"]
    assert all(batch.input_ids.shape == (1, batch.tokens) for batch in first), "nothing is padded"


@pytest.mark.parametrize("form", ["safetensors", "llava"])
def test_verify_is_refused_where_there_is_no_model_to_run(checkpoint, tmp_path, capsys, form):
    assert run_export(checkpoint.path, form, tmp_path / "out", "--verify") == 2
    assert "--format hf" in capsys.readouterr().err
