"""`mmtrain init`: lists the shipped configurations and copies one."""

from pathlib import Path

from mmtrain.__main__ import main
from mmtrain.config.load import example_names

CONFIGS = Path(__file__).parents[2] / "configs"


def test_it_lists_each_shipped_configuration_with_what_it_is_for(capsys):
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert example_names() == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    for name in example_names():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert len(line.split()) > 3, "its comment begins with what it is for"


def test_it_copies_one_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, file in (
        (["llava_pp4"], "llava_pp4.yaml"),
        (["example:llava_pp4", "--out", "mine.yaml"], "mine.yaml"),
    ):
        assert main(["init", *arguments]) == 0
        assert capsys.readouterr().out == f"wrote {file}; next: mmtrain plan {file}\n"
        assert (tmp_path / file).read_bytes() == (CONFIGS / "llava_pp4.yaml").read_bytes()
    (tmp_path / "mine.yaml").write_text("changed")
    assert main(["init", "llava_pp4", "--out", "mine.yaml"]) == 2
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "changed"


def test_a_name_that_there_is_not_is_answered_with_the_one_that_is_near(capsys):
    for command in (["init", "llava_pp5"], ["plan", "example:llava_pp5"]):
        assert main(command) == 2
        assert (
            "no shipped configuration is called llava_pp5. Did you mean llava_pp4?"
            in capsys.readouterr().err
        )
    assert main(["init", "../configs/llava_pp4"]) == 2
