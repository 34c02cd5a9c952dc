"""What a run computes, reads and exports is what tests/golden/*.json record."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from golden.facts import CASES, FACTS, RESUMED
from golden.record import FOLDER, compute, differences, surroundings
from json_files import read_json


def cases() -> Iterator:
    """Return each case with its golden file's name; those that take long are nightly."""
    for name in FACTS:
        for case, asked in CASES[name].items():
            is_daily = name == "tokens" or "daily" in asked
            yield pytest.param(name, case, marks=() if is_daily else pytest.mark.nightly)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("name", "case"), [*cases()])
def test_facts_are_the_recorded_ones(folder, name, case):
    record = read_json(FOLDER / f"{name}.json")
    if others := list(differences(record["recorded_with"], surroundings(name))):
        pytest.skip(f"{name}.json was recorded elsewhere: {'; '.join(others)}")
    found = list(differences(record["facts"][case], compute(name, case, folder)))
    assert not found, "\n".join([f"{name}, {case}: {len(found)} values differ", *found[:20]])


@pytest.mark.parametrize("name", FACTS)
def test_every_case_is_recorded_and_none_is_left_over(name):
    assert list(read_json(FOLDER / f"{name}.json")["facts"]) == list(CASES[name])


def test_a_resumed_run_ends_with_the_bits_of_the_whole_run():
    facts = read_json(FOLDER / "projectors.json")["facts"]
    assert facts[RESUMED] == facts["pipeline 2"]
