"""A tokenizer's files that are none, whatever is in them, are one error that names the folder."""

import base64
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

import mmtrain.demo
from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import Sample
from mmtrain.data.samples.templates import TextCounter, load_tokenizer

NESTED = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", NESTED),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": [["b", "c"]]}}'),
        ("tokenizer_config.json", NESTED),
        ("tokenizer_config.json", '{"model_max_length": ' + "9" * 5000 + "}"),
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
    count = TextCounter("demo:llm", template)
    given = pickle.loads(pickle.dumps(count))
    sample = Sample("a", "s.tar", (("human", "<image>\nWhat?"), ("gpt", "A red two.")), (b"",))
    assert given(sample) == count(sample) > 3 and given.fingerprint == count.fingerprint


def test_a_tokenizer_of_a_gigabyte_is_refused_unread(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**30)
    with pytest.raises(UserError, match="larger than 200,000,000 bytes"):
        load_tokenizer(str(tmp_path))


def test_python_in_a_tokenizers_folder_is_not_run_whatever_stands_on_standard_input(tmp_path, monkeypatch):
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


@pytest.fixture
def rewritten(tmp_path):
    """Writes a folder with the demo's tokenizer, parts of its tokenizer.json replaced."""

    def write(**parts):
        folder = shutil.copytree(Path(mmtrain.demo.__file__).parent / "llm", tmp_path / "llm")
        content = json.loads((folder / "tokenizer.json").read_text()) | parts
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return str(folder)

    return write


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def normalizers(*rules):
    return {"normalizer": {"type": "Sequence", "normalizers": list(rules)}}


def charsmap(trie, texts):
    table = len(trie).to_bytes(4, "little") + trie + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "parts",
    [
        normalizers(*[replace({"String": "e"}, "e" * 1000)] * 4),
        normalizers(*[replace({"Regex": "x*"}, "y")] * 30),
        normalizers({"type": "Prepend", "prepend": "a" * 1000}),
        normalizers(charsmap(b"\0" * 4, b"e" * 1000 + b"\0")),
        {"decoder": {"type": "Sequence", "decoders": [replace({"String": "e"}, "e" * 1000)]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 20}},
    ],
)
def test_a_tokenizer_whose_rules_multiply_texts_is_refused_before_it_is_loaded(rewritten, parts):
    with pytest.raises(UserError, match=r"tokenizer\.json: the rules of .* times as much text"):
        load_tokenizer(rewritten(**parts))


def test_rules_of_tokenizers_in_use_are_taken(rewritten):
    """Those of Llama 2 and T5 together, which replace blanks and follow NFKC."""
    blanks = [replace({"String": " "}, "\u2581"), replace({"Regex": " {2,}"}, "\u2581")]
    parts = normalizers({"type": "NFKC"}, {"type": "Prepend", "prepend": "\u2581"}, *blanks)
    assert load_tokenizer(rewritten(**parts))


@pytest.mark.parametrize("template", ["plain", "chat"])
@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ({"type": "Precompiled", "precompiled_charsmap": "AQAAAA=="}, "precompiled_charsmap is damaged"),
        (charsmap(b"\0\xff\xff\xff", b"a\0"), "its tokenizer fails"),  # leads out of the table
    ],
)
def test_a_tokenizer_that_panics_is_one_error(rewritten, rule, seen, template):
    folder = rewritten(normalizer=rule)
    with pytest.raises(UserError, match=seen):
        TextCounter(folder, template)
