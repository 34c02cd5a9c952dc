"""The trainable module between vision encoder and LLM, drawn at random or read from a trained one's
files.

vision features (N, T, W) --projector--> image embeddings (N, T / factor^2, D), in fp32 whatever the
    frozen parts are
stored in. `mmtrain.connectors` says which operations a projector is made of.
"""

import logging
import math
from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mmtrain import connectors
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.facts.model_files import read_header
from mmtrain.facts.models import Models
from mmtrain.facts.projector import connector, connector_parameters, has_deepstack
from mmtrain.model.trained.lora import generator_of
from mmtrain.model.weights.files import Entry, open_tensors, read_pickled, tensor_entries
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.model.weights.projector_files import (
    KEY,
    ProjectorFiles,
    as_matrix,
    find_projector,
    local_names,
    refuse_unfit,
)

_log = logging.getLogger(__name__)
# others are codes that need their scales
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

PROJECTOR = "projector."  # of global names


class PixelShuffle(nn.Module):
    """Join `factor` x `factor` patches of a square grid, row by row: (N, T, W) -> (N, T / f^2, f^2
    W).
    """

    def __init__(
        self,
        factor: int,
        feature_first: bool,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.feature_first = feature_first

    def forward(self, features: Tensor) -> Tensor:
        images, patches, width = features.shape
        factor = self.factor
        side = math.isqrt(patches) // factor
        cells = features.reshape(images, side, factor, side, factor * width).transpose(2, 3)
        if self.feature_first:
            cells = cells.reshape(images, patches // factor**2, factor**2, width).transpose(2, 3)
        return cells.reshape(images, patches // factor**2, factor**2 * width)


class MeanPool(nn.Module):
    """Average `factor` x `factor` positions of a square grid: (N, T, D) -> (N, T / f^2, D)."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, embeddings: Tensor) -> Tensor:
        images, positions, width = embeddings.shape
        factor = self.factor
        side = math.isqrt(positions) // factor
        cells = embeddings.reshape(images, side, factor, side, factor, width)
        return cells.mean(dim=(2, 4)).flatten(1, 2)


class Swiglu(nn.Module):
    """Multiply the first half of the features by SiLU of the second: (N, T, 2 F) -> (N, T, F)."""

    def forward(self, features: Tensor) -> Tensor:
        values, gates = features.chunk(2, dim=-1)
        return nn.functional.silu(gates) * values


class Gated(nn.Module):
    """down_proj(SiLU(gate_proj(x)) * up_proj(x)): (N, T, W) -> (N, T, D)."""

    def __init__(
        self,
        inputs: int,
        inner: int,
        outputs: int,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, inner, bias=False)
        self.up_proj = nn.Linear(inputs, inner, bias=False)
        self.down_proj = nn.Linear(inner, outputs, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(features)) * self.up_proj(features))


class Projector(nn.Module):
    """A connector's torch module: features (N, T, W) -> image embeddings (N, T / factor^2, D).

    With k branches of DeepStack features are (1 + k) W and embeddings (1 + k) D wide, the main ones
    first.
    """

    def __init__(self, operations: Sequence[connectors.Operation]) -> None:
        super().__init__()
        self._branches = [[]]  # modules in the order in which they run
        self.factor = connectors.factor_of(operations)
        # (D,), which `arranged` puts between the positions that the projector makes
        self.image_newline: nn.Parameter | None = None
        for number, operation in enumerate(operations):
            if isinstance(operation, connectors.Branch):
                self._branches.append([])
            elif isinstance(operation, connectors.Newline):
                self.image_newline = nn.Parameter(torch.empty(operation.width))
            else:
                module = _module(operation)
                kind = type(operation).__name__.lower()
                self._branches[-1].append(module)
                self._add(getattr(operation, "name", f"{kind}_{number}"), module)

    def _add(self, name: str, module: nn.Module) -> None:
        owner = self
        *outer, last = name.split(".")
        for part in outer:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, module)

    def forward(self, features: Tensor) -> Tensor:
        outputs = []
        parts = features.chunk(len(self._branches), dim=-1)
        for part, modules in zip(parts, self._branches, strict=True):
            for module in modules:
                part = module(part)
            outputs.append(part)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, dim=-1)


def _module(operation: connectors.Operation) -> nn.Module:
    match operation:
        case connectors.Shuffle(factor, feature_first):
            return PixelShuffle(factor, feature_first)
        case connectors.Pool(factor):
            return MeanPool(factor)
        case connectors.LayerNorm(_, width, eps):
            return nn.LayerNorm(width, eps=eps)
        case connectors.RmsNorm(_, width, eps):
            return nn.RMSNorm(width, eps=eps)
        case connectors.Linear(_, inputs, outputs, has_bias):
            return nn.Linear(inputs, outputs, bias=has_bias)
        case connectors.Gelu():
            return nn.GELU()
        case connectors.Swiglu():
            return Swiglu()
        case connectors.Gated(_, inputs, inner, outputs):
            return Gated(inputs, inner, outputs)


def make_projector(
    operations: Sequence[connectors.Operation],
    seed: int,
) -> Projector:
    """Build a projector in fp32: linear layers with nn.Linear's default distribution, norms 1 and
    0.

    A newline is drawn as in LLaVA-NeXT. Every tensor is a function of (seed, parameter name) alone.
    """
    with torch.device("meta"):
        projector = Projector(operations)
    for module_name, module in projector.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.full(parameter.shape, float(name == "weight"), dtype=torch.float32)
            path = f"{module_name}.{name}".lstrip(".")
            generator = generator_of(f"{seed}/projector/{path}")
            if isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                value.uniform_(-bound, bound, generator=generator)
            elif path == connectors.NEWLINE:
                value.normal_(std=1 / math.sqrt(len(value)), generator=generator)
            setattr(module, name, nn.Parameter(value))
    return projector


def starting_projector(models: Models, seed: int) -> Projector:
    """Make the projector that a run begins with: from `init_from`, and drawn where that has
    nothing.
    """
    projector = make_projector(models.connector, seed)
    init_from = models.section.projector.init_from
    if init_from is not None:
        tensors = projector.state_dict()
        projector.load_state_dict(tensors | read_projector(init_from, models.connector))
    return projector


def whole_projector(checkpoint: StepFolder) -> dict[str, Tensor]:
    """Return the projector of a checkpoint's run, fp32, by the names of `make_projector`'s module;
    empty without an encoder.

    Raises UserError where what the run began with and did not train has changed or is gone.
    """
    config = checkpoint.config
    file = checkpoint.tensors_file
    if config.model.vision is None:
        return {}
    names = [name for name in read_header(file) if name.startswith(PROJECTOR)]
    trained = open_tensors({name: Entry(name, file) for name in names})
    tensors = {name.removeprefix(PROJECTOR): view[...] for name, view in trained.items()}

    models = checkpoint.models
    section = models.section.projector
    # Names are known without the models' files, but for how many blocks DeepStack takes.
    if has_deepstack(section):
        operations = models.connector
    else:
        operations = connector(section, 1, 2, models.layout_class.has_newlines)
    parameters = connector_parameters(operations)
    untrained = {parameter.name for parameter in parameters} - trained.keys()
    if not untrained:
        return tensors

    tensors = starting_projector(models, config.run.seed).state_dict() | tensors
    for name, was in checkpoint.frozen_projector.items():
        if name not in untrained or fingerprint(tensors[name.removeprefix(PROJECTOR)]) != was:
            source = f"{KEY} ({section.init_from})" if section.init_from else "the seed"
            raise UserError(
                f"{checkpoint.path}: its run did not train {escape(name)}, and {source} gives "
                "other values now than it began with. Restore what it began with"
            )
    return tensors


def read_projector(
    path: str,
    operations: Sequence[connectors.Operation],
) -> dict[str, Tensor]:
    """Read a connector's tensors from `path`, in fp32, by the names of `make_projector`'s module.

    A newline may be lacking. Raises UserError for a path that holds none, damaged files, tensors of
    another projector, other widths or types, and values that are not finite.
    """
    files = find_projector(path)
    stored = _read(files)
    names = local_names(stored, files.source)
    shapes = {local: as_matrix(stored[name].shape) for local, name in names.items()}
    refuse_unfit(shapes, operations, files.source)
    has_newline = any(isinstance(each, connectors.Newline) for each in operations)
    if has_newline and connectors.NEWLINE not in shapes:
        _log.info(
            f"{KEY}: {files.source} holds no {connectors.NEWLINE}; "
            "it is initialised at random, by run.seed"
        )
    tensors = {}
    for local, name in names.items():
        tensor = stored[name]
        if tensor.dtype not in STORED_DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{KEY}: {files.source}: {name} is stored as {kind}; needed are "
                "floating-point numbers of 16 bits or more"
            )
        tensor = tensor.reshape(shapes[local])
        # a copy: what is mapped from a file could change there
        tensors[local] = tensor.to(torch.float32, copy=True)
        if not torch.isfinite(tensors[local]).all():
            raise UserError(
                f"{KEY}: {files.source}: {name} holds NaN or infinite values. "
                "Use an earlier checkpoint"
            )
    return tensors


def _read(files: ProjectorFiles) -> dict[str, Tensor]:
    source = files.source
    if files.is_part:
        whole = whole_projector(files.checkpoint)
        return {f"{PROJECTOR}{name}": tensor for name, tensor in whole.items()}
    if not files.shapes:
        return read_pickled(source)
    wanted = {name: Entry(name, source) for name in files.shapes}
    if source.is_dir():
        entries = tensor_entries(source)
        wanted = {name: entries[name] for name in files.shapes}
    try:
        return {name: tensor[...] for name, tensor in open_tensors(wanted).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{KEY}: {source}: cannot be read ({error})") from None
