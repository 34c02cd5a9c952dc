"""A child finds the modules that its parent has found, and none that lie where it happens to
run.
"""

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from processes import ran_python

from mmtrain.runtime.child import python_child


def test_a_child_finds_what_was_found_through_sys_path_and_nothing_in_its_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "only_here.py").write_text("place = 'added'")
    (tmp_path / "yaml.py").write_text(
        "raise SystemExit('the file beside the notebook was imported')"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "added"), *sys.path])
    program = (
        "import mmtrain.config.load, only_here, os, sys; "
        "print(only_here.place, sys.argv[1], os.environ['KEY'])"
    )
    ran = subprocess.run(
        **python_child("-c", program, 7, KEY="value"), capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("added 7 value\n", "")


def test_a_child_runs_the_package_that_its_parent_runs_whatever_else_is_on_the_path(
    tmp_path, monkeypatch
):
    (tmp_path / "mmtrain").mkdir()
    (tmp_path / "mmtrain" / "__init__.py").write_text(
        "raise SystemExit('another clone was imported')"
    )
    # Python passes over what is no string
    monkeypatch.setattr(sys, "path", [tmp_path, str(tmp_path), *sys.path])
    ran = subprocess.run(
        **python_child("-c", "import mmtrain.config"), capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_libraries_that_this_python_does_not_find_by_itself_are_handed_on(monkeypatch):
    base = Path(sysconfig.get_path("stdlib"), "site-packages-extra")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(base)])
    assert str(base) in python_child("-c", "")["env"]["PYTHONPATH"].split(os.pathsep)


def test_another_python_that_the_child_starts_gets_none_of_our_libraries():
    handed_on = python_child("-c", "")["env"]["PYTHONPATH"]
    stdlib = str(Path(subprocess.__file__).parent)
    assert not {stdlib, f"{stdlib}/lib-dynload", *site.getsitepackages()} & set(
        handed_on.split(os.pathsep)
    )


def test_a_module_that_is_run_is_not_one_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("print('a false pip')")
    monkeypatch.chdir(tmp_path)
    ran = subprocess.run(
        **python_child("-m", "pip", "--version", interpreter=Path(sys.executable)),
        capture_output=True,
        text=True,
    )
    assert ran.stdout.startswith("pip "), ran


STARTS_ALL = """
import multiprocessing.forkserver
from mmtrain.runtime.child import shield_multiprocessing
if __name__ == "__main__":
    shield_multiprocessing()
    multiprocessing.forkserver.ensure_running()  # and the resource tracker
    for method in ("forkserver", "spawn"):
        process = multiprocessing.get_context(method).Process(target=print, args=(method,), kwargs={"flush": True})
        process.start()
        process.join()
"""


def test_no_interpreter_that_multiprocessing_starts_imports_from_the_current_folder(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "multiprocessing.py").write_text("print('false')")
    (tmp_path / "main.py").write_text(STARTS_ALL)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = python_child("-c", "")["env"]["PYTHONPATH"]
    ran = ran_python(tmp_path / "main.py", cwd=here, env=environment)
    assert (ran.stdout, ran.stderr) == ("forkserver\nspawn\n", "")
