"""Recorded shapes of models whose weights are not here: `recorded/*.json`, and the user's cache.

`mmtrain record` writes one file per model, into the cache, with runs of equal layers stored once:

    {"kind": "llm", "id": "lmsys/vicuna-7b-v1.5", "aliases": [...], "config": {...}, "parameters": [
      {"model.embed_tokens.weight": [32000, 4096]}, {"layer": "model.layers.", "first": 0, "last":
      32, "parameters": {"self_attn.q_proj.weight": [4096, 4096], ...}}, {"model.norm.weight":
      [4096], "lm_head.weight": [32000, 4096]}]}
"""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.config.limits import MAX_LAYERS
from mmtrain.facts.families import PLAIN_HEAD, TOKEN_SCALES
from mmtrain.facts.model_files import foreign_files, read_json
from mmtrain.facts.settings import SYNONYMS, Settings, Shapes

FOLDER = Path(__file__).parent / "recorded"

# What planning reads of an LLM's config.json (see shapes.py and families.py); the rest is left out
# of records.
PLANNING_KEYS = (
    "model_type",
    *SYNONYMS["hidden_size"],
    *SYNONYMS["layers"],
    "num_nextn_predict_layers",
    *SYNONYMS["heads"],
    "num_key_value_heads",
    "multi_query",
    "head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    *SYNONYMS["experts"],
    *SYNONYMS["experts_per_token"],
    "rms_norm_eps",
    *SYNONYMS["mixer_state"],
    *SYNONYMS["mixer_chunk"],
    *PLAIN_HEAD,
    *TOKEN_SCALES.values(),
)

_IN_LAYER = re.compile(r"((?:.*\.)?(?:layers?|h|blocks)\.)(\d+)\.")


@dataclass(frozen=True)
class Recorded:
    """A recorded model: keys of its config.json for planning, parameters in the model's order."""

    kind: str  # "llm" or "vision"
    id: str
    aliases: tuple[str, ...]  # other names of models with the same shapes
    config: Settings
    parameters: Shapes


def own_records() -> Path:
    """Return the user's folder of records."""
    return cache_folder("recorded")


def find_recorded(kind: str, name: str) -> Recorded | None:
    """Return the record of a model by id or alias in any case; None if there is none.

    Raises UserError for a file that is no record.
    """
    for file in (*sorted(FOLDER.glob("*.json")), *sorted(own_records().glob("*.json"))):
        content = read_json(file)
        with foreign_files(f"{file}, a record of a model,"):
            names = map(str.lower, (content["id"], *content["aliases"]))
            if content["kind"] == kind and name.lower() in names:
                return _expanded(content)
    return None


def as_json(recorded: Recorded) -> str:
    """Return the file content of a record: a line for each top-level key, and for each group."""
    groups: list[Settings] = [{}]
    for (layers, index), names in itertools.groupby(recorded.parameters, _layer):
        own = f"{layers}{index}."
        parameters = {name.removeprefix(own): list(recorded.parameters[name]) for name in names}
        last = groups[-1]
        if not layers:
            groups.append(parameters)
        elif last.get("layer") == layers and last["parameters"] == parameters:
            last["last"] = index + 1
        else:
            groups.append(
                {"layer": layers, "first": index, "last": index + 1, "parameters": parameters}
            )

    lines = []
    for key in ("kind", "id", "aliases", "config"):
        lines.append(f'"{key}": {json.dumps(getattr(recorded, key))}')
    body = ",\n  ".join(map(json.dumps, groups[1:]))
    lines.append(f'"parameters": [\n  {body}]')
    return "{" + ",\n ".join(lines) + "}\n"


def _layer(name: str) -> tuple[str, int]:
    """Return prefix and index of a parameter's layer, `model.layers.` and 3; "" and -1: none."""
    if match := _IN_LAYER.match(name):
        return match[1], int(match[2])
    return "", -1


def _expanded(content: Settings) -> Recorded:
    parameters: Shapes = {}
    for group in content["parameters"]:
        own = group
        prefixes = [""]
        if "layer" in group:
            own = group["parameters"]
            numbers = range(min(group["last"], MAX_LAYERS))[group["first"] :]
            prefixes = [f"{group['layer']}{number}." for number in numbers]
        for prefix in prefixes:
            for name, shape in own.items():
                parameters[prefix + name] = tuple(shape)
    return Recorded(
        content["kind"],
        content["id"],
        tuple(content["aliases"]),
        content["config"],
        parameters,
    )
