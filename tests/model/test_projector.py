import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from mmtrain.model.projector import make_projector
from mmtrain.pretrained.shapes import projector_parameters


def test_mlp2x_gelu_is_the_stock_llava_projector():
    stock = LlavaMultiModalProjector(
        LlavaConfig(
            vision_config=CLIPVisionConfig(hidden_size=12, num_attention_heads=2),
            text_config=LlamaConfig(hidden_size=20, num_attention_heads=2),
        )
    )
    ours = make_projector("mlp2x_gelu", 12, 20, seed=0)
    stock.load_state_dict(ours.state_dict())
    features = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(features), stock(features))


@pytest.mark.parametrize("kind", ["linear", "mlp2x_gelu"])
def test_parameters_are_those_the_planner_counts(kind):
    projector = make_projector(kind, 12, 20, seed=0)
    ours = {f"projector.{name}": tuple(p.shape) for name, p in projector.named_parameters()}
    assert ours == {p.name: tuple(p.shape) for p in projector_parameters(kind, 12, 20)}
    assert all(p.dtype == torch.float32 for p in projector.parameters())


def test_weights_depend_on_seed_and_name_alone():
    first = make_projector("mlp2x_gelu", 12, 12, seed=3).state_dict()
    torch.randn(1000)
    again = make_projector("mlp2x_gelu", 12, 12, seed=3).state_dict()
    other = make_projector("mlp2x_gelu", 12, 12, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["linear_1.weight"], first["linear_2.weight"])
    bound = 12**-0.5
    assert 0.9 * bound < first["linear_1.weight"].abs().max() <= bound, "nn.Linear's own distribution"
