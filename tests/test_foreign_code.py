"""Python that a stranger wrote does not run: in a model's folder, or in the current one.

transformers runs Python that lies in a model's folder where a call does not forbid it, and asks on
standard input. config.json may also name an attention kernel, which is downloaded and run where a
call does not name another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "mmtrain").rglob("*.py")), *sorted((ROOT / "tools").rglob("*.py"))]


def unguarded(text: str) -> Iterator[str]:
    """Calls that load or build a model, tokenizer, processor or config without the arguments that
    forbid it.
    """
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if node.func.attr not in ("from_pretrained", "from_config"):
            continue
        loads_code = name.startswith("Auto") or "Processor" in name or "Tokenizer" in name
        if loads_code and given.get("trust_remote_code") != "False":
            yield f"line {node.lineno}: {name} without trust_remote_code=False"
        builds_model = any(part in name for part in ("Model", "For", "model_class", "part_class"))
        builds_model = builds_model and not name.startswith("PeftModel")  # which is given a model
        if builds_model and "attn_implementation" not in given:
            yield f"line {node.lineno}: {name} without attn_implementation"


def test_every_call_forbids_code_and_kernels_of_a_models_folder():
    found = {str(file.relative_to(ROOT)): list(unguarded(file.read_text())) for file in FILES}
    assert {file: calls for file, calls in found.items() if calls} == {}


def test_the_reader_of_calls_sees_what_it_must():
    text = (
        "AutoTokenizer.from_pretrained(f)\nLlamaForCausalLM.from_pretrained(f, "
        "trust_remote_code=None)\n"
    )
    lacking = [line.split(" without ")[1] for line in unguarded(text)]
    assert lacking == ["trust_remote_code=False", "attn_implementation"]
    assert not list(
        unguarded(
            "CLIPVisionModel.from_pretrained(f, attn_implementation='sdpa')\nmodels.load(f)\n"
        )
    )


# Programs that are no Python of ours: each is named by the command line, or is another program.
# of `pipe:` shards; `energon prepare`, which the interpreter's folder holds
OTHER_PROGRAMS = {
    "mmtrain/data/shards/shard_list.py": 1,
    "tools/bench/bench_data_rivals.py": 2,
    "tools/bench/bench_data_servers.py": 2,  # the S3 server, beside this Python
}
STARTS = r"subprocess\.(run|Popen|call|check_call|\w+output)|os\.(system|popen|posix_spawn\w*|exec\w+|spawn\w+)"
OWN = "mmtrain/runtime/child.py"


def unshielded(text: str) -> Iterator[str]:
    """Starts of interpreters that could import from the current folder."""
    if not re.search(
        r"subprocess|multiprocessing|executable|\bos\.(system|popen|posix_spawn|exec|spawn)", text
    ):
        return
    tree = ast.parse(text)
    shielded = "shield_multiprocessing()" in text
    made = {ast.unparse(node.targets[0]) for node in ast.walk(tree) if _makes_child(node)}
    # a function's parameter, which its callers make by python_child
    made |= {"command"} if "python_child(" in text else set()
    for node in ast.walk(tree):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(STARTS, name):
            given = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
            if not any(one.startswith("python_child(") or one in made for one in given):
                yield f"line {node.lineno}: {name} without python_child"
        if isinstance(node, ast.Attribute) and node.attr in ("executable", "_base_executable"):
            yield f"line {node.lineno}: {node.attr}"
        if (
            isinstance(node, ast.Constant)
            and node.value in ("spawn", "forkserver")
            and not shielded
        ):
            yield f"line {node.lineno}: {node.value} without shield_multiprocessing"
        if name.endswith("forkserver.ensure_running") and not shielded:
            yield f"line {node.lineno}: {name} without shield_multiprocessing"


def _makes_child(node: ast.AST) -> bool:
    """Whether a node is `NAME = python_child(...)`."""
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("python_child(")


def test_every_interpreter_is_started_so_that_it_imports_nothing_from_the_current_folder():
    found = {str(file.relative_to(ROOT)): list(unshielded(file.read_text())) for file in FILES}
    found.pop(OWN)
    assert {file: len(starts) for file, starts in found.items() if starts} == OTHER_PROGRAMS, found


def test_the_reader_of_starts_sees_what_it_must():
    bad = [
        "subprocess.run([python, '-m', 'pip'])",
        "subprocess.Popen(command)",
        "os.execv(path, arguments)",
        "print(sys.executable)",
        "multiprocessing.get_context('spawn')",
        "multiprocessing.forkserver.ensure_running()",
    ]
    assert [len(list(unshielded(text))) for text in bad] == [1] * len(bad)
    good = [
        "subprocess.run(**python_child('-m', 'pip'))",
        "c = python_child('-c', '')\nsubprocess.run(**c, text=True)",
    ]
    assert [list(unshielded(text)) for text in good] == [[], []]
