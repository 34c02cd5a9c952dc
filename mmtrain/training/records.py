"""What rank 0 writes down of a run: what happened, and what was asked and answered, with the pictures asked about.

steps, scores, saves --> metrics.jsonl      answers --> answers.jsonl, their pictures --> answers/<digest>.jpg
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.base.durable import write_whole
from mmtrain.base.json_lines import JsonLines
from mmtrain.checkpoint.run_folder import ANSWERS, METRICS
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.images import decode_image
from mmtrain.engine.statistics import StepResult
from mmtrain.training.answers import Answer

PICTURES = "answers"  # a folder of the run
PICTURED_QUESTIONS = 24
PICTURES_OF_A_QUESTION = 8
PICTURE_SIDE = 384  # pixels, at most


class Records:
    """The records of a run; `folder` is None on ranks that write none. Raises what JsonLines does.

    `also` then gets each record of metrics.jsonl, and the answers of a step as one of the kind `answers`. `print_info`
    tells the user that pictures cannot be written: they are left out from there.
    """

    def __init__(
        self,
        folder: Path | None,
        config: RunConfig,
        also: Callable[[Mapping[str, Any]], None],
        print_info: Callable[[str], None],
    ) -> None:
        self._folder, self._config = folder, config
        self._also, self._say = also, print_info
        self._keeps_pictures = True
        self._metrics = JsonLines(None if folder is None else folder / METRICS)
        asks = folder is not None and config.eval.is_on and config.eval.show_answers
        self._answers = JsonLines(folder / ANSWERS if asks else None)

    def write(self, kind: str, **values: Any) -> None:
        """Append a line to metrics.jsonl: its kind, these values, and the time, in seconds since 1970."""
        record = {"kind": kind, **values, "time": time.time()}
        self._metrics.write(**record)
        self._also(record)

    def step(self, result: StepResult, seconds: float, used: Mapping[str, Any]) -> None:
        """Record a step that took so many seconds; `used` is what `Utilization` says of it."""
        left_out = ("ranks",) if self._config.optimizer.groups else ("ranks", "lr_groups")
        done = {name: value for name, value in vars(result).items() if name not in left_out}
        fill = result.tokens / (self._config.train.packs_per_step * self._config.data.pack_length)
        rate = result.tokens / seconds
        self.write("train", **done, pack_fill=fill, seconds=seconds, tokens_per_second=rate, **used)

    def answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Append what the model answered after `step` updates to answers.jsonl, in the order asked.

        The first 24 questions have their first 8 pictures beside them, each a JPEG in the run's folder.
        """
        if self._folder is None:
            return
        lines = []
        for number, answer in enumerate(answers):
            pictures = self._pictures(answer.images[:PICTURES_OF_A_QUESTION]) if number < PICTURED_QUESTIONS else []
            said = {name: value for name, value in vars(answer).items() if name != "images"}
            lines.append({"step": step, "time": time.time(), **said, "pictures": pictures})
            self._answers.write(**lines[-1])
        if lines:
            self._also({"kind": "answers", "step": step, "answers": lines})

    def _pictures(self, images: Sequence[bytes]) -> list[str]:
        """Write the images of a question; their paths, none once one could not be written."""
        try:
            return [self._picture(image) for image in images] if self._keeps_pictures else []
        except OSError as error:
            self._keeps_pictures = False
            why = f"cannot write into {self._folder / PICTURES} ({error.strerror or error})"
            self._say(f"pictures are left out from here: {why}; {ANSWERS} has the questions and answers")
            return []

    def _picture(self, image: bytes) -> str:
        """Write an image as training sees it, but smaller; the path in the run's folder.

        A picture is called after what it shows: the same one is there once, and none is ever taken for another.
        """
        picture = decode_image(image, self._config.data.max_image_pixels)
        picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        content = io.BytesIO()
        picture.save(content, "JPEG", quality=85)
        path = Path(PICTURES, f"{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.jpg")
        target = self._folder / path
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            write_whole(target, content.getvalue())
        return path.as_posix()

    def close(self) -> None:
        self._metrics.close()
        self._answers.close()
