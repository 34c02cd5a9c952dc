"""How densely the package is written, held by a test: what packs several decisions into a line is
counted.

A number below its bound is welcome: lower the bound with it. One above asks for a statement, a name
or a loop instead; CONTRIBUTING.md shows how.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mmtrain"

# By wing: the most conditional expressions (`a if b else c`) and the most comprehensions.
BOUNDS = {
    "__main__.py": (2, 1),
    "api": (0, 12),
    "base": (11, 17),
    "benchmarks": (0, 14),
    "calibration": (0, 17),
    "checkpoint": (5, 35),
    "cli": (21, 33),
    "config": (12, 28),
    "connectors.py": (0, 2),
    "data": (66, 169),
    "demo": (3, 10),
    "doctor": (5, 19),
    "engine": (16, 55),
    "exporting": (9, 65),
    "facts": (7, 58),
    "inspection": (1, 7),
    "launch.py": (3, 3),
    "launching": (11, 15),
    "layouts": (0, 8),
    "model": (33, 100),
    "plan": (68, 187),
    "report": (14, 40),
    "runtime": (21, 19),
    "stock": (4, 27),
    "training": (13, 34),
}
NOT_FIRST = {"what", "where", "how", "which", "who", "whose", "of"}
MOST_ODD_DOCSTRINGS = 3
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module's wing and syntax tree; a module of the root is a wing of its own."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.relative_to(PACKAGE).parts[0], ast.parse(file.read_text(encoding="utf-8"))


def holds_conditional(node: ast.IfExp) -> bool:
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def is_truth(node: ast.expr) -> bool:
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, ast.Compare | ast.BoolOp)


def is_truth_product(node: ast.AST) -> bool:
    """Whether a truth value is used as a number: `x * (a > b)`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return is_truth(node.left) or is_truth(node.right)


def test_no_wing_has_more_conditional_expressions_or_comprehensions_than_its_bound():
    conditionals, comprehensions = Counter(), Counter()
    for wing, tree in trees():
        nodes = list(ast.walk(tree))
        conditionals[wing] += sum(isinstance(node, ast.IfExp) for node in nodes)
        comprehensions[wing] += sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    found = {wing: (conditionals[wing], comprehensions[wing]) for wing in conditionals}
    above = {
        wing: counts
        for wing, counts in found.items()
        if any(count > most for count, most in zip(counts, BOUNDS.get(wing, (0, 0)), strict=True))
    }
    assert above == {}


def test_no_conditional_stands_in_another_and_no_truth_value_is_multiplied():
    found = [
        f"{wing}: {ast.unparse(node)}"
        for wing, tree in trees()
        for node in ast.walk(tree)
        if (isinstance(node, ast.IfExp) and holds_conditional(node)) or is_truth_product(node)
    ]
    assert found == []


def test_docstrings_begin_with_a_verb_or_a_thing():
    odd = []
    for wing, tree in trees():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0].strip("`,.:").lower() in NOT_FIRST:
                odd.append(f"{wing}: {text.splitlines()[0]}")
    assert len(odd) <= MOST_ODD_DOCSTRINGS, odd


def test_the_counters_see_what_they_count():
    nested = ast.parse("1 if a else (2 if b else 3)", mode="eval").body
    assert holds_conditional(nested) and not holds_conditional(nested.orelse)
    for text in ("x * (a > b)", "(not a) * x", "(a and b) * x"):
        assert is_truth_product(ast.parse(text, mode="eval").body)
    assert not is_truth_product(ast.parse("x * max(a, b)", mode="eval").body)
