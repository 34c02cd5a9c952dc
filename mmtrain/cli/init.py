"""Copy a shipped configuration, to make it your own. Without NAME list them all.

Every command takes a shipped configuration by its name, too: mmtrain plan example:NAME.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_result, table_lines
from mmtrain.config.load import example_file, example_names

EXAMPLES = """\
  which configurations there are:
    mmtrain init
  copy one to llava15_7b_pp4.yaml in this folder, or to a file of your choice:
    mmtrain init llava15_7b_pp4
    mmtrain init llava15_7b_pp4 --out mine.yaml
"""


def run(options: Namespace) -> None:
    """List the shipped configurations, or copy one; raises UserError."""
    if options.name is None:
        rows = [(name, _purpose(example_file(name))) for name in example_names()]
        print_result(*table_lines(("", ""), rows), "", "mmtrain init NAME copies one to NAME.yaml")
        return
    name = options.name.removeprefix("example:")
    text = example_file(name).read_bytes()
    out = options.out or Path(f"{name}.yaml")
    try:
        with out.open("xb") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"{out} exists already. Name another file: mmtrain init {name} --out FILE"
        ) from None
    print_result(f"wrote {out}; next: mmtrain plan {out}")


def _purpose(file: Path) -> str:
    """Return the first sentence of the comment that a shipped configuration begins with."""
    comment, _, _ = file.read_text(encoding="utf-8").partition("\n\n")
    return re.split(r"\.(?:\s|$)", " ".join(comment.replace("#", " ").split()), maxsplit=1)[0]


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("init", __doc__, EXAMPLES, {0: "listed, or copied"})
    parser.add_argument("name", metavar="NAME", nargs="?", help="a shipped configuration")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where the copy goes (NAME.yaml in this folder)"
    )
    return parser.parse_args(arguments)
