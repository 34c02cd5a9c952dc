"""How many tokens of text a sample becomes under a tokenizer and a template.

Sample (turns; images may be empty bytes) --template--> Document --positions that are no image's--> int
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mmtrain.data.samples.sample import IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import TEMPLATES
from mmtrain.pretrained.model_files import foreign_files, model_folder, read_json
from mmtrain.pretrained.tokenizer_files import panics_told, refuse_growing_rules


class TextCounter:
    """Counts as training tokenizes: it is the same template that makes the document."""

    def __init__(self, tokenizer_path: str, template: str) -> None:
        """Raises UserError for a folder without tokenizer and for a template that the tokenizer does not fit."""
        # The tokens' number depends on neither: any number of tokens an image, any size of the embedding.
        self.template = TEMPLATES[template](load_tokenizer(tokenizer_path), 1, sys.maxsize)

    def __call__(self, sample: Sample) -> int:
        """Tokens without those of images; raises Rejected for a conversation that the template cannot hold."""
        input_ids = self.template(sample).input_ids
        return len(input_ids) - input_ids.count(IMAGE_POSITION)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in an LLM's folder; raises UserError where there is none, and for rules that make texts grow."""
    folder = model_folder(path)
    if (folder / "tokenizer_config.json").is_file():
        read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        refuse_growing_rules(folder / "tokenizer.json")
    with panics_told(path), foreign_files(f"{path}: the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
