"""Instruction lists of 40 plans against their record: what the engine runs stays as it was, one by one."""

from __future__ import annotations

import pytest
from golden.planning import lists_of
from golden.record_behaviour import records_of

RECORDS = records_of("instructions")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_the_instruction_lists_of_a_recorded_plan_are_as_they_were(record) -> None:
    lists = lists_of(record["shape"])
    for name, expected in record["lists"].items():
        assert lists[name]["kinds"] == expected["kinds"], f"{name}: other instructions"
        different = [rank for rank, digest in enumerate(lists[name]["ranks"]) if digest != expected["ranks"][rank]]
        assert different == [], f"{name}: another order on ranks {different} of {record['shape']}"


def test_the_records_hold_every_kind_of_schedule() -> None:
    shapes = [record["shape"] for record in RECORDS]
    assert len(shapes) == 40 and {shape["pipeline"] for shape in shapes} == set(range(1, 9))
    assert {shape["stages_per_rank"] for shape in shapes} == {1, 2, 3}
    assert any(len([encodes for encodes in shape["encodes"] if encodes]) > 2 for shape in shapes), "encoder slices"
    assert any(shape["encodes"][0][0] > 0 for shape in shapes), "micro-batches encoded ahead"
    assert sum(shape["first_trainable_stage"] > 0 for shape in shapes) > 5
