"""What layers, messages and a step's end take on a device, measured: seconds and bytes, and the file that keeps them.

measurement on the device --Calibration--> JSON in the cache, found by its key --timings, memory--> a plan in seconds

A calibration holds for one key: device, ranks that compute on it at once, threads, models and what trains in them,
sizes of a micro-batch, versions. It says nothing of layouts: any cut, schedule and recomputation is predicted from it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import parse_json, read_limited
from mmtrain.config.keys import EntersCalibration, marked
from mmtrain.config.schema import RunConfig
from mmtrain.plan.costs import Models
from mmtrain.runtime.pool import usable_cores

FORMAT = 1
PACKAGES = ("mmtrain", "torch", "transformers", "timm")
EXACTLY = ConfigDict(extra="forbid")  # a file has all fields and no others
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Seconds = Annotated[Amount, Field(le=86_400.0)]  # of one layer or message: far more than any takes
Rate = Annotated[Amount, Field(gt=0)]
Count = Annotated[int, Field(ge=0, strict=True)]
MAX_BYTES = 1_000_000  # of the file; a dozen kinds of layers take 5 kB


@dataclass(frozen=True, slots=True)
class Device:
    """What computes. `ranks` share it and compute at once: all of a machine on a CPU, one on a GPU."""

    name: str
    ranks: int
    threads: int  # CPU threads of each rank
    is_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """What a calibration depends on; two runs with equal keys may share one. Keys of a config are those `Measured`."""

    __pydantic_config__ = EXACTLY

    device: str
    ranks: int
    threads: int
    models: str  # hash of all parameters' names and shapes and of the dtypes that they are stored in
    trainable: tuple[str, ...]  # patterns
    pack_length: int
    packs_per_microbatch: int
    expected_text_tokens: int
    expected_supervised_fraction: float
    versions: tuple[str, ...]  # of PACKAGES, as "name version"
    expected_image_tiles: float | None = None
    expected_image_positions: float | None = None


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """One kind of layer (see `costs.LayerKind`), for one micro-batch of the expected contents.

    Seconds are those that one more layer of this kind adds to a FORWARD or BACKWARD of its stage; bytes of a layer that
    runs forward only are those without a graph. "Kept" bytes live from the layer's forward to its backward, its output
    counted where the next layer keeps it as its input. "Working" bytes are the most that lives at once while the layer
    runs beyond what was there when it began and, in forward, beyond what it keeps; weights are never counted.
    """

    __pydantic_config__ = EXACTLY

    forward_seconds: Seconds
    backward_seconds: Seconds  # 0 where nothing runs backward
    recomputing_seconds: Seconds  # the backward if the layer recomputes its activations, its second forward included
    kept_bytes: Count
    kept_bytes_recomputing: Count
    forward_working_bytes: Count
    backward_working_bytes: Count
    recomputing_working_bytes: Count  # the backward's if the layer recomputes, what it makes again included


@dataclass(frozen=True, slots=True)
class MessageSeconds:
    """One message of the size that a micro-batch's messages have."""

    __pydantic_config__ = EXACTLY

    send: Seconds  # of the sender, while it posts a message
    receive: Seconds  # of the receiver, for posting and taking one that has arrived
    transfer: Seconds | None  # from the moment both sides have posted a message to its arrival; None: was not measured


@dataclass(frozen=True, slots=True)
class FetchRates:
    """Bytes a second of streamed layers, from one source."""

    __pydantic_config__ = EXACTLY

    alone: Rate
    beside: Rate  # while the device computes, too


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on a device."""

    __pydantic_config__ = EXACTLY

    key: Key
    layers: Mapping[str, LayerMeasures]  # by name of the kind
    compute_seconds: Seconds  # overhead of one FORWARD or BACKWARD, beyond the sum of its layers
    encode_seconds: Seconds  # overhead of one ENCODE, with its LOAD, beyond the encoder's forward
    encode_block_seconds: Seconds  # part of the encoder's forward, of each of its blocks; 0 if it trains
    messages: MessageSeconds | None  # between stages, hidden states and integers; None: were not measured
    features: MessageSeconds | None  # between slices of a frozen encoder; None likewise
    end_seconds: Seconds  # a step's end: reductions, of gradients over `replicas`, and optimizer
    replicas: Annotated[Count, Field(gt=0)]
    matmul_flops_per_second: Rate  # of one rank, all `ranks` computing
    encode_stem_bytes: Count | None = None  # working in an ENCODE of a first slice without blocks; None: not measured
    encode_later_bytes: Count | None = None  # likewise of a slice behind the first
    fetches: Mapping[str, FetchRates] = field(default_factory=dict)  # by source, those that were measured

    def save(self, file: Path | None = None) -> Path:
        """Write it, by default where `find` looks, and return the file. An existing one is replaced whole."""
        file = file or cached_file(self.key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return file


def cpu_device(config: RunConfig, local_ranks: int | None = None) -> Device:
    """This machine's CPU with the threads that its ranks would be given (None: all ranks of the run are on it)."""
    cores = usable_cores()
    ranks = local_ranks or config.parallel.pipeline * config.parallel.data
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return Device(f"{name}, {cores} cores", ranks, config.parallel.threads_per_rank or max(1, cores // ranks))


def gpu_device(name: str) -> Device:
    """A GPU with a rank to itself; the host's threads compute nothing."""
    return Device(name, ranks=1, threads=1, is_gpu=True)


def calibration_key(config: RunConfig, models: Models, device: Device) -> Key:
    """What a calibration for this run on this device must have been made for."""
    shapes = [[p.name, *p.shape] for p in models.parameters]
    llm, vision = models.llm, models.vision
    facts = [shapes, vision.image_size, vision.blocks_run, vision.heads, llm.heads, llm.window, llm.experts_per_token]
    dtypes = [config.model.llm.dtype, config.model.vision_dtype]
    if models.layout.positions_per_tile != vision.patches_per_image:  # pooling has no parameters that would tell
        facts.append(models.layout.positions_per_tile)
    if models.layout.is_sized:  # what a typical image is
        facts.append(models.layout.numbers)
    return Key(
        device=device.name,
        ranks=device.ranks,
        threads=device.threads,
        models=hashlib.sha256(json.dumps([*facts, dtypes]).encode()).hexdigest()[:16],
        **{path[-1]: config.value_at(path) for path in marked(RunConfig, EntersCalibration)},
        versions=tuple(f"{name} {_version(name)}" for name in PACKAGES),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def cached_file(key: Key) -> Path:
    """Where the cache keeps the calibration for a key."""
    # A key that came later and is null leaves the file where it was.
    given = {name: value for name, value in asdict(key).items() if value is not None}
    digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
    return cache_folder("calibration") / f"{digest}.json"


def find_calibration(config: RunConfig, models: Models, device: Device) -> Calibration | None:
    """The calibration in `parallel.calibration`, else the cache's for this run on this device; None: there is none.

    Raises UserError if the file in `parallel.calibration` cannot be read, or is for another device, model, size or
    version, naming each. What cannot be read in the cache counts as not there: nobody has asked for it.
    """
    wanted = calibration_key(config, models, device)
    given = config.parallel.calibration
    if given is None:
        try:
            return load_calibration(cached_file(wanted))
        except UserError:
            return None
    found = load_calibration(Path(given).expanduser())
    different = [
        f"{field.name}: measured for {getattr(found.key, field.name)}, this run has {getattr(wanted, field.name)}"
        for field in fields(Key)
        if getattr(found.key, field.name) != getattr(wanted, field.name)
    ]
    if different:
        lines = "\n  ".join(different)
        raise UserError(
            f"parallel.calibration: {given} is not for this run:\n  {lines}\n"
            "calibrate this run on this device, or set parallel.calibration=null to plan without"
        )
    return found


def load_calibration(file: Path) -> Calibration:
    """Read a file that `Calibration.save` wrote; raises UserError, saying what is wrong, for anything else."""
    try:
        content = parse_json(read_limited(file, MAX_BYTES, "a calibration"))
        if (version := content.pop("format", None)) != FORMAT:
            raise ValueError(f"it has version {escape(repr(version))}, this mmtrain reads {FORMAT}")
        return TypeAdapter(Calibration).validate_python(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            wrong = error.errors()[0]
            said = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise UserError(
            f"{file}: no calibration that this version of mmtrain reads ({said}); calibrate again"
        ) from error
