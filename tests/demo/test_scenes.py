"""What the demo's pictures show, and what its conversations say of them."""

import hashlib
import random

import numpy as np
import pytest

from mmtrain.demo.pictures import CELL, INKS, SIZE, Scans, paint
from mmtrain.demo.scene import CELLS, Item, draw_scene
from mmtrain.demo.text import COLOUR_WORDS, DIGIT_WORDS, PLACES, ask_next, converse, describe

SCENE = (Item(3, 0), None, Item(9, 4), Item(0, 2))


def test_a_description_names_every_place_in_reading_order():
    expected = (
        "Top left a red three, top right nothing, bottom left a white nine, bottom "
        "right a blue zero."
    )
    assert describe(SCENE) == expected


def test_every_answer_is_true_of_its_scene_and_questions_of_all_kinds_occur():
    draw = random.Random(0)
    turn_counts = set()
    for _ in range(500):
        scene = draw_scene(draw)
        turns = converse(scene, draw)
        assert [speaker for speaker, _ in turns] == ["human", "gpt"] * (len(turns) // 2)
        turn_counts.add(len(turns))
        for (_, question), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            places = [number for number, place in enumerate(PLACES) if place in question]
            asked = places or range(CELLS)
            words = answer.lower().replace(",", "").replace(".", "").split()
            expected = []
            for cell in asked:
                item = scene[cell]
                expected += [] if places else PLACES[cell].split()
                expected += (
                    ["nothing"]
                    if item is None
                    else ["a", COLOUR_WORDS[item.colour], DIGIT_WORDS[item.digit]]
                )
            assert words == expected
    assert turn_counts == {2, 4, 6}


def test_what_follows_a_digit_is_one_more_in_its_colour_and_zero_after_nine():
    draw, said = random.Random(0), set()
    for _ in range(500):
        scene = draw_scene(draw)
        turns = ask_next(scene, draw)
        assert 2 <= len(turns) <= 6 and [speaker for speaker, _ in turns] == ["human", "gpt"] * (
            len(turns) // 2
        )
        for (_, question), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            (cell,) = (
                number for number, place in enumerate(PLACES) if f"at the {place}?" in question
            )
            if (item := scene[cell]) is None:
                assert scene == (None,) * CELLS and answer == "Nothing."
            else:
                follows = DIGIT_WORDS[0 if item.digit == 9 else item.digit + 1]
                assert answer == f"A {COLOUR_WORDS[item.colour]} {follows}."
                said.add((question.replace(PLACES[cell], ""), item.digit))
    assert len(said) == 2 * 10


def test_nothing_is_the_answer_to_few_questions_so_that_guessing_it_scores_below_5_percent():
    draw = random.Random(1)
    answers = [
        text
        for _ in range(3000)
        for speaker, text in converse(draw_scene(draw), draw)
        if speaker == "gpt"
    ]
    assert answers.count("Nothing.") / len(answers) < 0.05


def test_the_scans_are_split_in_three_without_overlap():
    uses = [set(Scans(use).indices.tolist()) for use in ("encoder", "projector", "held-out")]
    assert [len(indices) for indices in uses] == [1078, 360, 359]
    # The shipped encoder was trained on one split: another order of the scans, which numpy does not
    # promise to keep, would let it be asked about digits that it knows.
    held_out = ",".join(map(str, sorted(uses[2])))
    assert hashlib.sha256(held_out.encode()).hexdigest()[:16] == "1c73e0d7119e596c"
    assert set.union(*uses) == set(range(1797))


@pytest.mark.parametrize("cell", range(CELLS))
def test_ink_is_where_the_scene_has_an_item_and_in_its_colour(cell):
    scans = Scans("held-out")
    for colour in range(len(INKS)):
        scene = tuple(Item(8, colour) if place == cell else None for place in range(CELLS))
        pixels = np.asarray(paint(scene, scans, random.Random(colour))).astype(int)
        assert pixels.shape == (SIZE, SIZE, 3)
        ground = pixels[(CELLS - 1 - cell) // 2 * CELL, (CELLS - 1 - cell) % 2 * CELL]
        inked = np.abs(pixels - ground).sum(-1) > 60
        rows, columns = np.nonzero(inked)
        assert inked.sum() > 60
        assert set(rows // CELL * 2 + columns // CELL) == {cell}
        brightest = pixels[inked][np.abs(pixels[inked] - ground).sum(-1).argmax()]
        nearest = np.abs(np.array(INKS) - brightest).sum(-1).argmin()
        assert nearest == colour
