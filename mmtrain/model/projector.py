"""The trainable module between vision encoder and LLM, drawn at random or read from a trained one's files.

vision features (N, T, W) --projector--> image embeddings (N, T, D), in fp32 whatever the frozen parts are stored in.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from safetensors import SafetensorError
from torch import nn

from mmtrain.base.errors import UserError
from mmtrain.model.projector_files import KEY, ProjectorFiles, find_projector, local_names, refuse_unfit
from mmtrain.model.weights import open_tensors, read_pickled, tensor_files


def linear(vision_width: int, llm_width: int) -> nn.Module:
    """One affine map, LLaVA's first projector (arXiv:2304.08485, section 4.1)."""
    return nn.Sequential(OrderedDict(linear_1=nn.Linear(vision_width, llm_width)))


def mlp2x_gelu(vision_width: int, llm_width: int) -> nn.Module:
    """Linear, exact GELU, linear: LLaVA-1.5's projector (arXiv:2310.03744) under the names of the stock HF module."""
    first, second = nn.Linear(vision_width, llm_width), nn.Linear(llm_width, llm_width)
    return nn.Sequential(OrderedDict(linear_1=first, act=nn.GELU(), linear_2=second))


STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # others are codes that need their scales
PROJECTORS: dict[str, Callable[[int, int], nn.Module]] = {"linear": linear, "mlp2x_gelu": mlp2x_gelu}


def make_projector(kind: str, vision_width: int, llm_width: int, seed: int) -> nn.Module:
    """Build a projector in fp32 with nn.Linear's default distribution.

    Every tensor is drawn from its own generator, a function of (seed, parameter name) alone: the same weights whatever
    the layout, and whatever was drawn before.
    """
    with torch.device("meta"):
        projector = PROJECTORS[kind](vision_width, llm_width)
    for module_name, module in projector.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            digest = hashlib.sha256(f"{seed}/projector/{module_name}.{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1 / math.sqrt(module.in_features)
            value = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            setattr(module, name, nn.Parameter(value))
    return projector


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
        if tensor.dtype not in STORED_DTYPES:
            raise UserError(
                f"{KEY}: {files.source}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; needed are "
                "floating-point numbers of 16 bits or more"
            )
        tensors[local] = tensor.to(torch.float32, copy=True)  # a copy: what is mapped from a file could change there
        if not torch.isfinite(tensors[local]).all():
            raise UserError(f"{KEY}: {files.source}: {name} holds NaN or infinite values; take an earlier checkpoint")
    return tensors


def _read(files: ProjectorFiles) -> dict[str, torch.Tensor]:
    source = files.source
    if not files.shapes:
        return read_pickled(source)
    places = tensor_files(source) if source.is_dir() else dict.fromkeys(files.shapes, source)
    try:
        lazy = open_tensors({name: places[name] for name in files.shapes})
        return {name: tensor[...] for name, tensor in lazy.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{KEY}: {source}: cannot be read ({error})") from None
