"""The notebook of the documentation runs from its first cell to its last; a cell that watches a run
shows it.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from json_files import read_json

from mmtrain.api.watch import progress_html

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[2] / "mmtrain" / "docs" / "quickstart.ipynb"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def text_of(cell) -> str:
    shown = [
        output.get("text") or output.data.get("text/html") or output.data["text/plain"]
        for output in cell.outputs
    ]
    return "".join(shown)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [12, 160])
def test_it_trains_watches_asks_and_exports(here, steps):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    plan, watched, scores, report, answer = (
        cell for cell in notebook.cells if cell.cell_type == "code"
    )
    shortened = f'"train.max_steps={steps}", "run.overwrite=true"'
    plan.source = plan.source.replace('"run.overwrite=true"', shortened)
    assert shortened in plan.source
    nbclient.NotebookClient(notebook, timeout=840, resources={"metadata": {"path": here}}).execute()
    assert re.findall(r"^(\d) (\w+) ([\d,]+)", text_of(plan), re.MULTILINE) == [
        ("0", "AdamW", "33,024"),
        *((str(rank), "NoOp", "0") for rank in (1, 2, 3)),
    ]
    assert (
        f"<td>{steps} of {steps}</td>" in text_of(watched)
        and text_of(watched).count("<polyline") == 2
    )
    assert "before           1.5% of 391" in text_of(scores)
    assert "report.html" in text_of(report) and text_of(answer).startswith("'A ")
    assert (here / "exported" / "notebook" / "config.json").exists()
    if steps == 160:
        assert float(re.search(r"after +([\d.]+)%", text_of(scores))[1]) > 90


@pytest.mark.nightly
def test_interrupting_the_cell_saves_and_ends_the_run_if_asked_to(here):
    cells = (
        "import mmtrain\n"
        "config = mmtrain.load_config('example:llava_pp4', ['eval.shards=null', "
        "'train.max_steps=2000'])",
        "run = mmtrain.train(config, show=False)\nrun.watch(stop_when_interrupted=True)",
        "print(run.is_running, run.checkpoints[-1].step == len(run.metrics('train')) > 0)",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": here}})

    def interrupt() -> None:
        metrics, deadline = here / "runs" / "llava_pp4" / "metrics.jsonl", time.monotonic() + 100
        while time.monotonic() < deadline and not (
            metrics.exists() and '"train"' in metrics.read_text()
        ):
            time.sleep(0.2)
        client.km.provisioner.process.send_signal(2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    client.execute()
    thread.join()
    assert text_of(notebook.cells[2]) == "False True\n"


def test_the_table_and_the_curve_are_those_of_the_records():
    steps = [{"step": n, "loss": 2.0 - n, "tokens_per_second": 1234.4} for n in (0, 1)]
    shown = progress_html("<a>", steps, [{"step": 0, "loss": 1.0, "exact_match": 0.25}], 4)
    assert (
        "<td>&lt;a&gt;</td><td>2 of "
        "4</td><td>1.0000</td><td>1,234</td><td>1.0000</td><td>25.0%</td>" in shown
    )
    assert re.findall(r'points="([^"]+)"', shown) == [
        "0.0,0.0 640.0,80.0 640.0,80.0",
        "0.0,80.0 0.0,80.0",
    ]
    assert "waiting for the first step" in progress_html("a", [], [], 0)
    many = [
        {"step": n, "loss": None if n == 5 else 1.0, "tokens_per_second": 1.0}
        for n in range(10_000)
    ]
    assert len(progress_html("a", many, [], 0)) < 10_000


def test_the_notebook_is_shipped_without_outputs():
    content = read_json(NOTEBOOK)
    assert [
        cell["id"]
        for cell in content["cells"]
        if cell.get("outputs") or cell.get("execution_count")
    ] == []
