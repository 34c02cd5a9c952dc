"""A run that begins with another and names no models has that run's, as its config.yaml says
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.config.load import dump_config, load_config

BASE = """
run: {{name: second}}
model: {model}
data: {{shards: {shards}, template: chat, pack_length: 256}}
train: {{max_steps: 1}}
"""


@pytest.fixture
def before(tmp_path) -> Path:
    """The folder of a run with the demo's native encoder."""
    folder = tmp_path / "before"
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    config = load_config(
        "example:demo_native", ["model.vision.max_positions=32", "model.projector.type=linear"]
    )
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


def begun(tmp_path: Path, model: str, *overrides: str, shards: str = "none.tar"):
    file = tmp_path / "base.yaml"
    file.write_text(BASE.format(model=model, shards=shards))
    return load_config(file, overrides)


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000010"])
def test_the_models_and_the_connector_are_the_other_runs(tmp_path, before, place):
    theirs = load_config(before / "config.yaml").model
    path = before / place
    ours = begun(tmp_path, f"{{init_from: {path}}}", "model.llm.dtype=bfloat16").model
    assert ours.llm == theirs.llm.changed({"dtype": "bfloat16"}) and ours.vision == theirs.vision
    assert (
        ours.projector == theirs.projector.changed({"init_from": str(path)})
        and ours.projector.type == "linear"
    )


def test_a_text_run_and_models_that_are_named_stay(tmp_path, before):
    assert (
        begun(
            tmp_path, f"{{init_from: {before}, vision: null, trainable: [llm.head]}}"
        ).model.vision
        is None
    )
    named = begun(
        tmp_path, f"{{init_from: {before}, llm: {{path: demo:llm}}, vision: {{name: demo:vision}}}}"
    ).model
    assert named.vision.name == "demo:vision" and named.projector.type == "mlp2x_gelu"


def test_a_folder_that_says_no_models_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"model\.init_from: .*/none has no config\.yaml that names its models"
    ):
        begun(tmp_path, f"{{init_from: {tmp_path / 'none'}}}")


@pytest.mark.parametrize(
    "shards", ["/no/such-*.tar", "[demo:train, /no/such-*.tar, 'pipe:curl x']"]
)
def test_a_plan_names_shards_that_are_not_there_and_runs_no_pipe(tmp_path, capsys, shards):
    begun(tmp_path, "{llm: {path: 'demo:llm'}, vision: {name: 'demo:vision'}}", shards=shards)
    overrides = ["eval.shards=/nor/these.tar", "parallel.pipeline=1"]
    assert main(["plan", str(tmp_path / "base.yaml"), *overrides]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "data.shards: no file /no/such-*.tar; a plan needs no data, training does",
        "eval.shards: no file /nor/these.tar; a plan needs no data, training does",
    ]
    assert "= 1 rank; per step" in " ".join(said.out.split())
