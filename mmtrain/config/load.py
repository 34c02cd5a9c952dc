"""A run configuration from YAML and overrides, and back: strict, every problem told at once."""

import argparse
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.printing import counted, disclosed, escape
from mmtrain.config.environment import fill_in_paths
from mmtrain.config.keys import InsteadOf, all_fields, is_optional, marked, section_of
from mmtrain.config.problems import LONGEST_KEY, answer_to, explain, foreign_keys_of, nearest_key
from mmtrain.config.schema import RunConfig
from mmtrain.config.strict_yaml import MAX_DEPTH, parse_yaml, read_yaml
from mmtrain.config.templates import read_template

DEMO = "example:llava_pp4"
KEY_AND_VALUE = re.compile(r"[^/=]+=")  # begins a word that sets a key, and no path
# shipped configurations; in a checkout a link to configs/
EXAMPLES = Path(__file__).parents[1] / "examples"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a YAML file, or `example:NAME`, with `key.sub=value` overrides.

    `data.allow_pipe` is taken from overrides alone; `${NAME}` in paths is filled in from the
    environment; a file that `data.template` names is replaced by its text. Raises UserError listing
    every problem at once.
    """
    file = Path(path)
    if name := example_name(path):
        file = example_file(name)
    content = read_yaml(file)
    if content is not None and not isinstance(content, dict):
        sections = ", ".join(RunConfig.model_fields)
        raise UserError(f"{path}: holds a {type(content).__name__}; needs the sections {sections}")
    content = content or {}
    if foreign := foreign_keys_of(content):
        raise UserError(
            f"{path}: a configuration of another program ({', '.join(foreign[:3])}); "
            "mmtrain's has the sections run, model, data and train. "
            "Begin with a copy of a shipped one: mmtrain init"
        )
    data = content.get("data")
    if isinstance(data, dict) and data.get("allow_pipe"):
        raise UserError(
            f"{path}: data.allow_pipe says which programs may run, and no file may say that, since "
            "it can come from anybody. "
            "Take it out, and give it on the command line, e.g. 'data.allow_pipe=[curl]'"
        )
    for override in overrides:
        _apply(content, override)
    _drop_alternatives(content, [override.partition("=")[0].strip() for override in overrides])
    content, problems = fill_in_paths(RunConfig, content)
    if problems:
        raise _several(str(path), problems)
    _take_models_of_run(content.get("model"))
    data = content.get("data")
    if isinstance(data, dict) and isinstance(template := data.get("template"), str):
        data["template"] = read_template(template)
    return validated(_tuples(content), str(path))


def example_name(path: str | Path) -> str:
    """Return NAME of `example:NAME`, empty for a path."""
    prefix, _, name = str(path).partition(":")
    return name if prefix == "example" else ""


def example_names() -> list[str]:
    return sorted(file.stem for file in EXAMPLES.glob("*.yaml"))


def example_file(name: str) -> Path:
    """Return the file of a shipped configuration. Raises UserError for an unknown name."""
    if name not in example_names():
        meant = "mmtrain init lists them"
        if near := difflib.get_close_matches(name, example_names(), 1):
            meant = f"Did you mean {near[0]}?"
        raise UserError(f"no shipped configuration is called {escape(name, 80)}. {meant}")
    return EXAMPLES / f"{name}.yaml"


def validated(content: dict[str, Any], source: str, heading: str = "") -> RunConfig:
    """Return the configuration with this content. Raises UserError for all problems of `source`."""
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        problems = explain(RunConfig, error.errors(include_url=False), content)
        raise _several(source, problems, heading) from None

    # A null data.image_fit becomes its default, unless the files of model.pretrained decide it
    # later.
    model = config.model
    is_cut = model.vision is not None and model.vision.cuts_images
    if config.data.image_fit is not None or is_cut or model.pretrained is not None:
        return config
    return config.changed({"data.image_fit": "pad"})


def _several(source: str, problems: Sequence[str], heading: str = "") -> UserError:
    heading = heading or counted(len(problems), "problem")
    return UserError("\n  ".join([f"{source}: {heading}", *problems]))


def restore_config(content: dict[str, Any], source: str) -> RunConfig:
    """Return the configuration that was dumped as this JSON, with an empty `data.allow_pipe`.

    Raises UserError, naming the source, for keys or values that this version does not know.
    """
    unknown = "a configuration that this version of mmtrain does not know"
    return validated(_tuples(content), source, unknown).changed({"data.allow_pipe": ()})


def dump_config(config: RunConfig, *, for_others: bool = False) -> str:
    """Return YAML with all defaults, without `data.allow_pipe`; `for_others` without secrets."""
    content = config.model_dump(mode="json", exclude={"data": {"allow_pipe"}})
    if for_others:
        content = disclosed(content)
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes texts with Unicode's line breaks in double quotes.

    Within single quotes they do not read back as they were.
    """

    def represent_str(self, text: str) -> yaml.Node:
        style = re.search("[\x85\u2028\u2029]", text) and '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def key_of_option(option: str) -> str:
    """Return the end of a message about an unknown option, --learning_rate: the key it may mean."""
    path = tuple(escape(option, LONGEST_KEY).partition("=")[0].lstrip("-").split("."))
    if not option.startswith("--"):
        return ""
    keys = [key for key, _ in all_fields(RunConfig)]
    meant = answer_to(path)
    if meant is None:
        near = path if path in keys else nearest_key(path, keys)
        if near is None:
            return ""
        meant = f"it is {'.'.join(near)}"
    return f"; here {meant}; keys are set without dashes, e.g. optimizer.lr=1e-3"


def refuse_repeated_keys(parser: argparse.ArgumentParser, overrides: Sequence[str]) -> None:
    """Exit, as argparse does, where words `key=value` of a command line set a key twice."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    for key in keys:
        if keys.count(key) > 1:
            seen = f"{escape(key, LONGEST_KEY)}: given {keys.count(key)} times. Give it once"
            if "shards" in key:
                seen += ", and quote its braces: a shell makes several words of them"
            parser.error(seen)


def _apply(content: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in nested sections, unknown keys too: validation reports them."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    shown = f"override {escape(repr(override))}"
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise UserError(f"{shown}: needs the form key.sub=value, e.g. optimizer.lr=1e-3")
    annotation = getattr(dict(all_fields(RunConfig)).get(path), "annotation", None)
    section = section_of(annotation)
    may_be_null = is_optional(annotation)
    is_null = text == "null" and (section is not None or may_be_null)
    if section is not None and not is_null:
        keys = ", ".join(f"{key}.{name}" for name in section.model_fields)
        null = "null, or " if may_be_null else ""
        raise UserError(f"{shown}: {key} is a section. Set {null}its keys one by one: {keys}")
    for part in path[:-1]:
        if content.get(part) is None:
            content[part] = {}
        if not isinstance(content[part], dict):
            raise UserError(f"{shown}: {part} is {content[part]!r}, which has no keys below it")
        content = content[part]
    # A text key takes its override as it stands: run.name=7 is a name, data.shards=*.tar no YAML
    # alias.
    takes_text = str in (annotation, *typing.get_args(annotation))
    is_text = takes_text and not is_null and not text.startswith(("[", '"', "'"))
    value = text if is_text else parse_yaml(text, shown)
    if _lacks_blank(value):
        raise UserError(
            f"{shown}: a blank is missing behind a colon. "
            f"Quote it: '{key}=[{{name: a, weight: 2}}]'"
        )
    if section is not None and not may_be_null:
        value = {}
    content[path[-1]] = value


def _lacks_blank(value: Any) -> bool:
    """Tell whether a mapping of YAML was written {name:a}, which is a key without a value."""
    if isinstance(value, list):
        return any(map(_lacks_blank, value))
    if not isinstance(value, dict):
        return False
    return any(inner is None and ":" in str(name) for name, inner in value.items())


def _take_models_of_run(model: Any) -> None:
    """Fill in the models and connector of the run `model.init_from`, unless an LLM is named."""
    if not isinstance(model, dict) or model.get("pretrained"):
        return
    if not isinstance(model.get("init_from"), str):
        return
    own = {part: model.get(part, {}) for part in ("llm", "vision", "projector")}
    if not isinstance(own["llm"], dict) or "path" in own["llm"]:
        return
    run = Path(model["init_from"]).expanduser().resolve()
    if run.parent.name == "checkpoints":
        run = run.parents[1]
    file = run / "config.yaml"
    if not file.is_file():
        raise UserError(
            f"model.init_from: {run} has no config.yaml that names its models. "
            "Set model.llm, model.vision"
        )
    theirs = restore_config(read_yaml(file), str(file)).model_dump(mode="json")["model"]
    del theirs["projector"]["init_from"]
    for part, keys in own.items():
        if isinstance(keys, dict) and (part != "projector" or model["vision"]):
            model[part] = {**(theirs[part] or {}), **keys} or None


def _drop_alternatives(content: dict[str, Any], overridden: Sequence[str]) -> None:
    """Let `train.max_steps=20` on the command line replace the file's `train.epochs`."""
    for path, mark in marked(RunConfig, InsteadOf).items():
        pair = (".".join(path), mark.key)
        for key, other in (pair, pair[::-1]):
            section, name = key.split(".")
            keys = content.get(section)
            takes_place = key in overridden and other not in overridden
            if takes_place and isinstance(keys, dict) and keys.get(name) not in (None, 0):  # 0: off
                keys.pop(other.split(".")[1], None)


def _tuples(value: Any) -> Any:
    """Turn YAML's lists into tuples, which a frozen configuration declares."""
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return value
