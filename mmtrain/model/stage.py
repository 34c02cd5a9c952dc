"""What one pipeline stage holds, with one boundary contract.

stage 0       PackedBatch --embed, encode, project, fuse--> hidden (B, L, D)
every stage   hidden (B, L, D), position_ids (B, L) --decoder layers--> hidden (B, L, D)
last stage    hidden (B, L, D), labels (B, L) --norm, head--> loss sum, supervised tokens (or predicted tokens)

Between stages travel hidden states in the LLM's dtype, position_ids and labels (int64), nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from mmtrain.config import RunConfig
from mmtrain.data.packs import PackedBatch
from mmtrain.data.samples import IMAGE_POSITION
from mmtrain.model.fusion import fuse
from mmtrain.model.init_from import read_projector
from mmtrain.model.language import LanguageSlice, load_slice
from mmtrain.model.loss import loss_sum_and_predictions, supervised_loss_sum
from mmtrain.model.projector import make_projector
from mmtrain.model.trainable import set_trainable
from mmtrain.model.vision import VisionTower, load_vision
from mmtrain.plan.planner import StagePlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Front(nn.Module):
    """Vision encoder and projector: images (N, 3, H, W) -> image embeddings (N, T, D), always on stage 0."""

    def __init__(self, vision: VisionTower, projector: nn.Module) -> None:
        super().__init__()
        self.vision = vision
        self.projector = projector

    def forward(self, images: torch.Tensor | None) -> torch.Tensor:
        """Embed images; without any, a dummy runs so that trainable parameters stay in the graph.

        Without the dummy a replica whose micro-batches hold no image would have no gradient to reduce while its peers
        wait for one.
        """
        device = next(self.projector.parameters()).device
        trains = any(p.requires_grad for p in self.vision.parameters())
        if images is None and not trains:
            features = torch.zeros(1, 1, self.vision.width, device=device)
        else:
            size = self.vision.image_size
            pixels = torch.zeros(1, 3, size, size, device=device) if images is None else images
            with contextlib.nullcontext() if trains else torch.no_grad():
                features = self.vision(pixels)
        return self.projector(features.float())


class Chunk(nn.Module):
    """The contents of one stage: contiguous layers that run as one forward call."""

    def __init__(self, language: LanguageSlice, front: Front | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.language = language
        self.front = front
        self.dtype = dtype

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of the stage with its global name."""
        if self.front is not None:
            yield from self.front.vision.global_parameters()
            for name, parameter in self.front.projector.named_parameters():
                yield f"projector.{name}", parameter
        yield from self.language.global_parameters()

    def start(self, batch: PackedBatch) -> torch.Tensor:
        """Stage 0: token ids and images of a micro-batch -> hidden (B, L, D)."""
        assert self.front is not None, "only stage 0 reads batches"
        image_positions = batch.input_ids == IMAGE_POSITION
        embeddings = self.language.embed(batch.input_ids.masked_fill(image_positions, 0))
        image_embeddings = self.front(batch.images)
        if batch.images is None:
            hidden = fuse(embeddings, image_positions, None)
            return hidden + 0.0 * image_embeddings.sum().to(hidden.dtype)
        return fuse(embeddings, image_positions, image_embeddings)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run the stage's decoder layers (and the final norm, on the last stage): (B, L, D) -> (B, L, D)."""
        return self.language(hidden, position_ids).to(self.dtype)

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Last stage: normed hidden (B, L, D) and labels (B, L) -> (loss sum in nats, supervised tokens)."""
        language = self.language
        return supervised_loss_sum(hidden, labels, language.logits, language.vocab_size, language.head_parameters())

    def predict(self, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Last stage, without gradients: (loss sum in nats, arg max (S,) at the S supervised positions, row-major)."""
        language = self.language
        return loss_sum_and_predictions(hidden, labels, language.logits, language.vocab_size)


def build_chunk(
    config: RunConfig,
    stage: StagePlan,
    *,
    recompute_layers: int = 0,
    device: torch.device | str = "cpu",
    opened: set[str] | None = None,
) -> Chunk:
    """Load one stage from the published files and freeze all but `config.model.trainable`.

    Only the stage's own tensors are read; `opened`, if given, collects their names. Raises UserError for missing or
    unusable model files.
    """
    dtype = DTYPES[config.model.llm.dtype]
    language = load_slice(
        config.model.llm.path,
        stage.first,
        stage.last,
        embedding=stage.front,
        head=stage.head,
        dtype=dtype,
        device=device,
        opened=opened,
    )
    language.recompute(recompute_layers)
    front = None
    if stage.front:
        vision_dtype = DTYPES[config.model.vision.dtype or config.model.llm.dtype]
        vision = load_vision(config.model.vision.name, config.model.vision.select_layer, vision_dtype, device)
        kind, start = config.model.projector.type, config.model.projector.init_from
        projector = make_projector(kind, vision.width, language.hidden_size, config.run.seed)
        if start is not None:
            projector.load_state_dict(read_projector(start, kind, vision.width, language.hidden_size))
        front = Front(vision, projector.to(device))
    chunk = Chunk(language, front, dtype).eval()
    set_trainable(chunk.global_parameters(), config.model.trainable)
    return chunk
