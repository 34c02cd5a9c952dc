"""The audit finds what changed, what did not move, and what contradicts the plan."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace

import pytest
import torch
from json_files import read_json
from scenes import make_config, save_parts
from transformers import CONFIG_MAPPING

from mmtrain.base.errors import UserError
from mmtrain.engine.audit import AuditError, RankAudit, check_replicas, write_audit
from mmtrain.engine.optimizer import MasterWeights, NoOpOptimizer
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.model.stage import build_stage
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.plan.planner import make_plan


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    save_parts(folder, layers=2)
    return folder


class OnlyRank:
    """The only rank of a pipeline of one; `planned` is what its plan is made for, if not its own
    configuration.
    """

    def __init__(self, config, planned=None):
        self.plan = make_plan(planned or config)
        self.stage = build_stage(config, self.plan.ranks[0].stages[0])
        stored = {name: p for name, p in self.stage.global_parameters() if p.requires_grad}
        self.masters = MasterWeights(stored, config.optimizer)

    def audit(self, optimizer=None, **planned):
        plan = replace(self.plan.ranks[0], **planned)
        return RankAudit(
            plan, {0: self.stage}, optimizer or self.masters.optimizer, self.masters.by_name
        )

    def weight(self, name):
        return dict(self.stage.global_parameters())[name].data


@pytest.fixture
def rank(parts):
    return OnlyRank(make_config(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4096), (5, 1000), (1, 2049)])
def test_one_flipped_bit_anywhere_changes_the_fingerprint(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for index in (0, tensor.numel() // 2, tensor.numel() - 1):
        flipped = tensor.clone()
        flipped.flatten().view(torch.uint8)[index * tensor.element_size()] ^= 1
        assert fingerprint(flipped) != before
    assert fingerprint(tensor.flatten()[None]) != before or tensor.shape == (1, tensor.numel())


def test_a_view_at_an_odd_offset_has_the_fingerprint_of_its_values():
    storage = torch.arange(5000, dtype=torch.bfloat16)
    assert fingerprint(storage[1:4001]) == fingerprint(storage[1:4001].clone())


def test_a_clean_run_passes_and_is_recorded(rank, tmp_path):
    plan, audit = rank.plan, rank.audit()
    for p in audit.masters.values():
        p.grad = torch.ones_like(p)
    rank.masters.optimizer.step()
    audit.check_versions()
    found = write_audit(
        tmp_path / "audit.json", plan, [audit.finish(set(audit.masters))], learns=True
    )
    assert found == "4 of 4 trainable tensors moved, frozen weights unchanged on all ranks"
    written = read_json(tmp_path / "audit.json")
    (only,) = written["ranks"]
    assert written["passed"] and only["optimizer"] == "AdamW"
    assert only["frozen"]["fingerprint_before"] == only["frozen"]["fingerprint_after"]
    assert {t["name"] for t in only["trainable"]} == set(audit.masters) and all(
        t["moved"] for t in only["trainable"]
    )
    assert only["trainable_parameters"] == plan.ranks[0].trainable


NOTHING, BIAS = set(), "projector.linear_2.bias"


@pytest.mark.parametrize(
    ("changed", "value", "saw_gradient", "learns", "error"),
    [
        (None, None, NOTHING, False, None),  # no gradient, no movement: nothing wrong, and said
        (
            "llm.norm.weight",
            7.0,
            NOTHING,
            False,
            r"rank 0: frozen tensor llm\.norm\.weight changed",
        ),
        (
            "stage 0 language.correction",
            1.0,
            NOTHING,
            False,
            r"frozen tensor stage 0 language\.correction changed",
        ),
        (BIAS, math.nan, NOTHING, False, r"projector\.linear_2\.bias is not finite"),
        (None, None, {BIAS}, False, r"projector\.linear_2\.bias had a gradient but did not move"),
        (None, None, NOTHING, True, "nothing trained: no gradient ever reached projector"),
    ],
)
def test_what_changed_or_did_not_move_fails_by_name(
    rank, tmp_path, changed, value, saw_gradient, learns, error
):
    rank.stage.language.register_buffer("correction", torch.zeros(3))  # checkpoints hold it
    audit, file = rank.audit(), tmp_path / "audit.json"
    if changed is not None:
        # past autograd: versions do not see it
        {**audit.frozen, **audit.masters}[changed].data[0] = value
    audit.check_versions()
    with pytest.raises(AuditError, match=error) if error else contextlib.nullcontext():
        said = write_audit(file, rank.plan, [audit.finish(saw_gradient)], learns=learns)
        assert re.match(
            r"0 of 4 trainable tensors moved, .*; "
            r"a learning rate of 0 or too small a gradient kept projector\.",
            said,
        )
    assert read_json(file)["passed"] == (error is None)


@pytest.mark.parametrize(
    ("gradient", "reached", "fails"), [(1e-9, True, False), (1.0, True, True), (1e-9, False, True)]
)
def test_a_gradient_of_mere_rounding_below_eps_need_not_move_its_tensor(
    parts, tmp_path, gradient, reached, fails
):
    """As of a key's bias; a tensor that the optimizer never updated, or that has a real gradient,
    must have moved.
    """
    rank = OnlyRank(make_config(parts, optimizer__eps=1e-3))
    rank.weight(BIAS)[:] = 1.0
    audit = rank.audit()
    audit.masters[BIAS].grad = torch.full_like(audit.masters[BIAS], gradient) if reached else None
    rank.masters.optimizer.step()
    if fails and reached:
        rank.weight(BIAS)[:] = 1.0  # as where the update were lost
    with (
        pytest.raises(AuditError, match=r"bias had a gradient but did not move")
        if fails
        else contextlib.nullcontext()
    ):
        write_audit(tmp_path / "audit.json", rank.plan, [audit.finish({BIAS})], learns=False)


def test_a_write_to_a_frozen_tensor_is_seen_at_once(rank):
    audit = rank.audit()
    with torch.no_grad():
        audit.frozen["llm.norm.weight"].add_(1.0)
    with pytest.raises(AuditError, match=r"frozen tensor llm\.norm\.weight was written to"):
        audit.check_versions()


def test_a_rank_that_contradicts_the_plan_does_not_start(rank):
    named = rank.plan.ranks[0].trainable_names
    trained = next(p for p in rank.stage.parameters() if p.requires_grad)
    for contradiction, error in (
        ({"optimizer": NoOpOptimizer()}, "holds the optimizer NoOp"),
        ({"optimizer": torch.optim.AdamW([trained])}, "4 tensors train, but the optimizer holds 1"),
        (
            {"trainable_names": named[:-1]},
            r"holds projector\.linear_2\.bias, which the plan does not train",
        ),
        (
            {"trainable_names": (*named, "llm.norm.weight")},
            r"does not train llm\.norm\.weight, which the plan trains",
        ),
    ):
        with pytest.raises(AuditError, match=error):
            rank.audit(**contradiction)


def test_a_frozen_adapter_that_the_plan_does_not_have_does_not_start(parts):
    def config_of(targets):
        trained = ("projector", "llm.layers.1.*.lora_*")
        return make_config(
            parts, model__trainable=trained, model__lora={"r": 2, "targets": (targets,)}
        )

    rank = OnlyRank(
        config_of("llm.layers.*.self_attn"), planned=config_of("llm.layers.1.self_attn")
    )
    with pytest.raises(
        AuditError, match=r"holds llm\.layers\.0\.self_attn\.k_proj\.lora_A\.weight, which"
    ):
        rank.audit()


def test_replicas_that_drift_apart_fail(rank, tmp_path):
    audit = rank.audit()
    first = audit.finish(set())
    audit.masters["projector.linear_1.weight"].data += 1
    second = {**audit.finish(set()), "rank": 1, "data": 1}
    with pytest.raises(
        AuditError, match="ranks 0 and 1 have different values for shared parameters"
    ):
        write_audit(tmp_path / "audit.json", rank.plan, [first, second], learns=False)


@pytest.mark.parametrize("name", ["llm.norm.weight", "projector.linear_1.bias"])
def test_ranks_that_load_different_values_of_one_tensor_do_not_start(rank, name):
    """Replicas, or slices of an encoder, which all have its stem, from files that differ."""
    first = rank.audit().start()
    check_replicas([first, {**first, "rank": 1}])
    rank.weight(name)[0] += 1
    second = {**rank.audit().start(), "rank": 1}
    with pytest.raises(
        AuditError, match=rf"ranks 0 and 1 both hold {name} but loaded different values"
    ):
        check_replicas([first, second])


def test_a_stored_weight_that_is_not_its_master_rounded_fails(parts, tmp_path):
    rank = OnlyRank(
        make_config(parts, model__llm__dtype="bfloat16", model__trainable=("llm.norm",))
    )
    plan, masters, audit = rank.plan, rank.masters, rank.audit()
    masters.by_name["llm.norm.weight"].data += 0.5
    with pytest.raises(
        AuditError, match=r"llm\.norm\.weight computes with other values than those trained"
    ):
        write_audit(
            tmp_path / "audit.json", plan, [audit.finish({"llm.norm.weight"})], learns=False
        )
    masters.write_back()
    write_audit(tmp_path / "audit.json", plan, [audit.finish({"llm.norm.weight"})], learns=False)


@pytest.mark.parametrize("name", ["llm.layers.1.mlp.down_proj.weight", "projector.linear_2.weight"])
def test_weights_that_are_not_finite_are_refused_by_name_before_the_run(rank, name):
    rank.weight(name)[0, 0] = float("inf")
    with pytest.raises(UserError, match=f"rank 0 read NaN or infinity as {name}"):
        rank.audit()


def test_buffers_of_layers_that_files_hold_are_noted_beside_the_frozen_weights(tmp_path):
    """The bias by which glm4_moe chooses experts is no parameter, and decides what is computed all
    the same.
    """
    save_parts(tmp_path)
    tiny_model(CONFIG_MAPPING["glm4_moe"](num_hidden_layers=2), seed=0).save_pretrained(
        tmp_path / "llm"
    )
    rank = OnlyRank(make_config(tmp_path))
    biases = {
        name: buffer
        for name, buffer in rank.stage.layer_buffers()
        if name.endswith("e_score_correction_bias")
    }
    assert biases and all(name.startswith("llm.layers.") for name in biases)
    files = rank.audit().start()["files"]
    assert {name: files[name] for name in biases} == {
        name: fingerprint(buffer) for name, buffer in biases.items()
    }
