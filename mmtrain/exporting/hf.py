"""Export the whole model as a Hugging Face folder, which a stock class of transformers loads.

A run on text alone becomes a folder of the LLM's own class; with pictures:

models of the run --stock.exporters: which class?--> a StockClass (here LLaVA's), or a refusal
projector ------------------------------------------> multi_modal_projector.linear_{1,2}.*
model.vision.name --vision: exact conversion--------> vision_tower.*
model.llm.path    --language: tensor by tensor------> language_model.*
                                                      config.json, README.md, processor's files

Cost: time and disk for the whole model; memory for the encoder and one file. Before anything is
written the stock class is tried without the weights; afterwards every byte is read again.

names and shapes --transformers' own loading, on the meta device-->
    missing, unexpected, mismatched: all must be empty
the LLM's family, tiny --exported, loaded by the class-->
    the same logits as the causal LM's own, or a refusal
"""

import itertools
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.engine.audit import settings_fingerprint
from mmtrain.exporting.card import write_card
from mmtrain.exporting.chat_template import mark_answers
from mmtrain.exporting.language import ROWS, language_for_export
from mmtrain.exporting.processor import check_processor, write_processor, write_tokenizer
from mmtrain.exporting.projector_file import opened
from mmtrain.exporting.published_files import code_named_in, write_json
from mmtrain.exporting.tensors import Progress, Sources, Tensors, cast_to, named, write_shards
from mmtrain.exporting.vision import encoder_for_export, merged_encoder, wrapped_timm_encoder
from mmtrain.exporting.write_back import Written, write_back
from mmtrain.facts.adapters import is_llm_adapter
from mmtrain.facts.encoders import TIMM
from mmtrain.facts.families import canonical_name, llm_config, llm_tensors
from mmtrain.facts.model_files import model_config
from mmtrain.facts.models import Models
from mmtrain.model.llm.language import causal_config, config_from, llm_class, quiet
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.model.stage import build_stage
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.plan.plan import StagePlan
from mmtrain.stock.exporters import class_of, whole_of
from mmtrain.stock.stock_class import WHAT_WORKS, ExportedClass, Settings, StockClass

BOUND = 1e-5  # relative to the largest logit; the same kernels run, 0.0 on every family that fits
HEAD = "llm.head.weight"


@dataclass(frozen=True)
class ExportedModel:
    stock: ExportedClass
    folder: Path
    exact: set[str]  # names of tensors that were not cast: those in float32, and codes
    unmarked: str | None = None  # why the chat template does not mark answers, where it does not
    adapters: Path | None = None  # peft's folder with those of the LLM, where they are not merged


class CausalClass(ExportedClass):
    """The LLM's own class, for a run on text alone: its tensors keep their names."""

    def __init__(self, folder: Path) -> None:
        self.config_class = type(causal_config(folder))
        self.model_class = llm_class(causal_config(folder))
        self.decoder_names = f"{self.model_class.base_model_prefix}."


def export_hf(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Progress = lambda *_: None,
    merged: bool = True,
) -> ExportedModel:
    """Write the model into `folder`, which is empty, and read it again.

    merged: with the LLM's adapters in its layers; else without them. Raises UserError for models
    that no stock class can hold, naming the formats that work, and where the disk is too small;
    OSError where a file reads back otherwise.
    """
    models, template = checkpoint.models, checkpoint.config.data.template
    stored_as = str(dtype).removeprefix("torch.")
    trained, about = opened(checkpoint, "hf" if merged else "peft")
    if not merged:
        for name in filter(is_llm_adapter, about["trained"]):
            del trained[name]
        about["trained"] = list(itertools.filterfalse(is_llm_adapter, about["trained"]))
    stock = class_of(models) or CausalClass(models.llm_folder)
    _refuse_replaced_weights(checkpoint)

    # all files but tensors and card
    is_whole = whole_of(models) is not None
    if is_whole:
        write = write_back
    elif isinstance(stock, StockClass):
        write = _write_multimodal
    else:
        write = _write_text
    tensors, content, shown = write(stock, models, template, trained, stored_as, folder)
    if is_whole:
        refuse_loading_faults(stock, content, tensors)
    _untie(folder, tensors)
    settings = llm_config(models.llm_folder).get("quantization_config", {})
    tensors = _with_codes_of(settings.get("quant_method"), tensors)
    coded = {name for name, source in tensors.items() if source.codes}
    _declare_codes(folder, tensors, coded, settings)

    kept = kept_in_float32(stock, content, tensors, dtype) | coded
    write_shards(folder, cast_to(dtype, tensors, kept), shard_bytes, progress)
    form = "model" if about["vision"] else "text"
    shown["removed_code"] = code_named_in(models.llm_folder)
    write_card(folder, about, form, dtype=stored_as, is_whole=is_whole, **shown)
    return ExportedModel(stock, folder, kept, shown.get("unmarked"))


def _untie(folder: Path, tensors: Sources) -> None:
    """Say in config.json that the head is not tied where it has other values than the embedding.

    Then transformers ties nothing, whatever config.json says, while other readers drop the head.
    Cost: memory for both.
    """
    content = model_config(folder)
    if not content.get("tie_word_embeddings", True):
        return
    ends = []
    for name, source in llm_tensors(folder, tensors).items():
        if canonical_name(name) in ROWS:
            ends.append(source.read())
    if len(ends) > 1 and not torch.equal(*ends):
        for part in (content, content.get("text_config", {})):
            part["tie_word_embeddings"] = False
        write_json(folder / "config.json", content)


def _with_codes_of(method: str | None, tensors: Sources) -> Sources:
    """Return the tensors, with codes only where transformers reads codes of this method; the others
    are written as weights.
    """
    result = {}
    for name, source in tensors.items():
        is_read = False
        if method == "mxfp4":
            is_read = "_scales" in source.codes
        elif method == "fp8":
            is_matrix = len(source.shape) == 2 and not name.endswith("embed_tokens.weight")
            is_read = is_matrix and "_scale_inv" in source.codes
        if not is_read:
            source = replace(source, codes={})
        result[name] = source
    return result


def _declare_codes(
    folder: Path,
    tensors: Sources,
    coded: set[str],
    settings: Settings,
) -> None:
    """Write `settings` as quantization_config, with the modules that have no codes here."""
    content = model_config(folder)
    copied = content.pop("quantization_config", None)
    if coded:
        settings = {**settings, "modules_to_not_convert": _modules_without(coded, tensors)}
        settings.pop("ignored_layers", None)  # the same, for other readers
        content["quantization_config"] = settings
    if coded or copied:
        write_json(folder / "config.json", content)


def _modules_without(coded: Collection[str], tensors: Sources) -> list[str]:
    """Return the outermost modules that have matrices, but none of the `coded` tensors."""

    def modules(name: str) -> Iterator[str]:
        """Yield a, a.b, a.b.c of a.b.c.weight."""
        return itertools.accumulate(name.removesuffix(".weight").split("."), "{}.{}".format)

    with_codes = set(itertools.chain.from_iterable(map(modules, coded)))
    without = {}  # keys alone, in order
    for name, source in tensors.items():
        outermost = next(itertools.filterfalse(with_codes.__contains__, modules(name)), None)
        if outermost is not None and len(source.shape) > 1:
            without[outermost] = None
    # tied to the embedding, the head has no tensor
    if not {"lm_head", "language_model.lm_head"} & with_codes:
        without["lm_head"] = None
    return list(without)


def _write_text(
    stock: CausalClass,
    models: Models,
    template: str,
    trained: Sources,
    dtype: str,
    folder: Path,
) -> Written:
    """Write all files but tensors and card, of a run on text alone."""
    language = language_for_export(stock, models.llm_folder, trained, 0, dtype, models.section.lora)
    content = {**language.config, "architectures": [stock.class_name]}
    refuse_loading_faults(stock, content, language.tensors)
    write_json(folder / "config.json", content)
    write_tokenizer(models, template, folder)
    return language.tensors, content, {"language": language}


def _write_multimodal(
    stock: StockClass,
    models: Models,
    template: str,
    trained: Sources,
    dtype: str,
    folder: Path,
) -> Written:
    """Write all files but tensors and card."""
    refuse_unfit_family(stock, models.llm_folder)
    encoder_of = encoder_for_export
    if TIMM in stock.encoders:
        encoder_of = wrapped_timm_encoder
    encoder = encoder_of(models, merged_encoder(models.section, named(trained, "vision.")))
    encoder = stock.adapt_encoder(models, encoder)
    processor = write_processor(stock, models, template, encoder, folder)
    language = language_for_export(
        stock,
        models.llm_folder,
        named(trained, "llm."),
        processor.rows_needed,
        dtype,
        models.section.lora,
    )
    tensors = {stock.encoder_names + name: source for name, source in encoder.tensors.items()}
    for name, source in named(trained, PROJECTOR).items():
        tensors[stock.connector_name(name.removeprefix(PROJECTOR))] = source
    tensors |= language.tensors
    content = {  # in keys that transformers 4.57 and 5 read
        "architectures": [stock.class_name],
        "model_type": stock.model_type,
        "dtype": dtype,
        **processor.token_keys,
        **stock.config(models, encoder),
        "tie_word_embeddings": language.config["tie_word_embeddings"],
        "text_config": stock.text_config(language.config),
        "vision_config": {**encoder.config, "dtype": dtype},
        "transformers_version": transformers.__version__,
    }
    refuse_loading_faults(stock, content, tensors)
    write_json(folder / "config.json", content)
    shown = {
        "encoder": encoder,
        "language": language,
        "processor": processor,
        "unmarked": mark_answers(models, template, folder),
    }
    check_processor(processor, folder)
    return tensors, content, shown


def _refuse_replaced_weights(checkpoint: StepFolder) -> None:
    """Raise UserError where frozen tensors or settings are not those of the training.

    Cost: reads the models' files once more, a decoder layer at a time.
    """
    # `run_tensors` checks the projector
    config = checkpoint.config.changed({"model.projector.init_from": None})
    state = checkpoint.state
    trained_with = {}
    for name, was in state["frozen_files"].items():
        if not name.startswith(PROJECTOR):
            trained_with[name] = was
    if not trained_with:
        return
    last = len(checkpoint.models.published_llm.decoder) - 1
    seen = {}
    for layer in range(last + 1):
        stage = build_stage(config, StagePlan(layer, layer, layer + 1, layer == 0, layer == last))
        for name, tensor in itertools.chain(stage.global_parameters(), stage.layer_buffers()):
            if name in trained_with:
                seen[name] = fingerprint(tensor)
    # a tied one is the embedding where one stage has both
    seen.setdefault(HEAD, trained_with.get(HEAD, ""))
    odd = next((name for name, was in trained_with.items() if seen.get(name) != was), None)
    if odd is None and settings_fingerprint(config.model) != state["settings_fingerprint"]:
        odd = "its config.json, or that of the encoder,"
    if odd is not None:
        folder = config.model.llm.path
        if odd.startswith("vision."):
            folder = config.model.vision.name
        raise UserError(
            f"{folder}: {odd} is not what the run was trained with. "
            "Restore the model's files, or install its "
            f"transformers {state['versions']['transformers']} and timm {state['versions']['timm']}"
        )


class _MetaTensor(torch.Tensor):
    """A tensor on the meta device that stays there: transformers moves what it loads to the CPU."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            kwargs.pop("device", None)
        return super().__torch_function__(func, types, args, kwargs)


def refuse_loading_faults(
    stock: ExportedClass,
    config: Settings,
    tensors: Sources,
) -> None:
    """Raise UserError unless the stock model of `config` loads exactly these tensors.

    The loader's own conversions run (names, experts fused, ties), on shapes alone.
    """
    shapes = {}
    for name, source in tensors.items():
        # timm computes rotary tables where these few numbers lie, and could not copy them from the
        # meta device.
        if name.endswith(".rope.freqs"):
            shapes[name] = torch.zeros(source.shape, dtype=source.dtype)
            continue
        shape = torch.empty(source.shape, dtype=source.dtype, device="meta")
        shapes[name] = shape.as_subclass(_MetaTensor)
    try:
        _, report = _load(stock, config, shapes)
    except Exception as error:  # the encoder's code is timm's, of whatever architecture
        why = escape(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{stock.class_name} does not load this model: {why}; {WHAT_WORKS}"
        ) from error
    faults = []
    for kind, entries in report.items():
        if entries:
            names = sorted(map(str, entries))
            faults.append(f"{kind}: {', '.join(names[:3])} ({len(names)})")
    if faults:
        raise UserError(
            f"{stock.class_name} does not load this model: {'; '.join(faults)}; {WHAT_WORKS}"
        )


def refuse_unfit_family(stock: StockClass, folder: Path) -> None:
    """Raise UserError where the stock class computes other logits than the LLM's own class does.

    A tiny model like the LLM in `folder` is tried. The stock class has a head without bias, scale
    or cap, and takes some families only.
    """
    config = causal_config(folder, stock.mrope)
    model = tiny_model(config, seed=0)
    with tempfile.TemporaryDirectory(prefix="mmtrain-export-") as temporary, quiet():
        model.save_pretrained(temporary)
        language = language_for_export(stock, Path(temporary), {}, 0, "float32")
        tensors = {name: source.read().clone() for name, source in language.tensors.items()}
    content = {
        "text_config": stock.text_config(language.config),
        "vision_config": dict(stock.tiny_encoder),
        stock.image_token_key: language.config["vocab_size"] - 1,
        "tie_word_embeddings": language.config["tie_word_embeddings"],
    }
    try:
        loaded, report = _load(stock, content, tensors)
        is_llm = re.compile("language_model|text_model|lm_head").search
        lacking = filter(is_llm, report["missing_keys"])
        faults = [*lacking, *report["unexpected_keys"], *report["mismatched_keys"]]
        ids = torch.arange(24).view(2, 12)
        with torch.no_grad():
            own = model(ids).logits
            other = loaded.eval()(input_ids=ids, use_cache=False).logits
        difference = float((own - other).abs().max() / own.abs().max())
        if not faults and difference <= BOUND:
            return
        why = (
            f"logits differ by {difference:.1e} of the largest, since it does not support "
            "what this family's head does (a scale, a cap)"
        )
        if faults:
            why = f"it loads without {faults[0]}"
    except Exception as error:  # any of transformers' families may fail in its own way
        why = f"{type(error).__name__}: {error}"
    raise UserError(
        f"{config.model_type} does not fit into {stock.class_name}: {why}; {WHAT_WORKS}"
    )


def kept_in_float32(
    stock: ExportedClass,
    config: Settings,
    names: Collection[str],
    dtype: torch.dtype,
) -> set[str]:
    """Return the tensors that must not be rounded: those that a model of `dtype` loads in fp32."""
    with torch.device("meta"):
        model = stock.model_class(config_from(stock.config_class, config))
    modules = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        modules |= set(model._keep_in_fp32_modules or ())
    kept = set()
    for module in map(re.escape, modules):
        kept.update(filter(re.compile(rf"(?:^|\.){module}(?:\.|$)").search, names))
    return kept


def _load(
    stock: ExportedClass,
    config: Settings,
    tensors: Tensors,
) -> tuple[PreTrainedModel, Settings]:
    with quiet():
        return stock.model_class.from_pretrained(
            None,
            config=config_from(stock.config_class, config),
            state_dict=dict(tensors),
            dtype=torch.float32,
            attn_implementation=None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
