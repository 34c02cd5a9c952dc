"""Ask a trained model about a picture, from the terminal; the answer appears word by word.

MODEL is a run of mmtrain or one of its checkpoints, or a Hugging Face LLaVA folder, such as
mmtrain export --format hf makes. Stock transformers answers in any case: a run is exported first, once for
each checkpoint, into the cache, which takes the disk space of the whole model.

Without --prompt on a terminal you can ask one question after the other; each sees those before it. Answers are greedy:
the same question gets the same answer. A model that was trained with data.template=plain has learnt to caption, not to
be asked: it says what it sees. The answer goes to standard output, all else to standard error. A GPU is used if there
is one (CUDA_VISIBLE_DEVICES= for none).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmtrain
from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held
from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless, note, run_command, show_words
from mmtrain.base.progress import ByteProgress
from mmtrain.base.small_files import shortened
from mmtrain.checkpoint.step_folder import CHECKPOINTS, MANIFEST, NAME, StepFolder, find
from mmtrain.commands.parser import command_parser, positive
from mmtrain.data.samples.records import IMAGE_MARK, Rejected
from mmtrain.pretrained.model_files import Shape, find_model_folder, foreign_files, read_json, tensor_shapes
from mmtrain.pretrained.model_numbers import check_llm_numbers, is_whole
from mmtrain.pretrained.vision_files import hf_facts

if TYPE_CHECKING:
    from PIL import Image

EXAMPLES = """\
examples:
  ask the demo's model about one of the pictures that its run held out (it knows no other kind):
    tar -xf "$(ls "${XDG_CACHE_HOME:-$HOME/.cache}"/mmtrain/demo/held-out-*/*.tar | head -1)" held-out-000000.png
    mmtrain chat --model runs/llava_pp4 --image held-out-000000.png
  one question, one answer, for scripts:
    mmtrain chat --model runs/mine --image photo.jpg --prompt "What is the dog doing?" > answer.txt
  two pictures, an earlier checkpoint, a longer answer:
    mmtrain chat --model runs/mine/checkpoints/step-00000500 --image before.jpg --image after.jpg \\
        --prompt "What has changed?" --max-new-tokens 500
  a LLaVA from elsewhere, downloaded before with hf download:
    mmtrain chat --model llava-hf/llava-1.5-7b-hf --image photo.jpg --system "Answer in one word."

exit codes:
  0    answered
  2    wrong input; the message says what to do
  130  stopped by Ctrl-C
"""
DEFAULT_PROMPTS = ("Describe the image.", "Describe the images.")
SHARD_BYTES = 5 * 10**9
SHOWN_BYTES = 10**8  # less is exported in a moment
LARGEST_TOKEN = 10**9
LONGEST_SIDE = 4_096  # pixels of a picture for the encoder; the largest take 1,540
NEEDED = "needed is a run or checkpoint of mmtrain, or a Hugging Face LLaVA folder (mmtrain export makes one)"


# ---- the model


def llava_folder(model: str) -> Path:
    """The Hugging Face LLaVA folder of what --model names, exported now if need be; raises UserError."""
    folder = find_model_folder(model)
    if folder is None:
        raise UserError(f"--model {model}: no such folder, and no hub id in the local cache; {NEEDED}")
    if (folder / CHECKPOINTS).is_dir() or (folder / MANIFEST).exists() or NAME.fullmatch(folder.name):
        return exported(find(folder, note))
    config = folder / "config.json"
    family = read_json(config).get("model_type") if config.is_file() else None
    if family != "llava":
        seen = "no config.json" if family is None else f"model_type {harmless(str(family))}"
        raise UserError(f"--model {model}: has {seen}; {NEEDED}")
    shapes = tensor_shapes(folder)
    if shapes is None:
        raise UserError(f"--model {model}: holds no model.safetensors; download the weights")
    check_numbers(folder, shapes)
    return folder


def check_numbers(folder: Path, shapes: dict[str, Shape]) -> None:
    """Raise UserError for sizes in a LLaVA folder's files that no model of these tensors has: they cost memory."""
    config = read_json(folder / "config.json")
    text, vision = config.get("text_config", {}), hf_facts({"vision_config": {}} | config, str(folder))
    if not isinstance(text, dict):
        raise UserError(f"{folder}: text_config in config.json is no object; download the file again")
    check_llm_numbers(text)
    largest = max((side for shape in shapes.values() for side in shape), default=0)
    for part in (text, vision):
        if (part.get("num_hidden_layers") or 0) > len(shapes):
            layers = part["num_hidden_layers"]
            raise UserError(f"{folder}: config.json says {layers} layers, but has {len(shapes)} tensors")
        for key in ("hidden_size", "intermediate_size", "vocab_size"):
            width = part.get(key)
            if type(width) is int and width > largest:
                raise UserError(f"{folder}: config.json says {key} {width}, but no tensor is wider than {largest:,}")
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            for part in (content, content.get("image_processor")):
                _check_processor(part if isinstance(part, dict) else {}, folder / name)


def _check_processor(settings: dict, file: Path) -> None:
    for key in ("size", "crop_size", "pad_size"):
        sides = settings.get(key)
        sides = list(sides.values()) if isinstance(sides, dict) else sides if isinstance(sides, list) else [sides]
        if not all(side is None or is_whole(side, 1, LONGEST_SIDE) for side in sides):
            shown = shortened(repr(settings[key]))
            raise UserError(f"{file}: {key} is {shown}; needed are pixels, at most {LONGEST_SIDE:,}")
    for key, least in (("patch_size", 1), ("num_additional_image_tokens", 0)):
        value = settings.get(key)
        sides = value.values() if isinstance(value, dict) else [value]
        if not all(side is None or is_whole(side, least, 100) for side in sides):
            raise UserError(f"{file}: {key} is {shortened(repr(value))}; needed is a whole number up to 100")


def exported(checkpoint: StepFolder) -> Path:
    """A checkpoint's LLaVA folder in the cache, which is made once; raises UserError where it cannot be exported."""
    key = hashlib.sha256(f"{checkpoint.fingerprint} {mmtrain.__version__}".encode()).hexdigest()[:20]
    folder = cache_folder("chat") / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_name(f".{folder.name}.lock"), wait=True):
        if not folder.is_dir():
            note(f"exporting {checkpoint.path} for transformers, once, into {folder}")
            try:
                _export(checkpoint, folder)
            except UserError as error:
                raise UserError(f"{checkpoint.path} cannot be exported, and so not be asked: {error}") from error
            size = sum(file.stat().st_size for file in folder.iterdir())
            note(f"{size / 1e6:,.1f} MB are in {folder} now; delete it when you have no more questions")
    return folder


def _export(checkpoint: StepFolder, folder: Path) -> None:
    from mmtrain.export.hf import export_hf
    from mmtrain.export.tensors import new_folder
    from mmtrain.model.stage import DTYPES

    with ByteProgress(note, sys.stderr) as progress, new_folder(folder) as unfinished:

        def show(what: str, done: int, total: int) -> None:
            if total >= SHOWN_BYTES:
                progress.show(what, done, total)

        export_hf(checkpoint, unfinished, DTYPES[checkpoint.config.model.llm.dtype], SHARD_BYTES, show)


def load(folder: Path) -> tuple[Any, Any]:
    """Stock model and processor of a LLaVA folder, on the GPU if there is one; raises UserError."""
    import torch
    from transformers import GenerationConfig, LlavaForConditionalGeneration, LlavaProcessor, PixtralProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Not AutoProcessor: where the files name no class, it passes trust_remote_code on to none of the processor's parts.
    pixtral = (read_json(folder / "config.json").get("vision_config") or {}).get("model_type") == "pixtral"
    with foreign_files(str(folder)):
        processor = (PixtralProcessor if pixtral else LlavaProcessor).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            backend="pil",  # as training resizes
        )
        model, report = LlavaForConditionalGeneration.from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=None,  # transformers' choice: config.json may name a kernel to be downloaded
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    if faults := {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}:
        raise UserError(f"{folder}: the weights do not fit config.json ({faults}); part of the model would be random")
    layers = model.config.vision_config.num_hidden_layers
    feature_layers = model.config.vision_feature_layer
    for layer in feature_layers if isinstance(feature_layers, list) else [feature_layers]:
        if not is_whole(layer, -layers - 1, layers):
            raise UserError(f"{folder}: config.json says vision_feature_layer {layer}, but the encoder has {layers}")
    if processor.image_token_id != model.config.image_token_id:
        raise UserError(
            f"{folder}: {IMAGE_MARK} is token {processor.image_token_id} of the tokenizer, but config.json says "
            f"{model.config.image_token_id}"
        )
    # Of generation_config.json only what ends an answer is taken: the rest chooses code of transformers, or samples.
    ends = model.generation_config.eos_token_id
    if not all(is_whole(end, 0, LARGEST_TOKEN) for end in (ends if isinstance(ends, list) else [ends or 0])):
        raise UserError(f"{folder}: generation_config.json says eos_token_id {shortened(repr(ends))}, no token")
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=processor.tokenizer.pad_token_id)
    if not isinstance(processor.chat_template, str):
        raise UserError(f"{folder}: has no chat template, so how to ask is not known; add its chat_template.jinja")
    try:
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), processor
    except torch.OutOfMemoryError:
        raise UserError(
            f"{folder}: {model.get_memory_footprint() / 2**30:.1f} GiB do not fit into the GPU's memory; set "
            "CUDA_VISIBLE_DEVICES= to use the CPU"
        ) from None


# ---- the conversation


class Conversation:
    """Questions and answers about the same pictures; the first question brings them."""

    def __init__(self, model: Any, processor: Any, images: list[Image.Image], system: str | None, limit: int) -> None:
        """`limit`: new tokens an answer may have."""
        self.model = model
        self.processor = processor
        self.images = images
        self.limit = limit
        self.messages = [_message("system", system)] if system else []

    def takes_questions(self) -> bool:
        """Whether the template writes anything around a question; the plain one, for captions, does not."""
        return self._text([_message("user", "?")]).strip() != "?"

    def ask(self, question: str) -> None:
        """Print the answer as it is generated; raises UserError for a conversation that the model cannot take."""
        import torch

        images = [] if any(message["role"] == "user" for message in self.messages) else self.images
        self.messages.append(_message("user", question, len(images)))
        text = self._text(self.messages)
        with foreign_files("the folder's processor"):
            inputs = self.processor(images=self.images, text=text, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        rows = self.model.get_input_embeddings().num_embeddings
        if int(inputs["input_ids"].max()) >= rows:
            raise UserError(f"the tokenizer has tokens beyond the model's {rows:,}; it belongs to another model")
        longest = getattr(self.model.config.text_config, "max_position_embeddings", None)
        if longest is not None and length + self.limit > longest:
            raise UserError(
                f"the conversation has {length:,} tokens, and an answer may have {self.limit:,}; the model takes "
                f"{longest:,} together: begin anew, with fewer pictures, or set --max-new-tokens"
            )
        try:
            with torch.inference_mode():
                output = self.model.generate(
                    **inputs.to(self.model.device, dtype=self.model.dtype),
                    streamer=_streamer(self.processor.tokenizer),
                    max_new_tokens=self.limit,
                    do_sample=False,
                    num_beams=1,
                )[0, length:]
        except torch.OutOfMemoryError:
            raise UserError("the GPU has no memory left for this conversation: take fewer or shorter") from None
        ends = self.model.generation_config.eos_token_id
        if len(output) == self.limit and int(output[-1]) not in (ends if isinstance(ends, list) else [ends]):
            note(f"(cut after {self.limit} tokens; --max-new-tokens sets another limit)")
        answer = self.processor.tokenizer.decode(output, skip_special_tokens=True)
        self.messages.append(_message("assistant", answer.strip()))

    def _text(self, messages: list[dict]) -> str:
        import jinja2

        from mmtrain.data.samples.bounded_jinja import BoundedTemplate

        tokenizer = self.processor.tokenizer
        try:
            template = BoundedTemplate(self.processor.chat_template)
            return template.render(
                messages, add_generation_prompt=True, tools=None, documents=None, **tokenizer.special_tokens_map
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"the model's chat template does not take this conversation ({harmless(str(error))})"
                + ("; leave out --system" if messages[0]["role"] == "system" else "")
            ) from error


def _message(role: str, text: str, images: int = 0) -> dict[str, Any]:
    parts: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    return {"role": role, "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}


def _streamer(tokenizer: Any) -> Any:
    """Prints the answer's words as soon as they are whole."""
    from transformers import TextStreamer

    class Printer(TextStreamer):
        begun = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            text = text if self.begun else text.lstrip()  # many tokenizers begin a word with the space before it
            self.begun = self.begun or bool(text)
            show_words(text + "\n" if stream_end else text)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def question_after_question(conversation: Conversation) -> None:
    """Ask until an empty line or the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line that can be edited

    note("Ask about what is in the picture. An empty line or Ctrl-D ends the conversation.")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            note("")
            return
        if not question:
            return
        conversation.ask(_without_marks(question))


# ---- the command line


def chat(options: argparse.Namespace) -> None:
    """Do what the options ask for; raises UserError."""
    images = [read_image(file) for file in options.image]
    folder = llava_folder(options.model)
    conversation = Conversation(*load(folder), images, options.system, options.max_new_tokens)
    if not conversation.takes_questions():
        if options.prompt is not None or options.system is not None:
            note("trained on captions alone (data.template=plain): it cannot be asked, and describes what it sees")
        conversation.messages = []
        conversation.ask("")
    elif options.prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        question_after_question(conversation)
    else:
        conversation.ask(_without_marks(options.prompt or DEFAULT_PROMPTS[len(images) > 1]))


def read_image(file: Path) -> Image.Image:
    """A picture, decoded as in training; raises UserError."""
    from mmtrain.data.stream.images import decode_image

    try:
        return decode_image(file.expanduser().read_bytes())
    except OSError as error:
        raise UserError(f"--image {file}: {error.strerror}") from None
    except Rejected as error:
        raise UserError(f"--image {file}: {error.detail}") from None


def _without_marks(question: str) -> str:
    if IMAGE_MARK in question:
        raise UserError(f"{IMAGE_MARK} in the question: the pictures stand before it already; leave it out")
    return question


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser("chat", __doc__, EXAMPLES)
    parser.add_argument("--model", required=True, help="a run, a checkpoint, or a Hugging Face LLaVA folder")
    parser.add_argument(
        "--image", type=Path, action="append", required=True, metavar="FILE", help="a picture; may be repeated"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="one question (default: ask at the terminal)")
    parser.add_argument("--system", metavar="TEXT", help="a system turn before it, for models that take one")
    parser.add_argument(
        "--max-new-tokens", type=positive(int), default=256, metavar="N", help="longest answer, in tokens (default 256)"
    )
    options = parser.parse_args(arguments)
    if options.prompt is not None and not options.prompt.strip():
        parser.error("--prompt: is empty; leave it out to ask at the terminal")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 and one message for what the user can mend."""
    options = parse_arguments(arguments)

    def run() -> None:
        try:
            chat(options)
        except BrokenPipeError:  # whoever read the answer has left
            pass
        except KeyboardInterrupt:
            note("")  # in the middle of a line
            raise

    return run_command(run)
