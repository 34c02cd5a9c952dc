"""Write the folder of a whole M-RoPE model again, with what a run trained in its place.

folder of model.llm.path and model.vision.name --files that its class reads--> copied; what the run
    changed is written
its tensors, trained ones in their place by name--------------------------> TensorSource by name on
    disk
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.stream.images import image_transform
from mmtrain.exporting.language import ExportedLanguage, take_merged
from mmtrain.exporting.processor import ExportedProcessor, check_processor
from mmtrain.exporting.published_files import copy_files, write_json
from mmtrain.exporting.tensors import TensorSource, stored
from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.families import (
    canonical_name,
    encoder_config,
    encoder_tensors,
    llm_config,
    llm_tensors,
)
from mmtrain.facts.model_files import foreign_files, model_folder, read_json
from mmtrain.facts.models import models_of
from mmtrain.facts.vision_files import image_settings
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.model.weights.files import tensor_places
from mmtrain.model.weights.projector_files import local_names
from mmtrain.stock.stock_class import StockClass

_UNMARKED = (
    "Its own chat template does not mark answers, so trl's assistant_only_loss cannot "
    "be used with it."
)


def write_back(
    stock: StockClass,
    config: RunConfig,
    trained: Mapping[str, TensorSource],
    dtype: str,
    folder: Path,
) -> tuple[dict[str, TensorSource], dict[str, Any], dict[str, Any]]:
    """Write all files but tensors and card; return tensors, config.json and what the card shows."""
    source = model_folder(config.model.llm.path)
    copy_files(source, folder, is_whole=True)
    content = read_json(source / "config.json")
    if content.get("dtype", content.get("torch_dtype")) != dtype:
        content = {key: value for key, value in content.items() if key != "torch_dtype"} | {
            "dtype": dtype
        }
        write_json(folder / "config.json", content)
    tensors = {name: stored(*place) for name, place in tensor_places(source).items()}
    waiting = dict(trained)
    for global_name, name in _names_on_disk(source).items():
        tensor = tensors[name]
        if (own := waiting.pop(global_name, None)) is not None:
            shape = tensor.shape  # GLM's convolution is a matrix here
            tensor = replace(
                own, shape=shape, read=lambda own=own, shape=shape: own.read().reshape(shape)
            )
        tensors[name] = take_merged(
            waiting, global_name, tensor, config.model.lora, transposed=False
        )
    assert not waiting, f"{min(waiting)} has no place, which is refused before"
    marks = "{% generation %}" in str(load_tokenizer(str(source)).chat_template)
    shown = {
        "stock": stock,
        "language": ExportedLanguage(llm_config(source), tensors, 0),
        "encoder": None,
    }
    shown |= {
        "processor": _processor(stock, config, source, folder),
        "unmarked": None if marks else _UNMARKED,
    }
    return tensors, content, shown


def _names_on_disk(source: Path) -> dict[str, str]:
    """Map global names to those of the folder's tensors."""
    names = {name: name for name in tensor_places(source)}
    family = FAMILIES[encoder_config(source)["model_type"]]
    vision = family.own(encoder_tensors(source, names))
    return {
        **{canonical_name(name): disk for name, disk in llm_tensors(source, names).items()},
        **{f"vision.{name}": disk for name, disk in vision.items()},
        **{f"{PROJECTOR}{name}": disk for name, disk in local_names(names, source).items()},
    }


def _processor(
    stock: StockClass, config: RunConfig, source: Path, folder: Path
) -> ExportedProcessor | None:
    """Write the run's bounds of image tokens, where they are not the folder's; return what its
    processor must make.
    """
    vision = config.model.vision
    if vision is None:
        return None
    layout = models_of(config).layout
    transform = image_transform(vision.name, config.data.image_fit, tile_size=layout.tile_size)
    file, settings = image_settings(folder)
    size = stock.own_image_settings(transform, layout)["size"]
    if stock.pixel_bounds(settings) != [*size.values()]:
        own = {
            key: value for key, value in settings.items() if key not in ("min_pixels", "max_pixels")
        }
        own["size"], all_settings = size, read_json(file)
        own = own if settings == all_settings else {**all_settings, "image_processor": own}
        write_json(file, own)
    tokenizer = load_tokenizer(str(source))
    template = make_template(config.data.template, tokenizer, layout, sys.maxsize)
    image_token_id = tokenizer.convert_tokens_to_ids(layout.image_token)
    processor = ExportedProcessor(image_token_id, {}, (), 0, layout, template, transform, stock)
    if config.data.template == "chat":  # another one is not the folder's
        with foreign_files(f"{source}: its processor"):
            check_processor(processor, folder)
    return processor
