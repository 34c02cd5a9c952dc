"""The architecture, held by a test: a module imports only modules above it, and planning never imports torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmtrain"

# Top to bottom: a module may import those before it. A new module gets its place here.
TABLE = """
errors  cache  console_stream  printing
rank_records  stop  rank  gpus
data.records
small_files  strict_yaml  config_problems  config
geometry
demo.names
plan.model_files  plan.model_numbers  plan.vision_files
plan.chat_template  plan.families  plan.recorded_shapes  plan.shapes
plan.block_costs  plan.costs  plan.calibration  plan.timings
plan.schedule  plan.deadlocks  plan.schedule_check  plan.simulate  plan.run_ahead
plan.memory  plan.cut  plan.search
plan.layout  plan.refusals  plan.planner
time_use  trace  metrics  progress
step_folder  resume  run_folder
data.samples  data.order  data.fill  data.retry  data.index
data.bounded_jinja  data.chat  data.tokenizer_file  data.templates  data.text_lengths
data.archive  data.verify  data.scan  data.sharding
demo.scene  demo.text  demo.pictures  demo.data
data.piped  data.shard_list  data.indexing
data.llava_json  data.shard_jobs  data.shard_intake  data.shard_resume
data.catalog  data.survey  data.reader  data.anatomy
data.images  data.packs  data.loader  data.account
model.weights  model.bookends  model.kernels  model.attention  model.last_layer  model.language
model.tiny  model.parity  model.probe
model.vision
model.pickled  model.projector_files  model.init_from
model.projector  model.fusion  model.loss  model.trainable
model.stage
optimizer
step_clock  channels  bad_steps  calibration_work  warm_up  engine
allocations  message_costs  calibration_solution  calibrate
audit
checkpoint  restore
evaluation
export.formats  export.tensors
export.timm_vit  export.vision
export.markdown  export.chat_template  export.image_processor  export.processor  export.processor_check
export.folder  export.origin  export.projector_file  export.llava
export.answer_marks  export.language  export.stock  export.batched  export.card  export.hf  export.verify
train
fork_server  rendezvous  supervise  launch
"""
ORDER = TABLE.split()

TORCH_FREE_TABLE = """
errors  cache  console_stream  printing  small_files  strict_yaml  config_problems  config  geometry  metrics
rank_records  rank  gpus  supervise  run_folder  launch  step_folder  stop  resume  time_use  trace
progress  data.records  data.samples  data.order  data.retry  data.index  data.archive  data.shard_list  data.scan
data.indexing  data.catalog  data.reader  data.sharding  data.llava_json  data.shard_intake  data.shard_jobs
data.shard_resume  data.fill  data.verify  data.survey  data.piped  data.tokenizer_file
demo.names  demo.scene  demo.text  demo.pictures  demo.data  model.projector_files
"""
TORCH_FREE = [name for name in ORDER if name.startswith("plan.") or name in TORCH_FREE_TABLE.split()]
IMPORT_TORCH = {"torch", "torchvision", "transformers", "timm", "deepspeed", "webdataset", "safetensors.torch"}
ONLY_IMPORTER = {"deepspeed": "engine", "mmtrain.train": "launch fork_server"}


def module_names() -> list[str]:
    files = (file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*.py"))
    return sorted(".".join(file.parts) for file in files if file.name != "__init__")


def imports(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Dotted names that a module imports; with `at_import` only those that importing it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_import and runs_later(node)):
            yield from imports(node, at_import=at_import)


def runs_later(node: ast.AST) -> bool:
    """Whether importing the module does not run this: the body of a function, imports for type checkers."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def parse(name: str) -> ast.AST:
    return ast.parse((PACKAGE / (name.replace(".", "/") + ".py")).read_text())


def own_module(imported: str) -> str | None:
    """The mmtrain module that an import names: `mmtrain.plan.shapes.matches` -> `plan.shapes`."""
    parts = imported.split(".")
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[1:length])
        if parts[0] == "mmtrain" and name in ORDER:
            return name
    return None


def test_every_module_has_its_place_in_the_order():
    assert len(set(ORDER)) == len(ORDER)
    assert module_names() == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_modules_above_it(name):
    imported = {own_module(full) for full in imports(parse(name), at_import=False)} - {None}
    above = ORDER[: ORDER.index(name)]
    assert sorted(imported - set(above)) == []


def test_packages_import_nothing_so_that_one_module_does_not_bring_in_its_neighbours():
    for file in PACKAGE.rglob("__init__.py"):
        assert list(imports(ast.parse(file.read_text()), at_import=False)) == []


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_torch_free_module_imports_nothing_that_brings_torch(name):
    for full in imports(parse(name), at_import=True):
        assert not any(full == heavy or full.startswith(heavy + ".") for heavy in IMPORT_TORCH), full
        assert own_module(full) in (None, *TORCH_FREE), full


def test_importing_all_torch_free_modules_leaves_torch_out():
    lines = [f"import mmtrain.{name}" for name in TORCH_FREE]
    code = "\n".join(["import sys", *lines, f"print(sorted({IMPORT_TORCH!r} & set(sys.modules)))"])
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("imported", ONLY_IMPORTER)
def test_deepspeed_and_the_training_loop_have_one_importer(imported):
    importers = [
        name
        for name in ORDER
        if any(full == imported or full.startswith(imported + ".") for full in imports(parse(name), at_import=False))
    ]
    assert set(importers) <= set(ONLY_IMPORTER[imported].split())


def test_no_module_is_a_drawer_for_leftovers():
    assert not {name.split(".")[-1] for name in module_names()} & {"utils", "common", "helpers", "misc"}


def test_the_reader_of_imports_sees_what_it_must():
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g\n")
    assert list(imports(tree, at_import=True)) == ["a.b", "c.d"]
    assert list(imports(tree, at_import=False)) == ["a.b", "c.d", "e", "g"]
    assert own_module("mmtrain.plan.shapes.matches") == "plan.shapes"
    assert own_module("torch.nn") is None
