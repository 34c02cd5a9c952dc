"""Seconds of layers, messages and a step's end on a device: measured by a calibration, or assumed.

measurement on the device --Calibration--> JSON in the cache, found by its key
    --calibrated, or without one assumed_timings--> Timings --cut--> seconds of stages --simulate-->
        of a step

A calibration holds for one key: device, ranks that compute on it at once, threads, models and what
trains in them, sizes of a micro-batch, versions. It says nothing of layouts: any cut, schedule and
recomputation is predicted from it.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import parse_json, read_limited
from mmtrain.config.keys import EntersCalibration, marked
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import Models
from mmtrain.facts.quantised import QUANTISATIONS
from mmtrain.plan.costs import LayerCost, RunCosts
from mmtrain.plan.optimizer_kinds import FP32
from mmtrain.plan.simulate import MessageCost
from mmtrain.runtime.gpus import threads_of_rank, usable_cores

FORMAT = 1
PACKAGES = ("mmtrain", "torch", "transformers", "timm")
EXACTLY = ConfigDict(extra="forbid")  # a file has all fields and no others
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Seconds = Annotated[Amount, Field(le=86_400.0)]  # of one layer or message: far more than any takes
Rate = Annotated[Amount, Field(gt=0)]
Count = Annotated[int, Field(ge=0, strict=True)]
MAX_BYTES = 1_000_000  # of the file; a dozen kinds of layers take 5 kB


@dataclass(frozen=True)
class Device:
    """A processor that ranks share and compute on at once: all `ranks` of a machine on a CPU, one
    on a GPU.
    """

    name: str
    ranks: int
    threads: int  # CPU threads of each rank
    is_gpu: bool = False


@dataclass(frozen=True)
class Key:
    """The conditions of a calibration; two runs with equal keys may share one."""

    __pydantic_config__ = EXACTLY

    device: str
    ranks: int
    threads: int
    # hash of all parameters' names and shapes and of the dtypes that they are stored in
    models: str
    trainable: tuple[str, ...]  # patterns
    pack_length: int
    packs_per_microbatch: int
    expected_text_tokens: int
    expected_supervised_fraction: float
    versions: tuple[str, ...]  # of PACKAGES, as "name version"
    expected_image_tiles: float | None = None
    expected_image_positions: float | None = None
    expected_attended_tiles: float | None = None
    compile: Literal["auto"] | bool = "auto"
    deterministic: bool = False
    tf32: bool = False


@dataclass(frozen=True)
class LayerMeasures:
    """One kind of layer (see `costs.LayerKind`), for one micro-batch of the expected contents.

    Seconds are those that one more layer of this kind adds to a FORWARD or BACKWARD of its stage.
    Bytes are as in `costs.LayerCost`: a layer's output counts where the next layer keeps it as its
    input; weights never count. They are None on a CPU, where they are estimated instead.
    """

    __pydantic_config__ = EXACTLY

    forward_seconds: Seconds
    backward_seconds: Seconds  # 0 where nothing runs backward
    # the backward if the layer recomputes its activations, its second forward included
    recomputing_seconds: Seconds
    kept_bytes: Count | None = None
    kept_bytes_recomputing: Count | None = None
    forward_working_bytes: Count | None = None
    backward_working_bytes: Count | None = None
    # the backward's if the layer recomputes, what it makes again included
    recomputing_working_bytes: Count | None = None


@dataclass(frozen=True)
class MessageSeconds:
    """One message of the size that a micro-batch's messages have."""

    __pydantic_config__ = EXACTLY

    send: Seconds  # of the sender, while it posts a message
    receive: Seconds  # of the receiver, for posting and taking one that has arrived
    # from the moment both sides have posted a message to its arrival; None: was not measured
    transfer: Seconds | None


@dataclass(frozen=True)
class Calibration:
    __pydantic_config__ = EXACTLY

    key: Key
    layers: Mapping[str, LayerMeasures]  # by name of the kind
    compute_seconds: Seconds  # overhead of one FORWARD or BACKWARD, beyond the sum of its layers
    encode_seconds: Seconds  # overhead of one ENCODE, with its LOAD, beyond the encoder's forward
    # part of the encoder's forward, of each of its blocks; 0 if it trains
    encode_block_seconds: Seconds
    # between stages, hidden states and integers; None: were not measured
    messages: MessageSeconds | None
    features: MessageSeconds | None  # between slices of a frozen encoder; None likewise
    end_seconds: Seconds  # a step's end: reductions, of gradients over `replicas`, and optimizer
    replicas: Annotated[Count, Field(gt=0)]
    matmul_flops_per_second: Rate  # of one rank, all `ranks` computing
    # working in an ENCODE of a first slice without blocks; None: not measured
    encode_stem_bytes: Count | None = None
    encode_later_bytes: Count | None = None  # likewise of a slice behind the first
    fetches: Mapping[str, Rate] = field(default_factory=dict)  # by measured source: bytes a second

    def save(self, file: Path | None = None) -> Path:
        """Write it, by default where `find` looks, and return the file. An existing one is replaced
        whole.
        """
        file = file or cached_file(self.key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return file


def cpu_device(parallel: ParallelSection, local_ranks: int | None = None) -> Device:
    """This machine's CPU with the threads that its ranks would be given (None: all ranks of the run
    are on it).
    """
    ranks = local_ranks or parallel.pipeline * parallel.data
    threads = threads_of_rank(parallel.threads_per_rank, ranks)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            name = found[1].strip()
    return Device(f"{name}, {usable_cores()} cores", ranks, threads)


def gpu_device(name: str) -> Device:
    """A GPU with a rank to itself; the host's threads compute nothing."""
    return Device(name, ranks=1, threads=1, is_gpu=True)


def calibration_key(config: RunConfig, models: Models, device: Device) -> Key:
    llm = models.llm
    vision = models.vision
    layout = models.layout
    facts = [
        [[p.name, *p.shape] for p in models.parameters],
        [
            vision.image_size,
            vision.blocks_run,
            vision.heads,
            llm.heads,
            llm.window,
            llm.experts_per_token,
        ],
        # pooling, and a typical image
        [layout.positions_per_tile, layout.numbers if layout.is_sized else None],
        [config.model.llm.dtype, config.model.vision_dtype],
    ]
    return Key(
        device=device.name,
        ranks=device.ranks,
        threads=device.threads,
        models=hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16],
        **{path[-1]: config.value_at(path) for path in marked(RunConfig, EntersCalibration)},
        versions=tuple(f"{name} {version(name)}" for name in PACKAGES),
    )


def cached_file(key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(key)).encode()).hexdigest()[:16]
    return cache_folder("calibration") / f"{digest}.json"


def find_calibration(config: RunConfig, models: Models, device: Device) -> Calibration | None:
    """The calibration in `parallel.calibration`, else the cache's for this run on this device;
    None: there is none.

    Raises UserError if the file in `parallel.calibration` cannot be read or is for another run. One
    in the cache that cannot be read counts as not there.
    """
    wanted = calibration_key(config, models, device)
    given = config.parallel.calibration
    if given is None:
        try:
            return load_calibration(cached_file(wanted))
        except UserError:
            return None
    calibration = load_calibration(Path(given).expanduser())
    different = ""
    measured = asdict(calibration.key)
    for name, asked in asdict(wanted).items():
        if measured[name] != asked:
            different += f"\n  {name}: measured for {measured[name]}, but this run has {asked}"
    if different:
        raise UserError(
            f"parallel.calibration: {given} is not for this run:{different}\n"
            "Calibrate this run on this device, or set parallel.calibration=null to plan without"
        )
    return calibration


def load_calibration(file: Path) -> Calibration:
    """Read a file that `Calibration.save` wrote; raises UserError, saying what is wrong, for
    anything else.
    """
    try:
        content = parse_json(read_limited(file, MAX_BYTES, "a calibration"))
        found = content.pop("format", None)
        if found != FORMAT:
            raise ValueError(f"it has version {escape(repr(found))}; this mmtrain reads {FORMAT}")
        return TypeAdapter(Calibration).validate_python(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = error.strerror
        elif isinstance(error, ValidationError):
            wrong = error.errors()[0]
            reason = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise UserError(
            f"{file}: not a calibration that this version of mmtrain reads ({reason}). "
            "Calibrate again"
        ) from error


# ---- seconds of what a step consists of


@dataclass(frozen=True)
class Assumptions:
    """Rates assumed of a device that was not measured. Only ratios matter."""

    flops_per_second: float
    fp32_slowdown: float  # seconds of a FLOP in fp32 over those of one in bfloat16
    bytes_per_second: float  # of a message on its way
    host_bytes_per_second: float  # of weights from the host's memory
    dequantised_bytes_per_second: float  # of weights that are made of fewer bits
    latency_seconds: float  # from a message's post to its first byte
    call_seconds: float  # of one FORWARD or BACKWARD, beyond its layers


GPU = Assumptions(150e12, 10, 12e9, 25e9, 400e9, 30e-6, 200e-6)
"""Half of an A100's 312e12 in bfloat16; a tenth of that in fp32, which torch leaves off the tensor
cores (NVIDIA's data sheets; an H100's ratio is equal, a 4090's near 1.3); half of what PCIe 4.0 x16
carries one way (no NVLink), and all that page-locked host memory gives of it; a fifth of what an
A100's memory does for dequantising; two NCCL kernels; Python and launches that the device waits
for."""
CPU = Assumptions(100e9, 1, 3e9, 5e9, 1e9, 200e-6, 500e-6)
"""One core, in float32 and bfloat16 alike, which copies and dequantises weights itself; gloo
between processes of one machine, whose 4 MB cost their sender 1.4 ms."""


@dataclass(frozen=True)
class LayerSeconds:
    forward: float
    backward: float  # 0 where nothing runs backward
    recomputing: float  # the backward if the layer recomputes its activations


@dataclass(frozen=True)
class Timings:
    """Seconds per micro-batch, of one rank while the others compute, too."""

    # that was measured; None: all seconds are assumed, and only their ratios mean anything
    device: str | None
    layers: tuple[LayerSeconds, ...]  # front without the encoder's forward, decoder layers, head
    whole_last: LayerSeconds  # the last decoder layer where the head is on another stage
    encode_stem: float  # of LOAD and of what the encoder's first slice runs besides blocks
    encode_block: float  # of each block
    encoder_blocks: int
    call: float  # of one FORWARD or BACKWARD, beyond its layers
    messages: MessageCost  # between stages
    features: MessageCost  # between slices; from the last one they are less by prefix tokens
    end: float  # of a step: reductions and optimizer
    fetch_latency: float = 0.0  # of each fetch of a streamed layer
    fetch_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)  # besides, by source
    measured_messages: bool = False
    measured_fetches: tuple[str, ...] = ()  # sources

    @property
    def encode(self) -> float:
        return self.encode_of(self.encoder_blocks, first=True)

    def encode_of(self, blocks: int, first: bool) -> float:
        """Seconds of ENCODE of a slice with `blocks` blocks: the `first` has LOAD and the stem,
        another a call.
        """
        return (self.encode_stem if first else self.call) + blocks * self.encode_block


def assumed_timings(costs: RunCosts, replicas: int, device: Assumptions) -> Timings:
    """FLOPs at one rate in fp32 and one in bfloat16, bytes at another, as assumed of a device."""

    def compute(flops: int, in_fp32: int) -> float:
        return (flops - in_fp32 + in_fp32 * device.fp32_slowdown) / device.flops_per_second

    def of_encoder(flops: int) -> float:
        return compute(flops, flops if encoder.in_fp32 else 0)

    def seconds(layer: LayerCost) -> LayerSeconds:
        flops = layer.flops
        fp32 = layer.fp32_flops
        forward = compute(flops.forward, fp32.forward)
        backward = recomputing = compute(flops.dgrad + flops.wgrad, fp32.dgrad + fp32.wgrad)
        if layer.kept_bytes:
            recomputing += forward
        return LayerSeconds(forward, backward, recomputing)

    def message(size: int) -> MessageCost:
        return MessageCost(transfer=device.latency_seconds + size / device.bytes_per_second)

    encoder = costs.encoder
    return Timings(
        device=None,
        layers=tuple(map(seconds, costs.layers)),
        whole_last=seconds(costs.whole_last),
        encode_stem=of_encoder(encoder.stem_forward),
        encode_block=of_encoder(encoder.block_forward),
        encoder_blocks=encoder.blocks,
        call=device.call_seconds,
        messages=message(costs.hidden_bytes),
        features=message(encoder.hidden_bytes),
        end=_ring(costs, replicas, device),
        fetch_latency=device.latency_seconds,
        fetch_seconds_per_byte={
            "host": 1 / device.host_bytes_per_second,
            "peers": 1 / device.bytes_per_second,
            **dict.fromkeys(QUANTISATIONS, 1 / device.dequantised_bytes_per_second),
        },
    )


def _ring(costs: RunCosts, replicas: int, device: Assumptions) -> float:
    gradient_bytes = FP32 * sum(layer.trainable for layer in costs.layers)
    return 2 * (replicas - 1) / replicas * gradient_bytes / device.bytes_per_second


def calibrated(
    costs: RunCosts,
    calibration: Calibration,
    replicas: int,
    device: Assumptions,
) -> tuple[RunCosts, Timings]:
    """Return the costs with measured bytes, if there are any, and measured seconds.

    Raises UserError where a kind of layer was not measured.

    Facts that the calibration's layout could not tell are assumed of `device`: messages at pipeline
    1, and the part of a step's end that depends on the number of replicas.
    """
    measures = _measures(costs, calibration)
    assumed = assumed_timings(costs, replicas, device)

    def seconds(layer: LayerCost) -> LayerSeconds:
        kind = measures[layer.kind]
        return LayerSeconds(kind.forward_seconds, kind.backward_seconds, kind.recomputing_seconds)

    block = calibration.encode_block_seconds
    stem = max(0.0, measures["encoder"].forward_seconds - costs.encoder.blocks * block)
    end = calibration.end_seconds + assumed.end - _ring(costs, calibration.replicas, device)
    fetches = {source: 1 / rate for source, rate in calibration.fetches.items()}
    messages = calibration.messages
    timings = replace(
        assumed,
        device=calibration.key.device,
        layers=tuple(map(seconds, costs.layers)),
        whole_last=seconds(costs.whole_last),
        encode_stem=stem + calibration.encode_seconds,
        encode_block=block,
        call=calibration.compute_seconds,
        messages=_message(messages, assumed.messages),
        features=_message(calibration.features, assumed.features),
        end=max(0.0, end),
        fetch_seconds_per_byte={**assumed.fetch_seconds_per_byte, **fetches},
        measured_messages=messages is not None and messages.transfer is not None,
        measured_fetches=tuple(fetches),
    )
    return _with_bytes(costs, measures, calibration), timings


def _with_bytes(
    costs: RunCosts,
    measures: dict[str, LayerMeasures],
    calibration: Calibration,
) -> RunCosts:
    """Return the costs with measured bytes; as they are where none were measured, on a CPU."""
    if any(layer.kept_bytes is None for layer in measures.values()):
        return costs
    of_encoder = measures["encoder"]
    front = measures["front"]
    if not costs.encoder.frozen:  # its backward belongs to stage 0's
        front = replace(
            front,
            kept_bytes=front.kept_bytes + of_encoder.kept_bytes,
            kept_bytes_recomputing=front.kept_bytes_recomputing + of_encoder.kept_bytes,
            backward_working_bytes=max(
                front.backward_working_bytes, of_encoder.backward_working_bytes
            ),
        )

    def cost(layer: LayerCost) -> LayerCost:
        kind = asdict(front if layer.kind == "front" else measures[layer.kind])
        return replace(layer, **{name: kind[name] for name in kind if "_bytes" in name})

    return replace(
        costs,
        layers=tuple(map(cost, costs.layers)),
        whole_last=cost(costs.whole_last),
        encoder=replace(
            costs.encoder,
            working_bytes=of_encoder.forward_working_bytes,
            stem_working_bytes=calibration.encode_stem_bytes,
            later_working_bytes=calibration.encode_later_bytes,
        ),
    )


def _message(measured: MessageSeconds | None, assumed: MessageCost) -> MessageCost:
    if measured is None:
        return assumed
    transfer = measured.transfer
    if transfer is None:
        transfer = assumed.transfer
    return MessageCost(measured.send, measured.receive, transfer)


def _measures(costs: RunCosts, calibration: Calibration) -> dict[str, LayerMeasures]:
    """Return the measures by kind of layer; the front's have the backward of an encoder that
    trains.
    """
    measures = dict(calibration.layers)
    missing = [kind.name for kind in costs.kinds if kind.name not in measures]
    if missing:
        raise UserError(
            f"the calibration on {calibration.key.device} does not have {', '.join(missing)}: "
            "it was made by another version of mmtrain. Calibrate again, or delete it"
        )
    names = {kind.name for kind in costs.kinds} - {"encoder"}
    if not any(measures[name].forward_seconds for name in names):
        raise UserError(
            "the calibration says that no layer takes any time. Calibrate again, or delete it"
        )
    if not costs.encoder.frozen:
        front = measures["front"]
        backward = front.backward_seconds + measures["encoder"].backward_seconds
        measures["front"] = replace(front, backward_seconds=backward, recomputing_seconds=backward)
    return measures
