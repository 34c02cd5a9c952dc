"""mmtrain against what people would otherwise use, on this machine's processor.

    equal      pipeline 1 on all threads, samples of one length, against a stock transformers loop
               over LlavaForConditionalGeneration: as LLaVA's script runs it (every layer recomputed
               in backward), and tuned (nothing recomputed)
    ragged     the same with long-tailed text lengths: the stock loop pads, mmtrain packs
    pipeline   pipeline 2, half of the threads each, against DeepSpeed's own PipelineEngine, its
               default cut and a uniform one, and torch.distributed.pipelining's 1F1B with a uniform
               cut, over the same layers; mmtrain's plan is made from a calibration, measured before
               the race as `--calibrate` does for a run

All of a row train the same random weights on the same samples in the same processes, a step each in
turn. Ratios were seen to change by 5% from one start of the program to the next: start it several
times. The first step proves that all losses and the projector's gradients are equal; without that
there are no numbers. "mmtrain is 1.2x" means: it was 1.2 times as fast as that contestant in the
same repetition. The share of the matmul rate is the least exact work of a step, a second, over that
of matrix products of the model's own shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_tables import (
    as_dict,
    describe_differences,
    describe_samples,
    finish,
    positive,
    print_table,
    run_target,
    speeds,
    utilisation,
)

from mmtrain.base.printing import print_info
from mmtrain.doctor.machine import describe_machine
from mmtrain.runtime.supervise import set_rank_environment

if TYPE_CHECKING:
    from bench_race import Settings

EXAMPLES = """\
examples:
  everything, half an hour; all measurements as JSON too:
    python tools/bench/bench.py peers --json peers.json
  the pipelines alone:
    python tools/bench/bench.py peers --row pipeline
  does it run at all? half a minute, numbers without meaning:
    python tools/bench/bench.py peers --quick
"""
ROWS = {
    "equal": "pipeline 1, samples of one length",
    "ragged": "pipeline 1, ragged samples",
    "pipeline": "pipeline 2, samples of one length",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--row", action="append", choices=ROWS, help="measure these alone")
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")
    add(
        "--repetitions",
        type=positive,
        default=20,
        metavar="N",
        help="steps of each contestant (%(default)s)",
    )
    add("--threads", type=positive, metavar="N", help="of all ranks together (one for each core)")
    add(
        "--quick",
        action="store_true",
        help="tiny models, two repetitions: only that it runs is shown",
    )


def run(options: argparse.Namespace) -> int:
    """Make the models, race the rows, print tables; the exit code."""
    threads = options.threads or len(os.sched_getaffinity(0))
    result = {"machine": describe_machine(), "threads": threads, "rows": {}}
    set_rank_environment(threads, on_gpus=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the contestants are on the processor
    with tempfile.TemporaryDirectory(prefix="bench_peers-") as name:
        folder = Path(name)
        print_info("making the models")
        # torch reads the environment when it is imported
        from bench_models import DTYPES, SHAPES, save_parts

        save_parts(SHAPES["tiny" if options.quick else "ratios"], folder, DTYPES["float32"])
        for row in options.row or ROWS:
            settings = _settings(options, row, threads)
            if (code := _run_row(row, settings, folder, with_calibration=not options.quick)) != 0:
                return code
            found = json.loads((folder / f"{row}.json").read_text())
            result["rows"][row] = found | report(row, found)
    finish(result, options.json)
    return 0


def _settings(options: argparse.Namespace, row: str, threads: int) -> Settings:
    from bench_race import Settings

    pipeline = row == "pipeline"
    return Settings(
        "tiny" if options.quick else "ratios",
        "float32",
        2 if options.quick else options.repetitions,
        steps=2 if options.quick else options.repetitions + 1,  # the first is the warm-up's
        samples_per_pack=2 if pipeline else 3 if options.quick else 6,
        microbatches=(2 if options.quick else 8) if pipeline else 1,
        threads=max(1, threads // 2) if pipeline else threads,
    )


def _run_row(row: str, settings: Settings, folder: Path, with_calibration: bool) -> int:
    from bench_peer_ranks import STAGES, calibration_file

    ranks, targets = 1, ["one_rank"]
    if row == "pipeline":
        ranks, targets = STAGES, ["two_ranks"]
        if with_calibration and not calibration_file(folder).exists():
            targets.insert(0, "calibrate_pipeline")
    for target in targets:
        code = run_target(
            *(
                f"bench_peer_ranks:{target}",
                ranks,
                folder,
                settings.threads,
                settings.timeout_seconds,
            ),
            **{"settings": settings, "row": row, "parts": folder},
        )
        if code != 0:
            return code
    return 0


def report(row: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Print a row's table; returns its numbers: step seconds, ratios, share of the matmul rate
    (pipeline 1).
    """
    numbers = speeds(found)
    step, against = numbers.values()
    first, *_ = step
    columns = ["", ">step, s", f">{first} is", ">first loss"]
    cells = [
        [
            name,
            step[name].text(".3f"),
            against[name].text(".3f") + "x" if name in against else "1",
            _loss(found, name),
        ]
        for name in step
    ]
    if "matmul_flops" in found:
        numbers["share_of_matmul_rate"] = {name: utilisation(found, name) for name in step}
        columns.append(">of matmul rate")
        for line in cells:
            line.append(numbers["share_of_matmul_rate"][line[0]].text(".1%"))
    print_info("", f"{ROWS[row]}: {_describe(found)}")
    print_table(columns, cells)
    print_info(describe_differences(found))
    return as_dict(numbers)


def _loss(found: Mapping[str, Any], name: str) -> str:
    return f"{found['losses'][name][0]:.5f}"


def _describe(found: Mapping[str, Any]) -> str:
    if "microbatches_per_step" not in found:
        return describe_samples(found)
    cuts = found["first_decoder_layer_of_later_stages"]
    begins = "; ".join(f"{', '.join(map(str, layers))} ({name})" for name, layers in cuts.items())
    return (
        f"{found['microbatches_per_step']} micro-batches of {found['pack_length']:,} tokens. Of "
        f"{found['decoder_layers']} decoder layers, those that begin later stages: {begins}. "
        "mmtrain prefetches "
        f"{found['microbatches_prefetched']} micro-batches"
    )
