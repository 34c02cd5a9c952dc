"""Sweeps of which a few cases run daily and the others nightly."""

from collections.abc import Container, Iterable

import pytest


def sweep(cases: Iterable, daily: Container) -> list:
    """Return the cases as parameters of a test; a case that is not in `daily` is nightly."""
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in daily else pytest.mark.nightly
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
