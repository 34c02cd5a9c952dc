"""One rank's life, from joining the job to the saved projector; `mmtrain.launch` starts it on every rank."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.audit import RankAudit, check_replicas, model_fingerprint, write_audit
from mmtrain.checkpoint import Checkpointer, Saved, differences, load, run_state
from mmtrain.config import RunConfig
from mmtrain.data.account import ReadAccount
from mmtrain.data.loader import PackedBatches
from mmtrain.data.packs import PackedBatch
from mmtrain.engine import FrozenPipelineEngine, join_process_group
from mmtrain.errors import UserError
from mmtrain.evaluation import Evaluator, HeldOut
from mmtrain.metrics import Console, JsonLines, Scores
from mmtrain.model.stage import build_chunk
from mmtrain.plan.planner import Plan
from mmtrain.plan.schedule import Instruction
from mmtrain.plan.shapes import matches, projector_parameters
from mmtrain.rank import Rank
from mmtrain.resume import AUDIT, BAD_STEPS, METRICS, Begin, Start


def main(config: RunConfig, plan: Plan, rank: Rank, start: Start | None = None) -> str | None:
    """Train as many steps as `config.train` says, as `plan` says, evaluate, leave results in `rank.folder`.

    Rank 0's `start` says from which checkpoint to go on; rank 0 writes `metrics.jsonl`, `audit.json` and checkpoints.
    Returns None at the end, or what to tell the user of a run that a signal has stopped before, with everything saved.
    Raises UserError for unusable models, data or checkpoints, AuditError when something frozen changed or something
    trainable did not move, NonFiniteError for NaN or infinity.
    """
    mine = plan.ranks[rank.rank]
    device = torch.device(rank.device)
    rank.progress.at(0, "joining the process group")
    host_group = _join(device, config.parallel.timeout_seconds)
    begin = _from_rank_0(start, host_group)
    first_step = 0 if begin is None else begin.step

    # Data first: what is wrong with them should not show after an hour of loading weights.
    packed, held_out = None, None
    if mine.pipeline == 0:
        rank.progress.at(first_step, "opening the data")
        packed = PackedBatches(config, replica=mine.data, replicas=plan.data, first_step=first_step)
        if config.eval.is_on:
            rank.progress.at(first_step, "reading the held-out samples")
            held_out = HeldOut(packed)
    rank.progress.at(first_step, "comparing the data with the other ranks")
    data, max_steps, readers = _agree_on_data(packed, plan, config.parallel.timeout_seconds, host_group)
    settings = run_state(config, plan, torch.get_num_threads(), device)
    config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": max_steps})})
    console = Console(rank.console, max_steps, first_step)
    if packed is not None:
        console.line(packed.summary)

    # What this rank holds: its stages, with real or no-op optimizer, checked against the plan.
    rank.progress.at(first_step, "loading weights")
    console.line(f"loading weights on {plan.pipeline * plan.data} ranks")
    to_build = config if begin is None else _without_init_from(config)
    chunks = {
        stage.stage: build_chunk(to_build, stage, recompute_layers=mine.recompute_layers, device=device)
        for stage in mine.stages
    }

    def before_instruction(step: int, instruction: Instruction) -> None:
        rank.progress.at(step, instruction)
        if rank.stop.asked:
            engine.request(stop=True)

    rank.progress.at(first_step, "building the engine")
    engine = FrozenPipelineEngine(
        config, plan, chunks, before_instruction, first_step=first_step, bad_steps_file=rank.folder / BAD_STEPS
    )
    audit = RankAudit(mine, chunks, engine.optimizer, engine.trainable)
    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, audit.start(), group=host_group)
    check_replicas(starts)
    model = model_fingerprint(starts)

    # Where it goes on: the trained weights as they were, the data and the frozen weights known to be the same.
    metrics = JsonLines(rank.folder / METRICS if rank.rank == 0 else None)
    counts = None
    if begin is not None:
        rank.progress.at(first_step, "loading the checkpoint")
        begin.refuse_other_contents(data, model, max_steps)
        engine.load_trained(*load(None if start is None else start.checkpoint, engine.trainable, host_group))
        engine.saw_gradient |= {name for name in engine.trainable if begin.state["trained"][name]["had_gradient"]}
        engine.bad_steps = begin.state["bad_steps"]
        audit.begin_with(begin.state["trained"])
        counts = begin.state["data"]["counts"] if begin.state["data"]["fingerprint"] == data else None
        changed = differences(begin.state, settings)
        console.line(f"going on after step {first_step} of {max_steps}, from {begin.path}")
        if changed:
            console.line(f"other than when it was saved, so equal to rounding only: {', '.join(changed)}")
        metrics.write(kind="resume", step=first_step, checkpoint=begin.path, changed=changed)
    account = None
    if packed is not None:
        left_out = held_out.faults if held_out is not None else []
        account = ReadAccount(config, packed, readers, rank.folder, console.line, left_out, counts)
    batches = None if account is None else account.watch(iter(packed))
    evaluator = None
    if config.eval.is_on:
        evaluator = Evaluator(engine, held_out, rank.progress, console.evaluating)
        console.line(evaluator.extent.summary)

    def report(saved: Saved) -> None:
        metrics.write(**saved.record())
        text = f"saved {saved.path}" if saved.error is None else f"checkpoint not saved: {saved.error}"
        print(text)  # into the log
        console.line(text)

    latest = first_step if begin is not None and begin.is_own else None
    saver = Checkpointer(rank.folder, config.checkpoint, mine.data == 0, report, latest, host_group)
    result = None

    def save(step: int) -> None:
        if step != saver.latest:  # else it was saved for another reason, or is where this run came from
            state = {
                **settings,
                "max_steps": max_steps,
                "loss": None if result is None else result.loss,
                "bad_steps": engine.bad_steps,
                "frozen_fingerprint": model,
                "data": {"fingerprint": data, "counts": None if account is None else account.state_dict()},
            }
            saver.save(step, engine.trainable, engine.optimizer_state(), audit.notes(engine.saw_gradient), state)

    def stopped(step: int) -> str:
        rank.progress.at(step, "saving")
        save(step)
        saver.finish()
        return _leave(
            f"stopped after step {step} of {max_steps}, saved: the same command goes on", batches, metrics, console
        )

    # The steps. Every rank runs its own list of instructions; the result of a step is the same on all of them.
    evaluate_every = config.eval.every_steps or max_steps
    pack_tokens = config.train.packs_per_step * config.data.pack_length
    with saver:
        for step in range(first_step, max_steps):
            if evaluator is not None and step % evaluate_every == 0:
                saver.scored(step, _evaluate(evaluator, step, metrics, console))
                if engine.requested_stop:
                    return stopped(step)
            if saver.time_is_up:
                engine.request(save=True)
            began = time.perf_counter()
            result = engine.train_step(batches)
            audit.check_versions()
            seconds = time.perf_counter() - began
            metrics.write(
                kind="train",
                **asdict(result),
                pack_fill=result.tokens / pack_tokens,
                seconds=seconds,
                tokens_per_second=result.tokens / seconds,
            )
            console.step(step, result.loss, result.tokens / seconds, note=result.no_update or "")
            if account is not None:
                for record in account.end_step(step, result.samples, result.quarantined):
                    metrics.write(**record)
            done = step + 1
            if engine.requested_stop and done < max_steps:
                return stopped(done)
            evaluates = evaluator is not None and done % evaluate_every == 0
            if done < max_steps and (engine.requested_save or saver.is_due(done, evaluates)):
                save(done)
            saver.poll()

        # The result first: nothing that can fail from here on may cost the trained weights.
        rank.progress.at(max_steps, "saving")
        save(max_steps)
        saver.finish()
    if account is not None:
        for record in account.finish(max_steps):
            metrics.write(**record)

    # The proof that only what should train did.
    rank.progress.at(max_steps, "auditing")
    records = [None] * dist.get_world_size() if rank.rank == 0 else None
    dist.gather_object(audit.finish(engine.saw_gradient), records, group=host_group)
    if records is not None:
        found = write_audit(rank.folder / AUDIT, plan, records, learns=config.optimizer.lr > 0)
        console.line(f"audit passed: {found} ({rank.folder / AUDIT})")

    # What it can do now, whether it needs to look for that, and what it says.
    if evaluator is not None:
        scores = _evaluate(evaluator, max_steps, metrics, console)
        saver.scored(max_steps, scores)
        if config.eval.permuted_control and scores is not None:
            _control(evaluator, scores, max_steps, metrics, console)
        if config.eval.show_answers and not engine.requested_stop:
            console.line("answering held-out questions: one forward of the pipeline for each token")
            answers = evaluator.answers(config.eval.show_answers)
            if answers:
                console.answers(answers)
        if engine.requested_stop:
            return _leave("stopped in the last evaluation, after all steps, which are saved", batches, metrics, console)
    if rank.rank == 0 and (best := saver.best) is not None:
        console.line(f"best checkpoint by {config.checkpoint.keep_best}: step {best[0]}, {best[1]:.4f}")
    metrics.write(kind="end", step=max_steps)
    return _leave(None, batches, metrics, console)


def _leave(
    message: str | None, batches: Generator[PackedBatch] | None, metrics: JsonLines, console: Console
) -> str | None:
    """Close everything, together with all ranks; returns the message."""
    if batches is not None:
        batches.close()
    metrics.close()
    console.close()
    dist.barrier()
    dist.destroy_process_group()
    return message


def _join(device: torch.device, timeout_seconds: int) -> dist.ProcessGroup | None:
    """Join the process group; returns the group for objects and CPU tensors, None where it is the default one."""
    join_process_group(device, timeout_seconds)
    if dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


def _from_rank_0(start: Start | None, group: dist.ProcessGroup | None) -> Begin | None:
    """What every rank needs to know of rank 0's checkpoint, whose files other machines need not see."""
    shared = [None if start is None else start.begin]
    dist.broadcast_object_list(shared, 0, group=group)
    return shared[0]


def _without_init_from(config: RunConfig) -> RunConfig:
    """For a run that goes on: what its projector began with need not be there any more, unless part of it is frozen."""
    parameters = projector_parameters(config.model.projector.type, 1, 1)
    if not all(matches(parameter.name, config.model.trainable) for parameter in parameters):
        return config
    projector = config.model.projector.model_copy(update={"init_from": None})
    return config.model_copy(update={"model": config.model.model_copy(update={"projector": projector})})


def _agree_on_data(
    packed: PackedBatches | None, plan: Plan, timeout_seconds: int, host_group: dist.ProcessGroup | None
) -> tuple[str, int, dist.ProcessGroup | None]:
    """The data's fingerprint and the run's steps, which only ranks that read data know, and the group of these ranks.

    There is no group where it would have one member. Raises UserError where they have different data: each would train
    on its own idea of a step.
    """
    timeout = timedelta(seconds=timeout_seconds)
    readers = [rank.rank for rank in plan.ranks if rank.pipeline == 0]
    group = dist.new_group(readers, backend="gloo", timeout=timeout) if len(readers) > 1 else None
    seen: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    mine = None if packed is None else (packed.catalog.fingerprint, packed.max_steps)
    dist.all_gather_object(seen, mine, group=host_group)
    for rank in readers:
        if seen[rank] != seen[readers[0]]:
            raise UserError(
                f"data.shards: ranks {readers[0]} and {rank} have different data: the shards, or their indexes, must "
                "be the same on every machine"
            )
    return *seen[readers[0]], group


def _evaluate(evaluator: Evaluator, step: int, metrics: JsonLines, console: Console) -> Scores | None:
    """Evaluate and record after `step` updates; None if the run is to stop."""
    scores = evaluator.scores()
    if scores is None:
        return None
    metrics.write(kind="eval", step=step, **asdict(scores))
    console.evaluation(step, scores)
    return scores


def _control(evaluator: Evaluator, scores: Scores, step: int, metrics: JsonLines, console: Console) -> None:
    """Evaluate and record with the images permuted among the samples, beside the true `scores`."""
    extent = evaluator.extent
    if extent.permuted == 0:
        console.line("no control: no held-out samples have other images to permute")
        return
    control = evaluator.scores(permuted=True)
    if control is None:
        return
    metrics.write(kind="eval_permuted", step=step, **asdict(control), permuted_samples=extent.permuted)
    console.control(control, scores, extent.permuted)
