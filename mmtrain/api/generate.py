"""Answer questions about pictures by a trained model: by stock transformers, greedily.

run or checkpoint --exported once, into the cache--> Hugging Face folder
    --load--> Conversation --ask--> text
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.api.export import Progress, export
from mmtrain.api.run import Run
from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held
from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, escape, silence_libraries
from mmtrain.base.version import VERSION
from mmtrain.checkpoint.step_folder import StepFolder, find, names_checkpoint
from mmtrain.data.samples.records import IMAGE_MARK, BadSample
from mmtrain.facts.encoders import FAMILIES, TIMM
from mmtrain.facts.families import MROPE_MODELS, check_family
from mmtrain.facts.model_files import (
    find_model_folder,
    foreign_files,
    model_config,
    optional_json,
    tensor_shapes,
)
from mmtrain.facts.settings import check_sizes
from mmtrain.stock.exporters import STOCK_CLASSES, stock_class
from mmtrain.stock.stock_class import StockClass, resize_of

if TYPE_CHECKING:
    from PIL.Image import Image

_log = logging.getLogger(__name__)
PARTS_OF_LLMS = {"attn_config", "ffn_config"}  # parts in a config of an LLM alone
NEEDED = (
    "Name a run or checkpoint of mmtrain, or a Hugging Face folder of a model that mmtrain export "
    f"makes ({', '.join(dict.fromkeys(stock.name for stock in STOCK_CLASSES))}, or a causal LM)"
)


def generate(
    model: Run | str | Path,
    image: str | Path | Image | Sequence[str | Path | Image] = (),
    prompt: str = "Describe the image.",
    *,
    system: str | None = None,
    max_new_tokens: int = 256,
) -> str:
    """Return a trained model's answer to a question about pictures; a model of text takes none.

    `model` is a run, a checkpoint, or a Hugging Face folder, loaded for this answer onto the GPU if
    there is one. A run is exported into the cache once. A model trained on captions alone ignores
    the question. Raises UserError.
    """
    silence_libraries()
    images = [image]
    if isinstance(image, Sequence) and not isinstance(image, str):
        images = list(image)
    pictures = list(map(read_image, images))
    if isinstance(model, Run):
        model = model.folder
    conversation = Conversation(*load(stock_folder(str(model))), pictures, system, max_new_tokens)
    if conversation.takes_questions():
        return conversation.ask(prompt)
    return conversation.describe()


def stock_folder(model: str, show: Progress = lambda *_: None) -> Path:
    """Return the Hugging Face folder of `model`, exported now if need be; `show` is export's.

    Raises UserError.
    """
    folder = find_model_folder(model)
    if folder is None:
        raise UserError(f"{model}: no such folder, and no hub id in the local cache. {NEEDED}")
    if names_checkpoint(folder):
        return _exported(find(folder), show)
    config = optional_json(folder)
    family = config.get("model_type")
    if not any(family == stock.model_type for stock in STOCK_CLASSES) and not _is_causal_lm(config):
        seen = "no config.json"
        if family is not None:
            seen = f"model_type {escape(family)}"
        raise UserError(f"{model}: has {seen}. {NEEDED}")
    shapes = tensor_shapes(folder)
    if shapes is None:
        raise UserError(f"{model}: holds no model.safetensors. Download the weights")
    check_sizes(config, shapes, model)
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        # refuses what no model has, before transformers takes memory for it
        optional_json(folder, name)
    return folder


def _is_causal_lm(config: dict[str, Any]) -> bool:
    """Whether a config.json is of an LLM alone; raises UserError for an unusable family."""
    classes = config.get("architectures")
    if not isinstance(classes, list):
        return False
    if not any(str(name).endswith("ForCausalLM") for name in classes):
        return False
    check_family(config)
    return not any(key.endswith("_config") and key not in PARTS_OF_LLMS for key in config)


def _exported(checkpoint: StepFolder, show: Progress) -> Path:
    """Return a checkpoint's Hugging Face folder in the cache, made once. Raises UserError."""
    key = hashlib.sha256(f"{checkpoint.fingerprint} {VERSION}".encode()).hexdigest()[:20]
    folder = cache_folder("chat") / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_name(f".{folder.name}.lock"), wait=True):
        if not folder.is_dir():
            _log.info(f"exporting {checkpoint.path} for transformers, once, into {folder}")
            try:
                export(checkpoint.path, "hf", folder, show=show)
            except UserError as error:
                raise UserError(
                    f"{checkpoint.path} cannot be exported, so it cannot be asked: {error}"
                ) from error
            _log.info(
                f"{folder} holds the exported model; delete it when you have no more questions"
            )
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """Return stock model and processor, or an LLM's tokenizer, on the GPU if there is one.

    Raises UserError.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    from mmtrain.data.samples.templates import load_tokenizer
    from mmtrain.model.llm.language import causal_config
    from mmtrain.model.weights.published import dequantising

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = model_config(folder)
    with foreign_files(str(folder)):
        if _is_causal_lm(config):
            processor = tokenizer = load_tokenizer(str(folder))
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(causal_config(folder))]
        else:
            encoder = config.get("vision_config") or {}
            stock = stock_class(config["model_type"], encoder.get("model_type"))
            assert stock is not None, "`stock_folder` has refused other classes"
            _check_parts(stock, config, folder)
            model_class = stock.model_class
            processor = stock.load_processor(folder)
            tokenizer = processor.tokenizer
        model, report = model_class.from_pretrained(
            folder,
            # transformers' choice: config.json may name one to be downloaded
            attn_implementation=None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            dtype="auto",
            **dequantising(folder),
        )
    faults = {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}
    if faults:
        raise UserError(
            f"{folder}: the weights do not fit config.json ({faults}); "
            "part of the model would be random"
        )
    if processor is not tokenizer and processor.image_token_id != model.config.image_token_id:
        raise UserError(
            f"{folder}: {IMAGE_MARK} is token {processor.image_token_id} of the tokenizer, but "
            f"config.json says {model.config.image_token_id}"
        )
    # Of generation_config.json only what ends an answer, what is never said and whether there is a
    # cache are taken: the rest chooses code of transformers, or samples.
    own = model.generation_config
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=own.eos_token_id,
        suppress_tokens=own.suppress_tokens,
        use_cache=own.use_cache,
    )
    if not isinstance(processor.chat_template, str):
        raise UserError(
            f"{folder}: has no chat template, so prompts cannot be written. "
            "Add its chat_template.jinja"
        )
    try:
        if torch.cuda.is_available():
            model.to("cuda")
        return model.eval(), processor
    except torch.OutOfMemoryError:
        raise UserError(
            f"{folder}: {bytes_text(model.get_memory_footprint())} do not fit into the GPU's "
            "memory. Set CUDA_VISIBLE_DEVICES= to use the CPU"
        ) from None


def _check_parts(stock: StockClass, config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for parts in config.json that no folder of the stock class has.

    transformers makes any model_type, and some of these load their own parts from a hub id, or from
    any file.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from mmtrain.model.encoder.vision import check_wrapped_timm, model_class

    encoders = set(stock.own_encoders)
    for family in FAMILIES.values():
        if not stock.encoders or family.model in stock.encoders:
            encoders.add(model_class(family).config_class.model_type)
    encoder = config.get("vision_config") or {}
    vision = encoder.get("model_type")
    if vision is not None and vision not in encoders:
        raise UserError(
            f"{folder}: config.json has a vision_config of model_type {escape(repr(vision))}; "
            f"{stock.class_name} takes {', '.join(sorted(encoders))}"
        )
    text = (config.get("text_config") or {}).get("model_type")
    classes = transformers.CONFIG_MAPPING
    is_causal = text is None or (text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text in classes)
    is_own = stock.mrope and text in MROPE_MODELS
    if not (is_causal or is_own) or (text and classes[text].sub_configs.keys() - PARTS_OF_LLMS):
        raise UserError(
            f"{folder}: config.json has a text_config of model_type {escape(repr(text))}, which is "
            "not an LLM alone; needed is one such as llama"
        )
    if TIMM in stock.encoders:
        check_wrapped_timm(encoder, folder)


class Conversation:
    """Questions and answers about the same pictures; the first question brings them."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        images: list[Image],
        system: str | None,
        limit: int,
        show: Callable[[str], None] | None = None,
    ) -> None:
        """`limit`: new tokens an answer may have; `show` gets its words as they come."""
        self.model = model
        self.processor = processor
        self.folder = str(model.name_or_path)
        # the processor of an LLM alone is its tokenizer
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.sees = self.tokenizer is not processor
        if images and not self.sees:
            raise UserError(
                f"{self.folder}: is an LLM alone, which sees no pictures. "
                "Leave the picture (--image) out"
            )
        if self.sees and not images:
            raise UserError(
                f"{self.folder}: answers questions about pictures. Give one (--image FILE)"
            )
        self.images = []
        for number, image in enumerate(images, start=1):
            with foreign_files(f"picture {number}, {image.width} x {image.height} pixels,"):
                self.images.append(resized(image, processor.image_processor))
                # refuses those too thin for it
                processor.image_processor(images=self.images[-1], return_tensors="pt")
        self.limit = limit
        self.show = show
        self.messages: list[dict] = []
        if system:
            self.messages.append(self._message("system", system))

    def takes_questions(self) -> bool:
        """Whether the template writes anything behind a question, unlike the plain one."""
        return not self._text([self._message("user", "?")]).rstrip().endswith("?")

    def describe(self) -> str:
        """Return the caption of a model that was trained on captions alone."""
        self.messages = []
        return self.ask("")

    def ask(self, question: str) -> str:
        """Return the answer, which the next questions see.

        Raises UserError for a question that the model cannot take.
        """
        import torch
        from transformers import BatchFeature

        if IMAGE_MARK in question:
            raise UserError(
                f"{IMAGE_MARK} in the question: the pictures already come before it. Leave it out"
            )
        images = len(self.images)
        if any(message["role"] == "user" for message in self.messages):
            images = 0
        self.messages.append(self._message("user", question, images))
        text = self._text(self.messages)
        with foreign_files(self.folder):
            if self.sees:
                inputs = self.processor(images=[self.images], text=text, return_tensors="pt")
            else:
                inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
                names = ("input_ids", "attention_mask")
                inputs = BatchFeature({name: inputs[name] for name in names})
            ids = inputs["input_ids"]
            length = ids.shape[1]
            rows = self.model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= rows:
            raise UserError(
                f"the tokenizer has tokens beyond the model's {rows:,}, so it belongs "
                "to another model"
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and length + self.limit > longest:
            raise UserError(
                f"the conversation has {length:,} tokens and an answer may have {self.limit:,}, "
                f"but the model takes {longest:,} together. Start over, use fewer pictures, or "
                "lower max_new_tokens (--max-new-tokens)"
            )
        try:
            with foreign_files(self.folder), torch.inference_mode():
                output = self.model.generate(
                    **inputs.to(self.model.device, dtype=self.model.dtype),
                    streamer=self.show and _streamer(self.tokenizer, self.show),
                    max_new_tokens=self.limit,
                    do_sample=False,
                    num_beams=1,
                )[0, length:]
        except UserError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise UserError(
                    "the GPU has no memory left for this conversation. Make it shorter"
                ) from None
            if isinstance(error.__cause__, OSError):  # of `show`, whose reader has left
                raise error.__cause__ from None
            raise
        ends = self.model.generation_config.eos_token_id
        if not isinstance(ends, list):
            ends = [ends]
        if len(output) == self.limit and int(output[-1]) not in ends:
            _log.info(
                f"(cut after {self.limit} tokens; set another limit with max_new_tokens, or "
                "--max-new-tokens)"
            )
        answer = self.tokenizer.decode(output, skip_special_tokens=True).strip()
        self.messages.append(self._message("assistant", answer))
        return answer

    def _message(self, role: str, text: str, images: int = 0) -> dict[str, Any]:
        if not self.sees:
            return {"role": role, "content": text}
        parts = [{"type": "image"}] * images
        if text:
            parts.append({"type": "text", "text": text})
        return {"role": role, "content": parts}

    def _text(self, messages: list[dict]) -> str:
        from mmtrain.data.samples.chat import JinjaTemplate, TemplateError

        values = {"add_generation_prompt": True, "tools": None, "documents": None}
        values = self.tokenizer.special_tokens_map | values
        try:
            return JinjaTemplate(self.processor.chat_template).render(messages, values)
        except TemplateError as error:
            why = escape(str(error))
            why = f"the model's chat template does not accept this conversation ({why})"
            if messages[0]["role"] == "system":
                why += "; leave out the system turn (--system)"
            raise UserError(why) from error


def resized(image: Image, settings: Any) -> Image:
    """Resize a picture as training did with Pillow, where the class has torchvision alone."""
    if hasattr(settings, "min_image_tokens"):  # Lfm2Vl's
        factor, patch_size = settings.downsample_factor, settings.encoder_patch_size
        most = settings.max_image_tokens
        size = settings.smart_resize(
            image.height, image.width, factor, settings.min_image_tokens, most, patch_size
        )
        if math.prod(size) > (factor * patch_size) ** 2 * most:
            raise UserError(
                f"a picture of {image.width} x {image.height} pixels is too long and thin for this "
                "model"
            )
    elif getattr(settings, "vision_input_type", "thumb+tile") == "thumb+tile":
        return image
    else:
        size = (settings.tile_size, settings.tile_size)
    if resize_of(vars(settings)) == "torchvision":
        return image
    return image.resize(size, settings.resample)


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Words(TextStreamer):
        begun = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            # many tokenizers begin a word with the space before it
            if not self.begun:
                text = text.lstrip()
            self.begun = self.begun or bool(text)
            if stream_end:
                text += "\n"
            show(text)

    return Words(tokenizer, skip_prompt=True, skip_special_tokens=True)


def read_image(image: str | Path | Image) -> Image:
    """Return a picture, a file's or an opened one, as in training. Raises UserError."""
    from mmtrain.data.stream.images import decode_image, upright

    try:
        if isinstance(image, str | Path):
            return decode_image(Path(image).expanduser().read_bytes())
        return upright(image)
    except OSError as error:
        raise UserError(f"{image}: {error.strerror}") from None
    except BadSample as error:
        raise UserError(f"{image}: {error.detail}") from None
