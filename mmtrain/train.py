"""One rank's life, from joining the job to the saved projector; `mmtrain.launch` starts it on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.checkpoint.choose import Start
from mmtrain.checkpoint.load import differences, load
from mmtrain.checkpoint.run_folder import AUDIT, BAD_STEPS, METRICS, describe_run, go_back
from mmtrain.checkpoint.write import Checkpointer, Saved, run_state
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.account import ReadAccount
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.audit import RankAudit, check_replicas, model_fingerprint, settings_fingerprint, write_audit
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.trace import TRACE, TracedStep, Tracer
from mmtrain.engine.utilization import Utilization, peak_flops
from mmtrain.evaluation.answers import write_answers
from mmtrain.evaluation.console import Console
from mmtrain.evaluation.evaluator import Evaluator
from mmtrain.evaluation.held_out import HeldOut
from mmtrain.evaluation.scores import Scores
from mmtrain.model.flash import say_ways
from mmtrain.model.stage import build_chunk
from mmtrain.plan.calibration import Device, cpu_device, gpu_device
from mmtrain.plan.layout import Plan
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory
from mmtrain.plan.schedule import Instruction
from mmtrain.pretrained.shapes import matches, projector_parameters
from mmtrain.processes.rank import Rank


def main(config: RunConfig, plan: Plan, rank: Rank, start: Start | None = None, trace_steps: int = 0) -> str | None:
    """Train as many steps as `config.train` says, as `plan` says, evaluate, leave results in `rank.folder`.

    Rank 0's `start` says from which checkpoint to go on; rank 0 writes `metrics.jsonl`, `audit.json` and checkpoints.
    Of `trace_steps` steps after the first it is recorded what every rank did when, as `trace.json`.
    Returns None at the end, or what to tell the user of a run that a signal has stopped before, with everything saved.
    Raises UserError for unusable models, data or checkpoints, AuditError when something frozen changed or something
    trainable did not move, NonFiniteError for NaN or infinity.
    """
    mine = plan.ranks[rank.rank]
    device = torch.device(rank.device)
    use_algorithms(config.train.deterministic)
    rank.progress.at(0, "joining the process group")
    join_process_group(device, config.parallel.timeout_seconds)
    start = _from_rank_0(start)
    first_step = 0 if start is None else start.checkpoint.step

    # Data first: what is wrong with them should not show after an hour of loading weights.
    packed, held_out = None, None
    if mine.pipeline == 0:
        rank.progress.at(first_step, "opening the data")
        packed = PackedBatches(config, replica=mine.data, replicas=plan.data, first_step=first_step)
        if config.eval.is_on:
            rank.progress.at(first_step, "reading the held-out samples")
            held_out = HeldOut(packed)
    rank.progress.at(first_step, "comparing the data with the other ranks")
    data, max_steps = _agree_on_data(packed, plan)
    readers = replica_group(plan, rank.rank, config.parallel.timeout_seconds)
    about = run_state(config, plan, torch.get_num_threads(), device) | {"max_steps": max_steps}
    as_given = config
    config = config.changed({"train.max_steps": max_steps})
    console = Console(rank.console, max_steps, first_step)
    if packed is not None:
        console.line(packed.summary)

    # What this rank holds: its stages, with real or no-op optimizer, checked against the plan.
    rank.progress.at(first_step, "loading weights")
    console.line(f"loading weights on {plan.pipeline * plan.data} ranks")
    to_build = config if start is None else _without_init_from(config)
    chunks = {stage.stage: build_chunk(to_build, stage, device=device) for stage in mine.stages}

    def before_instruction(step: int, instruction: Instruction) -> None:
        rank.progress.at(step, instruction)
        if rank.stop.asked:
            engine.request(stop=True)

    def refuse_if_short() -> None:
        if device.type == "cuda":
            refuse_short_memory(mine, f"{device} ({torch.cuda.get_device_name(device)})", _memory(device))

    rank.progress.at(first_step, "building the engine")
    refuse_if_short()  # the engine warms up, and would run out of memory without a word on why
    engine = FrozenPipelineEngine(
        config, plan, chunks, before_instruction, first_step=first_step, bad_steps_file=rank.folder / BAD_STEPS
    )
    refuse_if_short()  # master weights, communicators and libraries' workspaces are there now
    audit = RankAudit(mine, chunks, engine.optimizer, engine.trainable)
    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, audit.start())
    check_replicas(starts)
    about |= {"frozen_fingerprint": model_fingerprint(starts)}
    if rank.rank == 0:
        about |= {"settings_fingerprint": settings_fingerprint(config)}

    # Where it goes on: known to be the same run, the trained tensors as they were; only then the records are cut back.
    counts = None
    if start is not None:
        rank.progress.at(first_step, "loading the checkpoint")
        if rank.rank == 0:
            start.refuse_other_contents(data, about["frozen_fingerprint"], about["settings_fingerprint"], max_steps)
        engine.load_trained(*load(start.checkpoint, engine.trainable))
        state = start.checkpoint.state
        engine.saw_gradient |= {name for name in engine.trainable if state["trained"][name]["had_gradient"]}
        engine.bad_steps = state["bad_steps"]
        audit.begin_with(state["trained"])
        counts = state["data"]["counts"] if state["data"]["fingerprint"] == data else None
        if rank.rank == 0:
            if start.is_own:
                go_back(rank.folder, start.checkpoint, console.line)
            describe_run(rank.folder, as_given, plan)
    metrics = JsonLines(rank.folder / METRICS if rank.rank == 0 else None)
    account = None
    if packed is not None:
        left_out = held_out.faults if held_out is not None else []
        account = ReadAccount(config, packed, readers, rank.folder, console.line, left_out, counts)
    evaluator = None
    if config.eval.is_on:
        evaluator = Evaluator(engine, held_out, rank.progress, console.evaluating)
        console.line(evaluator.extent.summary)
    about |= {"branched_from": None if start is None else start.branched_from}

    def report(saved: Saved) -> None:
        metrics.write(**saved.record())
        text = f"saved {saved.path}" if saved.error is None else f"checkpoint not saved: {saved.error}"
        print(text)  # into the log
        console.line(text)

    saved_step = first_step if start is not None and start.is_own else None
    saver = Checkpointer(rank.folder, config.checkpoint, mine.data == 0, report, saved_step)
    batches = None if account is None else account.watch(iter(packed))
    peak = peak_flops(config, _described(config, device)) if rank.rank == 0 else None
    utilization = Utilization(config, peak)
    tracer = Tracer(rank.folder / TRACE, plan, trace_steps, _gather) if trace_steps else None
    ways = _gather({way for chunk in chunks.values() for way in chunk.attention_ways(device)})
    if ways is not None:
        records, lines = say_ways(ways)
        metrics.write(kind="attention", step=first_step, ways=records)
        for line in lines:
            console.line(line)
    run = _Run(
        *(rank, config, engine, audit, saver, account, batches, evaluator),
        *(metrics, console, utilization, tracer, data, about),
    )

    # The steps. Every rank runs its own list of instructions; the result of a step is the same on all of them.
    evaluate_every = config.eval.every_steps or max_steps
    with saver:
        if start is not None:
            run.go_on(start)
        for step in range(first_step, max_steps):
            if evaluator is not None and step % evaluate_every == 0:
                run.evaluate(step)
                if engine.requested_stop:
                    return run.stop(step)
            if saver.time_is_up:
                engine.request(save=True)
            run.train(step)
            done = step + 1
            if engine.requested_stop and done < max_steps:
                return run.stop(done)
            evaluates = evaluator is not None and done % evaluate_every == 0
            if done < max_steps and (engine.requested_save or saver.is_due(done, evaluates)):
                run.save(done)
            saver.poll()

        # The result first: nothing that can fail from here on may cost the trained weights.
        run.save(max_steps)
        saver.finish()
    if account is not None:
        for record in account.finish(max_steps):
            metrics.write(**record)

    # The proof that only what should train did.
    rank.progress.at(max_steps, "auditing")
    records = _gather(audit.finish(engine.saw_gradient))
    if records is not None:
        found = write_audit(rank.folder / AUDIT, plan, records, learns=config.optimizer.lr > 0)
        console.line(f"audit passed: {found} ({rank.folder / AUDIT})")

    # What it can do now, whether it needs to look for that, and what it says.
    if evaluator is not None:
        scores = run.evaluate(max_steps)
        if config.eval.permuted_control and scores is not None:
            run.control(scores)
        if config.eval.show_answers and not engine.requested_stop:
            console.line("answering held-out questions: one forward of the pipeline for each token")
            answers = write_answers(evaluator, config.eval.show_answers)
            if answers:
                console.answers(answers)
        if engine.requested_stop:
            return run.leave("stopped in the last evaluation, after all steps; they are saved")
    if rank.rank == 0 and (best := saver.best) is not None:
        console.line(f"best checkpoint by {config.checkpoint.keep_best}: step {best[0]}, {best[1]:.4f}")
    metrics.write(kind="end", step=max_steps)
    return run.leave()


@dataclass
class _Run:
    """What all acts of a run share on one rank, and what each of its steps consists of."""

    rank: Rank
    config: RunConfig  # train.max_steps is known
    engine: FrozenPipelineEngine
    audit: RankAudit
    saver: Checkpointer
    account: ReadAccount | None
    batches: Generator[PackedBatch] | None
    evaluator: Evaluator | None
    metrics: JsonLines
    console: Console
    utilization: Utilization
    tracer: Tracer | None
    data: str  # fingerprint
    about: dict[str, Any]  # what every checkpoint says of the run
    loss: float | None = None  # of the latest step

    def go_on(self, start: Start) -> None:
        """Say where the run goes on; one that branches from another begins with a checkpoint of its own."""
        step, path = start.checkpoint.step, start.checkpoint.path
        changed = differences(start.checkpoint.state, self.about)
        self.console.line(f"going on after step {step} of {self.config.train.max_steps}, from {path}")
        if changed:
            self.console.line(f"other than when it was saved, so equal to rounding only: {', '.join(changed)}")
        if not start.is_own:
            self.save(step)
            self.saver.finish()
        self.metrics.write(kind="resume", step=step, checkpoint=str(path), changed=changed)

    def train(self, step: int) -> None:
        """Make one step and record it."""
        start = time.perf_counter()
        result = self.engine.train_step(self.batches)
        self.audit.check_versions()
        seconds = time.perf_counter() - start
        if self.tracer is not None:
            clock = self.engine.clock
            self.tracer.add(lambda: TracedStep(step, clock.seconds, clock.intervals()))
        self.loss = result.loss
        rate = result.tokens / seconds
        fill = result.tokens / (self.config.train.packs_per_step * self.config.data.pack_length)
        done = {name: value for name, value in vars(result).items() if name != "ranks"}
        used = self.utilization.add(result)
        self.metrics.write(kind="train", **done, pack_fill=fill, seconds=seconds, tokens_per_second=rate, **used)
        self.console.step(step, result.loss, rate, note=result.no_update or "")
        if self.account is not None:
            for record in self.account.end_step(step, result.samples, result.quarantined):
                self.metrics.write(**record)
        if self.tracer is not None and self.tracer.is_complete:
            self.write_trace()

    def write_trace(self) -> None:
        """Write the steps that are recorded, if there are any not yet written, together with all ranks."""
        self.rank.progress.at(self.engine.step_index, "writing the trace")
        said = self.tracer.finish()
        if said is not None:
            self.console.line(said)

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

    def evaluate(self, step: int) -> Scores | None:
        """Evaluate and record after `step` updates; None if the run is to stop."""
        scores = self.evaluator.scores()
        if scores is not None:
            self.metrics.write(kind="eval", step=step, **asdict(scores))
            self.console.evaluation(step, scores)
            self.saver.scored(step, asdict(scores))
        return scores

    def control(self, scores: Scores) -> None:
        """Evaluate with the images permuted among the samples, and record that beside the true `scores`."""
        extent = self.evaluator.extent
        if extent.permuted == 0:
            self.console.line("no control: no held-out samples have other images to permute")
            return
        control = self.evaluator.scores(permuted=True)
        if control is not None:
            step, permuted = self.config.train.max_steps, extent.permuted
            self.metrics.write(kind="eval_permuted", step=step, **asdict(control), permuted_samples=permuted)
            self.console.control(control, scores, permuted)

    def stop(self, step: int) -> str:
        """Save and end after `step` updates, as a signal has asked; what to tell the user."""
        self.save(step)
        self.saver.finish()
        return self.leave(f"stopped after step {step} of {self.config.train.max_steps}; it is saved")

    def leave(self, message: str | None = None) -> str | None:
        """Close everything, together with all ranks; returns the message."""
        if self.tracer is not None:
            self.write_trace()
        if (summary := self.utilization.summary()) is not None:
            self.console.line(summary)
        if self.batches is not None:
            self.batches.close()
        self.metrics.close()
        self.console.close()
        dist.barrier()
        dist.destroy_process_group()
        return message


def use_algorithms(deterministic: bool) -> None:
    """Let all of this process's kernels give the same bits each time, or the fastest ones; before CUDA is used.

    An operation that has no such kernel then raises RuntimeError; none of mmtrain's own is of that kind
    (torch.use_deterministic_algorithms lists them).
    """
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def _from_rank_0(start: Start | None) -> Start | None:
    """What rank 0 was given: the launcher of another machine need not see the run's files."""
    shared = [start]
    dist.broadcast_object_list(shared, 0)
    return shared[0]


def _gather(value: Any) -> list[Any] | None:
    """What every rank gives, by global rank, on rank 0; None on the others."""
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found


def _described(config: RunConfig, device: torch.device) -> Device:
    """A rank's device as calibrations name it, which mmtrain.launch looks for when it plans."""
    if device.type == "cuda":
        return gpu_device(torch.cuda.get_device_name(device))
    return cpu_device(config, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))


def _memory(device: torch.device) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


def _without_init_from(config: RunConfig) -> RunConfig:
    """For a run that goes on: what its projector began with need not be there any more, unless part of it is frozen."""
    parameters = projector_parameters(config.model.projector.type, 1, 1)
    if not all(matches(parameter.name, config.model.trainable) for parameter in parameters):
        return config
    return config.changed({"model.projector.init_from": None})


def _agree_on_data(packed: PackedBatches | None, plan: Plan) -> tuple[str, int]:
    """The data's fingerprint and the run's steps, which only ranks that read data know.

    Raises UserError where they have different data: each would train on its own idea of a step.
    """
    readers = [rank.rank for rank in plan.ranks if rank.pipeline == 0]
    seen: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    mine = None if packed is None else (packed.catalog.fingerprint, packed.max_steps)
    dist.all_gather_object(seen, mine)
    for rank in readers:
        if seen[rank] != seen[readers[0]]:
            raise UserError(
                f"data.shards: ranks {readers[0]} and {rank} have different data: the shards, or their indexes, must "
                "be the same on every machine"
            )
    return seen[readers[0]]
