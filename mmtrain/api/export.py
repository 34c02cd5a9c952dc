"""Export what a run has trained, alone or with its models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from mmtrain.api.run import Run
from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, silence_libraries
from mmtrain.checkpoint.step_folder import StepFolder, find
from mmtrain.config.schema import ExportFormat
from mmtrain.stock.exporters import Base, default_base

if TYPE_CHECKING:
    import torch

    from mmtrain.exporting.hf import ExportedModel

_log = logging.getLogger(__name__)
Dtype = Literal["float32", "bfloat16", "float16"]
Progress = Callable[[str, int, int], None]  # gets (what, bytes done, bytes in all)
MODEL_FORMATS = ("hf", "peft")  # those of a model that runs


class DifferentError(Exception):
    """The exported model computes something else than mmtrain's; nothing was left under `out`."""


def export(
    run: Run | str | Path,
    format: ExportFormat,
    out: str | Path,
    *,
    dtype: Dtype | None = None,
    max_shard_gb: float = 5.0,
    verify: int | None = None,
    base: Base | None = None,
    show: Progress = lambda *_: None,
) -> Path:
    """Export a checkpoint, or the newest whole one of a run, into the new folder `out`.

    Returns `out`. `mmtrain export --help` explains the options. `dtype` None: that of the run's LLM
    for "hf" and "peft", else float32. `verify` is a number of samples. `show` gets (what, bytes
    done, bytes in all). Raises: UserError, and DifferentError where `verify` finds a difference.
    """
    _refuse_options(format, dtype, max_shard_gb, verify, base)
    silence_libraries()
    out = Path(out)
    if isinstance(run, Run):
        run = run.folder
    checkpoint = find(Path(run))
    _log.info(f"{checkpoint.path}: {checkpoint.step:,} steps")
    if format == "peft" and base is None:
        base = default_base(checkpoint.models)
    if verify is not None and base == "llm":
        raise UserError(
            "verify (--verify) runs a whole model, but these adapters are for the published LLM. "
            "Set base hf (--base hf), which exports a model for them, or leave verify out"
        )
    import torch  # after the cheap refusals: it takes seconds

    from mmtrain.exporting.hf import export_hf
    from mmtrain.exporting.llava import export_llava
    from mmtrain.exporting.projector_file import export_projector_file
    from mmtrain.exporting.tensors import new_folder

    if dtype is None and format in MODEL_FORMATS:
        dtype = checkpoint.config.model.llm.dtype
    dtype = dtype or "float32"
    tensors = getattr(torch, dtype)
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

            assert base is not None, "peft has a default"
            exported = export_peft(checkpoint, folder, tensors, shard_bytes, base, show)
        if exported is not None and exported.unmarked:
            _log.info(exported.unmarked)
        if exported is not None and verify is not None:
            _verify(checkpoint, exported, tensors, verify)
    size = sum(file.stat().st_size for file in out.expanduser().rglob("*") if file.is_file())
    _log.info(f"exported {out} ({bytes_text(size)}, {dtype}), read again and compared")
    return out


def _refuse_options(
    format: str,
    dtype: str | None,
    max_shard_gb: float,
    verify: int | None,
    base: str | None,
) -> None:
    """Raise UserError for options of `export` that are wrong, or that do not fit together."""
    for name, value, known in (
        ("format", format, ExportFormat),
        ("dtype", dtype or "float32", Dtype),
        ("base", base or "hf", Base),
    ):
        if value not in get_args(known):
            raise UserError(f"{name} {value!r}: choose one of {', '.join(get_args(known))}")
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


def _verify(
    checkpoint: StepFolder,
    exported: ExportedModel,
    dtype: torch.dtype,
    samples: int,
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
        f"largest difference {comparison.difference:.1e} (largest logit {comparison.largest:.1f}), "
        f"the same token at {comparison.agreeing:,} of {comparison.tokens:,}"
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
                f"batches are answered wrongly: {fault}. Nothing was exported. Without --verify "
                "the folder is written anyway: ask it one prompt at a time"
            )
        _log.info(
            f"{PROMPTS} prompts of different lengths get equal answers in one batch "
            "and one at a time"
        )
