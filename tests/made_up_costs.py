"""Layers with unrelated random costs, so that planning is tested on more than the shapes of real
models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.calibration import (
    Calibration,
    Device,
    LayerMeasures,
    LayerSeconds,
    MessageSeconds,
    Timings,
    calibration_key,
)
from mmtrain.plan.costs import EncoderCost, LayerCost, RunCosts, Workload, run_costs
from mmtrain.plan.simulate import MessageCost
from mmtrain.plan.stage_costs import Setting, StageCosts


def made_up_costs(
    draw: random.Random,
    decoder: int,
    *,
    pipeline: int,
    microbatches: int,
    memory_bytes: int | None = None,
    first: int | None = None,
    polls: bool = True,
) -> StageCosts:
    """Front, decoder layers, head; something trains from layer `first` (default: any) on, those
    before keep nothing.
    """
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
        messages=_message(draw),
        features=_message(draw),
        end=float(draw.randrange(3)),
    )
    return StageCosts(costs, timings, Setting(pipeline, microbatches, memory_bytes, "auto", polls))


def made_up_calibration(config: RunConfig, device: Device) -> Calibration:
    """Decoder layers take 1 + 2 seconds, on rows 0.5 + 1; front 0.25 + 0.75, encoder 4, head 0.5 +
    0.5.
    """
    models = models_of(config)
    seconds = {"encoder": (4.0, 0.0), "front": (0.25, 0.75), "head": (0.5, 0.5)}
    layers = {}
    for kind in run_costs(config, models).kinds:
        layers[kind.name] = made_up_measures(
            *seconds.get(kind.name, (0.5, 1.0) if kind.on_rows else (1.0, 2.0))
        )
    return Calibration(
        key=calibration_key(config, models, device),
        layers=layers,
        compute_seconds=0.125,
        encode_seconds=0.5,
        encode_block_seconds=0.125,
        messages=MessageSeconds(0.01, 0.02, 0.03),
        features=MessageSeconds(0.04, 0.05, 0.06),
        end_seconds=2.0,
        replicas=1,
        matmul_flops_per_second=1e12,
    )


def made_up_measures(forward: float, backward: float) -> LayerMeasures:
    return LayerMeasures(forward, backward, forward + backward, 1000, 100, 10, 20, 1200)


def equal_costs(
    layers: Sequence[float], *, pipeline: int, microbatches: int, encode: float = 0.0
) -> StageCosts:
    """Layers of these seconds in each direction and no memory, the first one trained; an encoder of
    one block.
    """
    costs = RunCosts(
        layers=tuple(
            LayerCost(str(i), ("p",) * (i == 0), 0, Flops(), Flops(), 0, 0, 0, 0, 0, 0, 0)
            for i in range(len(layers))
        ),
        whole_last=LayerCost("", (), 0, Flops(), Flops(), 0, 0, 0, 0, 0, 0, 0),
        encoder=EncoderCost(0, True, 0, 0, 0, blocks=1),
        work=Workload(64, 8, 8, 8, 8),
        hidden_bytes=0,
        integer_bytes=0,
        keeps_input=False,
        shared_ends_bytes=0,
        kinds=(),
    )
    seconds = tuple(LayerSeconds(x, x, 2 * x) for x in layers)
    timings = Timings(
        None, seconds, seconds[-2], 0.0, encode, 1, 0, MessageCost(), MessageCost(), 0
    )
    return StageCosts(costs, timings, Setting(pipeline, microbatches, None, "auto"))


def _message(draw: random.Random) -> MessageCost:
    return MessageCost(0.25 * draw.randrange(2), 0.25 * draw.randrange(2), 0.5 * draw.randrange(3))


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
