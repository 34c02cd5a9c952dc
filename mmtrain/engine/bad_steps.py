"""Report a step with a loss or gradient that is NaN or infinite, as a record and in words.

Losses of micro-batches are known where the head is, keys of samples where data are read, gradients
where something trains. Each rank reports its part; the reports of all ranks make one record, a line
of `bad_steps.jsonl`:

    {"step": 12, "loss_sum": nan, "squared_gradient_norm": nan (of the loss sum's gradient),
     "ranks": [0, 3] (that hold a value that is not finite), "parameters": [names with such a
     gradient], "microbatches": [{"replica": 0, "microbatch": 1, "loss": nan (nats per supervised
     token; null without any),
                       "supervised_tokens": 57, "keys": [...]}, ...]}
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UnrecordedError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import escape, first_few
from mmtrain.engine.statistics import Slot, Statistics

SHOWN = 3  # micro-batches, samples of each, and parameters, in a message: the record has all


def report_bad_step(
    step: int,
    sums: Statistics,
    trainable: Mapping[str, torch.nn.Parameter],
    losses: Mapping[Slot, tuple[torch.Tensor, torch.Tensor]],
    keys: Mapping[Slot, tuple[str, ...]],
    file: Path | None,
) -> str:
    """Join the reports of all ranks; return them in words. Rank 0 appends the record to `file`.
    Collective.

    `trainable` are this rank's, with reduced gradients; `losses` is (loss sum in nats, supervised
    tokens) and `keys` the samples by replica and micro-batch. Raises UnrecordedError, with the
    words, where `file` cannot be written.
    """
    # what this rank knows, then what all know
    bad_names = [name for name, p in trainable.items() if not p.grad.isfinite().all()]
    is_bad = bool(bad_names)
    numbers = {}
    for slot, (loss, supervised) in losses.items():
        loss_sum = float(loss)
        numbers[slot] = (loss_sum, int(supervised))
        is_bad = is_bad or not math.isfinite(loss_sum)

    bad_ranks = []
    parameters = {}
    all_losses = {}
    all_keys = {}
    for rank, part in enumerate(all_gather_object((is_bad, bad_names, numbers, keys))):
        rank_is_bad, names, losses_of_rank, keys_of_rank = part
        if rank_is_bad:
            bad_ranks.append(rank)
        parameters |= dict.fromkeys(names)
        all_losses |= losses_of_rank
        all_keys |= keys_of_rank

    microbatches = []
    for slot, (loss, supervised) in sorted(all_losses.items()):
        microbatches.append(
            {
                "replica": slot[0],
                "microbatch": slot[1],
                "loss": loss / supervised if supervised else None,
                "supervised_tokens": supervised,
                "keys": list(all_keys[slot]),
            }
        )
    record = {
        "step": step,
        "loss_sum": sums.loss_sum,
        "squared_gradient_norm": sums.squared_norm,
        "ranks": bad_ranks,
        "parameters": list(parameters),
        "microbatches": microbatches,
    }

    text = in_words(record)
    if file is None:
        return text
    try:
        with JsonLines(file if dist.get_rank() == 0 else None) as lines:
            lines.write(**record)
    except OSError as error:
        raise UnrecordedError(f"{text} ({file} cannot be written: {error.strerror})") from error
    return f"{text}; {file} lists its micro-batches with losses and samples"


def in_words(record: Mapping[str, Any]) -> str:
    """Describe a record in a few sentences, with the first names of each kind; texts of the data
    are escaped.
    """
    ranks = ", ".join(map(str, record["ranks"]))
    bad = []
    for m in record["microbatches"]:
        if not math.isfinite(m["loss"] or 0.0):
            samples = first_few([*map(escape, m["keys"])], SHOWN)
            bad.append(f"{m['microbatch']} of replica {m['replica']} (samples {samples})")
    where = f"The loss is not finite in micro-batch {first_few(bad, SHOWN)}."
    if not bad:
        parameters = first_few(record["parameters"], SHOWN)
        where = f"The loss of each micro-batch is finite, but the gradient of {parameters} is not."
    look = "Lower optimizer.lr, or look" if record["step"] else "Look"
    return (
        f"step {record['step']}: the loss sum is {record['loss_sum']} and the squared gradient "
        f"norm {record['squared_gradient_norm']}, with values that are not finite on rank {ranks}. "
        f"No update was made. {where} {look} for damaged images or text in this step's data"
    )
