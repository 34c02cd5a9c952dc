"""Export an LLM: its published tensors under new names, trained ones in their place.

In LLaVA's names (each stock class has its own):

model.layers.3.X    -> language_model.model.layers.3.X
lm_head.weight      -> language_model.lm_head.weight

A tensor keeps its content, unless an adapter is merged into it: W + (alpha / r) B A in fp32, when
it is written, cast to the export's type once.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from mmtrain.base.errors import UserError
from mmtrain.config.model import LoraSection
from mmtrain.exporting.tensors import Sources, TensorSource, stored
from mmtrain.facts.adapters import LORA_A, LORA_B, adapted_layer
from mmtrain.facts.families import canonical_name, full_names, llm_config, llm_tensors, loaded_name
from mmtrain.facts.settings import SYNONYMS
from mmtrain.model.llm.language import causal_config, is_mrope_class, llm_class
from mmtrain.model.weights.files import tensor_entries
from mmtrain.stock.stock_class import ExportedClass, Settings

ROWS = {"llm.embedding.weight", "llm.head.weight"}  # matrices with a row for each token id
# of every Llama saved before 2023; stock models compute it
_OLD_BUFFER = r"rotary_emb\.inv_freq$"
_ROWS_AT_ONCE = 4096
_OF_FOLDERS = ("_name_or_path", "auto_map", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class ExportedLanguage:
    """The LLM's part of an exported folder."""

    config: Settings  # text_config
    tensors: Sources  # by their names in the folder
    added_rows: int  # that the embedding gained


def language_for_export(
    around: ExportedClass,
    folder: Path,
    trained: Sources,
    rows_needed: int,
    dtype: str,
    lora: LoraSection | None = None,
) -> ExportedLanguage:
    """Return the LLM in `folder` with `trained` tensors in place of its own, adapters merged.

    `trained` has them by global names. Embedding and head get at least `rows_needed` rows; a new
    one is the mean of the others, so that a new token's logit is never the largest. Raises
    UserError for a trained tensor of another shape than in the files.
    """
    config = causal_config(folder, around.mrope)
    stock = llm_class(config)
    files = llm_tensors(folder, tensor_entries(folder))
    names = full_names(config.model_type, files)
    with torch.device("meta"):
        model = stock(config)
    # a stock class would report tensors that the causal LM ignores
    own_names = model.state_dict().keys()
    patterns = (_OLD_BUFFER, *(model._keys_to_ignore_on_load_unexpected or ()))
    is_ignored = re.compile("|".join(patterns)).search
    transposed = set()
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            transposed.add(canonical_name(f"{name}.weight"))

    waiting = dict(trained)
    tensors = {}
    rows = 0
    for on_disk, entry in files.items():
        name = names[on_disk]
        if name not in own_names and is_ignored(name):
            continue
        source = stored(entry)
        global_name = canonical_name(loaded_name(config.model_type, name))
        own = waiting.pop(global_name, source)
        if own.shape != source.shape:
            raise UserError(
                f"{global_name}: trained with shape {list(own.shape)}, but {folder} has "
                f"{list(source.shape)}. Restore the model that the run was trained with"
            )
        source = take_merged(waiting, global_name, own, lora, global_name in transposed)
        if global_name in ROWS:
            rows = source.shape[0]
            if rows_needed > rows:
                source = _with_rows(source, rows_needed)
        tensors[around.language_name(name, stock.base_model_prefix)] = source
    assert not waiting, f"{min(waiting)} has no place, which is refused before"
    vocab_size = max(rows, rows_needed, config.get_text_config().vocab_size)
    content = _text_config(folder, config, vocab_size, dtype)
    return ExportedLanguage(content, tensors, max(0, rows_needed - rows))


def take_merged(
    waiting: Sources,
    name: str,
    weight: TensorSource,
    lora: LoraSection | None,
    transposed: bool,
) -> TensorSource:
    """Return the weight `name` merged with its adapter, which is taken out of `waiting`, if there.

    transposed: the weight is (in, out). Raises UserError for an adapter of another shape.
    """
    layer = adapted_layer(name)
    if lora is None or layer + LORA_A not in waiting or layer + LORA_B not in waiting:
        return weight
    first = waiting.pop(layer + LORA_A)
    second = waiting.pop(layer + LORA_B)
    outputs, inputs = weight.shape
    if transposed:
        inputs, outputs = weight.shape
    if (first.shape, second.shape) != ((lora.r, inputs), (outputs, lora.r)):
        raise UserError(
            f"{layer}: its adapter was trained with shapes {list(first.shape)} and "
            f"{list(second.shape)}, but its weight has {list(weight.shape)}. "
            "Restore the model that the run was trained with"
        )

    def read() -> torch.Tensor:
        update = (second.read() @ first.read()) * (lora.alpha / lora.r)
        if transposed:
            update = update.T
        return weight.read().to(torch.float32) + update

    return TensorSource(torch.float32, weight.shape, read)


def _with_rows(source: TensorSource, rows: int) -> TensorSource:
    """Extend the matrix (V, D) to `rows` rows; new ones are the mean of its V."""
    have, *rest = source.shape

    def read() -> torch.Tensor:
        matrix = source.read()
        larger = torch.empty((rows, *rest), dtype=source.dtype)
        larger[:have] = matrix
        total = sum(part.sum(0, dtype=torch.float64) for part in matrix.split(_ROWS_AT_ONCE))
        larger[have:] = (total / have).to(source.dtype)
        return larger

    return TensorSource(source.dtype, (rows, *rest), read)


def _text_config(
    folder: Path,
    config: PreTrainedConfig,
    rows: int,
    dtype: str,
) -> Settings:
    """Return the LLM's own config.json with its new rows and dtype."""
    if is_mrope_class(config):
        content = config.text_config.to_dict()
    else:
        content = llm_config(folder)
    for key in (*_OF_FOLDERS, *SYNONYMS["quantisation"]):
        content.pop(key, None)
    content |= _rope_of_transformers_4(content)
    # A default in one version of transformers may be none in another: what decides about tensors is
    # written down.
    return {
        **content,
        "vocab_size": rows,
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "dtype": dtype,
    }


def _rope_of_transformers_4(content: Settings) -> Settings:
    """Return version 5's rope_parameters in keys of version 4, which else uses its defaults."""
    rope = content.get("rope_parameters")
    # by layer type: families that version 4 has no keys for
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    settings = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = dict(rope)
    return settings
