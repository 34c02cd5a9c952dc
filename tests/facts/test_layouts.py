"""How many positions an image takes, and which grids a factor does not divide."""

import re

import pytest

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.models import models_of
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.registry import LAYOUTS

SIGLIP = "google/siglip-so400m-patch14-384"  # 27 x 27 patches
SIGLIP2 = "google/siglip2-so400m-patch16-512"  # 32 x 32
CLIP = "openai/clip-vit-large-patch14-336"  # 24 x 24, and a class token


def config(vision: str, **projector: object) -> RunConfig:
    model = {"llm": {"path": "none"}, "vision": {"name": vision}, "projector": projector}
    rest = {
        "run": {"name": "x"},
        "data": {"shards": "x.tar"},
        "train": {"packs_per_step": 1, "max_steps": 1},
    }
    return RunConfig.model_validate({"model": model, **rest})


@pytest.mark.parametrize(
    ("vision", "projector", "positions"),
    [
        (CLIP, {}, 576),
        (SIGLIP, {"type": "linear"}, 729),
        (SIGLIP, {"type": "shuffle_swiglu", "factor": 3}, 81),
        (SIGLIP2, {"type": "shuffle_linear", "factor": 4}, 64),
        (SIGLIP2, {"type": "shuffle_mlp2x_gelu"}, 256),  # 2 where nothing is said
        (CLIP, {"type": "mlp2x_gelu_pool", "factor": 3}, 64),
    ],
)
def test_an_image_of_any_size_takes_a_square_of_positions(vision, projector, positions):
    layout = models_of(config(vision, **projector)).layout
    assert (layout.name, layout.positions_per_tile) == ("square", positions)
    assert layout.tiling(640, 480).positions == layout.tiling(1, 2000).positions == positions


@pytest.mark.parametrize("factor", [2, 4])
def test_a_grid_that_does_not_divide_is_refused_with_the_factors_that_would(factor):
    with pytest.raises(UserError) as caught:
        _ = models_of(config(SIGLIP, type="shuffle_swiglu", factor=factor)).layout
    assert str(caught.value) == (
        f"model.projector.factor: {factor} does not divide the grid of {SIGLIP}, 27 x 27 patches "
        "(384 pixels in "
        "patches of 14). Set model.projector.factor=3"
    )


@pytest.mark.parametrize("pinpoint", [(384, 700), (384 * 11, 384 * 10)])
def test_grids_of_other_tiles_and_of_too_many_are_refused(pinpoint):
    chosen = config(SIGLIP)
    chosen = chosen.changed(
        {"model.vision.layout": "anyres", "model.vision.pinpoints": (pinpoint,)}
    )
    with pytest.raises(
        UserError, match=re.escape(f"{list(pinpoint)} is no grid of up to 100 tiles of 384 x 384")
    ):
        _ = models_of(chosen).layout


def test_texts_around_images_change_the_fingerprint_of_text_lengths_and_no_text_does_not():
    folder = model_folder("demo:llm")
    texts = {name: layout(4, 384).texts for name, layout in LAYOUTS.items()}
    fingerprints = {
        name: text_fingerprint(folder, "chat", around) for name, around in texts.items()
    }
    assert fingerprints["square"] == fingerprints["anyres"] == text_fingerprint(folder, "chat")
    # one, and those of idefics3, tiles, qwen_vl, glm_v, paddleocr_vl
    assert len(set(fingerprints.values())) == 6
