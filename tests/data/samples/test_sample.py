import json

import pytest

from mmtrain.data.samples.records import IMAGE_SUFFIXES, BadSample
from mmtrain.data.samples.sample import Sample, image_number, image_suffixes, read_sample


def conversation(question: str = "<image>", answer: str = "A cat.") -> bytes:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return json.dumps({"id": "k7", "conversations": turns}).encode()


def reason_of(members: dict[str, bytes]) -> tuple[str, str]:
    with pytest.raises(BadSample) as caught:
        read_sample("k7", "s.tar", members)
    return caught.value.reason, caught.value.detail


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
    content = json.dumps({"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}).encode()
    sample = read_sample("k7", "s.tar", {"json": content, "2.jpg": b"c", "0.jpg": b"a", "1.webp": b"b"})
    assert (sample.turns, sample.images) == (tuple(turns), (b"a", b"b", b"c"))


@pytest.mark.parametrize(
    ("members", "reason", "seen"),
    [
        ({"json": conversation("<image><image>"), "png": b""}, "image_count", "2 <image> marks"),
        ({"json": conversation("Who?"), "png": b""}, "image_count", "0 <image> marks in the conversation, 1 images"),
        ({"json": conversation("<image><image>"), "0.png": b"", "2.png": b""}, "image_names", "it has 0.png, 2.png"),
        ({"json": conversation("<image><image>"), "png": b"", "1.png": b""}, "image_names", "it has png, 1.png"),
        ({"json": conversation(), "png": b"", "jpg": b""}, "image_names", "it has jpg, png"),
        ({"png": b"", "txt": b""}, "no_json", "it has png, txt"),
        ({"json": b"{"}, "not_json", "Expecting property name"),
        ({"json": b"\xff\xfe\xfd"}, "not_json", "decode"),
        ({"json": b"[" * 100_000}, "not_json", "recursion"),
        ({"json": b'{"text": "hello"}'}, "no_conversation", "its keys are text"),
    ],
)
def test_a_sample_in_another_form_is_rejected_with_what_was_seen(members, reason, seen):
    found, detail = reason_of(members)
    assert found == reason
    assert seen in detail
    assert "k7" not in detail and "s.tar" not in detail  # the caller says where


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


def test_numbers_of_images_are_numbers_and_not_texts():
    names = [f"{number}.jpg" for number in range(12)]
    assert image_suffixes(sorted(names)) == names != sorted(names)
