"""transformers runs Python that lies in a model's folder where a call does not forbid it, and asks on standard input.

config.json may also name an attention kernel, which is downloaded and run where a call does not name another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "mmtrain").rglob("*.py")), *sorted((ROOT / "tools").rglob("*.py"))]


def unguarded(text: str) -> Iterator[str]:
    """Calls that load or build a model, tokenizer, processor or config without the arguments that forbid it."""
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
    text = "AutoTokenizer.from_pretrained(f)\nLlamaForCausalLM.from_pretrained(f, trust_remote_code=None)\n"
    lacking = [line.split(" without ")[1] for line in unguarded(text)]
    assert lacking == ["trust_remote_code=False", "attn_implementation"]
    assert not list(unguarded("CLIPVisionModel.from_pretrained(f, attn_implementation='sdpa')\nmodels.load(f)\n"))
