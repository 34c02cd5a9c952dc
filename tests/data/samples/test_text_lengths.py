"""A tokenizer's files that are none, whatever is in them, are one error that names the folder."""

import io
import json
import os
import pickle
import shutil

import pytest
from json_files import read_json

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import Sample, Tokenization
from mmtrain.data.samples.templates import TextCounter, load_tokenizer

NESTED = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", NESTED),
        (
            "tokenizer.json",
            '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": '
            '[["b", "c"]]}}',
        ),
        ("tokenizer_config.json", NESTED),
    ],
)
def test_absurd_tokenizer_files_are_refused_by_name(tmp_path, name, text):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("template", ["plain", "chat"])
def test_another_process_can_be_given_a_counter(template):
    count = TextCounter(Tokenization("demo:llm", template))
    given = pickle.loads(pickle.dumps(count))
    sample = Sample("a", "s.tar", (("human", "<image>\nWhat?"), ("gpt", "A red two.")), (b"",))
    assert given(sample) == count(sample) > 3 and given.how == count.how


def test_a_tokenizer_of_a_gigabyte_is_refused_unread(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**30)
    with pytest.raises(UserError, match="larger than 200,000,000 bytes"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizers_longest_text_that_is_no_number_is_refused_by_the_file(tiny, tmp_path):
    """It was a TypeError while shards were indexed."""
    folder = shutil.copytree(tiny / "llm", tmp_path / "llm")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(read_json(file) | {"model_max_length": "4096"}))
    with pytest.raises(UserError, match=f"^{file} says model_max_length '4096'"):
        TextCounter(Tokenization(str(folder), "plain"))


def test_python_in_a_tokenizers_folder_is_not_run_whatever_stands_on_standard_input(
    tmp_path, monkeypatch
):
    """transformers asks on standard input whether to run it, which `yes |` answers."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    auto_map = {"AutoTokenizer": ["tok.FooTokenizer", "tok.FooTokenizer"]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "FooTokenizer", "auto_map": auto_map})
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tok.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "imported").exists()
