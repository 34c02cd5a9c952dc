"""From and to the Hugging Face hub, by huggingface_hub, whose own settings say where that is, and as whom.

configuration --download_models--> the local cache           exported folder --push--> a private repository
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils.logging import set_verbosity_error

import mmtrain
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.model_files import HUB_ID, find_model_folder, foreign_files

# Files of a model that are downloaded: none that runs, no pickles. Their names reach the terminal.
FILE = re.compile(r"[\w./-]+\.(safetensors|json|jinja|txt)|tokenizer\.model|README\.md", re.ASCII)


@contextlib.contextmanager
def _hub(what: str) -> Iterator[None]:
    """Raise UserError, naming `what`, for what the library raises; hide its warnings, which quote a server."""
    set_verbosity_error()
    with foreign_files(what), warnings.catch_warnings(action="ignore"):
        yield


def download_models(config: RunConfig) -> None:
    """Download what the local cache lacks of models named by hub ids; raises UserError for what the hub refuses."""
    from mmtrain.models.facts.timm_models import timm_config
    from mmtrain.models.facts.vision_files import is_timm_name

    model = config.model
    for name in filter(None, (model.pretrained, model.llm.path, model.vision and model.vision.name)):
        hub_id = timm_config(name).hf_hub_id or "" if is_timm_name(name) else name
        here = find_model_folder(hub_id)
        if HUB_ID.fullmatch(hub_id) and "/" in hub_id and not (here and any(here.glob("*.safetensors"))):
            with _hub(f"{hub_id} on the hub"):
                files = [file for file in HfApi().list_repo_files(hub_id) if FILE.fullmatch(file)]
                snapshot_download(hub_id, allow_patterns=files)


def make_repository(repository: str) -> None:
    """Make the private repository ORG/NAME unless it is there; raises UserError for what the hub refuses."""
    with _hub(f"--push {repository}: the repository"):
        HfApi().whoami()  # with a wrong token `create_repo` would be content with a repository that is there
        HfApi().create_repo(repository, private=True, exist_ok=True)


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a repository in one commit; return the commit's address. Raises UserError."""
    with _hub(f"--push {repository}: the repository"):
        message = f"Exported by mmtrain {mmtrain.__version__}"
        return HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url
