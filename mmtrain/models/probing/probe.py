"""Before a run: does this model, cut at these points and packed, compute what the stock model computes?

config.json --child process: tiny model of the family, parity.py--> two differences --bounds--> recorded, or refused

A family may do anything in its forward, and most faults of staging or packing raise no error: they train a wrong model.
So every new combination of config, cut points and versions is tried once, in 2-5 s, and remembered in the user's
cache. The work is done in a child: a model that hangs or crashes takes nothing else down, and the launcher need not
import torch. It sees no GPU: CUDA must not start on its account.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.models.facts.families import check_family, llm_config
from mmtrain.models.facts.model_files import model_folder
from mmtrain.runtime.child import die_with_parent, python_child

STAGED_BOUND = 1e-6  # relative; the kernels are the same, 0.0 on every family that is known to work
SECONDS = 300  # that the child may take
PACKED_BOUND = 1e-4  # relative; rounding over 80 layers stays below 2e-5, a leak is above 1e-2

RESIDENT, STREAMED = "resident", "streamed"
_FAULTS = {RESIDENT: "cannot be staged and packed", STREAMED: "cannot be staged, packed and streamed"}
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*: .+")
_RESULT = re.compile(r"^differences (.+)$", re.MULTILINE)  # libraries may print, too


def probe(path: str, cut_points: Sequence[int], *, streams: bool = False) -> None:
    """Try the model in folder (or cached hub id) `path` with stages that begin at the decoder layers `cut_points`.

    If it `streams`, layers have weights only while they compute.

    Raises UserError naming the family where staged or packed execution differs from the stock model, fails, or takes
    longer than `SECONDS`: it takes 2 to 5 s, on a machine that is busy with other work a minute.
    """
    folder = model_folder(path)
    config_json = llm_config(folder)
    check_family(config_json)
    how = STREAMED if streams else RESIDENT
    record = cache_folder("probe") / f"{_fingerprint(folder, how, cut_points)}.json"
    if record.is_file():
        return
    family = config_json["model_type"]
    staged, packed = differences_in_child(__name__, [folder, how, *cut_points], family, _FAULTS[how])
    refuse_differences(family, staged, packed)
    remember(
        record, {"family": family, "weights": how, "cut_points": list(cut_points), "staged": staged, "packed": packed}
    )


def remember(record: Path, result: dict[str, Any]) -> None:
    """Write down what need not be tried again."""
    with contextlib.suppress(OSError):  # a home that cannot be written costs a second at the next launch, not the run
        record.parent.mkdir(parents=True, exist_ok=True)
        write_whole(record, json.dumps(result) + "\n")


def refuse_differences(family: str, staged: float, packed: float) -> None:
    """Raise UserError if a family's differences (see parity.Differences) are beyond rounding."""
    advice = "the run would train against a wrong model; use another family, or another version of transformers"
    if not staged <= STAGED_BOUND:  # not >: a NaN is refused too
        raise UserError(
            f"{family} cannot be cut into stages: its slices differ from the whole model by {staged:.1e} "
            f"(at most {STAGED_BOUND:.0e} is rounding); {advice}"
        )
    if not packed <= PACKED_BOUND:
        raise UserError(
            f"{family} cannot be packed: documents in one pack differ from the same documents alone by {packed:.1e} "
            f"(at most {PACKED_BOUND:.0e} is rounding); {advice}"
        )


def _fingerprint(folder: Path, how: str, cut_points: Sequence[int]) -> str:
    """Everything that the result depends on: the config, the cut, the libraries, and the code of mmtrain's models."""
    parts = [
        (folder / "config.json").read_bytes(),
        json.dumps(llm_config(folder), sort_keys=True).encode(),  # what facts/families.py makes of it
        json.dumps([how, *map(int, cut_points)]).encode(),
    ]
    return fingerprint_with_code(parts, ("torch", "transformers"))


def fingerprint_with_code(parts: Sequence[bytes], libraries: Sequence[str]) -> str:
    """Of what a trial is of, of the libraries' versions, and of the code of mmtrain's models."""
    parts = [
        *parts,
        *(f"{name} {version(name)}".encode() for name in libraries),
        *(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py"))),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def differences_in_child(
    module: str, arguments: Sequence[object], tried: str, fault: str, failure: type[UserError] = UserError
) -> tuple[float, ...]:
    """The numbers that `module`, run as a child without a GPU, prints behind "differences".

    Raises `failure` if it brings none back in time; what the child raised as one, or as a UserError, is raised again.
    `tried` names the model, `fault` says what a failure means for it.
    """
    command = python_child("-m", module, *arguments, CUDA_VISIBLE_DEVICES="")
    with tempfile.NamedTemporaryFile(prefix="mmtrain-probe-", suffix=".log", delete=False) as stream:
        log = stream.name
        try:
            child = subprocess.run(**command, stdout=subprocess.PIPE, stderr=stream, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            late = f"{tried}: its tiny model did not finish within {SECONDS:g} s; see {log}"
            raise failure(late) from None
    found = _RESULT.findall(child.stdout)
    if child.returncode == 0 and found:
        Path(log).unlink()
        return tuple(map(float, found[-1].split()))
    lines = Path(log).read_text(errors="replace").strip().splitlines()
    causes = [line for line in lines if _EXCEPTION.match(line)] or lines[-1:] or [f"exit code {child.returncode}"]
    for kind in (failure, UserError):
        refusal = f"{kind.__module__}.{kind.__qualname__}: "
        if causes[-1].startswith(refusal):
            Path(log).unlink()
            raise kind(causes[-1].removeprefix(refusal))
    raise failure(f"{tried} {fault}: its tiny model failed ({causes[-1]}); see {log}")


def _measure(folder: Path, how: str, cut_points: Sequence[int]) -> tuple[float, float]:
    """In the child: the differences, of the best seed if one is out of bounds.

    With experts, rounding alone flips a choice between two that are near a tie, for some seed; a fault shows with all.
    """
    import torch

    from mmtrain.models.modules.language import causal_config
    from mmtrain.models.modules.parity import SEEDS, measure_differences

    torch.set_num_threads(1)  # the tiny model gains nothing from more
    config = causal_config(folder)
    best = (float("inf"), float("inf"))
    for seed in range(SEEDS):
        best = min(best, measure_differences(config, cut_points, seed=seed, streams=how == STREAMED))
        if best[0] <= STAGED_BOUND and best[1] <= PACKED_BOUND:
            break
    return best


if __name__ == "__main__":
    die_with_parent()
    print("\ndifferences", *_measure(Path(sys.argv[1]), sys.argv[2], [int(layer) for layer in sys.argv[3:]]))
