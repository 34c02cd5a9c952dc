"""Configurations and model folders that somebody might hand over are refused in one message, within
5 s and 1 GB.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIG = """
run: {name: test, dir: RUNS}
model:
  llm: {path: demo:llm}
  vision: {name: demo:vision}
data: {shards: a.tar}
train: {packs_per_step: 8, max_steps: 10}
"""
YAML = {
    "aliases": "a: &a [x, x]\nb: [*a, *a]\n" + CONFIG,
    "10,000 brackets": CONFIG + "eval: " + "[" * 10_000,
    "an integer of 5,000 digits": CONFIG + "optimizer: {lr: " + "1" * 5000 + "}",
    "an integer of 5,000 hexadecimal digits": CONFIG + "eval: {max_samples: 0x" + "f" * 5000 + "}",
    "the 99th of the 99th": CONFIG + "eval: {shards: 2001-99-99}",
    "a tag without its value": CONFIG + "eval: {max_samples: !!int ''}",
    "a null character": CONFIG.replace("demo:llm", '"a\\0b"'),
    "a path of 5,000 characters": CONFIG.replace("demo:llm", "x" * 5000),
    "5,000 unknown keys": CONFIG + "".join(f"key{i}: 1\n" for i in range(5000)),
    "an unknown key of 100,000 characters": CONFIG + '"' + "k" * 100_000 + '"' + ": 1\n",
    "two megabytes": CONFIG + "# " + "x" * 2_000_000,
}
KEYS = [
    "parallel.data=100000000",
    "parallel.pipeline=100000000",
    "parallel.device_memory_gib=1e300",
    "data.pack_length=99999999999",
    "train.packs_per_step=8000000",
    "train.max_steps=" + "9" * 4000,
    "run.seed=" + "9" * 30,
    "model.trainable=[" + ",".join(["a*"] * 2000) + "]",
    "eval.shards=[" + "[" * 5000,
]
NUMBERS = ["64", -64, 0, 1e12, True, 10**30, {}]
LLM_KEYS = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
]
VISION_KEYS = ["num_attention_heads", "image_size"]
Change = Callable[[Path], object]


def cases(folder: Path, llm: Path, vision: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield name and launch arguments of every case; its files are made in `folder`, from stock
    models.
    """
    config = _sound(folder)
    for number, (name, text) in enumerate(YAML.items()):
        file = folder / f"{number}.yaml"
        file.write_text(text)
        yield name, [str(file)]
    os.mkfifo(folder / "pipe.yaml")
    (folder / "large.yaml").touch()
    os.truncate(folder / "large.yaml", 2**30)
    for file in ("/dev/zero", folder, folder / "pipe.yaml", folder / "large.yaml"):
        yield f"a configuration that is {Path(file).name}", [str(file)]
    for key in KEYS:
        yield key[:60], [str(config), key]
    for number, (name, change) in enumerate(_llm_changes()):
        made = shutil.copytree(llm, folder / f"llm{number}")
        change(made)
        yield name, [str(config), f"model.llm.path={made}"]
    for number, (key, value) in enumerate((key, value) for key in VISION_KEYS for value in NUMBERS):
        made = shutil.copytree(vision, folder / f"vision{number}")
        _settings({key: value})(made)
        yield f"an encoder's {key}: {value!r}", [str(config), f"model.vision.name={made}"]


def damaged(folder: Path, llm: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    """Launch arguments for copies of an LLM of which one byte is another, or all from there on is
    missing.
    """
    config, draw = _sound(folder), random.Random(0)
    for number in range(count):
        made = shutil.copytree(llm, folder / f"damaged{number}")
        file = made / draw.choice(["config.json", "model.safetensors"])
        content = bytearray(file.read_bytes())
        place = draw.randrange(min(len(content), 8 + int.from_bytes(content[:8], "little")))
        content[place] = draw.randrange(256)
        file.write_bytes(content[: place + 1] if number % 4 == 0 else content)
        yield f"{file.name}, byte {place}", [str(config), f"model.llm.path={made}"]


def _sound(folder: Path) -> Path:
    config = folder / "sound.yaml"
    config.write_text(CONFIG.replace("RUNS", str(folder / "runs")))
    return config


def _llm_changes() -> Iterator[tuple[str, Change]]:
    for key in LLM_KEYS:
        for value in NUMBERS:
            yield f"{key}: {value!r}", _settings({key: value})
    yield "5 heads in 64 features", _settings({"num_attention_heads": 5, "head_dim": None})
    yield "3 groups of 4 heads", _settings({"num_key_value_heads": 3})
    yield "layer kinds that are numbers", _settings({"layer_types": [1, 2]})
    yield "a model type that is a list", _settings({"model_type": ["llama"]})
    for depth in (300, 10_000):
        yield f"{depth} brackets", _text("config.json", '{"a": ' + "[" * depth + "]" * depth + "}")
    yield "a number of 5,000 digits", _text("config.json", '{"a": ' + "1" * 5000 + "}")
    yield "a config.json of a gigabyte", lambda made: os.truncate(made / "config.json", 2**30)
    yield "a config.json that is a pipe", _pipe
    for target in ("../../../../etc/passwd", "model.safetensors.index.json", "/dev/zero", 5):
        index = json.dumps({"weight_map": {"lm_head.weight": target}})
        yield f"an index of {target}", _text("model.safetensors.index.json", index)
    yield "a header of 2^60 bytes", _header(lambda header: header, 2**60)
    yield "a shape of 2^62", _header(lambda header: _first(header).update(shape=[2**62, 2**62]))
    yield (
        "offsets past the end",
        _header(lambda header: _first(header).update(data_offsets=[0, 2**62])),
    )
    yield (
        "a layer of 5,000 digits",
        _header(lambda header: header.update({f"model.layers.{'9' * 5000}.x": {}})),
    )


def _settings(changes: dict) -> Change:
    def change(made: Path) -> None:
        file = made / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _text(name: str, text: str) -> Change:
    return lambda made: (made / name).write_text(text)


def _pipe(made: Path) -> None:
    (made / "config.json").unlink()
    os.mkfifo(made / "config.json")


def _header(change: Callable[[dict], object], length: int | None = None) -> Change:
    """Rewrites the header of a folder's weights, whose other bytes stay; `length` is what the file
    says of it.
    """

    def rewrite(made: Path) -> None:
        file = made / "model.safetensors"
        content = file.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", length or len(text)) + text + content[end:])

    return rewrite


def _first(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name != "__metadata__")


SECONDS, BYTES = 5, 10**9


def launched(commands: list[list[str]], seconds: float) -> list[dict]:
    """Give the commands, with --plan, to one process, so that no case pays for imports.

    There are fewer results where a command took the process with it.
    """
    ran = subprocess.run(
        [sys.executable, __file__],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_hostile_configurations_and_model_folders_are_refused_in_seconds_and_little_memory(
    tiny, parts, tmp_path
):
    commands = dict(cases(tmp_path, tiny / "llm", parts / "vision"))
    results = dict(zip(commands, launched(list(commands.values()), 240), strict=True))
    wrong = {
        name: result
        for name, result in results.items()
        if result["code"] != 2
        or not result["said"].startswith("error: ")
        or len(result["said"]) > 6000
        or result["seconds"] > SECONDS
    }
    assert not wrong
    assert max(result["peak"] for result in results.values()) < BYTES


def test_a_damaged_byte_of_a_model_folder_is_a_clear_error_or_of_no_consequence_to_the_plan(
    tiny, tmp_path
):
    commands = dict(damaged(tmp_path, tiny / "llm", 30))
    results = dict(zip(commands, launched(list(commands.values()), 120), strict=True))
    wrong = {
        name: result
        for name, result in results.items()
        if result["code"] != 0
        and not (result["code"] == 2 and result["said"].startswith("error: "))
    }
    assert not wrong
    assert sum(result["code"] == 2 for result in results.values()) > 10


def main() -> None:
    """Launch each JSON line of arguments from stdin; write exit code, seconds, message and peak
    memory so far.
    """
    from mmtrain.launch import main as launch

    for line in sys.stdin:
        errors, began = io.StringIO(), time.process_time()
        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            try:
                code = launch([*json.loads(line), "--plan"])
            except (Exception, SystemExit):  # whatever it is, it fails its own case alone
                code, _ = None, traceback.print_exc()
        # Not getrusage, whose maximum begins with that of the process that started this one.
        peak = int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        result = {
            "code": code,
            "seconds": time.process_time() - began,
            "said": errors.getvalue(),
            "output": output.getvalue(),
            "peak": peak,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
