"""Seconds of everything that a step consists of: from a calibration, or, without one, assumed.

costs --assumed_timings, or calibrated with measurements--> Timings --cut--> seconds of stages --simulate--> of a step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from mmtrain.base.errors import UserError
from mmtrain.models.facts.quantised import BITS
from mmtrain.plan.calibration import Calibration, LayerMeasures
from mmtrain.plan.costs import LayerCost, RunCosts
from mmtrain.plan.workload import FP32


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed of a device that was not measured. Only ratios matter."""

    flops_per_second: float
    fp32_slowdown: float  # seconds of a FLOP in fp32 over those of one in bfloat16
    bytes_per_second: float  # of a message on its way
    host_bytes_per_second: float  # of weights from the host's memory, beside computing
    dequantised_bytes_per_second: float  # of weights that are made of fewer bits, beside computing
    latency_seconds: float  # from a message's post to its first byte
    call_seconds: float  # of one FORWARD or BACKWARD, beyond its layers


GPU = Assumptions(150e12, 10, 12e9, 25e9, 400e9, 30e-6, 200e-6)
"""Half of an A100's 312e12 in bfloat16; in fp32, which torch leaves off the tensor cores (no TF32 unless it is asked
for), three quarters of its 19.5e12, a tenth of that (NVIDIA's data sheets; an H100's 67e12 and 989e12 give the same
ratio, a 4090's 83e12 and 165e12 one near 1.3); half of what PCIe 4.0 x16 carries one way (no NVLink: the likelier home
of a pipeline), and all that page-locked host memory gives of it; a fifth of what an A100's memory does for
dequantising; two NCCL kernels; Python and launches that the device waits for."""
CPU = Assumptions(100e9, 1, 3e9, 5e9, 1e9, 200e-6, 500e-6)
"""One core, in float32 and bfloat16 alike, which copies and dequantises weights itself; gloo between processes of one
machine, whose 4 MB cost their sender 1.4 ms."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer and one micro-batch."""

    forward: float
    backward: float  # 0 where nothing runs backward
    recomputing: float  # the backward if the layer recomputes its activations


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per micro-batch, of one rank while the others compute, too."""

    device: str | None  # that was measured; None: all seconds are assumed, and only their ratios mean anything
    layers: tuple[LayerSeconds, ...]  # front without the encoder's forward, decoder layers, head
    whole_last: LayerSeconds  # the last decoder layer where the head is on another stage
    encode_stem: float  # of LOAD and of what the encoder's first slice runs besides blocks
    encode_block: float  # of each block
    encoder_blocks: int
    call: float  # of one FORWARD or BACKWARD, beyond its layers
    send: float
    receive: float
    transfer: float
    send_features: float  # and below: of what passes between slices; of features, which are less by prefix tokens
    receive_features: float
    transfer_features: float
    end: float  # of a step: reductions and optimizer
    fetch_latency: float = 0.0  # of each fetch of a streamed layer
    fetch_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)  # besides, by source
    measured_messages: bool = False
    measured_fetches: tuple[str, ...] = ()  # sources

    @property
    def encode(self) -> float:
        """Seconds of LOAD and of the whole encoder as one slice."""
        return self.encode_of(self.encoder_blocks, first=True)

    def encode_of(self, blocks: int, first: bool) -> float:
        """Seconds of ENCODE of a slice with `blocks` blocks: the `first` has LOAD and the stem, another a call."""
        return (self.encode_stem if first else self.call) + blocks * self.encode_block


def assumed_timings(costs: RunCosts, replicas: int, device: Assumptions) -> Timings:
    """FLOPs at one rate in fp32 and one in bfloat16, bytes at another, as assumed of a device."""

    def compute(flops: int, in_fp32: int) -> float:
        return (flops - in_fp32 + in_fp32 * device.fp32_slowdown) / device.flops_per_second

    def seconds(layer: LayerCost) -> LayerSeconds:
        flops, fp32 = layer.flops, layer.fp32_flops
        forward = compute(flops.forward, fp32.forward)
        backward = compute(flops.dgrad + flops.wgrad, fp32.dgrad + fp32.wgrad)
        return LayerSeconds(forward, backward, backward + forward * bool(layer.kept_bytes))

    encoder = costs.encoder
    return Timings(
        device=None,
        layers=tuple(seconds(layer) for layer in costs.layers),
        whole_last=seconds(costs.whole_last),
        encode_stem=compute(encoder.stem_forward, encoder.stem_forward * encoder.in_fp32),
        encode_block=compute(encoder.block_forward, encoder.block_forward * encoder.in_fp32),
        encoder_blocks=encoder.blocks,
        call=device.call_seconds,
        send=0.0,
        receive=0.0,
        transfer=device.latency_seconds + costs.hidden_bytes / device.bytes_per_second,
        send_features=0.0,
        receive_features=0.0,
        transfer_features=device.latency_seconds + encoder.hidden_bytes / device.bytes_per_second,
        end=_ring(costs, replicas, device),
        fetch_latency=device.latency_seconds,
        fetch_seconds_per_byte={
            "host": 1 / device.host_bytes_per_second,
            "peers": 1 / device.bytes_per_second,
            **dict.fromkeys(BITS, 1 / device.dequantised_bytes_per_second),
        },
    )


def _ring(costs: RunCosts, replicas: int, device: Assumptions) -> float:
    """Seconds of a ring all-reduce of all gradients."""
    gradient_bytes = FP32 * sum(layer.trainable for layer in costs.layers)
    return 2 * (replicas - 1) / replicas * gradient_bytes / device.bytes_per_second


_MEASURED_BYTES = [field.name for field in fields(LayerMeasures) if "_bytes" in field.name]


def calibrated(
    costs: RunCosts, calibration: Calibration, replicas: int, device: Assumptions
) -> tuple[RunCosts, Timings]:
    """The costs with measured bytes, and measured seconds. Raises UserError where a kind of layer was not measured.

    What the calibration's layout could not tell is assumed of `device`: messages at pipeline 1, and what another number
    of replicas changes at a step's end.
    """
    missing = [kind.name for kind in costs.kinds if kind.name not in calibration.layers]
    if missing:
        raise UserError(
            f"the calibration on {calibration.key.device} does not have {', '.join(missing)}: it was made by another "
            "version of mmtrain; calibrate again, or delete it"
        )
    measures = dict(calibration.layers)
    of_encoder, of_front = measures["encoder"], measures["front"]
    if not costs.encoder.frozen:  # its backward belongs to stage 0's
        backward = of_front.backward_seconds + of_encoder.backward_seconds
        measures["front"] = replace(
            of_front,
            backward_seconds=backward,
            recomputing_seconds=backward,
            kept_bytes=of_front.kept_bytes + of_encoder.kept_bytes,
            kept_bytes_recomputing=of_front.kept_bytes_recomputing + of_encoder.kept_bytes,
            backward_working_bytes=max(of_front.backward_working_bytes, of_encoder.backward_working_bytes),
        )

    def seconds(layer: LayerCost) -> LayerSeconds:
        kind = measures[layer.kind]
        return LayerSeconds(kind.forward_seconds, kind.backward_seconds, kind.recomputing_seconds)

    def cost(layer: LayerCost) -> LayerCost:
        return replace(layer, **{name: getattr(measures[layer.kind], name) for name in _MEASURED_BYTES})

    if not any(measures[kind.name].forward_seconds for kind in costs.kinds if kind.name != "encoder"):
        raise UserError("the calibration says that no layer takes any time; calibrate again, or delete it")
    assumed = assumed_timings(costs, replicas, device)
    more_replicas = assumed.end - _ring(costs, calibration.replicas, device)

    def measured(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    messages, features = calibration.messages, calibration.features
    blocks, block = costs.encoder.blocks, calibration.encode_block_seconds
    return (
        replace(
            costs,
            layers=tuple(cost(layer) for layer in costs.layers),
            whole_last=cost(costs.whole_last),
            encoder=replace(
                costs.encoder,
                working_bytes=of_encoder.forward_working_bytes,
                stem_working_bytes=calibration.encode_stem_bytes,
                later_working_bytes=calibration.encode_later_bytes,
            ),
        ),
        Timings(
            device=calibration.key.device,
            measured_messages=messages is not None and messages.transfer is not None,
            layers=tuple(seconds(layer) for layer in costs.layers),
            whole_last=seconds(costs.whole_last),
            encode_stem=max(0.0, of_encoder.forward_seconds - blocks * block) + calibration.encode_seconds,
            encode_block=block,
            encoder_blocks=blocks,
            call=calibration.compute_seconds,
            send=measured(messages and messages.send, assumed.send),
            receive=measured(messages and messages.receive, assumed.receive),
            transfer=measured(messages and messages.transfer, assumed.transfer),
            send_features=measured(features and features.send, assumed.send_features),
            receive_features=measured(features and features.receive, assumed.receive_features),
            transfer_features=measured(features and features.transfer, assumed.transfer_features),
            end=max(0.0, calibration.end_seconds + more_replicas),
            fetch_latency=assumed.fetch_latency,
            fetch_seconds_per_byte={
                **assumed.fetch_seconds_per_byte,
                **{source: 1 / rates.beside for source, rates in calibration.fetches.items()},
            },
            measured_fetches=tuple(calibration.fetches),
        ),
    )
