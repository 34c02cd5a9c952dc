"""A case of a sweep that runs nightly alone."""

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a parameter set that runs nightly alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)
