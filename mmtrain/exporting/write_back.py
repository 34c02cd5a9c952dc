"""Write the folder of a whole M-RoPE model again, with what a run trained in its place.

folder of model.llm.path and model.vision.name
    --files that its class reads--> copied; what the run changed is written
    --its tensors, trained ones in their place by name--> TensorSource by name on disk
"""

from collections.abc import Iterable
from pathlib import Path

from mmtrain.data.samples.templates import load_tokenizer
from mmtrain.data.stream.images import transform_of
from mmtrain.exporting.chat_template import load_template
from mmtrain.exporting.language import ExportedLanguage, take_merged
from mmtrain.exporting.processor import ExportedProcessor, check_processor
from mmtrain.exporting.published_files import copy_files, write_json
from mmtrain.exporting.tensors import Sources, TensorSource, stored
from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.families import (
    canonical_name,
    encoder_config,
    encoder_tensors,
    llm_config,
    llm_tensors,
)
from mmtrain.facts.model_files import foreign_files, model_config, read_json
from mmtrain.facts.models import Models
from mmtrain.facts.vision_files import image_settings
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.model.weights.files import tensor_entries
from mmtrain.model.weights.projector_files import local_names
from mmtrain.stock.stock_class import SUFFIXES, Settings, StockClass, resize_of

_UNMARKED = (
    "Its own chat template does not mark answers, so trl's assistant_only_loss cannot "
    "be used with it."
)
# tensors, config.json, and what the card shows
Written = tuple[Sources, Settings, Settings]


def write_back(
    stock: StockClass,
    models: Models,
    template: str,
    trained: Sources,
    dtype: str,
    folder: Path,
) -> Written:
    """Write all files but tensors and card."""
    source = models.llm_folder
    copy_files(source, folder, is_whole=True)
    content = model_config(source)
    content.pop("quantization_config", None)
    if content.get("dtype", content.get("torch_dtype")) != dtype:
        content.pop("torch_dtype", None)
        content["dtype"] = dtype
        write_json(folder / "config.json", content)

    tensors = {name: stored(entry) for name, entry in tensor_entries(source).items()}
    waiting = dict(trained)
    for global_name, name in _names_on_disk(source, tensors).items():
        own = tensors[name]
        if global_name in waiting:
            own = _reshaped(waiting.pop(global_name), own.shape)
        tensors[name] = take_merged(
            waiting,
            global_name,
            own,
            models.section.lora,
            transposed=False,
        )
    assert not waiting, f"{min(waiting)} has no place, which is refused before"

    tokenizer = load_tokenizer(str(source))
    shown = {"language": ExportedLanguage(llm_config(source), tensors, 0), "unmarked": None}
    if "{% generation %}" not in str(tokenizer.chat_template):
        shown["unmarked"] = _UNMARKED
    if models.section.vision is not None:
        shown["processor"] = _processor(stock, models, template, folder)
    return tensors, content, shown


def _reshaped(source: TensorSource, shape: tuple[int, ...]) -> TensorSource:
    """Return a tensor in the shape that files have: GLM's convolution is a matrix here."""
    return TensorSource(source.dtype, shape, lambda: source.read().reshape(shape))


def _names_on_disk(source: Path, tensors: Iterable[str]) -> dict[str, str]:
    """Map global names to those of the folder's tensors."""
    names = dict(zip(tensors, tensors, strict=True))
    places = {canonical_name(name): disk for name, disk in llm_tensors(source, names).items()}
    family = FAMILIES[encoder_config(source)["model_type"]]
    for name, disk in family.own(encoder_tensors(source, names)).items():
        places[f"vision.{name}"] = disk
    for name, disk in local_names(names, source).items():
        places[PROJECTOR + name] = disk
    return places


def _processor(
    stock: StockClass,
    models: Models,
    name: str,
    folder: Path,
) -> ExportedProcessor:
    """Write the run's bounds of image tokens and backend, where they are not the folder's.

    Returns what its processor must make.
    """
    layout = models.layout
    transform = transform_of(models)
    file, settings = image_settings(folder)
    size = stock.own_image_settings(transform, layout)["size"]
    has_bounds = stock.pixel_bounds(settings) == [*size.values()]
    if not has_bounds or resize_of(settings) != transform.resize:
        content = read_json(file)
        own = content
        if settings != content:
            own = content["image_processor"]
        for key in ("min_pixels", "max_pixels"):
            own.pop(key, None)
        own["size"] = size
        own["image_processor_type"] = stock.image_processor + SUFFIXES[transform.resize]
        write_json(file, content)
    template = load_template(str(models.llm_folder), name, layout)
    image_token_id = template.tokenizer.convert_tokens_to_ids(layout.image_token)
    processor = ExportedProcessor(image_token_id, {}, (), 0, template, transform, stock)
    if name == "chat":  # another one is not the folder's
        with foreign_files(f"{models.llm_folder}: its processor"):
            check_processor(processor, folder)
    return processor
