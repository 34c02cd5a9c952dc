"""Image tokens against the encoders that produce them."""

import pytest
import timm
import torch

from mmtrain.base.errors import UserError
from mmtrain.pretrained.geometry import tokens_per_image


@pytest.mark.parametrize(
    ("image_size", "patch_size", "tokens"),
    [(336, 14, 576), (224, 14, 256), (384, 14, 729), (384, 16, 576), (14, 14, 1)],
)
def test_published_encoders_give_their_known_number_of_tokens(image_size, patch_size, tokens):
    assert tokens_per_image(image_size, patch_size) == tokens


@pytest.mark.parametrize(("image_size", "patch_size"), [(32, 8), (35, 8), (39, 8)])
def test_token_count_is_what_a_stock_encoder_returns(image_size, patch_size):
    encoder = timm.create_model(
        "vit_tiny_patch16_224", img_size=image_size, patch_size=patch_size, embed_dim=12, depth=1, num_heads=1
    )
    features = encoder.forward_features(torch.zeros(1, 3, image_size, image_size))
    assert features.shape[1] - encoder.num_prefix_tokens == tokens_per_image(image_size, patch_size)


@pytest.mark.parametrize(("image_size", "patch_size"), [(13, 14), (224, 0)])
def test_an_image_without_a_patch_is_refused_with_both_sizes(image_size, patch_size):
    with pytest.raises(UserError, match=f"image size {image_size} with patch size {patch_size}"):
        tokens_per_image(image_size, patch_size)
