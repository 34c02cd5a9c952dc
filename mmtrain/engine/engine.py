"""Run a plan's instruction lists, with DeepSpeed's topology, process groups and optimizer step.

- every rank runs exactly the instructions of `plan.schedule`, and fetches streamed layers in their
  order;
- a message is (positions and labels (2, B, L), or (5, B, L) with M-RoPE, on the host; hidden (B, L,
  D)); a gradient is (B, L, D);
- no forward or backward waits for the device: what depends on data is known on the host;
- micro-batches contribute sums of token losses; gradients are divided once, by the step's
  supervised tokens over all micro-batches and replicas;
- all ranks reduce the same `statistics` before the optimizer runs, so that all take the same
  decision.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mmtrain.base.errors import NonFiniteError
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import PackedBatch, to_device
from mmtrain.engine.algorithms import compiler_of
from mmtrain.engine.bad_steps import report_bad_step
from mmtrain.engine.channels import ChainLink, Channels, Encoded
from mmtrain.engine.deepspeed_pipeline import deepspeed_engine
from mmtrain.engine.optimizer import MasterWeights, clip_coefficient, learning_rate
from mmtrain.engine.process_groups import replica_group
from mmtrain.engine.single_stage import expected_batch, warm_up
from mmtrain.engine.statistics import COUNTS, RankSums, Slot, Statistics, StepResult
from mmtrain.engine.step_clock import StepClock
from mmtrain.facts.models import models_of
from mmtrain.model.llm.loss import count_answers
from mmtrain.model.stage import Stage, streamed_of
from mmtrain.plan.instructions import Instruction, Op, Schedule, in_common_order, uses_of
from mmtrain.plan.optimizer_kinds import REST, parameter_groups
from mmtrain.plan.plan import Plan
from mmtrain.plan.schedule import forward_schedule, prelude, ranks_of


class FrozenPipelineEngine:
    """One rank of a pipeline x data grid that executes a plan.

    `stages` are this rank's, by number; `on_instruction` is called with (step, instruction) before
    each instruction. A resumed run begins with `first_step`, counted from 0. Rank 0 appends a line
    to `bad_steps_file` for each step that is not finite (see mmtrain.engine.bad_steps). `warms_up`:
    run everything once before the first message (see `warm_up`); None: on a GPU, or to compile.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        stages: Mapping[int, Stage],
        on_instruction: Callable[[int, Instruction], None] | None = None,
        *,
        first_step: int = 0,
        bad_steps_file: Path | None = None,
        warms_up: bool | None = None,
    ) -> None:
        stored = {}
        for stage in stages.values():
            stored |= {name: p for name, p in stage.global_parameters() if p.requires_grad}
        self.weights = MasterWeights(stored, config.optimizer)
        self.trainable = self.weights.by_name
        """fp32 master weights of what trains on this rank, by global name."""
        self.optimizer = self.weights.optimizer
        packs = config.train.packs_per_microbatch
        self._deepspeed = deepspeed_engine(packs, plan, stages, self.optimizer)
        self.device: torch.device = self._deepspeed.device
        self.pipeline_rank = self._deepspeed.stage_id
        self.global_rank = self._deepspeed.global_rank
        self._replica = plan.ranks[self.global_rank].data
        self._groups = parameter_groups(config.optimizer, self.trainable)
        self._config = config
        self.plan = plan
        self.stages = dict(stages)
        self.on_instruction = on_instruction
        self.step_index = first_step
        self.bad_steps = 0
        """Steps of the run whose loss or gradient was not finite; a resumed run sets it."""
        self.requested_save = False
        """Whether any rank wanted a save in the latest `train_step`."""
        self.requested_stop = False
        """Whether a stop was requested from any rank, as of the latest `train_step` or
        `evaluate`.
        """
        self.saw_gradient: set[str] = set()
        """Trainable parameters that had a non-zero gradient in an applied step: these must have
        moved.
        """

        self._bad_steps_file = bad_steps_file
        self._wants_stop = False
        self._last_stage = plan.pipeline * plan.stages_per_rank - 1
        self._needs_prelude = any(encodes and encodes.ahead for encodes in plan.chain)
        models = models_of(config)
        self._integer_rows = 5 if models.has_grid_positions else 2
        first = self.stages[self.pipeline_rank]
        self._dtype = first.dtype
        self._shape = (packs, config.data.pack_length, first.language.hidden_size)

        timeout_seconds = config.parallel.timeout_seconds
        self._replicas = replica_group(plan, self.global_rank, self.device, timeout_seconds)
        self.kernels = set().union(*(stage.kernels for stage in self.stages.values()))
        """The ways in which this rank computes attention, recurrent and compiled layers."""
        compiler = compiler_of(config.train, self.device)
        if warms_up is None:
            warms_up = self.device.type == "cuda" or compiler is not None
        if warms_up:
            batch = expected_batch(config, models)
            self.kernels |= warm_up(
                batch,
                self.stages,
                self.weights,
                plan.first_trainable_stage,
                self.device,
                compiler,
            )
        self._posts_ahead = dict.fromkeys((True, False), not warms_up)  # by whether it trains
        self._connect(first, timeout_seconds)
        self._begin(None, trains=True)

    def _connect(self, first: Stage, timeout_seconds: int) -> None:
        """Open the channels and start the clock, which streamed layers tell of their waits."""
        rank = self.global_rank
        self._channels = Channels(self.plan, rank, self.device, timeout_seconds)
        self.clock = StepClock(self.device, self._held_bytes())
        self._link = ChainLink(
            self.plan,
            rank,
            first,
            self._channels,
            self.clock.waited,
            timeout_seconds,
        )
        # Instructions that need nothing of the engine; the others are its methods.
        self._encode = self._link.encode
        self._send_features = self._link.send
        self._receive_features = self._link.receive

        self._streamed = streamed_of(self.stages.values())
        if self._streamed is not None:
            self._streamed.before_wait = self.clock.done
            self._streamed.after_wait = self.clock.fetched

    def _held_bytes(self) -> int:
        """Return the bytes of this rank's weights and optimizer, each tensor counted once."""
        tensors = [*self.trainable.values(), *self.weights.optimizer_state().values()]
        for stage in self.stages.values():
            tensors += stage.parameters()
            tensors += stage.buffers()
        storages = map(Tensor.untyped_storage, tensors)
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    def request_stop(self) -> None:
        """Let the next `train_step` or `evaluate` set `requested_stop` on every rank."""
        self._wants_stop = True

    def train_step(
        self,
        batches: Iterator[PackedBatch] | None,
        *,
        wants_save: bool = False,
    ) -> StepResult:
        """Run one optimizer step over `plan.microbatches_per_step` micro-batches; stage 0 reads
        them from `batches`.

        If the plan encodes images ahead of time, stage 0 also reads micro-batches of later steps:
        give the same iterator to every step. A step whose loss or gradient is not finite changes no
        parameter. Raises NonFiniteError, on every rank, once the run has had more such steps than
        `train.max_bad_steps`.
        """
        self._begin(batches, trains=True)
        self._sums.add(save=wants_save)
        if self._needs_prelude:
            self._needs_prelude = False
            self._run_schedule(prelude(self.plan.chain), 0)
        self._run_schedule(self.plan.schedule, self.plan.microbatches_per_step)
        self.step_index += 1
        return self._result

    def evaluate(
        self,
        batches: Iterator[PackedBatch] | None,
        microbatches: int,
    ) -> Statistics:
        """Forward `microbatches` micro-batches on each replica and return the sums over all; stage
        0 reads `batches`.

        Training is not affected; NaN and infinity are reported, not raised. Cost: stage 0 may run
        ahead, so that the hidden states of all micro-batches may wait at once.
        """
        self._begin(batches, trains=False)
        plan = self.plan
        schedule = forward_schedule(
            plan.pipeline,
            microbatches,
            plan.stages_per_rank,
            ranks_of(plan.chain),
            plan.evaluation_lead,
        )
        self._run_schedule(schedule, microbatches)
        return self._statistics

    def _begin(
        self,
        batches: Iterator[PackedBatch] | None,
        *,
        trains: bool,
    ) -> None:
        self._batches = batches
        self.is_training = trains
        """Whether `train_step` runs, or ran last, and not `evaluate`."""
        self._input: dict[Slot, Tensor] = {}
        self._output: dict[Slot, Tensor | GradientEdge] = {}
        self._integers: dict[Slot, Tensor] = {}
        self._sums = RankSums(self.device)
        # By replica and micro-batch: on the last stage loss sum and supervised tokens, on stage 0
        # keys of the samples.
        self._losses: dict[Slot, tuple[Tensor, Tensor]] = {}
        self._keys: dict[Slot, tuple[str, ...]] = {}
        self.predicted: dict[int, Tensor] = {}
        """Last stage: arg max at the supervised positions (S,), row-major, by micro-batch of the
        latest `evaluate`.
        """
        self.clock.begin()

    def _run_schedule(
        self,
        schedule: Schedule,
        microbatches: int,
    ) -> None:
        """Run lists that use `microbatches`; a prelude uses none."""
        # in the first schedule a kernel may still wait for the whole device: post nothing ahead
        if not self._posts_ahead[self.is_training]:
            schedule = in_common_order(schedule)
            self._posts_ahead[self.is_training] = microbatches > 0
        instructions = schedule[self.pipeline_rank]
        if self._streamed is not None:
            stages = self.plan.ranks[self.global_rank].stages
            streamed = {stage.stage: stage.streamed for stage in stages}
            self._streamed.follow(uses_of(instructions, streamed, self.plan.first_trainable_layer))
        self._link.begin(sum(x.op is Op.LOAD for x in schedule[0]), trains=self.is_training)

        for instruction in instructions:
            if self.on_instruction is not None:
                self.on_instruction(self.step_index, instruction)
            self.clock.start(instruction)
            getattr(self, f"_{instruction.op}")(instruction)
            self.clock.done()

        if self._streamed is not None:
            self._streamed.end()
        self.clock.start(None)
        self._link.end(microbatches)
        self._channels.wait_for_sends()
        self.clock.waited()

    def _take(self, op: Op, x: Instruction) -> list[Tensor]:
        tensors = self._channels.take(Instruction(op, x.stage, x.microbatch))
        self.clock.waited()
        return tensors

    # ---- instructions: each method is called as its instruction, after an underscore

    def _load(self, x: Instruction) -> None:
        assert self._batches is not None, "stage 0 needs an iterator over micro-batches"
        steps_ahead = x.microbatch // self.plan.microbatches_per_step
        if self.is_training and steps_ahead:
            batch = None
            last = self._config.train.max_steps
            if last is None or self.step_index + steps_ahead < last:
                batch = next(self._batches, None)
        else:
            batch = next(self._batches)
        if batch is not None:
            batch = to_device(batch, self.device)
        self._link.load(x.microbatch, batch)

    def _take_input(self, microbatch: int) -> Encoded:
        """Return what was read and encoded for a micro-batch of this step, and count it as used."""
        taken = self._link.take(microbatch)
        batch = taken.batch
        self._sums.add(
            tokens=batch.tokens,
            samples=batch.samples,
            quarantined=len(batch.faults),
            images=len(batch.tilings),
            tiles=taken.tiles,
        )
        # only the last replica has the step's last pack, so it tells the epoch
        if self._replica == self.plan.data - 1:
            self._sums["epoch"].fill_(batch.epochs[-1])
        self._keys[self._replica, microbatch] = batch.keys
        return taken

    def _receive_activation(self, x: Instruction) -> None:
        integers = torch.empty((self._integer_rows, *self._shape[:2]), dtype=torch.int64)
        hidden = torch.empty(
            self._shape,
            dtype=self._dtype,
            device=self.device,
        )
        self._channels.post_receive(x, [integers, hidden])

    def _forward(self, x: Instruction) -> None:
        stage = x.stage
        microbatch = x.microbatch
        key = stage, microbatch
        module = self.stages[stage]
        first = self.plan.first_trainable_stage
        trains = self.is_training and stage >= first

        with torch.set_grad_enabled(trains):
            if stage == 0:
                batch, features, _ = self._take_input(microbatch)
                hidden = module.start(batch, features)
                integers = torch.cat(
                    [batch.positions.view(-1, *batch.labels.shape), batch.labels[None]]
                )
            else:
                integers, hidden = self._take(Op.RECEIVE_ACTIVATION, x)
                hidden.requires_grad_(trains and stage > first)
            position_ids = integers[:-1].squeeze(0)
            labels = integers[-1]

            if stage < self._last_stage:
                output = module(hidden, position_ids)
                self._integers[key] = integers
            elif self.is_training:
                output, supervised = module.loss(hidden, position_ids, labels)
                self._losses[self._replica, microbatch] = output.detach(), supervised
                self._sums.add(loss_sum=output.detach(), supervised_tokens=supervised)
            else:
                loss_sum, predicted = module.predict(hidden, position_ids, labels)
                correct, answers, exact = count_answers(labels, predicted)
                self._sums.add(
                    loss_sum=loss_sum,
                    supervised_tokens=len(predicted),
                    correct_tokens=correct,
                    answers=answers,
                    exact_answers=exact,
                )
                self.predicted[microbatch] = predicted

        if trains and stage > first:
            self._input[key] = hidden
        if trains or stage < self._last_stage:
            self._output[key] = output

    def _send_activation(self, x: Instruction) -> None:
        key = x.stage, x.microbatch
        hidden = self._output.pop(key)
        self._channels.send(x, [self._integers.pop(key), hidden.detach().contiguous()])
        if self.is_training and x.stage >= self.plan.first_trainable_stage:
            # backward needs the graph behind it, not the values
            self._output[key] = get_gradient_edge(hidden)

    def _receive_gradient(self, x: Instruction) -> None:
        gradient = torch.empty(
            self._shape,
            dtype=self._dtype,
            device=self.device,
        )
        self._channels.post_receive(x, [gradient])

    def _backward(self, x: Instruction) -> None:
        output = self._output.pop((x.stage, x.microbatch))
        upstream = None
        if x.stage < self._last_stage:
            (upstream,) = self._take(Op.RECEIVE_GRADIENT, x)
        torch.autograd.backward(output, upstream)

    def _send_gradient(self, x: Instruction) -> None:
        gradient = self._input.pop((x.stage, x.microbatch)).grad
        assert gradient is not None, "the stage's input did not reach its output"
        self._channels.send(x, [gradient.contiguous()])

    def _reduce_gradients(self, x: Instruction) -> None:
        self.weights.reduce_gradients(self._replicas)

    def _reduce_statistics(self, x: Instruction) -> None:
        sums = self._sums
        if self.is_training:
            sums.add(squared_norm=self.weights.squared_norm(self.plan.data, self.device))
        is_finite = torch.isfinite(sums["squared_norm"]) & torch.isfinite(sums["loss_sum"])
        sums.add(bad_ranks=~is_finite, stop=self._wants_stop)
        self._statistics, readings = sums.reduce(self.clock.read())
        self._rank_seconds = self.clock.leave(readings)
        self.requested_stop = self._statistics.stop > 0
        self.requested_save = self._statistics.save > 0

    def _optimizer_step(self, x: Instruction) -> None:
        config = self._config
        sums = self._statistics
        rates = {}
        for group in self._groups:
            rates[group.name] = learning_rate(
                self.step_index,
                config.train.max_steps,
                config.optimizer,
                group.lr,
            )
        norm = math.sqrt(sums.squared_norm) / max(sums.supervised_tokens, 1)
        loss = None
        if sums.supervised_tokens:
            loss = sums.loss_sum / sums.supervised_tokens

        no_update = None
        if sums.bad_ranks:
            self._report_bad_step()
            no_update = "loss or gradient is not finite"
        elif sums.supervised_tokens == 0:
            no_update = "no supervised token in the step"
        else:
            scale = clip_coefficient(norm, config.optimizer.clip_norm)
            self._update(rates, scale / sums.supervised_tokens)
        self.weights.zero_grad()

        lr = rates.pop(REST)
        self._result = StepResult(
            step=self.step_index,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            lr_groups=rates,
            **{name: int(getattr(sums, name)) for name in COUNTS},
            no_update=no_update,
            ranks=self._rank_seconds,
        )

    def _update(
        self,
        rates: Mapping[str, float],
        scale: float,
    ) -> None:
        """Scale the gradients, note which are not zero, and step with each group's rate."""
        for parameter in self.trainable.values():
            parameter.grad.mul_(scale)

        unseen = []
        for group in self._groups:
            if rates[group.name] > 0:
                unseen += [name for name in group.parameters if name not in self.saw_gradient]
        if unseen:
            have_gradient = torch.stack([self.trainable[name].grad.any() for name in unseen])
            self.saw_gradient.update(itertools.compress(unseen, have_gradient.tolist()))

        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["name"]]
        self._deepspeed._take_model_step(None)
        self.weights.write_back()

    def _report_bad_step(self) -> None:
        """Count and record the step; raises NonFiniteError when the run has had too many."""
        allowed = self._config.train.max_bad_steps
        self.bad_steps += 1
        message = report_bad_step(
            self.step_index,
            self._statistics,
            trainable=self.trainable,
            losses=self._losses,
            keys=self._keys,
            file=self._bad_steps_file,
        )
        if self.bad_steps > allowed:
            if allowed:
                message += (
                    f". It is bad step {self.bad_steps} of the run, and "
                    f"train.max_bad_steps={allowed}"
                )
            raise NonFiniteError(message)
