"""A model of LLaVA-1.5-7B's shape on CUDA devices: mmtrain at pipeline 1 beside the stock loop, and
alone on all.

    equal      samples of one length (576 image and 80 text tokens)
    ragged     the same with long-tailed text lengths: the stock loop pads, mmtrain packs
    pipeline   mmtrain alone, a rank on each device, equal samples: memory and idle time beside the
               plan

The LLM's random weights are made on the device and shared by all contestants. Contestants: mmtrain,
and stock transformers as LLaVA's script runs it (every layer recomputed in backward) and tuned
(nothing recomputed). Utilisation is the least exact work of a step, a second, over --peak-tflops,
or over the rate of matrix products of the model's own shapes in the same repetition. Peak memory
includes the shared weights and what the other contestants keep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_tables import (
    as_dict,
    describe_differences,
    describe_samples,
    finish,
    per_second,
    positive,
    print_table,
    run_target,
    speeds,
    utilisation,
)

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, print_info
from mmtrain.doctor.machine import describe_machine
from mmtrain.runtime.gpus import visible_gpus
from mmtrain.runtime.supervise import set_rank_environment

EXAMPLES = """\
examples:
  a 7B model in bfloat16, whose weights alone take 14 GB:
    python tools/bench/bench.py gpu --json gpu.json
  on a GPU of 24 GB: packs of two samples, the tuned loop left out:
    python tools/bench/bench.py gpu --samples-per-pack 2 --without-tuned
  against the peak that the vendor states:
    python tools/bench/bench.py gpu --peak-tflops 989
  how a pipeline of four uses its devices:
    python tools/bench/bench.py gpu --row pipeline --pipeline 4 --microbatches 16
  what compiling is worth: run both on the same card
    python tools/bench/bench.py gpu --row equal --without-tuned --quick
    python tools/bench/bench.py gpu --row equal --without-tuned --quick --compile
  does it run at all? no GPU needed, numbers without meaning:
    python tools/bench/bench.py gpu --quick --shape tiny --device cpu
"""
PIPELINE = "pipeline"
ROWS = {
    "equal": "samples of one length",
    "ragged": "ragged samples",
    PIPELINE: "mmtrain alone, a rank on each device",
}
CPU_RANKS = 2  # of a pipeline that shows that it runs
SHAPES = ("7b", "ratios", "tiny")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--row", action="append", choices=ROWS, help="measure these alone")
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")
    add("--shape", choices=SHAPES, default="7b", help="of the models (%(default)s)")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu shows that it runs (%(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of everything frozen (%(default)s)",
    )
    add(
        "--repetitions",
        type=positive,
        default=15,
        metavar="N",
        help="steps of each contestant (%(default)s)",
    )
    add(
        "--samples-per-pack",
        type=positive,
        default=6,
        metavar="N",
        help="of 656 tokens at 7b (%(default)s)",
    )
    add(
        "--microbatches",
        type=positive,
        default=4,
        metavar="N",
        help="of a step, one pack each (%(default)s)",
    )
    add(
        "--pipeline",
        type=positive,
        metavar="N",
        help="ranks of the row pipeline (as many as there are GPUs)",
    )
    add(
        "--without-tuned",
        action="store_true",
        help="leave out the stock loop that recomputes nothing",
    )
    add("--peak-tflops", type=float, metavar="N", help="of the device, for utilisation (measured)")
    add("--compile", action="store_true", help="compile mmtrain's layers (train.compile=true)")
    add("--quick", action="store_true", help="two repetitions of two micro-batches")


def run(options: argparse.Namespace) -> int:
    """Make the models, race the rows, print tables; the exit code. Raises UserError without a CUDA
    device.
    """
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads = len(os.sched_getaffinity(0))
    set_rank_environment(threads, on_gpus=options.device == "cuda")
    gpus = visible_gpus()
    if options.device == "cuda" and not gpus:
        raise UserError(
            "no CUDA device here, so nothing was measured; "
            "--quick --shape tiny --device cpu shows that it runs"
        )
    pipeline = options.pipeline or len(gpus) or CPU_RANKS
    if gpus and pipeline > len(gpus):
        raise UserError(
            f"--pipeline {pipeline}: each rank needs a GPU of its own; here: {len(gpus)}"
        )
    from bench_gpu_rank import prepare  # torch reads the environment when it is imported
    from bench_race import Settings

    settings = Settings(
        options.shape,
        options.dtype,
        2 if options.quick else options.repetitions,
        steps=2 if options.quick else 4,
        samples_per_pack=options.samples_per_pack,
        microbatches=2 if options.quick else options.microbatches,
        threads=threads,
        compiles=options.compile,
    )
    device = gpus[0].name if gpus else "cpu"
    sizes = {"dtype": options.dtype, "shape": options.shape}
    result = {"machine": describe_machine(), "device": device, **sizes, "rows": {}}
    with tempfile.TemporaryDirectory(prefix="bench_gpu-") as name:
        folder = Path(name)
        print_info("making the models")
        prepare(settings, folder)
        for row in options.row or ROWS:
            ranks = pipeline if row == PIPELINE else 1
            target, more = "race_row", {"with_tuned": not options.without_tuned}
            if row == PIPELINE:
                target, more = "race_pipeline", {"pipeline": pipeline}
            code = run_target(
                *(
                    f"bench_gpu_rank:{target}",
                    ranks,
                    folder,
                    max(1, threads // ranks),
                    settings.timeout_seconds,
                ),
                on_gpus=options.device != "cpu",
                **{"settings": settings, "row": row, "parts": folder, **more},
            )
            if code != 0:
                return code
            found = json.loads((folder / f"{row}.json").read_text())
            result["rows"][row] = found | report(row, found, options.peak_tflops)
    versions = ", ".join(
        f"{name} {version}" for name, version in result["machine"]["versions"].items()
    )
    print_info("", f"device: {result['device']}; python {result['machine']['python']}, {versions}")
    finish(result, options.json)
    return 0


def report(row: str, found: Mapping[str, Any], peak_tflops: float | None) -> dict[str, Any]:
    """Print a row's tables; returns its numbers."""
    numbers = speeds(found)
    step, against = numbers.values()
    first, *_ = step
    devices = len(found.get("ranks", (None,)))
    peak = None if peak_tflops is None else peak_tflops * 1e12 * devices
    # all devices multiply at the same time
    found = {**found, "matmul_flops": found["matmul_flops"] * devices}
    numbers["samples_per_second"] = {name: per_second(found, name, "samples") for name in step}
    numbers["tokens_per_second"] = {name: per_second(found, name, "tokens") for name in step}
    numbers["utilisation"] = {name: utilisation(found, name, peak) for name in step}
    memory = found["peak_memory_bytes"]
    print_info("", f"{ROWS[row]}: {describe_samples(found)}")
    print_table(
        ("", ">step, s", f">{first} is", ">samples/s", ">tokens/s", ">utilisation", ">peak GB"),
        [
            (
                name,
                step[name].text(".3f"),
                against[name].text(".3f") + "x" if name in against else "1",
                f"{numbers['samples_per_second'][name].median:,.2f}",
                f"{numbers['tokens_per_second'][name].median:,.0f}",
                numbers["utilisation"][name].text(".1%"),
                f"{memory[name] / 1e9:.1f}" if name in memory else "-",
            )
            for name in step
        ],
    )
    if len(step) > 1:
        print_info(describe_differences(found))
    if "ranks" in found:
        print_table(
            (">rank", "layers", ">planned", ">allocated", ">reserved", ">on the device"),
            [rank_row(number, rank) for number, rank in enumerate(found["ranks"])],
        )
        print_info(
            f"first step {found['first_step_seconds'][first]:.2f} s; "
            f"idle {statistics.fmean(found['idle']):.1%} of the "
            f"last step, {found['planned_idle']:.1%} as planned with assumed costs"
        )
    print_info(*found["kernels"])
    return as_dict(numbers)


def rank_row(number: int, rank: Mapping[str, Any]) -> tuple[str, ...]:
    """A rank of a pipeline: what was planned for it, and what it took; `-` for what no CPU can
    tell.
    """
    layers = rank["layers"]
    held = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    took = (rank.get(f"{name}_bytes") for name in ("allocated", "reserved", "held"))
    sizes = ("-" if size is None else bytes_text(size) for size in took)
    return str(number), held, bytes_text(rank["planned_bytes"]), *sizes
