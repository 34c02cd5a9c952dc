"""Downloads from and uploads to the Hugging Face hub, by huggingface_hub and its own settings.

configuration   --download_models--> the local cache
exported folder --push--> a private repository

A mirror may be anybody's, and huggingface_hub makes paths of headers, follows lists without end and
stores all that is sent: `_Answers` checks what a hub answers before that library reads it.
"""

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_session, hf_hub_download, set_client_factory
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.progress import ByteBars
from mmtrain.base.small_files import MAX_JSON_BYTES
from mmtrain.base.version import VERSION
from mmtrain.config.schema import RunConfig
from mmtrain.facts.model_files import HUB_ID, find_model_folder, foreign_files

# Files of a model that are downloaded: none that runs, no pickles. Their names reach the terminal,
# and become paths.
FILE = re.compile(
    r"(\w[\w.-]*/)*(\w[\w.-]*\.(safetensors|json|jinja|txt)|tokenizer\.model)|README\.md", re.ASCII
)
MOST_FILES = 2000  # of a model; the largest have a few hundred
# X-Repo-Commit and the ETag, either of which may be absent: huggingface_hub makes paths of them.
HEADERS = re.compile('([0-9a-f]{40})? ((W/)?"?[0-9a-f]{40}([0-9a-f]{24})?"?)?')


@dataclass
class _Answers:
    """Checks the answers of a hub: headers that become paths, and how much is sent."""

    what: str
    # a function of (bytes received, size): progress of the file that is being downloaded
    show: Any = None

    def need(self, is_right: object, seen: str) -> None:
        if not is_right:
            raise UserError(f"{self.what}: {escape(seen)}. Set HF_ENDPOINT to a hub that you trust")

    def check(self, answer: Any) -> None:
        """Check an answer whose headers have come, and bound what follows. Raises UserError."""
        headers, method = answer.headers, answer.request.method
        # none was asked for; a few bytes could become gigabytes
        headers.pop("Content-Encoding", None)
        if method == "HEAD":
            etag = headers.get("X-Linked-Etag") or headers.get("ETag", "")
            names = f"{headers.get('X-Repo-Commit', '')} {etag}"
            self.need(
                HEADERS.fullmatch(names),
                f"answers with commit and ETag {names}, no 40 or 64 hexadecimal digits",
            )
            self.size = int(headers.get("X-Linked-Size") or headers.get("Content-Length", 0))
        is_file = method == "GET" and answer.is_success and self.show
        # After a lost connection, huggingface_hub asks for the rest: "bytes=START-".
        start = answer.request.headers.get("Range", "0").strip("bytes=-")
        left = MAX_JSON_BYTES
        if is_file:
            left = self.size - int(start)
        answer.iter_raw = functools.partial(self._bounded, answer.iter_raw, left, is_file)

    def _bounded(self, read: Any, left: int, is_file: object) -> Iterator[bytes]:
        """Yield the parts of an answer of at most `left` bytes."""
        for part in read():
            left -= len(part)
            self.need(left >= 0, "sends more than it has announced, or a list needs")
            if is_file:
                self.show(self.size - left, self.size)
            yield part


@contextlib.contextmanager
def _hub(what: str) -> Iterator[_Answers]:
    """Check a hub's answers; raise UserError, naming `what`, for what the library raises.

    Its warnings and bars, which quote a server, are hidden.
    """
    set_verbosity_error()
    answers = _Answers(what)
    session = get_session()
    set_client_factory(
        lambda: type(session)(
            event_hooks=session.event_hooks | {"response": [answers.check]},
            headers={"Accept-Encoding": "identity"},
            follow_redirects=True,
            timeout=None,
        )
    )
    with foreign_files(what), warnings.catch_warnings(action="ignore"):
        disable_progress_bars()
        yield answers


def download_models(config: RunConfig) -> None:
    """Download the models named by hub ids that the local cache lacks.

    Raises UserError for what the hub refuses.
    """
    from mmtrain.facts.timm_models import timm_config
    from mmtrain.facts.vision_files import is_timm_name

    constants.HF_HUB_DISABLE_XET = True  # that library writes files itself, unseen by _Answers
    model = config.model
    names = (model.pretrained, model.llm.path, model.vision and model.vision.name)
    for hub_id in filter(None, names):
        if is_timm_name(hub_id):
            hub_id = timm_config(hub_id).hf_hub_id or ""
        here = find_model_folder(hub_id)
        is_here = here is not None and any(here.glob("*.safetensors"))
        if HUB_ID.fullmatch(hub_id) and "/" in hub_id and not is_here:
            with _hub(f"{hub_id} on the hub") as answers:
                _download(hub_id, answers)


def _download(hub_id: str, answers: _Answers) -> None:
    """Download the newest commit, file by file.

    In the threads of snapshot_download, Ctrl-C would go unheard.
    """
    listed = HfApi().model_info(hub_id)
    commit = str(listed.sha)
    answers.need(
        re.fullmatch("[0-9a-f]{40}", commit), f"names commit {commit}, no 40 hexadecimal digits"
    )
    files = [file.rfilename for file in listed.siblings if FILE.fullmatch(file.rfilename)]
    answers.need(
        0 < len(files) <= MOST_FILES,
        f"lists {len(files):,} files of a model, not 1 to {MOST_FILES:,}",
    )
    with ByteBars(sys.stdout) as bars:
        for file in files:
            answers.show = functools.partial(bars.show, file)
            path = hf_hub_download(hub_id, file, revision=commit)
    references = Path(path.partition(f"/snapshots/{commit}/")[0], "refs")
    references.mkdir(exist_ok=True)
    (references / "main").write_text(commit)


def make_repository(repository: str) -> None:
    """Make the private repository ORG/NAME unless it is there.

    Raises UserError for what the hub refuses.
    """
    with _hub(f"--push {repository}: the repository"):
        # with a wrong token `create_repo` would be content with a repository that is there
        HfApi().whoami()
        HfApi().create_repo(repository, private=True, exist_ok=True)


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a repository in one commit; return the commit's address.

    Raises UserError for what the hub refuses.
    """
    with _hub(f"--push {repository}: the repository"):
        message = f"Exported by mmtrain {VERSION}"
        commit = HfApi().upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message
        )
        return commit.commit_url
