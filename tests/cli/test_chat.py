"""mmtrain chat: what it says is what stock transformers generates from the exported model, and it
says no more.
"""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import TOOLS
from json_files import read_json
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, LlavaForConditionalGeneration
from untrained_runs import make_checkpoint

from mmtrain.__main__ import main
from mmtrain.api.generate import Conversation, _streamer, load, read_image, stock_folder
from mmtrain.base.printing import print_words
from mmtrain.config.load import load_config
from mmtrain.data.stream.images import image_transform

CONFIG = TOOLS.parent / "configs" / "llava_pp4.yaml"
QUESTION = "Which digit is at the top left, and in which colour?"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A cache of its own, one.png, two.png, chat/ and plain/: runs of the demo's models with an
    untrained projector.
    """
    folder = tmp_path_factory.mktemp("chat")
    draw = numpy.random.default_rng(0)
    for name in ("one", "two"):
        Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)).save(
            folder / f"{name}.png"
        )
    for template in ("chat", "plain"):
        make_checkpoint(folder / template, load_config(CONFIG, [f"data.template={template}"]))
    return folder


@pytest.fixture(autouse=True)
def own_cache(work, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "cache"))


@pytest.fixture(scope="module")
def llava(work) -> Path:
    """The LLaVA folder of the run chat/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(work / "cache"))
        return stock_folder(str(work / "chat"))


def stock_answer(folder: Path, messages: list[dict], images: list[Path], limit: int) -> str:
    """What transformers alone says, as the folder's README has it."""
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=text, images=[Image.open(file) for file in images], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=limit)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(output, skip_special_tokens=True).strip()


def user(text: str, images: int = 1) -> dict:
    return {
        "role": "user",
        "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}],
    }


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def say(capsys, model: Path, image: Path, *more: str) -> tuple[str, str]:
    assert main(["chat", str(model), "--image", str(image), "--max-new-tokens", "12", *more]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


# ---- answers


def test_a_run_is_exported_once_and_answers_as_its_exported_folder_does(work, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "fresh"))
    first, notes = say(capsys, work / "chat", work / "one.png", "--prompt", QUESTION)
    assert "exporting" in notes and "delete it" in notes
    again, notes = say(capsys, work / "chat", work / "one.png", "--prompt", QUESTION)
    assert "exporting" not in notes
    (folder,) = (path for path in (work / "fresh" / "mmtrain" / "chat").iterdir() if path.is_dir())
    direct, _ = say(capsys, folder, work / "one.png", "--prompt", QUESTION)
    expected = stock_answer(folder, [user(QUESTION)], [work / "one.png"], 12)
    assert expected
    assert first == again == direct == expected + "\n"


def test_another_checkpoint_of_the_same_run_is_another_model(work):
    steps = ((step, load_config(CONFIG, [f"run.seed={step}"])) for step in (20, 21))
    folders = [
        stock_folder(str(make_checkpoint(work / "two-steps", c, step=step).path))
        for step, c in steps
    ]
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert not torch.equal(
        *(tensors["multi_modal_projector.linear_1.weight"] for tensors in (one, other))
    )


def test_two_pictures_and_a_system_turn_reach_the_model(work, llava, capsys):
    expected = stock_answer(
        llava,
        [
            {"role": "system", "content": [{"type": "text", "text": "You see pictures."}]},
            user(QUESTION, images=2),
        ],
        [work / "one.png", work / "two.png"],
        12,
    )
    more = ["--image", str(work / "two.png"), "--system", "You see pictures.", "--prompt", QUESTION]
    assert say(capsys, llava, work / "one.png", *more)[0] == expected + "\n"


def test_a_later_question_sees_the_earlier_ones_and_their_answers(work, llava, capsys):
    conversation = Conversation(*load(llava), [read_image(work / "one.png")], None, 12, print_words)
    for question in (QUESTION, "What do you see at the bottom right?"):
        conversation.ask(question)
    first = stock_answer(llava, [user(QUESTION)], [work / "one.png"], 12)
    history = [
        user(QUESTION),
        assistant(first),
        user("What do you see at the bottom right?", images=0),
    ]
    assert (
        capsys.readouterr().out
        == f"{first}\n{stock_answer(llava, history, [work / 'one.png'], 12)}\n"
    )


def test_without_a_prompt_and_a_terminal_one_question_is_asked(work, llava, capsys):
    expected = stock_answer(llava, [user("Describe the image.")], [work / "one.png"], 12)
    assert say(capsys, llava, work / "one.png")[0] == expected + "\n"


def test_words_appear_while_the_model_still_generates(work, llava, monkeypatch):
    model, processor = load(llava)
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)
    printed_after = []
    monkeypatch.setattr(
        "builtins.print",
        lambda text="", **_: printed_after.append(forwards) if text.strip() else None,
    )
    Conversation(model, processor, [read_image(work / "one.png")], None, 12, print_words).ask(
        QUESTION
    )
    assert forwards > 3
    assert printed_after[0] < forwards
    assert len(set(printed_after)) > 2


def test_a_model_that_was_trained_on_captions_captions_and_says_that_it_cannot_be_asked(
    work, capsys
):
    folder = stock_folder(str(work / "plain"))
    expected = stock_answer(folder, [user("", images=1)], [work / "one.png"], 12)
    for more in ([], ["--prompt", QUESTION]):
        answer, notes = say(capsys, folder, work / "one.png", *more)
        assert answer == expected + "\n"
        assert ("trained on captions alone" in notes) == bool(more)


def test_an_answer_that_was_cut_is_said_to_be(work, llava, capsys):
    _, notes = say(capsys, llava, work / "one.png", "--max-new-tokens", "1")
    assert "(cut after 1 tokens; set another limit with max_new_tokens, or --max-new" in notes


def test_what_a_model_says_cannot_steer_the_terminal(llava, capsys):
    streamer = _streamer(load(llava)[1].tokenizer, print_words)
    streamer.on_finalized_text(" red\n\x1b[31mblue\x1b]0;title\x07")
    streamer.on_finalized_text(" \u202etxt.exe\r5 µm 图 é", stream_end=True)
    said = "red\n\\x1b[31mblue\\x1b]0;title\\x07 \\u202etxt.exe\\r5 µm 图 é\n"
    assert capsys.readouterr().out == said


def test_pictures_of_any_size_come_to_the_model_as_in_training_bit_for_bit(work, llava):
    Image.open(work / "one.png").resize((150, 37)).save(work / "wide.png")
    image = read_image(work / "wide.png")
    pixels = load(llava)[1](images=[image], text="<image>", return_tensors="pt")["pixel_values"]
    transform = image_transform("demo:vision", "pad")
    assert torch.equal(pixels[0], transform.normalise(transform.fitted(image)))


@pytest.mark.nightly
def test_on_a_terminal_question_follows_question_until_an_empty_line(work, llava):
    chat = [sys.executable, "-m", "mmtrain", "chat"]
    command = [*chat, llava, "--image", work / "one.png", "--max-new-tokens=12"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        list(map(str, command)), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    os.write(ours, f"{QUESTION}\nWhere?\n\n".encode())  # the terminal keeps what is typed ahead
    seen = b""
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:  # how a terminal says that its last user has left
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    first = stock_answer(llava, [user(QUESTION)], [work / "one.png"], 12)
    second = stock_answer(
        llava, [user(QUESTION), assistant(first), user("Where?", images=0)], [work / "one.png"], 12
    )
    lines = seen.decode().splitlines()
    assert any(line.endswith(first) for line in lines)
    assert any(line.endswith(second) for line in lines)
    assert "An empty line or Ctrl-D ends" in seen.decode()


# ---- what cannot be answered


def refused(capsys, model: Path | str, image: Path, *more: str) -> str:
    assert main(["chat", str(model), "--image", str(image), *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: " in captured.err
    assert "Traceback" not in captured.err
    return captured.err


def test_wrong_input_is_named(work, llava, tiny, capsys):
    picture = work / "one.png"
    assert "no such folder, and no hub id in the local cache" in refused(
        capsys, work / "none", picture
    )
    assert "has no chat template, so prompts cannot be written" in refused(
        capsys, tiny / "llm", picture
    )
    assert "has no config.json. Name a run" in refused(capsys, tiny / "shards", picture)
    assert "No such file" in refused(capsys, llava, work / "none.png")
    assert "in none of the formats JPEG, PNG" in refused(capsys, llava, CONFIG)
    assert "the pictures already come before it" in refused(
        capsys, llava, picture, "--prompt", "<image> what?"
    )
    assert "the model takes 2,048" in refused(capsys, llava, picture, "--max-new-tokens", "2048")


def test_a_run_that_has_no_place_in_a_llava_folder_is_refused_with_the_reason(work, capsys):
    config = load_config(CONFIG, ["model.projector.type=linear"])
    make_checkpoint(work / "linear", config)
    said = refused(capsys, work / "linear", work / "one.png")
    assert "cannot be exported, so it cannot be asked: " in said
    assert "linear" in said
    assert not any(
        "unfinished" in path.name for path in (work / "cache" / "mmtrain" / "chat").iterdir()
    )


def test_a_folder_with_a_tensor_missing_is_refused_and_not_filled_at_random(
    work, llava, tmp_path, capsys
):
    shutil.copytree(llava, tmp_path / "llava")
    tensors = load_file(tmp_path / "llava" / "model.safetensors")
    del tensors["multi_modal_projector.linear_2.weight"]
    save_file(tensors, tmp_path / "llava" / "model.safetensors", metadata={"format": "pt"})
    said = refused(capsys, tmp_path / "llava", work / "one.png")
    assert "part of the model would be random" in said
    assert "multi_modal_projector.linear_2.weight" in said


def test_a_folder_of_pickles_or_without_weights_is_refused(work, llava, tmp_path, capsys):
    shutil.copytree(llava, tmp_path / "llava")
    (tmp_path / "llava" / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refused(capsys, tmp_path / "llava", work / "one.png")
    torch.save({}, tmp_path / "llava" / "pytorch_model.bin")
    assert "mmtrain convert" in refused(capsys, tmp_path / "llava", work / "one.png")


def edit(file: Path, *places: str, **changes: object) -> None:
    """Change keys of an object in a file of JSON, which may lie inside others."""
    content = read_json(file) if file.exists() else {}
    inner = content
    for place in places:
        inner = inner.setdefault(place, {})
    inner.update(changes)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "processor_config.json",
            {"processor_class": "FooProcessor", "auto_map": {"AutoProcessor": "ev.P"}},
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "FooTokenizer", "auto_map": {"AutoTokenizer": ["ev.P", "ev.P"]}},
        ),
        ("config.json", {"auto_map": {"AutoConfig": "ev.P", "AutoProcessor": "ev.P"}}),
    ],
)
def test_python_in_the_folder_is_not_run_whatever_stands_on_standard_input(
    work, llava, tmp_path, monkeypatch, file, changes
):
    shutil.copytree(llava, tmp_path / "llava")
    # Without the processor's class AutoProcessor would take it from config.json, and ask for each
    # of its parts.
    edit(tmp_path / "llava" / "processor_config.json", processor_class=None)
    edit(tmp_path / "llava" / "tokenizer_config.json", processor_class=None)
    edit(tmp_path / "llava" / file, **changes)
    (tmp_path / "llava" / "ev.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    main(["chat", str(tmp_path / "llava"), "--image", str(work / "one.png"), "--prompt", "What?"])
    assert not (tmp_path / "imported").exists()


def test_a_kernel_that_the_folder_names_is_not_downloaded(work, llava, tmp_path, capsys):
    shutil.copytree(llava, tmp_path / "llava")
    for places in ([], ["text_config"], ["vision_config"]):
        edit(
            tmp_path / "llava" / "config.json",
            *places,
            _attn_implementation="kernels-community/flash-attn",
        )
    asked = [work / "one.png", "--prompt", QUESTION]
    assert say(capsys, tmp_path / "llava", *asked) == say(capsys, llava, *asked)


IN_8_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}
TIMM_FROM_THE_HUB = {
    "model_type": "timm_backbone",
    "backbone": "hf-hub:evil/x",
    "use_pretrained_backbone": True,
}


@pytest.mark.parametrize(
    ("file", "places", "changes", "said"),
    [
        (
            "config.json",
            ["text_config"],
            {"hidden_size": "64"},
            "hidden_size '64', which no model has",
        ),
        (
            "config.json",
            ["text_config"],
            {"num_hidden_layers": 900},
            "says num_hidden_layers 900, but there are",
        ),
        (
            "config.json",
            ["vision_config"],
            {"image_size": 100_000},
            "image_size 100000, which no model has",
        ),
        (
            "config.json",
            ["vision_config"],
            TIMM_FROM_THE_HUB,
            "model_type 'timm_backbone'; LlavaForConditionalGen",
        ),
        (
            "config.json",
            ["text_config"],
            {"model_type": "gemma3n"},
            "model_type 'gemma3n', which is not an LLM",
        ),
        (
            "config.json",
            [],
            {"vision_config": [1]},
            "says vision_config [1], which no model has; needed is an object",
        ),
        ("config.json", [], {"quantization_config": IN_8_BITS}, "cannot be used ("),
        (
            "config.json",
            ["text_config"],
            {"rope_parameters": {"rope_type": "\x1b[31m"}},
            "cannot be used (",
        ),
        ("config.json", [], {"vision_feature_layer": 999}, "cannot be used ("),
        (
            "config.json",
            [],
            {"image_token_index": 10**9},
            "of the tokenizer, but config.json says 1000000000",
        ),
        ("generation_config.json", [], {"eos_token_id": "abc"}, "says eos_token_id 'abc', which"),
        (
            "processor_config.json",
            ["image_processor"],
            {"size": {"height": 30_000, "width": 9}},
            "from 1 to 4,096",
        ),
    ],
)
def test_a_folder_that_no_model_can_have_is_one_line(
    work, llava, tmp_path, capsys, file, places, changes, said
):
    shutil.copytree(llava, tmp_path / "llava")
    edit(tmp_path / "llava" / file, *places, **changes)
    shown = refused(capsys, tmp_path / "llava", work / "one.png", "--prompt", "What?")
    assert said in shown and "\x1b" not in shown


def test_a_file_of_nested_brackets_is_one_line(work, llava, tmp_path, capsys):
    for name in ("generation_config.json", "processor_config.json"):
        folder = shutil.copytree(llava, tmp_path / name)
        (folder / name).write_text("[" * 200_000)
        assert f"{folder / name}: not valid JSON" in refused(capsys, folder, work / "one.png")


def test_what_generation_config_says_beside_the_end_marks_is_left_alone(
    work, llava, tmp_path, capsys
):
    folder = shutil.copytree(llava, tmp_path / "llava")
    edit(folder / "generation_config.json", penalty_alpha=0.6, top_k=4, num_beams=1000)
    asked = [work / "one.png", "--prompt", QUESTION]
    assert say(capsys, folder, *asked) == say(capsys, llava, *asked)


def test_a_template_without_system_turns_says_what_to_leave_out(work, llava, tmp_path, capsys):
    shutil.copytree(llava, tmp_path / "llava")
    template = (tmp_path / "llava" / "chat_template.jinja").read_text()
    refusal = (
        "{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{%- endif %}"
    )
    (tmp_path / "llava" / "chat_template.jinja").write_text(refusal + template)
    said = refused(
        capsys, tmp_path / "llava", work / "one.png", "--system", "Be brief.", "--prompt", "What?"
    )
    assert "no system turns" in said and "leave out the system turn (--system)" in said
