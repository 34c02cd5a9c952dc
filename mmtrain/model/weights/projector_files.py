"""Find a trained projector and tell, without torch, whether it fits: `model.projector.init_from`.

path --kind of file--> files --names and shapes, from headers--> fits the run, or UserError

Names of the projector's tensors:
    run or step folder of mmtrain          projector.linear_1.weight in projector.safetensors
    projector.safetensors, or an export    the same
    LLaVA's mm_projector.bin, or a folder  model.mm_projector.0.weight; of a linear one .weight
    stock model's folder, or hub id        multi_modal_projector.linear_1.weight, also below model.;
                                           of LlavaNext and LlavaOnevision image_newline besides; of
                                           Idefics3 and SmolVLM connector.modality_projection., of
                                           LightOnOcr vision_projection., of HyperCLOVAXVisionV2
                                           vision_projector., of VideoLlama3 projector.readout., of
                                           Exaone4_5 visual.merger.

LLaVA's names: `build_vision_projector` in llava/model/multimodal_projector/builder.py, whose reader
takes any prefix.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.checkpoint.step_folder import MANIFEST, TENSORS, StepFolder, find, names_checkpoint
from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.connectors import CONNECTORS, NEWLINE, Operation
from mmtrain.facts.model_files import find_model_folder, optional_json, read_header, tensor_shapes
from mmtrain.facts.models import models_of
from mmtrain.facts.projector import connector, connector_parameters, refuse_other_settings
from mmtrain.facts.settings import Shape
from mmtrain.layouts.registry import LAYOUTS

_log = logging.getLogger(__name__)
KEY = "model.projector.init_from"
LLAVA_FILE = "mm_projector.bin"
PICKLED = {".bin", ".pt", ".pth"}
DISK_NAME = re.compile(
    r"projector\.(?P<ours>.+)|(?:(?:.+\.)?mm_projector|(?:model\.)?(?:vision_projector|projector\.readout"
    r"|visual\.merger(?:\.mlp)?|mlp_AR))\.(?P<llava>.+)"
    r"|(?:model\.)?visual\.(?P<beside>downsample\..+)"
    r"|(?:model\.)?visual\.deepstack_merger_list\.(?P<block>\d+)\.(?P<branch>.+)"
    r"|(?:model\.)?(?:multi_modal_projector|vision_projection|connector\.modality_projection)\."
    r"(?:patch_merger\.)?(?P<hf>.+)"
    r"|(?:model\.)?(?P<newline>image_newline)"
)
# of LLaVA's nn.Sequential, the GELU between them; of Qwen's, GLM's and PaddleOCR's mergers
OUR_LAYERS = {
    "0": "linear_1",
    "2": "linear_2",
    "ln_q": "norm",
    "linear_fc1": "linear_1",
    "linear_fc2": "linear_2",
    "pre_norm": "norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
NEEDED = (
    f"Name a run or checkpoint of mmtrain, its {TENSORS}, LLaVA's {LLAVA_FILE}, or a Hugging "
    "Face model's folder"
)


@dataclass(frozen=True)
class ProjectorFiles:
    """A projector's files: headers of safetensors were read, a pickled file was not opened."""

    source: Path  # the file, or a folder of safetensors files
    # by name on disk, of the projector's tensors alone; none of a pickled file
    shapes: Mapping[str, Shape]
    checkpoint: StepFolder | None = None  # that it lies in, held until the tensors are read
    # whether the rest of it, among `shapes` too, is where the checkpoint's run took its start
    is_part: bool = False


def find_projector(
    path: str,
    later: frozenset[Path] = frozenset(),
) -> ProjectorFiles:
    """Find the projector that `path` names; of a run, that of the newest checkpoint that verifies.

    Raises UserError for a path that is not in the table above, for damaged files, for another kind
    of projector, and for one that begins with a checkpoint of `later`, which begin with it.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return _in_file(file, later)
    folder = find_model_folder(path)
    if folder is None:
        raise UserError(
            f"{KEY}: {path}: no such file or folder, and no hub id in the local cache. {NEEDED}"
        )
    if names_checkpoint(folder):
        return _in_checkpoint(find(folder), later)
    for name in (TENSORS, LLAVA_FILE):
        if (folder / name).is_file():
            return _in_file(folder / name, later)
    shapes = tensor_shapes(folder)
    if shapes is None:
        names = sorted(escape(entry.name) for entry in folder.iterdir())
        entries = ", ".join(names[:5]) or "nothing"
        raise UserError(f"{KEY}: {path}: holds no projector ({entries}). {NEEDED}")
    refuse_other_settings(optional_json(folder), f"{KEY}: {path}")
    return ProjectorFiles(folder, _projector_alone(shapes, path))


def local_names(
    disk_names: Iterable[str],
    source: str | Path,
) -> dict[str, str]:
    """Map names in our module (`linear_1.weight`) to names on disk; raises UserError for none, or
    two for one.
    """
    names = {}
    for name in disk_names:
        local = _local_name(name)
        if local in names:
            raise UserError(
                f"{KEY}: {source}: {names[local]} and {name} are two tensors for one parameter"
            )
        if local is not None:
            names[local] = name
    if not names:
        raise UserError(f"{KEY}: {source}: holds no tensor of a projector. {NEEDED}")
    return names


def as_matrix(shape: Sequence[int]) -> Shape:
    """Return a tensor's shape in a connector, where GLM's convolution (D, W, 2, 2) is a matrix (D,
    4 W).
    """
    if len(shape) <= 2:
        return tuple(shape)
    return (shape[0], math.prod(shape[1:]))


def refuse_unfit(
    shapes: Mapping[str, Shape],
    operations: Sequence[Operation],
    source: str | Path,
) -> None:
    """Raise UserError unless `shapes`, by our module's names, are those of a connector; a newline
    may be lacking.
    """
    needed = _shapes_of(operations)
    if NEWLINE not in shapes:
        needed.pop(NEWLINE, None)
    elif NEWLINE not in needed:
        layouts_with_newlines = [name for name, layout in LAYOUTS.items() if layout.has_newlines]
        raise UserError(
            f"{KEY}: {source}: holds {NEWLINE}, which ends the lines of model.vision.layout "
            f"{' and '.join(layouts_with_newlines)}. Set that layout, or choose another file"
        )
    if shapes.keys() != needed.keys():
        blocks = {name.split(".")[1] for name in shapes if name.startswith("deepstack.")}
        for kind in CONNECTORS:
            section = ProjectorSection(type=kind)
            other = connector(
                section,
                1,
                2,
                NEWLINE in shapes,
                deepstack=len(blocks),
            )
            if shapes.keys() == _shapes_of(other).keys():
                raise UserError(
                    f"{KEY}: {source}: holds a {kind} projector. "
                    f"Set model.projector.type={kind}, or another file"
                )
        missing = sorted(needed.keys() - shapes.keys())
        extra = sorted(shapes.keys() - needed.keys())
        faults = []
        if missing:
            faults.append(f"{', '.join(missing[:4])} missing")
        if extra:
            faults.append(f"{', '.join(map(escape, extra[:4]))} unknown")
        raise UserError(
            f"{KEY}: {source}: not the tensors of this run's projector: {'; '.join(faults)}"
        )
    for name, shape in shapes.items():
        if tuple(shape) != needed[name]:
            raise UserError(
                f"{KEY}: {source}: {name} has shape {tuple(shape)}, but needs {needed[name]} for "
                "this run's encoder and LLM. Choose another file, or another model.vision.name, "
                "model.llm.path, model.projector.factor or model.projector.width"
            )


def refuse_unfit_init_from(config: RunConfig, run: Path) -> None:
    """Raise UserError, before a rank starts, for a `model.projector.init_from` that is missing or
    does not fit `run`.
    """
    path = config.model.projector.init_from
    if path is None:
        return
    files = find_projector(path)
    if config.run.overwrite and run.resolve() in files.source.resolve().parents:
        raise UserError(
            f"{KEY}: {path} lies in {run}, which run.overwrite=true deletes before it is read. "
            "Choose another run.name"
        )
    if files.checkpoint is not None and config.model.init_from != path:
        trained = read_header(files.checkpoint.tensors_file)
        if others := [name for name in trained if not name.startswith("projector.")]:
            _log.info(
                f"{KEY}: uses only the projector of {files.checkpoint.path}, which has trained "
                f"{len(others):,} more tensors, e.g. {escape(others[0])}. Use model.init_from for "
                "all of them"
            )
    if files.shapes:
        names = local_names(files.shapes, files.source)
        shapes = {local: as_matrix(files.shapes[name]) for local, name in names.items()}
        refuse_unfit(shapes, models_of(config).connector, files.source)


def _in_file(file: Path, later: frozenset[Path]) -> ProjectorFiles:
    if file.suffix in PICKLED:
        return ProjectorFiles(file, {})
    if file.suffix != ".safetensors":
        raise UserError(
            f"{KEY}: {file}: neither .safetensors nor {', '.join(sorted(PICKLED))}. {NEEDED}"
        )
    if file.name == TENSORS and (file.parent / MANIFEST).exists():
        # a flipped bit in the file shows in the manifest alone
        return _in_checkpoint(find(file.parent), later)
    return ProjectorFiles(file, _projector_alone(read_header(file), file))


def _in_checkpoint(
    checkpoint: StepFolder,
    later: frozenset[Path],
) -> ProjectorFiles:
    file = checkpoint.tensors_file
    folder = checkpoint.path.resolve()
    if not checkpoint.frozen_projector:
        return ProjectorFiles(file, _projector_alone(read_header(file), file), checkpoint)
    if folder in later:
        raise UserError(
            f"{KEY}: {checkpoint.path}: its projector begins with itself. Choose another one"
        )
    init_from = checkpoint.config.model.projector.init_from
    if init_from is not None:
        find_projector(init_from, later | {folder})
    shapes = {p.name: p.shape for p in connector_parameters(checkpoint.models.connector)}
    return ProjectorFiles(file, shapes, checkpoint, is_part=True)


def _projector_alone(
    shapes: Mapping[str, Shape],
    source: str | Path,
) -> dict[str, Shape]:
    return {name: shapes[name] for name in local_names(shapes, source).values()}


def _local_name(name: str) -> str | None:
    """Return the name in our module of a projector's tensor on disk; unknown ones of LLaVA's keep
    theirs.
    """
    match = DISK_NAME.fullmatch(name)
    if match is None:
        return None
    theirs = match["llava"]
    before = ""
    if match["branch"]:
        theirs = match["branch"]
        before = f"deepstack.{match['block']}."
    if theirs is None:
        return match["ours"] or match["hf"] or match["beside"] or match["newline"]
    if theirs in ("weight", "bias"):
        return f"linear_1.{theirs}"
    layer, _, rest = theirs.partition(".")
    return f"{before}{OUR_LAYERS.get(layer, layer)}.{rest}"


def _shapes_of(operations: Sequence[Operation]) -> dict[str, Shape]:
    return {p.name.removeprefix("projector."): p.shape for p in connector_parameters(operations)}
