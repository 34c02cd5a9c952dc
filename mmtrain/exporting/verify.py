"""Compare the logits of an exported folder with mmtrain's, and answers in batches with single ones.

documents
    --mmtrain: the whole model as one stage, trained tensors loaded-->
        logits at supervised positions
    --the folder's stock class, from_pretrained(folder)-->
        the same logits, within BOUND
three prompts of different lengths
    --generate, one at a time--> tokens and logits
    --generate, one padded batch--> the same logits, within BOUND

Both sides compute in fp32, from weights that were rounded to the export's dtype, so that rounding
does not hide a tensor in the wrong place. A batch adds in another order, which may swap two tokens
whose logits are nearly equal: what follows such a tie is not compared. Cost: the whole model in
fp32 memory, one side after the other.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, BatchFeature, PreTrainedModel, ProcessorMixin

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.stream.catalog import Reader
from mmtrain.data.stream.images import decode_image
from mmtrain.data.stream.loader import evaluated_samples
from mmtrain.data.stream.packs import Pack, PackedBatch, Processor, make_batch
from mmtrain.demo.data import make_demo_data
from mmtrain.exporting.hf import ExportedModel
from mmtrain.exporting.projector_file import run_tensors
from mmtrain.facts.families import canonical_name, parts_on_disk
from mmtrain.facts.shapes import llm_shape
from mmtrain.model.llm.language import quiet
from mmtrain.model.stage import Stage, build_stage
from mmtrain.model.trained.lora import merge_adapters
from mmtrain.model.weights.published import dequantising
from mmtrain.plan.plan import StagePlan
from mmtrain.stock.stock_class import ExportedClass

BOUND = 1e-4  # of a logit, or of the largest logit where that is above 1
PROMPTS = 3
NEW_TOKENS = 12


@dataclass(frozen=True)
class Comparison:
    samples: tuple[Sample, ...]
    tokens: int  # positions compared: those that predict an answer's tokens
    difference: float  # the largest of all logits
    largest: float  # logit, in magnitude
    agreeing: int  # positions at which both find the same token likeliest

    @property
    def passed(self) -> bool:
        """Whether no logit differs by more than rounding."""
        return self.difference <= BOUND * max(1.0, self.largest)


def compare_logits(
    checkpoint: StepFolder,
    exported: ExportedModel,
    dtype: torch.dtype,
    count: int,
) -> tuple[Comparison, PreTrainedModel]:
    """Compare logits on the first `count` held-out samples, or on training data without any.

    Returns the comparison and the stock model in float32. Raises UserError for data that are not
    here, and for a folder that does not load without a remark.
    """
    samples, batches = zip(*read_samples(checkpoint.config, count), strict=True)
    stage = whole_model(checkpoint)
    stock = exported.stock
    merged = stage
    if exported.adapters is not None:
        merged = stage.vision
    if dtype != torch.float32 and merged is not None:  # what is rounded are merged weights
        merge_adapters(merged)
    names = [name.replace(stock.decoder_names, "model.", 1) for name in exported.exact]
    parts = parts_on_disk(checkpoint.models.published_llm.model_type, names)
    exact = set(map(canonical_name, parts))
    expected = _own_logits(stage, batches, dtype, exact)
    del stage  # memory for one of the two is enough

    model = _stock_model(stock, exported.folder)
    if exported.adapters is not None:
        from mmtrain.exporting.peft_folder import load_adapters  # peft takes a second

        load_adapters(model, exported.adapters)
    difference = largest = 0.0
    tokens = agreeing = 0
    for batch, own in zip(batches, expected, strict=True):
        ids = batch.input_ids
        pixels = {}
        if batch.tiles is not None:
            is_image = ids == IMAGE_POSITION
            ids = ids.masked_fill(is_image, model.config.image_token_id)
            pixels = stock.inputs(batch.tiles, batch.tilings, checkpoint.models.layout)
            if stock.mrope:
                pixels["mm_token_type_ids"] = is_image.long()
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                **pixels,
            ).logits[batch.labels != IGNORE]
        agreeing += int((logits.argmax(-1) == own.argmax(-1)).sum())
        tokens += len(logits)
        differences = (logits[:, : own.shape[1]] - own).abs()  # the head may have gained rows
        difference = max(difference, float(differences.nan_to_num(nan=math.inf).max()))
        largest = max(largest, float(own.abs().max()))
    return Comparison(samples, tokens, difference, largest, agreeing), model


def _stock_model(stock: ExportedClass, folder: Path) -> PreTrainedModel:
    with quiet():
        model, report = stock.model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=None,
            local_files_only=True,
            output_loading_info=True,
            **dequantising(folder),
        )
    faults = {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}
    if faults:
        raise UserError(f"{stock.class_name} loads the exported folder with warnings: {faults}")
    # beside FP8, transformers leaves weights in their files' type
    return model.float().eval()


def read_samples(config: RunConfig, count: int) -> list[tuple[Sample, PackedBatch]]:
    """Return the first `count` undamaged samples of an evaluation, each also as a batch."""
    make_demo_data(config)
    processor = Processor(config)
    catalog, numbers = evaluated_samples(config)
    reader = Reader(catalog, config.data.io_retry_seconds)
    samples = []
    for number in numbers:
        if len(samples) == count:
            break
        document = catalog.fault(number) or processor.read(reader, number)
        if isinstance(document, Document) and any(label != IGNORE for label in document.labels):
            batch = make_batch(
                [Pack((document,))],
                len(document.input_ids),
                processor.decode,
                has_grid=processor.layout.has_grid_positions,
            )
            if batch.samples:
                samples.append((document.sample, processor.normalised(batch)))
    reader.close()
    if not samples:
        raise UserError("--verify: the run's data have no sample with an answer to compare")
    return samples


def whole_model(checkpoint: StepFolder) -> Stage:
    """Build mmtrain's own model in fp32 as one stage, with the checkpoint's tensors."""
    config = checkpoint.config.changed(
        {
            "model.llm.dtype": "float32",
            "model.vision.dtype": "float32",
            "model.projector.init_from": None,  # `run_tensors` has all of it
        }
    )
    layers = len(llm_shape(config.model.llm.path).decoder)
    stage = build_stage(config, StagePlan(0, 0, layers, front=True, head=True))
    parameters = dict(stage.global_parameters())
    for name, source in run_tensors(checkpoint).items():
        parameters[name].data.copy_(source.read())
    return stage


def batch_fault(
    folder: Path,
    model: PreTrainedModel,
    samples: Sequence[Sample],
    plain: bool,
) -> str | None:
    """Describe a difference between answers in a batch and one at a time; None if there is none.

    The prompts are questions of `samples` (a grey picture for those without one), made longer in
    turn. `model` is that of `folder`, in float32. plain: prompts are images and the beginning of a
    caption.
    """
    processor = AutoProcessor.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
    )
    # else batches are padded on the right
    if "padding_side" not in processor.tokenizer.init_kwargs:
        processor.tokenizer.padding_side = "left"
    chosen = itertools.islice(itertools.cycle(samples), PROMPTS)
    asked = [_messages(sample, plain, 2 * number) for number, sample in enumerate(chosen)]
    inputs = [_inputs(processor, [messages]) for messages in asked]
    if len({one["input_ids"].shape[1] for one in inputs}) < PROMPTS:
        asked = [_messages(samples[0], plain, 2 * number) for number in range(PROMPTS)]
        inputs = [_inputs(processor, [messages]) for messages in asked]
    alone = [_answers(model, one)[0] for one in inputs]
    together = _answers(model, _inputs(processor, asked))
    for (wanted, wanted_logits), (given, given_logits) in zip(alone, together, strict=True):
        differ = [one != other for one, other in zip(wanted, given, strict=False)]
        # the logits of the first token that differs were made from the same tokens
        seen = slice(0, [*differ, True].index(True) + 1)
        differences = (wanted_logits[seen] - given_logits[seen]).abs()
        difference = float(differences.max().nan_to_num(nan=torch.inf))
        if difference > BOUND * max(1.0, float(wanted_logits[seen].abs().max())):
            texts = processor.batch_decode([given, wanted], skip_special_tokens=True)
            return (
                f"a batch of {PROMPTS} prompts is answered {texts[0]!r}, but one alone "
                f"{texts[1]!r} (logits differ by {difference:.1e})"
            )
    return None


def _own_logits(
    stage: Stage,
    batches: Iterable[PackedBatch],
    dtype: torch.dtype,
    exact: Collection[str],
) -> list[torch.Tensor]:
    """Return mmtrain's logits (S, V) at the S supervised positions of each batch.

    Weights are rounded to `dtype`, but the `exact` ones.
    """
    for name, parameter in stage.global_parameters():
        for part in parameter.data.view(-1).split(1 << 24):  # no second copy of a large matrix
            if name not in exact:
                part.copy_(part.to(dtype))
    logits = []
    with torch.no_grad():
        for batch in batches:
            hidden = stage(stage.start(batch), batch.positions)
            logits.append(stage.language.logits(hidden[batch.labels != IGNORE]))
    return logits


def _messages(
    sample: Sample,
    plain: bool,
    words: int,
) -> list[dict[str, Any]]:
    """Return a sample's first question with its pictures, and some words more."""
    question = next(text for speaker, text in sample.turns if speaker == "human")
    pictures = list(map(decode_image, sample.images))[: max(1, question.count(IMAGE_MARK))]
    if not pictures:
        pictures = [Image.new("RGB", (64, 64), (128, 128, 128))]
    content = [{"type": "image", "image": picture} for picture in pictures]
    text = " a" * words
    if not plain:
        text = question.replace(IMAGE_MARK, "").strip() + text
    if text.strip():
        content.append({"type": "text", "text": text.strip()})
    return [{"role": "user", "content": content}]


def _inputs(processor: ProcessorMixin, asked: Sequence[list[dict[str, Any]]]) -> BatchFeature:
    return processor.apply_chat_template(
        asked,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )


def _answers(model: PreTrainedModel, inputs: BatchFeature) -> list[tuple[list[int], torch.Tensor]]:
    """Return the new tokens of every prompt up to the end mark, and their logits (T, V)."""
    with quiet():
        made = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(made.logits, dim=1).float()
    rows = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ends = np.atleast_1d(model.generation_config.eos_token_id)
    answers = []
    for row, of_row in zip(rows, logits, strict=True):
        length = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
        answers.append((row[:length], of_row[:length]))
    return answers
