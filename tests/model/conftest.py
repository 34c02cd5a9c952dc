"""What tests of stages and of their slices share."""

import pytest

from mmtrain.model.llm import language


@pytest.fixture
def opened(monkeypatch):
    """Names, on disk, of the LLM's tensors that slices have opened."""
    names: set[str] = set()
    open_tensors = language.open_tensors

    def watched(files):
        names.update(files)
        return open_tensors(files)

    monkeypatch.setattr(language, "open_tensors", watched)
    return names
