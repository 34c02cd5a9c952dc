"""The file of encoder and projector for llama.cpp holds what the export holds, under the names that
llama.cpp reads.
"""

from __future__ import annotations

import json
import sys

import export_mmproj
import gguf
import numpy as np
import pytest
from json_files import read_json
from safetensors.torch import load_file
from untrained_runs import export


def test_tensors_and_settings_are_those_of_the_export(checkpoint, tmp_path, monkeypatch):
    export(checkpoint, tmp_path / "hf")
    monkeypatch.setattr(
        sys, "argv", ["export_mmproj.py", str(tmp_path / "hf"), str(tmp_path / "mmproj.gguf")]
    )
    export_mmproj.main()
    file = gguf.GGUFReader(tmp_path / "mmproj.gguf")
    config = read_json(tmp_path / "hf" / "config.json")
    (used,) = file.fields["clip.vision.feature_layer"].contents()
    assert used == config["vision_config"]["num_hidden_layers"] + 1 + config["vision_feature_layer"]
    assert file.fields["clip.projector_type"].contents() == "mlp"
    written = {tensor.name: np.array(tensor.data) for tensor in file.tensors}
    assert len(written) == 2 * (2 + used * 8) + 3
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    (projector,) = (
        stored[name] for name in stored if name.endswith("multi_modal_projector.linear_2.weight")
    )
    np.testing.assert_array_equal(written["mm.2.weight"], projector.half().numpy())
    (position,) = (stored[name] for name in stored if name.endswith("position_embedding.weight"))
    np.testing.assert_array_equal(written["v.position_embd.weight"], position.numpy())


def test_a_clip_and_another_class_are_refused(tmp_path, monkeypatch, capsys):
    llava = {"model_type": "llava", "projector_hidden_act": "gelu"}
    for config, said in (
        (llava | {"vision_config": {"model_type": "clip_vision_model"}}, "wrong patches of a CLIP"),
        ({"model_type": "aya_vision"}, "is no Llava"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(
            sys, "argv", ["export_mmproj.py", str(tmp_path), str(tmp_path / "out.gguf")]
        )
        with pytest.raises(SystemExit):
            export_mmproj.main()
        assert said in capsys.readouterr().err
