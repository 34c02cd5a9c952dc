"""Ask a trained model, about pictures unless it was trained on text alone.

RUN is the folder of a run, of one of its checkpoints, or of a Hugging Face model, such as an export
with --format hf. Stock transformers answers. A run is exported first, once for each checkpoint,
into the cache, which takes the disk space of the whole model.

Without --prompt on a terminal you can ask one question after the other; each sees those before it.
Answers are greedy: the same question gets the same answer. A model that was trained with
data.template=plain has learnt to caption: it says what it sees. The answer goes to standard output,
all else to standard error. A GPU is used if there is one (CUDA_VISIBLE_DEVICES= for none).
"""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mmtrain.api.generate import Conversation, load, read_image, stock_folder
from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_note, print_words
from mmtrain.base.progress import ByteBars

EXAMPLES = """\
  ask the demo's model about one of the pictures that its run held out (it knows no other kind):
    shards="${XDG_CACHE_HOME:-$HOME/.cache}/mmtrain/demo"
    tar -xf "$(ls "$shards"/held-out-*/*.tar | head -1)" held-out-000000.png
    mmtrain chat runs/llava_pp4 --image held-out-000000.png
  one question, one answer, for scripts:
    mmtrain chat runs/mine --image photo.jpg --prompt "What is the dog doing?" > answer.txt
  two pictures, an earlier checkpoint, a longer answer:
    mmtrain chat runs/mine/checkpoints/step-00000500 --image before.jpg --image after.jpg \\
        --prompt "What has changed?" --max-new-tokens 500
  a run on text alone, which takes no picture:
    mmtrain chat runs/demo_text --prompt "Say it backwards: a red three, a blue five, a pink nine."
  a LLaVA from elsewhere, downloaded before with hf download:
    mmtrain chat llava-hf/llava-1.5-7b-hf --image photo.jpg --system "Answer in one word."
"""


def ask_in_turn(conversation: Conversation) -> None:
    """Ask until an empty line or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line that can be edited

    print_note("An empty line or Ctrl-D ends the conversation.")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print_note("")
            return
        if not question:
            return
        conversation.ask(question)


def run(options: Namespace) -> None:
    """Do what the options ask for; raises UserError."""
    try:
        _chat(options)
    except BrokenPipeError:  # whoever read the answer has left
        pass
    except KeyboardInterrupt:
        print_note("")  # in the middle of a line
        raise


def _chat(options: Namespace) -> None:
    images = [read_image(file) for file in options.image]
    with ByteBars(sys.stderr) as progress:
        folder = stock_folder(options.run, progress.show)
    conversation = Conversation(
        *load(folder), images, options.system, options.max_new_tokens, print_words
    )
    if not conversation.takes_questions():
        if options.prompt is not None or options.system is not None:
            print_note(
                "This model was trained on captions alone (data.template=plain). "
                "It describes what it sees."
            )
        conversation.describe()
    elif options.prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        ask_in_turn(conversation)
    else:
        if options.prompt is None and not conversation.sees:
            raise UserError(
                "--prompt is missing. Without a terminal, a model without pictures needs "
                "a question there"
            )
        described = "images" if len(images) > 1 else "image"
        conversation.ask(options.prompt or f"Describe the {described}.")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("chat", __doc__, EXAMPLES, {0: "answered"}, logs=print_note)
    add = parser.add_argument
    add(
        "run",
        metavar="RUN",
        help="the folder of a run, of one of its checkpoints, or of a Hugging Face model",
    )
    add(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a picture; may be repeated; none for a run on text alone",
    )
    add("--prompt", metavar="TEXT", help="one question (default: ask at the terminal)")
    add("--system", metavar="TEXT", help="a system turn before it, for models that take one")
    add(
        "--max-new-tokens",
        type=positive(int),
        default=256,
        metavar="N",
        help="longest answer, in tokens (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.prompt is not None and not options.prompt.strip():
        parser.error("--prompt is empty. Leave it out to ask at the terminal")
    return options
