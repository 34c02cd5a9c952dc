"""The model card shows names as they are, whatever they would mean in YAML, Markdown or HTML."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load
from markdown_it import MarkdownIt
from markdown_it.token import Token
from step_states import VERSIONS
from tiers import nightly
from untrained_runs import config_of, export, make_checkpoint

from mmtrain.exporting import hf
from mmtrain.exporting.projector_file import origin, run_tensors

NAMES = [
    "a: b --- # !!python object:os.system 'q' \"d\"",
    "pipe | and \\| `tick` ``two``",
    "`",
    "**bold** _it_ ~~s~~ $x$ @someone [link](http:x) ![](x) <http:x> www.example.com",
    "<img src=x onerror=alert(1)> &lt; <!-- \n\n# heading\n- item \x1b[31m",
]


def read(folder: Path) -> tuple[dict, list[Token]]:
    """A card's metadata, and its Markdown as tokens."""
    text = (folder / "README.md").read_text()
    data = metadata_load(folder / "README.md")
    card = ModelCard(text)
    assert card.data.to_dict() == data == yaml.safe_load(text.split("---\n")[1])
    return data, MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)


def shape(tokens: list[Token]) -> list[str]:
    """Its blocks, and the markup inside, code and text as one."""
    kinds = []
    for token in tokens:
        inside = [
            child.type
            for child in token.children or []
            if child.type not in ("text", "code_inline")
        ]
        kinds.append(" ".join([token.type, *inside]))
    return kinds


@pytest.fixture(scope="module")
def usual(tiny, tmp_path_factory) -> tuple[dict, list[str]]:
    """Metadata and shape of a card whose names mean nothing."""
    folder = tmp_path_factory.mktemp("usual")
    for part in ("llm", "vision"):
        (folder / part).symlink_to(tiny / part)
    data, tokens = card_of(tiny, folder, folder / "llm", folder / "vision", dict(VERSIONS))
    return data, shape(tokens)


def card_of(
    tiny: Path, folder: Path, llm: Path, vision: Path, versions: dict
) -> tuple[dict, list[Token]]:
    config = config_of(tiny).changed({"model.llm.path": str(llm), "model.vision.name": str(vision)})
    checkpoint = make_checkpoint(folder / "run", config, versions=versions)
    export(checkpoint, folder / "out")
    return read(folder / "out")


@pytest.mark.parametrize("name", [NAMES[0], *map(nightly, NAMES[1:-1]), NAMES[-1]])
def test_a_name_that_is_markup_is_shown_and_not_obeyed(tiny, tmp_path, usual, name):
    llm, vision = tmp_path / name, tmp_path / f"{name} tower"
    shutil.copytree(tiny / "llm", llm)
    vision.symlink_to(tiny / "vision")
    data, tokens = card_of(tiny, tmp_path, llm, vision, {**VERSIONS, "torch": name})
    assert (data, shape(tokens)) == usual
    shown = "\n".join(child.content for token in tokens for child in token.children or [])
    visible = " ".join(name.split()).replace("\x1b", "\\x1b")
    assert shown.count(visible) >= 5, shown


def test_scores_are_found_among_lines_that_are_no_records_and_a_loss_that_is_no_number_is_unknown(
    tiny, tmp_path
):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), loss="nan")
    lines = [
        "[" * 200_000 + '"eval"',
        '["eval"]',
        '{"kind": "eval"}',
        '{"kind": "eval", "step": 20, "loss": 0.5}',
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "eval", "ste']))
    about = origin(checkpoint, run_tensors(checkpoint))
    assert about["evaluation"] == {"loss": 0.5} and about["training_loss"] is None


def test_models_of_the_hub_are_named_in_the_metadata_and_read_back(tiny, tmp_path, monkeypatch):
    # as the export calls it, with names that the machine need not have
    from mmtrain.exporting.card import write_card

    calls = []
    monkeypatch.setattr(
        hf, "write_card", lambda *arguments, **context: calls.append((arguments, context))
    )
    export(make_checkpoint(tmp_path / "run", config_of(tiny)), tmp_path / "out")
    (folder, about, form), context = calls[0]
    write_card(folder, {**about, "llm": "yes/on", "vision": "1e3/null"}, form, **context)
    assert read(folder)[0]["base_model"] == ["yes/on", "1e3/null"]


def test_a_licence_that_all_models_have_is_the_folders_and_local_folders_are_no_hub_ids(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    models = Path("models")  # models/llm has the form of a hub id
    for part in ("llm", "vision"):
        shutil.copytree(tiny / part, models / part)
    (models / "llm" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# An LLM")
    data, tokens = card_of(
        tiny, tmp_path / "one", models / "llm", models / "vision", dict(VERSIONS)
    )
    text = "\n".join(token.content for token in tokens)
    assert "license" not in data and "base_model" not in data
    assert "apache-2.0" in text and "not named in its folder" in text and str(tmp_path) not in text
    (models / "vision" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    data, _ = card_of(tiny, tmp_path / "two", models / "llm", models / "vision", dict(VERSIONS))
    assert data["license"] == "apache-2.0"
    shutil.copytree(models / "vision", tmp_path / "encoder" / "llm")  # two folders of one name
    (tmp_path / "encoder" / "llm" / "README.md").write_text("---\nlicense: mit\n---\n")
    data, tokens = card_of(
        tiny, tmp_path / "same", models / "llm", tmp_path / "encoder" / "llm", dict(VERSIONS)
    )
    text = "\n".join(token.content for token in tokens)
    assert "license" not in data and "apache-2.0" in text and "mit" in text


HOSTILE = ("[&a [*a]]", "[" * 3000, "!!bool maybe", "x" * 70_000)


@pytest.mark.parametrize("licence", [HOSTILE[0], *map(nightly, HOSTILE[1:])], ids=range(4))
def test_a_licence_that_is_no_name_is_left_out(tiny, tmp_path, licence):
    for part in ("llm", "vision"):
        shutil.copytree(tiny / part, tmp_path / part)
        (tmp_path / part / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    assert (
        "license"
        not in card_of(tiny, tmp_path, tmp_path / "llm", tmp_path / "vision", dict(VERSIONS))[0]
    )


def test_the_control_is_beside_the_scores(tiny, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny))
    control = (
        '{"kind": "eval_permuted", "step": 20, "loss": 2.5, "exact_match": 0.125, "answers": 8}'
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(control + "\n")
    export(checkpoint, tmp_path / "out")
    assert (
        "| control: with shuffled images | 2.5000 nats per token, exact match 12.5% |"
        in (tmp_path / "out" / "README.md").read_text()
    )
