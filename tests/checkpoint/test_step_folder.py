"""A checkpoint is whole or not there; every damage to it is found, named, and never loaded."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from json_files import read_json
from step_states import state_of

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    TENSORS,
    StepFolder,
    find,
    new_step_folder,
    newest,
    remove,
    remove_unfinished,
    step_folders,
    step_of,
    step_path,
    why_damaged,
)
from mmtrain.config.load import load_config

FILES = (TENSORS, OPTIMIZER, STATE, MANIFEST)


def tensor_bytes(seed: int) -> bytes:
    """A safetensors file made by hand: length of the header, header, data."""
    data = hashlib.sha512(str(seed).encode()).digest() * 4
    header = json.dumps({"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def save(run: Path, step: int, **state: object) -> Path:
    """A checkpoint as a run writes it."""
    target = step_path(run, step)
    run.mkdir(exist_ok=True)
    with new_step_folder(target) as folder:
        (folder / TENSORS).write_bytes(tensor_bytes(step))
        (folder / OPTIMIZER).write_bytes(tensor_bytes(step + 100))
        (folder / STATE).write_text(json.dumps(state_of(step, **state)) + "\n")
    return target


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two checkpoints, of which tests damage the newer one."""
    save(tmp_path / "run", 3)
    save(tmp_path / "run", 6)
    return tmp_path / "run"


def assert_found_out(run: Path, file: str) -> None:
    """`newest` and `find` fall back to step 3 and say which file of step 6 is damaged; `find`
    refuses step 6.
    """
    bad = step_path(run, 6)
    found, damaged = newest(run)
    assert found is not None and found.step == 3
    assert list(damaged) == [bad] and file in damaged[bad]
    assert find(run).path == step_path(run, 3)
    with pytest.raises(UserError) as refused:
        find(bad)
    assert str(bad) in str(refused.value) and file in str(refused.value)


def test_what_was_written_is_found_again(run):
    assert sorted(path.name for path in step_path(run, 6).iterdir()) == sorted(FILES)
    assert [path.name for path in step_folders(run)] == ["step-00000006", "step-00000003"]
    assert newest(run) == (StepFolder(step_path(run, 6)), {})
    for given in (run, step_path(run, 6)):
        found = find(given)
        assert (found.step, found.path, found.tensors_file.read_bytes()) == (
            6,
            step_path(run, 6),
            tensor_bytes(6),
        )


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(run, name):
    file = step_path(run, 6) / name
    content = file.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        file.write_bytes(damaged)
        why = why_damaged(file.parent)
        assert why is not None and name in why, f"bit {place % 8} of byte {place}"
    assert_found_out(run, name)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


DAMAGES = {
    "cut to nothing": lambda file: file.write_bytes(b""),
    "cut by a byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "grown by a byte": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "removed": Path.unlink,
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda file: file.symlink_to("/dev/zero")),
    "JSON of another kind": lambda file: file.write_bytes(b"[]"),
    "of another checkpoint": lambda file: shutil.copy(
        file.parent.with_name("step-00000003") / file.name, file
    ),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_found_and_named(run, name, damage):
    damage(step_path(run, 6) / name)
    # a manifest of another checkpoint accuses the first file that is not that one's
    accused = (
        "is damaged: " if damage is DAMAGES["of another checkpoint"] and name == MANIFEST else name
    )
    assert_found_out(run, accused)


# by somebody who can make the manifest's checksum right: what is wrong, and what is accused
CRAFTED = {
    "a state that is no JSON": ({STATE: b"[" * 200_000}, f"{STATE} is damaged"),
    "a step that is text": (
        {STATE: json.dumps(state_of(6) | {"step": "6"}).encode()},
        "mmtrain did not write its step",
    ),
    "an entry that is a number": ({TENSORS: 7}, TENSORS),
    "a later format": ({"format": 3}, f"{MANIFEST} has version 3; this mmtrain reads 2"),
    "a file that is not there": (
        {"other": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}},
        "other",
    ),
}


@pytest.mark.parametrize(("entries", "accused"), CRAFTED.values(), ids=CRAFTED)
def test_content_that_no_run_writes_is_found_though_all_checksums_are_right(run, entries, accused):
    folder = step_path(run, 6)
    files = read_json(folder / MANIFEST)["files"]
    for name, content in entries.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
            content = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files[name] = content
    described = {"format": entries.get("format", 2), "files": files}
    checksum = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(described | {"sha256": checksum}, indent=1) + "\n")
    assert_found_out(run, accused)


def test_a_renamed_folder_does_not_pass_for_another_step(run):
    step_path(run, 3).rename(step_path(run, 9))
    found, damaged = newest(run)
    assert found is not None and found.step == 6
    assert damaged == {step_path(run, 9): "state.json is from step 3: the folder was renamed"}
    with pytest.raises(UserError, match="from step 3: the folder was renamed"):
        find(step_path(run, 9))


@pytest.mark.parametrize(
    "name", ["step-00000009.tmp", "step-00000006.discarded", "step-9", "stop-00000009", "best"]
)
def test_folders_that_are_not_checkpoints_by_their_name_are_not_taken(run, name):
    shutil.copytree(step_path(run, 6), run / "checkpoints" / name)
    shutil.rmtree(step_path(run, 6))
    assert newest(run) == (StepFolder(step_path(run, 3)), {})


def test_when_all_are_damaged_every_one_is_named(run):
    (step_path(run, 3) / STATE).unlink()
    (step_path(run, 6) / TENSORS).write_bytes(b"")
    assert newest(run)[0] is None
    with pytest.raises(UserError, match=r"no checkpoint of .*run is whole:") as refused:
        find(run)
    for words in (
        f"{step_path(run, 3)}: {STATE} is missing",
        f"{step_path(run, 6)}: {TENSORS} is damaged: it has 0 bytes",
    ):
        assert words in str(refused.value)


@pytest.mark.parametrize("given", ["nowhere", "run/checkpoints/step-00000099"])
def test_a_path_that_is_not_there_is_refused(run, given):
    with pytest.raises(UserError, match="no such folder"):
        find(run.parent / given)


def test_an_existing_checkpoint_is_never_written_into(run):
    before = (step_path(run, 6) / MANIFEST).read_bytes()
    with pytest.raises(FileExistsError, match="never written into an existing folder"):
        save(run, 6)
    assert (step_path(run, 6) / MANIFEST).read_bytes() == before and why_damaged(
        step_path(run, 6)
    ) is None


def test_a_save_that_fails_leaves_nothing_and_the_ones_before_whole(run):
    with (
        pytest.raises(OSError, match="No space left"),
        new_step_folder(step_path(run, 9)) as folder,
    ):
        (folder / TENSORS).write_text("whole")
        (folder / OPTIMIZER).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(folder / OPTIMIZER))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]
    assert newest(run) == (StepFolder(step_path(run, 6)), {})


def test_what_a_killed_save_left_hinders_no_save_and_is_removed_by_the_next_start(run):
    unfinished = run / "checkpoints" / ".step-00000009.0123abcd.tmp"
    unfinished.mkdir()
    (unfinished / TENSORS).write_text("half")
    save(run, 9)
    assert newest(run) == (StepFolder(step_path(run, 9)), {})
    remove_unfinished(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-0000000{step}" for step in (3, 6, 9)
    ]


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    events: list[str] = []
    synced, renamed = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        synced(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return renamed(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path / "run", 5)
    unfinished = events[4]
    assert sorted(events[:4]) == sorted(FILES)
    assert unfinished.startswith(".step-00000005.")
    assert events[5:] == [f"{unfinished} -> step-00000005", "checkpoints", "run"]


def test_a_checkpoint_that_is_deleted_loses_its_name_first(run, monkeypatch):
    seen: list[list[str]] = []
    deleted = shutil.rmtree

    def rmtree(path: Path, **options: bool) -> None:
        if path.exists():
            seen.append(sorted(entry.name for entry in (run / "checkpoints").iterdir()))
        deleted(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove(step_path(run, 3))
    ((doomed, *others),) = seen
    assert doomed.startswith(".step-00000003.") and others == ["step-00000006"]


def save_and_keep_one(run: Path) -> None:
    """What a run with checkpoint.keep_last=1 does to its folder, without an end."""
    for step in itertools.count(10):
        save(run, step)
        for older in step_folders(run)[1:]:
            with contextlib.suppress(BlockingIOError):
                remove(older)


def test_readers_of_a_run_that_is_saving_get_a_whole_checkpoint_which_stays_until_they_have_done(
    run,
):
    saving = multiprocessing.get_context("fork").Process(
        target=save_and_keep_one, args=(run,), daemon=True
    )
    saving.start()
    try:
        steps = set()
        while len(steps) < 20:
            found = find(run)
            # until the run has saved, deleted, and saved again
            while step_of(step_folders(run)[0]) < found.step + 2:
                time.sleep(0.001)
            assert why_damaged(found.path) is None
            assert found.tensors_file.read_bytes() == tensor_bytes(found.step)
            steps.add(found.step)
    finally:
        saving.kill()
        saving.join()


def test_what_a_reader_has_held_is_deleted_after_it(run):
    found = find(run)
    with pytest.raises(BlockingIOError, match="another process uses it"):
        remove(found.path)
    assert why_damaged(found.path) is None
    # as ranks get it: they rely on the launcher, which holds it
    elsewhere = pickle.loads(pickle.dumps(found))
    assert elsewhere == found
    del found
    remove(elsewhere.path)
    assert not elsewhere.path.exists()


def test_the_configuration_of_the_run_comes_back(tiny, tmp_path):
    config = load_config(
        tiny / "config.yaml", ["optimizer.lr=0.25", "train.epochs=2", "parallel.boundaries=[1,2,3]"]
    )
    content = config.model_dump(mode="json")
    assert find(save(tmp_path, 1, config=content)).config == config
    content["optimizer"]["momentum"] = 0.9
    unknown = find(save(tmp_path, 2, config=content))
    with pytest.raises(
        UserError, match=r"state\.json: a configuration that this version .*\n.*optimizer\.momentum"
    ):
        _ = unknown.config
