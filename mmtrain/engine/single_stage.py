"""Run one stage by itself, on a micro-batch of random numbers: before the first message, and to
time it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.stream.packs import PackedBatch, to_device
from mmtrain.engine.optimizer import MasterWeights, make_optimizer
from mmtrain.facts.models import Models
from mmtrain.layouts.mrope import grid_positions
from mmtrain.model.llm.compiled import Compiler, compiling
from mmtrain.model.llm.kernels import Backend
from mmtrain.model.llm.loss import count_answers
from mmtrain.model.stage import Stage
from mmtrain.plan.costs import typical_tiling, workload


def expected_batch(
    config: RunConfig,
    models: Models,
    seed: int = 0,
) -> PackedBatch:
    """Return a micro-batch on the CPU as the planner expects it: documents of one image, if any,
    and text; padding.

    Labels end each document, as many as `data.expected_supervised_fraction` asks for, at least one.
    It holds a whole number of images, at least one, all of the size nearest to what the planner
    expects.
    """
    packs = config.train.packs_per_microbatch
    length = config.data.pack_length
    tiling = typical_tiling(config.data, models.layout)
    image_tokens = 0 if tiling is None else tiling.positions
    document_tokens = min(length, image_tokens + config.data.expected_text_tokens)
    per_pack = max(1, length // document_tokens)
    documents = packs * per_pack
    expected = workload(config.train, config.data, models.layout)
    supervised = max(1, round(expected.supervised / documents))

    # each document: the image, then text, whose last tokens are supervised
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(
        0,
        models.llm.vocab_size,
        (packs, length),
        generator=generator,
    )
    labels = torch.full((packs, length), IGNORE)
    for begin in range(0, per_pack * document_tokens, document_tokens):
        last = begin + document_tokens - 1  # predicts nothing
        input_ids[:, begin : min(begin + image_tokens, last + 1)] = IMAGE_POSITION
        labels[:, max(begin, last - supervised) : last] = 1

    tilings = ()
    tiles = None
    if tiling is not None:
        tilings = (tiling,) * documents
        size = models.vision.image_size
        shape = tiling.tiles * documents, 3, size, size
        tiles = torch.randint(
            0,
            256,
            shape,
            dtype=torch.uint8,
            generator=generator,
        )

    batch = PackedBatch(
        input_ids,
        _in_pack(torch.arange(document_tokens), per_pack, length).repeat(packs, 1),
        labels,
        tiles,
        keys=tuple(map(str, range(documents))),
        tilings=tilings,
        tokens=documents * document_tokens,
        epochs=(0,) * packs,
        samples_of_packs=(per_pack,) * packs,
    )
    if models.layout.has_grid_positions:
        is_image = np.arange(document_tokens) < image_tokens
        grid = torch.from_numpy(grid_positions(is_image, batch.grids[:1]))
        batch.grid_positions = _in_pack(grid, per_pack, length)[:, None].repeat(1, packs, 1)
    return batch


def _in_pack(
    positions: Tensor,
    documents: int,
    length: int,
) -> Tensor:
    """Repeat a document's positions (..., T) for all documents of a pack; number the padding."""
    repeats = [1] * (positions.ndim - 1)
    filled = positions.repeat(*repeats, documents)
    rest = torch.arange(length - filled.shape[-1]).expand(*positions.shape[:-1], -1)
    return torch.cat([filled, rest], dim=-1)


class SingleStage:
    """A stage to run forward and backward, with the front (its input is then `batch`), the head, or
    neither.

    `input_gradient`: something before the stage trains. `backward`: something before it or in it
    trains.
    """

    def __init__(
        self,
        module: Stage,
        batch: PackedBatch,
        *,
        input_gradient: bool,
        backward: bool,
    ) -> None:
        self.module = module
        self.batch = batch
        self.runs_backward = backward
        self.input_gradient = input_gradient
        device = next(module.parameters()).device
        shape = (*batch.position_ids.shape, module.language.hidden_size)
        self.input = torch.randn(
            shape,
            dtype=module.dtype,
            device=device,
        )
        self.upstream: Tensor | None = None
        if not module.language.has_head:
            self.upstream = torch.randn_like(self.input)

        vision = module.vision

        def made_up(shape: Sequence[int]) -> Tensor:
            return torch.randn(
                len(batch.tiles),
                *shape,
                dtype=vision.dtype,
                device=device,
            )

        self._taken: PackedBatch | Tensor | None = None
        if module.projector is not None:
            self._taken = batch
        elif vision is not None and batch.tiles is not None:
            self._taken = made_up(vision.hidden_shape)
        self.features = self.encode()
        # made by another rank's slice
        if self.features is not None and not vision.is_last:
            self.features = made_up(vision.feature_shape)
        self._kept: Any = None

    def prepare(self, *, recomputes: bool = False) -> None:
        """Let all decoder layers recompute their activations or none, and encode again where the
        encoder trains.
        """
        language = self.module.language
        count = language.last - language.first if recomputes else 0
        language.recompute(count)
        if not self.module.encoder_is_frozen:
            self.features = self.encode()  # its graph is used up by each backward

    def encode(self) -> Tensor | None:
        return self.module.encode(self._taken, self.batch.grids)

    @torch.no_grad()
    def forward_only(self) -> None:
        """Run encoder and layers forward once without gradients; keep no output."""
        self.encode()
        self._run()
        self._kept = None
        if self.module.streamed is not None:
            self.module.streamed.end()

    def forward(self) -> None:
        with torch.set_grad_enabled(self.runs_backward):
            self._run()

    def _run(self) -> None:
        if self.module.language.has_embedding:
            hidden = self.module.start(self.batch, self.features)
        else:
            hidden = self.input.detach().requires_grad_(self.input_gradient)
        if self.module.language.has_head:
            self._kept, _ = self.module.loss(hidden, self.batch.positions, self.batch.labels)
        else:
            self._kept = self.module(hidden, self.batch.positions)

    def release_output(self) -> None:
        """Let go of the output as after sending it: backward needs the graph behind it, not the
        values.
        """
        if self.runs_backward and not self.module.language.has_head:
            self._kept = get_gradient_edge(self._kept)
        elif not self.runs_backward:
            self._kept = None

    def backward(self) -> None:
        kept = self._kept
        self._kept = None
        if self.runs_backward:
            torch.autograd.backward(kept, self.upstream)


def choose_kernels(compiler: Compiler, stages: Sequence[SingleStage]) -> set[Backend]:
    """Let `compiler` try every class of layers on the micro-batch of `stages`, and choose."""
    for alone in stages:
        alone.module.compile_layers(compiler)

    def run_layers() -> None:
        for alone in stages:
            alone.forward_only()

    return compiler.choose(run_layers)


def warm_up(
    host: PackedBatch,
    stages: Mapping[int, Stage],
    masters: MasterWeights,
    first_trainable_stage: int,
    device: torch.device,
    compiler: Compiler | None = None,
) -> set[Backend]:
    """Run each kind of work once on this rank, on the batch `host`: stages, a prediction, an update
    of throwaway weights.

    A GPU loads a kernel at its first call, and asks the driver for memory. Each may wait for all
    work of the device, also for messages posted ahead, whose sender may wait for this very rank. So
    it happens while no message is under way. What first happens in a step all the same cannot hang,
    since the first step runs `in_common_order`. A later micro-batch that is larger than any before
    can still hang.

    Returns the kernels that `compiler` chooses, none without one. Nothing is compiled afterwards.

    No weight, gradient, optimizer state or random generator changes. Cost: time and memory of a
    micro-batch, and the inputs of all stages.
    """
    batch = to_device(host, device)
    gpus = [device] if device.type == "cuda" else []
    kernels = set()
    with torch.random.fork_rng(gpus), compiling():
        singles = []
        for number, module in stages.items():
            alone = SingleStage(
                module,
                batch,
                input_gradient=number > first_trainable_stage,
                backward=number >= first_trainable_stage,
            )
            singles.append(alone)
        if compiler is not None:
            kernels = choose_kernels(compiler, singles)
        for alone in singles:
            module = alone.module
            alone.forward()
            alone.backward()
            if module.language.has_head:
                with torch.no_grad():
                    _, predicted = module.predict(alone.input, batch.positions, batch.labels)
                    count_answers(batch.labels, predicted)
            if module.streamed is not None:
                module.streamed.end()
    masters.zero_grad()
    if masters.by_name:
        weight = torch.nn.Parameter(torch.zeros(8, 8, device=device))
        weight.grad = torch.ones_like(weight)
        make_optimizer({"throwaway": weight}, masters.config).step()
    if device.type == "cuda":
        # allocating page-locked memory also waits for the device: have twice as much
        for value in vars(host).values():
            if isinstance(value, Tensor):
                torch.empty(
                    2 * value.nbytes,
                    dtype=torch.uint8,
                    pin_memory=True,
                )
        torch.cuda.synchronize(device)
    return kernels
