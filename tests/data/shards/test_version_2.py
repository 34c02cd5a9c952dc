"""Indexes of version 2, which mmtrain wrote before GIF, BMP and TIFF files were images, serve or are made again.

version_2/ holds two shards and the indexes that the commit before version 3 wrote for `demo:llm` and the template chat.
Both have a picture turned by EXIF, a text beside a KEY.txt, a damaged json and one file that is no image; gif.tar
besides a sample with the picture e.GIF, which that commit took for a sample without.
"""

import shutil
from pathlib import Path

import pytest

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.data.inspection.survey import survey
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.shards.index import indexed_texts, read_index
from mmtrain.data.shards.index_file import index_path
from mmtrain.data.shards.indexing import build_indexes, ensure_indexes
from mmtrain.data.shards.verify import verify_shard

WRITTEN = Path(__file__).parent / "version_2"
TEXT = "be4f1c9fd08df4f7"  # the text fingerprint
COMMAND = ("--tokenizer", "demo:llm", "--template", "chat", "--workers", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(WRITTEN, tmp_path / "shards")


def test_one_of_a_tar_without_such_files_serves_as_it_is(folder, capsys, logged):
    tar = folder / "plain.tar"
    before = index_path(tar).read_bytes()
    ensure_indexes([tar], "demo:llm", "chat")
    assert main(["index", str(tar), *COMMAND]) == 0
    assert index_path(tar).read_bytes() == before and "1 of 1 shards are ready" in capsys.readouterr().out
    assert indexed_texts(tar) == (2, {TEXT: 2})


def test_completed_it_is_what_a_scan_writes(folder):
    tar = folder / "plain.tar"
    llava, caption = SampleFormat(), SampleFormat("caption", caption_prompt="What is it?")
    for form in (llava, caption):
        build_indexes([tar], "demo:llm", "plain", form=form, workers=1)
    completed = index_path(tar).read_bytes()
    index_path(tar).unlink()
    for template, form in (("plain", caption), ("chat", llava), ("plain", llava)):
        build_indexes([tar], "demo:llm", template, form=form, workers=1)
    assert index_path(tar).read_bytes() == completed
    faults = read_index(tar).faults
    assert {place: reason for place, (reason, _) in faults["llava"].items()} == {2: "not_json", 3: "undecodable_image"}
    reasons = {0: "no_caption", 1: "image_count", 2: "not_json", 3: "undecodable_image"}
    assert {place: reason for place, (reason, _) in faults["caption"].items()} == reasons


def test_one_of_a_tar_with_such_files_is_made_again_with_its_checksums(folder, logged):
    tar = folder / "gif.tar"
    assert indexed_texts(tar) == (0, {TEXT: 2})
    assert survey([tar]).image_sizes.tolist() == [[5, 9], [4, 3]]
    assert [line[:57] for line in logged] == ["indexes from before GIF, BMP and TIFF files were images: "]
    before = read_index(tar)
    logged.clear()
    ensure_indexes([tar], "demo:llm", "chat", workers=1)
    assert logged[0].endswith("images: 1; their shards are read again")
    after = read_index(tar)
    assert after.members == before.members and after.image_sizes[4] == ((6, 2),)
    assert 4 in before.faults["llava"] and 4 not in after.faults["llava"]
    assert indexed_texts(tar) == (3, {TEXT: 3})
    assert verify_shard(tar) == []


def test_bytes_that_changed_since_are_no_new_truth(folder):
    tar = folder / "gif.tar"
    content = bytearray(tar.read_bytes())
    content[read_index(tar).members[0][1].offset + 300] ^= 1
    tar.write_bytes(content)
    before = index_path(tar).read_bytes()
    with pytest.raises(UserError, match=r"gif\.tar: is not what was indexed: .* mmtrain index --rebuild "):
        ensure_indexes([tar], "demo:llm", "chat", workers=1)
    assert index_path(tar).read_bytes() == before
    build_indexes([tar], "demo:llm", "chat", workers=1, rebuild=True)
    assert indexed_texts(tar) == (3, {TEXT: 3})
