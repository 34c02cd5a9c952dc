"""What a line of each record of a run must be, and plan.json and audit.json, as far as the page reads them.

Checked where it enters: types, ranges and lengths; text is made printable and cut, so that it is one line of a message
(`Name`) or some lines (`Words`). Of an earlier or later version keys may be missing or unknown.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mmtrain.base.printing import harmless, shortened
from mmtrain.config.disclosed import disclosed
from mmtrain.report.curves import LARGEST

LONGEST_WORDS = 2000
MOST_RANKS = 4096


def shown(text: str) -> str:
    """Text of a record as one line of a page, without secrets that a configuration may hold."""
    return harmless(disclosed(text))


def _sane(value: float) -> float:
    return value if not abs(value) > LARGEST else math.copysign(math.inf, value)


Name = Annotated[str, AfterValidator(shown)]
Number = Annotated[float, AfterValidator(_sane)]  # NaN and infinity are some
Words = Annotated[str, AfterValidator(lambda text: shortened(text, LONGEST_WORDS))]
Count = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]
Measure = Annotated[float, Field(ge=0, le=1e30)]
OfRanks = Annotated[list[Measure], Field(max_length=MOST_RANKS)]
Names = Annotated[list[Name], Field(max_length=100_000)]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=True)


# ---- metrics.jsonl


class _Metrics(_Checked):
    time: Annotated[float, Field(ge=0, le=1e11)] | None = None  # Unix seconds
    step: Count = 0


class Train(_Metrics):
    """A step; counted from 0. "nan" and "inf" are numbers here: a bad step's."""

    kind: Literal["train"]
    loss: Number | None = None
    grad_norm: Number | None = None
    lr: Number | None = None
    lr_groups: Annotated[dict[Name, Number], Field(max_length=1000)] = {}
    samples: Count = 0
    images: Count = 0
    tiles: Count | None = None  # None: of a version in which each image was one
    tokens: Count = 0
    supervised_tokens: Count = 0
    quarantined: Count = 0
    no_update: Name | None = None
    pack_fill: Number | None = None
    seconds: Measure | None = None
    tokens_per_second: Number | None = None
    idle_fraction: OfRanks = []
    compute_seconds: OfRanks = []
    communication_seconds: OfRanks = []
    data_seconds: OfRanks = []
    fetching_seconds: OfRanks = []  # not there in records of versions that streamed no weights
    peak_memory_bytes: OfRanks = []
    model_flops_utilization: Number | None = None


class Evaluation(_Metrics):
    """Scores on held-out samples after `step` updates; of the control with permuted images, too."""

    kind: Literal["eval", "eval_permuted"]
    loss: Number | None = None
    token_accuracy: Share | None = None
    exact_match: Share | None = None
    answers: Count = 0
    samples: Count = 0
    seconds: Measure | None = None
    permuted_samples: Count = 0


class Begin(_Metrics):
    """A process begins or goes on."""

    kind: Literal["begin"]
    device: Name | None = None
    versions: Annotated[dict[Name, Name], Field(max_length=100)] = {}


class Resume(_Metrics):
    """The run goes on from a checkpoint."""

    kind: Literal["resume"]
    changed: Names = []


class Checkpoint(_Metrics):
    """One was saved."""

    kind: Literal["checkpoint"]


class CheckpointFailed(_Metrics):
    """One could not be saved."""

    kind: Literal["checkpoint_failed"]
    error: Name = ""


class Epoch(_Metrics):
    """What became of the samples of an epoch."""

    kind: Literal["epoch"]
    epoch: Count
    complete: bool
    packs: Count
    read: Count
    trained: Count
    quarantined: Count
    overlong: Count


class End(_Metrics):
    """All steps are made, and what comes after them."""

    kind: Literal["end"]


class Other(_Metrics):
    """Nothing that the page shows."""

    kind: Literal["attention"]


Line = Annotated[
    Train | Evaluation | Begin | Resume | Checkpoint | CheckpointFailed | Epoch | End | Other,
    Field(discriminator="kind"),
]


# ---- other records


class Quarantined(_Checked):
    """A sample that could not be used; without a step: from the start."""

    step: Count | None = None
    epoch: Count = 0
    key: Name = ""
    shard: Name = ""
    reason: Name
    detail: Name = ""


class _Microbatch(_Checked):
    loss: Number | None = None
    keys: Names = []


class BadStep(_Checked):
    """A step without an update: NaN or infinity."""

    step: Count
    loss_sum: Number | None = None
    squared_gradient_norm: Number | None = None
    ranks: Annotated[list[Count], Field(max_length=MOST_RANKS)] = []
    parameters: Names = []
    microbatches: Annotated[list[_Microbatch], Field(max_length=100_000)] = []


class Lost(_Checked):
    """As far as it is a line of metrics.jsonl."""

    kind: Name | None = None
    step: Count = 0
    time: Number | None = None


class Discarded(_Checked):
    """A record that the run went back behind."""

    file: Name
    back_to_step: Count
    record: Lost | Any = Field(default=None, union_mode="left_to_right")


class Answer(_Checked):
    """A held-out question that the model answered after `step` updates."""

    step: Count
    key: Name
    question: Words
    given: Words
    truth: Words
    right: bool
    pictures: Annotated[list[str], Field(max_length=64)] = []  # paths in the run's folder; checked when they are read


# ---- plan.json


class Stage(_Checked):
    """What a rank holds of the pipeline."""

    stage: Count
    encoder: tuple[Count, Count] | None = None
    layers: Annotated[list[Name], Field(max_length=10_000)]
    recompute_layers: Count = 0


class RankPlan(_Checked):
    """A process, as planned; bytes at its fullest moment."""

    rank: Count
    pipeline: Count
    data: Count
    stages: Annotated[list[Stage], Field(max_length=10_000)]
    trainable: Count
    optimizer: Name
    reason: Name = ""
    weight_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count
    workspace_bytes: Count
    total_bytes: Count
    work_share: Share
    idle_share: Share


class Plan(_Checked):
    """Who holds, trains and runs what."""

    run: Name
    llm: Name
    vision: Name | None = None
    trainable: Names
    pipeline: Count
    data: Count
    stages_per_rank: Count = 1
    decoder_layers: Count = 0
    microbatches_per_step: Count
    packs_per_microbatch: Count
    pack_length: Count
    memory_limit_bytes: Count | None = None
    costs: Name = ""
    step_seconds: Measure | None = None
    idle_share: Share
    ranks: Annotated[list[RankPlan], Field(min_length=1, max_length=MOST_RANKS)]


# ---- audit.json


class _Tensor(_Checked):
    name: Name
    moved: bool
    had_gradient: bool = True


class _Frozen(_Checked):
    tensors: Count
    bytes: Count


class _RankAudit(_Checked):
    rank: Count
    data: Count
    trainable: Annotated[list[_Tensor], Field(max_length=1_000_000)]
    frozen: _Frozen


class Audit(_Checked):
    """The proof that only what should train did."""

    passed: bool
    failures: Names = []
    ranks: Annotated[list[_RankAudit], Field(max_length=MOST_RANKS)]
