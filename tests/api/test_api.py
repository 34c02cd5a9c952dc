"""mmtrain from Python: the same runs, exports and answers as by the command, and nothing heavy
before it is needed.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import subprocess
import threading
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from processes import ran_python, wait_for
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration
from untrained_runs import make_checkpoint

import mmtrain
from mmtrain.config.load import dump_config


def short(tiny: Path, folder: Path, *more: str):
    keys = [
        "parallel.pipeline=1",
        "parallel.threads_per_rank=1",
        "train.max_steps=3",
        f"run.dir={folder}",
    ]
    keys += ["eval.fraction=0.2", "eval.show_answers=0", *more]
    return mmtrain.load_config(tiny / "config.yaml", keys)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A run of three steps."""
    return mmtrain.train(short(tiny, tmp_path_factory.mktemp("finished")), show=False).wait(250)


def test_every_name_is_there_and_another_is_no_attribute():
    wings = {module.name for module in pkgutil.iter_modules(mmtrain.__path__)}
    # importing a module of such a name would take the function's place
    assert wings.isdisjoint(mmtrain.__all__)
    assert [name for name in mmtrain.__all__ if not callable(getattr(mmtrain, name))] == []
    assert set(dir(mmtrain)) == {*mmtrain.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mmtrain.trian  # noqa: B018


def test_one_override_needs_no_list():
    assert mmtrain.load_config("example:llava_pp4", "run.name=other").run.name == "other"


def test_a_plan_needs_no_torch():
    code = (
        "import sys, mmtrain\n"
        "plan = mmtrain.make_plan(mmtrain.load_config('example:llava_pp4', "
        "['parallel.pipeline=2']))\n"
        "print(len(plan.ranks), 'torch' in sys.modules)"
    )
    ran = ran_python("-c", code)
    assert ran.stdout == "2 False\n", ran.stderr


def test_a_run_leaves_its_records_and_its_page_and_its_folder_is_a_run(finished, tmp_path):
    assert not finished.is_running
    assert [record["step"] for record in finished.metrics("train")] == [0, 1, 2]
    assert finished.scores and {"step", "loss", "exact_match"} <= set(finished.scores[-1])
    assert [checkpoint.step for checkpoint in finished.checkpoints] == [3]
    again = mmtrain.load_run(finished.folder)
    assert again.wait() is again and again.metrics("train") == finished.metrics("train")
    assert (
        again.report(tmp_path / "page.html").stat().st_size > 700_000
        and (finished.folder / "report.html").is_file()
    )
    assert (
        again.config == finished.config and again.config.run.name == "tiny" == finished.folder.name
    )


def test_what_the_command_prints_is_shown(finished, capfd):
    config = finished.config
    mmtrain.train(config).wait(100)
    assert f"complete: {config.run.dir}/tiny has made all its 3 steps" in capfd.readouterr().out


def test_wrong_input_is_the_launchers_message(tiny, tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(dump_config(short(tiny, tmp_path, "data.shards=/no/such-*.tar")))
    with pytest.raises(mmtrain.UserError, match=r"^data\.shards: .*/no/such"):
        mmtrain.train(file, show=False).wait(100)
    changed = mmtrain.load_config("example:llava_pp4").changed({"train.max_steps": -3})
    with pytest.raises(
        mmtrain.UserError,
        match=r"^the configuration of run llava_pp4: 1 problem\n  train\.max_steps",
    ):
        mmtrain.train(changed)
    with pytest.raises(mmtrain.UserError, match="not a run, since it has no"):
        mmtrain.load_run(tmp_path / "tiny")


@pytest.mark.nightly
def test_a_run_that_is_found_by_its_folder_can_be_waited_for_and_stopped_and_has_saved(
    tiny, tmp_path, capsys
):
    config = short(tiny, tmp_path, "train.max_steps=400", "eval.fraction=null")
    run = mmtrain.train(config, show=False)
    wait_for(lambda: run.metrics("train"), 200, "the first step")
    found = mmtrain.load_run(run.folder)
    assert "under way" in repr(run) and "under way" in repr(found)
    with pytest.raises(subprocess.TimeoutExpired):
        found.wait(0.1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        found.wait(60)
    said = f"the run continues; mmtrain.load_run('{found.folder}').stop() saves it and ends it\n"
    assert said in capsys.readouterr().err and run.is_running
    found.stop()
    assert not found.is_running and found.wait() is found
    with pytest.raises(mmtrain.RunError, match="goes on from there") as error:
        run.wait()
    assert error.value.exit_code == 3 and run.checkpoints
    saved = run.checkpoints[-1].step
    config = short(tiny, tmp_path, f"train.max_steps={saved + 1}", "eval.fraction=null")
    changed = mmtrain.train(config, show=False, allow_change=["train.max_steps"])
    assert changed.wait(250).metrics("train")[-1]["step"] == saved


def test_an_export_is_made_and_says_what_it_did_to_the_log(finished, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "mmtrain"):
        folder = mmtrain.export(finished, "safetensors", tmp_path / "out", dtype="bfloat16")
    assert folder == tmp_path / "out" and "exported" in caplog.text
    tensors = load_file(folder / "projector.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with pytest.raises(mmtrain.UserError, match="exists and is not empty"):
        mmtrain.export(finished.folder, "llava", folder)
    with pytest.raises(
        mmtrain.UserError, match="dtype 'int32': choose one of float32, bfloat16, float16"
    ):
        mmtrain.export(finished, "safetensors", tmp_path / "whole", dtype="int32")
    with pytest.raises(mmtrain.UserError, match="choose one of safetensors, llava, hf"):
        mmtrain.export(finished, "onnx", tmp_path / "other")
    with pytest.raises(mmtrain.UserError, match="max_shard_gb 0: set a number above 0"):
        mmtrain.export(tmp_path / "no run", "hf", tmp_path / "other", max_shard_gb=0)


def test_an_answer_is_that_of_stock_transformers_and_nothing_is_printed(
    tmp_path, own_cache, capsys
):
    image = Image.fromarray(
        numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
    )
    image.save(tmp_path / "one.png")
    make_checkpoint(tmp_path / "run", mmtrain.load_config("example:llava_pp4"))
    question = "Which digit is at the top left, and in which colour?"
    answer = mmtrain.generate(tmp_path / "run", tmp_path / "one.png", question, max_new_tokens=12)
    assert answer == mmtrain.generate(tmp_path / "run", [image], question, max_new_tokens=12)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    for turned in (tmp_path / "turned.png", Image.open(tmp_path / "turned.png")):
        assert answer == mmtrain.generate(tmp_path / "run", turned, question, max_new_tokens=12)
    assert capsys.readouterr() == ("", "")
    (folder,) = (
        path for path in (tmp_path / "cache" / "mmtrain" / "chat").iterdir() if path.is_dir()
    )
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=[image], return_tensors="pt")
    output = LlavaForConditionalGeneration.from_pretrained(folder).generate(
        **inputs, max_new_tokens=12
    )
    assert (
        answer
        == processor.decode(
            output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        ).strip()
    )
