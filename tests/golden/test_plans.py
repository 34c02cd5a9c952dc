"""Plans against their record: how fast they are, what they need, what is refused; instruction lists one by one."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from golden.planning import facts_of, lists_of
from golden.record import records_of

RECORDS = records_of("plans")
DAILY = [record for record in RECORDS if "daily" in record]
MEMORY = "parallel.device_memory_gib"
MEAN_SECONDS, MOST_SECONDS, BYTES = 1.005, 1.02, 0.02  # of the record


def problems(record: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Describe where a plan is worse than its record. A faster one, or one that now fits, is as good."""
    expected = record["facts"]
    if "refused" in expected:
        if "refused" not in facts:
            return [] if expected["refused"] == MEMORY else [f"planned, was refused for {expected['refused']}"]
        if expected["refused"] not in facts["message"]:
            return [f"refused without naming {expected['refused']}: {facts['message']}"]
        return []
    if "refused" in facts:
        return [f"refused, was planned: {facts['message']}"]
    found = []
    if facts["seconds"] > expected["seconds"] * MOST_SECONDS:
        found.append(f"a step takes {facts['seconds']:.6g} s, was {expected['seconds']:.6g} s")
    if facts["choices"] == expected["choices"]:
        for kind in ("bytes", "host_bytes"):
            if facts[kind] != pytest.approx(expected[kind], rel=BYTES):
                found.append(f"{kind} of the ranks are {facts[kind]}, were {expected[kind]}")
    elif max(facts["bytes"]) > max(expected["bytes"]) * (1 + BYTES) and not is_limited(record["case"]):
        found.append(f"the fullest rank needs {max(facts['bytes'])} bytes, was {max(expected['bytes'])}")
    return found


def is_limited(case: dict[str, Any]) -> bool:
    """Whether the case has a memory limit, within which other choices may use more memory."""
    return any(override.startswith(MEMORY) for override in case["overrides"])


@pytest.mark.parametrize("record", DAILY, ids=lambda record: record["name"])
def test_a_plan_of_every_day_is_as_good_as_recorded(record, tmp_path) -> None:
    assert problems(record, facts_of(record["case"], tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_recorded_plan_has_become_slower_larger_or_refused(tmp_path) -> None:
    found, ratios = [], []
    for record in RECORDS:
        facts = facts_of(record["case"], tmp_path)
        found += [f"plan {record['name']}: {text}" for text in problems(record, facts)]
        if "seconds" in facts and "seconds" in record["facts"]:
            ratios.append(facts["seconds"] / record["facts"]["seconds"])
    assert found == [], "\n".join(found)
    assert statistics.mean(ratios) <= MEAN_SECONDS


def test_the_records_hold_300_configurations_and_30_tight_ones() -> None:
    assert len(RECORDS) == 330 and len(DAILY) == 40
    assert sum("tight" in record["name"] and "refused" not in record["facts"] for record in RECORDS) == 30
    assert 30 < sum("refused" in record["facts"] for record in RECORDS) < 120


# ---- instruction lists

LISTS = records_of("instructions")


@pytest.mark.parametrize("record", LISTS, ids=lambda record: record["name"])
def test_the_instruction_lists_of_a_recorded_plan_are_as_they_were(record) -> None:
    lists = lists_of(record["shape"])
    for name, expected in record["lists"].items():
        assert lists[name]["kinds"] == expected["kinds"], f"{name}: other instructions"
        different = [rank for rank, digest in enumerate(lists[name]["ranks"]) if digest != expected["ranks"][rank]]
        assert different == [], f"{name}: another order on ranks {different} of {record['shape']}"


def test_the_records_hold_every_kind_of_schedule() -> None:
    shapes = [record["shape"] for record in LISTS]
    assert len(shapes) == 40 and {shape["pipeline"] for shape in shapes} == set(range(1, 9))
    assert {shape["stages_per_rank"] for shape in shapes} == {1, 2, 3}
    assert any(len([encodes for encodes in shape["encodes"] if encodes]) > 2 for shape in shapes), "encoder slices"
    assert any(shape["encodes"][0][0] > 0 for shape in shapes), "micro-batches encoded ahead"
    assert sum(shape["first_trainable_stage"] > 0 for shape in shapes) > 5
