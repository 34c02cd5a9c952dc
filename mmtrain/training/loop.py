"""One rank's life, from joining the job to the saved projector; `mmtrain.launch` starts it on every
rank.
"""

import os
import secrets
import time
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.cache import cache_folder
from mmtrain.base.collectives import all_gather_object, gather_to_rank_0
from mmtrain.base.errors import UserError
from mmtrain.base.printing import show_logs
from mmtrain.checkpoint.load import differences, load, load_init_from
from mmtrain.checkpoint.resume import ResumePoint
from mmtrain.checkpoint.run_folder import AUDIT, BAD_STEPS, describe_run, go_back
from mmtrain.checkpoint.write import Checkpointer, SaveResult, run_state
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.fetching import Fetching
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.stored import StoredData
from mmtrain.engine.algorithms import compiles, use_algorithms
from mmtrain.engine.audit import (
    RankAudit,
    check_replicas,
    model_fingerprint,
    settings_fingerprint,
    write_audit,
)
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.stages import build_stages, refuse_short_device_memory
from mmtrain.plan.plan import Plan
from mmtrain.runtime.rank import Rank
from mmtrain.training.console import Console
from mmtrain.training.evaluations import Evaluations, HeldOut
from mmtrain.training.records import Recorder


def main(
    config: RunConfig,
    plan: Plan,
    rank: Rank,
    start: ResumePoint | None = None,
    trace_steps: int = 0,
    verbose: bool = False,
    data: StoredData | None = None,
) -> str | None:
    """Train the steps of `config.train` as `plan` says, evaluate, and leave results in
    `rank.folder`.

    Resumes from rank 0's `start`, and writes `trace.json` of `trace_steps` steps after the first.
    Returns None at the end, or a message for the user of a run that a signal has stopped before,
    with everything saved.

    Raises: UserError for unusable models, data or checkpoints; AuditError when something frozen
    changed or something trainable did not move; NonFiniteError for NaN or infinity.
    """
    show_logs(print)  # into the log: the launcher has shown what data and models log
    run = _Run(config, plan, rank, start, verbose)
    # before weights, which may take an hour to load: wrong data must show early
    run.open_data(data)
    run.load_models()
    if rank.rank == 0:
        show_logs(run.console.line, run.console.detail)
    run.take_up_checkpoint()
    run.open_records(trace_steps)
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
        run.console.line(
            f"best checkpoint by {config.checkpoint.keep_best}: step {best[0]}, {best[1]:.4f}"
        )
    run.records.write("end", step=steps)
    return run.leave()


class _Run:
    """One rank's part of a run: one method for each act, in order."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        rank: Rank,
        start: ResumePoint | None,
        verbose: bool,
    ) -> None:
        """Join the process group, and learn from rank 0 where to begin: other machines need not see
        its files.
        """
        self.plan = plan
        self.rank = rank
        self.verbose = verbose
        self.place = plan.ranks[rank.rank]
        self.device = torch.device(rank.device)
        use_algorithms(config.train)
        rank.progress.at(0, "joining the process group")
        join_process_group(self.device, config.parallel.timeout_seconds)
        shared = [start, secrets.token_hex(8)]
        dist.broadcast_object_list(shared, 0)
        self.start, self.token = shared  # the token is in the names of this process's copies
        self.fetching: Fetching | None = None
        self.config = config
        self.first_step = 0
        if self.start is not None:
            self.first_step = self.start.checkpoint.step
        self.loss: float | None = None  # of the latest step

    def open_data(self, data: StoredData | None) -> None:
        """Open the data on the ranks that read them; share their fingerprint and the number of
        steps with all ranks.

        `data` is what this machine's launcher has counted, None where torchrun started the ranks.
        Raises UserError where ranks have different data.
        """
        config = self.config
        rank = self.rank
        plan = self.plan
        self.packed: PackedBatches | None = None
        self.held_out = None
        if self.place.pipeline == 0:
            rank.progress.at(self.first_step, "opening the data")
            self.packed = PackedBatches(
                config,
                replica=self.place.data,
                replicas=plan.data,
                first_step=self.first_step,
                data=data,
                position=self.start and self.start.checkpoint.state["data"]["position"],
            )
            self._fetch()
            if config.eval.is_on:
                rank.progress.at(self.first_step, "reading the held-out samples")
                self.held_out = HeldOut(self.packed)

        # every rank learns the data's fingerprint and its steps from those that read
        rank.progress.at(self.first_step, "comparing the data with the other ranks")
        own = self.packed and (self.packed.catalog.fingerprint, self.packed.max_steps)
        seen = all_gather_object(own)
        first, *others = (other.rank for other in plan.ranks if other.pipeline == 0)
        for other in others:
            if seen[other] != seen[first]:
                raise UserError(
                    f"data.shards: ranks {first} and {other} have different data: "
                    "the shards, or their indexes, must be the same on every machine"
                )
        self.data, self.max_steps = seen[first]

        self.readers = replica_group(
            plan,
            rank.rank,
            torch.device("cpu"),
            config.parallel.timeout_seconds,
        )
        self.configured = config
        self.config = config.changed({"train.max_steps": self.max_steps})
        self.console = Console(rank.console, self.max_steps, self.first_step, self.verbose)
        if self.packed is not None:
            self.console.line(self.packed.summary)

    def _fetch(self) -> None:
        """Read remote shards from copies, which this machine's first reading rank has made."""
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.rank.world_size))
        first = self.rank.rank // local_ranks * local_ranks
        here = self.plan.ranks[first : first + local_ranks]
        replicas = [place.data for place in here if place.pipeline == 0]
        folder = cache_folder("copies") / f"{self.token}-{first}"
        self.fetching = self.packed.fetch(folder, replicas, self.packed.max_steps)

    def load_models(self) -> None:
        config = self.config
        rank = self.rank
        plan = self.plan
        rank.progress.at(self.first_step, "loading weights")
        self.console.line("loading weights")
        resumes = self.start is not None
        self.stages = build_stages(
            config,
            plan,
            rank.rank,
            self.device,
            self.readers,
            resumes=resumes,
        )

        rank.progress.at(self.first_step, "building the engine")
        if compiles(config.train, self.device):
            self.console.line("trying compiled layers, which takes longer at the first start")
        # Before the engine warms up, which would run out of memory without an explanation.
        refuse_short_device_memory(self.place, self.device)
        self.engine = FrozenPipelineEngine(
            config,
            plan,
            self.stages,
            self._before_instruction,
            first_step=self.first_step,
            bad_steps_file=rank.folder / BAD_STEPS,
        )

        if self.start is None and config.model.init_from is not None:
            weights = load_init_from(config, self.engine.trainable)
            self.engine.weights.load({**self.engine.trainable, **weights}, {})
        # Again, with master weights, communicators and libraries' workspaces in place.
        refuse_short_device_memory(self.place, self.device)

        # The audit compares with this moment at the end.
        self.audit = RankAudit(
            self.place,
            self.stages,
            self.engine.optimizer,
            self.engine.trainable,
        )
        starts = all_gather_object(self.audit.start())
        check_replicas(starts)

        files: dict[str, str] = {}
        for start in starts:
            files |= start["files"]
        self.about: dict[str, Any] = {  # in every checkpoint
            **run_state(self.configured, plan, torch.get_num_threads(), self.device),
            "max_steps": self.max_steps,
            "frozen_fingerprint": model_fingerprint(
                [start["frozen_parameters"] for start in starts]
            ),
            "frozen_files": files,
            "settings_fingerprint": None,
            "branched_from": self.start and self.start.branched_from,
        }
        if rank.rank == 0:
            self.about["settings_fingerprint"] = settings_fingerprint(config.model)

    def _before_instruction(self, step: int, instruction: object) -> None:
        if not self.engine.is_training:
            instruction = f"evaluation: {instruction}"
        self.rank.progress.at(step, instruction)
        if self.rank.stop.asked:
            self.engine.request_stop()

    def take_up_checkpoint(self) -> None:
        """Load the checkpoint of a run that resumes, and only then cut back its records."""
        self.counts = None  # of the data's account
        start = self.start
        about = self.about
        engine = self.engine
        if start is None:
            return
        self.rank.progress.at(self.first_step, "loading the checkpoint")
        if self.rank.rank == 0:
            fingerprints = about["frozen_fingerprint"], about["settings_fingerprint"]
            start.refuse_other_contents(self.data, *fingerprints, self.max_steps)
        engine.weights.load(*load(start.checkpoint, engine.trainable))
        state = start.checkpoint.state
        for name in engine.trainable:
            if state["trained"][name]["had_gradient"]:
                engine.saw_gradient.add(name)
        engine.bad_steps = state["bad_steps"]
        self.audit.begin_with(state["trained"])
        if self.packed is not None and self.packed.keeps_order:
            self.counts = state["data"]["counts"]
        if self.rank.rank == 0:
            own = start.checkpoint if start.is_own else None
            go_back(self.rank.folder, own)
            describe_run(self.rank.folder, self.configured, self.plan)

    def open_records(self, trace_steps: int) -> None:
        config = self.config
        rank = self.rank
        console = self.console
        self.recorder = Recorder(
            config,
            rank,
            self.engine,
            console,
            self.first_step,
            self.about["versions"],
            trace_steps,
        )
        self.records = self.recorder.records
        if self.packed is not None:
            left_out = self.held_out.faults if self.held_out else []
            self.recorder.open_account(self.packed, self.readers, left_out, self.counts)
        saved_step = None
        if self.start is not None and self.start.is_own:
            saved_step = self.first_step
        self.saver = Checkpointer(
            rank.folder,
            config.checkpoint,
            self.place.data == 0,
            self._report,
            saved_step,
        )
        self.evaluations: Evaluations | None = None
        if config.eval.is_on:
            self.evaluations = Evaluations(
                config.eval,
                self.engine,
                self.held_out,
                self.records,
                console,
                self.saver,
            )

    def _report(self, saved: SaveResult) -> None:
        self.records.write(**saved.record())
        text = f"saved {saved.path}"
        if saved.error is not None:
            text = f"the checkpoint was not saved: {saved.error}"
        print(text)  # into the log
        self.console.line(text)

    def begin_steps(self) -> None:
        """Announce where the run resumes; one that branches from another begins with a checkpoint
        of its own.
        """
        if self.start is None:
            return
        step = self.first_step
        path = self.start.checkpoint.path
        changed = differences(self.start.checkpoint.state, self.about)
        self.console.line(f"resuming from {path} (step {step} of {self.max_steps})")
        if changed:
            differs = f"the run differs from its checkpoint in {', '.join(changed)}"
            self.console.line(f"{differs}: results agree to rounding, not bit for bit")
        if not self.start.is_own:
            self.save(step)
            self.saver.finish()
        self.records.write(
            "resume",
            step=step,
            checkpoint=str(path),
            changed=changed,
        )

    def make_steps(self) -> int:
        """Make steps until all are made or a signal asks to stop; return how many are made."""
        engine = self.engine
        saver = self.saver
        max_steps = self.max_steps
        evaluate_every = self.config.eval.every_steps or max_steps
        for step in range(self.first_step, max_steps):
            evaluates = self.evaluations is not None and step % evaluate_every == 0
            if evaluates and not self.evaluations.make(step):
                return step
            start = time.perf_counter()
            result = engine.train_step(self.recorder.batches, wants_save=saver.time_is_up)
            self.audit.check_versions()
            self.loss = result.loss
            self.recorder.step(result, time.perf_counter() - start)
            done = step + 1
            if engine.requested_stop and done < max_steps:
                return done
            evaluates = self.evaluations is not None and done % evaluate_every == 0
            if done < max_steps and (engine.requested_save or saver.is_due(done, evaluates)):
                self.save(done)
            saver.poll()
        return max_steps

    def save(self, step: int) -> None:
        if step == self.saver.saved:
            return
        self.rank.progress.at(step, "saving")
        # before the save notes the records' lengths: a run that resumes cuts off what comes later
        self.recorder.ranks(step)
        engine = self.engine
        account = self.recorder.account
        counts = account and account.state_dict()
        now = {
            "loss": self.loss,
            "bad_steps": engine.bad_steps,
            "data": {
                "fingerprint": self.data,
                "position": self.packed and self.packed.position_at(step),
                "counts": counts,
            },
        }
        trained = self.audit.notes(engine.saw_gradient)
        self.saver.save(
            step,
            engine.trainable,
            engine.weights.optimizer_state(),
            trained,
            self.about | now,
        )

    def prove(self) -> None:
        """Close the account of the data, and prove that only what should train did."""
        self.recorder.close_account(self.max_steps)
        self.rank.progress.at(self.max_steps, "auditing")
        records = gather_to_rank_0(self.audit.finish(self.engine.saw_gradient))
        if records is not None:
            file = self.rank.folder / AUDIT
            result = write_audit(file, self.plan, records, learns=self.plan.learns)
            self.console.line(f"audit passed: {result} ({file})")

    def leave(self, message: str | None = None) -> str | None:
        self.recorder.close()
        if self.fetching is not None:
            self.fetching.stop()
        self.console.close()
        return message
