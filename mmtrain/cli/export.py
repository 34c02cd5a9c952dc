"""Export what was trained: alone, for LLaVA's code, or as a folder for stock transformers.

    --format safetensors   OUT/projector.safetensors (every trained tensor, and the whole projector)
                           and projector.json, which says what it belongs to: models, layer, widths,
                           steps, data, scores, versions. A run on text alone writes
                           trained.safetensors and trained.json
    --format llava         OUT/mm_projector.bin and config.json, as LLaVA's own code reads them (its
                           loader wants `llava` in the folder's name)
    --format hf            OUT/: the whole model, as the stock class that computes what was trained,
                           such as Llava or Lfm2Vl; without one the run is refused.
                           from_pretrained(OUT) of it and of AutoProcessor need nothing else;
                           README.md in it shows how. Adapters (model.lora) are merged
    --format peft          OUT/adapter_model.safetensors and adapter_config.json: the LLM's
                           adapters, for PeftModel.from_pretrained(base, OUT). OUT/base is that
                           base, as --format hf writes it but for these adapters: with the
                           projector, the encoder (its adapters merged) and all else that was
                           trained. --base llm: they are for the LLM as it was published; the
                           projector lies beside them as with --format safetensors; anything else
                           that was trained is refused

The models are read where the run's configuration says. Memory for the encoder and one file
(--max-shard-gb) is enough. No file is replaced; OUT appears when all of it is on the disk and was
read again. --verify then compares the logits of the exported model with mmtrain's own on held-out
samples, and answers to a batch of prompts with single answers.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mmtrain.api.export import DifferentError, Dtype, export
from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_result, show_error
from mmtrain.base.progress import ByteBars
from mmtrain.config.schema import ExportFormat
from mmtrain.facts.hub import make_repository, push
from mmtrain.runtime.child import leave_out_gpu_kernels
from mmtrain.stock.exporters import Base

EXAMPLES = """\
  the newest checkpoint of a run, for transformers, in the precision of the run:
    mmtrain export runs/llava_pp4 --format hf --out exported/llava_pp4 --verify
  one checkpoint, the projector alone:
    mmtrain export runs/llava_pp4/checkpoints/step-00000160 --format safetensors \\
        --out exported/projector
  the adapters of a run with model.lora, for peft, and the model that they are added to:
    mmtrain export runs/lora --format peft --base hf --out exported/lora --verify
  also on the hub, where whoever may read the repository loads it by its name (hf auth login first):
    mmtrain export runs/mine --format hf --out exported/mine --verify --push my-org/mine
  for LLaVA's stage 2, --pretrain_mm_mlp_adapter exported/llava-mine/mm_projector.bin:
    mmtrain export runs/mine --format llava --dtype bfloat16 --out exported/llava-mine
"""
EXITS = {
    0: "done, and everything reads back as written",
    1: "--verify: the exported model computes something else; nothing was left under --out",
}


def run(options: Namespace) -> int:
    """Write what the options ask for and return the exit code. Raises UserError."""
    leave_out_gpu_kernels()  # models are compared on the CPU
    if options.push is not None:
        make_repository(options.push)  # before the long part
    try:
        with ByteBars(sys.stdout) as progress:
            folder = export(
                options.run,
                options.format,
                options.out,
                dtype=options.dtype,
                max_shard_gb=options.max_shard_gb,
                verify=options.verify,
                base=options.base,
                show=progress.show,
            )
    except DifferentError as error:
        show_error(error)
        return 1
    if options.push is not None:
        try:
            print_result(f"pushed: {push(folder, options.push)}")
        except UserError as error:
            raise UserError(
                f"{error}. {folder} is whole: hf upload {options.push} {folder}"
            ) from None
    return 0


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser(
        "export",
        __doc__,
        EXAMPLES,
        EXITS,
        interrupted="stopped; under --out there is all or nothing",
        logs=print_result,
    )
    add = parser.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="the folder of a run, whose newest whole checkpoint is taken, or of one checkpoint",
    )
    add("--format", choices=get_args(ExportFormat), required=True, help="see above")
    add("--out", type=Path, required=True, help="folder to make; must not exist, or be empty")
    add(
        "--dtype",
        choices=get_args(Dtype),
        help="of the tensors written (hf, peft: that of the run's LLM; "
        "else float32, as they were trained)",
    )
    add(
        "--max-shard-gb",
        type=positive(float),
        default=5.0,
        metavar="GB",
        help="hf, peft: largest size of a file (%(default)s)",
    )
    add(
        "--base",
        choices=get_args(Base),
        help="peft: what the adapters are for. llm: the published LLM (default for text alone); "
        "hf: OUT/base (else)",
    )
    add(
        "--push",
        metavar="ORG/NAME",
        help="also upload OUT to this repository of the hub; "
        "one that is missing is made, as a private one",
    )
    add(
        "--verify",
        type=positive(int),
        nargs="?",
        const=8,
        metavar="N",
        help="hf, peft: compare logits with mmtrain's own on N held-out samples, batches with "
        "single answers (8)",
    )
    return parser.parse_args(arguments)
