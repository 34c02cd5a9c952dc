"""A pipeline stage's part of a stock Hugging Face causal LM: embedding, some decoder layers, final
norm and LM head.

    input_ids (B, L) --embed--> (B, L, D) --forward: decoder layers [first, last)--> (B, L, D)
    last stage: forward also runs the final norm, or --forward_rows--> rows (S, D) of it --logits-->
        (S, V)

The stock model keeps its config and the length of its layer list; what other stages hold is
replaced (bookends.py). Cutting the list is wrong wherever the stock forward scales its input: every
stage would multiply granite's 12 in.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from mmtrain.base.devices import copied
from mmtrain.base.errors import UserError
from mmtrain.facts.families import (
    MROPE_MODELS,
    MROPE_SECTIONS,
    TOKEN_SCALES,
    canonical_name,
    check_family,
    full_names,
    holds_parts,
    llm_config,
    llm_tensors,
    remote_code,
)
from mmtrain.facts.model_files import foreign_files, model_folder
from mmtrain.facts.shapes import llm_shape
from mmtrain.model.llm.attention import ATTENTION, NoPadding, document_positions
from mmtrain.model.llm.bookends import (
    Bookend,
    absent_modules,
    copy_settings,
    decoder_layers,
    decoder_path,
    holds_layer_0,
    replace,
)
from mmtrain.model.llm.compiled import Compiler
from mmtrain.model.llm.last_layer import LastLayer, Rows, recomputing
from mmtrain.model.llm.mixers import (
    ByDocument,
    Sequences,
    mixers_of,
    recomputing_on_documents,
    running_on,
)
from mmtrain.model.trained.lora import without_marks
from mmtrain.model.weights.files import open_tensors, tensor_entries
from mmtrain.model.weights.streaming import StreamedLayers


@dataclass
class _HeadInput(MoeModelOutputWithPast):
    """All that stock causal LMs read of their base model's output."""

    cross_attentions: tuple[Tensor, ...] | None = None


class _PassThrough(nn.Module):
    """A stand-in for the decoder, with which a causal LM runs its head alone."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        copy_settings(decoder, self)  # falcon_h1's head asks for lm_head_multiplier

    def forward(
        self,
        *_: Any,
        inputs_embeds: Tensor,
        **__: Any,
    ) -> _HeadInput:
        return _HeadInput(last_hidden_state=inputs_embeds)


class DecoderLayers(nn.Module):
    """Decoder layers [first, last) of a stock causal LM, with the embedding or the head where the
    stage has them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        first: int,
        last: int,
        *,
        embedding: bool,
        head: bool,
        streamed: StreamedLayers | None = None,
    ) -> None:
        """`model` is a stock causal LM in which all other parts are replaced; `streamed` has its
        streamed layers.
        """
        super().__init__()
        numbers = model.config.get_text_config()
        layers = numbers.num_hidden_layers
        assert 0 <= first <= last <= layers, (first, last, layers)
        assert not embedding or first == 0, (
            "the embedding is on the stage with decoder layer 0, or the one before"
        )
        assert not head or last == layers, (
            "the head is on the stage with the last decoder layer, or the one after"
        )
        self.model = model.requires_grad_(False)
        self.first = first
        self.last = last
        self.has_embedding = embedding
        self.has_head = head
        self.hidden_size: int = numbers.hidden_size
        self.vocab_size: int = numbers.vocab_size
        self.deepstack: tuple[Tensor, Sequence[Tensor]] | None = None
        """Places (P,) of image tokens, over rows laid end to end, and the features (P, D) that
        DeepStack adds there behind the first layer, the second, ...; the next `forward` uses them
        up."""
        self._recomputed = 0
        self._last_layer: LastLayer | None = None
        self.streamed = streamed
        self._compiler: Compiler | None = None
        self._dress_layers(narrow=False)
        self.eval()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed token ids (B, L) int64 -> (B, L, D), with the stock model's embedding and its
        scale, if any.

        The scale is one that the stock forward applies to token ids alone, not to `inputs_embeds`.
        """
        assert self.has_embedding, "this slice has no embedding"
        embeddings = self.model.get_input_embeddings()(input_ids)
        config = self.model.config
        if config.model_type in TOKEN_SCALES:
            embeddings = embeddings * getattr(config, TOKEN_SCALES[config.model_type])
        return embeddings

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Run hidden states (B, L, D) through the slice's decoder layers, and the final norm if it
        has the head.

        `position_ids` (B, L) restart at 0 in each document; the host waits for them, unless they
        are on the CPU. For M-RoPE they are (4, B, L): grid positions (3, B, L) stand behind them. A
        slice that holds decoder layer 0 takes what `embed` returned, with image features in it.
        Calls must not overlap.
        """
        if self.first == self.last and not self.has_head:
            return hidden
        return self._run(hidden, position_ids)

    def forward_rows(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Return `forward`'s result for some tokens alone, (S, D); for slices with the head.

        `places` (S,) int64, on the CPU, rise over rows laid end to end; there may be none. Other
        tokens skip the final norm and, after `narrow_last_layer`, most of the last decoder layer.
        """
        assert self.has_head, "only a slice with the head has results that are not handed on"
        count = len(places)
        # layers that get no token at all may fail; one row that is cut off keeps the graph
        if count == 0:
            places = places.new_zeros(1)
        rows = Rows(places, hidden.device)
        if self.first == self.last:
            places_in_documents = rows.of_tensor(position_ids.view(-1, *hidden.shape[:2])[0])
            return self._run(rows.of_tensor(hidden), places_in_documents)[0, :count]
        if self._last_layer is None:
            return rows.of_tensor(self._run(hidden, position_ids))[0, :count]
        self._last_layer.rows = rows
        try:
            return self._run(hidden, position_ids)[0, :count]
        finally:
            self._last_layer.rows = None

    def _run(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        layers = decoder_layers(self.model)
        device = hidden.device
        documents = positions = position_ids
        if position_ids.ndim == 3:
            documents = position_ids[0]
            positions = position_ids[1:]

        hooks = self._adding_deepstack()
        try:
            embeddings = hidden
            if self.first > 0:
                layers[self.first - 1].hand_in = hidden
                # Behind a bookend the input tells shape, dtype and device only: detached, nothing
                # is saved for it.
                embeddings = hidden.detach()
            # Told that nothing is padding, transformers does not look for documents, and the host
            # waits for no answer.
            no_padding = torch.ones(
                documents.shape,
                dtype=torch.bool,
                device=device,
            )
            sequences = Sequences.of_positions(documents, device) if self._has_mixers else None
            with document_positions(documents), running_on(sequences):
                output = self.model.get_submodule(decoder_path(self.model)[0])(
                    inputs_embeds=embeddings,
                    attention_mask=no_padding.as_subclass(NoPadding),
                    position_ids=copied(positions, device),
                    use_cache=False,
                )
            result = output.last_hidden_state
            if self.last < len(layers):
                result = layers[self.last].handed_out
            assert result is not None, "the stock model did not run its layers in order"
            return result
        finally:
            # else this micro-batch's activations would stay alive, or enter the next one after an
            # error
            for hook in hooks:
                hook.remove()
            for layer in layers:
                if isinstance(layer, Bookend):
                    layer.hand_in = layer.handed_out = None

    def _adding_deepstack(self) -> list[RemovableHandle]:
        """Add DeepStack's features behind real layers: the stock forward would add them behind
        bookends, too.
        """
        if self.deepstack is None:
            return []
        places, features = self.deepstack
        self.deepstack = None
        assert self.first == 0 and len(features) <= self.last, (
            "stage 0 holds the layers behind which DeepStack adds"
        )

        def hook(
            added: Tensor,
            _: nn.Module,
            __: Any,
            output: Tensor,
        ) -> Tensor:
            return output.flatten(0, 1).index_add(0, places, added).view_as(output)

        hooks = []
        for layer, added in zip(decoder_layers(self.model), features, strict=False):
            hooks.append(layer.register_forward_hook(partial(hook, added)))
        return hooks

    def logits(self, rows: Tensor) -> Tensor:
        """Map normed hidden states (N, D) to logits (N, V), with the family's own scaling and soft
        cap.
        """
        assert self.has_head, "this slice has no head"
        path = decoder_path(self.model)[0]
        decoder = self.model.get_submodule(path)
        self.model.set_submodule(path, _PassThrough(decoder))
        try:
            return self.model(inputs_embeds=rows[None], use_cache=False).logits[0]
        finally:
            self.model.set_submodule(path, decoder)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.get_output_embeddings().parameters())

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its global name; a tied head beside its embedding is one
        parameter.
        """
        for name, parameter in self.model.named_parameters():
            yield canonical_name(without_marks(name)), parameter

    def recompute(self, count: int) -> None:
        """Let the first `count` of the slice's decoder layers recompute their activations in
        backward (0: none).

        Unlike transformers' gradient checkpointing this works in eval mode and keeps the names of
        parameters.
        """
        self._recomputed = count
        self._dress_layers(narrow=self._last_layer is not None)

    def narrow_last_layer(self) -> None:
        """Let `forward_rows` run the last decoder layer for its rows alone, where
        `parity.takes_rows`.
        """
        assert self.has_head and self.first < self.last, (
            "needed are the last decoder layer and the head"
        )
        self._dress_layers(narrow=True)

    def compile_layers(self, compiler: Compiler) -> None:
        """Let `compiler` choose how each class of decoder layers runs, a narrow last layer left
        out.
        """
        self._compiler = compiler
        self._dress_layers(narrow=self._last_layer is not None)

    def _dress_layers(self, *, narrow: bool) -> None:
        layers = decoder_layers(self.model)[self.first : self.last]
        self._has_mixers = False
        for i, layer in enumerate(layers):
            vars(layer).pop("forward", None)
            fetched = None
            if self.streamed is not None:
                fetched = self.streamed.layers.get(self.first + i)
            mixers = mixers_of(layer)
            self._has_mixers = self._has_mixers or bool(mixers)
            for mixer in mixers:
                # else it stays, with the kernels that it has chosen
                if "forward" not in vars(mixer):
                    mixer.forward = ByDocument(mixer)
            if narrow and i == len(layers) - 1:
                layer.forward = self._last_layer = LastLayer(layer, recompute=i < self._recomputed)
            else:
                if self._compiler is not None:
                    layer.forward = self._compiler.around(layer, fetched)
                if i < self._recomputed:
                    recompute = recomputing_on_documents if mixers else recomputing
                    layer.forward = recompute(layer.forward)
            # around all of it
            if fetched is not None:
                layer.forward = self.streamed.around(self.first + i, layer.forward)


def slice_of(
    model: PreTrainedModel,
    first: int,
    last: int,
    *,
    embedding: bool,
    head: bool,
    streamed: StreamedLayers | None = None,
) -> DecoderLayers:
    """Copy decoder layers [first, last) of a stock causal LM in memory; `streamed`, if any, takes
    all of them.
    """
    absent = absent_modules(
        model,
        first,
        last,
        embedding=embedding,
        head=head,
    )
    part = copy.deepcopy(model, {id(module): replacement for module, replacement in absent.items()})
    _set_options(part.config)
    with quiet():  # about the tower, which was dropped
        part.set_attn_implementation(ATTENTION)
    if streamed is not None:
        for i in range(first, last):
            streamed.take(i, decoder_layers(part)[i])
    return DecoderLayers(
        part,
        first,
        last,
        embedding=embedding,
        head=head,
        streamed=streamed,
    )


def load_decoder_layers(
    path: str,
    first: int,
    last: int,
    *,
    embedding: bool,
    head: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    streamed: StreamedLayers | None = None,
    streamed_numbers: Collection[int] = (),
    mrope: bool = False,
) -> DecoderLayers:
    """Load decoder layers [first, last) of the causal LM in a folder (or cached hub id), frozen, in
    eval mode.

    Only the slice's own tensors are read, by transformers' rules (conversions, fused experts, ties,
    fp32 buffers). A head without the embedding holds its own copy of a tied matrix. Layers that
    leave host memory, to a GPU or, the `streamed_numbers`, to `streamed`, are loaded one by one:
    memory holds what is kept and one of them. `mrope`: see `causal_config`.

    Raises UserError for missing or unusable files and for families that cannot be cut.
    """
    weights = _Weights(path, dtype, mrope)
    matrix = embedding or (head and bool(getattr(weights.config, "tie_word_embeddings", False)))
    at_once = range(first, last)
    if streamed is not None or torch.device(device).type != "cpu":
        at_once = at_once[:1]
    model = weights.load(at_once, embedding=matrix, head=head)
    layers = decoder_layers(model)
    for i in range(first, last):
        if i not in at_once:
            part = weights.load(range(i, i + 1), embedding=False, head=False)
            layers[i] = decoder_layers(part)[i]
            for module in layers[i].modules():
                if "config" in vars(module):  # one for the whole model, as the stock model has it
                    module.config = model.config
        if streamed is not None and i in streamed_numbers:
            streamed.take(i, layers[i])
        layers[i].to(device)
    model.to(device)
    if matrix and not embedding:
        replace(model, model.get_input_embeddings(), nn.Identity())
    return DecoderLayers(
        model,
        first,
        last,
        embedding=embedding,
        head=head,
        streamed=streamed,
    )


class _Weights:
    """The weights in a causal LM's folder, loaded part by part."""

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        mrope: bool,
    ) -> None:
        self._path = path
        self._dtype = dtype
        folder = model_folder(path)
        self.config = causal_config(folder, mrope)
        _set_options(self.config)
        self._stock = llm_class(self.config)
        self._files = llm_tensors(folder, tensor_entries(folder))
        if is_mrope_class(self.config):
            names = (name.replace("model.", "model.language_model.", 1) for name in self._files)
            self._files = dict(zip(names, self._files.values(), strict=True))
        full = full_names(self.config.model_type, self._files)
        self._global = {on_disk: canonical_name(name) for on_disk, name in full.items()}
        built = self.config.get_text_config().num_hidden_layers
        planned = len(llm_shape(path).decoder)
        if built != planned:  # a default of transformers, where config.json says none
            raise UserError(
                f"{path}: transformers builds {built} decoder layers, but the weights have "
                f"{planned}. Write num_hidden_layers into config.json"
            )

    def load(
        self,
        layers: range,
        *,
        embedding: bool,
        head: bool,
    ) -> PreTrainedModel:
        """Load the model with these decoder layers alone, on the CPU, and the ends that are asked
        for.
        """
        first, last = layers.start, layers.stop

        def cut(model: PreTrainedModel) -> None:
            drop_tower(model)
            absent = absent_modules(
                model,
                first,
                last,
                embedding=embedding,
                head=head,
            )
            for module, replacement in absent.items():
                replace(model, module, replacement)
            _initialise_present_layers(model)
            ties = getattr(model.config, "tie_word_embeddings", False)
            if not head:  # else transformers looks for the LM head that is tied to the embedding
                model.all_tied_weights_keys = {}
            elif ties and not model.all_tied_weights_keys:
                # kimi_linear's own class ties nothing, multimodal ones tie its head
                for name, _ in model.named_parameters():
                    if canonical_name(name) == "llm.embedding.weight":
                        model.all_tied_weights_keys = {"lm_head.weight": name}
                        break

        def wanted(name: str) -> bool:
            _, part, *rest = self._global[name].split(".")
            if part == "layers":
                return int(rest[0]) in layers
            if part == "embedding":
                return embedding
            if part in ("norm", "head"):
                return head
            return holds_layer_0(first, last)

        tensors = open_tensors({name: self._files[name] for name in filter(wanted, self._files)})
        with quiet():
            model, report = cut_class(self._stock, cut).from_pretrained(
                None,
                config=self.config,
                state_dict=tensors,
                dtype=self._dtype,
                attn_implementation=ATTENTION,
                # they are in the report, like everything else that does not fit
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        faults = {}
        for kind, entries in report.items():
            if entries:
                faults[kind] = sorted(map(str, entries))[:3]
        if faults:
            raise UserError(
                f"{self._path}: the weights do not fit config.json ({faults}). "
                "Download the model again"
            )
        return model


def cut_class(
    stock: type[PreTrainedModel],
    cut: Callable[[PreTrainedModel], None],
) -> type[PreTrainedModel]:
    """Return a stock class that calls `cut` on a model once it is built, before it takes memory.

    It has the stock class's name and module: transformers finds its conversions by them.
    """

    def build(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        stock.__init__(model, *arguments, **options)
        cut(model)

    return type(stock.__name__, (stock,), {"__init__": build, "__module__": stock.__module__})


def _initialise_present_layers(model: PreTrainedModel) -> None:
    """Let a decoder initialise only layers that are here: falcon_h1's sets a buffer of each when it
    is loaded.
    """
    path, name = decoder_path(model)
    decoder = model.get_submodule(path)
    layers = decoder_layers(model)
    present = nn.ModuleList(layer for layer in layers if not isinstance(layer, Bookend))
    stock = decoder._init_weights

    def initialise(module: nn.Module) -> None:
        if module is decoder:
            setattr(decoder, name, present)
        stock(module)
        setattr(decoder, name, layers)

    decoder._init_weights = initialise


def causal_config(
    folder: Path,
    mrope: bool = False,
) -> PreTrainedConfig:
    """Read transformers' config of the causal LM in a folder. Raises UserError for a family that
    cannot be used.

    With `mrope`, and for an LLM without a class of its own (Qwen2.5-VL's), it is the multimodal
    class's.
    """
    config_json = llm_config(folder)
    check_family(config_json)
    family = config_json["model_type"]
    if family not in transformers.CONFIG_MAPPING:
        why = remote_code(config_json) or "A later version may"
        raise UserError(
            f"{folder}: transformers {transformers.__version__} does not know {family}. {why}"
        )
    with quiet():  # about mrope_section, which some text models' configs do not list
        part = "text_config in " if holds_parts(folder) else ""
        with foreign_files(f"{folder}: {part}config.json"):
            if part:
                config = config_from(transformers.CONFIG_MAPPING[family], config_json)
            else:
                config = AutoConfig.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                )
    forget_codes(config)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if family in MROPE_MODELS and (mrope or not is_causal):
        return _mrope_config(config)
    if not is_causal:
        raise UserError(
            f"{folder}: {family} has no causal LM in transformers {transformers.__version__}"
        )
    return config


def forget_codes(config: PreTrainedConfig) -> None:
    """Let transformers load weights, as which published codes are read."""
    vars(config).pop("quantization_config", None)


def _mrope_config(language: PreTrainedConfig) -> PreTrainedConfig:
    """Wrap an LLM's config in its multimodal class's; one without M-RoPE gets that class's
    sections.
    """
    text = language.to_dict()
    family = MROPE_MODELS[language.model_type]
    if language.model_type in MROPE_SECTIONS:
        of_height, of_width, more = MROPE_SECTIONS[language.model_type]
        head_width = text.get("head_dim") or language.hidden_size // language.num_attention_heads
        frequencies = head_width // 2
        height = of_height * frequencies // 64
        width = of_width * frequencies // 64
        section = [frequencies - height - width, height, width]
        rope = {**text["rope_parameters"], "mrope_section": section, **more}
        text |= {"model_type": f"{family}_text", "rope_parameters": rope}
    return transformers.CONFIG_MAPPING[family](
        text_config=text,
        tie_word_embeddings=bool(getattr(language, "tie_word_embeddings", False)),
    )


def is_mrope_class(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a multimodal class with M-RoPE."""
    return config.model_type in MROPE_MODELS.values()


def auto_class(config: PreTrainedConfig) -> Any:
    if is_mrope_class(config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def llm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the stock class of what `causal_config` returns."""
    return auto_class(config)._model_mapping[type(config)]


def drop_tower(model: PreTrainedModel) -> None:
    """Remove everything of a multimodal model but its LLM."""
    if is_mrope_class(model.config):
        outer, _, decoder = decoder_path(model)[0].rpartition(".")
        for name, _ in list(model.get_submodule(outer).named_children()):
            if name != decoder:
                model.set_submodule(f"{outer}.{name}", nn.Identity())


def config_from(
    kind: type[PreTrainedConfig],
    config_json: Mapping[str, Any],
) -> PreTrainedConfig:
    """Make transformers' config from a config.json in memory, which spells infinity {"__float__":
    "Infinity"}.
    """
    return kind.from_dict(kind._decode_special_floats(dict(config_json)))


def _set_options(config: PreTrainedConfig) -> None:
    """Switch off outputs that config.json may ask for and a stage does not return: they keep
    activations alive.
    """
    for option in (
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
    ):
        if getattr(config, option, False):
            setattr(config, option, False)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its report of what does not fit."""
    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
