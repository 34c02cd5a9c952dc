"""Every fault of damaged_bytes, hostile_contents and hostile_tars, and trouble with the storage, from tar to batch."""

import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from broken_shards import AFTER, BEFORE, BETWEEN, Broken, Case, Kind
from damaged_bytes import DAMAGES
from hostile_contents import CONTENTS
from hostile_tars import STRUCTURES
from sound_set import SoundSet, check_epoch, lay_out, make_sound_set, open_epoch, whole_epoch

from mmtrain.base.errors import UserError

KINDS = [*DAMAGES, *CONTENTS, *STRUCTURES]


@pytest.fixture(scope="module")
def sound(tiny, make_tiny, tmp_path_factory) -> SoundSet:
    return make_sound_set(tiny, tmp_path_factory.mktemp("sound"), make_tiny.make_tiny_shards)


def inject(sound: SoundSet, kind: Kind, number: int, attempt: int = 0) -> Broken:
    shard, other = sound.shards[number % 2], sound.shards[1 - number % 2]
    return kind.inject(Case(shard, other, number, random.Random(f"{kind} {number} {attempt}")))


def suffer(sound: SoundSet, folder: Path, kind: Kind, number: int, broken: Broken, *overrides: str) -> None:
    """Run an epoch with one fault in it and check what came of it."""
    shard = lay_out(folder, sound, kind.regime, number % 2, broken)
    try:
        packed = open_epoch(sound.tiny, folder, *overrides)
        batches = whole_epoch(packed)
    except UserError as error:
        assert broken.error is not None, error
        assert str(shard) in str(error)
        assert re.search(broken.error, str(error)), error
    else:
        assert broken.error is None, f"no error: {broken.error}"
        check_epoch(packed, batches, broken, sound)
    shutil.rmtree(folder)


def test_the_sound_set_is_what_its_files_say(sound):
    assert 2 <= len(sound.overlong) <= 5
    packed = open_epoch(sound.tiny, sound.folder)
    check_epoch(packed, whole_epoch(packed), Broken(b""), sound)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_fault_is_a_named_error_or_costs_the_damaged_samples_alone(sound, tmp_path, kind):
    # Flips that meet, and zeros where zeros were, are no faults of their own.
    injected = [] if kind.regime == BEFORE else [(number, sound.shards[number].tar, None) for number in (0, 1)]
    for number in range(kind.count):
        drawn = (inject(sound, kind, number, attempt) for attempt in range(9))
        broken = next(one for one in drawn if (number % 2, one.tar, one.index) not in injected)
        injected.append((number % 2, broken.tar, broken.index))
        suffer(sound, tmp_path / str(number), kind, number, broken)


WITH_WORKERS = {
    ("bit flip in an image", AFTER),
    ("bit flip in a text", BETWEEN),
    ("another tar of the same size", AFTER),
    ("shortened image", BEFORE),
    ("truncated", BEFORE),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if (kind.name, kind.regime) in WITH_WORKERS], ids=str)
def test_in_workers_a_fault_comes_to_the_same(sound, tmp_path, kind):
    suffer(sound, tmp_path / "0", kind, 0, inject(sound, kind, 0), "data.workers=2")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of memory")
def test_bombs_take_no_memory(sound, tmp_path):
    bombs = [kind for kind in KINDS if "60,000" in kind.name or "unpacks" in kind.name]
    assert len(bombs) == 10
    broken = [inject(sound, kind, 0) for kind in bombs]
    suffer(sound, tmp_path / "warm", bombs[0], 0, broken[0])
    before = peak_after_reset()
    for kind, one in zip(bombs, broken, strict=True):
        suffer(sound, tmp_path / "bomb", kind, 0, one)
    assert peak() - before < 64 << 20


def peak_after_reset() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak becomes what there is now
    return peak()


def peak() -> int:
    """Most memory that this process has had, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@dataclass(frozen=True)
class Trouble:
    """What becomes of a shard's path while an epoch is read: `aside` is where the sound file can be put meanwhile."""

    name: str
    begin: Callable[[Path, Path], None]
    end: Callable[[Path, Path], None]
    error: str
    while_open: bool = False  # begins once the shard has been read from

    def __str__(self) -> str:
        return self.name


def lead_to(target: str | None) -> Callable[[Path, Path], None]:
    def begin(shard: Path, aside: Path) -> None:
        shard.rename(aside)
        shard.symlink_to(shard if target is None else target)

    return begin


def make_a_folder(shard: Path, aside: Path) -> None:
    shard.rename(aside)
    shard.mkdir()


def move_the_data_set(shard: Path, aside: Path) -> None:
    shard.parent.rename(aside)


def cut(shard: Path, aside: Path) -> None:
    shutil.copy(shard, aside)
    os.truncate(shard, 512)


def put_back(shard: Path, aside: Path) -> None:
    if shard.is_dir():
        shard.rmdir()
    aside.replace(shard)


def fill_up(shard: Path, aside: Path) -> None:
    with shard.open("r+b") as stream:
        stream.write(aside.read_bytes())


TROUBLES = [
    Trouble("it is gone", lambda shard, aside: shard.rename(aside), put_back, "No such file"),
    Trouble(
        "its folder is gone",
        move_the_data_set,
        lambda shard, aside: aside.rename(shard.parent),
        "(No such file|has no index)",
    ),
    Trouble("reads fail", lead_to("/proc/self/mem"), put_back, "Input/output error"),
    Trouble("it is a link in a circle", lead_to(None), put_back, "Too many levels"),
    Trouble("it is a link to nothing", lead_to("nothing"), put_back, "No such file"),
    Trouble("it is a folder", make_a_folder, put_back, "Is a directory"),
    Trouble("it is cut off while it is open", cut, fill_up, "cut off by the file's end", while_open=True),
]


def read_in_trouble(sound: SoundSet, folder: Path, trouble: Trouble, known: bool, *overrides: str, heals: bool) -> None:
    """An epoch whose first shard gets into trouble; `known`: its index was read before, and need not be again."""
    shard = lay_out(folder, sound, AFTER, 0, Broken(sound.shards[0].tar))
    packed = open_epoch(sound.tiny, folder, f"data.io_retry_seconds={30 if heals else 0.15}", *overrides)
    if known:
        packed.catalog.find(0)
    if trouble.while_open:
        packed.reader.read(0)
    aside = folder.parent / "aside"
    trouble.begin(shard, aside)
    healer = threading.Timer(0.25, trouble.end, (shard, aside))
    if heals:
        healer.start()
    try:
        check_epoch(packed, whole_epoch(packed), Broken(b""), sound)
    finally:
        if heals:
            healer.join()


# A path's size is compared when its index is read: one that leads to another file is then no trouble but a stale index.
STORAGE = [(trouble, known) for trouble in TROUBLES for known in (True, False) if known or "gone" in trouble.name]


@pytest.mark.parametrize(("trouble", "known"), STORAGE, ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_read_that_fails_for_a_while_changes_nothing(sound, tmp_path, trouble, known, workers):
    read_in_trouble(sound, tmp_path / "s", trouble, known, f"data.workers={workers}", heals=True)


@pytest.mark.parametrize(("trouble", "known"), STORAGE, ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_read_that_fails_for_good_is_an_error_that_names_the_shard(sound, tmp_path, trouble, known, workers):
    with pytest.raises(UserError, match=rf"tiny-00000\.tar.*{trouble.error}.*tried for 0\.15 s"):
        read_in_trouble(sound, tmp_path / "s", trouble, known, f"data.workers={workers}", heals=False)


def test_a_shard_that_is_removed_while_it_is_open_is_read_to_its_end(sound, tmp_path):
    shard = lay_out(tmp_path / "s", sound, AFTER, 0, Broken(sound.shards[0].tar))
    packed = open_epoch(sound.tiny, tmp_path / "s")
    packed.reader.read(0)
    shard.unlink()
    check_epoch(packed, whole_epoch(packed), Broken(b""), sound)


def test_a_shard_that_was_there_when_the_run_was_configured_is_missed(sound, tmp_path):
    shard = lay_out(tmp_path / "s", sound, AFTER, 0, Broken(sound.shards[0].tar))
    shard.unlink()
    with pytest.raises(UserError, match=f"no file {shard}"):
        open_epoch(sound.tiny, tmp_path / "s", f"data.shards={tmp_path}/s/tiny-{{00000..00001}}.tar")
