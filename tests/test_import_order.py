"""The architecture, held by a test: a wing imports only wings below it, and planning never imports
torch.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import ran_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmtrain"

# Bottom to top: a wing may import those on the lines above its own. A new wing gets its floor here.
FLOORS = """
base
connectors  layouts
config  runtime
facts
data
stock
inspection
demo  plan
checkpoint
model
engine
calibration
training
exporting  report
launching
launch
api
benchmarks  doctor
cli
__main__
"""
FLOOR_OF = {wing: floor for floor, line in enumerate(FLOORS.split("\n")) for wing in line.split()}
MOST_FILES = 16  # of a room: a folder without the folders in it

# Wings and rooms that import no torch, but for these modules; and modules of other rooms that do
# not.
TORCH_FREE_ROOMS = (
    "base  connectors  layouts  config  runtime  facts  stock  data.shards  "
    "data.prepare  demo  "
    "plan  report  launching  launch"
)
USE_TORCH = "runtime.fork_server  runtime.rendezvous"  # the first imports what a launcher names
TORCH_FREE_MODULES = """
data.samples.records  data.samples.formats  data.samples.sample
data.stream.order  data.stream.catalog
inspection.survey
checkpoint.run_folder  checkpoint.step_folder  checkpoint.resume
engine.trace  training.console
model.weights.projector_files  model.probe
"""
IMPORT_TORCH = {
    "torch",
    "torchvision",
    "transformers",
    "timm",
    "deepspeed",
    "webdataset",
    "safetensors.torch",
}


def module_names() -> list[str]:
    files = (file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*.py"))
    return sorted(".".join(file.parts) for file in files if file.name != "__init__")


def wing_of(name: str) -> str:
    """Return the wing that holds a module: `data.shards.index` -> `data`; a module of the root is
    one itself.
    """
    return name.split(".")[0]


def room_of(name: str) -> str:
    """Return the folder that holds a module: `data.shards.index` -> `data.shards`."""
    return name.rpartition(".")[0] or name


MODULES = module_names()
TORCH_FREE = [
    name
    for name in MODULES
    if name in TORCH_FREE_MODULES.split()
    or (room_of(name) in TORCH_FREE_ROOMS.split() and name not in USE_TORCH.split())
]


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, in its functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parse(name: str) -> ast.AST:
    return ast.parse((PACKAGE / (name.replace(".", "/") + ".py")).read_text())


def own_module(imported: str) -> str | None:
    """The mmtrain module that an import names: `mmtrain.facts.shapes.matches` -> `facts.shapes`."""
    parts = imported.split(".")
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[1:length])
        if parts[0] == "mmtrain" and name in MODULES:
            return name
    return None


@functools.cache
def imported_modules(name: str) -> set[str]:
    return {own_module(full) for full in imports(parse(name))} - {None, name}


def test_every_module_is_in_a_wing_that_has_its_floor():
    assert {wing_of(name) for name in MODULES} == set(FLOOR_OF)


def rooms_and_imports(room_of_module: Callable[[str], str]) -> dict[str, set[str]]:
    """Return the rooms (or wings) that each of them imports."""
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        room = room_of_module(name)
        others = {room_of_module(imported) for imported in imported_modules(name)}
        graph.setdefault(room, set()).update(others - {room})
    return graph


def test_a_room_has_few_files_and_wings_are_printed_with_floor_size_and_edges(capsys):
    files: dict[str, list[str]] = {}
    for name in MODULES:
        files.setdefault(wing_of(name), []).append(name)
    edges = rooms_and_imports(wing_of)
    with capsys.disabled():
        print()
        for wing in FLOOR_OF:
            lines = sum(
                (PACKAGE / (name.replace(".", "/") + ".py")).read_text().count("\n")
                for name in files[wing]
            )
            size = f"{len(files[wing]):2} files {lines:6,} lines"
            print(f"{FLOOR_OF[wing]:2} {wing:15} {size}  imports {', '.join(sorted(edges[wing]))}")
        print(f"{len(FLOOR_OF)} wings, {sum(map(len, edges.values()))} edges")
    rooms = Counter(map(room_of, MODULES))
    assert {room: number for room, number in rooms.items() if number > MOST_FILES} == {}


@pytest.mark.parametrize("name", MODULES)
def test_a_wing_imports_only_wings_below_it(name):
    wing = wing_of(name)
    others = {wing_of(imported) for imported in imported_modules(name)} - {wing}
    assert sorted(other for other in others if FLOOR_OF[other] >= FLOOR_OF[wing]) == []


@pytest.mark.parametrize("unit", [str, room_of, wing_of], ids=["modules", "rooms", "wings"])
def test_nothing_imports_each_other_in_a_circle(unit):
    # raises CycleError, which names the circle
    TopologicalSorter(rooms_and_imports(unit)).prepare()


def test_packages_say_their_purpose_and_import_nothing():
    for file in PACKAGE.rglob("*/__init__.py"):
        tree = ast.parse(file.read_text())
        assert list(imports(tree)) == []
        assert ast.get_docstring(tree), f"{file} does not say its folder's purpose"


def test_the_package_itself_brings_a_name_of_its_api_when_it_is_used():
    code = (
        "import sys, mmtrain; print(sorted(name for name in sys.modules if "
        "name.partition('.')[0] in {known!r}))"
    )
    code = code.format(known=("mmtrain", "torch", "pydantic", "numpy"))
    ran = ran_python("-c", code, cwd=ROOT, check=True)
    assert ran.stdout.strip() == "['mmtrain']"


def test_importing_all_torch_free_modules_leaves_torch_out():
    lines = [f"import mmtrain.{name}" for name in TORCH_FREE]
    code = "\n".join(["import sys", *lines, f"print(sorted({IMPORT_TORCH!r} & set(sys.modules)))"])
    ran = ran_python("-c", code, cwd=ROOT, check=True)
    assert ran.stdout.strip() == "[]"


def test_deepspeed_has_one_importer():
    importers = [
        name
        for name in MODULES
        if any(full.split(".")[0] == "deepspeed" for full in imports(parse(name)))
    ]
    assert importers == ["engine.deepspeed_pipeline"]


def test_no_module_is_a_drawer_for_leftovers():
    assert not {name.split(".")[-1] for name in module_names()} & {
        "utils",
        "common",
        "helpers",
        "misc",
    }


def test_the_reader_of_imports_sees_what_it_must():
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\n")
    assert list(imports(tree)) == ["a.b", "c.d", "e"]
    assert own_module("mmtrain.facts.shapes.matches") == "facts.shapes"
    assert own_module("torch.nn") is None
