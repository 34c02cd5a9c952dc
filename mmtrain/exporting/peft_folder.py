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

import copy
import warnings
from collections.abc import Collection, Iterable
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
from mmtrain.exporting.projector_file import opened, write_projector_file
from mmtrain.exporting.tensors import Progress, Sources, cast_to, named, write_tensors
from mmtrain.facts.adapters import LORA_A, LORA_B, adapted_layer, is_llm_adapter
from mmtrain.facts.families import canonical_name
from mmtrain.model.llm.language import causal_config, llm_class, quiet
from mmtrain.model.trained.projector import PROJECTOR
from mmtrain.stock.exporters import Base

BASE = "base"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of what peft saves


def export_peft(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    base: Base,
    progress: Progress,
) -> ExportedModel | None:
    """Write the folder; return the base model that was written, if any.

    Raises UserError for a run without adapters of its LLM, for tensors that have no place, and as
    `export_hf`.
    """
    models = checkpoint.models
    model = models.section
    form = "peft"
    if base == "llm":
        form = "peft --base llm"
    tensors, about = opened(checkpoint, form)
    exported = base_folder = None
    if base == "hf":
        name = base_folder = BASE
        (folder / BASE).mkdir()
        exported = export_hf(checkpoint, folder / BASE, dtype, shard_bytes, progress, merged=False)
        exported = replace(exported, adapters=folder)
        made = AutoConfig.from_pretrained(
            folder / BASE,
            local_files_only=True,
            trust_remote_code=False,
        )
        stock = getattr(transformers, *made.architectures)
    else:
        name = public_name(model.llm.path)
        if projector := named(tensors, PROJECTOR):
            write_projector_file(about, folder, projector, dtype)
        made = causal_config(models.llm_folder)
        stock = llm_class(made)
    with torch.device("meta"), quiet():
        whole = stock(made)

    adapters = {name: tensors[name] for name in filter(is_llm_adapter, tensors)}
    described, places = _places(whole, adapters, model.lora)
    described.base_model_name_or_path = name
    described.save_pretrained(str(folder))
    placed = {places[own]: source for own, source in adapters.items()}
    write_tensors(folder / TENSORS, cast_to(dtype, placed))
    write_card(
        folder,
        about,
        "adapters",
        base_folder=base_folder,
        class_name=stock.__name__,
        opened=repr(name),
        lora=model.lora,
    )
    return exported


def _places(
    whole: PreTrainedModel,
    adapters: Sources,
    lora: LoraSection,
) -> tuple[LoraConfig, dict[str, str]]:
    """Return peft's configuration of `adapters` in a stock model on the meta device.

    Also returns their names for peft, by global name. Raises UserError where peft would look for
    other tensors.
    """
    every = dict(whole.named_modules())
    decoder = whole.get_decoder()
    path = next(name for name, module in every.items() if module is decoder)
    layers = set(map(adapted_layer, adapters))
    modules = set()
    places = {}
    for below, _ in decoder.named_modules():
        layer = adapted_layer(canonical_name(f"model.{below}.weight"))
        if layer in layers:
            module = f"{path}.{below}"
            modules.add(module)
            for part in (LORA_A, LORA_B):
                places[layer + part] = f"{_PREFIX}{module}{part}"
    shapes = {places.get(name, name): source.shape for name, source in adapters.items()}
    targets = _targets(modules, every)
    alpha = lora.alpha
    if alpha.is_integer():
        alpha = int(alpha)
    described = LoraConfig(
        r=lora.r,
        lora_alpha=alpha,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(every[name], Conv1D) for name in modules),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            # peft rewrites what it is given
            model = get_peft_model(whole, copy.deepcopy(described))
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
    except ValueError as error:
        raise UserError(
            f"peft cannot add these adapters to {type(whole).__name__}: {error}. Use --format hf"
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise UserError(
                f"{escape(name)}: trained with shape {shapes.get(name)}, but peft would look for "
                f"{wanted.get(name)} in {type(whole).__name__}. Use --format hf"
            )
    described.target_modules = targets  # in order: peft has made a set of them
    return described, places


def _targets(modules: Collection[str], every: Iterable[str]) -> list[str]:
    """Return names by which peft finds `modules` and no others of `every`.

    They are the last parts of the names, or else the whole names. A regular expression would not
    do: in a MoE model peft adapts every module that shares its last name with a match.
    """
    last = {name.rpartition(".")[2] for name in modules}
    for name in every:
        if name.rpartition(".")[2] in last and name not in modules:
            return sorted(modules)
    return sorted(last)


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters in `folder` into a stock model by peft.

    Raises UserError unless all of them are there, and no others.
    """
    with quiet(), warnings.catch_warnings(action="ignore", category=FutureWarning):
        loaded = PeftModel.from_pretrained(model, str(folder))
    tensors = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    stored = load_file(folder / TENSORS)
    odd = tensors.keys() ^ stored.keys()
    for name in tensors.keys() - odd:
        if not torch.equal(tensors[name], stored[name].to(tensors[name])):
            odd.add(name)
    if odd:
        raise UserError(
            f"peft does not load the exported folder as it was written: {min(odd)} differs"
        )
