"""`mmtrain COMMAND`: every command is named and explained, help costs no torch, and the demo needs
no checkout.
"""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from processes import ran_python

from mmtrain.__main__ import COMMANDS, main
from mmtrain.config.load import load_config


def in_a_process(*arguments: str) -> subprocess.CompletedProcess:
    """`python -c`: main(arguments), then what of the heavy libraries was imported."""
    code = (
        f"import sys; from mmtrain.__main__ import main; code = main({list(arguments)!r});"
        "print(code, sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    return ran_python("-c", code)


def test_help_has_a_line_for_each_command_and_imports_nothing_heavy():
    ran = in_a_process("--help")
    *lines, last = ran.stdout.splitlines()
    assert last == "0 []", ran.stderr
    assert [
        name for name in COMMANDS if sum(line.startswith(f"  {name} ") for line in lines) != 1
    ] == []
    assert max(map(len, lines)) <= 80 and "mmtrain --version" in lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples_under_its_own_name(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert (
        said.startswith(f"usage: mmtrain {command} ")
        and f"    mmtrain {command}" in said
        and "examples:" in said
    )


def test_the_demo_is_planned_by_its_name_without_torch():
    ran = in_a_process("plan", "example:llava_pp4", "parallel.pipeline=2", "run.name=here")
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("here: demo:vision -> projector -> demo:llm") and lines[
        -1
    ].startswith("0 "), ran.stderr
    assert "torch" not in lines[-1]
    assert load_config("example:llava_pp4") == load_config("configs/llava_pp4.yaml")


@pytest.mark.parametrize(
    ("tool", "command"), [("shard_dataset", "shard"), ("export_projector", "export")]
)
def test_a_tool_of_a_checkout_starts_its_command(tool, command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(f"tools/{tool}.py", run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: mmtrain {command} ")
