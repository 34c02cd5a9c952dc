"""What tests of a single rank's saves share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
