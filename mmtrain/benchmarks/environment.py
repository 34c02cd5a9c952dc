"""Make the Python environment in which lmms-eval runs, above the packages of this one.

This one is not touched. torch, transformers and mmtrain are those that run here; where lmms-eval
needs another version of a package, pip puts that one into the new environment alone. What it brings
itself has the versions of lmms_eval_constraints.txt.
"""

import hashlib
import logging
import site
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held
from mmtrain.base.errors import UserError
from mmtrain.runtime.child import python_child

_log = logging.getLogger(__name__)
VERSION = "0.7.3"
# with it a local task of the demo gets the score that the run records
LMMS_EVAL = f"lmms-eval=={VERSION}"
PINS = Path(__file__).with_name("lmms_eval_constraints.txt")


def lmms_python() -> Path:
    """Return the interpreter of lmms-eval's environment, made once, in the cache.

    Raises UserError where pip fails.
    """
    here = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        here.append(site.getusersitepackages())
    of_all = repr((LMMS_EVAL, PINS.read_text(), sys.version, here))
    key = hashlib.sha256(of_all.encode()).hexdigest()[:20]
    folder = cache_folder("lmms-eval") / key
    python = folder / "bin" / "python"
    complete = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_name(f".{key}.lock"), wait=True):
        if not complete.exists():
            _log.info(f"installing {LMMS_EVAL} into {folder}, once: about 0.5 GB, a few minutes")
            venv.create(folder, clear=True, with_pip=True)
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "here.pth").write_text(
                "".join(f"import site; site.addsitedir({path!r})\n" for path in here)
            )
            pins = folder / PINS.name
            pins.write_text(
                f"{PINS.read_text()}torch=={version('torch')}\ntransformers=={version('transformers')}\n"
            )
            options = ("--quiet", "--disable-pip-version-check", "-c", pins)
            pip = python_child("-m", "pip", "install", *options, LMMS_EVAL, interpreter=python)
            if subprocess.run(**pip).returncode:
                raise UserError(
                    f"pip cannot install {LMMS_EVAL} into {folder}, as it says above. "
                    "It needs a network"
                )
            # pip's own settings can make it install nothing, or elsewhere (PIP_TARGET)
            if not any(
                Path(path, f"lmms_eval-{VERSION}.dist-info").exists() for path in (packages, *here)
            ):
                raise UserError(
                    f"pip has not put {LMMS_EVAL} into {folder}. See pip's settings: "
                    "pip config list"
                )
            complete.touch()
    return python
