"""Train the demo's vision encoder on pictures alone; `tools/demo_backbones/train_demo_backbones.py` runs this.

Nothing here knows a word: the encoder learns class numbers. A tiny timm ViT without class token, with exact gelu and
biases everywhere, so that its weights are also those of a transformers SigLIP vision model. Every patch has to tell the
digit and the colour of its cell, from the last block's output without the final norm: that is what a projector reads.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import nn

from mmtrain.base.printing import tell
from mmtrain.demo.pictures import SIZE, Scans, paint
from mmtrain.demo.scene import COLOURS, DIGITS, Scene, draw_scene
from mmtrain.model.timm_folder import save_timm_folder

ARCHITECTURE = "vit_tiny_patch16_224"
PATCH = 16
WIDTH = 128
MODEL_ARGS = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": 4,
    "num_heads": 4,
    "class_token": False,
    "global_pool": "avg",
    "num_classes": 0,
}
BATCH = 64


class Classifier(nn.Module):
    """The encoder with what it is trained by: images (N, 3, S, S) -> per patch logits of digit and colour."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = timm.create_model(ARCHITECTURE, pretrained=False, **MODEL_ARGS)
        self.digit = nn.Linear(WIDTH, DIGITS + 1)  # the last class: nothing there
        self.colour = nn.Linear(WIDTH, COLOURS + 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 16, 11) and (N, 16, 7), patches in reading order."""
        features = self.encoder.forward_intermediates(
            images, indices=1, intermediates_only=True, output_fmt="NLC", norm=False
        )[0]
        return self.digit(features), self.colour(features)


def make_batch(scenes: list[Scene], scans: Scans, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, S, S) float32 in -1 .. 1 and classes (N, 4 cells, 2) int64: digit and colour."""
    pictures = np.stack([np.asarray(paint(scene, scans, draw)) for scene in scenes])
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    classes = [[(i.digit, i.colour) if i else (DIGITS, COLOURS) for i in scene] for scene in scenes]
    return images, torch.tensor(classes)


def of_patches(classes: torch.Tensor) -> torch.Tensor:
    """Classes of cells (N, 4) as classes of the 4 x 4 patches (N, 16): each cell is 2 x 2 patches."""
    return classes.view(-1, 2, 2).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


@torch.no_grad()
def cell_accuracy(model: Classifier, scans: Scans, scenes: int = 1000, seed: int = 1) -> float:
    """Share of cells of which digit and colour are right, by the mean of their four patches' logits."""
    model.eval()
    draw = random.Random(f"cell accuracy {seed}")
    right = total = 0
    for _ in range(0, scenes, 100):
        images, classes = make_batch([draw_scene(draw) for _ in range(100)], scans, draw)
        found = []
        for logits in model(images):
            grid = logits.view(-1, 2, 2, 2, 2, logits.shape[-1])  # rows of cells, rows in a cell, columns, columns in
            found.append(grid.mean((2, 4)).flatten(1, 2).argmax(-1))
        right += int((torch.stack(found, -1) == classes).all(-1).sum())
        total += classes[..., 0].numel()
    model.train()
    return right / total


def train(folder: Path, steps: int = 3000, seed: int = 0, threads: int = 2) -> dict[str, float]:
    """Train the encoder and save it into `folder` in timm's local form, in float16; its accuracies and seconds."""
    start = time.perf_counter()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    draw = random.Random(f"demo encoder {seed}")
    scans = Scans("encoder")
    model = Classifier().train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        images, classes = make_batch([draw_scene(draw) for _ in range(BATCH)], scans, draw)
        images += torch.randn(BATCH, 1, 1, 1) * 0.1 + torch.randn_like(images) * (0.15 * torch.rand(BATCH, 1, 1, 1))
        loss = sum(
            F.cross_entropy(logits.flatten(0, 1), of_patches(wanted).flatten(), label_smoothing=0.05)
            for logits, wanted in zip(model(images), classes.unbind(-1), strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 249:
            tell(f"encoder step {step + 1}/{steps}  loss {float(loss.detach()):.4f}")
    result = {
        "encoder_cell_accuracy": cell_accuracy(model, scans),
        "encoder_cell_accuracy_held_out": cell_accuracy(model, Scans("held-out")),
        "encoder_seconds": time.perf_counter() - start,
    }
    save_timm_folder(model.encoder.half(), folder, ARCHITECTURE, MODEL_ARGS)
    return result
