"""One pipeline stage: its layers, and the tensors that it takes and gives.

stage 0       PackedBatch --encode--> features of tiles (N, T, W) --project, arrange; embed, fuse-->
    hidden (B, L, D)
              without an encoder: PackedBatch --embed--> hidden (B, L, D)
any stage     of a later slice: hidden states of tiles (N, T + prefix, W) --encode--> the same, or
    features
every stage   hidden (B, L, D), position_ids (B, L) --decoder layers--> hidden (B, L, D)
last stage    hidden (B, L, D), position_ids, labels (B, L) --decoder layers, norm, head--> loss
              sum, supervised tokens (or predicted tokens); of the last decoder layer, what
              supervised tokens alone need

Between stages travel hidden states in the LLM's dtype, position_ids and labels (int64, on the
host); between slices of the encoder hidden states of tiles and, to stage 0, features, in the
encoder's dtype. On a GPU no call waits for the device: masks and supervised places are found on the
host.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.base.devices import copied
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IMAGE_POSITION
from mmtrain.data.stream.images import ImageTransform, image_transform
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.families import canonical_name
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.layouts.layout import Tiling
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.encoder.vision_tower import Grids, VisionTower
from mmtrain.model.llm.compiled import Compiler
from mmtrain.model.llm.kernels import Backend, record_backends
from mmtrain.model.llm.language import DecoderLayers, load_decoder_layers
from mmtrain.model.llm.loss import loss_sum_and_predictions, supervised_loss_sum, supervised_places
from mmtrain.model.llm.parity import takes_rows
from mmtrain.model.trained.lora import add_adapters, refusing_unused, without_marks
from mmtrain.model.trained.projector import Projector, starting_projector
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.plan.plan import StagePlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Stage(nn.Module):
    """Contiguous layers that run as one forward call, and the rank's slice of the encoder; on stage
    0 the projector.
    """

    def __init__(
        self,
        language: DecoderLayers,
        dtype: torch.dtype,
        vision: VisionTower | None,
        projector: Projector | None,
        encoder: str | None,
    ) -> None:
        """`encoder` is the encoder's name, for `transform`; a stage with the projector needs it."""
        super().__init__()
        self.language = language
        self.dtype = dtype
        self.vision = vision
        self.projector = projector
        self._encoder = encoder
        self.kernels: set[Backend] = set()  # set by `try_out`

    @functools.cached_property
    def transform(self) -> ImageTransform:
        return image_transform(self._encoder)

    @property
    def streamed(self) -> StreamedLayers | None:
        return self.language.streamed

    @property
    def encoder_is_frozen(self) -> bool:
        return self.vision is None or not any(p.requires_grad for p in self.vision.parameters())

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its global name. Each slice of the encoder also yields those
        outside the blocks.
        """
        if self.vision is not None:
            yield from self.vision.global_parameters()
        if self.projector is not None:
            for name, parameter in self.projector.named_parameters():
                yield f"projector.{name}", parameter
        yield from self.language.global_parameters()

    def layer_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each buffer of the decoder layers that files hold (a router's bias, say) with its
        global name.
        """
        stored = self.language.model.state_dict().keys()
        for name, buffer in self.language.model.named_buffers():
            global_name = canonical_name(without_marks(name))
            if name in stored and global_name.startswith("llm.layers."):
                yield global_name, buffer

    def encode(
        self,
        taken: PackedBatch | Tensor | None,
        grids: Grids = (),
    ) -> Tensor | None:
        """Run ENCODE: a micro-batch, or hidden states of tiles, to features (N, T, W) or hidden
        states, contiguous.

        `grids` are those of the images whose hidden states are `taken`. None where there is nothing
        to encode.
        """
        if isinstance(taken, Tensor):
            return self.vision.in_groups(taken, grids=grids)
        if taken is None or self.projector is None:
            return None
        tiles = taken.tiles
        grids = taken.grids
        if self.encoder_is_frozen:
            if tiles is None:
                return None
            return self.vision.in_groups(tiles, self.normalised, grids)
        if tiles is None:
            # an encoder that trains has gradients to reduce, of a black tile
            size = self.vision.image_size
            tiles = torch.zeros(1, 3, size, size, device=taken.input_ids.device)
            grids = ((1, 1),)
        return self.vision(self.normalised(tiles), grids)

    def normalised(self, tiles: Tensor) -> Tensor:
        return self.transform.normalise(tiles) if tiles.dtype == torch.uint8 else tiles

    def start(
        self,
        batch: PackedBatch,
        features: Tensor | None = None,
    ) -> Tensor:
        """Embed a micro-batch on stage 0 with the features of its tiles (None: `encode` them) ->
        hidden (B, L, D).
        """
        if self.projector is None:
            return self.language.embed(batch.input_ids)
        if features is None:
            assert batch.tiles is None or self.vision.is_last, (
                "the features come from another rank's slice"
            )
            features = self.encode(batch)
        text = batch.input_ids.masked_fill(batch.input_ids == IMAGE_POSITION, 0)
        embeddings = self.language.embed(text)
        # one position of zeros, so that a replica without images has gradients to reduce
        if features is None:
            width = self.vision.feature_shape[-1]
            features = embeddings.new_zeros(1, self.projector.factor**2, width)

        projected = self.projector(features.float())
        newline = self.projector.image_newline
        places = batch.image_places
        if not batch.tilings:
            hidden = fuse(embeddings, places, None)
            unused = projected.sum()
            if newline is not None:
                unused = unused + newline.sum()
            return hidden + 0.0 * unused.to(hidden.dtype)
        if newline is not None:
            return fuse(embeddings, places, arranged(projected, newline, batch.tilings))
        images, *added = projected.flatten(0, 1).split(self.language.hidden_size, dim=-1)
        if added:
            self.language.deepstack = places, [each.to(self.dtype) for each in added]
        return fuse(embeddings, places, images)

    def compile_layers(self, compiler: Compiler) -> None:
        """Let `compiler` choose how decoder layers and a frozen encoder's blocks run.

        An encoder that takes images of any size stays eager: each call has other shapes.
        """
        self.language.compile_layers(compiler)
        vision = self.vision
        if vision is not None and self.encoder_is_frozen and not vision.needs_grids:
            vision.compile_blocks(compiler)

    @torch.no_grad()
    def try_out(self, device: torch.device | str) -> None:
        """Run the decoder layers on 8 tokens, and an encoder with adapters on a black image; sets
        `kernels`.
        """
        language = self.language
        with (
            record_backends() as self.kernels,
            refusing_unused(language.model, canonical_name),
        ):
            hidden = torch.zeros(
                1,
                8,
                language.hidden_size,
                dtype=self.dtype,
                device=device,
            )
            language(hidden, torch.arange(8, device=device)[None])
        if self.streamed is not None:
            self.streamed.end()

        vision = self.vision
        if vision is not None and any(is_adapter(name) for name, _ in vision.global_parameters()):
            # such an encoder is whole
            size = vision.image_size
            with refusing_unused(vision.model, vision.canonical_name):
                vision(torch.zeros(1, 3, size, size, device=device), ((1, 1),))

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Run the decoder layers, and on the last stage the final norm: (B, L, D) -> (B, L, D).

        `position_ids` (B, L) are those of `PackedBatch.positions`, (4, B, L) with M-RoPE; in `loss`
        and `predict` too.
        """
        return self.language(hidden, position_ids).to(self.dtype)

    def loss(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and supervised tokens of the last stage's input (B, L, D); labels
        are (B, L).
        """
        language = self.language
        rows, targets = self._supervised(hidden, position_ids, labels)
        loss = supervised_loss_sum(
            rows,
            targets,
            language.logits,
            language.vocab_size,
            language.head_parameters(),
        )
        return loss, torch.full((), len(targets), device=hidden.device)

    def predict(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return loss sum and arg max (S,) at the supervised positions, row-major; on the last
        stage, without gradients.
        """
        rows, targets = self._supervised(hidden, position_ids, labels)
        return loss_sum_and_predictions(
            rows,
            targets,
            self.language.logits,
            self.language.vocab_size,
        )

    def _supervised(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return normed hidden states (S, D) and targets (S,) of the supervised tokens, on the
        device.
        """
        places = supervised_places(labels)
        rows = self.language.forward_rows(hidden, position_ids, places)
        return rows.to(self.dtype), copied(labels.flatten()[places], hidden.device)


def streamed_of(stages: Iterable[Stage]) -> StreamedLayers | None:
    """Return the streamed layers of a rank, which its stages share; None without any."""
    return next(filter(None, (stage.streamed for stage in stages)), None)


def arranged(
    projected: Tensor,
    newline: Tensor,
    tilings: Sequence[Tiling],
) -> Tensor:
    """Arrange the embeddings (N, P, D) of tiles as the positions (M, D) of their images.

    Of a grid those that show the picture, interpolated where `Shown` says so, each line ended by
    `newline` (D,). Source: `pack_image_features` of LlavaNext and LlavaOnevision in transformers.
    """
    side = math.isqrt(projected.shape[1])
    width = projected.shape[2]
    positions = []
    images = projected.split([tiling.tiles for tiling in tilings])
    for tiles, tiling in zip(images, tilings, strict=True):
        shown = tiling.shown
        if shown is None:
            positions += [tiles.flatten(0, 1), newline.expand(tiling.newlines, width)]
            continue
        grid = tiles[1:].view(tiling.rows, tiling.columns, side, side, width)
        grid = grid.permute(4, 0, 2, 1, 3)
        grid = grid.reshape(width, tiling.rows * side, tiling.columns * side)
        grid = grid[:, shown.top : shown.top + shown.height, shown.left : shown.left + shown.width]
        size = (shown.lines, shown.length)
        if size != (shown.height, shown.width):
            grid = nn.functional.interpolate(grid[None], size, mode="bilinear")[0]
        ends = newline[:, None, None].expand(width, shown.lines, 1)
        positions += [tiles[0], torch.cat([grid, ends], dim=2).flatten(1).T]
    return torch.cat(positions)


def fuse(
    embeddings: Tensor,
    image_places: Tensor,
    image_embeddings: Tensor | None,
) -> Tensor:
    """Put image embeddings (P, D), in order, into the positions `image_places` (P,) int64 of rows
    laid end to end.

    Returns (B, L, D) in the dtype of `embeddings`. Raises ValueError for another number of places.
    """
    positions = len(image_places)
    supplied = 0 if image_embeddings is None else len(image_embeddings)
    if positions != supplied:
        raise ValueError(
            f"{positions} image positions in the batch, but {supplied} image embeddings"
        )
    if image_embeddings is None:
        return embeddings
    rows = image_embeddings.to(embeddings.dtype)
    return _Put.apply(embeddings.flatten(0, 1), image_places, rows).view_as(embeddings)


class _Put(torch.autograd.Function):
    """`index_copy` into dimension 0 that frees the rows; torch's keeps them until backward for
    their shape alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        into: Tensor,
        places: Tensor,
        rows: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(places)
        return into.index_copy(0, places, rows)

    @staticmethod
    def backward(
        ctx: Any,
        gradient: Tensor,
    ) -> tuple[Tensor | None, None, Tensor | None]:
        (places,) = ctx.saved_tensors
        wants_into, _, wants_rows = ctx.needs_input_grad
        of_into = of_rows = None
        if wants_into:
            of_into = gradient.index_fill(0, places, 0.0)
        if wants_rows:
            of_rows = gradient.index_select(0, places)
        return of_into, None, of_rows


def build_stage(
    config: RunConfig,
    stage: StagePlan,
    *,
    device: torch.device | str = "cpu",
    streamed: StreamedLayers | None = None,
) -> Stage:
    """Load a stage's own tensors from the published files and freeze all but
    `config.model.trainable`.

    `streamed`, one for all stages of a rank, takes the layers that the plan streams.
    """
    models = models_of(config)
    section = config.model
    seed = config.run.seed
    dtype = DTYPES[section.llm.dtype]
    if not stage.streamed:
        streamed = None
    else:
        assert streamed is not None, "the layers that the stage streams have no source"
    language = load_decoder_layers(
        section.llm.path,
        stage.first,
        stage.last,
        embedding=stage.front,
        head=stage.head,
        dtype=dtype,
        device=device,
        streamed=streamed,
        streamed_numbers=stage.streamed,
        mrope=models.has_grid_positions,
    )
    add_adapters(language.model, section.lora, canonical_name, seed)
    language.recompute(stage.recompute_layers)  # of layers with their adapters
    # the last layer stays whole where DeepStack adds to image tokens behind it
    is_narrow = stage.last > max(stage.first, len(models.published_vision.deepstack))
    if stage.head and is_narrow and takes_rows(language.model.config):
        language.narrow_last_layer()

    vision = None
    projector = None
    chosen = section.vision
    if chosen is not None and (stage.front or stage.encoder is not None):
        vision = load_vision(
            chosen.name,
            chosen.select_layer,
            DTYPES[section.vision_dtype],
            device,
            final_norm=chosen.final_norm,
            shape=models.published_vision,
            blocks=stage.encoder,
        )
        add_adapters(vision.model, section.lora, vision.canonical_name, seed)
        if stage.front:
            projector = starting_projector(models, seed).to(device)
    module = Stage(language, dtype, vision, projector, chosen and chosen.name).eval()
    set_trainable(module.global_parameters(), section.trainable)
    module.try_out(device)
    return module


def set_trainable(
    parameters: Iterable[tuple[str, nn.Parameter]],
    patterns: Sequence[str],
) -> None:
    for name, parameter in parameters:
        parameter.requires_grad_(matches_any(name, patterns))
