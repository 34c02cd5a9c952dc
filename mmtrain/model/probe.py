"""Try before a run whether a model, cut and packed as planned, computes what the stock model
computes.

LLM      config.json --child: tiny model of the family, parity.py--> two differences --bounds-->
    recorded, or refused
encoder  blocks alike? --child: few blocks, made-up weights: whole, in slices--> difference: 0 to
    the bit, or refused

Most faults of a cut or of packing raise no error: they train a wrong model. So every new
combination of config, cut and versions is tried once, in 2-20 s, and remembered in the user's
cache. The work is done in a child without a GPU: a model that hangs or crashes takes nothing else
down.
"""

import contextlib
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import EncoderSliceError, UserError, naming_shared_memory
from mmtrain.facts.encoders import ENCODER_BLOCK
from mmtrain.facts.families import check_family, encoder_config, llm_config
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import VisionShape, vision_shape
from mmtrain.facts.vision_files import is_timm_name
from mmtrain.runtime.child import die_with_parent, leave_out_gpu_kernels, python_child

STAGED_BOUND = 1e-6  # relative; the kernels are the same, 0.0 on every family that is known to work
PACKED_BOUND = 1e-4  # relative; rounding over 80 layers stays below 2e-5, a leak is above 1e-2
SECONDS = 300  # that the child may take

# borders of an encoder's slices: the stem alone, one block each; several blocks
CUTS = ((0, 0, 1, 2, 3), (0, 2, 3))
BLOCKS = CUTS[0][-1]  # of the encoder that is tried
# of images, as cells; not one tile, as the stem of later slices has
GRIDS = ((1, 2), (2, 3), (1, 2))
_REMEDY = "Set parallel.encoder_ranks=0, which keeps the whole encoder on rank 0"

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*: .+")
_RESULT = re.compile(r"^differences (.+)$", re.MULTILINE)  # libraries may print, too


def probe(
    path: str,
    cut_points: Sequence[int],
    streams: bool = False,
    *,
    mrope: bool = False,
) -> None:
    """Try the LLM in folder (or cached hub id) `path` with stages that begin at the decoder layers
    `cut_points`.

    If it `streams`, layers have weights only while they compute; `mrope`: see `causal_config`.
    Raises UserError naming the family where staged or packed execution differs from the stock
    model, fails, or takes longer than `SECONDS`; it takes 2 to 5 s.
    """
    folder = model_folder(path)
    config_json = llm_config(folder)
    check_family(config_json)
    how = "streamed" if streams else "resident"
    family = config_json["model_type"]
    record = _record(
        ("torch", "transformers"),
        (folder / "config.json").read_bytes(),
        json.dumps([config_json, how, mrope, *map(int, cut_points)], sort_keys=True).encode(),
    )
    if record.is_file():
        return
    staged, packed = _differences(
        "llm",
        folder,
        how,
        mrope,
        *cut_points,
        tried=f"{path}: {family} cannot be staged and packed",
    )
    refuse_differences(family, staged, packed)
    _remember(
        record,
        {
            "family": family,
            "weights": how,
            "cut_points": list(cut_points),
            "staged": staged,
            "packed": packed,
        },
    )


def refuse_differences(
    family: str,
    staged: float,
    packed: float,
) -> None:
    """Raise UserError if a family's differences (see parity.Differences) are beyond rounding."""
    advice = (
        "The run would train a wrong model. Use another family, or another version of transformers"
    )
    if not staged <= STAGED_BOUND:  # not >: a NaN is refused too
        raise UserError(
            f"{family} cannot be cut into stages: its slices differ from the whole model by "
            f"{staged:.1e} (at most {STAGED_BOUND:.0e} is rounding). {advice}"
        )
    if not packed <= PACKED_BOUND:
        raise UserError(
            f"{family} cannot be packed: documents in a pack differ from the documents alone "
            f"by {packed:.1e} (at most {PACKED_BOUND:.0e} is rounding). {advice}"
        )


def probe_encoder(models: Models) -> None:
    """Try a run's encoder, if any, in slices: 5 to 20 s the first time.

    Raises EncoderSliceError, naming encoder, difference and remedy, where slices differ from the
    whole encoder by a bit, fail, or take longer than `SECONDS`, and UserError for an encoder that
    cannot be loaded, cut or not.
    """
    chosen = models.section.vision
    if chosen is None:
        return
    shape = models.published_vision
    fault = f"{chosen.name} cannot be cut into slices"
    _refuse_unlike_blocks(shape, fault)
    settings = (
        models.section.vision_dtype,
        chosen.final_norm,
        math.isqrt(shape.features_per_image),  # of a cell, if it has some
        shape.merge > 1,
    )
    source = chosen.name
    if not is_timm_name(chosen.name):
        # its config.json counts, wherever the folder lies
        source = encoder_config(model_folder(chosen.name))
    question = json.dumps([source, *settings], sort_keys=True).encode()
    record = _record(("torch", "transformers", "timm"), question)
    if record.is_file():
        return
    try:
        (difference,) = _differences(
            "encoder",
            chosen.name,
            *settings,
            tried=fault,
        )
    except _ChildError as error:
        raise EncoderSliceError(f"{error}. {_REMEDY}") from None
    if difference != 0:  # a NaN too
        raise EncoderSliceError(
            f"{fault}: features of its slices differ from the whole encoder's by up to "
            f"{difference:.1e}, not 0. {_REMEDY}"
        )
    _remember(record, {"encoder": chosen.name, "difference": difference})


def _refuse_unlike_blocks(shape: VisionShape, fault: str) -> None:
    """Raise EncoderSliceError for an encoder with a block that is not made as one of the first,
    which are tried.
    """
    blocks = defaultdict(dict)
    for parameter in shape.parameters:
        if block := ENCODER_BLOCK.match(parameter.name):
            blocks[int(block[1])][parameter.name[block.end() :]] = parameter.shape
    kinds = [blocks[number] for number in sorted(blocks)]
    for number, kind in enumerate(kinds):
        if kind not in kinds[:BLOCKS]:
            raise EncoderSliceError(
                f"{fault}: block {number} is unlike the first {BLOCKS}. {_REMEDY}"
            )


def _record(libraries: Sequence[str], *question: bytes) -> Path:
    """Return the file that remembers an answer, named by the question, the libraries and the code
    of mmtrain's models.
    """
    parts = [*question, *(f"{name} {version(name)}".encode() for name in libraries)]
    package = Path(__file__).parents[1]
    for wing in ("layouts", "facts", "model"):
        parts += [file.read_bytes() for file in sorted((package / wing).rglob("*.py"))]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return cache_folder("probe") / f"{digest.hexdigest()}.json"


def _remember(record: Path, result: dict[str, Any]) -> None:
    # a home that cannot be written costs a second at the next launch, not the run
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(result) + "\n")


class _ChildError(UserError):
    """Raised where the child brought no result."""


def _differences(*arguments: object, tried: str) -> tuple[float, ...]:
    """Return the numbers that this module, run as a child, prints behind "differences"; `tried`
    says what a failure means.
    """
    command = python_child("-m", __name__, *arguments, CUDA_VISIBLE_DEVICES="")
    with tempfile.NamedTemporaryFile(
        prefix="mmtrain-probe-",
        suffix=".log",
        delete=False,
    ) as stream:
        log = Path(stream.name)
        try:
            child = subprocess.run(
                **command,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise _ChildError(
                f"{tried}: its tiny model did not finish within {SECONDS:g} s; see {log}"
            ) from None
    results = _RESULT.findall(child.stdout)
    if child.returncode == 0 and results:
        log.unlink()
        return tuple(map(float, results[-1].split()))
    lines = log.read_text(errors="replace").strip().splitlines()
    causes = [f"exit code {child.returncode}", *lines[-1:], *filter(_EXCEPTION.match, lines)]
    refusal = f"{UserError.__module__}.{UserError.__qualname__}: "
    if causes[-1].startswith(refusal):
        log.unlink()
        raise UserError(causes[-1].removeprefix(refusal))
    raise _ChildError(f"{tried}: its tiny model failed ({causes[-1]}); see {log}")


def _measure_llm(
    folder: str,
    how: str,
    mrope: str,
    *cut_points: str,
) -> tuple[float, float]:
    """Return the differences, in the child, of the best seed if one is out of bounds.

    With experts, rounding alone flips a choice between two that are near a tie, for some seed; a
    fault shows with all.
    """
    import torch

    from mmtrain.model.llm.language import causal_config
    from mmtrain.model.llm.parity import SEEDS, measure_differences

    torch.set_num_threads(1)  # the tiny model gains nothing from more
    config = causal_config(Path(folder), mrope == str(True))
    borders = [int(layer) for layer in cut_points]
    best = (math.inf, math.inf)
    for seed in range(SEEDS):
        best = min(best, measure_differences(config, borders, seed=seed, streams=how == "streamed"))
        if best[0] <= STAGED_BOUND and best[1] <= PACKED_BOUND:
            break
    return best


def _measure_encoder(
    name: str,
    dtype: str,
    final_norm: str,
    factor: str,
    merges: str,
) -> tuple[float]:
    """Return the largest difference of a feature over `CUTS`, in the child; infinite where one is
    not a number.
    """
    import torch

    from mmtrain.model.encoder.vision import made_up_encoder
    from mmtrain.model.encoder.vision_tower import slices_difference
    from mmtrain.model.stage import DTYPES

    has_norm = final_norm == str(True)
    shape = vision_shape(name, -1, has_norm, merges == str(True)).with_cells(int(factor))
    tower = made_up_encoder(name, DTYPES[dtype], has_norm, BLOCKS, shape)
    generator = torch.Generator().manual_seed(0)
    tiles = sum(rows * columns for rows, columns in GRIDS)
    images = torch.randn(
        tiles,
        3,
        tower.image_size,
        tower.image_size,
        generator=generator,
    )
    return (max(slices_difference(tower, cuts, images, GRIDS) for cuts in CUTS),)


if __name__ == "__main__":
    die_with_parent()
    leave_out_gpu_kernels()
    measure = {"llm": _measure_llm, "encoder": _measure_encoder}[sys.argv[1]]
    with naming_shared_memory():
        print("\ndifferences", *measure(*sys.argv[2:]))
