"""Shards: plain webdataset tars, read sample by sample.

tar file --webdataset--> {"__key__", "json", "jpg", ...} of each sample

webdataset alone would lose data in silence: at a damaged tar header Python's tarfile ends the archive without an error,
and members that are no regular files are passed over. So every archive's headers are walked before it is read; that
costs one 512-byte read and one seek per member.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import webdataset

from mmtrain.data.shard_list import check_archive
from mmtrain.errors import UserError


def read_members(path: Path) -> Iterator[dict[str, bytes | str]]:
    """Read a shard in order: per sample its key, its shard and each member's bytes by lower-case suffix.

    Raises UserError naming shard and key for damage, for a name given twice and for a member without a suffix.
    """
    files = check_archive(path)
    read, key = 0, "the start"
    try:
        for sample in webdataset.tariterators.tarfile_samples([{"url": os.fspath(path)}]):
            read += sum(not name.startswith("__") for name in sample)
            key = sample["__key__"]
            yield sample
    except (tarfile.TarError, ValueError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read after sample {key}: {error.args[0] if error.args else error}"
        ) from error
    if read != files:
        raise UserError(
            f"{path}: {files} files in the archive, but samples made of {read}: members without a suffix, or whose "
            "names begin with two underscores, belong to no sample; remove them"
        )
