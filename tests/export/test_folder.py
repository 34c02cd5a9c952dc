"""An export's folder on a file system that cannot be asked to flush folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mmtrain.export.tensors import new_folder


def test_a_file_system_that_cannot_flush_folders_takes_exports(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("content")
    assert (tmp_path / "out" / "file").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
