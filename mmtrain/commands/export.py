"""Export a trained projector: alone, for LLaVA's code, or with its models as a folder that stock transformers loads.

    --format safetensors   OUT/projector.safetensors (every trained tensor) and projector.json, which says what it
                           belongs to: models, layer, widths, steps, data, scores, versions
    --format llava         OUT/mm_projector.bin and config.json, as LLaVA's own code reads them (its loader wants
                           `llava` in the folder's name)
    --format hf            OUT/: the whole model. LlavaForConditionalGeneration.from_pretrained(OUT) and
                           AutoProcessor.from_pretrained(OUT) need nothing else; README.md in it shows how

The models are read where the run's configuration says, tensor by tensor: memory for the largest one is enough. Nothing
is written over; OUT appears when all of it is on the disk and was read again. --verify then loads the exported model,
and mmtrain's own, and compares their logits on samples that the run held out, and answers to a batch of prompts with
those to one at a time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.base.errors import UserError
from mmtrain.base.printing import run_command, show_error, tell
from mmtrain.base.progress import ByteProgress
from mmtrain.checkpoint.step_folder import StepFolder, find
from mmtrain.commands.parser import command_parser, positive

if TYPE_CHECKING:
    import torch

EXAMPLES = """\
examples:
  the newest checkpoint of a run, for transformers, in the precision of the run:
    mmtrain export --checkpoint runs/llava_pp4 --format hf --out exported/llava_pp4 --verify
  one checkpoint, the projector alone:
    mmtrain export --checkpoint runs/llava_pp4/checkpoints/step-00000160 --format safetensors \\
        --out exported/projector
  for LLaVA's stage 2, --pretrain_mm_mlp_adapter exported/llava-mine/mm_projector.bin:
    mmtrain export --checkpoint runs/mine --format llava --dtype bfloat16 --out exported/llava-mine

exit codes:
  0    done, and everything reads back as written
  1    --verify: the exported model computes something else; nothing was left under --out
  2    wrong input; the message says what to do
  130  stopped by Ctrl-C
"""
VERIFY_SAMPLES = 8
EXIT_DIFFERENT = 1


class DifferentError(Exception):
    """The exported model computes something else than mmtrain's."""


def export(options: argparse.Namespace) -> int:
    """Write what the options ask for; the exit code. Raises UserError."""
    if options.verify is not None and options.format != "hf":
        raise UserError("--verify runs the exported model, and only --format hf exports one; leave it out")
    checkpoint = find(options.checkpoint, tell)
    tell(f"{checkpoint.path}: {checkpoint.step:,} steps")
    import torch  # after the cheap refusals: it takes seconds

    from mmtrain.export.llava import export_llava
    from mmtrain.export.projector_file import export_projector_file

    default = checkpoint.config.model.llm.dtype if options.format == "hf" else "float32"
    dtype = getattr(torch, options.dtype or default)
    if options.format == "hf":
        try:
            _export_model(checkpoint, dtype, options)
        except DifferentError as error:
            show_error(error)
            return EXIT_DIFFERENT
    else:
        write = {"safetensors": export_projector_file, "llava": export_llava}[options.format]
        write(checkpoint, options.out, dtype)
    size = sum(file.stat().st_size for file in options.out.expanduser().iterdir())
    tell(f"exported {options.out} ({_size(size)}, {str(dtype).removeprefix('torch.')}), read again and compared")
    return 0


def _export_model(checkpoint: StepFolder, dtype: torch.dtype, options: argparse.Namespace) -> None:
    from mmtrain.export.hf import export_hf
    from mmtrain.export.tensors import new_folder
    from mmtrain.export.verify import PROMPTS, batch_fault, compare_logits, expected_logits, stock_model

    with new_folder(options.out) as folder, ByteProgress(tell, sys.stdout) as progress:
        exported = export_hf(checkpoint, folder, dtype, int(options.max_shard_gb * 1e9), progress.show)
        tell(f"{exported.tensors:,} tensors, {_size(exported.bytes)} in {exported.files} file(s)")
        if exported.unmarked:
            tell(exported.unmarked)
        if options.verify is not None:
            tell("comparing with mmtrain's own logits: both models are loaded, in float32, one after the other")
            expected = expected_logits(checkpoint, folder, exported, dtype, options.verify)
            model = stock_model(folder)
            found = compare_logits(expected, model)
            line = (
                f"logits of {found.tokens:,} answer tokens in {found.samples} samples: largest difference "
                f"{found.difference:.1e} (largest logit {found.largest:.1f}), the same token said at "
                f"{found.agreeing:,} of {found.tokens:,}"
            )
            if not found.passed:
                raise DifferentError(
                    f"{line}: the exported model is not the one that was trained; nothing was exported"
                )
            tell(line)
            plain = checkpoint.config.data.template == "plain"
            if fault := batch_fault(folder, model, expected.samples, plain):
                raise DifferentError(
                    f"batches are answered wrongly: {fault}; nothing was exported. Without --verify the folder is "
                    "written all the same: ask it one prompt at a time"
                )
            tell(f"{PROMPTS} prompts of different lengths are answered in one batch as one at a time")
            if not expected.frozen_as_trained:
                versions = checkpoint.state["versions"]
                tell(
                    "whether LLM and encoder are those that the run was trained with is open: it had transformers "
                    f"{versions['transformers']} and timm {versions['timm']}"
                )


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__, EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR|RUN",
        help="a step folder, or a run: its newest whole one",
    )
    parser.add_argument("--format", choices=("safetensors", "llava", "hf"), required=True, help="see above")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist, or be empty")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the tensors written (default: hf: that of the run's LLM; else float32, in which they were trained)",
    )
    parser.add_argument(
        "--max-shard-gb", type=positive(float), default=5.0, metavar="GB", help="hf: size of a file (default: 5)"
    )
    parser.add_argument(
        "--verify",
        type=positive(int),
        nargs="?",
        const=VERIFY_SAMPLES,
        metavar="N",
        help="hf: compare logits with mmtrain's own on N held-out samples, and answers in a batch with single ones "
        f"(default: {VERIFY_SAMPLES})",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 and one message for what the user can mend."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: export(options), interrupted="stopped; nothing was left under --out")
