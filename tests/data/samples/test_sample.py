import json

import pytest

from mmtrain.data.samples.records import IMAGE_SUFFIXES
from mmtrain.data.samples.sample import Sample, image_number, read_sample


def conversation(question: str = "<image>", answer: str = "A cat.") -> bytes:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return json.dumps({"id": "k7", "conversations": turns}).encode()


def test_a_sample_keeps_its_turns_and_its_images_in_number_order():
    members = {f"{number}.png": bytes([number]) for number in (2, 10, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    members["json"] = conversation("<image>" * 11 + "Who?")
    sample = read_sample("a/k7", "s.tar", members, offset=1536)
    assert sample == Sample(
        key="a/k7",
        shard="s.tar",
        turns=(("human", "<image>" * 11 + "Who?"), ("gpt", "A cat.")),
        images=tuple(bytes([number]) for number in range(11)),
        offset=1536,
    )
    assert sample.where == "s.tar: sample a/k7"


@pytest.mark.parametrize("name", [*IMAGE_SUFFIXES, *(f"0.{suffix}" for suffix in IMAGE_SUFFIXES)])
def test_one_image_may_have_a_number_or_none(name):
    assert read_sample("k7", "s.tar", {"json": conversation(), name: b"only"}).images == (b"only",)


def test_images_may_stand_in_any_turn_and_a_system_turn_may_come_first():
    turns = [("system", "You see <image>."), ("human", "And <image>?"), ("gpt", "It is <image>.")]
    content = json.dumps(
        {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    ).encode()
    sample = read_sample(
        "k7", "s.tar", {"json": content, "2.jpg": b"c", "0.jpg": b"a", "1.webp": b"b"}
    )
    assert (sample.turns, sample.images) == (tuple(turns), (b"a", b"b", b"c"))


@pytest.mark.parametrize(
    ("suffix", "number"),
    [
        ("jpg", 0),
        ("0.jpeg", 0),
        ("12.webp", 12),
        ("jpg.bak", None),
        ("x.jpg", None),
        ("-1.png", None),
        ("gif", 0),
        ("3.tiff", 3),
        ("heic", None),
    ],
)
def test_a_suffix_says_which_image_it_is(suffix, number):
    assert image_number(suffix) == number
