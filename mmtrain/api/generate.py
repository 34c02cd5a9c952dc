"""Answers of a trained model to questions about pictures: by stock transformers, greedy.

run or checkpoint --exported once, into the cache--> Hugging Face folder --load--> Conversation
    --ask--> text
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.api.export import export
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
from mmtrain.stock.stock_class import StockClass

if TYPE_CHECKING:
    from PIL import Image

_log = logging.getLogger(__name__)
PARTS_OF_LLMS = {"attn_config", "ffn_config"}  # parts in a config of an LLM alone
NEEDED = (
    "Name a run or checkpoint of mmtrain, or a Hugging Face folder of a model that "
    "mmtrain export makes "
    f"({', '.join(dict.fromkeys(stock.name for stock in STOCK_CLASSES))}, or a causal LM)"
)


def generate(
    model: Run | str | Path,
    image: str | Path | Image.Image | Sequence[str | Path | Image.Image] = (),
    prompt: str = "Describe the image.",
    *,
    system: str | None = None,
    max_new_tokens: int = 256,
) -> str:
    """Return a trained model's answer to a question about one picture or several; a model of text
    takes none.

    `model` is a run, a checkpoint, or a Hugging Face folder, loaded for this answer onto the GPU if
    there is one. A run is exported into the cache once. A model trained on captions alone ignores
    the question. Raises UserError.
    """
    silence_libraries()
    images = list(image) if isinstance(image, Sequence) and not isinstance(image, str) else [image]
    pictures = list(map(read_image, images))
    folder = stock_folder(str(model.folder if isinstance(model, Run) else model))
    conversation = Conversation(*load(folder), pictures, system, max_new_tokens)
    return conversation.ask(prompt) if conversation.takes_questions() else conversation.describe()


def stock_folder(model: str, show: Callable[[str, int, int], None] = lambda *_: None) -> Path:
    """Return the Hugging Face folder of `model`, exported now if need be. Raises UserError; `show`
    is export's.
    """
    folder = find_model_folder(model)
    if folder is None:
        raise UserError(f"{model}: no such folder, and no hub id in the local cache. {NEEDED}")
    if names_checkpoint(folder):
        return _exported(find(folder), show)
    config = optional_json(folder)
    family = config.get("model_type")
    if family not in [stock.model_type for stock in STOCK_CLASSES] and not _is_causal_lm(config):
        seen = "no config.json" if family is None else f"model_type {escape(family)}"
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
    """Whether a config.json is of an LLM alone. Raises UserError for a family that cannot be
    used.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(
        str(name).endswith("ForCausalLM") for name in classes
    ):
        return False
    check_family(config)
    return not any(key.endswith("_config") and key not in PARTS_OF_LLMS for key in config)


def _exported(checkpoint: StepFolder, show: Callable[[str, int, int], None]) -> Path:
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
    """Return stock model and processor, or an LLM's tokenizer, on the GPU if there is one. Raises
    UserError.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    from mmtrain.data.samples.templates import load_tokenizer
    from mmtrain.model.llm.language import causal_config

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = model_config(folder)
    if _is_causal_lm(config):
        processor = tokenizer = load_tokenizer(str(folder))
        with foreign_files(str(folder)):
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(causal_config(folder))]
    else:
        stock = stock_class(
            config["model_type"], (config.get("vision_config") or {}).get("model_type")
        )
        assert stock is not None, "`stock_folder` has refused other classes"
        _check_parts(stock, config, folder)
        with foreign_files(str(folder)):
            model_class, processor = stock.model_class, stock.load_processor(folder)
        tokenizer = processor.tokenizer
    with foreign_files(str(folder)):
        model, report = model_class.from_pretrained(
            folder,
            # transformers' choice: config.json may name one to be downloaded
            attn_implementation=None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            dtype="auto",
        )
    if faults := {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}:
        raise UserError(
            f"{folder}: the weights do not fit config.json ({faults}); "
            "part of the model would be random"
        )
    if processor is not tokenizer and processor.image_token_id != model.config.image_token_id:
        raise UserError(
            f"{folder}: {IMAGE_MARK} is token {processor.image_token_id} of the tokenizer, but "
            "config.json says "
            f"{model.config.image_token_id}"
        )
    # Of generation_config.json only what ends an answer, what is never said and whether there is a
    # cache are taken: the rest chooses code of transformers, or samples.
    own, kept = model.generation_config, ("eos_token_id", "suppress_tokens", "use_cache")
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, **{key: getattr(own, key) for key in kept}
    )
    if not isinstance(processor.chat_template, str):
        raise UserError(
            f"{folder}: has no chat template, so prompts cannot be written. "
            "Add its chat_template.jinja"
        )
    try:
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), processor
    except torch.OutOfMemoryError:
        raise UserError(
            f"{folder}: {bytes_text(model.get_memory_footprint())} do not fit into the "
            "GPU's memory. Set "
            "CUDA_VISIBLE_DEVICES= to use the CPU"
        ) from None


def _check_parts(stock: StockClass, config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for parts in config.json that no folder of the stock class has.

    transformers makes any model_type, and some of these load their own parts from a hub id, or from
    any file.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from mmtrain.model.encoder.vision import check_wrapped_timm, model_class

    families = [
        family
        for family in FAMILIES.values()
        if not stock.encoders or family.model in stock.encoders
    ]
    encoders = {
        *stock.own_encoders,
        *(model_class(family).config_class.model_type for family in families),
    }
    vision, text = (
        (config.get(part) or {}).get("model_type") for part in ("vision_config", "text_config")
    )
    if vision is not None and vision not in encoders:
        raise UserError(
            f"{folder}: config.json has a vision_config of model_type {escape(repr(vision))}; "
            f"{stock.class_name} "
            f"takes {', '.join(sorted(encoders))}"
        )
    is_causal = text is None or (
        text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text in transformers.CONFIG_MAPPING
    )
    is_own = stock.mrope and text in MROPE_MODELS
    if not (is_causal or is_own) or (
        text and transformers.CONFIG_MAPPING[text].sub_configs.keys() - PARTS_OF_LLMS
    ):
        raise UserError(
            f"{folder}: config.json has a text_config of model_type {escape(repr(text))}, which is "
            "not an LLM alone; "
            "needed is one such as llama"
        )
    if TIMM in stock.encoders:
        check_wrapped_timm(config.get("vision_config") or {}, folder)


class Conversation:
    """Questions and answers about the same pictures; the first question brings them."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        images: list[Image.Image],
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
        self.messages = [self._message("system", system)] if system else []

    def takes_questions(self) -> bool:
        """Whether the template writes anything behind a question; the plain one, for captions, does
        not.
        """
        return not self._text([self._message("user", "?")]).rstrip().endswith("?")

    def describe(self) -> str:
        """Return the caption of a model that was trained on captions alone."""
        self.messages = []
        return self.ask("")

    def ask(self, question: str) -> str:
        """Return the answer, which the next questions see. Raises UserError for what the model
        cannot take.
        """
        import torch
        from transformers import BatchFeature

        if IMAGE_MARK in question:
            raise UserError(
                f"{IMAGE_MARK} in the question: the pictures already come before it. Leave it out"
            )
        images = [] if any(message["role"] == "user" for message in self.messages) else self.images
        self.messages.append(self._message("user", question, len(images)))
        text = self._text(self.messages)
        with foreign_files(self.folder):
            if self.sees:
                inputs = self.processor(images=[self.images], text=text, return_tensors="pt")
            else:
                inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
                inputs = BatchFeature(
                    {name: inputs[name] for name in ("input_ids", "attention_mask")}
                )
            length, largest = inputs["input_ids"].shape[1], int(inputs["input_ids"].max())
            rows = self.model.get_input_embeddings().num_embeddings
        if largest >= rows:
            raise UserError(
                f"the tokenizer has tokens beyond the model's {rows:,}, so it belongs "
                "to another model"
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and length + self.limit > longest:
            raise UserError(
                f"the conversation has {length:,} tokens and an answer may have {self.limit:,}, "
                "but the model takes "
                f"{longest:,} together. Start over, use fewer pictures, or lower max_new_tokens "
                "(--max-new-tokens)"
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
        if len(output) == self.limit and int(output[-1]) not in (
            ends if isinstance(ends, list) else [ends]
        ):
            _log.info(
                f"(cut after {self.limit} tokens; set another limit with max_new_tokens, or "
                "--max-new-tokens)"
            )
        answer = self.tokenizer.decode(output, skip_special_tokens=True).strip()
        self.messages.append(self._message("assistant", answer))
        return answer

    def _message(self, role: str, text: str, images: int = 0) -> dict[str, Any]:
        parts: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
        parts += [{"type": "text", "text": text}] if text else []
        return {"role": role, "content": parts if self.sees else text}

    def _text(self, messages: list[dict]) -> str:
        from mmtrain.data.samples.chat import JinjaTemplate, TemplateError

        tokenizer = self.tokenizer
        try:
            template = JinjaTemplate(self.processor.chat_template)
            own = {"add_generation_prompt": True, "tools": None, "documents": None}
            return template.render(messages, {**tokenizer.special_tokens_map, **own})
        except TemplateError as error:
            raise UserError(
                "the model's chat template does not accept this conversation "
                f"({escape(str(error))})"
                + (
                    "; leave out the system turn (--system)"
                    if messages[0]["role"] == "system"
                    else ""
                )
            ) from error


def resized(image: Image.Image, settings: Any) -> Image.Image:
    """Resize a picture as training does, for classes whose processors do so with torchvision
    alone.
    """
    if hasattr(settings, "min_image_tokens"):  # Lfm2Vl's
        bounds = settings.min_image_tokens, settings.max_image_tokens, settings.encoder_patch_size
        width, height = size = settings.smart_resize(
            image.height, image.width, settings.downsample_factor, *bounds
        )
        if (
            width * height
            > (settings.downsample_factor * settings.encoder_patch_size) ** 2 * bounds[1]
        ):
            raise UserError(
                f"a picture of {image.width} x {image.height} pixels is too long and "
                "thin for this model"
            )
        return image.resize(size, settings.resample)
    if getattr(settings, "vision_input_type", "thumb+tile") == "thumb+tile":
        return image
    return image.resize((settings.tile_size, settings.tile_size), settings.resample)


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Words(TextStreamer):
        begun = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            # many tokenizers begin a word with the space before it
            text = text if self.begun else text.lstrip()
            self.begun = self.begun or bool(text)
            show(text + "\n" if stream_end else text)

    return Words(tokenizer, skip_prompt=True, skip_special_tokens=True)


def read_image(image: str | Path | Image.Image) -> Image.Image:
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
