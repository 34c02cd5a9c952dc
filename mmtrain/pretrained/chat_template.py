"""Whether a model's folder brings a chat template, found out as transformers' tokenizers do, without importing them.

chat_template.jinja is the default template, additional_chat_templates/NAME.jinja are others; where either is there, the
"chat_template" of tokenizer_config.json (a text, or a list of named ones) is not read. chat_template.json is read by
processors alone. Source: `PreTrainedTokenizerBase.from_pretrained` in transformers 5.17 to 5.23.
"""

from __future__ import annotations

from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.pretrained.model_files import find_model_folder, read_json

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def refuse_missing_chat_template(config: RunConfig) -> None:
    """Raises UserError for data.template=chat where the LLM's folder holds a tokenizer without a chat template.

    Says nothing about a model that is not there, a folder without tokenizer files, and Mistral's tekken.json, for which
    transformers may make a template: loading the tokenizer settles those.
    """
    if config.data.template != "chat":
        return
    folder = find_model_folder(config.model.llm.path)
    if folder is None or (folder / "tekken.json").is_file():
        return
    if any((folder / name).is_file() for name in TOKENIZER_FILES) and not has_chat_template(folder):
        raise missing_chat_template(folder)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template that is used without being named."""
    if (folder / "chat_template.jinja").is_file():
        return True
    others = {file.stem for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if others:
        return "default" in others
    file = folder / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(template, list):
        return any(isinstance(named, dict) and named.get("name") == "default" for named in template)
    return template is not None


def missing_chat_template(folder: str | Path) -> UserError:
    """The error for a tokenizer, in `folder`, without a chat template."""
    legacy = (Path(folder) / "chat_template.json").is_file()
    unread = "; its chat_template.json is read by processors alone" if legacy else ""
    return UserError(
        f"data.template: chat takes the model's own chat template, and the tokenizer in {folder} has none{unread}; put "
        "a chat_template.jinja beside the tokenizer (transformers reads it), or set data.template=plain"
    )
