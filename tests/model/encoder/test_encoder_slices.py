"""An encoder cut into slices: equal to the whole one to the bit, and each reads and keeps its own
blocks alone.
"""

import contextlib
import json
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from json_files import read_json
from safetensors.torch import load_file
from scenes import as_batch, images, make_config, make_document, perturb
from stock_encoders import ENCODERS, TEXT
from sweeps import sweep
from transformers import PerceptionLMConfig, PerceptionLMForConditionalGeneration
from untrained_runs import make_tower

from mmtrain.base.errors import EncoderSliceError, UserError
from mmtrain.facts.encoders import ENCODER_BLOCK
from mmtrain.facts.models import models_of
from mmtrain.model import probe
from mmtrain.model.encoder import vision
from mmtrain.model.encoder.vision import load_vision, made_up_encoder
from mmtrain.model.encoder.vision_tower import VisionTower, slices_difference
from mmtrain.model.llm.bookends import Bookend
from mmtrain.model.probe import probe_encoder
from mmtrain.model.stage import build_stage
from mmtrain.model.weights.files import open_tensors
from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.plan.planner import make_plan

pytestmark = pytest.mark.slow

DEPTH = 4
# Kinds of timm ViTs that differ in what stands around and between blocks.
TIMM = {
    "vit_timm": "vit_tiny_patch16_224",
    "siglip_timm": "vit_so400m_patch14_siglip_384",
    "clip_timm": "vit_large_patch14_clip_quickgelu_336",
    "eva02": "eva02_tiny_patch14_224",
    "dinov3_timm": "vit_small_patch16_dinov3",
    "pe": "vit_pe_core_tiny_patch16_384",
    "intern300m": "vit_intern300m_patch14_448",
    "dinov2_timm": "vit_small_patch14_reg4_dinov2",
    "beit": "beitv2_base_patch16_224",
}
EVERY_DAY = ("internvl", "pickled_clip")
MADE_UP_DAILY = (TIMM["dinov3_timm"], "siglip")
# A timm ViT in a whole model of transformers.
SIZES = {
    "img_size": 28,
    "patch_size": 7,
    "embed_dim": 32,
    "depth": DEPTH,
    "num_heads": 2,
    "global_pool": "",
}
WRAPPED = {"model_type": "timm_wrapper", "architecture": TIMM["vit_timm"], "model_args": SIZES}
LLM = {"model_type": "llama", "head_dim": 8, **TEXT}


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
            elif kind == "wrapped_timm":
                whole = PerceptionLMForConditionalGeneration(
                    PerceptionLMConfig(vision_config=WRAPPED, text_config=LLM)
                )
                perturb(whole).save_pretrained(made[kind])
            else:
                perturb(ENCODERS[kind.removeprefix("pickled_")][0]()).save_pretrained(made[kind])
            if kind.startswith("pickled_"):
                weights = made[kind] / "model.safetensors"
                torch.save(load_file(weights), made[kind] / "pytorch_model.bin")
                weights.unlink()
        return made[kind]

    return folder_of


def sliced(
    folder: Path, cuts: Sequence[int], select_layer: int, dtype: torch.dtype, **options
) -> list[VisionTower]:
    return [
        load_vision(str(folder), select_layer, dtype, blocks=blocks, **options)
        for blocks in pairwise(cuts)
    ]


@pytest.mark.parametrize(
    "kind", sweep((*TIMM, *ENCODERS, "wrapped_timm", "pickled_clip"), EVERY_DAY)
)
def test_slices_are_the_whole_encoder_to_the_bit(encoder, kind):
    folder, pixels = encoder(kind), images(28)
    norms = (False,) if kind in ("clip", "clip_vision", "pickled_clip") else (False, True)
    for dtype, final_norm in [
        (dtype, norm) for dtype in (torch.float32, torch.bfloat16) for norm in norms
    ]:
        select_layer = -1 if final_norm else -2
        depth = DEPTH + 1 + select_layer
        whole = load_vision(str(folder), select_layer, dtype, final_norm=final_norm)
        expected = whole(pixels)
        assert (
            whole.is_whole and whole.depth == depth and expected.shape == (3, *whole.feature_shape)
        )
        for cuts in ((0, 0, depth), (0, 1, depth), (0, 0, 2, depth), tuple(range(depth + 1))):
            x = pixels
            for part in sliced(folder, cuts, select_layer, dtype, final_norm=final_norm):
                assert x is pixels or x.shape == (3, *part.hidden_shape)
                x = part.in_groups(x)
                assert x.dtype == part.dtype == dtype and x.is_contiguous()
                assert not any(parameter.requires_grad for parameter in part.parameters())
            assert torch.equal(x, expected), (cuts, dtype, final_norm)


@pytest.mark.parametrize("kind", ["vit_timm", "clip_vision"])
def test_a_slice_keeps_its_own_blocks_and_what_stands_around_all(encoder, kind):
    folder = encoder(kind)
    whole = dict(load_vision(str(folder), -1, torch.float32).global_parameters())
    around = {name for name in whole if not ENCODER_BLOCK.match(name)}
    for part in sliced(folder, (0, 0, 1, DEPTH), -1, torch.float32):
        held = dict(part.global_parameters())
        assert {int(ENCODER_BLOCK.match(name)[1]) for name in held.keys() - around} == set(
            range(*part.blocks)
        )
        assert held.keys() >= around and all(torch.equal(held[name], whole[name]) for name in held)
        assert not part.is_whole


@pytest.mark.parametrize("kind", ["internvl", "vit_classifier", "dinov3", "wrapped_timm"])
def test_weights_of_absent_blocks_are_never_opened(encoder, kind, monkeypatch):
    opened = set()

    def watched(places):
        opened.update(places)
        return open_tensors(places)

    monkeypatch.setattr(vision, "open_tensors", watched)
    load_vision(str(encoder(kind)), -2, torch.float32, blocks=(1, 2))
    blocks = {int(found[1]) for name in opened if (found := ENCODER_BLOCK.match(f"vision.{name}"))}
    assert blocks == {1}


@pytest.mark.parametrize("blocks", [None, (0, 1), (1, DEPTH)])
def test_every_slice_refuses_an_encoder_that_its_folder_has_fewer_blocks_of(tmp_path, blocks):
    """config.json says no depth, and the architecture's is 12."""
    text_config = LLM | {"vocab_size": 8000}  # as many numbers as all 12 would have
    whole = PerceptionLMForConditionalGeneration(
        PerceptionLMConfig(vision_config=WRAPPED, text_config=text_config)
    )
    whole.save_pretrained(tmp_path)
    content = read_json(tmp_path / "config.json")
    del content["vision_config"]["model_args"]["depth"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacks .* of the encoder's tensors"):
        load_vision(str(tmp_path), -1, torch.float32, blocks=blocks)


def test_a_slice_keeps_nothing_of_what_it_was_given(encoder):
    part = load_vision(str(encoder("vit")), -1, torch.float32).slice_of(1, 2)
    stock = part.features

    def failing(model, images):
        stock(model, images)
        raise ArithmeticError

    for features in (stock, failing):
        part.features = features
        hidden = torch.randn(2, *part.hidden_shape)
        given = weakref.ref(hidden)
        with contextlib.suppress(ArithmeticError):
            part(hidden)
        del hidden
        assert given() is None
        assert not any(
            isinstance(block, Bookend) and block.handed_out is not None for block in part.modules()
        )


def in_slices(config, cuts) -> list:
    """The stages of a pipeline whose ranks hold slices of the encoder with borders `cuts`."""
    (rank,) = make_plan(config).ranks
    (whole,) = rank.stages
    stages = []
    for number, blocks in enumerate(pairwise(cuts)):
        first, last = (number, number + 1) if blocks[1] < cuts[-1] else (number, whole.last)
        stage = replace(
            whole, stage=number, first=first, last=last, front=number == 0, encoder=blocks
        )
        stages.append(build_stage(config, replace(stage, head=last == whole.last and number > 0)))
    return stages


def test_stages_with_slices_make_the_features_of_the_whole_encoder_and_have_its_fingerprint(
    parts, monkeypatch
):
    config = make_config(parts)
    (rank,) = make_plan(config).ranks
    whole = build_stage(config, rank.stages[0])
    batch = as_batch([[make_document(0, images=5)]], 128)
    monkeypatch.setattr("mmtrain.model.encoder.vision_tower.tiles_per_call", lambda patches: 2)
    expected = whole.encode(batch)
    fingerprints = {
        name: fingerprint(p) for name, p in whole.global_parameters() if name.startswith("vision.")
    }
    depth = whole.vision.depth
    for cuts in ((0, 0, depth), (0, 1, depth)):
        stages = in_slices(config, cuts)
        hidden = stages[0].encode(batch)
        assert hidden.shape == (5, *stages[0].vision.hidden_shape)
        features = stages[1].encode(hidden)
        assert torch.equal(features, expected)
        assert torch.equal(stages[0].start(batch, features), whole.start(batch))
        assert stages[1].encode(None) is None
        assert stages[0].encode(as_batch([[make_document(0, images=0)]], 64)) is None
        held = {
            fingerprint(p)
            for stage in stages
            for name, p in stage.global_parameters()
            if name.startswith("vision.")
        }
        assert held == set(fingerprints.values())


def probed(tmp_path: Path, name: object, **settings) -> None:
    config = make_config(tmp_path, model__vision={"name": str(name), **settings})
    probe_encoder(models_of(config))


@pytest.mark.nightly  # daily, runs in slices begin with it
@pytest.mark.parametrize("kind", ["eva02", "internvit"])
def test_the_probe_passes_what_can_be_sliced_and_remembers_it(
    encoder, tmp_path, monkeypatch, own_cache, kind
):
    probed(tmp_path, encoder(kind))
    (tmp_path / "elsewhere").symlink_to(encoder(kind))
    monkeypatch.setattr(probe, "SECONDS", 0)  # no time to try it again
    probed(tmp_path, tmp_path / "elsewhere")


def test_the_probe_names_encoder_and_remedy(encoder, tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr(probe, "SECONDS", 0)
    with pytest.raises(
        EncoderSliceError, match=r"eva02.*did not finish.*Set parallel\.encoder_ranks=0"
    ):
        probed(tmp_path, encoder("eva02"))


def test_what_is_wrong_with_an_encoder_however_it_is_held_is_no_matter_of_slices(
    encoder, tmp_path, own_cache
):
    folder = shutil.copytree(encoder("vit_timm"), tmp_path / "huge")
    content = read_json(folder / "config.json")
    content["model_args"]["embed_dim"] = 12288
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match="says embed_dim 12288, but no tensor is wider than"
    ) as refused:
        probed(tmp_path, folder)
    assert not isinstance(refused.value, EncoderSliceError) and "encoder_ranks" not in str(
        refused.value
    )


def test_an_encoder_whose_later_blocks_are_of_another_kind_is_refused(
    tmp_path, monkeypatch, own_cache
):
    """ConViT's last two attend to a class token, which comes in before them: its first three tell
    nothing of that.
    """
    monkeypatch.setattr(probe, "SECONDS", 0)
    with pytest.raises(
        EncoderSliceError, match=r"^convit_tiny .*: block 10 is unlike the first 3\. Set"
    ):
        probed(tmp_path, "convit_tiny", select_layer=-1)
    with pytest.raises(EncoderSliceError, match="did not finish"):
        probed(tmp_path, "convit_tiny", select_layer=-3)


def test_an_encoder_that_looks_at_the_pixels_behind_its_blocks_is_found_out(encoder):
    tower = load_vision(str(encoder("vit_timm")), -1, torch.float32)
    pixels, stock = images(28), tower.features
    assert slices_difference(tower, (0, 1, DEPTH), pixels) == 0
    tower.features = lambda model, seen: stock(model, seen) + seen.mean()
    assert slices_difference(tower, (0, 1, DEPTH), pixels) > 1e-3


# What is added to the kinds above: a distilled token, positions that blocks share, a class token
# behind them.
MORE_TIMM = ("deit_tiny_distilled_patch16_224", "vit_srelpos_small_patch16_224", "cait_xxs24_224")


EVERY_MADE_UP = (*TIMM.values(), *MORE_TIMM, *ENCODERS)


@pytest.mark.parametrize("kind", sweep(EVERY_MADE_UP, MADE_UP_DAILY))
def test_slices_of_a_made_up_encoder_differ_by_nothing(encoder, kind):
    name = str(encoder(kind)) if kind in ENCODERS else kind
    tower = made_up_encoder(name, torch.float32, False, probe.BLOCKS)
    assert all(slices_difference(tower, cuts, images(tower.image_size)) == 0 for cuts in probe.CUTS)
