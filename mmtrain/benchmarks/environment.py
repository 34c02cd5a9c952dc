"""The Python environment in which lmms-eval runs: its packages above those of this one, which it does not touch.

torch, transformers and mmtrain are those that run here; where lmms-eval needs another version of a package, pip puts
that one into the new environment alone.
"""

from __future__ import annotations

import hashlib
import logging
import site
import subprocess
import sys
import venv
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held
from mmtrain.base.errors import UserError

_log = logging.getLogger(__name__)
LMMS_EVAL = "lmms-eval==0.7.3"  # with it a local task of the demo gets the score that the run records


def lmms_python() -> Path:
    """Return the interpreter of lmms-eval's environment, made once, in the cache. Raises UserError where pip fails."""
    here = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    key = hashlib.sha256(repr((LMMS_EVAL, sys.version, here)).encode()).hexdigest()[:20]
    folder = cache_folder("lmms-eval") / key
    python, complete = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_name(f".{key}.lock"), wait=True):
        if not complete.exists():
            _log.info(f"installing {LMMS_EVAL} into {folder}, once: about 0.5 GB, a few minutes")
            venv.create(folder, clear=True, with_pip=True)
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", LMMS_EVAL]
            if subprocess.run(pip).returncode:
                raise UserError(f"pip cannot install {LMMS_EVAL} into {folder}, as it says above. It needs a network")
            complete.touch()
    return python
