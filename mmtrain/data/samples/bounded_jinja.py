"""Chat templates, which come with models, rendered within a limit of work.

template text --jinja2, in transformers' environment, every operation charged--> text, or TooMuchWork

jinja2's sandbox keeps a template from files and from Python, not from looping or allocating without end. So each loop
iteration, call, filter, test, comparison and sum is charged what it reads before it is done, and what multiplies (`*`,
`**`, replace, join, center, format, ...) the product of what it reads. The charge is counted, not timed: what is
rendered, and what is refused, is the same on every machine.

Filters for web pages, whose time nothing bounds, are left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

# Units of work: about a microsecond each, as long as an operation or copying CHARACTERS characters takes.
WORK = 500_000
WORK_PER_CHARACTER = 100  # of what is rendered: templates write a long conversation turn by turn
CHARACTERS = 64
MEMBER = 16  # a member of a list takes as long as so many characters
MAX_TEMPLATE = 250_000  # characters; compiling takes 10 s a million, the longest in use have 40,000

# Filters, methods and operators that may return more than they read.
_GROWING = {
    *("%", "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust"),
    *("slice", "sum", "tojson", "translate", "zfill"),
}
_COMPARING = {
    *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in")
}
# For web pages: they search with patterns, whose time is not that of their text's length. `lipsum` writes nonsense.
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_CONSTANT = {"length", "count", "first", "last", "default", "d", "items"}  # filters that take as long for whatever size
_FORMAT_WIDTH = re.compile(r"\d+")
_WIDTH_ELSEWHERE = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")  # %*d, {:{}}: an argument is a width
_CHARGED, _CHARGED_LOOP = "mmtrain_charged", "mmtrain_charged_loop"


class TooMuchWork(jinja2.TemplateError):
    """The template loops or allocates more than any chat template has reason to."""


class BoundedTemplate:
    """A chat template as transformers' tokenizers render it, within WORK + WORK_PER_CHARACTER x what it is given."""

    def __init__(self, text: str) -> None:
        """Raises jinja2.TemplateError for a text that is no template, or longer than MAX_TEMPLATE."""
        if len(text) > MAX_TEMPLATE:
            raise jinja2.TemplateError(f"it has {len(text):,} characters; at most {MAX_TEMPLATE:,} are taken")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(text)
        except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:  # Python's, compiling what it became
            raise jinja2.TemplateError(f"it cannot be compiled ({type(error).__name__}: {error})") from None

    def render(self, messages: list[dict], **variables: Any) -> str:
        """The text for `messages`; raises TooMuchWork and what jinja2 and templates raise."""
        self._environment.left = WORK + WORK_PER_CHARACTER * _weight(messages, 10**9)
        try:
            return self._template.render(messages=messages, **variables)
        except RecursionError:
            raise TooMuchWork("macros that call themselves without end") from None
        except MemoryError:
            raise TooMuchWork("more memory than there is") from None


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, its operations charged."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        stock = _compile_jinja_template("").environment
        super().__init__(
            trim_blocks=stock.trim_blocks,
            lstrip_blocks=stock.lstrip_blocks,
            extensions=list(map(type, stock.extensions.values())),
            finalize=self.charged,
            optimized=False,  # filters are applied when rendering alone
        )
        self.left = WORK
        self.globals.update(stock.globals)
        del self.globals["lipsum"]
        wrapped = self._wrapped
        filters = {name: one for name, one in stock.filters.items() if name not in _LEFT_OUT}
        self.filters = {name: wrapped(name, one, name in _CONSTANT) for name, one in filters.items()}
        self.filters |= {_CHARGED: self.charged, _CHARGED_LOOP: self._charged_loop}
        self.tests = {name: wrapped(name, one, name not in _COMPARING) for name, one in stock.tests.items()}

    def charge(self, units: int) -> None:
        """Pay for an operation that is about to be done."""
        self.left -= units
        if self.left < 0:
            raise TooMuchWork("it loops or allocates without end, or far more than a conversation needs")

    def charged(self, value: Any) -> Any:
        """The value, paid for with all that is in it: it is about to be written, copied or compared."""
        if type(value) is str:
            self.left -= 1 + len(value) // CHARACTERS  # as `charge` does: of all places this one is taken most
            if self.left < 0:
                self.charge(0)
        elif value is None or isinstance(value, bool | int | float):
            self.charge(1)
        else:
            self.charge(1 + _weight(value, (self.left + 1) * CHARACTERS) // CHARACTERS)
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A method, macro or function of the template."""
        if isinstance(function, Macro):
            self.charge(1)
        elif isinstance(function, LoopContext):
            args = tuple(self._charged_loop(values) for values in args)
        else:
            method = getattr(function, "__wrapped__", function)  # the sandbox's own str.format
            owner = getattr(method, "__self__", None)
            args = self._pay(getattr(method, "__name__", ""), args, kwargs, None if isinstance(owner, dict) else owner)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that may make more than it is given."""
        whole = type(left) is int and type(right) is int
        if operator == "**":
            self.charge(1 + (left.bit_length() * abs(right) if whole else 0))
        elif operator == "*":
            size = left.bit_length() * right.bit_length() if whole else _extent(left) * _extent(right)
            self.charge(1 + size // CHARACTERS)
        elif type(left) is str and type(right) is str and operator == "+":
            self.charge(1 + (len(left) + len(right)) // CHARACTERS)
            return left + right
        elif operator == "+":
            sizes = [
                len(one) * (1 if isinstance(one, str) else MEMBER) for one in (left, right) if hasattr(one, "__len__")
            ]
            self.charge(1 + sum(sizes) // CHARACTERS)
        else:
            self._pay(operator, (left, right), {})
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._filtered(loop.iter, _CHARGED_LOOP)
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [self._filtered(node) for node in joined.nodes]
        for compared in list(tree.find_all(nodes.Compare)):
            if all(one.op in ("eq", "ne") and isinstance(one.expr, nodes.Const) for one in compared.ops):
                continue  # done at the first character that differs: most of what templates ask
            for operand in (compared, *compared.ops):
                operand.expr = self._filtered(operand.expr)
        for sliced in list(tree.find_all(nodes.Getitem)):
            if isinstance(sliced.arg, nodes.Slice):
                sliced.node = self._filtered(sliced.node)
        # What a list holds twice is written twice: nested, 2^n times.
        for literal in list(tree.find_all(nodes.List)):
            literal.items = [self._filtered(item) for item in literal.items]
        for pair in list(tree.find_all(nodes.Pair)):
            pair.value = self._filtered(pair.value)
        return tree

    def _filtered(self, node: nodes.Expr, name: str = _CHARGED) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self)
        return made

    def _charged_loop(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.charge(1)
            yield value

    def _wrapped(self, name: str, function: Callable[..., Any], is_cheap: bool) -> Callable[..., Any]:
        @functools.wraps(function)  # with the mark that says what jinja2 passes first
        def charged(*args: Any, **kwargs: Any) -> Any:
            if is_cheap:
                self.charge(1)
                return function(*args, **kwargs)
            result = function(*self._pay(name, args, kwargs), **kwargs)
            return self._charged_loop(result) if isinstance(result, GeneratorType) else result

        return charged

    def _pay(self, name: str, args: tuple, kwargs: Mapping[str, Any], owner: Any = None) -> tuple:
        """Charge an operation by its name and what it reads; its arguments."""
        if name not in _GROWING:
            units = sum(_extent(value, self.left * CHARACTERS) for value in (owner, *args, *kwargs.values()))
            self.charge(1 + units // CHARACTERS)
            return args
        args = tuple(list(value) if isinstance(value, GeneratorType) else value for value in args)
        read = [value for value in (owner, *args, *kwargs.values()) if value is not None]
        formats = [value for value in read if isinstance(value, str)] if name in ("%", "format", "format_map") else []
        units = 1
        for text in formats:
            units *= max((int(width[:12]) for width in _FORMAT_WIDTH.findall(text)), default=1) or 1
        numbers_count = not formats or any(map(_WIDTH_ELSEWHERE.search, formats))
        if formats:
            read += [inner for value in read if isinstance(value, tuple) for inner in value]
        for value in read:
            if numbers_count or type(value) is not int:
                units *= max(_extent(value, self.left * CHARACTERS), 1)
        self.charge(1 + units // CHARACTERS)
        return args


def _extent(value: Any, limit: int = 10**9) -> int:
    """How much an operation may make of a value: characters of a text, a number itself, all that a list holds."""
    if isinstance(value, str):
        return len(value)
    if type(value) is int:
        return abs(value)
    if isinstance(value, Context):  # a mapping, too; jinja2 passes it to filters that ask for it
        return 1
    if isinstance(value, list | tuple | Mapping | MappingView | range):
        return _weight(value, limit)
    return 1


def _weight(value: Any, limit: int) -> int:
    """Characters and members of a value with all that is in it, as often as it is; counting ends at the limit."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, range):
        return MEMBER * len(value)
    weight, waiting = 1, [value]
    while waiting and weight <= limit:
        inner = waiting.pop()
        if isinstance(inner, str):
            weight += len(inner)
        elif isinstance(inner, Mapping):
            weight += MEMBER * len(inner)
            waiting += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list | tuple | set | MappingView):
            weight += MEMBER * len(inner)
            waiting += inner
        elif type(inner) is int:
            weight += inner.bit_length() // 3
    return weight
