import functools
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from archives import conversation, picture, write_tar
from transformers import AddedToken, AutoTokenizer

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.index import index_path, read_index
from mmtrain.data.shards.indexing import build_indexes, ensure_indexes, index_headers
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.tokenizer_files import text_fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

LLM = "demo:llm"
PNG = picture(5, 4)
PLAIN = Tokenization(LLM, "plain")
CHAT = Tokenization(LLM, "chat")
FINGERPRINTS = {how.template: how.fingerprint for how in (PLAIN, CHAT)}


def samples(seed: int, count: int = 12) -> list[tuple[str, bytes, list[bytes]]]:
    """Key, json and images: captions, conversations of several turns, unicode; with none, one and
    two images.
    """
    draw = random.Random(seed)
    made = []
    for number in range(count):
        images = draw.choice([0, 1, 1, 2])
        texts = [
            "What is this?",
            "red \U0001f600 und é",
            "seven\n\nlines",
            "A " * draw.randint(1, 90),
        ]
        more = draw.choice([(), (), ("And <b>?", draw.choice(texts))])
        question = "<image>\n" * images + draw.choice(texts)
        made.append(
            (f"{seed}-{number}", conversation(question, draw.choice(texts), *more), [PNG] * images)
        )
    return made


def files(made) -> list[tuple[str, bytes]]:
    found = []
    for key, content, images in made:
        found.append((f"{key}.json", content))
        found += [(f"{key}.{number}.png", image) for number, image in enumerate(images)]
    return found


@pytest.fixture
def tars(tmp_path):
    """Three shards; the second holds a sample without conversation."""
    made = [samples(seed) for seed in range(3)]
    made[1].insert(4, ("bad", b'{"conversations": []}', []))
    return [write_tar(tmp_path / f"s-{number}.tar", files(one)) for number, one in enumerate(made)]


def contents_of(tar: Path) -> list[dict]:
    """The json of each sample, by tarfile."""
    with tarfile.open(tar) as archive:
        return [
            json.load(archive.extractfile(member))
            for member in archive
            if member.name.endswith(".json")
        ]


def expected_lengths(tokenizer, template: str, tar: Path) -> list[int]:
    """Text tokens by stock transformers; 0 for what has no length."""
    lengths = []
    tokenizer.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    image = tokenizer.convert_tokens_to_ids("<image>")
    begin = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    for content in contents_of(tar):
        turns = content["conversations"]
        if not turns or (template == "plain" and len(turns) > 2):
            lengths.append(0)
        elif template == "plain":
            lengths.append(
                begin + len(tokenizer(turns[1]["value"], add_special_tokens=False).input_ids) + 1
            )
        else:
            roles = {"human": "user", "gpt": "assistant"}
            messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
            ids = tokenizer(
                tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
            ).input_ids
            lengths.append(len(ids) - ids.count(image))
    return lengths


def other_tokenizer(folder: Path) -> str:
    """The demo's tokenizer with words of its own, saved in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder(LLM))
    tokenizer.add_tokens(["red", "What", "lines"])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("template", ["plain", "chat"])
def test_lengths_are_those_of_stock_transformers(tars, template):
    build_indexes(tars, Tokenization(LLM, template))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(LLM))
    for tar in tars:
        index = read_index(tar)
        texts = index.texts[FINGERPRINTS[template]]
        assert texts.tokens == expected_lengths(tokenizer, template, tar)
        several = {
            place
            for place, content in enumerate(contents_of(tar))
            if len(content["conversations"]) > 2
        }
        assert set(texts.faults) == (several if template == "plain" else set())
        assert {reason for reason, _ in texts.faults.values()} <= {"template"}
        assert list(index.texts) == [FINGERPRINTS[template]]
    assert read_index(tars[1]).faults["llava"][4][0] == "no_conversation"
    assert (
        max(map(max, (read_index(tar).texts[FINGERPRINTS[template]].tokens for tar in tars))) > 60
    )


def test_a_second_tokenizer_adds_its_lengths_keeps_the_first_ones_and_touches_no_tar(
    tars, tmp_path
):
    build_indexes(tars, CHAT)
    before = [read_index(tar) for tar in tars]
    tar_state = [(tar.read_bytes(), tar.stat().st_mtime_ns, tar.stat().st_ino) for tar in tars]
    second = other_tokenizer(tmp_path / "second")
    build_indexes(tars, Tokenization(second, "chat"))
    fingerprint = text_fingerprint(tmp_path / "second", "chat")
    tokenizer = AutoTokenizer.from_pretrained(second)
    for tar, first in zip(tars, before, strict=True):
        index = read_index(tar)
        assert index.texts.pop(fingerprint).tokens == expected_lengths(tokenizer, "chat", tar)
        assert index == first
    assert (
        expected_lengths(tokenizer, "chat", tars[0]) != before[0].texts[FINGERPRINTS["chat"]].tokens
    )
    assert [
        (tar.read_bytes(), tar.stat().st_mtime_ns, tar.stat().st_ino) for tar in tars
    ] == tar_state


def test_lengths_added_later_are_those_of_a_scan_and_the_order_of_tokenizers_does_not_show(tars):
    for how in (PLAIN, CHAT):
        build_indexes(tars, how)
    one = [index_path(tar).read_bytes() for tar in tars]
    for tar in tars:
        index_path(tar).unlink()
    for how in (CHAT, PLAIN):
        build_indexes(tars, how, workers=2)
    assert [index_path(tar).read_bytes() for tar in tars] == one


def test_only_json_is_read_for_a_second_tokenizer_and_damage_to_it_is_that_samples_fault(tars):
    build_indexes(tars[:1], PLAIN)
    before = read_index(tars[0])
    content = bytearray(tars[0].read_bytes())
    jsons = [
        next(member for member in members if member.suffix == "json") for members in before.members
    ]
    damaged = jsons[3]
    content[damaged.offset + damaged.size // 2] ^= 4
    kept = {
        offset for member in jsons for offset in range(member.offset, member.offset + member.size)
    }
    for offset in set(range(len(content))) - kept:
        content[offset] = 0xAA  # headers and images: whoever read them would notice
    tars[0].write_bytes(content)
    build_indexes(tars[:1], CHAT)
    index = read_index(tars[0])
    texts = index.texts[FINGERPRINTS["chat"]]
    assert {place: reason for place, (reason, _) in texts.faults.items()} == {3: "checksum"}
    assert texts.tokens[3] == 0
    assert all(texts.tokens[:3] + texts.tokens[4:])
    assert index.texts[FINGERPRINTS["plain"]] == before.texts[FINGERPRINTS["plain"]]
    assert index.faults == {"llava": {}}


def test_what_is_ready_is_left_alone_and_what_is_not_is_found(tars, logged):
    assert index_headers(tars, FINGERPRINTS["plain"])[1] == tars
    build_indexes(tars[:2], PLAIN)
    build_indexes(tars[2:], CHAT)
    assert index_headers(tars, FINGERPRINTS["plain"])[1] == tars[2:]
    written = [index_path(tar).stat().st_mtime_ns for tar in tars[:2]]
    logged.clear()
    ensure_indexes(tars, PLAIN)
    assert index_headers(tars, FINGERPRINTS["plain"])[1] == []
    assert [index_path(tar).stat().st_mtime_ns for tar in tars[:2]] == written
    assert logged[0] == "indexing 1 of 3 shards (once; the indexes are kept)"
    assert logged[-1].startswith("1 of 1 shards")
    logged.clear()
    ensure_indexes(tars, PLAIN)
    assert logged == []


def test_an_index_that_is_stale_or_damaged_is_never_replaced_unasked(tars):
    build_indexes(tars, PLAIN)
    right = [index_path(tar).read_bytes() for tar in tars]
    index_path(tars[0]).write_bytes(right[0][:-5] + b"\n")
    tars[2].write_bytes(tars[2].read_bytes() + bytes(512))
    left = [index_path(tar).read_bytes() for tar in tars]
    for attempt in (ensure_indexes, build_indexes):
        with pytest.raises(
            UserError,
            match=r"^2 of 3 shards:\n  .*s-0\.tar\.index: is damaged.*\n  .*s-2.*is stale",
        ):
            attempt(tars, PLAIN)
        assert [index_path(tar).read_bytes() for tar in tars] == left
    build_indexes(tars, PLAIN, rebuild=True)
    assert [index_path(tar).read_bytes() for tar in tars[:2]] == right[:2]
    assert read_index(tars[2]).tar_bytes == tars[2].stat().st_size


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tar_that_cannot_be_indexed_does_not_keep_the_others_from_it(tars, workers):
    content = bytearray(tars[0].read_bytes())
    content[3] ^= 1
    tars[0].write_bytes(content)
    with pytest.raises(UserError, match=r"^[^\n]*s-0\.tar: damaged tar header at byte 0[^\n]*$"):
        build_indexes(tars, PLAIN, workers=workers)
    assert [index_path(tar).exists() for tar in tars] == [False, True, True]


def test_a_template_that_the_tokenizer_does_not_fit_is_an_error_before_any_shard_is_read(
    tars, tmp_path
):
    folder = tmp_path / "bare"
    tokenizer = AutoTokenizer.from_pretrained(model_folder(LLM))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="chat template"):
        build_indexes(tars, Tokenization(str(folder), "chat"), workers=2)
    assert not any(index_path(tar).exists() for tar in tars)


START = """
import sys
from pathlib import Path
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.indexing import build_indexes
tars = [Path(name) for name in sys.argv[1:]]
print("ready", flush=True)
while True:
    build_indexes(tars, Tokenization("demo:llm", "plain"), workers=2, rebuild=True)
"""


def children(process: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def stopped_with_children(process: subprocess.Popen) -> list[int]:
    process.send_signal(signal.SIGSTOP)
    return children(process.pid)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_from_outside_it_leaves_whole_indexes_and_no_process(tars):
    build_indexes(tars, PLAIN)
    whole = [index_path(tar).read_bytes() for tar in tars]
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", START, *map(str, tars)]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        while not (workers := stopped_with_children(process)):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        process.kill()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.01)
    assert [index_path(tar).read_bytes() for tar in tars] == whole


def test_processes_that_index_for_two_templates_at_once_keep_each_others_lengths(tmp_path):
    tars = [
        write_tar(tmp_path / f"s-{number}.tar", files(samples(number, 40))) for number in range(8)
    ]
    start = functools.partial(multiprocessing.get_context("fork").Process, target=build_indexes)
    running = [start(args=(tars, how)) for how in (PLAIN, CHAT)]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=120)
        assert process.exitcode == 0
    for tar in tars:
        assert set(read_index(tar).texts) == set(FINGERPRINTS.values())
