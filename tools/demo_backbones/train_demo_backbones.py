"""Make the demo's frozen models: an LLM trained on text alone and a vision encoder trained on pictures alone.

    python tools/demo_backbones/train_demo_backbones.py --out DIR                  both, 12 minutes on two cores
    python tools/demo_backbones/train_demo_backbones.py --out mmtrain/demo         replace those of mmtrain
    python tools/demo_backbones/train_demo_backbones.py --out DIR --only vision

OUT gets llm/ (a transformers Llama and its tokenizer), vision/ (timm's local folder format) and backbones.json (steps,
accuracies, seconds). Equal arguments and versions on equal hardware give equal weights.

The encoder needs scikit-learn, whose package holds the handwriting: pip install 'mmtrain[demo]'

train_demo_llm.py trains the LLM. What is here trains the encoder, which knows no word: it learns class numbers. It is a
tiny timm ViT without class token, with exact gelu and biases everywhere, so that its weights are also those of a
transformers SigLIP vision model. Every patch has to tell the digit and the colour of its cell, from the last block's
output without the final norm: that is what a projector reads.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
import train_demo_llm
from timm_folder import save_timm_folder
from torch import nn

from mmtrain.base.printing import print_result, run_command
from mmtrain.demo.pictures import SIZE, Scans, paint
from mmtrain.demo.scene import COLOURS, DIGITS, Scene, draw_scene

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
def cell_accuracy(model: Classifier, scans: Scans) -> float:
    """Share of cells of which digit and colour are right, by the mean of their four patches' logits."""
    model.eval()
    draw = random.Random("cell accuracy 1")
    right = total = 0
    for _ in range(10):
        images, classes = make_batch([draw_scene(draw) for _ in range(100)], scans, draw)
        found = []
        for logits in model(images):
            grid = logits.view(-1, 2, 2, 2, 2, logits.shape[-1])  # rows of cells, rows in a cell, columns, columns in
            found.append(grid.mean((2, 4)).flatten(1, 2).argmax(-1))
        right += int((torch.stack(found, -1) == classes).all(-1).sum())
        total += classes[..., 0].numel()
    model.train()
    return right / total


def train_vision(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Train the encoder and save it into `folder` in timm's local form, in float16; its accuracies and seconds."""
    start = time.perf_counter()
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
            print_result(f"encoder step {step + 1}/{steps}  loss {float(loss.detach()):.4f}")
    result = {
        "encoder_cell_accuracy": cell_accuracy(model, scans),
        "encoder_cell_accuracy_held_out": cell_accuracy(model, Scans("held-out")),
        "encoder_seconds": time.perf_counter() - start,
    }
    save_timm_folder(model.encoder.half(), folder, ARCHITECTURE, MODEL_ARGS)
    return result


PARTS = {"vision": (train_vision, 3000), "llm": (train_demo_llm.train_llm, 1200)}  # and its steps


def train_backbones(options: argparse.Namespace) -> None:
    """Train what the options name, and record how; raises OSError."""
    record_file = options.out / "backbones.json"
    options.out.mkdir(parents=True, exist_ok=True)  # what cannot be written should not show after minutes
    record = json.loads(record_file.read_text()) if record_file.is_file() else {}
    for name in [options.only] if options.only else PARTS:
        train, default_steps = PARTS[name]
        steps = options.steps or default_steps
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        result = train(options.out / name, steps, options.seed)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record[name] = {"steps": steps, "seed": options.seed, "threads": options.threads, **versions, **result}
        print_result(json.dumps(record[name]))
    record_file.write_text(json.dumps(record, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for llm/, vision/ and backbones.json")
    parser.add_argument("--only", choices=PARTS, help="train one of them; the other's files stay as they are")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: what made the shipped ones)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and noise (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args(arguments)
    if options.threads < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--steps and --threads are at least 1")
    return run_command(lambda: train_backbones(options))


if __name__ == "__main__":
    sys.exit(main())
