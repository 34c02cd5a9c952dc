"""Indexes of version 1, which mmtrain wrote before it turned pictures, serve runs and are brought up to date.

version_1/ holds a shard of seven samples and the index that the commit before version 2 wrote for `demo:llm` and the
template chat: among them a JPEG stored with EXIF orientation 6, a PNG with 8, a WebP with 3, one file that is no image
and one json that is damaged.
"""

import json
import shutil
import zlib
from pathlib import Path

import pytest

from mmtrain.__main__ import main
from mmtrain.base.json_lines import compact_json
from mmtrain.data.inspection.survey import survey
from mmtrain.data.shards.index import read_columns, read_index
from mmtrain.data.shards.index_file import index_path
from mmtrain.data.shards.indexing import build_indexes, ensure_indexes, unready_shards
from mmtrain.data.shards.verify import verify_shard
from mmtrain.data.stream.catalog import Catalog, DataSet
from mmtrain.pretrained.layouts import ImageLayout
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.tokenizer_files import text_fingerprint

WRITTEN = Path(__file__).parent / "version_1"
TEXT = "be4f1c9fd08df4f7"  # its text fingerprint
FINGERPRINT = "904c315130fff66eda38868a876343182108f15e4e0553655b4df77fdaf5391a"  # as that commit's catalog had it


@pytest.fixture
def tar(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(WRITTEN, tmp_path / "shards") / "s.tar"


def fingerprint(tar: Path) -> str:
    return Catalog([DataSet((tar,))], [TEXT], ImageLayout("square", 16), 10**6, 0.5).fingerprint


def test_a_run_takes_it_as_it_is_and_has_the_data_fingerprint_of_before(tar, logged):
    assert text_fingerprint(model_folder("demo:llm"), "chat") == TEXT
    before = index_path(tar).read_bytes()
    ensure_indexes([tar], "demo:llm", "chat")
    assert fingerprint(tar) == FINGERPRINT
    assert index_path(tar).read_bytes() == before and logged == []


def test_brought_up_to_date_it_is_what_a_scan_writes_and_the_data_fingerprint_stays(tar, capsys):
    copies = [shutil.copytree(WRITTEN, tar.parent / f"{number}") / "s.tar" for number in range(3)]
    command = ["index", *map(str, copies), "--tokenizer", "demo:llm", "--template", "chat", "--workers", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "indexes of version 1: 3; their shards' images are read" in printed and printed.count("version 1") == 1
    build_indexes([tar], "demo:llm", "chat", workers=1, rebuild=True)
    assert {index_path(copy).read_bytes() for copy in copies} == {index_path(tar).read_bytes()}
    assert fingerprint(copies[0]) == FINGERPRINT
    found = read_index(tar)
    assert found.image_sizes == [((5, 9),), (), ((3, 7), (4, 4)), ((2, 6),), ((8, 3),), ((0, 0),), ((3, 2),)]
    assert found.sideways == [(0, 0), (2, 0), (3, 0)]
    assert main(command) == 0
    assert "3 of 3 shards are ready" in capsys.readouterr().out


def test_lengths_for_another_template_bring_it_up_to_date_and_leave_those_that_it_has(tar):
    build_indexes([tar], "demo:llm", "plain", workers=1)
    both = index_path(tar).read_bytes()
    build_indexes([tar], "demo:llm", "plain", workers=1, rebuild=True)
    build_indexes([tar], "demo:llm", "chat", workers=1)
    assert index_path(tar).read_bytes() == both
    assert fingerprint(tar) == FINGERPRINT


def test_what_was_damaged_since_is_not_taken_for_right(tar):
    content = bytearray(tar.read_bytes())
    picture = read_index(tar).members[0][1]
    content[picture.offset + 300] ^= 1
    tar.write_bytes(content)
    (before,) = verify_shard(tar)
    assert unready_shards([tar], TEXT, oldest=2) == [tar]
    build_indexes([tar], "demo:llm", "chat", workers=1)
    assert verify_shard(tar) == [before] and before.key == "a" and "jpg: 738 bytes whose CRC32" in before.detail
    assert fingerprint(tar) == FINGERPRINT
    assert read_index(tar).image_sizes[0] == ((9, 5),) and read_index(tar).sideways == [(2, 0), (3, 0)]


def test_a_survey_of_it_says_which_sizes_it_shows(tar, logged):
    assert read_columns(tar).sideways is None
    assert survey([tar]).image_sizes.tolist() == [[9, 5], [7, 3], [4, 4], [6, 2], [8, 3], [3, 2]]
    assert logged == [
        "indexes of version 1: 1; the sizes of their images are as stored, not as EXIF turns them; bring them up to "
        "date: mmtrain index --tokenizer PATH --template NAME SHARDS"
    ]
    logged.clear()
    build_indexes([tar], "demo:llm", "chat", workers=1)
    logged.clear()
    assert survey([tar]).image_sizes.tolist() == [[5, 9], [3, 7], [4, 4], [2, 6], [8, 3], [3, 2]]
    assert logged == []


def test_one_that_names_images_which_are_none_keeps_their_sizes(tar):
    first, second, _ = index_path(tar).read_bytes().split(b"\n")
    header, content = json.loads(first), json.loads(second)
    content["images"] = {"counts": [1, 1, 2, 1, 1, 1, 2], "width": [9] * 9, "height": [5] * 9}
    second = compact_json(content)
    header |= {"bytes": len(second)}
    del header["crc32"]
    header["crc32"] = zlib.crc32(second, zlib.crc32(compact_json(header)))
    index_path(tar).write_bytes(compact_json(header) + b"\n" + second + b"\n")
    build_indexes([tar], "demo:llm", "chat", workers=1)
    found = read_index(tar)
    assert (found.image_sizes[1], found.image_sizes[6]) == (((9, 5),), ((3, 2), (9, 5)))


def test_a_run_that_has_to_complete_it_says_that_its_images_are_read_again(tar, logged):
    ensure_indexes([tar], "demo:llm", "plain", workers=1)
    assert logged[0].startswith("indexes of version 1: 1; their shards' images are read for the sizes")
    assert read_columns(tar).sideways is not None
