"""Layers with unrelated random costs, so that planning is tested on more than the shapes of real models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from mmtrain.plan.block_costs import EncoderCost, Flops
from mmtrain.plan.costs import LayerCost, RunCosts
from mmtrain.plan.stage_costs import Setting, StageCosts
from mmtrain.plan.timings import LayerSeconds, Timings
from mmtrain.plan.workload import Workload


def made_up_costs(
    draw: random.Random,
    decoder: int,
    *,
    pipeline: int,
    microbatches: int,
    memory_bytes: int | None = None,
    recompute: Literal["auto"] | tuple[int, ...] = "auto",
    first: int | None = None,
    messages: bool = True,
    polls: bool = True,
) -> StageCosts:
    """Front, decoder layers, head; something trains from layer `first` (default: any) on, those before keep nothing."""
    first = draw.randrange(decoder + 2) if first is None else first
    layers, seconds = [], []
    for i in range(decoder + 2):
        trains = i == first or (i > first and draw.random() < 0.3)
        layers.append(_layer(draw, i, decoder, trains, keeps=i >= first))
        seconds.append(_seconds(draw, backward=i >= first))
    last, last_seconds = layers[decoder], seconds[decoder]
    costs = RunCosts(
        layers=tuple(layers),
        whole_last=last,
        encoder=_encoder(draw),
        work=Workload(64, 8, 8, 8, 8),
        hidden_bytes=draw.randrange(5),
        integer_bytes=draw.randrange(2),
        keeps_input=draw.random() < 0.5,
        shared_ends_bytes=draw.randrange(2),
        kinds=(),
    )
    # The last decoder layer costs no less for all tokens than for the supervised ones.
    more = draw.randrange(4)
    blocks = costs.encoder.blocks
    timings = Timings(
        device=None,
        layers=tuple(seconds),
        whole_last=LayerSeconds(
            last_seconds.forward + more,
            last_seconds.backward + more * (decoder >= first),
            last_seconds.recomputing + 2 * more * (decoder >= first),
        ),
        encode_stem=float(draw.randrange(2)),
        encode_block=float(draw.randrange(4)) / blocks,
        encoder_blocks=blocks,
        call=0.5 * draw.randrange(3),
        send=0.25 * messages * draw.randrange(2),
        receive=0.25 * messages * draw.randrange(2),
        transfer=0.5 * messages * draw.randrange(3),
        send_features=0.25 * messages * draw.randrange(2),
        receive_features=0.25 * messages * draw.randrange(2),
        transfer_features=0.5 * messages * draw.randrange(3),
        end=float(draw.randrange(3)),
    )
    return StageCosts(costs, timings, Setting(pipeline, microbatches, memory_bytes, recompute, polls))


def equal_costs(
    layers: Sequence[float], *, pipeline: int, microbatches: int, encode: float = 0.0, blocks: int = 1
) -> StageCosts:
    """Layers that take these seconds forward and as many backward, no memory, nothing else; the first one trains.

    An encoder of so many blocks takes `encode` seconds.
    """
    costs = RunCosts(
        layers=tuple(
            LayerCost(str(i), str(i), ("p",) * (i == 0), 0, Flops(), Flops(), 0, 0, 0, 0, 0, 0, 0)
            for i in range(len(layers))
        ),
        whole_last=LayerCost("", "", (), 0, Flops(), Flops(), 0, 0, 0, 0, 0, 0, 0),
        encoder=EncoderCost(0, True, 0, 0, 0, blocks=blocks),
        work=Workload(64, 8, 8, 8, 8),
        hidden_bytes=0,
        integer_bytes=0,
        keeps_input=False,
        shared_ends_bytes=0,
        kinds=(),
    )
    seconds = tuple(LayerSeconds(x, x, 2 * x) for x in layers)
    timings = Timings(None, seconds, seconds[-2], 0.0, encode / blocks, blocks, 0, 0, 0, 0, 0, 0, 0, 0)
    return StageCosts(costs, timings, Setting(pipeline, microbatches, None, "auto"))


def _encoder(draw: random.Random) -> EncoderCost:
    blocks, block_forward = draw.randrange(1, 7), draw.randrange(4)
    return EncoderCost(
        forward=blocks * block_forward + draw.randrange(2),
        frozen=True,
        working_bytes=draw.randrange(9),
        feature_bytes=draw.randrange(4),
        batch_bytes=draw.randrange(4),
        blocks=blocks,
        block_forward=block_forward,
        block_bytes=draw.randrange(4),
        stem_bytes=draw.randrange(3),
        hidden_bytes=draw.randrange(4),
    )


def _layer(draw: random.Random, index: int, decoder: int, trains: bool, keeps: bool) -> LayerCost:
    kept = draw.randrange(1, 60) if keeps else 0
    recomputing = draw.randrange(kept) // 4 if kept and 0 < index <= decoder else kept
    return LayerCost(
        name=str(index),
        kind=str(index),
        trainable_names=("p",) if trains else (),
        trainable=draw.randrange(1, 3) * trains,
        flops=Flops(1, 1, 1),
        needed_flops=Flops(1, 1, 1),
        weight_bytes=draw.randrange(1, 20),
        state_bytes=draw.randrange(20) * trains,
        kept_bytes=kept,
        kept_bytes_recomputing=recomputing,
        forward_working_bytes=draw.randrange(20),
        backward_working_bytes=draw.randrange(20),
        recomputing_working_bytes=draw.randrange(40),
    )


def _seconds(draw: random.Random, *, backward: bool) -> LayerSeconds:
    forward, back = float(draw.randrange(1, 20)), float(draw.randrange(1, 20) * backward)
    return LayerSeconds(forward, back, back + forward * backward)
