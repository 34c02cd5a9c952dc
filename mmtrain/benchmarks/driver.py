"""Score an exported folder in lmms-eval's environment, as a child of `mmtrain benchmark`.

REQUEST, a JSON file of the parent, says what is asked.

lmms-eval's tasks --messages with pictures--> StockModel, an exported folder
    --answers--> lmms-eval's scores
standard output: lines of JSON, {"done", "total"} while it runs,
                 at its end {"results", "answers", "versions"}

lmms-eval has classes of its own for some of the models that mmtrain exports, which resize pictures
otherwise than training did, or take one prompt at a time. Here each is its stock class, loaded as
`mmtrain chat` does.
"""

import importlib.metadata
import itertools
import json
import os
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
from mmtrain.benchmarks.held_out import HELD_OUT, QUESTIONS
from mmtrain.data.stream.images import decode_image, upright

NEW_TOKENS = 256  # where a task names no number
# messages, pictures, settings of generation
Prompt = tuple[list[dict], list[Image.Image], dict[str, Any]]


class StockModel(lmms):
    is_simple = False  # it takes messages, not one text with its pictures

    def __init__(
        self,
        folder: Path,
        batch_size: int,
        tell: Callable[[dict], None],
    ) -> None:
        super().__init__()
        self.model, self.processor = load(folder)
        self.processor.tokenizer.padding_side = "left"
        self.batch_size, self.tell = batch_size, tell

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answer greedily, in batches with equal settings, all or none of them with pictures."""
        answers = []
        prompts = map(self._prompt, requests)
        for _, alike in itertools.groupby(prompts, lambda prompt: (prompt[2], bool(prompt[1]))):
            while batch := list(itertools.islice(alike, self.batch_size)):
                answers += self._answers(batch)
                self.tell({"done": len(answers), "total": len(requests)})
        return answers

    def _prompt(self, request: Instance) -> Prompt:
        _, doc_to_messages, settings, number, task, split = request.args
        pictures = []
        messages = []
        for message in doc_to_messages(self.task_dict[task][split][number]):
            content = message["content"]
            pictures += message.get("pictures", [])  # of held_out, whose contents are texts
            if not isinstance(content, str):
                content = [dict(part) for part in content]
                if others := {part["type"] for part in content} - {"text", "image"}:
                    raise SystemExit(
                        f"{task}: has {min(others)}, but these models take texts and images"
                    )
                pictures += [part.pop("url") for part in content if part["type"] == "image"]
            messages.append({"role": message["role"], "content": content})
        shown = [resized(one, self.processor.image_processor) for one in map(upright, pictures)]
        return messages, shown, settings

    def _answers(self, batch: Sequence[Prompt]) -> list[str]:
        asked, pictures, (settings, *_) = zip(*batch, strict=True)
        write = self.processor.apply_chat_template
        texts = [write(one, add_generation_prompt=True, tokenize=False) for one in asked]
        given = {}
        if pictures[0]:
            given["images"] = list(pictures)
        inputs = self.processor(text=texts, padding=True, return_tensors="pt", **given)
        inputs = inputs.to(self.model.device, dtype=self.model.dtype)
        limit = settings.get("max_new_tokens", NEW_TOKENS)
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=limit,
                do_sample=False,
                num_beams=1,
            )
        new = output[:, inputs["input_ids"].shape[1] :]
        answers = self.processor.tokenizer.batch_decode(new, skip_special_tokens=True)
        ends = settings.get("until") or []
        if isinstance(ends, str):
            ends = [ends]
        for end in filter(None, ends):
            answers = [answer.split(end)[0] for answer in answers]
        return [answer.strip() for answer in answers]

    def loglikelihood(self, requests: list[Instance]) -> Any:
        raise SystemExit(
            "a task compares likelihoods or asks in rounds; choose one that generates one answer"
        )

    generate_until_multi_round = loglikelihood


def held_out_task(folder: Path, longest: int) -> ConfigurableMessagesTask:
    """Return the task of the questions in `folder`, whose answers have at most `longest` tokens."""

    def doc_to_messages(doc: Mapping[str, Any]) -> list[dict]:
        first, *others = doc["messages"]
        pictures = [decode_image((folder / name).read_bytes()) for name in doc["images"]]
        return [{**first, "pictures": pictures}, *others]

    return ConfigurableMessagesTask(
        config={
            "task": HELD_OUT,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(folder / QUESTIONS)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_messages": doc_to_messages,
            "doc_to_visual": lambda doc: [],
            "doc_to_text": lambda doc: doc["messages"][-1]["content"],
            "doc_to_target": "answer",
            "process_results": lambda doc, answers: {
                "exact_match": float(answers[0] == doc["answer"].strip())
            },
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
            "generation_kwargs": {"max_new_tokens": longest},
        }
    )


def score(request: Mapping[str, Any], tell: Callable[[dict], None]) -> dict:
    tasks = list(request["tasks"])
    if unknown := sorted(set(tasks) - {HELD_OUT, *TaskManager().all_tasks}):
        raise SystemExit(f"lmms-eval has no task {unknown[0]}")
    if HELD_OUT in tasks:
        tasks[tasks.index(HELD_OUT)] = held_out_task(Path(request["questions"]), request["longest"])
    results = simple_evaluate(
        model=StockModel(Path(request["folder"]), request["batch_size"], tell),
        tasks=tasks,
        limit=request["limit"],
        batch_size=request["batch_size"],
    )
    libraries = ("lmms_eval", "transformers", "torch")
    return {
        "results": {task: _scores(of_task) for task, of_task in results["results"].items()},
        "answers": {task: counts["effective"] for task, counts in results["n-samples"].items()},
        "versions": dict(zip(libraries, map(importlib.metadata.version, libraries), strict=True)),
    }


def _scores(of_task: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return {metric: (value, standard error)}.

    lmms-eval names them "metric,filter" and "metric_stderr,filter".
    """
    numbers = {name: value for name, value in of_task.items() if isinstance(value, int | float)}
    scores = {}
    for name, value in numbers.items():
        if "_stderr" not in name:
            error = numbers.get(name.replace(",", "_stderr,"))
            scores[name.removesuffix(",none")] = (value, error)
    return scores


def main(request: str) -> None:
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print goes to the log

        def tell(content: dict) -> None:
            out.write(json.dumps(content) + "\n")
            out.flush()

        tell(score(json.loads(Path(request).read_text()), tell))
