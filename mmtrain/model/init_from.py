"""The tensors of a trained projector, of whatever origin, for a run to begin with (`model.projector.init_from`).

files of projector_files --the projector's tensors alone--> {linear_1.weight: (D, W) fp32, ...}
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from mmtrain.base.errors import UserError
from mmtrain.model.pickled import read_pickled
from mmtrain.model.projector_files import KEY, ProjectorFiles, find_projector, local_names, refuse_unfit
from mmtrain.model.weights import open_tensors, tensor_files

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # others are codes that need their scales


def read_projector(path: str, kind: str, vision_width: int, llm_width: int) -> dict[str, torch.Tensor]:
    """A projector of type `kind` from `path`, in fp32, by the names of `make_projector`'s module.

    path: what `find_projector` takes. vision_width: features of a patch. llm_width: the LLM's hidden size. Nothing but
    the projector is read, pickles without running them. Raises UserError for a path that holds none, damaged files,
    tensors of another projector, other widths or types, and values that are not finite.
    """
    files = find_projector(path)
    stored = _read(files)
    names = local_names(stored, files.source)
    shapes = {local: tuple(stored[name].shape) for local, name in names.items()}
    refuse_unfit(shapes, kind, vision_width, llm_width, files.source)
    tensors: dict[str, torch.Tensor] = {}
    for local, name in names.items():
        tensor = stored[name]
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{KEY}: {files.source}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; needed are "
                "floating-point numbers of 16 bits or more"
            )
        tensors[local] = tensor.to(torch.float32, copy=True)  # a copy: what is mapped from a file could change there
        if not torch.isfinite(tensors[local]).all():
            raise UserError(f"{KEY}: {files.source}: {name} holds NaN or infinite values; take an earlier checkpoint")
    return tensors


def _read(files: ProjectorFiles) -> dict[str, torch.Tensor]:
    if files.pickled is not None:
        return read_pickled(files.pickled)
    source = files.source
    places = tensor_files(source) if source.is_dir() else dict.fromkeys(files.shapes, source)
    try:
        lazy = open_tensors({name: places[name] for name in files.shapes})
        return {name: tensor[...] for name, tensor in lazy.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{KEY}: {source}: cannot be read ({error})") from None
