"""Broken runs against their record: exit code, the rank that is named, and seconds until nothing of
the run is left.
"""

from __future__ import annotations

import pytest
from golden.faults import outcome_of
from golden.record import fault_records

RECORDS = fault_records()
SECONDS_MORE = 10.0  # than recorded, from the fault to the end
OF_A_RUN = 60.0  # where the whole run is counted


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_a_broken_run_ends_as_recorded(record, tiny, tmp_path) -> None:
    try:
        outcome = outcome_of(record["case"], tiny, tmp_path)
    except PermissionError as error:
        pytest.skip(f"no right to mount here: {error}")
    expected = record["outcome"]
    assert outcome["exit"] == expected["exit"], outcome["stderr"]
    if "rank" in expected:  # left out where any rank may be the first to say how the run ended
        assert outcome["rank"] == expected["rank"], outcome["stderr"]
    more = SECONDS_MORE if "moment" in record["case"] else OF_A_RUN
    assert outcome["seconds"] <= expected["seconds"] + more


def test_the_record_holds_30_faults_under_both_launchers() -> None:
    assert len(RECORDS) >= 30 and sum("torchrun" in record["case"] for record in RECORDS) >= 6
