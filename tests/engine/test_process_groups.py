"""The process groups of a run, where they need no second rank."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mmtrain.engine.process_groups import channel_group


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
def test_a_message_between_gpus_that_is_issued_far_ahead_does_not_count_as_hung(monkeypatch):
    """torch times it from when it is issued; what the host waits for has the configured timeout."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options))
    channel_group((0, 1), torch.device("cuda"), 5)
    channel_group((0, 1), torch.device("cpu"), 5)
    of_gpus, of_hosts = made
    assert of_gpus["timeout"] == of_gpus["pg_options"]._timeout > timedelta(days=300)
    assert of_hosts["timeout"] == timedelta(seconds=5)
