"""A model's files and the tensors in them, read without torch, transformers or the network.

A model is a folder, or a hub id whose snapshot lies in the local Hugging Face cache. Tensor shapes
come from the headers of its safetensors files, so a 70B checkpoint is described by reading a few
hundred kilobytes.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mmtrain.base.cache import user_cache
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json, read_limited, refuse_lost_link
from mmtrain.facts.published import Stored, Weight, shapes_of, weights_of
from mmtrain.facts.settings import Settings, Shapes, check_settings

CONFIG = "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
# What a configuration says instead of a path: `demo:llm`, `demo:vision` and `demo:vision_native`
# are frozen models that come with this package, `demo:train`, `demo:held-out` and their like are
# shards that `demo.data` makes on first use.
PREFIX = "demo:"
MODELS = {
    name: Path(__file__).parents[1] / "demo" / name for name in ("llm", "vision", "vision_native")
}


def is_demo(name: str) -> bool:
    """Whether `name` speaks of the embedded default rather than of a path or a hub id."""
    return name.startswith(PREFIX)


def demo_model(name: str) -> Path:
    """Return the folder of `demo:llm` or another of MODELS; raises UserError for another name."""
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        known = ", ".join(map(PREFIX.__add__, MODELS))
        raise UserError(f"{name}: the demo has no such model, only {known}")
    return MODELS[model]


def hub_cache() -> Path:
    """Return the local Hugging Face cache, by the variables that huggingface_hub reads."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME") or user_cache() / "huggingface"
    return Path(home).expanduser() / "hub"


def cached_snapshot(hub_id: str) -> Path | None:
    """Return the snapshot folder of a hub id's `main` revision in the local cache, or None."""
    repository = hub_cache() / ("models--" + hub_id.replace("/", "--"))
    reference = repository / "refs" / "main"
    # `hf download --revision` writes no refs/main: a single snapshot is still unambiguous.
    snapshots = list((repository / "snapshots").glob("*"))
    if reference.is_file():
        snapshots = [repository / "snapshots" / reference.read_text(errors="replace").strip()]
    if len(snapshots) == 1 and snapshots[0].is_dir():
        return snapshots[0]
    return None


def find_model_folder(path: str) -> Path | None:
    """Return the folder of a model: a path, a cached hub id or `demo:llm`; None: there is none."""
    if is_demo(path):
        return demo_model(path)
    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            return folder
        if HUB_ID.fullmatch(path):
            return cached_snapshot(path)
        return None
    except OSError as error:  # a name that is too long, a folder above it that may not be entered
        raise UserError(
            f"{escape(path)}: cannot be searched for a model ({error.strerror})"
        ) from None


def model_folder(path: str) -> Path:
    """Return the folder that `find_model_folder` finds; raises UserError where there is none."""
    folder = find_model_folder(path)
    if folder is None:
        raise no_model(path)
    return folder


def no_model(path: str) -> UserError:
    """Make the error for a missing folder, or for a hub id that is not in the cache."""
    if Path(path).expanduser().exists():
        return UserError(f"{path}: is a file. Name the model's folder, which holds config.json")
    # `models/vicuna` has the form of a hub id too; where `models` is a folder here, a folder was
    # meant.
    if HUB_ID.fullmatch(path) and ("/" not in path or not Path(path).parent.is_dir()):
        return UserError(
            f"{path}: neither a folder nor a hub id in the local cache {hub_cache()}. "
            f"Download it first: hf download {path}, or mmtrain train CONFIG --download"
        )
    return UserError(
        f"{path}: no such folder. Name the folder of a model, or a hub id such as "
        "Qwen/Qwen2.5-7B-Instruct"
    )


def read_json(path: Path) -> Settings:
    """Return the JSON object in a file of a model's folder.

    Raises UserError, naming the file, for content that no such file has.
    """
    try:
        content = parse_json(read_limited(path, MAX_JSON_BYTES, "a file of JSON"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON ({escape(str(error))}). The download may be incomplete"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a JSON {type(content).__name__}, but needs an object")
    check_settings(content, str(path))
    return content


def model_config(folder: Path) -> Settings:
    """Read the config.json of a model's folder."""
    return read_json(folder / CONFIG)


def optional_json(folder: Path, name: str = CONFIG) -> Settings:
    """Read a JSON file of a model's folder; empty where there is none."""
    if (folder / name).is_file():
        return read_json(folder / name)
    return {}


@contextlib.contextmanager
def foreign_files(what: str) -> Iterator[None]:
    """Raise UserError, naming `what`, for any error of a library that reads a stranger's files."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = escape(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise UserError(f"{what} cannot be used ({reason})") from error


def tensor_shapes(folder: Path) -> Shapes | None:
    """Return name and shape of every weight in a folder's safetensors files, in file order.

    None if it has no weight files. Raises what `stored_weights` raises.
    """
    weights = stored_weights(folder)
    if weights is None:
        return None
    return shapes_of(weights)


def stored_weights(folder: Path) -> dict[str, Weight] | None:
    """Return every weight in a folder's safetensors files by name, in file order; None: no files.

    Raises UserError for missing shards, a damaged file, `.bin` weights alone, and weights of less
    than 16 bits that are not `published.weights_of` their codes.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_weight_map(index, ".safetensors")
        files = list(map(folder.joinpath, dict.fromkeys(weight_map.values())))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {len(files)} weight files named in "
                f"{index.name} are missing, e.g. {missing[0]}. Finish the download"
            )
        headers = {}
        for file in files:
            headers[file.name] = _read_header(file)
        stored = {}
        for name, file_name in weight_map.items():
            if name not in headers[file_name]:
                raise UserError(f"{folder}: {index.name} names {name}, which is not in {file_name}")
            stored[name] = headers[file_name][name]
        return weights_of(stored, folder)

    single = folder / "model.safetensors"
    refuse_lost_link(single)
    if single.is_file():
        return weights_of(_read_header(single), folder)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise UserError(
            f"{folder}: has only pickled weights ({pickled[0].name}). Convert them once: "
            f"mmtrain convert {folder}"
        )
    return None


def read_weight_map(index: Path, suffix: str) -> dict[str, str]:
    """Return the file name of every tensor, from an index of weight files.

    Raises UserError for other than files beside it.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map. Download the file again")
    for name in weight_map.values():
        # A path could lead out of the folder, or name a file that is no weights and never ends.
        if not isinstance(name, str) or not name.endswith(suffix) or "/" in name or "\0" in name:
            shown = escape(repr(name))
            raise UserError(
                f"{index}: names {shown}, which is no {suffix} file beside it. "
                "Download the file again"
            )
    return weight_map


def read_header(file: Path) -> Shapes:
    """Return name and shape of every tensor in one safetensors file, in the order of their bytes.

    Reads its header alone. Raises UserError for a damaged file.
    """
    return shapes_of(_read_header(file))


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
        if prefix == b"version ":
            raise UserError(
                f"{file}: is a git-lfs pointer, not the weights. Run git lfs pull, or hf download"
            )
        size = file.stat().st_size
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_JSON_BYTES or 8 + length > size:
            raise UserError(
                f"{file}: not a complete safetensors file ({size} bytes). Download it again"
            )
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except SafetensorError as error:
        reason = escape(str(error).removeprefix("Error while deserializing header: "))
        raise UserError(
            f"{file}: a damaged or incomplete safetensors file ({size} bytes; {reason}). "
            "Download it again"
        ) from None

    stored = {}
    for name, part in slices.items():
        stored[name] = Stored(part.get_dtype(), tuple(part.get_shape()))
    return stored
