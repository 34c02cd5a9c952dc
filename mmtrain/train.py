"""One rank's life, from joining the job to the saved projector; `mmtrain.launch` starts it on every rank."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.audit import RankAudit, check_replicas, write_audit
from mmtrain.checkpoint import save_trained
from mmtrain.config import RunConfig
from mmtrain.data.account import ReadAccount
from mmtrain.data.loader import PackedBatches
from mmtrain.engine import FrozenPipelineEngine, join_process_group
from mmtrain.errors import UserError
from mmtrain.evaluation import Evaluator, HeldOut
from mmtrain.metrics import Console, JsonLines, Scores
from mmtrain.model.stage import build_chunk
from mmtrain.plan.planner import Plan
from mmtrain.rank import Rank


def main(config: RunConfig, plan: Plan, rank: Rank) -> None:
    """Train as many steps as `config.train` says, as `plan` says, evaluate, leave results in `rank.folder`.

    Rank 0 writes `metrics.jsonl`, `audit.json` and the checkpoint. Raises UserError for unusable models or data,
    AuditError when something frozen changed or something trainable did not move, NonFiniteError for NaN or infinity.
    """
    mine = plan.ranks[rank.rank]
    device = torch.device(rank.device)
    rank.progress.at(0, "joining the process group")
    join_process_group(device, config.parallel.timeout_seconds)

    # Data first: what is wrong with them should not show after an hour of loading weights.
    packed, held_out = None, None
    if mine.pipeline == 0:
        rank.progress.at(0, "opening the data")
        packed = PackedBatches(config, replica=mine.data, replicas=plan.data)
        if config.eval.is_on:
            rank.progress.at(0, "reading the held-out samples")
            held_out = HeldOut(packed)
    rank.progress.at(0, "comparing the data with the other ranks")
    max_steps, readers = _agree_on_data(packed, plan, config.parallel.timeout_seconds)
    config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": max_steps})})
    console = Console(rank.console, max_steps)
    if packed is not None:
        console.line(packed.summary)

    # What this rank holds: its stages, with real or no-op optimizer, checked against the plan.
    rank.progress.at(0, "loading weights")
    console.line(f"loading weights on {plan.pipeline * plan.data} ranks")
    chunks = {
        stage.stage: build_chunk(config, stage, recompute_layers=mine.recompute_layers, device=device)
        for stage in mine.stages
    }
    rank.progress.at(0, "building the engine")
    engine = FrozenPipelineEngine(config, plan, chunks, on_instruction=rank.progress.at)
    audit = RankAudit(mine, chunks, engine.optimizer, engine.trainable)
    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, audit.start(), group=engine.host_group)
    check_replicas(starts)
    account = None
    if packed is not None:
        left_out = held_out.faults if held_out is not None else []
        account = ReadAccount(config, packed, readers, rank.folder, console.line, left_out)
    batches = None if account is None else account.watch(iter(packed))
    evaluator = None
    if config.eval.is_on:
        evaluator = Evaluator(engine, held_out, rank.progress, console.evaluating)
        console.line(evaluator.extent.summary)

    # The steps. Every rank runs its own list of instructions; the result of a step is the same on all of them.
    metrics = JsonLines(rank.folder / "metrics.jsonl" if rank.rank == 0 else None)
    evaluate_every = config.eval.every_steps or max_steps
    pack_tokens = config.train.packs_per_step * config.data.pack_length
    for step in range(max_steps):
        if evaluator is not None and step % evaluate_every == 0:
            _evaluate(evaluator, step, metrics, console)
        start = time.perf_counter()
        result = engine.train_step(batches)
        audit.check_versions()
        seconds = time.perf_counter() - start
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

    # The result first: nothing that can fail from here on may cost the trained weights.
    rank.progress.at(max_steps, "saving")
    mine_to_save = engine.trainable if mine.data == 0 else {}
    saved = save_trained(rank.folder, max_steps, mine_to_save, engine.host_group)
    console.line(f"saved {saved}")
    if account is not None:
        for record in account.finish(max_steps):
            metrics.write(**record)

    # The proof that only what should train did.
    rank.progress.at(max_steps, "auditing")
    records = [None] * dist.get_world_size() if rank.rank == 0 else None
    dist.gather_object(audit.finish(engine.saw_gradient), records, group=engine.host_group)
    if records is not None:
        found = write_audit(rank.folder / "audit.json", plan, records, learns=config.optimizer.lr > 0)
        console.line(f"audit passed: {found} ({rank.folder / 'audit.json'})")

    # What it can do now, whether it needs to look for that, and what it says.
    if evaluator is not None:
        scores = _evaluate(evaluator, max_steps, metrics, console)
        if config.eval.permuted_control:
            _control(evaluator, scores, max_steps, metrics, console)
        if config.eval.show_answers:
            console.line("answering held-out questions: one forward of the pipeline for each token")
            answers = evaluator.answers(config.eval.show_answers)
            if answers:
                console.answers(answers)
    metrics.close()
    console.close()
    dist.barrier()
    dist.destroy_process_group()


def _agree_on_data(
    packed: PackedBatches | None, plan: Plan, timeout_seconds: int
) -> tuple[int, dist.ProcessGroup | None]:
    """The steps of the run, which only ranks that read data know, and the group of these ranks if they are several.

    Raises UserError where they have different data: each would train on its own idea of a step.
    """
    timeout = timedelta(seconds=timeout_seconds)
    host_group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
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
    return seen[readers[0]][1], group


def _evaluate(evaluator: Evaluator, step: int, metrics: JsonLines, console: Console) -> Scores:
    """Evaluate and record after `step` updates."""
    scores = evaluator.scores()
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
    metrics.write(kind="eval_permuted", step=step, **asdict(control), permuted_samples=extent.permuted)
    console.control(control, scores, extent.permuted)
