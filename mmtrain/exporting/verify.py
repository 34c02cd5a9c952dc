"""Does the exported folder compute what mmtrain computes, and does it answer a batch as it answers one prompt?

documents --mmtrain: the whole model as one stage, trained tensors loaded--> logits at supervised positions
          --the folder's stock class, from_pretrained(folder)---------------> the same logits, within BOUND
three prompts of different lengths --generate--> tokens and logits, one prompt at a time
                                   --the same, in one padded batch--> the same logits, within BOUND
                                   --pipeline(batch_size=3)--> that batch's tokens, where it can: it takes no pictures
                                                               of different numbers of tiles together

Both sides compute in fp32, from weights that were rounded to the export's dtype: what rounding itself changes does not
hide a tensor in the wrong place. A batch rounds its sums in another order, so that two tokens may change places whose
logits are as near as BOUND: what follows such a tie is not compared. Price: the whole model in fp32 memory, one side
after the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, BatchFeature, PreTrainedModel, ProcessorMixin, pipeline

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.stream.catalog import Reader
from mmtrain.data.stream.images import decode_image
from mmtrain.data.stream.packs import Pack, PackedBatch, Processor, make_batch
from mmtrain.demo.data import make_demo_data
from mmtrain.exporting.hf import ExportedModel
from mmtrain.exporting.projector_file import run_tensors
from mmtrain.models.facts.shapes import llm_shape
from mmtrain.models.modules.language import quiet
from mmtrain.models.modules.lora import merge_adapters
from mmtrain.models.modules.stage import Stage, build_stage
from mmtrain.plan.plan import StagePlan
from mmtrain.stock.stock_class import ExportedClass
from mmtrain.training.held_out import evaluated_samples

BOUND = 1e-4  # of a logit, or of the largest logit where that is above 1
PROMPTS = 3
NEW_TOKENS = 12


@dataclass(frozen=True)
class Comparison:
    """The exported model's logits beside mmtrain's."""

    samples: tuple[Sample, ...]
    tokens: int  # positions compared: those that predict an answer's tokens
    difference: float  # the largest of all logits
    largest: float  # logit, in magnitude
    agreeing: int  # positions of which both say the same token
    loss_of_new_rows: float  # what rows that the head gained add to the mean loss, nats a token

    @property
    def passed(self) -> bool:
        """Whether no logit differs by more than rounding."""
        return self.difference <= BOUND * max(1.0, self.largest)


def compare_logits(
    checkpoint: StepFolder, folder: Path, exported: ExportedModel, dtype: torch.dtype, count: int
) -> tuple[Comparison, PreTrainedModel]:
    """Logits on the first `count` held-out samples of the run (of its training data, if it holds out none).

    Returns them beside mmtrain's own, and the stock model in float32. Raises UserError for data that are not here, and
    for a folder that does not load without a remark.
    """
    samples, batches = zip(*read_samples(checkpoint.config, count), strict=True)
    stage = whole_model(checkpoint)
    stock = exported.stock
    merged = stage if exported.adapters is None else stage.front
    if dtype != torch.float32 and merged is not None:  # what is rounded are merged weights
        merge_adapters(merged)
    expected = _own_logits(stage, batches, dtype, _own_names(stock, exported.kept_in_float32))
    del stage  # memory for one of the two is enough
    model = _stock_model(stock, folder)
    if exported.adapters is not None:
        from mmtrain.exporting.peft_folder import load_adapters  # peft takes a second

        load_adapters(model, exported.adapters)
    difference = largest = new_rows = 0.0
    tokens = agreeing = 0
    for batch, own in zip(batches, expected, strict=True):
        ids, pixels = batch.input_ids, {}
        if batch.tiles is not None:
            ids = ids.masked_fill(ids == IMAGE_POSITION, model.config.image_token_id)
            pixels = stock.inputs(batch.tiles, batch.tilings)
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids), **pixels).logits
        found = found[batch.labels != IGNORE]
        agreeing += int((found.argmax(-1) == own.argmax(-1)).sum())
        tokens += len(found)
        all_rows, found = found.double(), found[:, : own.shape[1]]
        new_rows += float((all_rows.logsumexp(-1) - found.double().logsumexp(-1)).sum())
        differences = (found - own).abs()
        difference = max(difference, float(differences.nan_to_num(nan=math.inf).max()))
        largest = max(largest, float(own.abs().max()))
    return Comparison(samples, tokens, difference, largest, agreeing, new_rows / tokens), model


def _stock_model(stock: ExportedClass, folder: Path) -> PreTrainedModel:
    with quiet():
        model, report = stock.model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=None, local_files_only=True, output_loading_info=True
        )
    if faults := {kind: sorted(map(str, entries))[:3] for kind, entries in report.items() if entries}:
        raise UserError(f"{stock.class_name} loads the exported folder with remarks: {faults}")
    return model.eval()


def read_samples(config: RunConfig, count: int) -> list[tuple[Sample, PackedBatch]]:
    """The first `count` samples that evaluation would read, and each as a batch; damaged ones are passed over."""
    make_demo_data(config)
    processor = Processor(config)
    catalog, numbers = evaluated_samples(config)
    reader = Reader(catalog, config.data.io_retry_seconds)
    samples: list[tuple[Sample, PackedBatch]] = []
    for number in numbers:
        if len(samples) == count:
            break
        found = catalog.faults.get(number) or processor.read(reader, number)
        if isinstance(found, Document) and any(label != IGNORE for label in found.labels):
            length = len(found.input_ids)
            batch = make_batch([Pack((found,))], length, processor.padding_id, processor.decode)
            if batch.samples:
                samples.append((found.sample, processor.normalised(batch)))
    reader.close()
    if not samples:
        raise UserError("--verify: the run's data have no sample with an answer to compare on")
    return samples


def whole_model(checkpoint: StepFolder) -> Stage:
    """mmtrain's own model in fp32, all of it as one stage, with the checkpoint's tensors."""
    in_fp32 = {"model.llm.dtype": "float32", "model.vision.dtype": "float32"}
    config = checkpoint.config.changed({**in_fp32, "model.projector.init_from": None})  # `run_tensors` has all of it
    layers = len(llm_shape(config.model.llm.path).decoder)
    stage = build_stage(config, StagePlan(0, 0, layers, front=True, head=True))
    parameters = dict(stage.global_parameters())
    for name, source in run_tensors(checkpoint).items():
        parameters[name].data.copy_(source.read())
    return stage


def batch_fault(folder: Path, model: PreTrainedModel, samples: Sequence[Sample], plain: bool) -> str | None:
    """What differs between answers in a batch and one at a time, as the end of a sentence; None if nothing does.

    The prompts are questions of `samples` (a grey picture for those without one), made longer in turn.
    model: that of `folder`, in float32. plain: whether prompts are images and the beginning of a caption.
    """
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    asked = [_messages(samples[number % len(samples)], plain, 2 * number) for number in range(PROMPTS)]
    if len({_inputs(processor, [messages])["input_ids"].shape[1] for messages in asked}) < PROMPTS:
        asked = [_messages(samples[0], plain, 2 * number) for number in range(PROMPTS)]
    prompts = [_inputs(processor, [messages]) for messages in asked]
    alone = [_answers(model, prompt)[0] for prompt in prompts]
    inputs = _inputs(processor, asked)
    together = _answers(model, inputs)
    for (wanted, wanted_logits), (given, given_logits) in zip(alone, together, strict=True):
        agreed = next((t for t, pair in enumerate(zip(wanted, given, strict=False)) if pair[0] != pair[1]), len(wanted))
        seen = slice(0, agreed + 1)  # the logits of the first token that differs were made from the same tokens
        difference = float((wanted_logits[seen] - given_logits[seen]).abs().max().nan_to_num(nan=torch.inf))
        if difference > BOUND * max(1.0, float(wanted_logits[seen].abs().max())):
            said = [processor.decode(tokens, skip_special_tokens=True) for tokens in (given, wanted)]
            return (
                f"a batch of {PROMPTS} prompts is answered {said[0]!r} where one alone is answered {said[1]!r} (logits "
                f"differ by {difference:.1e})"
            )
    if len({prompt["pixel_values"].shape[1:] for prompt in prompts}) > 1:
        return None
    with quiet():
        ask = pipeline("image-text-to-text", model=model, processor=processor)
        rows = ask(text=asked, batch_size=PROMPTS, max_new_tokens=NEW_TOKENS, return_tensors=True)
    prompt = inputs["input_ids"].shape[1]
    for (wanted, _), (row,) in zip(together, rows, strict=True):
        given = _until_end(row["generated_token_ids"][prompt:].tolist(), model)
        if given != wanted:
            said = [processor.decode(tokens, skip_special_tokens=True) for tokens in (given, wanted)]
            return f"pipeline(batch_size={PROMPTS}) answers {said[0]!r} where the model answers {said[1]!r}"
    return None


def _own_names(stock: ExportedClass, exported: Iterable[str]) -> set[str]:
    """Names of the LLM's decoder layers in a folder as global names."""
    return {name.replace(stock.decoder_names, "llm.", 1) for name in exported}


def _own_logits(
    stage: Stage, batches: Iterable[PackedBatch], dtype: torch.dtype, exact: Collection[str]
) -> list[torch.Tensor]:
    """mmtrain's logits (S, V) at the S supervised positions of each batch, with weights rounded to `dtype`."""
    for name, parameter in stage.global_parameters():
        for part in parameter.data.view(-1).split(1 << 24):  # no second copy of a large matrix
            part.copy_(part if name in exact else part.to(dtype))
    logits = []
    with torch.no_grad():
        for batch in batches:
            hidden = stage(stage.start(batch), batch.position_ids)
            logits.append(stage.language.logits(hidden[batch.labels != IGNORE]))
    return logits


def _messages(sample: Sample, plain: bool, words: int) -> list[dict[str, Any]]:
    """A sample's first question with its pictures, and some words more."""
    question = next(text for speaker, text in sample.turns if speaker == "human")
    pictures = [decode_image(content) for content in sample.images]
    pictures = pictures[: max(1, question.count(IMAGE_MARK))] or [Image.new("RGB", (64, 64), (128, 128, 128))]
    text = " ".join(["" if plain else question.replace(IMAGE_MARK, "").strip(), *["a"] * words]).strip()
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}]


def _inputs(processor: ProcessorMixin, asked: Sequence[list[dict[str, Any]]]) -> BatchFeature:
    return processor.apply_chat_template(
        list(asked),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )


def _answers(model: PreTrainedModel, inputs: BatchFeature) -> list[tuple[list[int], torch.Tensor]]:
    """New tokens up to the end mark, and the logits (T, V) from which each was taken, of every prompt."""
    with quiet():
        made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True)
    logits = torch.stack(made.logits, dim=1).float()
    rows = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    tokens = [_until_end(row, model) for row in rows]
    return [(found, row[: len(found)]) for found, row in zip(tokens, logits, strict=True)]


def _until_end(tokens: list[int], model: PreTrainedModel) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    last = next((t for t, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]
