"""Stock classes that compute a run, and formats of `mmtrain export` that can hold it.

Models --connector, final norm, layout, fit, encoder--> a StockClass, or what to change

All is known before a run trains. The planner asks for `export.format`, the export for what it
writes. What only the modules of a timm
encoder tell (an activation, rotary positions) is known when it is exported.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mmtrain.base.errors import UserError
from mmtrain.facts.adapters import adapted_layer, is_llm_adapter
from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.families import (
    canonical_name,
    full_names,
    holds_parts,
    llm_config,
    llm_tensors,
    loaded_name,
)
from mmtrain.facts.model_files import (
    find_model_folder,
    model_config,
    optional_json,
    tensor_shapes,
)
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import LlmShape
from mmtrain.facts.tokenizer_files import published_files
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.stock.aya_vision import AyaVision
from mmtrain.stock.grids import Exaone45, HyperCLOVAXVisionV2, VideoLlama3
from mmtrain.stock.idefics3 import Idefics3
from mmtrain.stock.internvl import InternVL
from mmtrain.stock.lfm2_vl import Lfm2Vl
from mmtrain.stock.llava import Llava
from mmtrain.stock.llava_next import LlavaNext, LlavaOnevision
from mmtrain.stock.mrope import MROPE_CLASSES
from mmtrain.stock.perception_lm import PerceptionLM
from mmtrain.stock.pixtral import LightOnOcr, LlavaPixtral, Mistral3
from mmtrain.stock.stock_class import StockClass
from mmtrain.stock.stock_folder import BOUNDS, StockFolder

# what adapters are for: the LLM as it was published, or a whole model of its own
Base = Literal["llm", "hf"]
# projectors that LLaVA's own code builds, and its names of their modules
LLAVA_CODE = {
    "linear": {"linear_1": "model.mm_projector"},
    "mlp2x_gelu": {"linear_1": "model.mm_projector.0", "linear_2": "model.mm_projector.2"},
}
# families whose embedding is not where the classes look for it
_OTHER_EMBEDDING = ("gpt2", "gpt_bigcode", "opt")

STOCK_CLASSES = (
    Llava(),
    LlavaNext(),
    LlavaOnevision(),
    AyaVision(),
    Idefics3(),
    InternVL(),
    PerceptionLM(),
    Lfm2Vl(),
    LlavaPixtral(),
    LightOnOcr(),
    Mistral3(),
    HyperCLOVAXVisionV2(),
    VideoLlama3(),
    Exaone45(),
    *MROPE_CLASSES,
)


def exporter_for(models: Models) -> StockClass:
    """Return the stock class that computes what a run trains.

    Raises UserError with what each class that has its connector would need, and what `vision_shape`
    raises.
    """
    kind = models.section.projector.type
    vision = models.section.vision
    near = [stock for stock in STOCK_CLASSES if kind in stock.connectors]
    near = [stock for stock in near if vision.layout in stock.layouts] or near
    path = models.section.llm.path
    if why := _unfit_llm(path, models.published_llm):
        raise UserError(
            f"no stock model computes what this run trains: {why}. Set another model.llm.path"
        )
    shape = models.published_vision
    ways = []
    for stock in near:
        missing = list(stock.needs(models))
        if not missing:
            return stock
        if not (stock.unfit_encoder(vision.name, shape) and stock.unfit_llm(path)):
            ways.append(f"{stock.name} would need {', '.join(missing)}")
    ways += _other_connector(models)
    listed = "; ".join(ways) or "its classes are for another encoder and another LLM"
    raise UserError(f"no stock model computes what this run trains ({kind}): {listed}")


def _other_connector(models: Models) -> Iterator[str]:
    """Yield a connector whose class computes the run with all else as it is, if there is one."""
    for stock in STOCK_CLASSES:
        for kind in stock.connectors:
            changes = {"projector.type": kind, "projector.factor": None, "projector.width": None}
            other = replace(models, section=models.section.changed(changes))
            with contextlib.suppress(UserError):
                _ = other.layout
                if not any(stock.needs(other)):
                    yield f"{stock.name} computes it with model.projector.type={kind}"
                    return


def class_of(models: Models) -> StockClass | None:
    """Return the stock class that a run leaves by; None: its LLM's own, for a run on text alone.

    Raises UserError.
    """
    whole = whole_of(models)
    if whole is None and models.section.vision is not None:
        return exporter_for(models)
    return whole


def whole_of(models: Models) -> StockClass | None:
    """Return the class of the whole M-RoPE model that a run is on; None: that computes others."""
    path = models.section.llm.path
    vision = models.section.vision
    folder = find_model_folder(path)
    if folder is None:
        return None
    content = model_config(folder)
    stock = stock_class(content.get("model_type"))
    if stock is None or not stock.mrope or (vision is not None and vision.name != path):
        return None
    if vision is None:
        return stock
    for key, value in stock.keys(StockFolder(path, folder, content)).items():
        if key == "data.image_fit":
            own = models.image_fit
        else:
            own = models.section.value_at(tuple(key.split(".")[1:]))
        if own != value and not key.endswith(BOUNDS):
            return None
    return stock


def stock_class(model_type: str | None, encoder: str | None = None) -> StockClass | None:
    """Return the stock class of a config.json with this model_type, and that of its encoder."""
    fitting = [stock for stock in STOCK_CLASSES if model_type in stock.model_types]
    is_native = encoder in FAMILIES and FAMILIES[encoder].native is not None
    fitting.sort(key=lambda stock: stock.is_native != is_native)
    return next(iter(fitting), None)


def _unfit_llm(path: str, llm: LlmShape) -> str:
    """Return the reason why no stock class computes this LLM behind an encoder.

    It is "" where only a trial can tell.
    """
    if llm.scaled_by:
        return (
            f"{path} ({llm.model_type}) scales or caps tokens or logits ({llm.scaled_by}), but "
            "stock classes do not"
        )
    if any(parameter.name == "llm.head.bias" for parameter in llm.head):
        return f"the head of {path} ({llm.model_type}) has a bias, but stock heads have none"
    if llm.model_type in _OTHER_EMBEDDING:
        return f"stock models do not find the embedding of a {llm.model_type}"
    return ""


def refuse_llava_code(models: Models, trained: Collection[str]) -> None:
    """Raise UserError for a run that `trained` (global names) more than a projector of LLaVA's."""
    kind = models.section.projector.type
    vision = models.section.vision
    if vision is None:
        raise UserError("llava holds a projector, but model.vision=null has none")
    if kind not in LLAVA_CODE:
        raise UserError(
            f"llava takes a {' or '.join(LLAVA_CODE)} projector, but model.projector.type is {kind}"
        )
    unsupported = ""
    if vision.final_norm:
        unsupported = "final_norm=true"
    elif not LAYOUTS[vision.layout].in_llava:
        unsupported = f"layout={vision.layout}"
    if unsupported:
        raise UserError(
            f"llava's code does not support model.vision.{unsupported}, which this run uses"
        )
    for name in trained:
        if not name.startswith("projector."):
            raise UserError(
                f"llava holds only the projector, but {name} trains too (model.trainable)"
            )


def _refuse_without_adapters(models: Models, trained: Collection[str]) -> None:
    """Raise UserError for a run that has nothing for peft, or no whole model as its base."""
    if not any(map(is_llm_adapter, trained)):
        raise UserError("peft holds adapters of the LLM, but model.lora gives it none")
    _refuse_unknown_class(models, [name for name in trained if not is_llm_adapter(name)])


def _refuse_more_than_adapters(models: Models, trained: Collection[str]) -> None:
    """Raise UserError for a run of more than the published LLM's adapters and the projector."""
    if holds_parts(models.llm_folder):
        raise UserError(f"{models.section.llm.path} is a whole model, not only the LLM")
    if not any(map(is_llm_adapter, trained)):
        raise UserError("peft holds adapters of the LLM, but model.lora gives it none")
    for name in trained:
        if not name.startswith("projector.") and not is_llm_adapter(name):
            raise UserError(f"{name} trains too, but adapters of the published LLM cannot hold it")


def _refuse_unknown_class(models: Models, trained: Collection[str]) -> None:
    """Raise UserError for a run without a stock class, and files that no export can write."""
    class_of(models)
    folder = find_model_folder(models.section.llm.path)
    if folder is None or (tensors := tensor_shapes(folder)) is None:
        return
    published_files(folder, is_whole=whole_of(models) is not None)
    optional_json(folder, "generation_config.json")  # which an export reads
    family = llm_config(folder)["model_type"]
    names = full_names(family, llm_tensors(folder, tensors)).values()
    stored = {canonical_name(loaded_name(family, name)) for name in names}
    for name in trained:
        is_stored = {name, f"{adapted_layer(name)}.weight"} & stored
        if name.startswith("llm.") and not is_stored:
            raise UserError(
                f"{name} trains, but the LLM's files have it under another name or in "
                "several tensors"
            )


def default_base(models: Models) -> Base:
    """Return the default base of a run's adapters: the published LLM if it is all of the model."""
    if models.section.vision is None and not holds_parts(models.llm_folder):
        return "llm"
    return "hf"


# by values of --format, and for "safetensors" none
_CHECKS = {
    "llava": refuse_llava_code,
    "hf": _refuse_unknown_class,
    "peft": _refuse_without_adapters,
    "peft --base llm": _refuse_more_than_adapters,
}


def formats_for(models: Models, trained: Collection[str]) -> str:
    """Return options of `mmtrain export` that write all that a run `trained`, by global names."""
    formats = ["--format safetensors"]
    for name, check in _CHECKS.items():
        with contextlib.suppress(UserError):
            check(models, trained)
            formats.append(f"--format {name}")
    return " or ".join(formats)


def refuse_unfit_format(name: str, path: Path, models: Models, trained: Collection[str]) -> None:
    """Raise UserError, with options that work, for a format that cannot hold all that `trained`."""
    try:
        _CHECKS[name](models, trained)
    except UserError as error:
        raise UserError(f"{path}: {error}. Use {formats_for(models, trained)}") from None


def check_export_format(name: str | None, models: Models, trained: Collection[str]) -> None:
    """Raise UserError where `export.format=name` cannot hold a run's `trained`, by global names."""
    check = _CHECKS.get(name or "")
    if check is None:
        return
    try:
        check(models, trained)
    except UserError as error:
        raise UserError(
            f"export.format={name}: {error}. Change that, or set export.format=safetensors"
        ) from None
