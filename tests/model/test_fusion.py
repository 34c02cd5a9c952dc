import pytest
import torch

from mmtrain.model.fusion import fuse


def places(positions):
    return positions.flatten().nonzero().squeeze(1)


def test_images_fill_their_positions_in_row_major_order():
    embeddings = torch.zeros(2, 4, 3)
    positions = torch.tensor([[False, True, True, False], [True, False, False, True]])
    images = torch.arange(1.0, 13.0).view(2, 2, 3)
    fused = fuse(embeddings, places(positions), images)
    assert fused[0, 1].tolist() == [1, 2, 3] and fused[0, 2].tolist() == [4, 5, 6]
    assert fused[1, 0].tolist() == [7, 8, 9] and fused[1, 3].tolist() == [10, 11, 12]
    assert not fused[~positions].any()


def test_gradient_reaches_every_image_embedding_once():
    images = torch.ones(1, 2, 3, requires_grad=True)
    positions = torch.tensor([[True, False, True]])
    weights = torch.arange(9.0).view(1, 3, 3)
    (fuse(torch.zeros(1, 3, 3), places(positions), images) * weights).sum().backward()
    assert images.grad.tolist() == [[[0, 1, 2], [6, 7, 8]]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_count_mismatch_raises_with_both_numbers(count):
    positions = torch.tensor([[True, True, False, False]])
    with pytest.raises(ValueError, match=f"2 image positions .* {count} image embeddings"):
        fuse(torch.zeros(1, 4, 3), places(positions), torch.ones(1, count, 3))


def test_positions_without_any_image_raise():
    with pytest.raises(ValueError, match=r"1 image positions .* 0 image embeddings"):
        fuse(torch.zeros(1, 2, 3), places(torch.tensor([[True, False]])), None)
    assert fuse(torch.ones(1, 2, 3), places(torch.tensor([[False, False]])), None).all()
