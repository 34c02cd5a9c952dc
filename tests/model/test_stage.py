"""Stages made by a plan: each opens its own tensors, together they hold every layer once."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from scenes import make_config, save_parts

from mmtrain.model.stage import build_chunk
from mmtrain.plan.planner import make_plan
from mmtrain.plan.shapes import global_name


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_opens_the_tensors_of_its_planned_layers_alone(tmp_path, tied):
    save_parts(tmp_path, tied=tied)
    plan = make_plan(make_config(tmp_path, parallel__pipeline=4))
    with safe_open(tmp_path / "llm" / "model.safetensors", "pt") as file:
        on_disk = {name: global_name(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    opened_by_all: list[str] = []
    for rank in plan.ranks:
        (stage,) = rank.stages
        opened: set[str] = set()
        chunk = build_chunk(make_config(tmp_path), stage, opened=opened)
        expected = set()
        for name in on_disk.values():
            layer = name.rsplit(".", 1)[0] if not name.startswith("llm.layers.") else ".".join(name.split(".")[:3])
            at_front, at_head = {"llm.embedding"}, {"llm.norm", "llm.head"} | ({"llm.embedding"} if tied else set())
            if layer in stage.layers or (stage.front and layer in at_front) or (stage.head and layer in at_head):
                expected.add(name)
        assert {on_disk[name] for name in opened} == expected
        opened_by_all += opened
        held = {name for name, _ in chunk.global_parameters()}
        assert any(name.startswith("vision.") for name in held) == (rank.pipeline == 0)
    shared = ["model.embed_tokens.weight"] if tied else []
    assert sorted(opened_by_all) == sorted([*on_disk, *shared]), "all tensors once; a tied matrix at both ends"


def test_the_projector_stays_in_float32_between_bfloat16_parts(tmp_path):
    save_parts(tmp_path)
    config = make_config(tmp_path, model__llm__dtype="bfloat16")
    (rank,) = make_plan(config).ranks
    chunk = build_chunk(config, rank.stages[0])
    kinds = {name: p.dtype for name, p in chunk.global_parameters()}
    assert {kinds[name] for name in kinds if name.startswith("projector.")} == {torch.float32}
    assert {kinds[name] for name in kinds if not name.startswith("projector.")} == {torch.bfloat16}
    assert not any(module.training for module in chunk.modules())
    assert [name for name, p in chunk.global_parameters() if p.requires_grad] == list(rank.trainable_names)
