"""The early look for a chat template, against what transformers' tokenizers load from the same folders."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.templates import ChatTemplate
from mmtrain.pretrained.layouts import ImageLayout
from mmtrain.pretrained.tokenizer_files import has_chat_template, refuse_missing_chat_template

TEMPLATE = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
NAMED = [{"name": "tool_use", "template": "x"}]
DEFAULT = [*NAMED, {"name": "default", "template": TEMPLATE}]
FILE, LEGACY, EXTRA = "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"
LAYOUTS = {
    "nothing": (False, None, []),
    "a file": (True, None, [FILE]),
    "in the config": (True, TEMPLATE, []),
    "a list with a default in the config": (True, DEFAULT, []),
    "a list without default in the config": (False, NAMED, []),
    "a file and others": (True, None, [FILE, EXTRA]),
    "others alone, which hide that of the config": (False, TEMPLATE, [EXTRA]),
    "a default among the others": (True, None, [EXTRA, "additional_chat_templates/default.jinja"]),
    "the processor's file, which tokenizers do not read": (False, None, [LEGACY]),
    "the processor's file beside the tokenizer's own": (True, TEMPLATE, [LEGACY]),
}


@pytest.fixture
def llm(tiny, tmp_path) -> Path:
    """A model folder with config.json and a tokenizer, without chat template."""
    folder = tmp_path / "llm"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "llm" / name, folder)
    return folder


def run_on(tiny: Path, llm: Path | str, template: str = "chat") -> RunConfig:
    return load_config(tiny / "config.yaml", [f"model.llm.path={llm}", f"data.template={template}"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_template_is_found_where_transformers_finds_one_and_refused_in_the_same_words(tiny, llm, layout):
    there, in_config, files = LAYOUTS[layout]
    config_file = llm / "tokenizer_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"chat_template": in_config}))
    for name in files:
        (llm / name).parent.mkdir(exist_ok=True)
        (llm / name).write_text(json.dumps({"chat_template": TEMPLATE}) if name == LEGACY else TEMPLATE)

    assert has_chat_template(llm) == there
    tokenizer = AutoTokenizer.from_pretrained(llm)
    if there:
        assert tokenizer.get_chat_template() == TEMPLATE
        refuse_missing_chat_template(run_on(tiny, llm))
    else:
        with pytest.raises(ValueError, match="chat template"):
            tokenizer.get_chat_template()
        with pytest.raises(UserError) as early:
            refuse_missing_chat_template(run_on(tiny, llm))
        with pytest.raises(UserError) as late:
            ChatTemplate(tokenizer, ImageLayout("square", 1), 384)
        assert str(early.value) == str(late.value)


def test_the_message_names_the_folder_and_two_ways_out(tiny, llm):
    with pytest.raises(
        UserError,
        match=rf"tokenizer in {llm} has none; put a chat_template\.jinja beside .* or set data\.template=llava_v1",
    ):
        refuse_missing_chat_template(run_on(tiny, llm))
    (llm / LEGACY).write_text("{}")
    with pytest.raises(UserError, match=r"has none; its chat_template\.json is read by processors alone; put"):
        refuse_missing_chat_template(run_on(tiny, llm))


def test_what_is_no_missing_template_is_left_to_others(tiny, llm, tmp_path):
    refuse_missing_chat_template(run_on(tiny, llm, template="plain"))
    refuse_missing_chat_template(run_on(tiny, tmp_path / "nowhere"))
    refuse_missing_chat_template(run_on(tiny, "nobody/no-such-model"))
    (llm / "tekken.json").write_text("{}")
    refuse_missing_chat_template(run_on(tiny, llm))
    for name in ("tekken.json", "tokenizer.json", "tokenizer_config.json"):
        (llm / name).unlink()
    refuse_missing_chat_template(run_on(tiny, llm))
    (llm / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="has none"):
        refuse_missing_chat_template(run_on(tiny, llm))


def test_a_damaged_tokenizer_config_is_named(tiny, llm):
    (llm / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        refuse_missing_chat_template(run_on(tiny, llm))
