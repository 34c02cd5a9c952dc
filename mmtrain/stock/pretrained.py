"""`model.pretrained`: expand a whole multimodal model's folder into the keys of its parts.

config.json, the processor's files --StockFolder, StockClass.read--> model.vision.{select_layer,
                     final_norm, layout, max_tiles, pinpoints}, model.projector.{type, factor,
                     width}, data.image_fit

This is the inverse of what an export writes. What these keys cannot say is refused by name.
"""

import itertools
import logging

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.facts.model_files import model_config, model_folder
from mmtrain.facts.models import models_of
from mmtrain.stock.exporters import STOCK_CLASSES, exporter_for, stock_class
from mmtrain.stock.stock_folder import BOUNDS, BY_PARTS, PARTS, StockFolder, shown

_log = logging.getLogger(__name__)


def expand_pretrained(config: RunConfig) -> RunConfig:
    """Return the configuration with explicit keys in place of `model.pretrained`, if it is set.

    Raises UserError for a folder of another class, for what mmtrain would compute otherwise, and
    for a key that contradicts the folder, but for bounds of image tokens.
    """
    path = config.model.pretrained
    if path is None:
        return config
    if not path:
        raise UserError(
            "model.pretrained: is empty. Name a model's folder, or set null and name its parts"
        )
    folder = model_folder(path)
    content = model_config(folder)
    kind = content.get("model_type")
    stock = stock_class(kind, (content.get("vision_config") or {}).get("model_type"))
    if stock is None:
        known = itertools.chain(*(stock.model_types for stock in STOCK_CLASSES))
        raise UserError(
            f"model.pretrained: {path} has model_type {shown(kind)}, but needs one of "
            f"{', '.join(dict.fromkeys(known))}"
        )

    try:
        keys = {**dict.fromkeys(PARTS, path), **stock.keys(StockFolder(path, folder, content))}
        if config.model.init_from is not None:
            # which began with this one, or goes on from it
            keys["model.projector.init_from"] = config.model.init_from
        for key, value in keys.items():
            *above, name = key.split(".")
            section = config.value_at(tuple(above))
            if name in BOUNDS and value is not None:  # the run's win, and are exported
                keys[key] = getattr(section, name) or value
            elif name in section.model_fields_set and (own := getattr(section, name)) != value:
                raise UserError(
                    f"{key} is {shown(own)} in this configuration, but {shown(value)} "
                    "in that folder; "
                    f"leave it out, or {BY_PARTS}"
                )
        least, most = (keys[f"model.vision.{bound}"] for bound in BOUNDS)
        if least is not None and least > most:
            raise UserError(
                f"model.vision.min_positions is {least}, above max_positions, {most}. Set both"
            )

        stored = content.get("dtype", content.get("torch_dtype"))
        if "dtype" not in config.model.llm.model_fields_set:
            if stored == "float32":
                keys["model.llm.dtype"] = stored
            elif stored == "float16":
                _log.info(
                    f"model.pretrained: {path}: its float16 is rounded to bfloat16. "
                    "model.llm.dtype=float32 keeps it"
                )
        config = config.changed({**keys, "model.pretrained": None})
        exporter_for(models_of(config))
    except UserError as error:
        raise UserError(f"model.pretrained: {path}: {error}") from None
    return config
