"""What stock LlavaForConditionalGeneration will make of an exported folder, found out without its weights.

names and shapes --transformers' own loading, on the meta device--> missing, unexpected, mismatched: must all be empty
the LLM's family, tiny --exported, loaded as a LLaVA--> the same logits as the causal LM's own, or a refusal
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel
from transformers.utils import logging

from mmtrain.base.errors import UserError
from mmtrain.export.formats import WHAT_WORKS
from mmtrain.export.language import language_for_export
from mmtrain.export.tensors import TensorSource
from mmtrain.model.language import causal_config
from mmtrain.model.tiny import tiny_model

BOUND = 1e-5  # relative to the largest logit; the same kernels run, 0.0 on every family that fits
TINY_ENCODER = {
    "model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "image_size": 8, "patch_size": 8,
}  # fmt: skip


class _Shape(torch.Tensor):
    """A tensor on the meta device that stays there: transformers moves what it loads to the CPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            kwargs.pop("device", None)
        return super().__torch_function__(func, types, args, kwargs)


def refuse_loading_faults(config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> None:
    """Raise UserError unless the stock model of `config` finds all of its tensors among these, and has a use for each.

    The loader's own conversions run (names, experts fused, ties), on shapes alone.
    """
    shapes = {
        name: torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(_Shape)
        for name, source in tensors.items()
    }
    _, report = _load(config, shapes)
    if faults := {kind: sorted(map(str, entries)) for kind, entries in report.items() if entries}:
        listed = "; ".join(f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in faults.items())
        raise UserError(f"LlavaForConditionalGeneration does not load this model: {listed}; {WHAT_WORKS}")


def refuse_unfit_family(folder: Path) -> None:
    """Raise UserError where a stock LLaVA around the LLM in `folder` computes other logits than the LLM's own class.

    It has a head without bias, scale or cap, and takes some families only. A tiny model of the same config is tried.
    """
    config = causal_config(folder)
    family = config.model_type
    model = tiny_model(config, seed=0)
    with tempfile.TemporaryDirectory(prefix="mmtrain-export-") as temporary, quiet():
        model.save_pretrained(temporary)
        language = language_for_export(Path(temporary), {}, 0, "float32")
        tensors = {name: source.read().clone() for name, source in language.tensors.items()}
    content = {
        "text_config": language.config,
        "vision_config": TINY_ENCODER,
        "image_token_index": language.config["vocab_size"] - 1,
        "tie_word_embeddings": language.config["tie_word_embeddings"],
    }
    try:
        llava, report = _load(content, tensors)
        lacking = [name for name in report["missing_keys"] if "vision_tower" not in name and "projector" not in name]
        faults = [*lacking, *report["unexpected_keys"], *report["mismatched_keys"]]
        ids = torch.arange(24).view(2, 12)
        with torch.no_grad():
            own, other = model(ids).logits, llava.eval()(input_ids=ids).logits
    except Exception as error:  # any of transformers' families may fail in its own way
        raise UserError(
            f"{family} does not fit into LlavaForConditionalGeneration ({type(error).__name__}: {error}); {WHAT_WORKS}"
        ) from error
    if faults:
        raise UserError(
            f"{family} does not fit into LlavaForConditionalGeneration (it loads without {faults[0]}); {WHAT_WORKS}"
        )
    difference = float((own - other).abs().max() / own.abs().max())
    if not difference <= BOUND:  # not >: a NaN is refused too
        raise UserError(
            f"{family} does not fit into LlavaForConditionalGeneration: logits differ by {difference:.1e} of the "
            f"largest, since it has no place for what this family's head does (a scale, a cap); {WHAT_WORKS}"
        )


def kept_in_float32(config: Mapping[str, Any], names: Iterable[str], dtype: torch.dtype) -> set[str]:
    """Names of the tensors that transformers loads in fp32 into a model of `dtype`: rounding them would be for good."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig.from_dict(dict(config)))
    modules = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        modules |= set(model._keep_in_fp32_modules or ())
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(module)}(?:\.|$)" for module in modules) or "(?!)")
    return {name for name in names if pattern.search(name)}


def _load(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[PreTrainedModel, dict[str, Any]]:
    with quiet():
        return LlavaForConditionalGeneration.from_pretrained(
            None,
            config=LlavaConfig.from_dict(dict(config)),
            state_dict=dict(tensors),
            dtype=torch.float32,
            attn_implementation=None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without its bars, and without its report of what is missing, which comes back as a value."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
