"""Records that a run writes while it trains: metrics, answers, the samples' account, use of the
machine, a trace.

steps, scores, saves --> metrics.jsonl      answers --> answers.jsonl, their pictures -->
    answers/<digest>.jpg
"""

import hashlib
import io
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.collectives import gather_to_rank_0
from mmtrain.base.durable import write_whole
from mmtrain.base.json_lines import JsonLines
from mmtrain.checkpoint.run_folder import ANSWERS, METRICS
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import QuarantinedSample
from mmtrain.data.stream.account import SampleLog
from mmtrain.data.stream.copies import Copies, summary_of
from mmtrain.data.stream.images import decode_image
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import backend_name
from mmtrain.engine.statistics import StepResult
from mmtrain.engine.trace import TRACE, TracedStep, finish_trace
from mmtrain.engine.utilization import Utilization
from mmtrain.model.llm.kernels import describe_backends
from mmtrain.plan.calibration import cpu_device, gpu_device
from mmtrain.runtime.rank import Rank
from mmtrain.training.answers import Answer
from mmtrain.training.console import Console
from mmtrain.training.trackers import Record, Trackers

PICTURES = "answers"  # a folder of the run
PICTURED_QUESTIONS = 24
PICTURES_OF_A_QUESTION = 8
PICTURE_SIDE = 384  # pixels, at most
RANKS_EVERY = 100  # steps; lists over 512 ranks take about 60 kB


class Records:
    """metrics.jsonl and answers.jsonl of a run; `folder` is None on ranks that write none.

    `also` gets each record of metrics.jsonl, and the answers of a step as one record of the kind
    `answers`. `asks`: answers will be written.
    """

    def __init__(
        self,
        folder: Path | None,
        also: Callable[[Record], None],
        max_image_pixels: int,
        *,
        asks: bool,
    ) -> None:
        self._folder = folder
        self._max_image_pixels = max_image_pixels
        self._also = also
        self._metrics = JsonLines(folder and folder / METRICS)
        self._answers = JsonLines(folder / ANSWERS if folder and asks else None)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line to metrics.jsonl: its kind, these values, and the time in seconds since
        1970.
        """
        record = {
            "kind": kind,
            **values,
            "time": time.time(),
        }
        self._metrics.write(**record)
        self._also(record)

    def answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Append the model's answers after `step` updates to answers.jsonl, in the order asked.

        The first 24 questions have their first 8 pictures beside them, each a JPEG in the run's
        folder.
        """
        if self._folder is None or not answers:
            return
        lines = []
        for number, answer in enumerate(answers):
            line = {
                "step": step,
                "time": time.time(),
                **vars(answer),
            }
            images = line.pop("images")[:PICTURES_OF_A_QUESTION]
            line["pictures"] = []
            if number < PICTURED_QUESTIONS:
                line["pictures"] = list(map(self._picture, images))
            lines.append(line)
            self._answers.write(**line)
        self._also(
            {
                "kind": "answers",
                "step": step,
                "answers": lines,
            }
        )

    def _picture(self, image: bytes) -> str:
        """Write an image as training sees it, but smaller, under its digest; return its path in the
        run's folder.
        """
        picture = decode_image(image, self._max_image_pixels)
        picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        content = io.BytesIO()
        picture.save(content, "JPEG", quality=85)
        path = Path(PICTURES, f"{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.jpg")
        target = self._folder / path
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            write_whole(target, content.getvalue())
        return path.as_posix()

    def close(self) -> None:
        self._metrics.close()
        self._answers.close()


class Recorder:
    """Records a run's steps. Every rank makes one and calls it at the same steps; rank 0 alone
    writes records.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: Rank,
        engine: FrozenPipelineEngine,
        console: Console,
        first_step: int,
        versions: dict[str, str],
        trace_steps: int,
    ) -> None:
        """Begin the records of a process that begins or resumes at `first_step`. Collective."""
        self._config = config
        self._rank = rank
        self._engine = engine
        self._console = console
        if engine.device.type == "cuda":
            device = gpu_device(torch.cuda.get_device_name())
        else:
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
            device = cpu_device(config.parallel, local_ranks)

        writes = rank.rank == 0
        asks = config.eval.is_on and config.eval.show_answers > 0
        trackers = config.run.report_to if writes else ()
        self._trackers = Trackers(
            trackers,
            rank.folder,
            config,
            first_step,
            console.line,
        )
        folder = rank.folder if writes else None
        pixels = config.data.max_image_pixels
        self.records = Records(folder, self._trackers.take, pixels, asks=asks)
        self.records.write(
            "begin",
            step=first_step,
            backend=backend_name(engine.device),
            versions=versions,
            device=device.name,
            ranks=rank.world_size,
        )

        self.account: SampleLog | None = None
        self.batches: Generator[PackedBatch] | None = None
        self._copies: Copies | None = None
        self._utilization = Utilization(config, device) if writes else None
        self._first_step, self._trace_steps = first_step, trace_steps  # 0 once the trace is written
        self._traced: list[TracedStep] = []

        backends = gather_to_rank_0(engine.kernels)
        if backends is not None:
            ways, lines = describe_backends(backends)
            self.records.write("kernels", step=first_step, ways=ways)
            for line in lines:
                console.detail(line)

    def open_account(
        self,
        packed: PackedBatches,
        readers: dist.ProcessGroup | None,
        left_out: Sequence[QuarantinedSample],
        counts: dict[str, Any] | None,
    ) -> None:
        """Open the account of the samples, on the ranks that read data.

        `left_out` are damaged held-out samples, `counts` those of a resumed run.
        """
        self.account = SampleLog(packed, readers, self._rank.folder, left_out, counts)
        self.batches = self.account.watch(iter(packed))
        self._copies = packed.reader.copies

    def step(self, result: StepResult, seconds: float) -> None:
        step = result.step
        config = self._config
        if self._utilization is not None:
            values = vars(result).copy()
            del values["ranks"]
            if not config.optimizer.groups:
                del values["lr_groups"]
            rate = result.tokens / seconds
            self.records.write(
                "train",
                **values,
                pack_fill=result.tokens / (config.train.packs_per_step * config.data.pack_length),
                seconds=seconds,
                tokens_per_second=rate,
                **self._utilization.add(result),
            )
            self._console.step(step, result.loss, rate, note=result.no_update or "")
            if (step + 1) % RANKS_EVERY == 0:
                self.ranks(step + 1)
        if self.account is not None:
            for record in self.account.end_step(step, result.samples, result.quarantined):
                self.records.write(step=step, **record)
        if self._trace_steps and step > self._first_step:  # the first one pays for warm-up
            clock = self._engine.clock
            self._traced.append(TracedStep(step, clock.seconds, clock.intervals()))
            if len(self._traced) == self._trace_steps:
                self._write_trace()

    def ranks(self, steps: int) -> None:
        """Record where each rank's time went since the last such record, if a step was made."""
        if self._utilization is not None and (sums := self._utilization.take_sums()) is not None:
            self.records.write("ranks", step=steps, **sums)
            if self._copies is not None:
                self.records.write("copies", step=steps, **self._copies.stats())

    def close_account(self, steps: int) -> None:
        if self.account is not None:
            for record in self.account.finish(steps):
                self.records.write(step=steps, **record)

    def close(self) -> None:
        """Close everything and leave the job, with all ranks; then the trackers, which may take
        longer.
        """
        self._write_trace()
        if self._utilization is not None and (summary := self._utilization.summary()) is not None:
            self._console.line(summary)
        if self._copies is not None:
            self._console.line(summary_of(self._copies.stats()))
        if self.batches is not None:
            self.batches.close()
        self.records.close()
        dist.barrier()
        dist.destroy_process_group()
        self._trackers.close()

    def _write_trace(self) -> None:
        """Write the recorded steps, together with all ranks, unless none were asked for or they are
        written.
        """
        if self._trace_steps:
            self._trace_steps = 0
            self._rank.progress.at(self._engine.step_index, "writing the trace")
            message = finish_trace(self._rank.folder / TRACE, self._engine.plan, self._traced)
            if message is not None:
                self._console.line(message)
