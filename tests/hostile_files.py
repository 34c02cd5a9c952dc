"""Configurations and model folders that somebody might hand over: each is a launch command that must refuse it.

`python tests/hostile_files.py` reads lists of arguments as JSON lines, gives each to the launcher and writes what came
of it: exit code, seconds of a core (other tests may run), what it said, and this process's peak memory so far. One
process, so that no case pays for imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import struct
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
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{now}: &{now} [{', '.join([f'*{before}'] * 9)}]\n" for before, now in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "nine aliases of nine": BOMB + CONFIG,
    "aliases in a place that is read": CONFIG + f"eval: {{shards: [{BOMB.splitlines()[0][3:]}, *a]}}",
    "a list in itself": "a: &a [*a]",
    "a mapping merged into itself": "eval: &e {<<: *e}",
    "10,000 brackets": CONFIG + "eval: " + "[" * 10_000,
    "10,000 braces": CONFIG + "eval: " + "{a: " * 10_000,
    "an integer of 5,000 digits": CONFIG + "optimizer: {lr: " + "1" * 5000 + "}",
    "an integer of 5,000 hexadecimal digits": CONFIG + "eval: {max_samples: 0x" + "f" * 5000 + "}",
    "the 99th of the 99th": CONFIG + "eval: {shards: 2001-99-99}",
    "a tag without its value": CONFIG + "eval: {max_samples: !!int ''}",
    "a null character": CONFIG.replace("demo:llm", '"a\\0b"'),
    "a path of 5,000 characters": CONFIG.replace("demo:llm", "x" * 5000),
    "5,000 unknown keys": CONFIG + "".join(f"key{i}: 1\n" for i in range(5000)),
    "an unknown key of 100,000 characters": CONFIG + '"' + "k" * 100_000 + '"' + ": 1\n",
    "100,000 values": CONFIG + "eval: {shards: [" + "a," * 100_000 + "]}",
    "two megabytes": CONFIG + "# " + "x" * 2_000_000,
}
KEYS = [
    "parallel.data=100000000",
    "parallel.pipeline=100000000",
    "parallel.device_memory_gib=1e300",
    "data.pack_length=99999999999",
    "train.packs_per_step=99999999999",
    "train.packs_per_step=8000000",
    "train.max_steps=" + "9" * 4000,
    "run.seed=" + "9" * 30,
    "model.trainable=[" + ",".join(["a*"] * 2000) + "]",
    "eval.shards=[" + "[" * 5000,
]
NUMBERS = ["64", -64, 0, 1e12, float("nan"), True, 10**30, [], {}]
LLM_KEYS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"]
VISION_KEYS = ["num_attention_heads", "image_size", "hidden_size"]
DEEP = 10_000


def cases(folder: Path, llm: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and launch arguments of every case; their files are made in `folder`, from a stock LLM's in `llm`."""
    config = folder / "sound.yaml"
    config.write_text(CONFIG.replace("RUNS", str(folder / "runs")))
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

    def altered(name: str, change: Callable[[Path], None]) -> tuple[str, list[str]]:
        made = folder / f"llm{len(list(folder.glob('llm*')))}"
        shutil.copytree(llm, made)
        change(made)
        return name, [str(config), f"model.llm.path={made}"]

    def said(changes: dict) -> Callable[[Path], None]:
        return lambda made: _rewrite(made / "config.json", changes)

    for key in LLM_KEYS:
        for value in NUMBERS:
            yield altered(f"{key}: {value!r}", said({key: value}))
    yield altered("5 heads in 64 features", said({"num_attention_heads": 5, "head_dim": None}))
    yield altered("3 groups of 4 heads", said({"num_key_value_heads": 3}))
    yield altered("layer kinds that are numbers", said({"layer_types": [1, 2]}))
    yield altered("a model type that is a list", said({"model_type": ["llama"]}))
    yield altered("a config.json of 10,000 brackets", _text("config.json", '{"a": ' + "[" * DEEP + "]" * DEEP + "}"))
    yield altered("a config.json of 300 brackets", _text("config.json", '{"a": ' + "[" * 300 + "]" * 300 + "}"))
    yield altered("a number of 5,000 digits", _text("config.json", '{"a": ' + "1" * 5000 + "}"))
    yield altered("a key given twice", _text("config.json", '{"model_type": "llama", "model_type": "gpt2"}'))
    yield altered("a config.json of a gigabyte", lambda made: os.truncate(made / "config.json", 2**30))
    yield altered("a config.json that is a pipe", _pipe)
    index = {"passwd": "../../../../etc/passwd", "itself": "model.safetensors.index.json", "zero": "/dev/zero", "5": 5}
    for name, target in index.items():
        content = json.dumps({"weight_map": {"lm_head.weight": target}})
        yield altered(f"an index of {name}", _text("model.safetensors.index.json", content))
    for name, change in _HEADERS.items():
        yield altered(f"a header with {name}", change)

    def encoder(name: str, **changes: object) -> tuple[str, list[str]]:
        made = folder / f"vision{len(list(folder.glob('vision*')))}"
        _clip(made, changes)
        return name, [str(config), f"model.vision.name={made}"]

    for key in VISION_KEYS:
        for value in NUMBERS:
            if not (key == "hidden_size" and value == 10**30):
                yield encoder(f"an encoder's {key}: {value!r}", **{key: value})


def _rewrite(file: Path, changes: dict) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda made: (made / name).write_text(text) and None


def _pipe(made: Path) -> None:
    (made / "config.json").unlink()
    os.mkfifo(made / "config.json")


def _header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Rewrites the header of a folder's weights, whose other bytes stay."""

    def rewrite(made: Path) -> None:
        file = made / "model.safetensors"
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        changed = change(header)
        text = (changed if isinstance(changed, str) else json.dumps(header)).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return rewrite


def _first(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def _two(header: dict) -> tuple[dict, dict]:
    one, other = [entry for name, entry in header.items() if name != "__metadata__"][:2]
    return one, other


def _long_prefix(made: Path) -> None:
    with (made / "model.safetensors").open("r+b") as stream:
        stream.write(struct.pack("<Q", 2**60))


_HEADERS: dict[str, Callable[[Path], None]] = {
    "a length of 2^60": _long_prefix,
    "10,000 brackets": _header(lambda header: '{"a": ' + "[" * DEEP + "]" * DEEP + "}"),
    "a list": _header(lambda header: "[]"),
    "two tensors in one place": _header(lambda header: _first(header).update(_two(header)[1])),
    "negative offsets": _header(lambda header: _first(header).update(data_offsets=[-8, 0])),
    "offsets past the end": _header(lambda header: _first(header).update(data_offsets=[0, 2**62])),
    "offsets of 10^30": _header(lambda header: _first(header).update(data_offsets=[0, 10**30])),
    "offsets that are texts": _header(lambda header: _first(header).update(data_offsets=["0", "8"])),
    "an unknown dtype": _header(lambda header: _first(header).update(dtype="F128")),
    "a dtype that is a list": _header(lambda header: _first(header).update(dtype=["F32"])),
    "a negative shape": _header(lambda header: _first(header).update(shape=[-1, -64])),
    "a shape of 2^62": _header(lambda header: _first(header).update(shape=[2**62, 2**62])),
    "a shape of no numbers": _header(lambda header: _first(header).update(shape=[[64]])),
    "a layer of 5,000 digits": _header(lambda header: header.update({f"model.layers.{'9' * 5000}.x": _first(header)})),
}


def _clip(made: Path, changes: dict) -> None:
    """A CLIP encoder's folder: sound but for the changes in config.json; its weights are a header and zeros."""
    made.mkdir()
    facts = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "image_size": 28}
    (made / "config.json").write_text(json.dumps(facts | changes))
    (made / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}')
    shapes = {
        "embeddings.class_embedding": [32],
        "embeddings.patch_embedding.weight": [32, 3, 14, 14],
        "embeddings.position_embedding.weight": [5, 32],
        **{f"encoder.layers.{i}.{name}": [32, 32] for i in range(2) for name in ("mlp.fc1.weight", "mlp.fc2.weight")},
    }
    weights(made / "model.safetensors", shapes)


def weights(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of float32 zeros."""
    header: dict[str, dict] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)


def main() -> None:
    """Launch what stdin says, in turn."""
    from mmtrain.launch import main as launch

    for line in sys.stdin:
        errors, began = io.StringIO(), time.process_time()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()) as output:
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
