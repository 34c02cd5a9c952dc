"""Export what a run has trained: alone, for LLaVA's code, or with its models for stock
transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from mmtrain.api.run import Run
from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, silence_libraries
from mmtrain.checkpoint.step_folder import StepFolder, find
from mmtrain.stock.exporters import Base, default_base

if TYPE_CHECKING:
    import torch

    from mmtrain.exporting.hf import ExportedModel

_log = logging.getLogger(__name__)
Format = Literal["safetensors", "llava", "hf", "peft"]
Dtype = Literal["float32", "bfloat16", "float16"]
MODEL_FORMATS = ("hf", "peft")  # those of a model that runs


class DifferentError(Exception):
    """The exported model computes something else than mmtrain's; nothing was left under `out`."""


def export(
    run: Run | str | Path,
    format: Format,
    out: str | Path,
    *,
    dtype: Dtype | None = None,
    max_shard_gb: float = 5.0,
    verify: int | None = None,
    base: Base | None = None,
    show: Callable[[str, int, int], None] = lambda *_: None,
) -> Path:
    """Export a checkpoint, or the newest whole one of a run, into the new folder `out`, which is
    returned.

    `mmtrain export --help` explains the options. `dtype` None: that of the run's LLM for "hf" and
    "peft", else float32. `verify` is a number of samples. `show` gets (what, bytes done, bytes in
    all). Raises: UserError, and DifferentError where `verify` finds a difference.
    """
    for name, value, known in (
        ("format", format, get_args(Format)),
        ("dtype", dtype or "float32", get_args(Dtype)),
        ("base", base or "hf", get_args(Base)),
    ):
        if value not in known:
            raise UserError(f"{name} {value!r}: choose one of {', '.join(known)}")
    if not max_shard_gb > 0:
        raise UserError(f"max_shard_gb {max_shard_gb}: set a number above 0")
    if base is not None and format != "peft":
        raise UserError(
            f"base (--base) is for adapters (--format peft), but the format is {format}. "
            "Leave it out"
        )
    if verify is not None and format not in MODEL_FORMATS:
        raise UserError(
            "verify (--verify) runs the exported model, which only hf and peft (--format hf, peft) "
            "have. Leave it out"
        )
    silence_libraries()
    out = Path(out)
    checkpoint = find(run.folder if isinstance(run, Run) else Path(run))
    _log.info(f"{checkpoint.path}: {checkpoint.step:,} steps")
    if (
        format == "peft"
        and verify is not None
        and (base or default_base(checkpoint.models)) == "llm"
    ):
        raise UserError(
            "verify (--verify) runs a whole model, but these adapters are for the published LLM. "
            "Set base hf "
            "(--base hf), which exports a model for them, or leave verify out"
        )
    import torch  # after the cheap refusals: it takes seconds

    from mmtrain.exporting.hf import export_hf
    from mmtrain.exporting.llava import export_llava
    from mmtrain.exporting.projector_file import export_projector_file
    from mmtrain.exporting.tensors import new_folder

    tensors = getattr(
        torch,
        dtype or (checkpoint.config.model.llm.dtype if format in MODEL_FORMATS else "float32"),
    )
    shard_bytes = int(max_shard_gb * 1e9)
    exported = None
    with new_folder(out) as folder:
        if format == "safetensors":
            export_projector_file(checkpoint, folder, tensors)
        elif format == "llava":
            export_llava(checkpoint, folder, tensors)
        elif format == "hf":
            exported = export_hf(checkpoint, folder, tensors, shard_bytes, show)
        else:
            from mmtrain.exporting.peft_folder import export_peft  # peft takes a second

            chosen = base or default_base(checkpoint.models)
            exported = export_peft(checkpoint, folder, tensors, shard_bytes, chosen, show)
        if exported is not None and exported.unmarked:
            _log.info(exported.unmarked)
        if exported is not None and verify is not None:
            _verify(checkpoint, exported, tensors, verify)
    size = sum(file.stat().st_size for file in out.expanduser().rglob("*") if file.is_file())
    _log.info(
        f"exported {out} ({bytes_text(size)}, {str(tensors).removeprefix('torch.')}), read "
        "again and compared"
    )
    return out


def _verify(
    checkpoint: StepFolder, exported: ExportedModel, dtype: torch.dtype, samples: int
) -> None:
    """Compare an exported model with mmtrain's; raises DifferentError."""
    from mmtrain.exporting.verify import PROMPTS, batch_fault, compare_logits

    _log.info(
        "comparing with mmtrain's own logits: "
        "both models are loaded, in float32, one after the other"
    )
    comparison, model = compare_logits(checkpoint, exported, dtype, samples)
    line = (
        f"logits of {comparison.tokens:,} answer tokens in {len(comparison.samples)} samples: "
        "largest difference "
        f"{comparison.difference:.1e} (largest logit {comparison.largest:.1f}), the same token at "
        f"{comparison.agreeing:,} of {comparison.tokens:,}"
    )
    if not comparison.passed:
        raise DifferentError(
            f"{line}: the exported model differs from the trained one, so nothing was exported"
        )
    _log.info(line)
    # the class around the LLM has to pad its prompts, too
    if checkpoint.config.model.vision is not None:
        is_plain = checkpoint.config.data.template == "plain"
        if fault := batch_fault(exported.folder, model, comparison.samples, is_plain):
            raise DifferentError(
                f"batches are answered wrongly: {fault}. Nothing was exported. "
                "Without --verify the folder is written "
                "anyway: ask it one prompt at a time"
            )
        _log.info(
            f"{PROMPTS} prompts of different lengths get equal answers in one batch "
            "and one at a time"
        )
