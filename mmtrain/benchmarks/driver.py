"""Runs in lmms-eval's environment: `python -m mmtrain.benchmarks.driver REQUEST`, a JSON file that `benchmark` writes.

lmms-eval's tasks --messages with pictures--> StockModel, an exported folder --answers--> lmms-eval's scores
standard output: lines of JSON, {"done", "total"} while it runs, then {"results", "answers", "versions"} or {"error"}

lmms-eval has classes of its own for some of the models that mmtrain exports, which resize pictures otherwise than
training did, or take one prompt at a time. Here each is its stock class, loaded as `mmtrain chat` does.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.tasks import TaskManager
from PIL import Image

from mmtrain.api.generate import load, resized
from mmtrain.base.errors import UserError
from mmtrain.benchmarks.held_out import HELD_OUT, QUESTIONS
from mmtrain.data.stream.images import decode_image, upright

NEW_TOKENS = 256  # where a task names no number
VERSIONS = ("lmms_eval", "transformers", "torch")


class StockModel(lmms):
    is_simple = False  # it takes messages, not one text with its pictures

    def __init__(self, folder: Path, batch_size: int, tell: Callable[[dict], None]) -> None:
        super().__init__()
        self.model, self.processor = load(folder)
        self.processor.tokenizer.padding_side = "left"
        self.batch_size, self.tell = batch_size, tell

    def generate_until(self, requests: list[Instance]) -> list[str]:
        answers: list[str] = []
        while len(answers) < len(requests):
            batch = self._next_batch(requests[len(answers) :])
            answers += self._answers(batch)
            self.tell({"done": len(answers), "total": len(requests)})
        return answers

    def _next_batch(self, requests: Sequence[Instance]) -> list[tuple[list[dict], list[Image.Image], dict]]:
        """Return the first prompts that can share a batch: the same settings, and all or none of them with pictures."""
        batch: list[tuple[list[dict], list[Image.Image], dict]] = []
        for request in requests[: self.batch_size]:
            _, doc_to_messages, settings, number, task, split = request.args
            messages, pictures = _split(doc_to_messages(self.task_dict[task][split][number]))
            if batch and (settings != batch[0][2] or bool(pictures) != bool(batch[0][1])):
                break
            batch.append((messages, pictures, settings))
        return batch

    def _answers(self, batch: Sequence[tuple[list[dict], list[Image.Image], dict]]) -> list[str]:
        settings = batch[0][2]
        template = self.processor.apply_chat_template
        texts = [template(messages, add_generation_prompt=True, tokenize=False) for messages, _, _ in batch]
        pictures = [[resized(picture, self.processor.image_processor) for picture in of_one] for _, of_one, _ in batch]
        given = {"images": pictures} if pictures[0] else {}
        inputs = self.processor(text=texts, padding=True, return_tensors="pt", **given)
        sampled = {"do_sample": False}
        if settings.get("temperature"):
            sampled = {"do_sample": True, "temperature": settings["temperature"], "top_p": settings.get("top_p")}
        with torch.inference_mode():
            output = self.model.generate(
                **inputs.to(self.model.device, dtype=self.model.dtype),
                max_new_tokens=settings.get("max_new_tokens", NEW_TOKENS),
                num_beams=settings.get("num_beams", 1),
                **sampled,
            )
        length = inputs["input_ids"].shape[1]
        answers = self.processor.tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        stops = settings.get("until") or []
        return [_before([stops] if isinstance(stops, str) else stops, answer).strip() for answer in answers]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UserError("a task that compares the likelihoods of given answers: choose one that generates them")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise UserError("a task of several rounds: choose one that asks each question once")


def _split(messages: list[dict]) -> tuple[list[dict], list[Image.Image]]:
    """Return messages without their pictures, as chat templates take them, and the pictures."""
    pictures: list[Image.Image] = []
    written = []
    for message in messages:
        parts = message["content"]
        if not isinstance(parts, str):
            if media := [part["type"] for part in parts if part["type"] not in ("text", "image")]:
                raise UserError(f"a task with {media[0]}: these models take texts and images")
            pictures += [part["url"] for part in parts if part["type"] == "image"]
            parts = [{name: value for name, value in part.items() if name != "url"} for part in parts]
        written.append({"role": message["role"], "content": parts})
        pictures += message.get("pictures", [])
    return written, [upright(picture) for picture in pictures]


def _before(stops: Sequence[str], answer: str) -> str:
    return min((answer.split(stop)[0] for stop in stops if stop), key=len, default=answer)


def held_out_task(folder: Path, longest: int) -> ConfigurableMessagesTask:
    """Return the task of the questions in `folder`."""

    def doc_to_messages(doc: Mapping[str, Any]) -> list[dict]:
        pictures = [decode_image((folder / name).read_bytes()) for name in doc["images"]]
        return [{**message, "pictures": pictures if not at else []} for at, message in enumerate(doc["messages"])]

    settings = {
        "task": HELD_OUT,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / QUESTIONS)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_messages": doc_to_messages,
        "doc_to_visual": lambda doc: [],
        "doc_to_text": lambda doc: doc["messages"][-1]["content"],
        "doc_to_target": "answer",
        "process_results": lambda doc, answers: {"exact_match": float(answers[0] == doc["answer"].strip())},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"max_new_tokens": longest},
    }
    return ConfigurableMessagesTask(config=settings)


def main(request: Mapping[str, Any], tell: Callable[[dict], None]) -> None:
    tasks: list[Any] = list(request["tasks"])
    if unknown := sorted(set(tasks) - {HELD_OUT} - set(TaskManager().all_tasks)):
        raise UserError(f"lmms-eval has no task {unknown[0]}")
    if HELD_OUT in tasks:
        tasks[tasks.index(HELD_OUT)] = held_out_task(Path(request["questions"]), request["longest"])
    model = StockModel(Path(request["folder"]), request["batch_size"], tell)
    results = simple_evaluate(model=model, tasks=tasks, limit=request["limit"], batch_size=request["batch_size"])
    tell(
        {
            "results": {task: _scores(of_task) for task, of_task in results["results"].items()},
            "answers": {task: counts["effective"] for task, counts in results["n-samples"].items()},
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        }
    )


def _scores(of_task: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return {metric: [value, standard error or None]}, from lmms-eval's "metric,filter" and "metric_stderr,filter"."""
    numbers = {name: value for name, value in of_task.items() if isinstance(value, int | float)}
    metrics = {name: name.partition(",") for name in numbers if "_stderr" not in name}
    return {
        name.removesuffix(",none"): [numbers[name], numbers.get(f"{metric}_stderr{comma}{filtered}")]
        for name, (metric, comma, filtered) in metrics.items()
    }


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print goes to the log

        def tell(content: dict) -> None:
            print(json.dumps(content, default=str), file=out, flush=True)

        try:
            main(json.loads(Path(sys.argv[1]).read_text()), tell)
        except UserError as error:
            tell({"error": str(error)})
