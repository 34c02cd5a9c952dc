"""Scenes in words: conversations about one, and the answers that are true of it.

Scene --converse--> (("human", question), ("gpt", answer), ...)
"""

from __future__ import annotations

import random

from mmtrain.demo.scene import CELLS, Item, Scene

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOUR_WORDS = ("red", "green", "blue", "yellow", "white", "pink")
PLACES = ("top left", "top right", "bottom left", "bottom right")
DESCRIBE = ("Describe the picture.", "What is in the picture?", "What do you see?")
ASK = ("What is at the {}?", "What do you see at the {}?", "Which digit is at the {}, and in which colour?")
DESCRIBE_SHARE = 0.25  # of conversations; the others ask about one to three places
ASK_EMPTY_CHANCE = 0.15  # that an empty cell may be asked about: "Nothing." is the one answer that is easily guessed

Turns = tuple[tuple[str, str], ...]


def name(item: Item | None) -> str:
    """What is in a cell, in words."""
    return "nothing" if item is None else f"a {COLOUR_WORDS[item.colour]} {DIGIT_WORDS[item.digit]}"


def describe(scene: Scene) -> str:
    """One sentence about all cells."""
    text = ", ".join(f"{place} {name(item)}" for place, item in zip(PLACES, scene, strict=True))
    return text.capitalize() + "."


def converse(scene: Scene, draw: random.Random) -> Turns:
    """A conversation about a scene, in LLaVA's roles: a description, or one to three questions about places."""
    if draw.random() < DESCRIBE_SHARE:
        return (("human", draw.choice(DESCRIBE)), ("gpt", describe(scene)))
    cells = [cell for cell in range(CELLS) if scene[cell] is not None or draw.random() < ASK_EMPTY_CHANCE]
    cells = cells or list(range(CELLS))
    turns: list[tuple[str, str]] = []
    for cell in draw.sample(cells, min(len(cells), draw.choice((1, 1, 2, 3)))):
        turns.append(("human", draw.choice(ASK).format(PLACES[cell])))
        turns.append(("gpt", name(scene[cell]).capitalize() + "."))
    return tuple(turns)
