"""Step folders of runs that were never trained, with random projectors and encoders, and what their
exports hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save_file
from scenes import perturb
from step_states import state_of
from timm_folder import save_timm_folder
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mmtrain.__main__ import main
from mmtrain.checkpoint.step_folder import (
    OPTIMIZER,
    STATE,
    TENSORS,
    StepFolder,
    new_step_folder,
    step_path,
)
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.exporting.hf import ExportedModel, export_hf
from mmtrain.exporting.verify import Comparison, compare_logits
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.models import models_of
from mmtrain.model.trained.projector import make_projector


def make_checkpoint(
    run: Path,
    config: RunConfig,
    others: Mapping[str, torch.Tensor] | None = None,
    step: int = 20,
    **more: object,
) -> StepFolder:
    """A checkpoint in `run` after `step` updates: the config's projector at its start, and `others`
    by global name.

    `more` goes into its state.
    """
    tensors = dict(others or {})
    if config.model.vision is not None:
        projector = make_projector(models_of(config).connector, config.run.seed)
        own = {
            f"projector.{name}": tensor.detach().clone()
            for name, tensor in projector.named_parameters()
        }
        tensors = own | tensors
    state = state_of(step, config=config.model_dump(mode="json"), **more)
    path = step_path(run, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_step_folder(path) as folder:
        save_file(tensors, folder / TENSORS)
        save_file({"projector.linear_1.bias/step": torch.tensor(float(step))}, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps(state))
    return StepFolder(path)


def drawn_adapters(config: RunConfig) -> dict[str, torch.Tensor]:
    """Of every layer that has one, by global name; neither matrix is zero."""
    draw = torch.Generator().manual_seed(5)
    found = [one for one in models_of(config).parameters if is_adapter(one.name)]
    return {one.name: 0.05 * torch.randn(one.shape, generator=draw) for one in found}


def make_tower(folder: Path, architecture: str, changes: Mapping[str, object]) -> Path:
    """A small random ViT of a timm architecture: 28 x 28 pixels, 16 patches, 3 blocks of 32; every
    tensor is random.
    """
    sizes = {
        "img_size": 28,
        "patch_size": 7,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "num_classes": 0,
    }
    arguments = sizes | dict(changes)
    model = perturb(timm.create_model(architecture, pretrained=False, **arguments))
    save_timm_folder(model, folder, architecture, arguments)
    return folder


def config_of(tiny: Path, *overrides: str) -> RunConfig:
    """The configuration in the tiny folder, with overrides."""
    return load_config(tiny / "config.yaml", overrides)


def export(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
) -> ExportedModel:
    """The checkpoint as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return export_hf(checkpoint, folder, dtype, shard_bytes)


def run_export(run: Path, form: str, out: Path, *options: str) -> int:
    """The exit code of `mmtrain export` for a checkpoint, or a run."""
    return main(["export", str(run), "--format", form, "--out", str(out), *options])


def compared(
    checkpoint: StepFolder, exported: ExportedModel, dtype: torch.dtype, count: int
) -> Comparison:
    """The stock model's logits beside mmtrain's, as --verify compares them."""
    return compare_logits(checkpoint, exported, dtype, count)[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by their names on disk."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def load_stock(folder: Path, **options: object) -> PreTrainedModel:
    """The stock model of a folder; nothing may be missing, unexpected or mismatched."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert {kind: set(entries) for kind, entries in info.items() if entries} == {}
    return model.eval()
