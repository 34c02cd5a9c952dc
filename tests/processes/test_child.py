"""A child finds the modules that its parent has found, and none that lie where it happens to run."""

import subprocess
import sys

from mmtrain.processes.child import python_child


def test_a_child_finds_what_was_found_through_sys_path_and_nothing_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "only_here.py").write_text("place = 'added'")
    (tmp_path / "yaml.py").write_text("raise SystemExit('the file beside the notebook was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "added"), *sys.path])
    program = "import mmtrain.config.load, only_here, os, sys; print(only_here.place, sys.argv[1], os.environ['KEY'])"
    ran = subprocess.run(**python_child("-c", program, 7, KEY="value"), capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("added 7 value\n", "")


def test_another_python_that_the_child_starts_gets_none_of_our_libraries():
    handed_on = python_child("-c", "")["env"]["PYTHONPATH"]
    assert subprocess.__file__.rpartition("/")[0] not in handed_on and "site-packages" not in handed_on
