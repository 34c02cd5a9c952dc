"""README and the documentation tell the truth: links, commands, keys, printed plans, generated
pages, the site.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mmtrain.__main__ import COMMANDS, main
from mmtrain.config.keys import all_fields
from mmtrain.config.load import example_names, load_config
from mmtrain.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "mmtrain" / "docs"
PAGES = [
    page
    for page in sorted((DOCS / "pages").glob("*.md"))
    if page.name not in ("keys.md", "commands.md")
]
WINGS = [
    file
    for file in (ROOT / "mmtrain").glob("**/README.md")
    if "examples" not in file.parts and "docs" not in file.parts
]
WINGS += [ROOT / "configs" / "README.md", *(ROOT / "tools").glob("**/README.md")]
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *WINGS]
KEYS = {path for path, _ in all_fields(RunConfig)}
SECTIONS = "|".join(sorted({path[0] for path in KEYS}))


def blocks(page: Path, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def words(*pages: Path) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_there_is_not_more_to_read_than_was_promised():
    assert words(ROOT / "README.md") <= 1_000
    assert words(*PAGES) <= 11_800
    assert max(len(page.read_text().splitlines()) for page in WINGS) <= 12
    assert len(re.findall(r"^:", (DOCS / "pages" / "glossary.md").read_text(), re.MULTILINE)) <= 25


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        path, _, heading = "".join(target).partition("#")
        if path.startswith("http") or path in ("keys.md", "commands.md"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), path
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in [
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
            ], heading


@pytest.mark.parametrize("name", ["how_it_works", "extending"])
def test_every_module_that_is_named_exists(name):
    text = (DOCS / "pages" / f"{name}.md").read_text()
    modules = re.findall(r"`([\w/]+/\w+\.py)`", text)
    roots = (ROOT / "mmtrain", ROOT)
    missing = [path for path in modules if not any((root / path).exists() for root in roots)]
    assert modules and missing == []


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_that_is_named_exists(page):
    for named in re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)(?=[:=`])", page.read_text()):
        if not re.search(r"\.\.\.$|\.(json|safetensors)$", named):  # a group of keys; files
            assert tuple(named.split(".")) in KEYS, named


def commands(page: Path) -> list[list[str]]:
    """The words of each `mmtrain ...` in a page's blocks for a shell, with what behind | and ||
    left out.
    """
    lines = "".join(
        blocks(page, "bash") + [block.split("\n\n")[0] + "\n" for block in blocks(page)]
    )
    found = re.findall(r"(?:^|\&\& |srun )(mmtrain .+)$", lines.replace("\\\n", " "), re.MULTILINE)
    split = [shlex.split(re.sub(r"\$\([^)]*\)", "x", line), comments=True) for line in found]
    return [
        line[1 : next((n for n, word in enumerate(line) if word in ("|", "||")), len(line))]
        for line in split
    ]


@pytest.mark.parametrize(
    "page", [page for page in ALL if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_has_options_and_keys_that_exist(page):
    for name, *arguments in commands(page):
        if arguments == ["--help"] or name == "--help":
            continue
        options = importlib.import_module(COMMANDS[name][0]).parse_arguments(arguments)
        config = getattr(options, "config", None)
        if config is not None and config.startswith("example:"):
            load_config(config, getattr(options, "overrides", getattr(options, "changes", [])))


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_that_is_shown_is_a_part_of_a_configuration(page):
    for block in blocks(page, "yaml"):
        for section, content in yaml.safe_load(block).items():
            assert all((section, key) in KEYS for key in content), (section, content)


SHOWN = [
    (page, block) for page in ALL for block in blocks(page) if block.startswith("mmtrain plan")
]


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(*shown, marks=[pytest.mark.nightly] * ("--suggest" in shown[1]))
        for shown in SHOWN
    ],
    ids=[f"{page.name} {block.splitlines()[0]}" for page, block in SHOWN],
)
def test_a_plan_that_is_shown_is_the_one_that_is_printed(page, block, capsys):
    command, _, shown = block.partition("\n\n")
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_the_pages_name_each_shipped_configuration():
    text = " ".join(page.read_text() for page in PAGES)
    assert [name for name in example_names() if not re.search(rf"\b{name}\b", text)] == []


def build_site() -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference_pages.py"],
        check=True,
        env={"COLUMNS": "100"},
    )
    build = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    built = subprocess.run(build, cwd=DOCS, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.mark.nightly
def test_the_site_builds_strictly_with_its_generated_pages():
    pytest.importorskip("zensical")
    build_site()
    site = DOCS / "site"
    assert {page.stem for page in PAGES} - {"index"} <= {folder.name for folder in site.iterdir()}
    keys, commands = ((DOCS / "pages" / name).read_text() for name in ("keys.md", "commands.md"))
    assert all(
        f"| `{'.'.join(path)}` |" in keys for path in KEYS if path not in {p[:-1] for p in KEYS}
    )
    assert all(f"## {name}\n" in commands for name in COMMANDS)
