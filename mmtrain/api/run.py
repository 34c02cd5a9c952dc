"""Start a run from Python as a process of its own, and read its folder, also while it goes on.

RunConfig --YAML--> `python -m mmtrain.launch`, which starts the ranks --files in its folder--> Run
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

import psutil

from mmtrain.api.watch import progress_html
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import print_info, print_note
from mmtrain.checkpoint.run_folder import REPORT, launcher, run_folder
from mmtrain.checkpoint.step_folder import StepFolder, step_folders
from mmtrain.config.load import dump_config, restore_config, validated
from mmtrain.config.load import load_config as read_config
from mmtrain.config.schema import RunConfig
from mmtrain.config.strict_yaml import read_yaml
from mmtrain.report.page import write_page
from mmtrain.runtime.child import python_child
from mmtrain.stock.pretrained import expand_pretrained

WRONG_INPUT = 2  # exit code of the launcher for what the user can mend
LINES_KEPT = 200  # of what the launcher has printed: its message is among the last


class RunError(RuntimeError):
    """A run has ended before its last step; the message is the launcher's.

    `exit_code`: 1 a rank failed, 3 it was stopped and has saved everything, 130 or 143 it was
    stopped at once.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Run:
    """A run by its folder, and its process: one that `train` started, or the folder's holder."""

    def __init__(
        self,
        folder: Path,
        process: subprocess.Popen[str] | None = None,
        show: bool = True,
    ) -> None:
        self.folder = folder
        self._process = process
        self._printed: dict[str, deque[str]] = {}
        self._readers: list[Thread] = []
        if process is None:
            return
        for name in ("stdout", "stderr"):
            lines = self._printed[name] = deque(maxlen=LINES_KEPT)
            arguments = (getattr(process, name), lines, show and getattr(sys, name))
            self._readers.append(Thread(target=_read, args=arguments, daemon=True))
            self._readers[-1].start()

    def __repr__(self) -> str:
        if self.is_running:
            return f"Run({str(self.folder)!r}, under way)"
        return f"Run({str(self.folder)!r})"

    @property
    def is_running(self) -> bool:
        """Whether a process of this user makes this run, here or elsewhere on this machine."""
        if self._process is None:
            return launcher(self.folder) is not None
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run has ended, and return it.

        After Ctrl-C, or `timeout` seconds, the run goes on. Raises subprocess.TimeoutExpired; for a
        run that `train` has started also UserError for what the user can mend, and RunError for any
        other end before the last step.
        """
        try:
            if self._process is None:
                _wait_until_free(self.folder, timeout)
                return self
            code = self._process.wait(timeout)
        except KeyboardInterrupt:
            self._say_it_goes_on()
            raise
        for reader in self._readers:
            reader.join()
        if code == 0:
            return self
        lines = self._printed["stderr"] or list(self._printed["stdout"])[-1:]
        message = "\n".join(lines).removeprefix("error: ")
        message = message or f"the launcher ended with exit code {code}"
        if code == WRONG_INPUT:
            raise UserError(message)
        raise RunError(message, code)

    def watch(self, *, stop_when_interrupted: bool = False, seconds: float = 2.0) -> Run:
        """Wait as `wait` does and show numbers and loss in this notebook's cell, every `seconds`.

        Interrupting the cell leaves the run going, as Ctrl-C in `wait` does, or with
        `stop_when_interrupted` saves and ends it. Raises what `wait` raises; UserError outside a
        notebook.
        """
        if "IPython" not in sys.modules:
            raise UserError("watch() draws in a notebook's cell, and this is none. Use wait()")
        from IPython.display import HTML, display

        cell = display(HTML(""), display_id=True)
        try:
            is_running = True
            while is_running:
                is_running = self.is_running
                steps = scores = []
                max_steps = None
                if self.folder.exists():
                    steps = self.metrics("train")
                if steps:
                    scores = self.scores
                    max_steps = self.config.train.max_steps
                cell.update(HTML(progress_html(self.folder.name, steps, scores, max_steps)))
                if is_running:
                    time.sleep(seconds)
        except KeyboardInterrupt:
            if not stop_when_interrupted:
                self._say_it_goes_on()
                raise
            self.stop()
            return self
        return self.wait()

    def _say_it_goes_on(self) -> None:
        print_note(
            f"the run continues; mmtrain.load_run({str(self.folder)!r}).stop() saves it and ends it"
        )

    def stop(self) -> None:
        """End the run after its current step, and wait until all is saved: `train` resumes it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        elif (process := launcher(self.folder)) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.send_signal(signal.SIGTERM)
            _wait_until_free(self.folder)

    @property
    def config(self) -> RunConfig:
        """Every key of its configuration, resolved; raises UserError where the folder has none."""
        file = self.folder / "config.yaml"
        return restore_config(read_yaml(file), str(file))

    @property
    def plan(self) -> dict[str, Any]:
        """The run's plan as JSON values: what each rank holds, trains and runs."""
        return json.loads((self.folder / "plan.json").read_text())

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """Return records of metrics.jsonl of these kinds (train, ranks, eval, ...), in order."""
        return list(recorded(self.folder / "metrics.jsonl", *kinds))

    def report(self, out: str | Path | None = None) -> Path:
        """Make the run's page, `out` or `report.html` in its folder, and return its path.

        Raises UserError.
        """
        return write_page([self.folder], Path(out or self.folder / REPORT))

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Evaluations on held-out samples: step, loss (nats per supervised token), ..."""
        return self.metrics("eval")

    @property
    def checkpoints(self) -> list[StepFolder]:
        """Its checkpoints, oldest first: each has `path`, `step` and `config`."""
        return [StepFolder(path) for path in reversed(step_folders(self.folder))]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a YAML file, or `example:NAME`, with `key=value` overrides.

    Raises UserError.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    return expand_pretrained(read_config(path, overrides))


def train(
    config: RunConfig | str | Path,
    *,
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    trace_steps: int = 0,
    show: bool = True,
) -> Run:
    """Start or resume a run, as `mmtrain train` does, and return at once.

    The run goes on if this process ends. A configuration may be named as for `load_config`.
    `resume`, `allow_change` and `trace_steps` are the command's options; with `show` its console is
    shown here. Raises UserError for a configuration that is wrong.
    """
    if not isinstance(config, RunConfig):
        config = load_config(config)
    config = validated(config.model_dump(), f"the configuration of run {config.run.name}")
    options = [f"--resume={resume}", *(f"--allow-change={key}" for key in allow_change)]
    if trace_steps:
        options.append(f"--trace={trace_steps}")
    if config.data.allow_pipe:  # which no file may say
        options.append(f"data.allow_pipe=[{', '.join(config.data.allow_pipe)}]")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.seek(0)
        process = subprocess.Popen(
            **python_child("-m", "mmtrain.launch", "/dev/stdin", *options) | {"stdin": file},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends `Run.wait`, and not the run
        )
    return Run(run_folder(config).absolute(), process, show)


def load_run(path: str | Path) -> Run:
    """Return the run in a folder, also one that another process makes.

    Raises UserError where there is none.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: not a run, since it has no config.yaml. "
            "Name the folder run.dir/run.name of a run"
        )
    return Run(folder)


def _wait_until_free(folder: Path, timeout: float | None = None) -> None:
    """Wait until no process holds a run's folder; raises subprocess.TimeoutExpired."""
    begin = time.monotonic()
    while launcher(folder) is not None:
        if timeout is not None and time.monotonic() > begin + timeout:
            raise subprocess.TimeoutExpired(f"the run in {folder}", timeout)
        time.sleep(0.2)


def _read(pipe: IO[str], lines: deque[str], stream: Any) -> None:
    for line in pipe:
        lines.append(line.rstrip("\n"))
        if stream:
            print_info(lines[-1], stream=stream)
