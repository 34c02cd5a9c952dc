"""What of a sweep runs daily, and what nightly alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return a parameter set that runs nightly alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def rest_nightly(values: Iterable[Any], daily: Collection[Any]) -> list[Any]:
    """Return all values as parameters; those that are not in `daily` run nightly alone."""
    return [value if value in daily else nightly(value) for value in values]
