"""Make the demo's frozen models: an LLM trained on text alone and two vision encoders trained on
pictures alone.

    python tools/demo_backbones/train_demo_backbones.py --out DIR                  all, 25 minutes
                                                                                   on two cores
    python tools/demo_backbones/train_demo_backbones.py --out mmtrain/demo         replace those of
                                                                                   mmtrain
    python tools/demo_backbones/train_demo_backbones.py --out DIR --only vision

OUT gets llm/ (a transformers Llama and its tokenizer), vision/ (timm's local folder format),
vision_native/ (Siglip2 of transformers), backbones.json (steps, accuracies, seconds). Equal
arguments, versions and hardware give equal weights.

The encoders need scikit-learn, whose package holds the handwriting: pip install 'mmtrain[demo]'

train_demo_llm.py trains the LLM. What is here trains the encoders, which know no word: they learn
class numbers. Every patch has to tell the digit and the colour of its cell. `vision` is a tiny timm
ViT without class token, with exact gelu and biases everywhere, so that its weights are also those
of a transformers SigLIP vision model; projectors read it without the final norm. `vision_native`
sees sheets of 1 to 8 notes in their own shape, and is read with the norm.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
import train_demo_llm
from native_encoder import make_encoder, native_features, save_native_folder
from timm_folder import save_timm_folder
from torch import nn

from mmtrain.base.printing import print_result, run_command
from mmtrain.demo.pictures import CELL, GROUND, SIZE, Scans, paint
from mmtrain.demo.scene import COLOURS, DIGITS, draw_scene

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
BATCH = 64  # notes, or places for them on sheets
BLANK_SHARE = 0.25  # of a sheet's places


class Classifier(nn.Module):
    """An encoder with what it is trained by: images (N, 3, H, W) -> per patch logits of digit and
    colour.
    """

    def __init__(
        self, encoder: nn.Module, features: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.encoder, self.features = encoder, features
        self.digit = nn.Linear(WIDTH, DIGITS + 1)  # the last class: nothing there
        self.colour = nn.Linear(WIDTH, COLOURS + 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, patches, 11) and (N, patches, 7), patches in reading order."""
        features = self.features(images)
        return self.digit(features), self.colour(features)


def make_notes(count: int, scans: Scans, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, S, S) float32 in -1 .. 1 and classes of cells (N, 2, 2, 2) int64: digit and
    colour.
    """
    scenes = [draw_scene(draw) for _ in range(count)]
    pictures = np.stack([np.asarray(paint(scene, scans, draw)) for scene in scenes])
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    classes = [[(i.digit, i.colour) if i else (DIGITS, COLOURS) for i in scene] for scene in scenes]
    return images, torch.tensor(classes).view(-1, 2, 2, 2)


def make_sheets(count: int, scans: Scans, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `count` notes and blank places on sheets of one shape, rolled by whole cells: images,
    classes of cells.
    """
    rows, columns = draw.sample((draw.randint(1, 4), draw.randint(1, 2)), 2)
    sheets = count // (rows * columns)
    images, classes = make_notes(sheets * rows * columns, scans, draw)
    grounds = (
        torch.tensor([[draw.randint(0, GROUND) for _ in range(3)] for _ in range(sheets)]) / 127.5
        - 1
    )
    for place in range(len(images)):
        if draw.random() < BLANK_SHARE:
            images[place] = grounds[place // (rows * columns)].view(3, 1, 1)
            classes[place] = torch.tensor((DIGITS, COLOURS))
    images = (
        images.view(sheets, rows, columns, 3, SIZE, SIZE)
        .permute(0, 3, 1, 4, 2, 5)
        .flatten(4)
        .flatten(2, 3)
    )
    classes = (
        classes.view(sheets, rows, columns, 2, 2, 2).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    )
    down, across = draw.randrange(2 * rows), draw.randrange(2 * columns)
    return images.roll((down * CELL, across * CELL), (2, 3)), classes.roll((down, across), (1, 2))


def of_patches(classes: torch.Tensor) -> torch.Tensor:
    """Classes of cells (N, rows, columns) as classes of the patches (N, 4 * cells): each cell is 2
    x 2 patches.
    """
    return classes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


@torch.no_grad()
def cell_accuracy(model: Classifier, make: Callable, scans: Scans) -> float:
    """Share of cells (of sheets: with a digit) whose digit and colour the mean of their four
    patches' logits tells.
    """
    model.eval()
    draw = random.Random("cell accuracy 1")
    right = total = 0
    for _ in range(10):
        images, classes = make(100, scans, draw)
        found = []
        for logits in model(images):
            # rows of cells, rows in a cell, columns of cells, columns in a cell
            grid = logits.view(-1, classes.shape[1], 2, classes.shape[2], 2, logits.shape[-1])
            found.append(grid.mean((2, 4)).argmax(-1))
        counted = (classes[..., 0] < DIGITS) | (make is make_notes)
        right += int((torch.stack(found, -1) == classes).all(-1)[counted].sum())
        total += int(counted.sum())
    model.train()
    return right / total


def train_vision(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Train the encoder of notes and save it in timm's local form, in float16; its accuracies and
    seconds.
    """
    encoder = timm.create_model(ARCHITECTURE, pretrained=False, **MODEL_ARGS)
    run = partial(
        encoder.forward_intermediates,
        indices=1,
        intermediates_only=True,
        output_fmt="NLC",
        norm=False,
    )
    result = train_encoder(
        Classifier(encoder, lambda images: run(images)[0]), make_notes, steps, seed
    )
    save_timm_folder(encoder.half(), folder, ARCHITECTURE, MODEL_ARGS)
    return result


def train_vision_native(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Train the encoder of sheets and save it as transformers does, in float16; its accuracies and
    seconds.
    """
    encoder = make_encoder()
    result = train_encoder(
        Classifier(encoder, partial(native_features, encoder)), make_sheets, steps, seed
    )
    save_native_folder(encoder.half(), folder)
    return result


def train_encoder(model: Classifier, make: Callable, steps: int, seed: int) -> dict[str, float]:
    """Train an encoder on what `make` draws; its accuracies and seconds."""
    start = time.perf_counter()
    draw = random.Random(f"demo encoder {seed}")
    scans = Scans("encoder")
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=steps, pct_start=0.1
    )
    for step in range(steps):
        images, classes = make(BATCH, scans, draw)
        light = torch.randn(len(images), 1, 1, 1) * 0.1
        images += light + torch.randn_like(images) * (0.15 * torch.rand_like(light))
        loss = sum(
            F.cross_entropy(
                logits.flatten(0, 1), of_patches(wanted).flatten(), label_smoothing=0.05
            )
            for logits, wanted in zip(model(images), classes.unbind(-1), strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 249:
            print_result(f"encoder step {step + 1}/{steps}  loss {float(loss.detach()):.4f}")
    return {
        "encoder_cell_accuracy": cell_accuracy(model, make, scans),
        "encoder_cell_accuracy_held_out": cell_accuracy(model, make, Scans("held-out")),
        "encoder_seconds": time.perf_counter() - start,
    }


# and their steps
PARTS = {"vision": (train_vision, 3000), "vision_native": (train_vision_native, 5000)}
PARTS["llm"] = (train_demo_llm.train_llm, 1200)


def train_backbones(options: argparse.Namespace) -> None:
    """Train what the options name, and record how; raises OSError."""
    record_file = options.out / "backbones.json"
    # what cannot be written should not show after minutes
    options.out.mkdir(parents=True, exist_ok=True)
    record = json.loads(record_file.read_text()) if record_file.is_file() else {}
    for name in [options.only] if options.only else PARTS:
        train, default_steps = PARTS[name]
        steps = options.steps or default_steps
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        result = train(options.out / name, steps, options.seed)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record[name] = {
            "steps": steps,
            "seed": options.seed,
            "threads": options.threads,
            **versions,
            **result,
        }
        print_result(json.dumps(record[name]))
    record_file.write_text(json.dumps(record, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the models and backbones.json"
    )
    parser.add_argument(
        "--only", choices=PARTS, help="train one of them; the files of the others stay as they are"
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps (default: what made the shipped ones)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of initial weights, batches and noise (default 0)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    options = parser.parse_args(arguments)
    if options.threads < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--steps and --threads are at least 1")
    return run_command(lambda: train_backbones(options))


if __name__ == "__main__":
    sys.exit(main())
