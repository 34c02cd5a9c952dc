"""Write adapters as peft has them, for the published LLM or beside a whole model.

llm.layers.0.self_attn.q_proj.lora_A.weight
    -> base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

OUT/adapter_model.safetensors   the adapters of the LLM, in names of the base model's modules
OUT/adapter_config.json         peft's LoraConfig: rank, scale, and which modules have one, no
                                others by mistake
OUT/base/                       --base hf: the folder of --format hf with those adapters left out,
                                all else as trained
OUT/projector.safetensors, projector.json
                                --base llm: what the LLM has no place for, the projector

Which tensors peft will look for it is asked itself, with the base model on the meta device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.model import LoraSection
from mmtrain.exporting.card import public_name, write_card
from mmtrain.exporting.hf import ExportedModel, export_hf
from mmtrain.exporting.projector_file import origin, run_tensors, write_projector_file
from mmtrain.exporting.tensors import TensorSource, cast_to, write_tensors
from mmtrain.facts.adapters import LORA_A, LORA_B, adapted_layer, is_llm_adapter
from mmtrain.facts.families import canonical_name
from mmtrain.facts.model_files import model_folder
from mmtrain.model.llm.language import causal_config, llm_class, quiet
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.stock.exporters import Base, refuse_unfit_format

BASE = "base"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of what peft saves


def export_peft(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    base: Base,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ExportedModel | None:
    """Write the folder; return the base model that was written, if any.

    Raises UserError for a run without adapters of its LLM, for tensors that have no place, and as
    `export_hf`.
    """
    config, tensors = checkpoint.config, run_tensors(checkpoint)
    about = origin(checkpoint, tensors)
    name = "peft" if base == "hf" else "peft --base llm"
    refuse_unfit_format(name, checkpoint.path, checkpoint.models, about["trained"])
    adapters = {name: source for name, source in tensors.items() if is_llm_adapter(name)}
    llm = model_folder(config.model.llm.path)
    exported = None
    if base == "hf":
        (folder / BASE).mkdir()
        exported = export_hf(checkpoint, folder / BASE, dtype, shard_bytes, progress, merged=False)
        exported = replace(exported, adapters=folder)
        made = AutoConfig.from_pretrained(
            folder / BASE, local_files_only=True, trust_remote_code=False
        )
        stock, name = getattr(transformers, *made.architectures), BASE
    else:
        if projector := {
            name: source for name, source in tensors.items() if name.startswith(PROJECTOR)
        }:
            write_projector_file(about, folder, projector, dtype)
        made = causal_config(llm)
        stock, name = llm_class(made), public_name(config.model.llm.path)
    with torch.device("meta"), quiet():
        whole = stock(made)
    described, places = _places(whole, adapters, config.model.lora)
    described.base_model_name_or_path = name
    described.save_pretrained(str(folder))
    write_tensors(
        folder / TENSORS,
        cast_to(dtype, {places[name]: source for name, source in adapters.items()}),
    )
    base_folder = None if base == "llm" else BASE
    opened = repr(name)
    shown = {
        "base_folder": base_folder,
        "class_name": stock.__name__,
        "opened": opened,
        "lora": config.model.lora,
    }
    write_card(folder, about, "adapters", **shown)
    return exported


def _places(
    whole: PreTrainedModel, adapters: Mapping[str, TensorSource], lora: LoraSection
) -> tuple[LoraConfig, dict[str, str]]:
    """Return peft's configuration of `adapters` (by global name) in a stock model on the meta
    device, and their names.

    Raises UserError where peft would look for other tensors.
    """
    decoder = whole.get_decoder()
    path = next(name for name, module in whole.named_modules() if module is decoder)
    layers = {adapted_layer(name) for name in adapters}
    modules = {
        layer: f"{path}.{name}"
        for name, _ in decoder.named_modules()
        if (layer := adapted_layer(canonical_name(f"model.{name}.weight"))) in layers
    }
    places = {
        f"{layer}{part}": f"{_PREFIX}{module}{part}"
        for layer, module in modules.items()
        for part in (LORA_A, LORA_B)
    }
    shapes = {places.get(name, name): source.shape for name, source in adapters.items()}
    targets = _targets(set(modules.values()), [name for name, _ in whole.named_modules()])
    described = LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=targets,
        fan_in_fan_out=any(
            isinstance(whole.get_submodule(name), Conv1D) for name in modules.values()
        ),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            # peft rewrites what it is given
            model = get_peft_model(whole, copy.deepcopy(described))
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
    except ValueError as error:
        why = f"peft cannot add these adapters to {type(whole).__name__}: {error}"
        raise UserError(f"{why}. Use --format hf") from error
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if odd := sorted(
        name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name)
    ):
        raise UserError(
            f"{escape(odd[0])}: trained with shape {shapes.get(odd[0])}, but peft would look for "
            f"{wanted.get(odd[0])} in {type(whole).__name__}. Use --format hf"
        )
    described.target_modules = targets  # in order: peft has made a set of them
    return described, places


def _targets(modules: Collection[str], all_modules: Sequence[str]) -> list[str]:
    """Return names by which peft finds these modules and no others: their last parts, or else the
    whole names.

    A regular expression would not do: in a MoE model peft adapts every module that shares its last
    name with a match.
    """
    last = {name.rpartition(".")[2] for name in modules}
    others = {name for name in all_modules if name.rpartition(".")[2] in last} - set(modules)
    return sorted(modules if others else last)


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters in `folder` into a stock model by peft; raises UserError unless all are
    there, and no others.
    """
    with quiet(), warnings.catch_warnings(action="ignore", category=FutureWarning):
        loaded = PeftModel.from_pretrained(model, str(folder))
    tensors, stored = (
        get_peft_model_state_dict(loaded, save_embedding_layers=False),
        load_file(folder / TENSORS),
    )
    odd = tensors.keys() ^ stored.keys()
    odd |= {
        name
        for name in tensors.keys() - odd
        if not torch.equal(tensors[name], stored[name].to(tensors[name]))
    }
    if odd:
        raise UserError(
            f"peft does not load the exported folder as it was written: {min(odd)} differs"
        )
