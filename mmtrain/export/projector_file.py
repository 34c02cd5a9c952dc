"""What was trained, alone: one safetensors file, and a JSON that says what it belongs to.

OUT/projector.safetensors   every trained tensor by its global name (projector.linear_1.weight, ...)
OUT/projector.json          models, steps, data, scores, versions, and the file's SHA-256
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.export.folder import new_folder
from mmtrain.export.origin import origin, trained_tensors
from mmtrain.export.tensors import TensorWriter, check_written

TENSORS = "projector.safetensors"
DESCRIPTION = "projector.json"


def export_projector_file(checkpoint: StepFolder, out: Path, dtype: torch.dtype) -> None:
    """Write the folder `out`; raises what `new_folder` raises."""
    tensors = trained_tensors(checkpoint)
    description = asdict(origin(checkpoint))
    with new_folder(out) as folder:
        files = {TENSORS: TensorWriter(dtype).write(folder / TENSORS, tensors)}
        description |= {"dtype": str(dtype).removeprefix("torch."), "sha256": files}
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        check_written(folder, files)
