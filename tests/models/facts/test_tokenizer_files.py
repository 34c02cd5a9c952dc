"""What is said of a model folder's tokenizer files without the libraries that read them."""

import os

import pytest

from mmtrain.base.errors import UserError
from mmtrain.models.facts.tokenizer_files import missing_chat_template, text_fingerprint


def test_the_message_names_the_folder_and_two_ways_out(tmp_path):
    ways = f"tokenizer in {tmp_path} has none; put a chat_template.jinja beside the tokenizer"
    assert ways in str(missing_chat_template(tmp_path))
    (tmp_path / "chat_template.json").write_text("{}")
    assert "has none; its chat_template.json is read by processors alone; put" in str(missing_chat_template(tmp_path))


def test_a_folder_without_a_tokenizer_and_one_of_a_gigabyte_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        text_fingerprint(tmp_path, "plain")
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**30)
    with pytest.raises(UserError, match=r"tokenizer\.json: larger than 200,000,000 bytes"):
        text_fingerprint(tmp_path, "plain")
