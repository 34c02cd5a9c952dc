"""Score a trained model on tasks of lmms-eval, and keep the scores with the run's own.

run or checkpoint --exported once, into the cache--> Hugging Face folder
    --driver, in lmms-eval's environment--> scores --> RUN/benchmarks.jsonl, which the run's page shows
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmtrain.api.generate import stock_folder
from mmtrain.api.run import Run
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import escape
from mmtrain.benchmarks.environment import lmms_python
from mmtrain.benchmarks.held_out import HELD_OUT, write_questions
from mmtrain.checkpoint.run_folder import BENCHMARKS
from mmtrain.checkpoint.step_folder import find
from mmtrain.report.records import read_run


def benchmark(
    run: Run | str | Path,
    tasks: Sequence[str] = (HELD_OUT,),
    *,
    limit: int | None = None,
    batch_size: int = 16,
    show: Callable[[int, int], None] = lambda *_: None,
    show_export: Callable[[str, int, int], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """Score a run's newest checkpoint, or a checkpoint, on `tasks`; return the records added to RUN/benchmarks.jsonl.

    "held_out" is the run's own held-out set; all other names are lmms-eval's, which downloads their data. `limit`: only
    the first so many questions of each task. `show` gets (questions answered, of all). Raises UserError.
    """
    checkpoint = find(run.folder if isinstance(run, Run) else Path(run))
    read_run(checkpoint.run)  # refuses a checkpoint outside of its run's folder, which gets the records
    if checkpoint.config.model.vision is None:
        raise UserError(
            f"{checkpoint.path}: was trained on text alone, but these tasks ask about pictures. Export it (mmtrain "
            "export RUN --format hf --out OUT), and give OUT to a harness for LLMs: lm_eval --model hf --model_args "
            "pretrained=OUT"
        )
    python, folder = lmms_python(), stock_folder(str(checkpoint.path), show_export)
    with tempfile.TemporaryDirectory(prefix="mmtrain-benchmark-") as temporary:
        request: dict[str, Any] = {"folder": str(folder), "tasks": list(tasks), "limit": limit}
        request |= {"batch_size": batch_size, "questions": temporary}
        request["longest"] = write_questions(checkpoint.config, Path(temporary)) if HELD_OUT in tasks else 0
        file, log = Path(temporary, "request.json"), checkpoint.run / "benchmarks.log"
        file.write_text(json.dumps(request))
        result = _drive(python, file, log, show)
    records = [
        {"time": time.time(), "step": checkpoint.step, "task": task, "limit": limit, "scores": scores}
        | {"answers": result["answers"].get(task), "versions": result["versions"]}
        for task, scores in result["results"].items()
    ]
    with JsonLines(checkpoint.run / BENCHMARKS) as lines:
        for record in records:
            lines.write(**record)
    return records


def _drive(python: Path, request: Path, log: Path, show: Callable[[int, int], None]) -> dict[str, Any]:
    """Run the driver, whose libraries print into `log`, and return its last line. Raises UserError where it fails."""
    last: dict[str, Any] = {}
    command = [python, "-m", "mmtrain.benchmarks.driver", request]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as driver:
        for line in driver.stdout or ():
            last = json.loads(line)
            if "done" in last:
                show(last["done"], last["total"])
    if "results" in last:
        return last
    lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {driver.returncode}"]
    raise UserError(f"{escape(str(last.get('error', lines[-1])), 500)}. What lmms-eval printed is in {log}")
