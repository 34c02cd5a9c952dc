"""On a GPU the host runs ahead: no forward or backward asks the device for an answer, on any stage."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from pretend_device import DEVICE, Pretend
from scenes import as_batch, make_config, make_document, save_parts
from transformers import CONFIG_MAPPING

from mmtrain.data.stream.packs import to_device
from mmtrain.engine.channels import ChainLink
from mmtrain.models.modules import attention
from mmtrain.models.modules.loss import count_answers
from mmtrain.models.modules.stage import build_stage
from mmtrain.models.modules.tiny import tiny_model
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan

MICROBATCH = ([make_document(1), make_document(2, images=0)], [make_document(3, images=2), make_document(4, text=9)])


@pytest.fixture(scope="module", params=["gemma3_text", "gpt2"])
def parts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_parts(folder)
    tiny_model(CONFIG_MAPPING[request.param](num_hidden_layers=6), seed=0).save_pretrained(folder / "llm")
    return folder


def one_call_for_all(q, k, v, offsets, key_offsets, longest, longest_key, *, scale, window_size, enable_gqa=False):
    """What the GPU's kernel computes, without a line of it in which the host would wait."""
    borders = (itertools.pairwise(o.inner.tolist()) for o in (offsets, key_offsets))
    outputs = []
    for (begin, end), (key_begin, key_end) in zip(*borders, strict=True):
        parts = (q[begin:end], k[key_begin:key_end], v[key_begin:key_end])
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        queries, keys = end - begin, key_end - key_begin
        i, j = torch.arange(keys - queries, keys, device=DEVICE)[:, None], torch.arange(keys, device=DEVICE)
        seen = (i >= j) & ((i - j <= window_size[0]) | (window_size[0] < 0))
        outputs.append(
            F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat([x[0].transpose(0, 1) for x in outputs])


def run_micro_batch(device: Pretend, plan: Plan, stages: list, batch) -> torch.Tensor:
    """A micro-batch as the engine runs it, with the messages' tensors handed on; the loss sum."""
    last = len(stages) - 1
    with device.during("load and encode"):
        link = ChainLink(plan, 0, stages[0], None, lambda: None, 60)  # alone, it sends nothing
        link.load(0, to_device(batch, DEVICE))
        link.encode(Instruction(Op.ENCODE, 0, 0))
        taken = link.take(0)
        hidden = stages[0].start(taken.batch, taken.features)
    inputs, outputs = [], []
    for number, stage in enumerate(stages):
        with device.during(f"forward {number}{' (last)' if number == last else ''}"):
            if number:
                inputs.append(hidden := outputs[-1].detach().requires_grad_())
            if number < last:
                outputs.append(stage(hidden, batch.position_ids))
            else:
                outputs.append(stage.loss(hidden, batch.position_ids, batch.labels)[0])
    upstream = None
    for number in reversed(range(len(stages))):
        with device.during(f"backward {number}"):
            torch.autograd.backward(outputs[number], upstream)
            upstream = inputs[number - 1].grad if number else None
    with device.during("evaluation"), torch.no_grad():
        _, predicted = stages[-1].predict(hidden.detach(), batch.position_ids, batch.labels)
        count_answers(batch.labels, predicted)
    return outputs[-1].detach()


@pytest.mark.parametrize("by_kernel", [False, True], ids=["document by document", "one call for all"])
@pytest.mark.parametrize("recompute", [0, 6])
def test_no_stage_waits_for_the_device_and_no_operation_mixes_devices(parts, monkeypatch, by_kernel, recompute):
    config = make_config(
        parts,
        parallel__pipeline=3,
        parallel__boundaries=(2, 4),
        parallel__encoder_ranks=0,
        parallel__recompute_layers=recompute,
        train__packs_per_step=2,
        data__pack_length=64,
    )
    batch = as_batch(MICROBATCH, 64)
    plan = make_plan(config)
    stages = [build_stage(config, stage) for rank in plan.ranks for stage in rank.stages]
    hidden = stages[0].start(batch)
    for stage in stages[:-1]:
        hidden = stage(hidden, batch.position_ids)
    expected, _ = stages[-1].loss(hidden, batch.position_ids, batch.labels)
    if by_kernel:
        monkeypatch.setattr(attention, "use_flash", lambda *_: True)
        monkeypatch.setattr(attention, "flash_varlen_attn", one_call_for_all)
    with Pretend() as device:
        for stage in stages:
            stage.to(DEVICE)
        device.waits.clear()
        loss = run_micro_batch(device, plan, stages, batch)
    assert device.mixed == {}
    assert device.waits == {}
    torch.testing.assert_close(loss.inner, expected)


def test_the_pretend_device_sees_waits_and_mixed_devices():
    with Pretend() as device:
        there, here = torch.ones(3).to(DEVICE, non_blocking=True), torch.ones(3)
        assert device.waits == {}
        for ask in (there.cpu, there.nonzero, lambda: there.sum().item(), lambda: bool(there.any())):
            before = device.waits.total()
            ask()
            assert device.waits.total() == before + 1
        assert device.mixed == {}
        there + here
        assert device.mixed.total() == 1
