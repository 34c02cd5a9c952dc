"""Stages made by a plan: each opens its own tensors, together they hold every layer once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from scenes import IMAGE_SIZE, WIDTH, as_batch, make_config, make_document, save_parts
from torch import nn

from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.images import image_transform
from mmtrain.facts.families import canonical_name
from mmtrain.facts.models import models_of
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.stage import build_stage, fuse, set_trainable
from mmtrain.plan.planner import make_plan


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_opens_the_tensors_of_its_planned_layers_alone(tmp_path, tied, opened):
    save_parts(tmp_path, tied=tied)
    plan = make_plan(make_config(tmp_path, parallel__pipeline=4))
    with safe_open(tmp_path / "llm" / "model.safetensors", "pt") as file:
        on_disk = {name: canonical_name(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    opened_by_all: list[str] = []
    for rank in plan.ranks:
        (stage,) = rank.stages
        opened.clear()
        module = build_stage(make_config(tmp_path), stage)
        expected = set()
        for name in on_disk.values():
            layer = (
                name.rsplit(".", 1)[0]
                if not name.startswith("llm.layers.")
                else ".".join(name.split(".")[:3])
            )
            at_front, at_head = (
                {"llm.embedding"},
                {"llm.norm", "llm.head"} | ({"llm.embedding"} if tied else set()),
            )
            if (
                layer in stage.layers
                or (stage.front and layer in at_front)
                or (stage.head and layer in at_head)
            ):
                expected.add(name)
        assert {on_disk[name] for name in opened} == expected
        opened_by_all += opened
        held = {name for name, _ in module.global_parameters()}
        assert any(name.startswith("vision.") for name in held) == (rank.pipeline == 0)
    shared = ["model.embed_tokens.weight"] if tied else []
    assert sorted(opened_by_all) == sorted([*on_disk, *shared]), (
        "all tensors once; a tied matrix at both ends"
    )


def test_the_projector_stays_in_float32_between_bfloat16_parts(parts):
    config = make_config(parts, model__llm__dtype="bfloat16")
    (rank,) = make_plan(config).ranks
    module = build_stage(config, rank.stages[0])
    kinds = {name: p.dtype for name, p in module.global_parameters()}
    assert {kinds[name] for name in kinds if name.startswith("projector.")} == {torch.float32}
    assert {kinds[name] for name in kinds if not name.startswith("projector.")} == {torch.bfloat16}
    assert not any(part.training for part in module.modules())
    assert [name for name, p in module.global_parameters() if p.requires_grad] == list(
        rank.trainable_names
    )


def front_of(parts, trainable):
    config = make_config(parts, model__trainable=trainable)
    return build_stage(config, make_plan(config).ranks[0].stages[0])


def gradients_of(module, hidden):
    hidden.square().sum().backward()
    gradients = {name: p.grad for name, p in module.global_parameters() if p.requires_grad}
    module.zero_grad()
    return gradients


@pytest.mark.parametrize("trainable", [("projector",), ("projector", "vision")])
@pytest.mark.parametrize("images", [0, 2])
def test_prefetched_features_change_no_bit_of_the_first_stages_output_and_gradients(
    parts, trainable, images
):
    module = front_of(parts, trainable)
    batch = as_batch([[make_document(0, images=images), make_document(1, images=images // 2)]], 64)
    features = module.encode(batch)
    assert module.encoder_is_frozen == (trainable == ("projector",))
    assert (features is None) == (images == 0 and module.encoder_is_frozen)
    assert features is None or features.requires_grad != module.encoder_is_frozen
    at_once, prefetched = module.start(batch), module.start(batch, features)
    assert torch.equal(at_once, prefetched)
    expected, found = gradients_of(module, at_once), gradients_of(module, prefetched)
    assert expected and all(
        torch.equal(found[name], gradient) for name, gradient in expected.items()
    )


PINPOINTS = ((16, 32), (32, 16), (80, 48))  # the last has more positions than 9 tiles


@pytest.fixture(scope="module")
def cut(parts):
    """A stage of layout anyres_max_9 for what trains, and a micro-batch of 3 + 16 + 3 + 1 + 1 tiles
    in two packs.
    """

    def make(*trainable):
        vision = {"name": str(parts / "vision"), "layout": "anyres_max_9", "pinpoints": PINPOINTS}
        config = make_config(
            parts, model__trainable=trainable, model__vision=vision, data__pack_length=512
        )
        layout = models_of(config).layout
        ones = [
            make_document(n, tilings=(layout.tiling(*size),))
            for n, size in enumerate([(30, 12), (45, 75), (9, 30)])
        ]
        two = make_document(3, tilings=(layout.tiling(30, 12, 2), layout.tiling(9, 30, 2)))
        batch = as_batch([[ones[0], make_document(4, images=0), ones[1]], [two, ones[2]]], 512)
        assert [tiling.tiles for tiling in batch.tilings] == [3, 16, 1, 1, 3]
        return build_stage(config, make_plan(config).ranks[0].stages[0]), batch

    return make


@pytest.mark.parametrize(
    "trainable", [("projector",), ("projector.linear_*",), ("projector", "vision")]
)
def test_tiles_encoded_in_groups_or_ahead_give_the_same_output_and_gradients(
    cut, monkeypatch, trainable
):
    module, batch = cut(*trainable)
    results = []
    for per_call, ahead in ((1000, False), (1, False), (5, False), (1000, True)):
        monkeypatch.setattr(
            "mmtrain.model.encoder.vision_tower.tiles_per_call", lambda patches, most=per_call: most
        )
        hidden = module.start(batch, module.encode(batch) if ahead else None)
        results.append((hidden.detach(), gradients_of(module, hidden)))
    (hidden, gradients), *others = results
    assert ("projector.image_newline" in gradients) == (trainable != ("projector.linear_*",))
    assert gradients["projector.linear_1.weight"].any()
    for found, theirs in others:
        torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)
        assert theirs.keys() == gradients.keys()
        largest = max(gradient.abs().max() for gradient in gradients.values())
        for name, gradient in theirs.items():
            torch.testing.assert_close(
                gradient, gradients[name], rtol=1e-5, atol=float(1e-6 * largest)
            )


@pytest.mark.parametrize("trainable", [("projector",), ("projector", "vision")])
def test_without_an_image_the_newline_has_a_gradient_of_zeros(cut, trainable):
    module, _ = cut(*trainable)
    hidden = module.start(as_batch([[make_document(0, images=0)]], 512))
    gradients = gradients_of(module, hidden)
    assert gradients["projector.image_newline"].shape == (64,)
    assert not any(gradient.any() for gradient in gradients.values() if gradient is not None)


def test_uint8_images_are_normalised_where_the_encoder_runs(parts):
    module = front_of(parts, ("projector",))
    batch = as_batch([[make_document(0, images=2)]], 64)
    pixels = torch.randint(
        256, (2, 3, IMAGE_SIZE, IMAGE_SIZE), generator=torch.Generator().manual_seed(0)
    )
    stored = replace(batch, tiles=pixels.to(torch.uint8))
    normalised = replace(
        batch, tiles=image_transform(str(parts / "vision")).normalise(stored.tiles)
    )
    assert torch.equal(module.start(stored), module.start(normalised))
    assert not torch.equal(module.start(stored), module.start(batch))


def test_the_last_stage_runs_its_last_layer_for_supervised_tokens_alone(parts):
    config = make_config(parts, parallel__pipeline=2)
    first, last = (build_stage(config, rank.stages[0]) for rank in make_plan(config).ranks)
    seen = {}
    for module, name in ((first, "first"), (last, "last")):
        layer = decoder_layers(module.language.model)[module.language.last - 1]
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0].numel() // WIDTH})
        )
    batch = as_batch([[make_document(0), make_document(1, images=2)], [make_document(2)]], 64)
    supervised = int((batch.labels != IGNORE).sum())
    assert 0 < supervised < batch.tokens
    loss, tokens = last.loss(
        first(first.start(batch), batch.position_ids), batch.position_ids, batch.labels
    )
    assert tokens == supervised and loss.requires_grad
    assert seen == {"first": batch.labels.numel(), "last": supervised}


def test_only_what_matches_trains_stored_as_it_was():
    model = {
        name: nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        for name in (
            "projector.linear_1.weight",
            "llm.layers.1.mlp.up_proj.weight",
            "llm.layers.10.mlp.up_proj.weight",
        )
    }
    set_trainable(model.items(), ("llm.layers.1",))
    assert [p.requires_grad for p in model.values()] == [False, True, False], (
        "layer 1 is not layer 10"
    )
    assert all(p.dtype == torch.bfloat16 for p in model.values())


def places(positions: list[list[bool]]) -> torch.Tensor:
    return torch.tensor(positions).flatten().nonzero().squeeze(1)


def test_images_fill_their_positions_in_row_major_order_and_get_their_gradients():
    positions = [[False, True, True, False], [True, False, False, True]]
    images = torch.arange(1.0, 13.0).view(4, 3).requires_grad_()
    fused = fuse(torch.zeros(2, 4, 3), places(positions), images)
    assert fused[0, 1].tolist() == [1, 2, 3] and fused[0, 2].tolist() == [4, 5, 6]
    assert fused[1, 0].tolist() == [7, 8, 9] and fused[1, 3].tolist() == [10, 11, 12]
    assert not fused[~torch.tensor(positions)].any()
    (fused * torch.arange(24.0).view(2, 4, 3)).sum().backward()
    assert images.grad.tolist() == [[3, 4, 5], [6, 7, 8], [12, 13, 14], [21, 22, 23]]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_count_mismatch_raises_with_both_numbers(count):
    images = torch.ones(count, 3) if count else None
    with pytest.raises(ValueError, match=f"2 image positions .* {count} image embeddings"):
        fuse(torch.zeros(1, 4, 3), places([[True, True, False, False]]), images)
    assert fuse(torch.ones(1, 2, 3), places([[False, False]]), None).all()
