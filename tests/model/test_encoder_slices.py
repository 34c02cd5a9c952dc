"""An encoder cut into slices: equal to the whole one to the bit, and each reads and keeps its own blocks alone."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scenes import images, perturb
from stock_encoders import ENCODERS
from untrained_runs import make_tower

from mmtrain.model.vision import load_vision
from mmtrain.model.vision_tower import VisionTower

DEPTH = 4
# Kinds of timm ViTs that differ in what stands around and between blocks.
TIMM = {
    "vit": "vit_tiny_patch16_224",
    "siglip_timm": "vit_so400m_patch14_siglip_384",
    "clip": "vit_large_patch14_clip_quickgelu_336",
    "eva02": "eva02_tiny_patch14_224",
    "dinov3_timm": "vit_small_patch16_dinov3",
    "pe": "vit_pe_core_tiny_patch16_384",
    "intern300m": "vit_intern300m_patch14_448",
    "dinov2_timm": "vit_small_patch14_reg4_dinov2",
    "beit": "beitv2_base_patch16_224",
}
EVERY_DAY = ("beit", "internvl", "dinov3")
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Makes the folder of an encoder of a kind, with random weights; once each."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            if kind in TIMM:
                make_tower(made[kind], TIMM[kind], {"depth": DEPTH})
            else:
                perturb(ENCODERS[kind][0]()).save_pretrained(made[kind])
        return made[kind]

    return folder_of


def sliced(folder: Path, cuts: Sequence[int], select_layer: int, dtype: torch.dtype, **options) -> list[VisionTower]:
    return [load_vision(str(folder), select_layer, dtype, blocks=blocks, **options) for blocks in pairwise(cuts)]


@pytest.mark.parametrize(
    "kind", [*EVERY_DAY, *(pytest.param(kind, marks=nightly) for kind in (*TIMM, *ENCODERS) if kind not in EVERY_DAY)]
)
def test_slices_are_the_whole_encoder_to_the_bit(encoder, kind):
    folder, pixels = encoder(kind), images(28)
    norms = (False,) if kind.startswith("clip") and kind not in TIMM else (False, True)
    for dtype, final_norm in [(dtype, norm) for dtype in (torch.float32, torch.bfloat16) for norm in norms]:
        select_layer = -1 if final_norm else -2
        depth = DEPTH + 1 + select_layer
        whole = load_vision(str(folder), select_layer, dtype, final_norm=final_norm)
        expected = whole(pixels)
        assert whole.is_whole and whole.depth == depth and expected.shape == (3, *whole.feature_shape)
        for cuts in ((0, 0, depth), (0, 1, depth), (0, 0, 2, depth), tuple(range(depth + 1))):
            x = pixels
            for part in sliced(folder, cuts, select_layer, dtype, final_norm=final_norm):
                assert x is pixels or x.shape == (3, *part.hidden_shape)
                x = part.in_groups(x)
                assert x.dtype == part.dtype == dtype and x.is_contiguous()
                assert not any(parameter.requires_grad for parameter in part.parameters())
            assert torch.equal(x, expected), (cuts, dtype, final_norm)
