"""One rank's life, from joining the job to the saved projector; `mmtrain.launch` starts it on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.collectives import of_all_ranks, on_rank_0
from mmtrain.base.errors import UserError
from mmtrain.base.printing import show_logs
from mmtrain.checkpoint.begin import find_beginning
from mmtrain.checkpoint.choose import Start
from mmtrain.checkpoint.load import differences, load, load_weights
from mmtrain.checkpoint.run_folder import AUDIT, BAD_STEPS, describe_run, go_back
from mmtrain.checkpoint.write import Checkpointer, Saved, run_state
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.account import ReadAccount
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.audit import RankAudit, check_replicas, model_fingerprint, settings_fingerprint, write_audit
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import backend_name, join_process_group, replica_group
from mmtrain.engine.streamed import streamed_layers
from mmtrain.engine.trace import TRACE, TracedStep, Tracer
from mmtrain.engine.utilization import Utilization, peak_flops
from mmtrain.evaluation.console import Console
from mmtrain.evaluation.evaluator import Evaluator
from mmtrain.evaluation.held_out import HeldOut
from mmtrain.model.flash import say_ways
from mmtrain.model.stage import build_stage
from mmtrain.plan.calibration import cpu_device, gpu_device
from mmtrain.plan.instructions import Instruction
from mmtrain.plan.plan import Plan
from mmtrain.plan.rates import parameter_groups
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory
from mmtrain.pretrained.connectors import connector, connector_parameters, has_newline
from mmtrain.pretrained.shapes import matches
from mmtrain.processes.rank import Rank
from mmtrain.training.evaluations import Evaluations
from mmtrain.training.records import Records
from mmtrain.training.trackers import Trackers


def main(config: RunConfig, plan: Plan, rank: Rank, start: Start | None = None, trace_steps: int = 0) -> str | None:
    """Train as many steps as `config.train` says, as `plan` says, evaluate, leave results in `rank.folder`.

    Rank 0's `start` says from which checkpoint to go on; rank 0 writes records, `audit.json` and checkpoints.
    Of `trace_steps` steps after the first it is recorded what every rank did when, as `trace.json`.
    Returns None at the end, or what to tell the user of a run that a signal has stopped before, with everything saved.
    Raises UserError for unusable models, data or checkpoints, AuditError when something frozen changed or something
    trainable did not move, NonFiniteError for NaN or infinity.
    """
    show_logs(print)  # into the log: of data and models the launcher has shown it before
    run = _Run(config, plan, rank, start)
    run.open_data()  # before weights: what is wrong with them should not show after an hour of loading
    run.load_models()
    if rank.rank == 0:
        show_logs(run.console.line)
    run.take_up_checkpoint()
    run.open_records(trace_steps)
    with run.trackers:
        with run.saver:
            run.begin_steps()
            steps = run.make_steps()
            # The result first: nothing that can fail from here on may cost the trained weights.
            run.save(steps)
            run.saver.finish()
        if steps < run.max_steps:
            return run.leave(f"stopped after step {steps} of {run.max_steps}; it is saved")
        run.prove()
        if run.evaluations is not None and not run.evaluations.make_last(steps):
            return run.leave("stopped in the last evaluation, after all steps; they are saved")
        if rank.rank == 0 and (best := run.saver.best) is not None:
            run.console.line(f"best checkpoint by {config.checkpoint.keep_best}: step {best[0]}, {best[1]:.4f}")
        run.records.write("end", step=steps)
        return run.leave()


class _Run:
    """One rank's part of a run, an act a method, in their order; what acts share are attributes."""

    def __init__(self, config: RunConfig, plan: Plan, rank: Rank, start: Start | None) -> None:
        """Join the process group, and learn from rank 0, whose files other machines need not see, where to begin."""
        self.plan, self.rank = plan, rank
        self.mine = plan.ranks[rank.rank]
        self.device = torch.device(rank.device)
        use_algorithms(config.train.deterministic)
        rank.progress.at(0, "joining the process group")
        join_process_group(self.device, config.parallel.timeout_seconds)
        shared = [start]
        dist.broadcast_object_list(shared, 0)
        self.start = shared[0]
        self.config = config
        self.first_step = 0 if self.start is None else self.start.checkpoint.step
        self.loss: float | None = None  # of the latest step

    # ---- set up

    def open_data(self) -> None:
        """Open the data on the ranks that read them; all learn their fingerprint and the run's steps from these.

        Raises UserError where they have different data: each would train on its own idea of a step.
        """
        config, rank, plan = self.config, self.rank, self.plan
        self.packed: PackedBatches | None = None
        self.held_out: HeldOut | None = None
        if self.mine.pipeline == 0:
            rank.progress.at(self.first_step, "opening the data")
            self.packed = PackedBatches(config, replica=self.mine.data, replicas=plan.data, first_step=self.first_step)
            if config.eval.is_on:
                rank.progress.at(self.first_step, "reading the held-out samples")
                self.held_out = HeldOut(self.packed)
        rank.progress.at(self.first_step, "comparing the data with the other ranks")
        seen = of_all_ranks(self.packed and (self.packed.catalog.fingerprint, self.packed.max_steps))
        readers = [other.rank for other in plan.ranks if other.pipeline == 0]
        for other in readers:
            if seen[other] != seen[readers[0]]:
                raise UserError(
                    f"data.shards: ranks {readers[0]} and {other} have different data: the shards, or their indexes, "
                    "must be the same on every machine"
                )
        self.data, self.max_steps = seen[readers[0]]
        self.readers = replica_group(plan, rank.rank, torch.device("cpu"), config.parallel.timeout_seconds)
        self.configured, self.config = config, config.changed({"train.max_steps": self.max_steps})
        self.console = Console(rank.console, self.max_steps, self.first_step)
        if self.packed is not None:
            self.console.line(self.packed.summary)

    def load_models(self) -> None:
        """Build this rank's stages and its engine, with a real or no-op optimizer, and compare replicas."""
        config, rank, plan = self.config, self.rank, self.plan
        rank.progress.at(self.first_step, "loading weights")
        self.console.line(f"loading weights on {plan.pipeline * plan.data} ranks")
        to_build = config if self.start is None else _without_init_from(config)
        timeout = config.parallel.timeout_seconds
        streamed = streamed_layers(plan, rank.rank, self.device, self.readers, timeout)
        places = {"device": self.device, "streamed": streamed}
        self.stages = {stage.stage: build_stage(to_build, stage, **places) for stage in self.mine.stages}
        rank.progress.at(self.first_step, "building the engine")
        self._refuse_short_memory()  # the engine warms up, and would run out of memory without a word on why
        self.engine = FrozenPipelineEngine(
            *(config, plan, self.stages, self._before_instruction),
            first_step=self.first_step,
            bad_steps_file=rank.folder / BAD_STEPS,
        )
        if self.start is None and config.model.init_from is not None:
            beginning = find_beginning(config) if rank.rank == 0 else None
            self.engine.load_trained({**self.engine.trainable, **load_weights(beginning, self.engine.trainable)}, {})
        self._refuse_short_memory()  # master weights, communicators and libraries' workspaces are there now
        self.audit = RankAudit(self.mine, self.stages, self.engine.optimizer, self.engine.trainable)
        starts = of_all_ranks(self.audit.start())
        check_replicas(starts)
        frozen = [start["frozen_parameters"] for start in starts]
        self.about: dict[str, Any] = {  # what every checkpoint says of the run
            **run_state(self.configured, plan, torch.get_num_threads(), self.device),
            "max_steps": self.max_steps,
            "frozen_fingerprint": model_fingerprint(frozen),
            "frozen_files": {name: found for start in starts for name, found in start["files"].items()},
            "settings_fingerprint": settings_fingerprint(config) if rank.rank == 0 else None,
            "branched_from": None if self.start is None else self.start.branched_from,
        }

    def _before_instruction(self, step: int, instruction: Instruction) -> None:
        self.rank.progress.at(step, instruction)
        if self.rank.stop.asked:
            self.engine.request(stop=True)

    def _refuse_short_memory(self) -> None:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            used = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
            name = f"{self.device} ({torch.cuda.get_device_name(self.device)})"
            refuse_short_memory(self.mine, name, GpuMemory(total, free, *used))

    def take_up_checkpoint(self) -> None:
        """Where the run goes on: known to be the same one, the trained tensors as they were; only then cut records."""
        self.counts = None  # what the account of the data goes on with
        start, about, engine = self.start, self.about, self.engine
        if start is None:
            return
        self.rank.progress.at(self.first_step, "loading the checkpoint")
        if self.rank.rank == 0:
            fingerprints = about["frozen_fingerprint"], about["settings_fingerprint"]
            start.refuse_other_contents(self.data, *fingerprints, self.max_steps)
        engine.load_trained(*load(start.checkpoint, engine.trainable))
        state = start.checkpoint.state
        engine.saw_gradient |= {name for name in engine.trainable if state["trained"][name]["had_gradient"]}
        engine.bad_steps = state["bad_steps"]
        self.audit.begin_with(state["trained"])
        self.counts = state["data"]["counts"] if state["data"]["fingerprint"] == self.data else None
        if self.rank.rank == 0:
            if start.is_own:
                go_back(self.rank.folder, start.checkpoint)
            describe_run(self.rank.folder, self.configured, self.plan)

    def open_records(self, trace_steps: int) -> None:
        """Everything that writes down what the steps do."""
        config, rank, console = self.config, self.rank, self.console
        on_gpu = self.device.type == "cuda"
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size))
        device = gpu_device(torch.cuda.get_device_name()) if on_gpu else cpu_device(config, local_ranks)
        trackers = config.run.report_to if rank.rank == 0 else ()
        self.trackers = Trackers(trackers, rank.folder, config, self.first_step, console.line)
        self.records = Records(rank.folder if rank.rank == 0 else None, config, self.trackers.take, console.line)
        about = {"versions": self.about["versions"], "device": device.name, "ranks": rank.world_size}
        self.records.write("begin", step=self.first_step, backend=backend_name(self.device), **about)
        self.account: ReadAccount | None = None
        self.batches: Generator[PackedBatch] | None = None
        if self.packed is not None:
            left_out = [] if self.held_out is None else self.held_out.faults
            self.account = ReadAccount(config, self.packed, self.readers, rank.folder, left_out, self.counts)
            self.batches = self.account.watch(iter(self.packed))
        saved_step = self.first_step if self.start is not None and self.start.is_own else None
        self.saver = Checkpointer(rank.folder, config.checkpoint, self.mine.data == 0, self._report, saved_step)
        self.evaluations: Evaluations | None = None
        if config.eval.is_on:
            evaluator = Evaluator(self.engine, self.held_out, rank.progress, console.evaluating)
            self.evaluations = Evaluations(config.eval, evaluator, self.records, console, self.saver)
        self.utilization = Utilization(config, peak_flops(config, device) if rank.rank == 0 else None)
        self.tracer = Tracer(rank.folder / TRACE, self.plan, trace_steps) if trace_steps else None
        ways = on_rank_0({way for stage in self.stages.values() for way in stage.attention})
        if ways is not None:
            records, lines = say_ways(ways)
            self.records.write("attention", step=self.first_step, ways=records)
            for line in lines:
                console.line(line)

    def _report(self, saved: Saved) -> None:
        self.records.write(**saved.record())
        text = f"saved {saved.path}" if saved.error is None else f"the checkpoint was not saved: {saved.error}"
        print(text)  # into the log
        self.console.line(text)

    # ---- steps

    def begin_steps(self) -> None:
        """Say where the run goes on; one that branches from another begins with a checkpoint of its own."""
        if self.start is None:
            return
        step, path = self.first_step, self.start.checkpoint.path
        changed = differences(self.start.checkpoint.state, self.about)
        self.console.line(f"going on after step {step} of {self.max_steps}, from {path}")
        if changed:
            more = f"the run differs from its checkpoint in {', '.join(changed)}"
            self.console.line(f"{more}: results agree to rounding, not bit for bit")
        if not self.start.is_own:
            self.save(step)
            self.saver.finish()
        self.records.write("resume", step=step, checkpoint=str(path), changed=changed)

    def make_steps(self) -> int:
        """Make steps until all are made, or a signal asks to stop; how many are made.

        Every rank runs its own list of instructions; the result of a step is the same on all of them.
        """
        engine, saver, max_steps = self.engine, self.saver, self.max_steps
        evaluate_every = self.config.eval.every_steps or max_steps
        for step in range(self.first_step, max_steps):
            evaluates = self.evaluations is not None and step % evaluate_every == 0
            if evaluates and not self.evaluations.make(step):
                return step
            if saver.time_is_up:
                engine.request(save=True)
            self.make_step(step)
            done = step + 1
            if engine.requested_stop and done < max_steps:
                return done
            evaluates = self.evaluations is not None and done % evaluate_every == 0
            if done < max_steps and (engine.requested_save or saver.is_due(done, evaluates)):
                self.save(done)
            saver.poll()
        return max_steps

    def make_step(self, step: int) -> None:
        """Make one step and record it."""
        start = time.perf_counter()
        result = self.engine.train_step(self.batches)
        self.audit.check_versions()
        seconds = time.perf_counter() - start
        if self.tracer is not None:
            clock = self.engine.clock
            self.tracer.add(lambda: TracedStep(step, clock.seconds, clock.intervals()))
        self.loss = result.loss
        self.records.step(result, seconds, self.utilization.add(result))
        self.console.step(step, result.loss, result.tokens / seconds, note=result.no_update or "")
        if self.account is not None:
            for record in self.account.end_step(step, result.samples, result.quarantined):
                self.records.write(**record)
        if self.tracer is not None and self.tracer.is_complete:
            self._write_trace()

    def save(self, step: int) -> None:
        """Begin to save the state after `step` updates."""
        if step == self.saver.saved:  # for another reason, or it is where this run came from
            return
        self.rank.progress.at(step, "saving")
        engine = self.engine
        counts = None if self.account is None else self.account.state_dict()
        now = {"loss": self.loss, "bad_steps": engine.bad_steps, "data": {"fingerprint": self.data, "counts": counts}}
        trained = self.audit.notes(engine.saw_gradient)
        self.saver.save(step, engine.trainable, engine.optimizer_state(), trained, self.about | now)

    # ---- end

    def prove(self) -> None:
        """Close the account of the data, and prove that only what should train did."""
        if self.account is not None:
            for record in self.account.finish(self.max_steps):
                self.records.write(**record)
        self.rank.progress.at(self.max_steps, "auditing")
        records = on_rank_0(self.audit.finish(self.engine.saw_gradient))
        if records is not None:
            file = self.rank.folder / AUDIT
            names = [name for rank in self.plan.ranks for name in rank.trainable_names]
            groups = parameter_groups(self.config.optimizer, names)
            learns = any(group.lr > 0 and group.parameters for group in groups)
            found = write_audit(file, self.plan, records, learns=learns)
            self.console.line(f"audit passed: {found} ({file})")

    def leave(self, message: str | None = None) -> str | None:
        """Close everything, together with all ranks; returns the message."""
        if self.tracer is not None:
            self._write_trace()
        if (summary := self.utilization.summary()) is not None:
            self.console.line(summary)
        if self.batches is not None:
            self.batches.close()
        self.records.close()
        dist.barrier()
        dist.destroy_process_group()
        self.trackers.close()  # which may take longer than the other ranks would wait
        self.console.close()
        return message

    def _write_trace(self) -> None:
        """Write the steps that are recorded, if there are any not yet written, together with all ranks."""
        self.rank.progress.at(self.engine.step_index, "writing the trace")
        said = self.tracer.finish()
        if said is not None:
            self.console.line(said)


def use_algorithms(deterministic: bool) -> None:
    """Let all of this process's kernels give the same bits each time, or the fastest ones; before CUDA is used.

    An operation that has no such kernel then raises RuntimeError; none of mmtrain's own is of that kind
    (torch.use_deterministic_algorithms lists them).
    """
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def _without_init_from(config: RunConfig) -> RunConfig:
    """For a run that goes on: what its projector began with need not be there any more, unless part of it is frozen."""
    parameters = connector_parameters(connector(config.model.projector, 1, 2, has_newline(config)))
    if not all(matches(parameter.name, config.model.trainable) for parameter in parameters):
        return config
    return config.changed({"model.projector.init_from": None})
