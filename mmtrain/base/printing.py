"""Print for this package and its tools: text of files reaches no terminal and no log unescaped.

Names, keys and errors hold text of files that strangers made, which could move a terminal's cursor
or rewrite the lines above. Callers hand over raw text, and everything goes through `escape_lines`
here, which also takes logins out of addresses. Later lines of a message are indented, so that no
text of a file looks like a message of its own.
"""

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TextIO

from mmtrain.base.console_stream import output_without_waiting, prepare_standard_streams
from mmtrain.base.errors import UserError, naming_shared_memory

COLUMNS = 80  # where output is no terminal
NO_HOME = "Could not determine home directory."  # what pathlib says
INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended

# Controls (C0 but tab and line feed, DEL, C1), Unicode's property Bidi_Control, its separators of
# lines and paragraphs, and surrogates: what os.fsdecode makes of bytes that are no UTF-8.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

# The arguments of a `pipe:` URL hold headers and signed addresses.
_ARGUMENTS = re.compile(r"((?:^\s*pipe:\s*|\bpipe:)\S+)\s.*", re.DOTALL)
_QUERY = re.compile(r"(?<=[^\s?])\?(?=\S*=)\S*")  # of a URL: its signature
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password of an address


def without_logins(text: str) -> str:
    """Return a text whose addresses have no user and password."""
    return _LOGIN.sub("", text)


def disclosed(value: Any) -> Any:
    """Return JSON-like values without what may be secret in URLs: logins, queries, and arguments
    of `pipe:` programs.
    """
    if isinstance(value, dict):
        return {disclosed(key): disclosed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [disclosed(inner) for inner in value]
    if isinstance(value, str):
        return _QUERY.sub("?...", without_logins(_ARGUMENTS.sub(r"\1 ...", value)))
    return value


def escape_lines(text: str) -> str:
    """Return the text without logins, and escaped as in Python where a terminal would obey it."""
    text = without_logins(text)
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape(text: str, limit: int = 300) -> str:
    """Return text of a file as part of a message: one line of at most `limit` characters."""
    line = escape_lines(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def message(text: str) -> str:
    """Return a whole message, escaped, with later lines indented by two blanks or more."""
    first, *more = escape_lines(text).split("\n")
    lines = [first]
    for line in more:
        needs_indent = line and not line[0].isspace()
        lines.append(f"  {line}" if needs_indent else line)
    return "\n".join(lines)


def terminal_width() -> int:
    """Return the columns of the terminal behind stdout, 80 where it is none."""
    return shutil.get_terminal_size((COLUMNS, 24)).columns


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = None
) -> list[str]:
    """Return a table's lines of at most `width` characters (None: the terminal's).

    Columns named >NAME align right and are never cut, even if the table gets wider; the others are
    wrapped. A name may have several lines.
    """
    # here: it takes a tenth of a second, and most of what is printed is no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    gap = 2 if len(columns) < 9 else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    table.show_header = any(name.strip(">") for name in columns)
    height = max(name.count("\n") for name in columns)
    # rich reads plain strings as markup
    rows = [[Text(escape_lines(str(cell))) for cell in row] for row in rows]
    # rich would cut numbers in silence: room for them, and for a few characters of other columns
    needed = 0
    for place, name in enumerate(columns):
        is_number = name.startswith(">")
        name = name.removeprefix(">")
        lines = name.split("\n")
        for row in rows:
            if place < len(row):
                lines += row[place].plain.split("\n")
        longest = max(map(len, lines))
        justify = "left"
        room = min(longest, 4)
        if is_number:
            justify = "right"
            room = longest
        needed += room + gap
        title = Text(name + "\n" * (height - name.count("\n")))
        table.add_column(title, overflow="fold", justify=justify, no_wrap=is_number)
    for row in rows:
        table.add_row(*row)

    width = max(width or terminal_width(), needed)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, indented by two blanks and no wider than the terminal."""
    print_result(*(f"  {line}" for line in table_lines(columns, rows, terminal_width() - 2)))


def bytes_text(count: float) -> str:
    """Return a number of bytes for people: `3.1 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB" if count else "0"


def print_info(*messages: str, stream: TextIO | None = None) -> None:
    """Print messages, a line each, unless the stream's reader has left or its disk is full."""
    stream = stream or sys.stdout
    try:
        _print(messages, stream)
    except OSError:
        _print_no_more(stream)


def print_result(*messages: str) -> None:
    """Print a tool's result, unless its reader has left. Raises OSError for a full disk."""
    try:
        _print(messages, sys.stdout)
    except BrokenPipeError:
        _print_no_more(sys.stdout)


def print_words(text: str) -> None:
    """Print words without ending the line. Raises BrokenPipeError for a reader that has left."""
    try:
        print(escape_lines(text), end="", flush=True)
    except BrokenPipeError:
        _print_no_more(sys.stdout)
        raise


def print_note(*messages: str) -> None:
    """Print messages to stderr."""
    print_info(*messages, stream=sys.stderr)


def show_error(error: object, stream: TextIO | None = None) -> None:
    """Print what went wrong, an exception or its message, to stderr or `stream`.

    A sentence that ends with another error's text has one full stop.
    """
    text = re.sub(r"(?<=[\w)\]'])\.\.(?= )", ".", f"error: {error}")
    print_info(text, stream=stream or sys.stderr)


class _Shown(logging.Handler):
    """Show what is logged and, unlike logging's handlers, raise what showing it raises."""

    def __init__(self, show: Callable[[str], None], details: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self._details = details

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self._show(record.getMessage())
        else:
            self._details(record.getMessage())


def show_logs(show: Callable[[str], None], details: Callable[[str], None] | None = None) -> None:
    """Send mmtrain's logs to `show` alone from now on, those below INFO to `details`."""
    logger = logging.getLogger("mmtrain")
    logger.handlers = [_Shown(show, details or show)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)


@contextlib.contextmanager
def logs_shown(
    show: Callable[[str], None], details: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Apply `show_logs` until the block ends, then restore the importer's logging."""
    logger = logging.getLogger("mmtrain")
    handlers = logger.handlers
    propagate = logger.propagate
    level = logger.level
    show_logs(show, details)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.propagate = propagate
        logger.setLevel(level)


def run_command(
    command: Callable[[], int | None],
    unnamed: object = "standard output",
    interrupted: str = "stopped by Ctrl-C",
    waits: bool = True,
    logs: Callable[[str], None] = print_info,
) -> int:
    """Run a command; return 2 after one message for what the user can mend, 130 after Ctrl-C.

    `unnamed` is what an OSError without a file concerns; `interrupted` is printed after Ctrl-C;
    without `waits` output never blocks; `logs` prints what libraries log.
    """
    prepare_standard_streams()
    sys.excepthook = show_traceback
    silence_libraries()
    with logs_shown(logs), contextlib.nullcontext() if waits else output_without_waiting():
        try:
            with naming_shared_memory():
                return command() or 0
        except UserError as error:
            show_error(error)
            return 2
        except OSError as error:
            show_error(f"{error.filename or unnamed} cannot be used: {error.strerror or error}")
            return 2
        except RuntimeError as error:
            if str(error) != NO_HOME:
                raise
            show_error(
                "a path begins with ~ or ~USER, a user without home here. Write the path out"
            )
            return 2
        except KeyboardInterrupt:
            print_note(interrupted)
            return INTERRUPTED


def silence_libraries() -> None:
    """Hide warnings of libraries that others import, about kernels that nothing here uses."""
    for name in ("bitsandbytes", "DeepSpeed"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, in a notebook without widgets


def show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback, escaped: for sys.excepthook."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print_info(*text.removesuffix("\n").split("\n"), stream=sys.stderr)


def show_cursor() -> None:
    """Show a terminal's cursor again, which a progress bar has hidden."""
    if sys.stdout is not None and sys.stdout.isatty():
        print("\x1b[?25h")


def clear_line() -> None:
    """On a terminal, take back the line that `print_words` has begun."""
    print("\r\x1b[K", end="", flush=True)


def _print(messages: tuple[str, ...], stream: TextIO | None) -> None:
    """Print in one write, into which no other process can write."""
    print("".join(f"{message(text)}\n" for text in messages), end="", file=stream, flush=True)


def _print_no_more(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 sample`, `5,880 samples`."""
    if count != 1:
        noun = plural or f"{noun}s"
    return f"{count:,} {noun}"


def percent(share: float | None) -> str:
    """Return a share as `97.4%`; `-` for None."""
    return "-" if share is None else f"{share:.1%}"


def first_few(names: Sequence[str], shown: int) -> str:
    """Return the first names of a list, and how many more there are."""
    text = ", ".join(names[:shown])
    if len(names) > shown:
        text += f" and {len(names) - shown} more"
    return text
