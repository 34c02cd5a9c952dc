"""The page of real runs, in a real Chromium: what it shows against the records, what it asks for,
who can use it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from json_files import read_json, read_lines
from processes import running, steps_of, wait_for
from rank_runs import train

from mmtrain.__main__ import main
from mmtrain.base.printing import escape

Axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="the test extra is not installed"
).Axe
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the test extra's playwright is not installed"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
    pytest.mark.timeout(600),  # the run that all share is made within the first test
]

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 12, 4
SETTINGS = (
    *(
        "parallel.data=2",
        "parallel.pipeline=1",
        "parallel.threads_per_rank=1",
        f"train.max_steps={STEPS}",
    ),
    *(
        f"checkpoint.every_steps={SAVED}",
        "checkpoint.every_minutes=null",
        "data.max_quarantine_rate=0.3",
    ),
    *("eval.fraction=0.2", "eval.every_steps=4", "eval.show_answers=3", "run.name=resumed"),
)
HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x "
    "onerror=window.pwned=1>{{7*7}}\u202e&amp;\"'`${1}"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page in the browser, what it has logged and what it has asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def unfold(self) -> None:
        """Open all that can be."""
        self.page.evaluate(
            "document.querySelectorAll('details').forEach(details => details.open = true)"
        )

    def text(self, section: str) -> str:
        return self.page.locator(f"#{section}").inner_text()

    def table(self, chart: str) -> list[list[str]]:
        """Rows of the table behind a chart, which is opened, its head first."""
        details = self.page.locator(f"#table-{chart}")
        details.evaluate("details => details.open = true")
        details.locator("tbody tr").first.wait_for()
        return details.evaluate(
            "e => [...e.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))"
        )


@pytest.fixture(scope="module")
def show(browser) -> Iterator[Any]:
    pages = []

    def show(where: Path, width: int = 1280, scheme: str = "light") -> Opened:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        opened = Opened(page)
        page.on("console", lambda message: opened.said.append(message.text))
        page.on("pageerror", lambda error: opened.said.append(str(error)))
        page.on("request", lambda request: opened.asked.append(request.url))
        page.goto(where.as_uri())
        return opened

    yield show
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def opened(life, show) -> Opened:
    """The page of that run, everything in it unfolded."""
    opened = show(life.folder / "report.html")
    opened.unfold()
    return opened


def lines(folder: Path, name: str, *kinds: str) -> list[dict]:
    records = read_lines(folder / name)
    return [record for record in records if not kinds or record["kind"] in kinds]


def made(*runs: Path, out: Path | None = None) -> Path:
    arguments = [*map(str, runs), *(() if out is None else ("--out", str(out)))]
    assert main(["report", *arguments]) == 0
    return out or runs[0] / "report.html"


@dataclass
class Life:
    """A run that was killed and went on."""

    folder: Path
    killed: Path  # a copy of its folder before it went on


@pytest.fixture(scope="module")
def life(tiny, tmp_path_factory) -> Life:
    """Two replicas, damaged pictures, SIGKILL between two checkpoints, then the rest."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(tiny / "shards", folder / "shards")
    for tar in (folder / "shards").glob("*.tar"):
        content = bytearray(tar.read_bytes())
        pictures = [found.start() for found in re.finditer(rb"\x89PNG|\xff\xd8\xff", content)]
        for start in pictures[3:12:2]:
            content[start : start + 64] = bytes(64)
        tar.write_bytes(content)
    run, killed = folder / "resumed", folder / "killed"
    begin = functools.partial(train, tiny / "config.yaml", *SETTINGS, *places(folder))

    def begin_in_a_group() -> None:
        os.setsid()
        begin()

    started = multiprocessing.get_context("fork").Process(target=begin_in_a_group)
    started.start()
    wait_for(lambda: steps_of(run) > SAVED + 1, 150, "steps")
    os.killpg(started.pid, signal.SIGKILL)
    started.join()
    shutil.copytree(run, killed)
    begin()
    made(run)
    return Life(run, killed)


def places(folder: Path) -> tuple[str, str]:
    """Return the settings of a run in `folder`, which reads the damaged shards there."""
    return f"run.dir={folder}", f"data.shards={folder}/shards/*.tar"


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory) -> Path:
    """A run like that one, with another rate, on one rank, with adapters' rates apart."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = [
        *SETTINGS,
        "parallel.data=1",
        "optimizer.lr=3e-3",
        "train.max_steps=4",
        "run.name=other",
    ]
    return train(
        tiny / "config.yaml", *overrides, "eval.show_answers=0", f"run.dir={folder}"
    ).folder


# ---- the whole page


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_it_opens_without_errors_or_requests_fits_the_screen_and_keeps_nobody_out(
    life, show, width, scheme
):
    file = life.folder / "report.html"
    assert file.stat().st_size < 2_000_000
    opened = show(file, width, scheme)
    opened.unfold()
    if width == 390:
        found = Axe().run(opened.page)  # roles, names, contrast, ...
        assert found.violations_count == 0, found.generate_report()
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for plot in opened.page.locator(".plot").all():
        assert plot.locator("svg path").count() > 3 and plot.bounding_box()["width"] > 250
    assert opened.said == [] and opened.asked == [file.as_uri()]


def test_a_keyboard_reaches_and_works_everything(life, show):
    page = show(life.folder / "report.html").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.tagName + ':' + document.activeElement.textContent"
            )
        )
        if reached[-1].startswith("BUTTON") and "held-out" in reached[-1]:
            break
    assert any(name.startswith("A:Faults") for name in reached)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    drawn = page.locator("#chart-loss svg path")
    last = drawn.nth(drawn.count() - 1)
    page.keyboard.press("Enter")
    assert (
        page.locator("#chart-loss button", has_text="held-out").get_attribute("aria-pressed")
        == "false"
    )
    # the chart is drawn again with the browser's next frame
    last.wait_for(state="detached", timeout=5000)
    page.keyboard.press("Tab")
    assert "logarithmic" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#table-loss tbody tr").nth(STEPS).wait_for(timeout=5000)


def test_no_text_of_a_run_becomes_markup_or_script(life, show, tmp_path):
    """Every text of every record says something that a page must not do; so does the folder's
    name.
    """
    folder = tmp_path / "<b onmouseover=alert(1)>run&"
    shutil.copytree(life.folder, folder)

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: poison(inner, name) for name, inner in value.items()}
        if isinstance(value, list) and key != "pictures":
            return [poison(inner, key) for inner in value]
        kept = key in ("kind", "file", "pictures") or not isinstance(value, str)
        return value if kept else f"{value} {HOSTILE}"

    for name in ("metrics.jsonl", "answers.jsonl", "quarantine.jsonl", "discarded.jsonl"):
        poisoned = [json.dumps(poison(record)) for record in lines(folder, name)]
        (folder / name).write_text("".join(line + "\n" for line in poisoned))
    for name in ("plan.json", "audit.json"):
        (folder / name).write_text(json.dumps(poison(read_json(folder / name))))
    groups = {f"llm.* {HOSTILE}": 1e-3, HOSTILE: 2e-3}
    last = lines(folder, "metrics.jsonl", "train")[-1]
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(STEPS, STEPS + 3):
            file.write(
                json.dumps({**last, "step": step, "lr_groups": groups, "no_update": HOSTILE}) + "\n"
            )
        failed = {"kind": "checkpoint_failed", "step": 3, "time": last["time"], "error": HOSTILE}
        file.write(json.dumps(failed) + "\n")
    (folder / "bad_steps.jsonl").write_text(
        json.dumps({"step": 3, "parameters": [HOSTILE], "ranks": [0]}) + "\n"
    )
    config = json.dumps({"run": {"name": HOSTILE}, HOSTILE: HOSTILE, "data": {"shards": [HOSTILE]}})
    (folder / "config.yaml").write_text(config)
    opened = show(made(folder, out=tmp_path / "hostile.html"))
    opened.unfold()
    opened.page.locator("#chart-rates .plot").hover()
    assert opened.said == [] and len(opened.asked) == 1
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.evaluate("document.scripts.length") == 3
    assert opened.page.evaluate(
        "[...document.images].every(image => image.src.startsWith('data:image/jpeg'))"
    )
    assert opened.page.locator("h1").inner_text() == folder.name
    for section in ("trained", "learning", "answers", "samples", "faults", "configuration"):
        assert "<img src=x onerror" in opened.text(section), section
    two = show(made(folder, life.folder, out=tmp_path / "two.html"))
    assert two.said == [] and two.page.evaluate("window.pwned") is None


def test_the_vendored_library_is_the_one_that_its_notice_names():
    notice = (ROOT / "mmtrain/report/echarts/NOTICE").read_text()
    script = (ROOT / "mmtrain/report/echarts/echarts.common.min.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() in notice and b'version="6.1.0"' in script
    assert b"</script" not in script.lower() and b"<!--" not in script


# ---- its sections, against the records


def test_the_headline_says_what_was_trained_and_what_went_wrong(life, opened):
    said = opened.text("headline")
    trained = sum(rank["trainable"] for rank in read_json(life.folder / "plan.json")["ranks"][:1])
    samples = sum(record["samples"] for record in lines(life.folder, "metrics.jsonl", "train"))
    quarantined = len(lines(life.folder, "quarantine.jsonl"))
    assert f"projector: {trained:,} parameters" in said and "The audit passed" in said
    assert f"{samples:,} samples" in said and "2 ranks" in said
    assert f"{quarantined} quarantined samples, 1 resume" in said.replace(" and ", ", ")


@pytest.mark.parametrize(
    ("chart", "keys"),
    [
        ("loss", {"training": "loss"}),
        ("rates", {"lr": "lr"}),
        ("norm", {"gradient norm": "grad_norm"}),
        ("speed", {"tokens a second": "tokens_per_second"}),
    ],
)
def test_curves_of_steps_are_those_of_the_records(life, opened, chart, keys):
    head, *rows = opened.table(chart)
    for name, key in keys.items():
        column = head.index(name)
        shown = {float(row[0]): float(row[column]) for row in rows if row[column]}
        recorded = {r["step"] + 1: r[key] for r in lines(life.folder, "metrics.jsonl", "train")}
        assert shown == pytest.approx(recorded, rel=1e-5)


def test_evaluations_and_control_are_those_of_the_records(life, opened):
    recorded = lines(life.folder, "metrics.jsonl", "eval")
    head, *rows = opened.table("scores")
    assert [[float(cell) for cell in row] for row in rows] == [
        pytest.approx([r["step"], r["exact_match"], r["token_accuracy"]], rel=1e-5)
        for r in recorded
    ]
    assert head == ["step", "exact match", "token accuracy"]
    loss_head, *loss_rows = opened.table("loss")
    held_out = {
        float(row[0]): float(row[loss_head.index("held-out samples")])
        for row in loss_rows
        if row[-1]
    }
    assert held_out == pytest.approx({r["step"]: r["loss"] for r in recorded}, rel=1e-5)
    (control,) = lines(life.folder, "metrics.jsonl", "eval_permuted")
    row = opened.page.locator("#evaluations tr", has_text="control").inner_text().split("\t")
    assert row[3:5] == [f"{control['exact_match']:.1%}", f"{control['token_accuracy']:.1%}"]


def test_questions_have_their_pictures_and_answers_of_before_and_after(life, opened):
    page = opened.page
    recorded = lines(life.folder, "answers.jsonl")
    before, after = (sorted(r["key"] for r in recorded if r["step"] == step) for step in (0, STEPS))
    assert before == after and len(after) == 3
    for answer in recorded:
        card = page.locator("article", has_text=answer["key"])
        said = card.inner_text()
        assert answer["truth"] in said and escape(answer["given"]) in said
        assert card.locator("img").count() == len(answer["pictures"])
    assert page.evaluate(
        "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
    )
    assert page.locator("article img").count() > 0


def test_times_and_memory_of_ranks_are_those_of_records_and_plan(life, opened):
    plan = read_json(life.folder / "plan.json")["ranks"]
    records = lines(life.folder, "metrics.jsonl", "ranks")
    steps = sum(record["steps"] for record in records)
    assert steps == STEPS - 2, "the first step of a process pays for warm-up"
    _, *rows = opened.table("ranks")
    for rank, row in enumerate(rows):
        compute = sum(record["compute_seconds"][rank] for record in records) / steps
        assert float(row[1]) == pytest.approx(compute, rel=1e-3)
        assert row[6] == f"{plan[rank]['idle_share']:.1%}"
    _, *rows = opened.table("memory")
    peaks = [record["peak_memory_bytes"] for record in records]
    for rank, row in enumerate(rows):
        assert float(row[-1]) == pytest.approx(max(peak[rank] for peak in peaks) / 2**20, rel=1e-3)
        assert float(row[-2]) == pytest.approx(plan[rank]["total_bytes"] / 2**20, rel=1e-3)


def test_samples_add_up_as_recorded_and_the_quarantined_are_listed(life, opened):
    said = opened.text("samples")
    for epoch in lines(life.folder, "metrics.jsonl", "epoch"):
        assert (
            f"{epoch['read']:,}\t{epoch['trained']:,}\t{epoch['quarantined']:,}\t{epoch['overlong']:,}"
            in said
        )
    quarantined = lines(life.folder, "quarantine.jsonl")
    assert quarantined and all(
        fault["key"] in said and fault["reason"] in said for fault in quarantined
    )


def test_faults_and_resumes_are_listed(life, opened):
    (resume,) = lines(life.folder, "metrics.jsonl", "resume")
    said = opened.text("faults")
    assert re.search(rf"\n[\d:]+\t{resume['step']}\tresume\t", said), said
    lost = [r for r in lines(life.folder, "discarded.jsonl") if r["record"].get("kind") == "train"]
    assert f"{len(lost)} step" in said and "went back to step" in said
    assert "left out" not in said, "every record of a run is understood"


def test_a_run_without_an_end_says_where_its_records_end(life, show):
    steps = len(lines(life.killed, "metrics.jsonl", "train"))
    opened = show(made(life.killed))
    assert f"No end is recorded: the last step is {steps} of {STEPS}" in opened.text("status")
    assert "No audit" in opened.text("headline") and opened.said == []


@pytest.mark.nightly
def test_several_runs_share_their_charts_and_say_where_their_configurations_differ(
    life, other, show, tmp_path
):
    opened = show(made(life.folder, other, out=tmp_path / "compared.html"))
    assert opened.page.locator("h1").inner_text() == "resumed and other" and opened.said == []
    head, *rows = opened.table("loss")
    assert head == ["step", "resumed", "other"]
    for column, folder in enumerate((life.folder, other), 1):
        shown = {float(row[0]): float(row[column]) for row in rows if row[column]}
        recorded = {r["step"] + 1: r["loss"] for r in lines(folder, "metrics.jsonl", "train")}
        assert shown == pytest.approx(recorded, rel=1e-5)
    keys = opened.page.locator("#keys tbody tr").all_inner_texts()
    differing = dict(row.split("\t", 1) for row in keys)
    rates = [
        re.search(r"\n  lr: (\S+)", (folder / "config.yaml").read_text())[1]
        for folder in (life.folder, other)
    ]
    assert [float(cell) for cell in differing["optimizer.lr"].split("\t")] == [*map(float, rates)]
    assert {
        "parallel.data",
        "train.max_steps",
        "eval.show_answers",
        "data.shards",
    } < differing.keys()
    assert "seed" not in " ".join(differing)


# ---- made by the launcher


@pytest.mark.nightly
def test_a_page_that_cannot_be_written_is_one_line_and_no_failure(tiny, tmp_path):
    run = tmp_path / "resumed"
    command = ["-m", "mmtrain.launch", tiny / "config.yaml", *SETTINGS, f"run.dir={tmp_path}"]
    with running(command, tmp_path) as ended:
        wait_for(lambda: steps_of(run), 150, "the first step")
        (run / "report.html" / "in the way").mkdir(parents=True)
        assert ended.wait(200) == 0 and "results: " in ended.stdout
    said = [line for line in ended.stderr.splitlines() if "page" in line]
    assert len(said) == 1 and "was not made" in said[0] and "report.html" in said[0]
