"""From and to the Hugging Face hub, by huggingface_hub, whose own settings say where that is, and as whom.

configuration --download_models--> the local cache           exported folder --push--> a private repository
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mmtrain
from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.model_files import HUB_ID, find_model_folder, foreign_files, no_model

_log = logging.getLogger(__name__)
# Files of a model that are downloaded: none that runs, no pickles. Their names reach the terminal.
FILE = re.compile(r"[\w./-]+\.(safetensors|json|jinja|txt)|tokenizer\.model|README\.md", re.ASCII)


def download_models(config: RunConfig) -> None:
    """Download models of a configuration that are hub ids and not here; raises UserError for what the hub refuses."""
    from huggingface_hub import HfApi, snapshot_download

    model = config.model
    named = [model.pretrained, model.llm.path, model.vision and model.vision.name]
    for name in dict.fromkeys(filter(None, named)):
        if find_model_folder(name) is None and (hub_id := _hub_id(name)) is not None:
            _log.info(f"downloading {hub_id}")
            with foreign_files(f"{hub_id} on the hub"):
                files = [file for file in HfApi().list_repo_files(hub_id) if FILE.fullmatch(file)]
                snapshot_download(hub_id, allow_patterns=files)


def _hub_id(name: str) -> str | None:
    from mmtrain.models.facts.timm_models import timm_config
    from mmtrain.models.facts.vision_files import is_timm_name

    if is_timm_name(name):
        return timm_config(name).hf_hub_id or None
    if not HUB_ID.fullmatch(name) or "/" not in name:
        raise no_model(name)
    return name


def make_repository(repository: str) -> None:
    """Make the private repository ORG/NAME unless it is there; raises UserError for what the hub refuses."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise UserError(f"--push {repository}: the hub does not know you. Log in with hf auth login, or set HF_TOKEN")
    with foreign_files(f"--push {repository}: the repository"):
        HfApi().whoami()  # with a wrong token `create_repo` would be content with a repository that is there
        HfApi().create_repo(repository, private=True, exist_ok=True)


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a repository in one commit; return the commit's address. Raises UserError."""
    from huggingface_hub import HfApi

    with foreign_files(f"--push {repository}: the repository"):
        message = f"Exported by mmtrain {mmtrain.__version__}"
        return HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url
