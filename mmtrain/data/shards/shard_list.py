"""The tars that a run reads, and checks that there is anything in them.

`data.shards` --paths, folders, globs, brace ranges--> tar files
`demo:train` --the demo's, in the user's cache--> tar files, which `demo.data` makes on first use
`s3://bucket/train/*.tar` --the store is asked--> `RemoteTar`s
`pipe:curl -sSf https://host/shard-000000.tar`
    --run once, without a shell--> CACHE/pipe/<hash of the command>.tar

Samples are read by offset, in an order that changes every epoch, so the output of a program is kept
as a file. Price: its size on the disk of the cache (XDG_CACHE_HOME), until you delete it there.
"""

import hashlib
import itertools
import logging
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held, whole_file
from mmtrain.base.errors import UserError
from mmtrain.base.printing import disclosed, escape
from mmtrain.base.small_files import refuse_lost_link
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.remote import Tar, is_remote, refuse_unfit_url, remote_tars
from mmtrain.facts.model_files import PREFIX, is_demo

_log = logging.getLogger(__name__)
PIPE = "pipe:"
_KINDS = ("", "next-", "text-", "sheet-")
# what `mmtrain shard` reads
_RECORD_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
# of the demo's data
SPLITS = tuple(map("".join, itertools.product(_KINDS, ("train", "held-out"))))
# What makes them and their indexes; the cache never outlives it.
_DEMO_SOURCES = (
    *("data/prepare/sharding.py", "data/shards/index.py"),
    *("demo/data.py", "demo/pictures.py", "demo/scene.py", "demo/text.py"),
)

# Limits of one pattern: braceexpand would take all memory for {0..999999}{0..999999}.
MAX_NAMES = 1_000_000  # shards of 100 MB: 100 TB
MAX_PATTERN = 4096  # characters, as of a path
MAX_BRACES = 100  # braceexpand calls itself for braces inside braces
_CHUNK = 1 << 20  # bytes
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?")


def expand_shards(
    shards: str | Sequence[str],
    key: str = "data.shards",
    allow_pipe: Sequence[str] = (),
    cache_gib: float | None = None,
) -> tuple[Tar, ...]:
    """List the tar files that `shards` names, in order.

    `shards` are paths, URLs, folders, globs (*, ?) and brace ranges ({00000..00099}).

    A folder stands for its *.tar. These, and a glob's files, are sorted; braces mean what they mean
    to webdataset. `pipe:` URLs are run if `allow_pipe` names their program; the output of all may
    take `cache_gib`. `key` is the configuration's name for the list. Raises UserError for a pattern
    without files, a file named twice, and what a store refuses.
    """
    if isinstance(shards, str):
        shards = (shards,)
    tars = _listed(shards, key, allow_pipe, cache_gib)
    for path, times in Counter(tars).items():
        if times > 1:
            raise UserError(
                f"{key}: {path} is named twice, so each sample would count twice. Name it once"
            )
    return tuple(tars)


def _listed(
    shards: Sequence[str], key: str, allow_pipe: Sequence[str], cache_gib: float | None = None
) -> list[Tar]:
    """List tars as `expand_shards` does, also some that are named twice."""
    tars: list[Tar] = []
    for are_remote, patterns in itertools.groupby(shards, is_remote):
        if not are_remote:
            for pattern in patterns:
                tars += _tars_of(pattern, key, allow_pipe, cache_gib)
            continue
        # All URLs are asked for together: each call starts a process, which takes 0.1 s.
        urls = []
        for pattern in patterns:
            refuse_unfit_url(pattern, key)
            urls += _without_braces(pattern, key)
        tars += remote_tars(urls, key)
    if not tars:
        raise UserError(f"{key}: the list is empty. Name at least one webdataset tar")

    for path in tars:
        if isinstance(path, Path):
            refuse_lost_link(path)
            if not path.is_file():
                raise UserError(
                    f"{key}: {path} is not a regular file. Name tars, or folders that hold them"
                )
        if path.name.lower().endswith(_RECORD_SUFFIXES):
            raise UserError(
                f"{key}: {path} is a file of records, not a webdataset tar. "
                f"Make tars with mmtrain shard --from {shlex.quote(str(path))} --images DIR --out "
                "FOLDER (no --images for text), and name FOLDER"
            )
    return tars


def _tars_of(
    pattern: str, key: str, allow_pipe: Sequence[str], cache_gib: float | None
) -> list[Tar]:
    if is_demo(pattern):
        tars = sorted(demo_shards(pattern).glob("*.tar"))
        if not tars:
            raise UserError(
                f"{key}: {pattern} is not in {demo_shards(pattern)}, where `mmtrain train` puts it "
                "as it starts. Start it again, with an unchanged XDG_CACHE_HOME"
            )
        return tars
    if not pattern:
        raise UserError(
            f"{key}: the name is empty. Name a webdataset tar, "
            f"or set {key}=null where that is allowed"
        )
    if pattern.startswith(PIPE):
        names = _without_braces(pattern, key)
        return [_piped_shard(name, allow_pipe, key, cache_gib) for name in names]

    refuse_unfit_url(pattern, key)
    tars = []
    for path in matching_files(pattern, key):
        inside = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        if not inside:
            raise UserError(
                f"{key}: the folder {path} holds no file *.tar. Name the tars, or another folder"
            )
        tars += inside
    return tars


def matching_files(pattern: str, key: str) -> list[Path]:
    """List the files and folders that a path, glob or brace range names, in order.

    Raises UserError for none.
    """
    files = []
    for name in _without_braces(pattern, key):
        whole = Path(name).expanduser()
        # Path.glob takes no absolute pattern; a file whose name holds brackets is no pattern.
        paths = [whole]
        if not whole.exists():
            paths = sorted(map(Path, glob(str(whole))))  # noqa: PTH207
        if not paths:
            origin = f" (from {pattern})" if name != pattern else ""
            raise UserError(f"{key}: no file {name}{origin}")
        files += paths
    return files


def _without_braces(pattern: str, key: str) -> list[str]:
    """Expand the brace ranges of a pattern. Raises UserError."""
    _refuse_endless(pattern, key)
    try:
        return list(braceexpand(pattern))
    except UnbalancedBracesError:
        raise UserError(
            f"{key}: {disclosed(pattern)!r} has braces that do not match. "
            "Write a range as shard-{000000..000099}.tar, and a brace in a name as \\{"
        ) from None


def _refuse_endless(pattern: str, key: str) -> None:
    """Raise UserError for a pattern that would be expanded, or searched for, for hours."""
    shown = escape(repr(disclosed(pattern)))
    if len(pattern) > MAX_PATTERN:
        raise UserError(
            f"{key}: {shown} has {len(pattern):,} characters; a path may have {MAX_PATTERN:,}"
        )
    if "**" in pattern:
        raise UserError(
            f"{key}: {shown} would search all folders below. "
            "Write one * per folder between, e.g. data/*/*.tar"
        )
    # at most: a range inside other braces counts as often as they have alternatives
    names = 1
    rest = pattern
    while group := _INNERMOST.search(rest):
        alternatives = group[1].count(",")
        if number := _RANGE.fullmatch(group[1]):
            alternatives = abs(int(number[2]) - int(number[1]))
        names *= alternatives + 1
        rest = rest[: group.start()] + rest[group.end() :]
    if names > MAX_NAMES or pattern.count("{") > MAX_BRACES:
        raise UserError(
            f"{key}: the braces of {shown} name more than {MAX_NAMES:,} files, or are more than "
            f"{MAX_BRACES}. Correct the range, or name the folder's tars by FOLDER/*.tar"
        )


def demo_shards(name: str) -> Path:
    """Return the folder of the demo's shards of this name.

    Raises UserError for a name that the demo has not.
    """
    split = name.removeprefix(PREFIX)
    if split not in SPLITS:
        known = ", ".join(PREFIX + each for each in SPLITS)
        raise UserError(f"{name}: the demo has no such data, only {known}")
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for source in _DEMO_SOURCES:
        digest.update((package / source).read_bytes())
    return cache_folder("demo") / f"{split}-{digest.hexdigest()[:12]}"


def cache_bound(cache_gib: float | None) -> int:
    """Return how many bytes of data.cache_gib the output of `pipe:` shards leaves for others."""
    folder = cache_folder("pipe")
    if cache_gib is None:
        folder.mkdir(parents=True, exist_ok=True)
        half_of_free_gib = shutil.disk_usage(folder).free / 2**31
        cache_gib = min(100, half_of_free_gib)
    return round(cache_gib * 2**30) - sum(file.stat().st_size for file in folder.glob("*.tar"))


def _piped_shard(url: str, allowed: Sequence[str], key: str, cache_gib: float | None) -> Path:
    """Return the file with the output of a `pipe:` URL's command.

    The command runs, without a shell, if the file is not there yet.

    Raises UserError for programs other than the `allowed` ones, for one that fails, and for more
    output than the cache may hold.
    """
    shown = disclosed(url)
    try:
        command = shlex.split(url.removeprefix(PIPE))
    except ValueError as error:
        raise UserError(f"{key}: {shown!r} cannot be split into words ({error})") from None
    if {"|", "||"} & set(command):
        raise UserError(
            f"{key}: {shown!r} holds |, which needs a shell, and none is used. Name one program"
        )
    target = cache_folder("pipe") / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.tar"
    if target.is_file():
        return target
    if not command or command[0] not in allowed:
        raise UserError(
            f"{key}: {shown!r} would run a program, but data.allow_pipe allows only "
            f"{', '.join(allowed) or 'none'}. If you trust it, give data.allow_pipe=[PROGRAM] on "
            "the command line, after a CONFIG, or download the shards and name the files"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with held(target.with_name(f".{target.name}.lock"), wait=True):
            if target.is_file():  # another run was faster
                return target
            _log.info(f"{key}: running {shown}")
            start = time.perf_counter()
            left = cache_bound(cache_gib)
            with (
                whole_file(target) as unfinished,
                unfinished.open("wb") as output,
                tempfile.TemporaryFile() as errors,
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
                ) as process,
            ):
                while chunk := process.stdout.read(_CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        process.kill()
                        raise UserError(
                            f"{key}: the output of pipe: shards in {target.parent} would take more "
                            "than data.cache_gib allows. Raise it, or name URLs without pipe:, "
                            "whose bytes are fetched as they are needed"
                        )
                    output.write(chunk)
                if process.wait() != 0:
                    errors.seek(0)
                    words = errors.read().decode(errors="replace").strip()[-300:]
                    if not words:
                        words = "it printed nothing; curl -sSf prints what failed"
                    raise UserError(
                        f"{key}: {shown!r} failed with exit code {process.returncode}: {words}"
                    )
    except OSError as error:
        raise UserError(
            f"{key}: {shown!r} cannot be run or kept in {target.parent} ({error})"
        ) from error
    _log.info(
        f"{key}: {target.stat().st_size / 1e6:,.0f} MB in "
        f"{time.perf_counter() - start:.1f} s, kept as {target}"
    )
    return target


def find_shards(
    names: Sequence[str], allow_pipe: Sequence[str] = (), cache_gib: float | None = None
) -> tuple[Tar, ...]:
    """List the shards of a tool's command line as `expand_shards` does.

    Here a shard may be named twice.
    """
    return tuple(dict.fromkeys(_listed(names, "SHARDS", allow_pipe, cache_gib)))


def refuse_unfinished_shards(paths: Sequence[Tar], key: str) -> None:
    """Raise UserError for shards that mmtrain shard did not finish.

    It writes dataset.json at its end.
    """
    for folder in dict.fromkeys(path.parent for path in paths if isinstance(path, Path)):
        if (folder / "rejected.jsonl").is_file() and not (folder / "dataset.json").is_file():
            raise UserError(
                f"{key}: {folder} holds an unfinished data set: "
                "mmtrain shard was stopped before it wrote dataset.json there. "
                "Run that command again with --resume, or delete the folder and make it again"
            )


def refuse_empty_shards(paths: Sequence[Tar], key: str = "data.shards") -> None:
    """Raise UserError if the shards hold no file, or one is empty or damaged at its begin."""
    for path in paths:
        if path.stat().st_size == 0:
            raise UserError(
                f"{key}: {path} is empty (0 bytes). Copy it again, or take it out of the list"
            )
    for path in paths:
        with path.open("rb") as stream:
            if next(read_headers(path, stream), None) is not None:
                return
    seen = f"{paths[0]} is an empty archive"
    if len(paths) > 1:
        seen = f"all {len(paths)} shards are empty archives"
    raise UserError(f"{key}: {seen}, without any file. Name tars that hold samples")
