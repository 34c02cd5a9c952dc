"""Keep the process alive that fetches ranges of remote shards for this machine's readers.

The process is spawned, not forked, and ends with its parent. If it is killed, a new one goes on
from where the readers are.
"""

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.base.durable import held
from mmtrain.base.errors import UserError
from mmtrain.data.stream.copies import NOT_BEGUN, Copies, FetchTask
from mmtrain.runtime.child import die_with_parent, shield_multiprocessing

_log = logging.getLogger(__name__)


class Fetching:
    """The process that fetches a task's bytes, and a thread that restarts it when killed."""

    def __init__(self, folder: Path, task: FetchTask) -> None:
        """Make the folder, and start the process. Copies of killed runs beside it are deleted."""
        shield_multiprocessing()
        self._folder = folder
        self._task = task
        self._is_stopped = False
        self._process: Any = None
        self._lock = contextlib.ExitStack()
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(held(folder.with_suffix(".lock"), wait=True))
        remove_lost_copies(folder.parent)
        folder.mkdir()
        readers = len(task.replicas) * max(1, task.config.data.workers)
        np.full((readers, 2), (NOT_BEGUN, 0), np.int64).tofile(folder / "readers")
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)
        self._thread.start()

    def _keep_alive(self) -> None:
        """Start the process, and again whenever a signal ends it, until `stop`."""
        context = multiprocessing.get_context("spawn")
        while not self._is_stopped:
            arguments = (os.getpid(), self._folder, self._task)
            process = context.Process(target=_fetch, args=arguments, daemon=True)
            process.start()
            self._process = process
            process.join()
            code = process.exitcode
            if code > 0:
                Copies(self._folder).give_up("the process that fetches shards failed")
            if code >= 0:
                return
            if not self._is_stopped:
                _log.warning(f"the process that fetches shards was killed (signal {-code})")

    def stop(self) -> None:
        """End the process, and remove all copies."""
        self._is_stopped = True
        while self._thread.is_alive():
            if self._process is not None:
                self._process.kill()
            self._thread.join(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()


def remove_lost_copies(parent: Path) -> None:
    """Remove copies that no living run holds: those of runs that failed or were killed."""
    for folder in parent.glob("*/"):
        with contextlib.suppress(OSError), held(folder.with_suffix(".lock"), wait=False):
            shutil.rmtree(folder)


def _fetch(parent: int, folder: Path, task: FetchTask) -> None:
    """Fetch a task's bytes; if that fails, write the reason into the file `failed`."""
    # Ctrl-C reaches all processes. SIGTERM ends this one: at exit multiprocessing waits for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    try:
        # It imports the stores' client, which the parent may not: that would not survive its forks.
        from mmtrain.data.stream.fetcher import Fetcher

        Fetcher(folder, task).run()
    except (OSError, UserError) as error:
        Copies(folder).give_up(str(error))
