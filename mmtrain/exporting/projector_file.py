"""The trained tensors alone: one safetensors file, and a JSON that says what it belongs to.

OUT/projector.safetensors   trained tensors by global name (projector.linear_1.weight, ...), the
                            rest of the projector
OUT/projector.json          models, steps, data, scores, versions (`origin`), and the file's SHA-256

A run on text alone has trained.safetensors and trained.json.
"""

import hashlib
from pathlib import Path

import torch

from mmtrain.base.json_lines import recorded
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.templates import template_name
from mmtrain.connectors import Linear
from mmtrain.exporting.card import published
from mmtrain.exporting.published_files import write_json
from mmtrain.exporting.tensors import Sources, cast_to, in_memory, stored, write_tensors
from mmtrain.facts.model_files import read_header
from mmtrain.facts.projector import connector, reduction
from mmtrain.facts.settings import Settings
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.model.trained.projector import PROJECTOR, whole_projector
from mmtrain.model.weights.files import Entry
from mmtrain.stock.exporters import refuse_unfit_format

SCORES = ("loss", "token_accuracy", "exact_match", "answers", "samples")


def origin(checkpoint: StepFolder, tensors: Sources) -> Settings:
    """Describe a checkpoint and its `run_tensors` as JSON values, which every format records.

    Scores are from the run's metrics, if they are beside it. A run on text alone has None for
    encoder and projector.
    """
    config, state = checkpoint.config, checkpoint.state
    section, vision = config.model.projector, config.model.vision
    loss = state["loss"]
    if not isinstance(loss, int | float):  # it is not finite
        loss = None
    max_tiles = vision_width = None
    if vision is None:
        llm_width = checkpoint.models.published_llm.hidden_size
    else:
        max_tiles = vision.max_tiles or getattr(LAYOUTS[vision.layout], "max_tiles", None)
        linears = [layer for layer in connector(section, 1, 2) if isinstance(layer, Linear)]
        llm_width, _ = tensors[f"{PROJECTOR}{linears[-1].name}.weight"].shape
        _, inputs = tensors[f"{PROJECTOR}{linears[0].name}.weight"].shape
        vision_width = inputs // linears[0].inputs  # which are those of patches of width 1
    return {
        "llm": config.model.llm.path,
        "llm_width": llm_width,
        "llm_dtype": config.model.llm.dtype,  # in which it was trained against
        "llm_quantize": config.model.llm.quantize,  # of the run; exports are as published
        "vision": vision and vision.name,
        "vision_select_layer": vision and vision.select_layer,
        "vision_final_norm": vision and vision.final_norm,
        "vision_width": vision_width,
        "projector_type": vision and section.type,
        # patches a side that are one position of the LLM
        "projector_factor": vision and reduction(section),
        "trained": sorted(read_header(checkpoint.tensors_file)),  # names of tensors
        "template": template_name(config.data.template),
        "layout": vision and vision.layout,
        "max_tiles": max_tiles,
        # (height, width) of grids in pixels; None: the layout's own
        "pinpoints": vision and vision.pinpoints,
        "image_fit": vision and config.data.image_fit,  # None too where images are cut into tiles
        "resize": vision and config.data.resize,
        "steps": checkpoint.step,
        "max_steps": state["max_steps"],
        "data_fingerprint": state["data"]["fingerprint"],
        "frozen_fingerprint": state["frozen_fingerprint"],
        "training_loss": loss,
        "evaluation": _evaluation(checkpoint, "eval"),
        "control": _evaluation(checkpoint, "eval_permuted"),  # with shuffled images
        "versions": state["versions"],
    }


def opened(checkpoint: StepFolder, form: str) -> tuple[Sources, Settings]:
    """Return `run_tensors` and `origin`; raises UserError where a format cannot hold them."""
    tensors = run_tensors(checkpoint)
    about = origin(checkpoint, tensors)
    refuse_unfit_format(form, checkpoint.path, checkpoint.models, about["trained"])
    return tensors, about


def run_tensors(checkpoint: StepFolder) -> Sources:
    """Return a run's trained tensors and the rest of its projector, fp32, by global name.

    Raises UserError.
    """
    tensors = {}
    for name, tensor in whole_projector(checkpoint).items():
        tensors[PROJECTOR + name] = in_memory(tensor)
    for name in read_header(checkpoint.tensors_file):
        tensors[name] = stored(Entry(name, checkpoint.tensors_file))
    return tensors


def _evaluation(checkpoint: StepFolder, kind: str) -> Settings | None:
    """Return the scores of the run's evaluation at the checkpoint's step; None without one."""
    scores = None
    for record in recorded(checkpoint.run / METRICS, kind):
        if record.get("step") == checkpoint.step:
            numbers = [name for name in SCORES if isinstance(record.get(name), int | float)]
            scores = {name: record[name] for name in numbers}
    return scores


def export_projector_file(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write all that `run_tensors` returns into the folder."""
    tensors = run_tensors(checkpoint)
    write_projector_file(origin(checkpoint, tensors), folder, tensors, dtype)


def write_projector_file(
    about: Settings,
    folder: Path,
    tensors: Sources,
    dtype: torch.dtype,
) -> None:
    """Write tensors of a run into a folder, and their origin."""
    file = folder / "projector.safetensors"
    if about["vision"] is None:
        file = folder / "trained.safetensors"
    write_tensors(file, cast_to(dtype, tensors))
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    description = {
        **published(about),
        "dtype": str(dtype).removeprefix("torch."),
        "sha256": {file.name: sha256},
    }
    write_json(file.with_suffix(".json"), description)
