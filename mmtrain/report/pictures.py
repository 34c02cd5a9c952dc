"""The pictures beside a run's held-out questions: read from its folder, checked, and put into the page."""

from __future__ import annotations

import base64
import io
import re
import warnings
from pathlib import Path

from PIL import Image

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import read_limited
from mmtrain.report.elements import Asked, Picture
from mmtrain.report.fitting import LEFT_OUT
from mmtrain.report.parts import Question
from mmtrain.report.records import RunRecord, inside

PATH = re.compile(r"answers/[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.jpg")
LARGEST = 300_000  # bytes of a picture
LONGEST_SIDE = 1024  # pixels
MOST_BYTES = 700_000  # of all pictures of a page, as text


def shown_questions(run: RunRecord) -> tuple[Asked, ...]:
    """The questions of a run with their answers, and as many pictures as the page can hold."""
    left, shown = MOST_BYTES, []
    for question in run.questions:
        pictures = []
        for name in question.asked.pictures:
            picture = read_picture(run.folder, name)
            size = len(picture.source or "")
            if size > left:
                picture = LEFT_OUT
            else:
                left -= size
            pictures.append(picture)
        shown.append(_asked(question, tuple(pictures)))
    return tuple(shown)


def read_picture(folder: Path, name: str) -> Picture:
    """A picture of the run's folder by its name in answers.jsonl; of a stranger's record that may be any text."""
    if not PATH.fullmatch(name):
        return Picture(None, 0, 0, "not a picture of the run's folder")
    try:
        content = read_limited(inside(folder, name), LARGEST, "a small JPEG")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            warnings.simplefilter("ignore")
            width, height = image.size
    except FileNotFoundError:
        return Picture(None, 0, 0, "not there any more")
    except (UserError, OSError, ValueError, Image.DecompressionBombError):
        return Picture(None, 0, 0, "not a JPEG that can be shown")
    if max(width, height) > LONGEST_SIDE:
        return Picture(None, 0, 0, "larger than any that a run leaves")
    return Picture(f"data:image/jpeg;base64,{base64.b64encode(content).decode()}", width, height)


def _asked(question: Question, pictures: tuple[Picture, ...]) -> Asked:
    given = (("before training", question.before), ("after training", question.after))
    answers = tuple((when, answer.given, answer.right) for when, answer in given if answer is not None)
    about = question.asked
    return Asked(about.key, about.question, about.truth, answers, pictures)
