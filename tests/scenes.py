"""A stock LLaVA, its parts as mmtrain reads them, and training data in both forms: what the parity
tests compare.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLVisionConfig,
    Siglip2VisionConfig,
)

from mmtrain.calibration.calibrate import Calibrator
from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.audit import RankAudit
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.optimizer import clip_coefficient, learning_rate
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.stages import streamed_layers
from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.models import models_of
from mmtrain.facts.projector import connector
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.layouts.mrope import grid_positions
from mmtrain.model.encoder.vision import model_class
from mmtrain.model.stage import build_stage
from mmtrain.model.trained.projector import make_projector
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.plan.calibration import calibration_key, cpu_device, gpu_device
from mmtrain.plan.costs import Models
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan
from mmtrain.plan.schedule import leading_encodes, training_schedule

DEVICE = torch.device(os.environ.get("MMTRAIN_TEST_DEVICE", "cpu"))  # of this rank
VOCAB = 128
IMAGE_TOKEN = 127  # stock LLaVA marks image positions by a row of the vocabulary
WIDTH = 64
IMAGE_SIZE = 16
NATIVE_PATCH = 4  # pixels a side
NATIVE = {  # keys of model.vision and of model.projector, by kind of `save_native_vision`
    "naflex": ({"final_norm": True}, {"type": "shuffle_mlp2x_gelu"}),
    "qwen": ({"merger": True}, {"type": "linear"}),
}
TOKENS_PER_IMAGE = 4
LAYERS = 4


@dataclass(frozen=True)
class Document:
    """One conversation: ids with IMAGE_POSITION, labels[t] = token that t predicts, images (N, 3,
    H, W) or None.

    Where `tilings` say so, images are the tiles of fewer.
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    images: torch.Tensor | None
    tilings: tuple[Tiling, ...] = ()


Microbatch = Sequence[Sequence[Document]]  # rows of documents


def save_parts(
    folder: Path, layers: int = LAYERS, tied: bool = False, vision_layers: int = 3
) -> None:
    """A random llama in folder/llm and a random CLIP tower in folder/vision, with signals that do
    not vanish.
    """
    torch.manual_seed(7)
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=vision_layers,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=8,
        hidden_act="quick_gelu",
        initializer_factor=3.0,
    )
    LlamaForCausalLM(text).save_pretrained(folder / "llm")
    CLIPVisionModel(vision).save_pretrained(folder / "vision")
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    CLIPImageProcessorPil(size=size, crop_size=size).save_pretrained(folder / "vision")


def save_native_vision(folder: Path, kind: str, layers: int = 3, width: int = 32) -> None:
    """A random encoder that takes images of any size: "naflex" (SigLIP 2), or "qwen" (Qwen2.5-VL's,
    with windows).
    """
    torch.manual_seed(7)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width // 2, "patch_size": NATIVE_PATCH}
    if kind == "naflex":
        heads = {
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_patches": 16,
            "vision_use_head": False,
        }
        config = Siglip2VisionConfig(**sizes, **heads)
    else:
        windows = {
            "window_size": 4 * NATIVE_PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 24,
        }
        config = Qwen2_5_VLVisionConfig(**sizes, depth=layers, num_heads=2, **windows)
    # older versions of transformers have no AutoModel of Qwen2.5-VL's
    perturb(model_class(FAMILIES[config.model_type])(config)).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def native_keys(folder: Path, kind: str) -> dict[str, Any]:
    """Keys of `make_config` for a run with such an encoder in `folder`, images of 2 to 9
    positions.
    """
    vision, projector = NATIVE[kind]
    bounds = {"layout": "native", "select_layer": -1, "min_positions": 2, "max_positions": 9}
    return {
        "model__vision": {"name": str(folder), **bounds, **vision},
        "model__projector": projector,
    }


def native_documents(layout: ImageLayout, count: int, seed: int = 0) -> list[Document]:
    """Documents of none, one or two images of several shapes."""
    shapes = ((40, 30), (10, 60), (60, 7), (30, 45), (20, 20))
    made = []
    for number in range(seed, seed + count):
        images = [shapes[(number + image) % len(shapes)] for image in range((1, 0, 2)[number % 3])]
        tilings = tuple(layout.tiling(*size) for size in images)
        made.append(make_document(number, 0, image_size=layout.tile_size, tilings=tilings))
    return made


def stock_llava(
    folder: Path, seed: int, dtype: torch.dtype = torch.float32
) -> LlavaForConditionalGeneration:
    """LlavaForConditionalGeneration from the same weights, frozen but for the projector."""
    llm = AutoModelForCausalLM.from_pretrained(folder / "llm", dtype=dtype)
    vision = CLIPVisionModel.from_pretrained(folder / "vision", dtype=dtype)
    config = LlavaConfig(
        vision_config=vision.config,
        text_config=llm.config,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(llm.model.state_dict())
    model.lm_head.load_state_dict(llm.lm_head.state_dict())
    model.model.vision_tower.load_state_dict(vision.state_dict())
    projector = make_projector(connector(ProjectorSection(type="mlp2x_gelu"), 32, WIDTH), seed)
    model.model.multi_modal_projector.load_state_dict(projector.state_dict())
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


def stock_loss_sum(model: PreTrainedModel, document: Document) -> torch.Tensor:
    """Sum of token losses of one document on its own, through the stock model's forward."""
    ids = torch.tensor([[IMAGE_TOKEN if i == IMAGE_POSITION else i for i in document.ids]])
    images = {} if document.images is None else {"pixel_values": document.images}
    logits = model(input_ids=ids, use_cache=False, **images).logits[0]
    return F.cross_entropy(
        logits.float(), torch.tensor(document.labels), ignore_index=IGNORE, reduction="sum"
    )


def documents_of(microbatches: Sequence[Microbatch]) -> list[Document]:
    return [document for microbatch in microbatches for row in microbatch for document in row]


def projector_of(model: LlavaForConditionalGeneration) -> dict[str, torch.Tensor]:
    """The projector's tensors by their names in mmtrain."""
    return {
        f"projector.{name}": p for name, p in model.model.multi_modal_projector.named_parameters()
    }


def stock_gradients(
    model: PreTrainedModel,
    microbatches: Sequence[Microbatch],
    trainable: Mapping[str, torch.Tensor] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss per supervised token of a step and its gradients (default: the projector's), one
    document at a time.
    """
    trainable = trainable or projector_of(model)
    documents = documents_of(microbatches)
    tokens = sum(label != IGNORE for document in documents for label in document.labels)
    model.zero_grad()
    total = 0.0
    for document in documents:
        loss = stock_loss_sum(model, document) / tokens
        if loss.requires_grad:  # a document without images has nothing to teach the projector
            loss.backward()
        total += float(loss.detach())
    return total, {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trainable.items()
    }


def train_stock(
    model: PreTrainedModel,
    steps: Sequence[Sequence[Microbatch]],
    config: RunConfig,
    trainable: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    """Train with plain torch: loss and gradient norm of each step, gradients of the first.

    Rates are those of `optimizer`; without one, AdamW follows the schedule of `config`.
    """
    follows = optimizer is None
    optimizer = optimizer or torch.optim.AdamW(trainable.values(), weight_decay=0.0)
    history: list[tuple[float, float]] = []
    first: dict[str, np.ndarray] = {}
    for s, step in enumerate(steps):
        loss, gradients = stock_gradients(model, step, trainable)
        first = first or {name: gradient.double().numpy() for name, gradient in gradients.items()}
        norm = float(torch.nn.utils.get_total_norm(gradients.values()))
        for name, parameter in trainable.items():
            parameter.grad = gradients[name] * clip_coefficient(norm, config.optimizer.clip_norm)
        for group in optimizer.param_groups if follows else []:
            group["lr"] = learning_rate(
                s, config.train.max_steps, config.optimizer, config.optimizer.lr
            )
        optimizer.step()
        history.append((loss, norm))
    return history, first


def make_steps(count: int, images: int = 3) -> tuple[tuple[Microbatch, ...], ...]:
    """Steps of four micro-batches of two documents, which have 0 to `images` - 1 images in turn."""
    return tuple(
        tuple(
            [
                [
                    make_document(100 * s + 10 * i + j, images=(i + j) % images, text=8 + i + j)
                    for j in range(2)
                ]
            ]
            for i in range(4)
        )
        for s in range(count)
    )


def make_document(
    seed: int,
    images: int = 1,
    text: int = 12,
    labelled: bool = True,
    positions: int = TOKENS_PER_IMAGE,
    image_size: int = IMAGE_SIZE,
    tilings: tuple[Tiling, ...] = (),
) -> Document:
    """Images first, each in so many positions or as `tilings` say, then text, its second half the
    answer.
    """
    rng = random.Random(seed)
    words = [rng.randrange(1, IMAGE_TOKEN) for _ in range(text)]
    taken = images * positions
    if tilings:
        images, taken = (
            sum(tiling.tiles for tiling in tilings),
            sum(tiling.positions for tiling in tilings),
        )
    ids = [IMAGE_POSITION] * taken + words
    answer = len(ids) - text // 2
    labels = [
        ids[t + 1] if labelled and answer <= t + 1 < len(ids) else IGNORE for t in range(len(ids))
    ]
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(images, 3, image_size, image_size, generator=generator) if images else None
    return Document(tuple(ids), tuple(labels), pixels, tilings)


def _uncut(document: Document) -> tuple[Tiling, ...]:
    images = 0 if document.images is None else len(document.images)
    return (Tiling(0, 0, document.ids.count(IMAGE_POSITION) // images),) * images if images else ()


def as_batch(microbatch: Microbatch, pack_length: int, has_grid: bool = False) -> PackedBatch:
    """Rows of documents, each padded by one more document without labels."""
    ids, positions, labels, images = [], [], [], []
    for row in microbatch:
        row_ids = [i for d in row for i in d.ids]
        row_positions = [t for d in row for t in range(len(d.ids))]
        row_labels = [i for d in row for i in d.labels]
        padding = pack_length - len(row_ids)
        assert padding >= 0
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + list(range(padding)))
        labels.append(row_labels + [IGNORE] * padding)
        images += [d.images for d in row if d.images is not None]
    documents = [d for row in microbatch for d in row]
    return PackedBatch(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        labels=torch.tensor(labels),
        tiles=torch.cat(images) if images else None,
        keys=tuple(str(i) for i in range(len(documents))),
        tilings=tuple(tiling for d in documents for tiling in d.tilings or _uncut(d)),
        tokens=sum(len(d.ids) for d in documents),
        epochs=(0,) * len(microbatch),
        samples_of_packs=tuple(map(len, microbatch)),
        grid_positions=_grid_positions(microbatch, pack_length) if has_grid else None,
    )


def _grid_positions(microbatch: Microbatch, pack_length: int) -> torch.Tensor:
    rows = []
    for row in microbatch:
        parts = [
            grid_positions(
                np.array(d.ids) == IMAGE_POSITION, [(x.rows, x.columns) for x in d.tilings]
            )
            for d in row
        ]
        padding = pack_length - sum(part.shape[1] for part in parts)
        rows.append(np.concatenate([*parts, np.tile(np.arange(padding), (3, 1))], axis=1))
    return torch.from_numpy(np.stack(rows, axis=1))


def make_config(folder: Path, **overrides: Any) -> RunConfig:
    """A run over the parts in `folder`; overrides are `section__key=value`."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "parity", "dir": str(folder / "runs")},
        "model": {
            "llm": {"path": str(folder / "llm"), "dtype": "float32"},
            "vision": {"name": str(folder / "vision")},
        },
        "parallel": {},
        "data": {"shards": "none.tar", "pack_length": 64},
        "train": {"packs_per_step": 4, "max_steps": 20},
        "optimizer": {"lr": 1e-2},
    }
    for path, value in overrides.items():
        section = tree
        *parents, key = path.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return RunConfig.model_validate(tree)


def with_slices(plan: Plan, slices: Sequence[int], ahead: Sequence[int], lead: int = 1) -> Plan:
    """The same plan with so many blocks of the encoder on each rank, each slice so many
    micro-batches ahead.

    Whether that is faster or not. A rank behind 0 without blocks holds no slice, and its `ahead`
    means nothing.
    """
    chain = tuple(rank for rank, blocks in enumerate(slices) if blocks or rank == 0)
    shape = (
        plan.pipeline,
        plan.microbatches_per_step,
        plan.first_trainable_stage,
        plan.stages_per_rank,
    )
    encodes = [
        encodes and replace(encodes, ahead=ahead[rank])
        for rank, encodes in enumerate(leading_encodes(plan.schedule, chain, lead))
    ]
    ranks = []
    for rank in plan.ranks:
        first, *others = rank.stages
        begin = sum(slices[: rank.pipeline])
        held = (
            (begin, begin + slices[rank.pipeline])
            if len(chain) > 1 and rank.pipeline in chain
            else None
        )
        ranks.append(replace(rank, stages=(replace(first, encoder=held), *others)))
    chain_of_plan = tuple(encodes)
    schedule = training_schedule(*shape, chain_of_plan)
    return replace(plan, ranks=tuple(ranks), schedule=schedule, chain=chain_of_plan)


def with_prefetch(plan: Plan, prefetched: int) -> Plan:
    """The same plan with the encoder on rank 0 and so many micro-batches prefetched, whether that
    is faster or not.
    """
    return with_slices(plan, (1, *[0] * (plan.pipeline - 1)), (prefetched,) * plan.pipeline)


@dataclass(frozen=True)
class Case:
    """A run to execute on real ranks: the global micro-batches of every step, in order."""

    config: RunConfig
    steps: tuple[tuple[Microbatch, ...], ...]
    prefetched: int = 0  # micro-batches encoded before their step begins
    # what parameters begin with, by global name
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


def join() -> None:
    """Join the ranks of run_ranks, unless this rank has."""
    if not dist.is_initialized():
        join_process_group(DEVICE, 60)


def calibrate(folder: Path, config: RunConfig) -> tuple[Models, Path]:
    """Calibrate on this machine, in every rank; the models of the run, and the file of its
    calibration.
    """
    models = models_of(config)
    device = (
        gpu_device(torch.cuda.get_device_name())
        if DEVICE.type == "cuda"
        else cpu_device(config.parallel)
    )
    calibrator = Calibrator(
        config, models, make_plan(config), DEVICE, calibration_key(config, models, device)
    )
    calibrator.warm_up(0.0)
    calibrator.round()
    found, file = calibrator.finish(), folder / "calibration.json"
    if dist.get_rank() == 0:
        found.save(file)
    dist.barrier()
    return models, file


def make_engine(
    config: RunConfig,
    plan: Plan | None = None,
    streamed: StreamedLayers | None = None,
    **arguments: Any,
) -> FrozenPipelineEngine:
    """This rank's engine for a plan (None: the planner's), its stages loaded. Collective."""
    join()
    plan = plan or make_plan(config)
    streamed = streamed or layers_streamed_here(plan)
    mine = plan.ranks[dist.get_rank()].stages
    stages = {
        stage.stage: build_stage(config, stage, device=DEVICE, streamed=streamed) for stage in mine
    }
    return FrozenPipelineEngine(config, plan, stages, **arguments)


def make_audit(engine: FrozenPipelineEngine) -> RankAudit:
    return RankAudit(
        engine.plan.ranks[engine.global_rank], engine.stages, engine.optimizer, engine.trainable
    )


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies that go from rank to rank, and that training leaves alone."""
    return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in tensors.items()}


def execute(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One rank's part of each case (called by run_ranks): losses, norms, first gradients,
    instructions, audit.
    """
    return [_execute(case) for case in cases]


def _execute(case: Case) -> dict[str, Any]:
    config = case.config
    plan = with_prefetch(make_plan(config), case.prefetched)
    executed = []
    gradients: list[dict[str, Any]] = []

    def on_instruction(step: int, instruction: Instruction) -> None:
        executed.append((str(instruction.op), instruction.stage, instruction.microbatch))
        if instruction.op is Op.OPTIMIZER_STEP:
            # All ranks hold the reduced sums; the division by the step's tokens comes next.
            tokens = float(engine._statistics[1])
            gradients.append(
                {
                    n: (p.grad / max(tokens, 1)).double().cpu().numpy()
                    for n, p in engine.trainable.items()
                }
            )

    engine = make_engine(config, plan, on_instruction=on_instruction)
    engine.weights.load(
        {name: case.weights.get(name, p) for name, p in engine.trainable.items()}, {}
    )
    audit = make_audit(engine)
    results = []
    mine, share = audit.plan, plan.microbatches_per_step
    mine_of_all = (m for step in case.steps for m in step[mine.data * share :][:share])
    has_grid = models_of(config).has_grid_positions
    batches = (
        as_batch(microbatch, config.data.pack_length, has_grid) for microbatch in mine_of_all
    )
    for _ in case.steps:
        results.append(engine.train_step(batches if mine.pipeline == 0 else None))
        audit.check_versions()
    return {
        "results": results,
        "gradients": gradients,
        "executed": executed,
        "audit": audit.finish(engine.saw_gradient),
        "parameters": arrays(engine.trainable),
        "frozen": {
            n: bits(p)
            for s in engine.stages.values()
            for n, p in s.global_parameters()
            if not p.requires_grad
        },
        "optimizer": type(engine.optimizer).__name__,
    }


def layers_streamed_here(plan: Plan) -> StreamedLayers | None:
    """Where this rank keeps the layers that its plan streams."""
    rank, host = dist.get_rank(), torch.device("cpu")
    return streamed_layers(plan, rank, DEVICE, replica_group(plan, rank, host, 60), 60)


def bits(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bytes."""
    return hashlib.sha256(
        tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
    ).hexdigest()


def merged(ranks: list[dict[str, Any]], key: str, step: int = 0) -> dict[str, np.ndarray]:
    """Trainable tensors of all ranks by name; replicas must agree."""
    out: dict[str, np.ndarray] = {}
    for rank in ranks:
        values = rank[key][step] if key == "gradients" else rank[key]
        for name, value in values.items():
            if name in out:
                np.testing.assert_allclose(value, out[name], rtol=1e-6, atol=1e-9)
            out[name] = value
    return out


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def perturb(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights everywhere: fresh norms, biases and layer scales would hide one that is lost
    or misplaced.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def images(size: int) -> torch.Tensor:
    """Three images of noise, (3, 3, size, size)."""
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
