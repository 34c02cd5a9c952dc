"""Pickles are programs: where mmtrain opens or writes one, held by reading its source, and files
that try to run.

The rules are about files. Messages between a run's own ranks and workers (torch.distributed's
object collectives, multiprocessing) are pickled by those libraries; they come from no file and are
left out here. So are the readers inside timm and transformers, which the files below are given to
as well.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.connectors import Linear
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.trained.projector import read_projector

ROOT = Path(__file__).parent.parent
READER = "mmtrain/model/weights/files.py"  # for model.projector.init_from and mmtrain convert
WRITER = "mmtrain/exporting/llava.py"  # `--format llava`: mm_projector.bin is a pickle
PICKLING = re.compile(
    r"""(?mx)
    ^\s*(?:import|from)\ (?:_?pickle|dill|cloudpickle|joblib|shelve|marshal)\b
    | \btorch\.(?:(?:serialization|jit|hub|distributed\.checkpoint)\.)?(?:load|save)\w*(?=\()
    | ^\s*from\ torch(?:\.serialization|\.jit|\.hub)?\ import\ .*\b(?:load|save)\b
    | \bdistributed\.checkpoint\b
    | \bread_pickle\b
    | \b(?:weights_only\s*=\s*(?!True\b)|allow_pickle\s*=\s*(?!False\b)|pickle_module\b).*
    """
)


# ---- the rules


def test_pickles_are_opened_in_one_place_and_written_in_one_place():
    sources = [*(ROOT / "mmtrain").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    uses = {
        (use, file.relative_to(ROOT).as_posix())
        for file in sources
        for use in PICKLING.findall(file.read_text())
    }
    assert uses == {("torch.load", READER), ("torch.save", WRITER)}


def test_the_one_reader_asks_torch_for_weights_only():
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / READER).read_text()))
        if isinstance(node, ast.Call)
    ]
    (load,) = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}
    assert options["weights_only"] == "True"
    assert None not in options, "no ** that might say otherwise"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "torch.hub.load_state_dict_from_url(u)",
        "from torch import nn, load as read",
        "import torch.distributed.checkpoint as dcp",
        "import pickle",
        "def f():\n    import joblib.numpy_pickle",
        "torch_load(f, weights_only=False)",
        "np.load(f, allow_pickle = True)",
    ],
)
def test_the_reader_of_sources_sees_what_it_must(source):
    assert PICKLING.search(source)
    assert not PICKLING.search(
        "from safetensors.torch import load\nload(f)\nnp.load(f, allow_pickle=False)"
    )


# ---- files that try


class Call:
    """What is pickled as a call of a function: opened without protection, it runs."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable, tuple]:
        return self.call


def with_tensors(call: Call) -> dict[str, object]:
    tensors = {
        "model.mm_projector.weight": torch.ones(20, 12),
        "model.mm_projector.bias": torch.ones(20),
    }
    return {**tensors, "extra": call}


def a_command(file: Path, marker: Path) -> None:
    torch.save(with_tensors(Call(os.system, f"touch {marker}")), file)


def a_bare_pickle(file: Path, marker: Path) -> None:
    file.write_bytes(pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2))


def a_zip_whose_pickle_was_replaced(file: Path, marker: Path) -> None:
    sound = io.BytesIO()
    torch.save({"model.mm_projector.weight": torch.ones(20, 12)}, sound)
    replaced = pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2)
    with zipfile.ZipFile(sound) as read, zipfile.ZipFile(file, "w") as write:
        for name in read.namelist():
            write.writestr(name, replaced if name.endswith("/data.pkl") else read.read(name))


ATTACKS = (a_command, a_bare_pickle, a_zip_whose_pickle_was_replaced)


def runs_when_opened_without_protection(file: Path, marker: Path) -> bool:
    """Whether the attack is one; takes back what it did."""
    try:
        torch.load(file, weights_only=False)
    except Exception as error:  # after it ran there is nothing to load
        print(error)
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_would_run_is_refused_as_a_projector_and_to_convert_and_does_not_run(
    tmp_path, attack, monkeypatch, capsys
):
    # an environment that was set to open another file
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    file, marker = tmp_path / "pytorch_model.bin", tmp_path / "ran"
    attack(file, marker)
    assert runs_when_opened_without_protection(file, marker)
    with pytest.raises(UserError, match="not a file of plain tensors") as raised:
        read_projector(str(file), [Linear("linear_1", 12, 20)])
    assert str(file) in str(raised.value)
    assert "weights_only" not in str(raised.value), "torch's message recommends switching it off"
    assert main(["convert", str(tmp_path)]) == 2
    assert f"{file}: not a file of plain tensors" in capsys.readouterr().err
    assert not marker.exists() and not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(10**12),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        "text",
        [torch.ones(1)],
    ],
    ids=["four terabytes by a stride of 0", "meta", "sparse", "text", "list"],
)
def test_what_is_no_tensor_with_its_values_in_the_file_is_refused_before_memory_is_taken(
    tmp_path, tensor
):
    torch.save({"model.mm_projector.weight": tensor}, tmp_path / "mm_projector.bin")
    with pytest.raises(UserError, match=r"not a plain tensor|more than named tensors"):
        read_projector(str(tmp_path), [Linear("linear_1", 12, 20)])


@pytest.mark.parametrize("attack", [a_command, a_bare_pickle])
@pytest.mark.parametrize("kind", ["timm", "clip"])
def test_an_encoder_with_pickled_weights_does_not_run_them_either(
    tmp_path, make_tiny, attack, kind
):
    folder = tmp_path / "encoder"
    if kind == "timm":
        make_tiny.make_tiny_vision(folder)
        (folder / "model.safetensors").unlink()
    else:
        CLIPVisionConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2).save_pretrained(
            folder
        )
    file, marker = folder / "pytorch_model.bin", tmp_path / "ran"
    attack(file, marker)
    assert runs_when_opened_without_protection(file, marker)
    # timm's words, and torch's
    with pytest.raises((UserError, pickle.UnpicklingError), match=r"(?i)weights.only"):
        load_vision(str(folder), -2, torch.float32)
    assert not marker.exists()
