"""The main job's result in stock transformers: the answers that the run itself counted."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from json_files import read_lines
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from untrained_runs import run_export

from mmtrain.checkpoint.step_folder import find
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.catalog import Catalog, Reader
from mmtrain.data.stream.packs import Processor
from mmtrain.data.stream.stored import DataSet, store_set

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


@pytest.fixture(scope="module")
def run(demo_run) -> Path:
    """The folder of the main job."""
    assert demo_run.ran.returncode == 0, demo_run.ran.stderr
    return demo_run.folder


@pytest.fixture(scope="module")
def exported(run, demo_cache, tmp_path_factory) -> Path:
    """The run as a Hugging Face folder, made by the tool, logits verified."""
    out = tmp_path_factory.mktemp("exported") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(demo_cache))
        assert run_export(run, "hf", out, "--verify", "8") == 0
    return out


@pytest.fixture(scope="module")
def documents(run, demo_cache) -> list[Document]:
    """The run's held-out samples."""
    config = find(run).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(demo_cache))
        source = Processor(config)
        catalog = Catalog([store_set(config, DataSet(expand_shards(config.eval.shards)))])
    reader = Reader(catalog, 0)
    count = config.eval.max_samples or len(catalog)
    return [source.read(reader, number) for number in range(count)]


def answers(document: Document) -> list[tuple[list[dict], list[int], list[int]]]:
    """For each answer: the messages before it, the prompt's tokens, the answer's tokens with its
    end mark.
    """
    found = []
    turns = document.sample.turns
    begins = [
        t
        for t, label in enumerate(document.labels)
        if label != IGNORE and (t == 0 or document.labels[t - 1] == IGNORE)
    ]
    asked = [number for number, (speaker, _) in enumerate(turns) if speaker == "gpt"]
    assert len(begins) == len(asked)
    for begin, number in zip(begins, asked, strict=True):
        messages = [{"role": ROLES[speaker], "content": text} for speaker, text in turns[:number]]
        truth = list(takewhile(lambda label: label != IGNORE, document.labels[begin:]))
        found.append((messages, list(document.input_ids[: begin + 1]), truth))
    return found


@pytest.mark.timeout(1300)
def test_stock_greedy_answers_are_as_often_exact_as_the_run_counted(run, exported, documents):
    processor = AutoProcessor.from_pretrained(exported)
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert {kind: entries for kind, entries in info.items() if entries} == {}
    by_lengths = defaultdict(list)  # so that no batch is padded
    for document in documents:
        image = Image.open(io.BytesIO(document.sample.images[0]))
        for messages, prompt, truth in answers(document):
            text = processor.apply_chat_template(messages, add_generation_prompt=True)
            assert text.count(IMAGE_MARK) == 1
            inputs = processor(images=image, text=text, return_tensors="pt")
            trained_on = [
                model.config.image_token_id if token == IMAGE_POSITION else token
                for token in prompt
            ]
            assert inputs["input_ids"][0].tolist() == trained_on
            by_lengths[len(prompt), len(truth)].append((inputs, truth))
    right = total = 0
    for (length, answer), batch in by_lengths.items():
        inputs = {name: torch.cat([one[name] for one, _ in batch]) for name in batch[0][0]}
        said = model.generate(**inputs, max_new_tokens=answer)[:, length:]
        for tokens, (_, truth) in zip(said.tolist(), batch, strict=True):
            right += tokens[:answer] == truth
            total += 1
    lines = read_lines(run / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert total == last["answers"] >= 200
    assert right == round(last["exact_match"] * last["answers"])


def test_the_model_card_says_how_good_the_run_was(run, exported):
    card = (exported / "README.md").read_text()
    last = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"eval"' in line][
        -1
    ]
    state = find(run).state
    assert f"{json.loads(last)['exact_match']:.1%} of {json.loads(last)['answers']}" in card
    assert "{0} of {0}".format(state["max_steps"]) in card and state["data"]["fingerprint"] in card
