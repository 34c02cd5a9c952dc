import math
import re

import pytest
import torch
from torch import nn
from transformers import (
    AyaVisionConfig,
    CLIPVisionConfig,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    PerceptionLMConfig,
    TimmWrapperConfig,
)
from transformers.models.aya_vision.modeling_aya_vision import AyaVisionMultiModalProjector
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
)
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.models.perception_lm.modeling_perception_lm import PerceptionLMMultiModalProjector

from mmtrain.base.errors import UserError
from mmtrain.config.model import ProjectorSection
from mmtrain.connectors import CONNECTORS
from mmtrain.facts.projector import connector, connector_parameters
from mmtrain.model.trained.projector import make_projector

VISION, LLM = (
    CLIPVisionConfig(hidden_size=12, num_attention_heads=2),
    LlamaConfig(hidden_size=20, num_attention_heads=2),
)
SECTIONS = [
    ProjectorSection(type="linear"),
    ProjectorSection(type="mlp2x_gelu"),
    *(
        ProjectorSection(type="shuffle_swiglu", factor=factor, width=width)
        for factor, width in ((2, None), (3, 14))
    ),
    *(
        ProjectorSection(type=kind, factor=factor)
        for kind in ("shuffle_linear", "shuffle_mlp2x_gelu", "mlp2x_gelu_pool")
        for factor in (2, 4)
    ),
]


def of_type(kind: str) -> ProjectorSection:
    return ProjectorSection(type=kind)


def stock_projector(section: ProjectorSection) -> nn.Module:
    """What transformers computes of features between 12 and 20 wide, shuffle and pooling
    included.
    """
    factor, models = section.factor, {"vision_config": VISION, "text_config": LLM}
    if section.type == "mlp2x_gelu":
        return LlavaMultiModalProjector(LlavaConfig(**models))
    if section.type == "shuffle_swiglu":
        config = AyaVisionConfig(**models, downsample_factor=factor)
        if section.width is not None:
            config.alignment_intermediate_size = section.width
        return AyaVisionMultiModalProjector(config)
    if section.type == "shuffle_linear":
        return Idefics3Connector(
            Idefics3Config(vision_config={"hidden_size": 12}, text_config=LLM, scale_factor=factor)
        )
    if section.type == "mlp2x_gelu_pool":
        vision = TimmWrapperConfig(model_args={"embed_dim": 12})
        config = PerceptionLMConfig(
            vision_config=vision, text_config=LLM, projector_pooling_ratio=factor
        )
        return PerceptionLMMultiModalProjector(config)
    config = InternVLConfig(
        vision_config={"hidden_size": 12}, text_config=LLM, downsample_ratio=1 / factor
    )
    return InternVLMultiModalProjector(config)


def stock_forward(
    section: ProjectorSection, stock: nn.Module, features: torch.Tensor
) -> torch.Tensor:
    """As the class's own `get_image_features` calls it."""
    if section.type == "shuffle_mlp2x_gelu":
        side = math.isqrt(features.shape[1])
        features = InternVLModel.pixel_shuffle(
            None, features.view(-1, side, side, 12), 1 / section.factor
        )
        features = features.flatten(1, 2)
    return stock(features).reshape(len(features), -1, 20)


@pytest.mark.parametrize("section", SECTIONS[1:], ids=str)
def test_a_projector_is_the_one_of_the_stock_class(section):
    stock, ours = stock_projector(section), make_projector(connector(section, 12, 20), seed=0)
    prefix = "modality_projection." if section.type == "shuffle_linear" else ""
    # norms begin as 1 and 0, which would hide a wrong place
    for name, parameter in ours.named_parameters():
        parameter.data += (
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 10
        )
    stock.load_state_dict({prefix + name: tensor for name, tensor in ours.state_dict().items()})
    features = torch.randn(2, 145, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    stock_in = features[:, 1:].detach().clone().requires_grad_()
    # as behind a class token
    found, expected = ours(features[:, 1:]), stock_forward(section, stock, stock_in)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(features.grad[:, 1:], stock_in.grad, atol=1e-5, rtol=1e-5)
    gradients = {prefix + name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("section", [*SECTIONS, *map(of_type, CONNECTORS)], ids=str)
def test_parameters_are_those_the_planner_counts(section):
    projector = make_projector(connector(section, 12, 20), seed=0)
    ours = {f"projector.{name}": tuple(p.shape) for name, p in projector.named_parameters()}
    assert ours == {
        p.name: tuple(p.shape) for p in connector_parameters(connector(section, 12, 20))
    }
    assert all(p.dtype == torch.float32 for p in projector.parameters())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"type": "linear", "factor": 2},
            "linear has none. Leave it out, or set model.projector.type to one of shuffle_swiglu",
        ),
        (
            {"type": "shuffle_linear", "width": 8},
            "has none. Leave it out, or set model.projector.type to one of shuffle_swiglu",
        ),
        (
            {"type": "shuffle_swiglu", "width": 7},
            "7 cannot be halved into values and their gates. Set an even number",
        ),
    ],
)
def test_a_key_that_a_type_does_not_have_is_refused(section, message):
    with pytest.raises(UserError, match=re.escape(message)):
        connector(ProjectorSection(**section), 12, 20)


def test_weights_depend_on_seed_and_name_alone():
    operations = connector(ProjectorSection(type="mlp2x_gelu"), 12, 12)
    first = make_projector(operations, seed=3).state_dict()
    torch.randn(1000)
    again = make_projector(operations, seed=3).state_dict()
    other = make_projector(operations, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["linear_1.weight"], first["linear_2.weight"])
    bound = 12**-0.5
    assert 0.9 * bound < first["linear_1.weight"].abs().max() <= bound, (
        "nn.Linear's own distribution"
    )
