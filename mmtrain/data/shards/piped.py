"""Shards that a program writes: `pipe:curl -sf https://host/shard-000000.tar`, kept in the cache as files.

command --run once, without a shell--> CACHE/pipe/<hash of the command>.tar

Samples are read by offset, in an order that changes every epoch, so the output has to be a file. Price: its size on the
disk of the cache (XDG_CACHE_HOME), until it is deleted there.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held, whole_file
from mmtrain.base.errors import UserError

PREFIX = "pipe:"


def piped_shard(url: str, allowed: Sequence[str], key: str, say: Callable[[str], None]) -> Path:
    """The file that holds what the command of a `pipe:` URL writes; it runs if that is not there yet.

    `allowed` names the programs that may start, which the command line says and no file. There is no shell, so `|`, `;`
    and `>` are words like others. Raises UserError for other programs and for one that fails; `key` is the
    configuration's name for the URL, for messages.
    """
    try:
        command = shlex.split(url.removeprefix(PREFIX))
    except ValueError as error:
        raise UserError(f"{key}: {url!r} cannot be split into words ({error})") from None
    target = cache_folder("pipe") / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.tar"
    if target.is_file():
        return target
    if not command or command[0] not in allowed:
        names = ", ".join(allowed) or "none"
        raise UserError(
            f"{key}: {url!r} would run a program, and data.allow_pipe names those that may run ({names}); give "
            "data.allow_pipe=[PROGRAM] on the command line if you trust it, or download the shards and name the files"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with held(target.with_name(f".{target.name}.lock"), wait=True):
            if target.is_file():  # another run was faster
                return target
            say(f"{key}: running {shlex.join(command)}")
            start = time.perf_counter()
            with whole_file(target) as unfinished, unfinished.open("wb") as output:
                ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
                if ran.returncode != 0:
                    said = ran.stderr.decode(errors="replace").strip()[-300:]
                    raise UserError(
                        f"{key}: {url!r} failed with exit code {ran.returncode}" + (f": {said}" if said else "")
                    )
    except OSError as error:
        raise UserError(f"{key}: {url!r} cannot be run or kept in {target.parent} ({error})") from error
    say(f"{key}: {target.stat().st_size / 1e6:,.0f} MB in {time.perf_counter() - start:.1f} s, kept as {target}")
    return target
