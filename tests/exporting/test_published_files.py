"""An export holds no file of a stranger's folder but those that stock classes read, no secret and
no code.
"""

import json
import shutil

import pytest
from json_files import read_json
from transformers import AutoTokenizer
from untrained_runs import config_of, export, make_checkpoint
from whole_models import save_whole, whole_config

from mmtrain.base.errors import UserError

SECRET = "the content of an id_rsa"
CODE = {"auto_map": {"AutoConfig": "evil.Config"}, "custom_generate": "evil"}
STRANGE = (
    "evil.py",
    "custom_generate/generate.py",
    "w.pkl",
    "last.ckpt",
    "lib.so",
    "run.sh",
    ".env",
    "notes.txt",
)
TEXT = ("model.vision=null", "data.template=llava_v1", "model.trainable=[llm.head]")


def add_what_a_stranger_adds(folder):
    """Code, secrets and links to them, in the folder and in its configurations."""
    for name in (*STRANGE, "additional_chat_templates/evil.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SECRET)
    (folder.parent / "secret").write_text(SECRET)
    for name in ("LICENSE.txt", "more.json"):
        (folder / name).symlink_to(folder.parent / "secret")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = folder / name
        content = read_json(file) if file.is_file() else {}
        parts = {name: part | CODE for name, part in content.items() if isinstance(part, dict)}
        file.write_text(json.dumps(content | CODE | parts))


def assert_harmless(out):
    files = [file for file in out.rglob("*") if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    assert not {file.name for file in files} & {
        name.rpartition("/")[2] for name in (*STRANGE, "LICENSE.txt")
    }
    settings = {file.name: file.read_text() for file in files if file.suffix == ".json"}
    assert not [
        name for name, text in settings.items() if "auto_map" in text or "custom_generate" in text
    ]
    card = (out / "README.md").read_text()
    assert "names code (auto_map in config.json, custom_generate in config.json, " in card
    assert "auto_map in tokenizer_config.json" in card


def test_a_whole_model_is_written_back_without_a_strangers_other_files(make_tiny, tmp_path):
    folder = tmp_path / "whole"
    save_whole("qwen2_vl", folder, make_tiny.make_tokenizer())
    add_what_a_stranger_adds(folder)
    config = whole_config(folder, data__template="chat")
    export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")
    assert_harmless(tmp_path / "out")
    before, after = (read_json(one / "processor_config.json") for one in (folder, tmp_path / "out"))
    assert before == after


@pytest.mark.parametrize("settings", [(), TEXT], ids=["pictures", "text alone"])
def test_an_llm_is_exported_without_a_strangers_other_files(tiny, tmp_path, settings):
    folder = shutil.copytree(tiny / "llm", tmp_path / "llm")
    add_what_a_stranger_adds(folder)
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    config = config_of(tiny, *settings, f"model.llm.path={folder}")
    export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")
    assert_harmless(tmp_path / "out")
    published, exported = (
        AutoTokenizer.from_pretrained(one) for one in (tiny / "llm", tmp_path / "out")
    )
    assert exported("12 é.", add_special_tokens=False) == published(
        "12 é.", add_special_tokens=False
    )


@pytest.mark.parametrize("settings", [(), TEXT], ids=["pictures", "text alone"])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_tokenizers_file_that_is_a_link_out_of_the_folder_is_refused(
    tiny, tmp_path, settings, name
):
    folder = shutil.copytree(tiny / "llm", tmp_path / "llm")
    secret = tmp_path / "secret"
    shutil.copyfile(tiny / "llm" / "tokenizer.json", secret)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    config = config_of(tiny, *settings, f"model.llm.path={folder}")
    with pytest.raises(
        UserError, match=f"{folder / name}: is a link to {secret}, outside its folder"
    ):
        export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")


def test_a_snapshot_of_the_hubs_cache_whose_files_are_links_to_its_blobs_is_exported(
    tiny, tmp_path
):
    repository = tmp_path / "models--org--llm"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    shutil.copytree(tiny / "llm", repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    config = config_of(tiny, *TEXT, f"model.llm.path={snapshot}")
    export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_generation_settings_that_are_no_numbers_are_refused(tiny, tmp_path):
    folder = shutil.copytree(tiny / "llm", tmp_path / "llm")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": SECRET}))
    config = config_of(tiny, *TEXT, f"model.llm.path={folder}")
    with pytest.raises(UserError, match=f"generation_config.json says max_new_tokens '{SECRET}"):
        export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")
