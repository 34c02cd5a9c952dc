"""Recurrent mixers keep the documents of a pack apart, in any order of micro-batches, and their
kernels are tried.
"""

from __future__ import annotations

import pytest
import torch
from families import HYBRIDS
from torch import nn
from transformers import CONFIG_MAPPING

from mmtrain.model.llm.attention import NoPadding
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.kernels import Backend
from mmtrain.model.llm.language import slice_of
from mmtrain.model.llm.mixers import ByDocument, Sequences, mixers_of, running_on
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.model.probe import probe

FAMILIES = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}


def positions_of(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


class Shift(nn.Module):
    """A mixer that adds the token before to each token, if `kernel` gives it the borders of
    documents without those.
    """

    def __init__(self, kernel: str = "") -> None:
        super().__init__()
        self.kernel, self.calls = kernel, 0

    def forward(self, hidden_states, cache_params=None, seq_idx=None, cu_seq_lens_q=None):
        self.calls += 1
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        if seq_idx is not None and self.kernel == "missing":
            raise ValueError("it can't keep packed sequences apart without `fla`.\nInstall `fla`")
        if seq_idx is not None and self.kernel == "right":
            before = (
                before
                * (torch.nn.functional.pad(seq_idx, (1, 0), value=-1)[:, :-1] == seq_idx)[..., None]
            )
        return hidden_states + before


def test_mixers_are_found_by_their_code_and_attention_is_not_one():
    kinds = []
    for family, changes in FAMILIES.items():
        layers = decoder_layers(
            tiny_model(CONFIG_MAPPING[family](num_hidden_layers=2, **changes), 0)
        )
        kinds += [[type(mixer).__name__ for mixer in mixers_of(layer)] for layer in layers]
    assert kinds == [
        ["Qwen3_5GatedDeltaNet"],
        [],
        ["GraniteMoeHybridMambaLayer"],
        [],
        ["Lfm2ShortConv"],
        [],
    ]
    for layer in decoder_layers(tiny_model(CONFIG_MAPPING["llama"](num_hidden_layers=2), 0)):
        assert mixers_of(layer) == []


@pytest.mark.parametrize(
    ("rows", "calls"),
    [([(5,)], 1), ([(3, 2), (4, 1)], 4), ([(2, 2), (2, 2)], 1), ([(3, 1, 3, 1)], 2)],
)
def test_documents_of_one_length_run_in_one_call_and_none_sees_another(rows, calls):
    mixer, positions = Shift(), positions_of(*rows)
    hidden = torch.randn(*positions.shape, 4, requires_grad=True)
    with running_on(Sequences.of_positions(positions, "cpu")):
        result = ByDocument(mixer)(hidden_states=hidden)
    assert mixer.calls == calls
    by_hand = [
        Shift()(document[None])[0]
        for row, lengths in zip(hidden, rows, strict=True)
        for document in row.split(lengths)
    ]
    torch.testing.assert_close(result, torch.cat(by_hand).view_as(hidden), rtol=0, atol=0)
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), hidden)[0] for x in (result, torch.cat(by_hand))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("right", None),
        ("missing", "it can't keep packed sequences apart without `fla`."),
        ("wrong", "mix documents"),
    ],
)
def test_kernels_are_used_only_where_they_give_what_the_loop_gives(kernel, reason):
    found = ByDocument(Shift(kernel)).reason_against_kernels(torch.zeros(1, 8, 16))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("family", "words"), [("minimax", "this layer needs more"), ("jamba", ""), ("qwen3_5_text", "")]
)
def test_mixers_whose_kernels_cannot_be_tried_run_document_by_document(family, words):
    model = tiny_model(CONFIG_MAPPING[family](num_hidden_layers=6, **HYBRIDS[family]), 0)
    (mixer,) = next(filter(None, map(mixers_of, decoder_layers(model))))
    reason = ByDocument(mixer).reason_against_kernels(torch.zeros(1, 8, 64))
    assert reason and words in reason


def test_a_choice_of_kernels_outlives_another_choice_of_layers_to_recompute():
    part = slice_of(
        tiny_model(CONFIG_MAPPING["lfm2"](num_hidden_layers=2, **FAMILIES["lfm2"]), 0),
        0,
        2,
        embedding=True,
        head=False,
    )
    (mixer,) = mixers_of(decoder_layers(part.model)[0])
    before = mixer.forward
    part.recompute(2)
    assert mixer.forward is before, (
        "else calibrating would compare kernels inside a recomputed layer"
    )


def test_a_kernel_with_borders_is_one_call_for_all_rows():
    mixer, positions = Shift("right"), positions_of((3, 2), (4, 1))
    hidden = torch.randn(2, 5, 4)
    with running_on(Sequences.of_positions(positions, "cpu")):
        expected = ByDocument(Shift())(hidden)
        in_one_call = ByDocument(mixer)
        # which only a GPU gets
        in_one_call._backend = Backend("recurrent layers", "library", None, slow=False)
        assert torch.equal(in_one_call(hidden), expected) and mixer.calls == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_sees_the_documents_of_its_own_micro_batch(family):
    model = tiny_model(CONFIG_MAPPING[family](num_hidden_layers=2, **FAMILIES[family]), 0)
    batches = [positions_of((5, 9)), positions_of((7, 3, 4))]
    inputs = [torch.randn(1, 14, 64) for _ in batches]

    def gradients(recomputed: int) -> list[torch.Tensor]:
        part = slice_of(model, 0, 2, embedding=True, head=False)
        part.recompute(recomputed)
        leaves = [hidden.clone().requires_grad_() for hidden in inputs]
        results = [part(leaf, positions) for leaf, positions in zip(leaves, batches, strict=True)]
        for result in results:  # each backward behind both forwards, as in a pipeline
            result.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for plain, recomputed in zip(gradients(0), gradients(2), strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_documents_the_stock_mixer_leaks_by_far_more_than_rounding(family):
    model = tiny_model(CONFIG_MAPPING[family](num_hidden_layers=2, **FAMILIES[family]), 0)
    part, positions = slice_of(model, 0, 2, embedding=True, head=False), positions_of((5, 9))
    hidden = torch.randn(1, 14, 64)
    with torch.no_grad():
        ours = part(hidden, positions)
        for mixer in mixers_of(decoder_layers(part.model)[0]):
            del mixer.forward
        assert (part(hidden, positions) - ours).abs().max() > 1e-2 * ours.abs().max()


def test_a_mask_of_true_answers_on_the_host_and_stays_a_plain_mask_to_all_else():
    mask = torch.ones(2, 3, dtype=torch.bool).as_subclass(NoPadding)
    # nothing can be read of it
    meta = torch.ones(2, 3, dtype=torch.bool, device="meta").as_subclass(NoPadding)
    for answer in (
        torch.all(meta == 1),
        meta.all(),
        torch.all(meta[:, -2:].contiguous() == 1),
        meta.to("meta").view(1, -1).all(),
    ):
        assert bool(answer)
    assert type(mask == 0) is torch.Tensor and not (mask == 0).any()
    assert type(mask.cumsum(1)) is torch.Tensor and type(torch.zeros(2, 3) + mask) is torch.Tensor


def test_the_probe_computes_without_libraries_that_need_a_gpu(tmp_path, monkeypatch):
    for name in ("fla", "causal_conv1d"):
        (tmp_path / f"{name}.py").write_text(
            "def kernel(*_, **__):\n    raise RuntimeError('a pointer of the CPU')\n"
            "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = kernel\n"
            "causal_conv1d_fn = causal_conv1d_update = kernel\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    CONFIG_MAPPING["qwen3_5_text"](num_hidden_layers=2, **FAMILIES["qwen3_5_text"]).save_pretrained(
        tmp_path / "llm"
    )
    probe(str(tmp_path / "llm"), (1,))
