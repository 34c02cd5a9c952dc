"""formats.py: what others write becomes the conversation that they meant, or has the reason why
not.
"""

import json

import pytest

from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import read_sample

SHAREGPT = SampleFormat("sharegpt")
QA, PAGE = SampleFormat("qa"), SampleFormat("interleaved")
CAPTION = SampleFormat("caption", caption_prompt="What is it?")
ASKED = (("human", "<image>\nWhat is it?"), ("gpt", "A cat."))
PLAIN = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]
MARKED = [
    {"role": "user", "content": "<image>\nWhat is it?"},
    {"role": "assistant", "content": "A cat."},
]
TEXT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x"}]
NO_BYTES = {"image": {"bytes": None, "path": ""}, "images": "[]", "videos": [None], "tools": "[]"}
LLAVA_TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}]


def messages(*turns, **fields):
    return {"json": {"messages": list(turns), **fields}}


def read(form: SampleFormat, images=1, **texts):
    members = {"jpg": b""} if images == 1 else {f"{number}.png": b"" for number in range(images)}
    contents = {
        name: text if isinstance(text, bytes) else json.dumps(text).encode()
        for name, text in texts.items()
    }
    return read_sample("k", "s.tar", {**members, **contents}, 0, form).turns


@pytest.mark.parametrize(
    "record",
    [
        {"messages": PLAIN, "images": ["a.jpg"]},
        {"messages": MARKED, "images": ["a.jpg"]},
        {
            "conversations": [
                {"from": "human", "value": "What is it?"},
                {"from": "gpt", "value": "A cat."},
            ]
        },
        {
            "conversations": [
                {"from": "User", "value": "<image>\nWhat is it?"},
                {"from": "Assistant", "value": "A cat."},
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "a.jpg"}},
                        {"type": "text", "text": "What "},
                        {"type": "text", "text": "is it?"},
                    ],
                },
                PLAIN[1],
            ]
        },
    ],
)
def test_messages_of_every_usual_form_are_the_same_conversation(record):
    assert read(SHAREGPT, json=record) == ASKED


def test_parts_keep_their_order_and_a_system_prompt_its_place():
    content = ["Compare", {"type": "image"}, "with", {"type": "image"}]
    record = {"messages": [{"role": "user", "content": content}, PLAIN[1]], "system": "Be brief."}
    question = "Compare\n<image>\nwith\n<image>"
    assert read(SHAREGPT, 2, json=record) == (
        ("system", "Be brief."),
        ("human", question),
        ("gpt", "A cat."),
    )
    own = {"messages": [{"role": "system", "content": "Mine."}, *PLAIN], "system": "Be brief."}
    assert read(SHAREGPT, 0, json=own)[0] == ("system", "Mine.") and read(
        SHAREGPT, 0, json={"messages": PLAIN}
    )
    assert read(SHAREGPT, 2, json={"messages": PLAIN})[0][1] == "<image>\n<image>\nWhat is it?"


PAIRS = [
    {"user": "What is it?", "assistant": "A cat.", "source": "x"},
    {"user": "Why?", "assistant": "It purrs."},
]
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize(
    ("record", "more"),
    [
        ({"texts": PAIRS}, (("human", "Why?"), ("gpt", "It purrs."))),
        ({"question": "What is it?", "answer": "A cat."}, ()),
        ({"question": "What is it?", "answers": ["A dog.", "A cat.", "A cat."]}, ()),
        ({"question": "What is it?", "answers": ["A cat.", "A dog."]}, ()),
        (
            {
                "question": "What is it?",
                "answers": [{"answer": "A cat.", "answer_id": 1}],
                "prompt": "unused",
            },
            (),
        ),
        ({"question": "What is it?", "answers": [{"text": "A cat."}, {"text": "A dog."}]}, ()),
        ({"question": "What is it?", "answer": [{"type": "text", "text": "A cat."}]}, ()),
        (
            {"texts": [PAIRS[0], {"user": "How many?", "assistant": "1"}]},
            (("human", "How many?"), ("gpt", "1")),
        ),
        ({"prompt": "What is it?", "completion": "A cat."}, ()),
        ({"prompt": CHAT, "completion": PLAIN[1:]}, ()),
    ],
)
def test_questions_with_their_answers_become_the_conversation(record, more):
    assert read(QA, json=record) == (*ASKED, *more)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0, "0"),
        (0.0, "0.0"),
        (False, "false"),
        (True, "true"),
        (-0.5, "-0.5"),
        (10**20, "1" + "0" * 20),
    ],
)
def test_numbers_and_truth_values_are_texts_in_every_format(value, text):
    part, last = {"type": "text", "text": value}, {"role": "assistant"}
    records = [
        (LLAVA, {"conversations": [TEXT[0], {"from": "gpt", "value": value}]}),
        (SHAREGPT, {"messages": [PLAIN[0], {**last, "content": value}]}),
        (SHAREGPT, {"messages": [PLAIN[0], {**last, "content": [part]}]}),
        (
            SHAREGPT,
            {
                "messages": [
                    PLAIN[0],
                    {**last, "content": None, "value": value, "reasoning_tokens": 3},
                ]
            },
        ),
        (QA, {"question": "x", "answer": value}),
        (QA, {"question": "x", "answer": [value]}),
        (QA, {"question": "x", "answer": "", "answers": [7, value, value]}),
        (QA, {"question": "x", "answers": [{"answer": value}, {"answer": 7}]}),
        (QA, {"prompt": "x", "completion": value}),
        (QA, {"texts": [{"user": "x", "assistant": value}]}),
        (PAGE, {"texts": [value]}),
    ]
    for form, record in records:
        assert read(form, 0, json=record)[-1] == ("gpt", text), record
    assert (
        read(CAPTION, json={"caption": value})[-1]
        == read(CAPTION, json={"text": [value, "B"]})[-1]
        == ("gpt", text)
    )
    asked = read(QA, 0, json={"question": value, "answer": "x", "system": [part]})
    assert asked == (("system", text), ("human", text), ("gpt", "x"))


def test_a_page_is_one_answer_with_its_images_in_their_places():
    texts = [
        None,
        None,
        "First.",
        "Second.",
        None,
        " Third.\n\nEND_OF_DOCUMENT_TOKEN_TO_BE_REPLACED\n\nNext. ",
    ]
    answer = "First.\n\nSecond.\n\n<image>\n\nThird.\n\nNext."
    assert read(PAGE, 3, json={"texts": texts}) == (("human", "<image>\n<image>"), ("gpt", answer))
    # one that was not downloaded
    lost = {"texts": texts, "images": [None, "a.jpg", None, None, "b.jpg", None]}
    assert read(PAGE, 2, json=lost) == (("human", "<image>"), ("gpt", answer))
    assert read(PAGE, 1, json={"texts": ["A.", None]}) == (("human", ""), ("gpt", "A.\n\n<image>"))
    assert read(PAGE, 0, json={"texts": ["A.", "", "B."], "images": [None] * 3}) == (
        ("human", ""),
        ("gpt", "A.\n\nB."),
    )


def test_a_caption_is_found_where_it_stands():
    assert read(CAPTION, txt=b"A cat.\n") == read(CAPTION, caption=b" A cat.") == ASKED
    assert (
        read(CAPTION, json={"text": "A cat."})
        == read(CAPTION, json={"caption": ["<image>\nA cat.", "B"]})
        == ASKED
    )
    assert read(CAPTION, txt=b"A cat.", json={"caption": "A dog."}) == ASKED
    assert (
        read(
            SampleFormat("caption", "title", "What is it?"), txt=b"A dog.", json={"title": "A cat."}
        )
        == ASKED
    )


@pytest.mark.parametrize(
    ("form", "images", "texts", "reason", "seen"),
    [
        (SHAREGPT, 1, {"json": {"prompt": "x"}}, "no_conversation", "its keys are prompt"),
        (SHAREGPT, 1, {"json": {"messages": "x"}}, "no_conversation", "messages"),
        (SHAREGPT, 1, {"json": [1]}, "no_conversation", r"it is \[1\]"),
        (SHAREGPT, 1, messages({"role": "tool", "content": "x"}), "unknown_role", "turn 0 is from 'tool'"),
        (SHAREGPT, 1, messages({"role": 3, "content": "x"}), "unknown_role", "3"),
        (SHAREGPT, 1, messages({"role": "user", "content": [{"type": "video"}]}), "non_text_value", "video"),
        (SHAREGPT, 1, {"json": {"messages": PLAIN[:1]}}, "no_answer", "none from gpt"),
        (SHAREGPT, 1, {"json": {"messages": PLAIN[::-1]}}, "turn_order", "gpt, human"),
        (SHAREGPT, 2, messages(*MARKED), "image_count", "1 <image> marks in the "
                                                        "conversation, 2 images"),
        (SHAREGPT, 0, messages(*MARKED, images=["a"]), "image_count", "1 <image> marks in the conversation, 0 images"),
        (LLAVA, 0, {"json": {"conversations": LLAVA_TURNS, "image": "a"}}, "image_count", "1 <image> marks"),
        (LLAVA, 0, {"json": {"conversations": TEXT, "images": ["a", "b"]}}, "image_count", "names 2 images"),
        (LLAVA, 0, {"json": {"conversations": TEXT, "image_path": "a.jpg"}}, "image_count", "names 1 images"),
        (LLAVA, 1, {"json": {"conversations": TEXT}}, "image_count", "0 .* marks .*, 1 images; data.format=sharegpt"),
        (LLAVA, 0, {"json": {"conversations": TEXT}, "heic": b""}, "image_count", "KEY.heic are not read as images"),
        (LLAVA, 0, {"json": {"conversations": TEXT}, "input.jpg": b""}, "image_count", "KEY.input.jpg are not read"),
        (SHAREGPT, 0, {"json": {"messages": PLAIN}, "mp4": b""}, "image_count", "KEY.mp4 are not read as images"),
        (SHAREGPT, 1, messages(*PLAIN, videos=["a.mp4"]), "unread_media", r"it has videos: \['a.mp4'\]"),
        (LLAVA, 0, {"json": {"conversations": TEXT, "audio": "a.wav"}}, "unread_media", "it has audio"),
        (SHAREGPT, 1, messages(PLAIN[0], {**PLAIN[1], "weight": 0}), "masked_answer", "turn 1, .* has weight: 0"),
        (SHAREGPT, 1, messages(PLAIN[0], {**PLAIN[1], "loss": False}), "masked_answer", "has loss: False"),
        (SHAREGPT, 1, messages(PLAIN[0], {**PLAIN[1], "train": False}), "masked_answer", "has train: False"),
        (QA, 1, {"json": {"question": "x", "texts": ["a"]}}, "no_conversation", "needs question .* keys are question"),
        (QA, 1, {"json": {"question": "x", "answer": [3, 3, 9, 9]}}, "non_text_value", r"its answer is \[3, 3, 9, 9\]"),
        (QA, 1, {"json": {"question": "x", "answer": float("nan")}}, "non_text_value", "turn 1 has the value nan"),
        (SHAREGPT, 1, messages(PLAIN[0], {"role": "assistant", "content": [0.1, 0.2]}), "non_text_value", "value 0.1"),
        (SHAREGPT, 0, messages(*PLAIN, system={"a": 1}), "non_text_value", "turn 0 has the value {'a': 1}"),
        (SHAREGPT, 0, messages({**PLAIN[0], "images": ["a"]}, PLAIN[1]), "image_count", "names 1 images"),
        (LLAVA, 0, {"json": {"conversations": TEXT, "system": "x"}}, "unread_part", "a system prompt .*sharegpt"),
        (LLAVA, 0, {"json": {"conversations": [TEXT[0], {**TEXT[1], "loss": 0}]}}, "unread_part", "not to be trained"),
        (PAGE, 0, {"json": {"texts": ["a"], "videos": ["a.mp4"]}}, "unread_media", "it has videos"),
        (SHAREGPT, 1, messages(*PLAIN, tools='[{"name": "zoom"}]'), "unread_media", "it has tools: .*zoom"),
        (QA, 1, {"json": {"question": ["x", "y"], "answer": ["a", "b"]}}, "non_text_value", "has several questions"),
        (QA, 1, {"json": {"question": "x", "answers": "['a', 'b']"}}, "non_text_value", "a list of Python's"),
        (QA, 1, {"json": {"texts": [{**PAIRS[0], "train": False}]}}, "masked_answer", "has train: False"),
        (QA, 1, {"json": {"question": "x", "answers": ["a", None]}}, "non_text_value", "turn 1 has the value None"),
        (QA, 1, {"json": {"texts": [{"user": "x"}]}}, "non_text_value", "turn 1 has the value None"),
        (QA, 1, {"json": {"texts": PAIRS, "image": ["a", "b"]}}, "image_count", "names 2 images, but .* has 1"),
        (PAGE, 1, {"json": {"texts": PAIRS}}, "no_conversation", "a list of texts and nulls .* "
                                                                 "its keys are texts"),
        (PAGE, 1, {"json": {"texts": [None]}}, "no_answer", "turn 1, from gpt, is empty"),
        (PAGE, 1, {"json": {"texts": ["a"]}}, "image_count", "0 <image> marks in the "
                                                             "conversation, 1 images"),
        (PAGE, 1, {"json": {"texts": ["a"], "images": []}}, "image_count", "0 <image> marks"),
        (PAGE, 1, {"json": {"texts": ["a", None], "images": ["a"]}}, "image_count", "texts has 2 places"),
        (PAGE, 1, {"json": {"texts": [None, "an <image>"]}}, "image_count", "2 <image> marks"),
        (CAPTION, 1, {"txt": b"\xff"}, "not_json", "txt: 'utf-8'"),
        (CAPTION, 1, {"txt": b" <image> "}, "no_answer", "empty"),
        (CAPTION, 0, {"txt": b"A cat."}, "image_count", "a caption without an image"),
        (CAPTION, 1, {"json": {"url": "x", "key": 1}}, "no_caption", "no key caption or text; its keys are url, key"),
        (CAPTION, 1, {}, "no_caption", "it has jpg"),
        (CAPTION, 1, {"json": {"caption": None}}, "non_text_value", "the caption is None"),
    ],
)  # fmt: skip
def test_what_is_no_sample_says_what_was_seen(form, images, texts, reason, seen):
    with pytest.raises(BadSample, match=seen) as caught:
        read(form, images, **texts)
    assert caught.value.reason == reason


LOOK = {"type": "text", "text": "A cat."}


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "It purrs."},
        {"thinking": "It purrs."},
        {"thinking_blocks": [{"thinking": "It purrs."}]},
        {"tool_calls": [{"type": "function", "function": {"name": "zoom"}}]},
        {"function_call": {"name": "zoom"}},
        {"refusal": "No."},
        {"audio": {"id": "a"}},
        {"value": "A dog."},
        {"content": [{"type": "image", "text": "A dog."}, LOOK]},
        {"content": [{**LOOK, "image": "b.jpg"}]},
        {"content": [{**LOOK, "thinking": "It purrs."}]},
        {"content": [{**LOOK, "content": "A dog."}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_turn_that_holds_more_than_its_text_is_no_sample(more):
    told = {"from": "gpt", "value": "A cat."}
    records = [(SHAREGPT, {"messages": [PLAIN[0], {**PLAIN[1], **more}]})]
    if "value" not in more and not isinstance(more.get("content"), list):
        records += [
            (LLAVA, {"conversations": [TEXT[0], {**told, **more}]}),
            (QA, {"texts": [{**PAIRS[0], **more}]}),
        ]
    for form, record in records:
        with pytest.raises(BadSample, match=r"unread_part: turn \d has ") as caught:
            read(form, 0, json=record)
        assert next(reversed(more)) in str(caught.value) or "content" in more
    empty = {
        key: [] if isinstance(value, list) else None
        for key, value in more.items()
        if key != "content"
    }
    assert read(SHAREGPT, json={"messages": [PLAIN[0], {**PLAIN[1], **empty}]}) == ASKED


@pytest.mark.parametrize(
    "question",
    [
        "<video>What happens?",
        "Look.\n <video>\nWhat happens?",
        "<image>\n<image><audio> What is said?",
        "Picture 1: <img>a/b.jpg</img>\nWhat is it?",
        "<|vision_start|><|image_pad|><|vision_end|>What is it?",
        "<ImageHere>What is it?",
        "Find <ref-object>.",
    ],
)
def test_a_placeholder_of_what_is_not_there_is_no_question(question):
    objects = {"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}
    for form, key, turns in (
        (SHAREGPT, "messages", [{**PLAIN[0], "content": question}, PLAIN[1]]),
        (LLAVA, "conversations", [{"from": "human", "value": question}, TEXT[1]]),
        (QA, "texts", [{"user": question, "assistant": "x"}]),
    ):
        with pytest.raises(BadSample, match=r"unread_part: .*<"):
            read(form, question.count("<image>"), json={key: turns, "objects": objects})
    with pytest.raises(
        BadSample, match="unread_part: <ref-object> and <bbox> stand for its objects"
    ):
        read(QA, 0, json={"question": "Where?", "answer": "<bbox>", "objects": objects})


@pytest.mark.parametrize(
    "question",
    [
        "Why is my <video> silent, and <audio> not?",
        '<video controls>\n<source src="a.mp4">\n</video>',
        "<video>\n<source>\n</video>\nWhy does it not play?",
        "What does <img src='a.jpg'> mean? <img>",
        "Is <bbox>1, 2</bbox> a box?",
        "Write `<ref-object>`.",
    ],
)
def test_talk_of_tags_is_text(question):
    for none in ({}, {"objects": {"ref": [], "bbox": []}}, {"objects": None}):
        assert read(QA, 0, json={"question": question, "answer": "<video>", **none})[0] == (
            "human",
            question,
        )


def test_what_says_more_is_read_and_what_names_no_image_is_text():
    answer = {**PLAIN[1], "weight": 1, "loss": True, "train": None}
    assert (
        read(SHAREGPT, json={"messages": [{**PLAIN[0], "train": False}, answer], "videos": []})
        == ASKED
    )
    for none in (
        {},
        {"images": []},
        {"image": None},
        {"image_path": ""},
        {"images": [None]},
        {"image": [""]},
        NO_BYTES,
    ):
        assert read(LLAVA, 0, json={"conversations": TEXT, **none}) == (
            ("human", "Why?"),
            ("gpt", "x"),
        )
    assert read(LLAVA, 0, json={"conversations": TEXT}, npy=b"", cls=b"1") == (
        ("human", "Why?"),
        ("gpt", "x"),
    )
    page = {"texts": ["A.", None, None], "images": [None, "", {"path": "a.jpg"}]}
    assert read(PAGE, 1, json=page)[-1] == ("gpt", "A.\n\n<image>")
    assert (
        read(LLAVA, 1, json={"conversations": LLAVA_TURNS, "image": "a"}, **{"mask.png": b""})[0][1]
        == "<image>"
    )


def test_names_hold_what_an_index_and_a_fingerprint_depend_on():
    assert (LLAVA.reading, LLAVA.wording) == ("llava", "")
    assert (
        SampleFormat("caption", None, "a").reading
        == CAPTION.reading
        != SampleFormat("caption", "title").reading
    )
    forms = [
        LLAVA,
        SHAREGPT,
        CAPTION,
        SampleFormat("caption", None, "a"),
        SampleFormat("caption", "title", "a"),
    ]
    assert len({form.wording for form in forms}) == len(forms)
    assert SampleFormat("sharegpt", "title", "a").wording == SHAREGPT.wording
