"""What is said of a model folder's tokenizer files without the libraries that read them."""

import os

import pytest

from mmtrain.base.errors import UserError
from mmtrain.facts.tokenizer_files import text_fingerprint


def test_a_folder_without_a_tokenizer_and_one_of_a_gigabyte_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        text_fingerprint(tmp_path, "plain")
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**30)
    with pytest.raises(UserError, match=r"tokenizer\.json: larger than 200,000,000 bytes"):
        text_fingerprint(tmp_path, "plain")
