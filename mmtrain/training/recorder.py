"""What a rank writes down of its steps: records, trackers, the samples' account, use of the machine, a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.collectives import gather_to_rank_0
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.account import SampleLog
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import backend_name
from mmtrain.engine.statistics import StepResult
from mmtrain.engine.trace import TRACE, TracedStep, Tracer
from mmtrain.engine.utilization import Utilization, peak_flops
from mmtrain.models.modules.attention import describe_backends
from mmtrain.plan.calibration import cpu_device, gpu_device
from mmtrain.runtime.rank import Rank
from mmtrain.training.console import Console
from mmtrain.training.held_out import HeldOut
from mmtrain.training.records import Records
from mmtrain.training.trackers import Trackers


class Recorder:
    """Every rank makes one and calls it at the same steps; rank 0 alone writes records, the trace is a collective."""

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
        """Begin the records of a process that goes on with `first_step`; collective."""
        self._rank, self._engine, self._console = rank, engine, console
        on_gpu = engine.device.type == "cuda"
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
        device = gpu_device(torch.cuda.get_device_name()) if on_gpu else cpu_device(config, local_ranks)
        trackers = config.run.report_to if rank.rank == 0 else ()
        self.trackers = Trackers(trackers, rank.folder, config, first_step, console.line)
        self.records = Records(rank.folder if rank.rank == 0 else None, config, self.trackers.take, console.line)
        about = {"versions": versions, "device": device.name, "ranks": rank.world_size}
        self.records.write("begin", step=first_step, backend=backend_name(engine.device), **about)
        self.account: SampleLog | None = None
        self.batches: Generator[PackedBatch] | None = None
        self._utilization = Utilization(config, peak_flops(config, device) if rank.rank == 0 else None)
        self._tracer = Tracer(rank.folder / TRACE, engine.plan, trace_steps) if trace_steps else None
        ways = gather_to_rank_0({way for stage in engine.stages.values() for way in stage.attention})
        if ways is not None:
            records, lines = describe_backends(ways)
            self.records.write("attention", step=first_step, ways=records)
            for line in lines:
                console.line(line)

    def open_account(
        self,
        config: RunConfig,
        packed: PackedBatches,
        readers: dist.ProcessGroup | None,
        held_out: HeldOut | None,
        counts: dict[str, Any] | None,
    ) -> None:
        """Open the account of the samples, on the ranks that read data; `counts` are those of a resumed run."""
        left_out = [] if held_out is None else held_out.faults
        self.account = SampleLog(config, packed, readers, self._rank.folder, left_out, counts)
        self.batches = self.account.watch(iter(packed))

    def step(self, result: StepResult, seconds: float) -> None:
        """Record a step that took `seconds`."""
        step = result.step
        if self._tracer is not None:
            clock = self._engine.clock
            self._tracer.add(lambda: TracedStep(step, clock.seconds, clock.intervals()))
        self.records.step(result, seconds, self._utilization.add(result))
        self._console.step(step, result.loss, result.tokens / seconds, note=result.no_update or "")
        if self.account is not None:
            for record in self.account.end_step(step, result.samples, result.quarantined):
                self.records.write(**record)
        if self._tracer is not None and self._tracer.is_complete:
            self._write_trace()

    def close_account(self, steps: int) -> None:
        """Compare the samples' counts with the plan's, at the end of a run of `steps` steps."""
        if self.account is not None:
            for record in self.account.finish(steps):
                self.records.write(**record)

    def close(self, together: Callable[[], None]) -> None:
        """Close everything; `together` waits for all ranks before the trackers, which may take longer, close."""
        if self._tracer is not None:
            self._write_trace()
        if (summary := self._utilization.summary()) is not None:
            self._console.line(summary)
        if self.batches is not None:
            self.batches.close()
        self.records.close()
        together()
        self.trackers.close()

    def _write_trace(self) -> None:
        """Write the recorded steps, if there are any not yet written, together with all ranks."""
        self._rank.progress.at(self._engine.step_index, "writing the trace")
        said = self._tracer.finish()
        if said is not None:
            self._console.line(said)
