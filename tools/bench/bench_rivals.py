"""The contestants: stock transformers, DeepSpeed's pipeline, torch's pipelining, mmtrain."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import torch.distributed as dist
from bench_models import LEARNING_RATE, SELECT_LAYER, ModelSize, PaddedBatch
from bench_race import FirstGradients, Gradients
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.optimizer import NoOpOptimizer
from mmtrain.facts.projector import connector
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.stage import Stage, build_stage
from mmtrain.model.trained.projector import make_projector
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan

Settings = Literal["script", "tuned"]


class Stock:
    """A stock model and an endless iterator over steps, each a list of batches. `settings` as
    above.
    """

    def __init__(
        self,
        model: LlavaForConditionalGeneration,
        settings: Settings,
        steps: Iterator[Sequence[PaddedBatch]],
    ) -> None:
        self._model = model
        self._steps = steps
        self._device = model.lm_head.weight.device
        self._autocast = torch.autocast(
            self._device.type, torch.bfloat16, model.lm_head.weight.dtype == torch.bfloat16
        )
        if settings == "script":
            language = model.model.language_model
            with warnings.catch_warnings():
                # a later transformers calls it otherwise
                warnings.simplefilter("ignore", FutureWarning)
                language.gradient_checkpointing_enable()
            model.enable_input_require_grads()
            language.train()  # in eval mode transformers recomputes nothing; there is no dropout
        projector = dict(model.model.multi_modal_projector.named_parameters())
        self._optimizer = torch.optim.AdamW(projector.values(), lr=LEARNING_RATE, weight_decay=0.0)
        self._first = FirstGradients(self._optimizer, projector)

    @property
    def gradients(self) -> Gradients | None:
        return self._first.found

    def step(self) -> float:
        batches = next(self._steps)
        tokens = torch.tensor(sum(batch.supervised for batch in batches), device=self._device)
        total = torch.zeros((), device=self._device)
        for batch in batches:
            inputs = {
                name: tensor.to(self._device, non_blocking=True)
                for name, tensor in vars(batch).items()
            }
            with self._autocast:
                loss = self._model(**inputs, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)


class Front(nn.Module):
    """Encoder, trainable projector (fp32) and embedding."""

    def __init__(
        self, llm: LlamaForCausalLM, shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.embedding = llm.model.embed_tokens
        self.vision = load_vision(str(folder / "vision"), SELECT_LAYER, dtype)
        operations = connector(ProjectorSection(type="mlp2x_gelu"), shape.vision_width, shape.width)
        self.projector = make_projector(operations, seed)
        self.image_token = shape.image_token

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        input_ids, pixels = inputs
        embeddings = self.embedding(input_ids)
        with torch.no_grad():
            features = self.vision(pixels)
        image_embeddings = self.projector(features.float()).to(embeddings.dtype)
        return embeddings.masked_scatter(
            (input_ids == self.image_token)[..., None], image_embeddings
        )


class Decoder(nn.Module):
    """One decoder layer; what it rotates by is made once for each length."""

    def __init__(self, llm: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        self.layer = llm.model.layers[index]
        self.rotary = llm.model.rotary_emb
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        if length not in self._angles:
            positions = torch.arange(length, device=hidden.device)[None]
            with torch.no_grad():
                self._angles[length] = self.rotary(hidden, positions)
        return self.layer(
            hidden, attention_mask=None, position_embeddings=self._angles[length], use_cache=False
        )


class Head(nn.Module):
    """Final norm and logits of every position."""

    def __init__(self, llm: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm = llm.model.norm
        self.head = llm.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))


def make_layers(shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int) -> list[nn.Module]:
    """All layers of the model in `folder`, frozen but for the projector."""
    llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=dtype, attn_implementation="sdpa")
    llm.eval().requires_grad_(False)
    decoder = [Decoder(llm, index) for index in range(shape.layers)]
    return [Front(llm, shape, folder, dtype, seed), *decoder, Head(llm)]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss over the supervised positions, in nats."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE
    )


Partition = Literal["parameters", "uniform"]


class Layer(nn.Module):
    """A layer that exists already, in the form in which DeepSpeed builds its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.layer(inputs)


class DeepSpeedPipeline:
    """One rank of `stages`. `batches` is an endless iterator over micro-batches, read on the first
    and last rank.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        partition: Partition,
        stages: int,
        microbatches: int,
        batches: Iterator[PaddedBatch],
    ) -> None:
        deepspeed.init_distributed(verbose=False)  # takes the default group as it is
        module = PipelineModule(
            [LayerSpec(Layer, layer) for layer in layers],
            num_stages=stages,
            partition_method=partition,
            loss_fn=token_loss,
        )
        self.parts = [int(bound) for bound in module.parts]
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = (
            torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0)
            if trainable
            else NoOpOptimizer()
        )
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=trainable,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": microbatches,
                "gradient_clipping": 0.0,
                "steps_per_print": None,
            },
        )
        self._batches = ((((b.input_ids, b.pixel_values)), b.shifted_labels) for b in batches)
        front = next((layer for layer in layers if isinstance(layer, Front)), None)
        held = front is not None and bool(trainable)
        self._first = (
            FirstGradients(optimizer, dict(front.projector.named_parameters())) if held else None
        )

    @property
    def gradients(self) -> Gradients | None:
        return None if self._first is None else self._first.found

    def step(self) -> float:
        return float(self._engine.train_batch(self._batches))


class Layers(nn.Module):
    """Contiguous layers as one module; the front takes two tensors."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs if isinstance(self.layers[0], Front) else inputs[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TorchPipeline:
    """One rank of `stages`, each rank one stage. `batches` is an endless iterator over
    micro-batches.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        stages: int,
        microbatches: int,
        batches: Iterator[PaddedBatch],
        device: torch.device,
    ) -> None:
        self._rank, self._last, self._device = dist.get_rank(), stages - 1, device
        bounds = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
        self.parts = bounds
        mine = Layers(layers[bounds[self._rank] : bounds[self._rank + 1]])
        stage = PipelineStage(mine, self._rank, stages, device)
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=token_loss)
        self._steps = iter(lambda: list(itertools.islice(batches, microbatches)), [])
        trained = [p for p in mine.parameters() if p.requires_grad]
        self._optimizer = (
            torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0) if trained else None
        )
        self._first = None
        if self._optimizer is not None:
            self._first = FirstGradients(
                self._optimizer, dict(layers[0].projector.named_parameters())
            )

    @property
    def gradients(self) -> Gradients | None:
        return None if self._first is None else self._first.found

    def step(self) -> float:
        batches = next(self._steps)
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            ids, pixels = (
                torch.cat([getattr(b, name) for b in batches])
                for name in ("input_ids", "pixel_values")
            )
            self._schedule.step(ids, pixels)
        elif self._rank == self._last:
            labels = torch.cat([batch.shifted_labels for batch in batches])
            self._schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        loss = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self._device)
        )
        dist.broadcast(loss, self._last)  # whoever prints it is on rank 0
        return float(loss)


class Mmtrain:
    """One rank of a run. `batches` is one endless iterator over micro-batches: the engine may read
    ahead in it.

    `stages` are this rank's stages, loaded from the configuration's files by default.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        batches: Iterator[PackedBatch],
        device: torch.device,
        stages: Mapping[int, Stage] | None = None,
    ) -> None:
        mine = plan.ranks[dist.get_rank()]
        if stages is None:
            stages = {
                stage.stage: build_stage(config, stage, device=device) for stage in mine.stages
            }
        self.gradients: Gradients | None = None
        self.idle: list[float] = []
        """Share of the latest step that each rank waited."""
        self._sums: Gradients = {}
        self._batches = batches if mine.pipeline == 0 else None
        self._engine = FrozenPipelineEngine(config, plan, stages, self._keep_gradients)
        self.kernels = self._engine.kernels

    def step(self) -> float:
        result = self._engine.train_step(self._batches)
        if self._sums:
            self.gradients = {name: g / result.supervised_tokens for name, g in self._sums.items()}
            self._sums = {}
        self.idle = [rank.idle_fraction for rank in result.ranks]
        return result.loss

    def _keep_gradients(self, step: int, instruction: Instruction) -> None:
        """Right before the first update: gradients are still those of the sum over the step's
        tokens.
        """
        if instruction.op is Op.OPTIMIZER_STEP:
            self._sums = {
                n.removeprefix("projector."): p.grad.clone()
                for n, p in self._engine.trainable.items()
            }
            self._engine.on_instruction = None
