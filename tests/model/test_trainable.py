import torch
from torch import nn

from mmtrain.model.trainable import set_trainable


def test_only_what_matches_trains_stored_as_it_was():
    model = {
        name: nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        for name in ("projector.linear_1.weight", "llm.layers.1.mlp.up_proj.weight", "llm.layers.10.mlp.up_proj.weight")
    }
    found = set_trainable(model.items(), ("llm.layers.1",))
    assert list(found) == ["llm.layers.1.mlp.up_proj.weight"], "layer 1 is not layer 10"
    for name, parameter in model.items():
        assert parameter.requires_grad == (name in found)
        assert parameter.dtype == torch.bfloat16
