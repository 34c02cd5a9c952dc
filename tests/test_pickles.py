"""Pickles are programs: where mmtrain opens or writes one, held by reading its source, and files that try to run.

The rules are about files. Messages between a run's own ranks and workers (torch.distributed's object collectives,
multiprocessing) are pickled by those libraries; they come from no file and are left out here. So are the readers inside
timm and transformers, which the files below are given to as well.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.config.model import ProjectorSection
from mmtrain.models.modules.projector import read_projector
from mmtrain.models.modules.vision import load_vision

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "mmtrain").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])

READER = "mmtrain/models/weights/files.py"  # for model.projector.init_from and mmtrain convert
WRITER = "mmtrain/exporting/llava.py"  # `--format llava`: mm_projector.bin is a pickle
ALLOWED = {("torch.load", READER), ("torch.save", WRITER)}

MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FUNCTIONS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.jit.save",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.save",
    "pandas.read_pickle",
}
SAFE_VALUES = {"weights_only": "True", "allow_pickle": "False", "pickle_module": "None"}


def pickling(tree: ast.AST) -> Iterator[str]:
    """What a module does with pickles: functions and modules by their full names, options by their values."""
    full_names: dict[str, str] = {}  # of what the module's own names stand for
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
            full_names |= {a.asname or a.name.partition(".")[0]: a.asname and a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        yield from (f"import {name}" for name in imported if name.partition(".")[0] in MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            full = ((full_names.get(first) or first) + dot + rest).replace("torch.serialization.", "torch.")
            if first in full_names and full in FUNCTIONS:
                yield full
        elif isinstance(node, ast.keyword) and node.arg in SAFE_VALUES:
            value = ast.unparse(node.value)
            if value != SAFE_VALUES[node.arg]:
                yield f"{node.arg}={value}"


# ---- the rules


def test_pickles_are_opened_in_one_place_and_written_in_one_place():
    found = {
        (use, file.relative_to(ROOT).as_posix()) for file in SOURCES for use in pickling(ast.parse(file.read_text()))
    }
    assert sorted(found - ALLOWED) == []
    assert ("torch.load", READER) in found, "the reader has moved: the next test would look at nothing"


def test_the_one_reader_asks_torch_for_weights_only():
    calls = [node for node in ast.walk(ast.parse((ROOT / READER).read_text())) if isinstance(node, ast.Call)]
    (load,) = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}
    assert options["weights_only"] == "True"
    assert None not in options, "no ** that might say otherwise"


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import torch\ntorch.load(f)", ["torch.load"]),
        ("import torch as t\nt.save(x, f)", ["torch.save"]),
        ("from torch import load as read\nread(f)", ["torch.load"]),
        ("import torch.distributed.checkpoint as dcp\ndcp.save(x)", ["torch.distributed.checkpoint.save"]),
        ("import pickle", ["import pickle"]),
        ("def f():\n    import joblib.numpy_pickle", ["import joblib.numpy_pickle"]),
        ("import torch\ntorch.load(f, weights_only=False)", ["torch.load", "weights_only=False"]),
        ("read(f, weights_only=flag)", ["weights_only=flag"]),
        ("from safetensors.torch import load, save_file\nimport json\njson.load(f)\nload(f)\ntorch = 1", []),
    ],
)
def test_the_reader_of_sources_sees_what_it_must(source, uses):
    assert sorted(set(pickling(ast.parse(source)))) == uses


# ---- files that try


class Call:
    """What is pickled as a call of a function: opened without protection, it runs."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable, tuple]:
        return self.call


def with_tensors(call: Call) -> dict[str, object]:
    tensors = {"model.mm_projector.weight": torch.ones(20, 12), "model.mm_projector.bias": torch.ones(20)}
    return {**tensors, "extra": call}


def a_command(file: Path, marker: Path) -> None:
    torch.save(with_tensors(Call(os.system, f"touch {marker}")), file)


def a_call_in_place_of_a_tensor(file: Path, marker: Path) -> None:
    torch.save({"model.mm_projector.weight": Call(os.mkdir, str(marker))}, file)


def a_bare_pickle(file: Path, marker: Path) -> None:
    file.write_bytes(pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2))


def a_zip_whose_pickle_was_replaced(file: Path, marker: Path) -> None:
    sound = io.BytesIO()
    torch.save({"model.mm_projector.weight": torch.ones(20, 12)}, sound)
    replaced = pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2)
    with zipfile.ZipFile(sound) as read, zipfile.ZipFile(file, "w") as write:
        for name in read.namelist():
            write.writestr(name, replaced if name.endswith("/data.pkl") else read.read(name))


ATTACKS = (
    a_command,
    a_call_in_place_of_a_tensor,
    a_bare_pickle,
    a_zip_whose_pickle_was_replaced,
)


def runs_when_opened_without_protection(file: Path, marker: Path) -> bool:
    """Whether the attack is one; takes back what it did."""
    try:
        torch.load(file, weights_only=False)
    except Exception as error:  # after it ran there is nothing to load
        print(error)
    ran = marker.exists()
    if marker.is_dir():
        marker.rmdir()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_mm_projector_bin_that_would_run_is_refused_and_does_not_run(tmp_path, attack, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # an environment that was set to open another file
    file, marker = tmp_path / "mm_projector.bin", tmp_path / "ran"
    attack(file, marker)
    assert runs_when_opened_without_protection(file, marker)
    with pytest.raises(UserError, match="not a file of plain tensors") as raised:
        read_projector(str(file), ProjectorSection(type="linear"), 12, 20)
    assert not marker.exists()
    assert str(file) in str(raised.value)
    assert "weights_only" not in str(raised.value), "torch's message recommends switching it off"


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_to_convert_that_would_run_is_refused_and_does_not_run(tmp_path, attack, capsys):
    file, marker = tmp_path / "pytorch_model.bin", tmp_path / "ran"
    attack(file, marker)
    assert runs_when_opened_without_protection(file, marker)
    assert main(["convert", str(tmp_path)]) == 2
    assert not marker.exists()
    assert f"{file}: not a file of plain tensors" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(10**12), torch.empty(3, device="meta"), torch.eye(3).to_sparse(), "text", [torch.ones(1)]],
    ids=["four terabytes by a stride of 0", "meta", "sparse", "text", "list"],
)
def test_what_is_no_tensor_with_its_values_in_the_file_is_refused_before_memory_is_taken(tmp_path, tensor):
    torch.save({"model.mm_projector.weight": tensor}, tmp_path / "mm_projector.bin")
    with pytest.raises(UserError, match=r"no plain tensor|other than named tensors"):
        read_projector(str(tmp_path), ProjectorSection(type="linear"), 12, 20)


@pytest.mark.parametrize("attack", [a_command, a_bare_pickle])
@pytest.mark.parametrize("kind", ["timm", "clip"])
def test_an_encoder_with_pickled_weights_does_not_run_them_either(tmp_path, make_tiny, attack, kind):
    folder = tmp_path / "encoder"
    if kind == "timm":
        make_tiny.make_tiny_vision(folder)
        (folder / "model.safetensors").unlink()
    else:
        CLIPVisionConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2).save_pretrained(folder)
    file, marker = folder / "pytorch_model.bin", tmp_path / "ran"
    attack(file, marker)
    assert runs_when_opened_without_protection(file, marker)
    with pytest.raises((UserError, pickle.UnpicklingError), match=r"(?i)weights.only"):  # timm's words, and torch's
        load_vision(str(folder), -2, torch.float32)
    assert not marker.exists()
