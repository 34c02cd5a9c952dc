"""Scenes in words: conversations about one, and the answers that are true of it.

Scene --converse--> (("human", question), ("gpt", answer), ...)   what the demo's LLM was trained on
      --ask_next--> the same form                                 a kind of question that is new to
          it
three items --ask_reversed--> the same form                       a rule of its own language,
    without a picture
"""

import random
from collections.abc import Callable
from dataclasses import replace

from mmtrain.demo.scene import CELLS, DIGITS, Item, Scene

DIGIT_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)
COLOUR_WORDS = (
    "red",
    "green",
    "blue",
    "yellow",
    "white",
    "pink",
)
PLACES = ("top left", "top right", "bottom left", "bottom right")
DESCRIBE = ("Describe the picture.", "What is in the picture?", "What do you see?")
ASK = (
    "What is at the {}?",
    "What do you see at the {}?",
    "Which digit is at the {}, and in which colour?",
)
ASK_NEXT = ("Which digit follows the one at the {}?", "What comes after the digit at the {}?")
REVERSE = ("Say it backwards: {}.", "Turn it around: {}.")
DESCRIBE_SHARE = 0.25  # of conversations; the others ask about one to three places
# that an empty cell may be asked about: "Nothing." is the one answer that is easily guessed
ASK_EMPTY_CHANCE = 0.15

Turns = tuple[tuple[str, str], ...]


def name(item: Item | None) -> str:
    """Say what is in a cell."""
    return "nothing" if item is None else f"a {COLOUR_WORDS[item.colour]} {DIGIT_WORDS[item.digit]}"


def describe(scene: Scene) -> str:
    """Say in one sentence what is in all cells."""
    text = ", ".join(f"{place} {name(item)}" for place, item in zip(PLACES, scene, strict=True))
    return text.capitalize() + "."


def converse(scene: Scene, draw: random.Random) -> Turns:
    """Return a conversation about a scene in LLaVA's roles: a description, or one to three
    questions about places.
    """
    if draw.random() < DESCRIBE_SHARE:
        return (("human", draw.choice(DESCRIBE)), ("gpt", describe(scene)))
    cells = [
        cell for cell in range(CELLS) if scene[cell] is not None or draw.random() < ASK_EMPTY_CHANCE
    ]
    return _ask(cells, ASK, lambda cell: name(scene[cell]), draw)


def ask_next(scene: Scene, draw: random.Random) -> Turns:
    """Return one to three questions about the digit that follows the one at a place; after nine
    comes zero.
    """

    def answer(cell: int) -> str:
        item = scene[cell]
        return name(item and replace(item, digit=(item.digit + 1) % DIGITS))

    return _ask([cell for cell in range(CELLS) if scene[cell] is not None], ASK_NEXT, answer, draw)


def ask_reversed(draw: random.Random) -> Turns:
    """Return a question with three items to say in the reverse order, one of 216,000 lists."""
    items = [
        name(Item(draw.randrange(DIGITS), draw.randrange(len(COLOUR_WORDS)))) for _ in range(3)
    ]
    question = draw.choice(REVERSE).format(", ".join(items))
    return (("human", question), ("gpt", ", ".join(reversed(items)).capitalize() + "."))


def _ask(
    cells: list[int], questions: tuple[str, ...], answer: Callable[[int], str], draw: random.Random
) -> Turns:
    """Return questions about one to three of `cells`, or of all cells where it is empty."""
    cells = cells or list(range(CELLS))
    turns = []
    for cell in draw.sample(cells, min(len(cells), draw.choice((1, 1, 2, 3)))):
        turns.append(("human", draw.choice(questions).format(PLACES[cell])))
        turns.append(("gpt", answer(cell).capitalize() + "."))
    return tuple(turns)
