"""Shapes of models whose weights are not here, recorded in `mmtrain/facts/recorded/*.json` and in the cache.

`mmtrain record` writes one file per model, into the cache, with runs of equal layers stored once:

    {"kind": "llm", "id": "lmsys/vicuna-7b-v1.5", "aliases": [...], "config": {...}, "parameters": [
      {"model.embed_tokens.weight": [32000, 4096]},
      {"layer": "model.layers.", "first": 0, "last": 32, "parameters": {"self_attn.q_proj.weight": [4096, 4096], ...}},
      {"model.norm.weight": [4096], "lm_head.weight": [32000, 4096]}]}
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.base.cache import cache_folder
from mmtrain.config.limits import MAX_LAYERS
from mmtrain.facts.families import PLAIN_HEAD, TOKEN_SCALES
from mmtrain.facts.model_files import Shape, foreign_files, read_json

FOLDER = Path(__file__).parent / "recorded"

# What planning reads of an LLM's config.json (see shapes.py and families.py); the rest is left out of records.
PLANNING_KEYS = (
    "model_type", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers",
    "num_nextn_predict_layers", "num_attention_heads",
    "n_head", "num_key_value_heads", "multi_query", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
    "tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_topk", "moe_k",
    "rms_norm_eps", "linear_key_head_dim", "mamba_d_state", "ssm_state_size", "mamba_chunk_size", "chunk_size",
    *PLAIN_HEAD, *TOKEN_SCALES.values(),
)  # fmt: skip

_IN_LAYER = re.compile(r"((?:.*\.)?(?:layers?|h|blocks)\.)(\d+)\.")


@dataclass(frozen=True)
class Recorded:
    """One recorded model: what planning needs of its config.json, and its parameters in the model's own order."""

    kind: str  # "llm" or "vision"
    id: str
    aliases: tuple[str, ...]  # other names of models with the same shapes
    config: dict[str, Any]
    parameters: dict[str, Shape]


def own_records() -> Path:
    """Return the user's folder of records."""
    return cache_folder("recorded")


def find_recorded(kind: str, name: str) -> Recorded | None:
    """Return the record of a model by id or alias, upper and lower case being one; None if there is none.

    Raises UserError for a file that is no record.
    """
    for file in (*sorted(FOLDER.glob("*.json")), *sorted(own_records().glob("*.json"))):
        content = read_json(file)
        with foreign_files(f"{file}, a record of a model,"):
            names = [each.lower() for each in (content["id"], *content["aliases"])]
            if content["kind"] == kind and name.lower() in names:
                return _expanded(content)
    return None


def as_json(recorded: Recorded) -> str:
    """The file content of a record: one line per top-level key and per group of parameters."""
    groups: list[dict[str, Any]] = []
    for (layers, index), names in itertools.groupby(recorded.parameters, _layer):
        parameters = {name.removeprefix(f"{layers}{index}."): list(recorded.parameters[name]) for name in names}
        if not layers:
            groups.append(parameters)
        elif groups and groups[-1].get("layer") == layers and groups[-1]["parameters"] == parameters:
            groups[-1]["last"] = index + 1
        else:
            groups.append({"layer": layers, "first": index, "last": index + 1, "parameters": parameters})
    lines = [f'"{key}": {json.dumps(getattr(recorded, key))}' for key in ("kind", "id", "aliases", "config")]
    body = ",\n  ".join(json.dumps(group) for group in groups)
    return "{" + ",\n ".join([*lines, f'"parameters": [\n  {body}]']) + "}\n"


def _layer(name: str) -> tuple[str, int]:
    """The prefix and the index of a parameter's layer: `model.layers.` and 3; "" and -1 outside of layers."""
    match = _IN_LAYER.match(name)
    return (match[1], int(match[2])) if match else ("", -1)


def _expanded(content: dict[str, Any]) -> Recorded:
    parameters: dict[str, Shape] = {}
    for group in content["parameters"]:
        if "layer" not in group:
            parameters.update({name: tuple(shape) for name, shape in group.items()})
            continue
        for index in range(min(group["last"], MAX_LAYERS))[group["first"] :]:
            for name, shape in group["parameters"].items():
                parameters[f"{group['layer']}{index}.{name}"] = tuple(shape)
    return Recorded(content["kind"], content["id"], tuple(content["aliases"]), content["config"], parameters)
