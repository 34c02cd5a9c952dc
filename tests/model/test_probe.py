"""The probe accepts what is right and catches what is wrong, also faults that raise no error
anywhere.
"""

import copy
import tempfile
from collections.abc import Callable

import pytest
import torch
from json_files import read_json
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.model import probe as probing
from mmtrain.model.llm import language, parity
from mmtrain.model.llm.attention import ATTENTION
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.language import DecoderLayers, slice_of
from mmtrain.model.llm.parity import Differences
from mmtrain.model.llm.tiny import draw_scales
from mmtrain.model.probe import probe, refuse_differences


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # where the logs of refused models stay


@pytest.fixture
def judge(monkeypatch):
    """Tries a family with another maker of slices, or another attention."""

    def judge(config: PreTrainedConfig, slicer=slice_of, attention: str = ATTENTION) -> Differences:
        monkeypatch.setattr(parity, "slice_of", slicer)
        for module in (parity, language):
            monkeypatch.setattr(module, "ATTENTION", attention)
        differences = parity.measure_differences(config, (2, 4))
        refuse_differences(config.model_type, differences.staged, differences.packed)
        return differences

    return judge


GRANITE = {"num_hidden_layers": 6, "embedding_multiplier": 12.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("granite", GRANITE),
        ("gemma3_text", {"num_hidden_layers": 6}),
        ("gpt_oss", {"num_hidden_layers": 6}),
    ],
)
def test_right_slices_differ_by_nothing_and_right_packing_by_rounding(family, options, judge):
    differences = judge(CONFIG_MAPPING[family](**options))
    assert differences.staged == 0
    assert differences.packed < 2e-5


class CutList(nn.Module):
    """A stage as one would first write it: the decoder layers of the slice are the whole list of a
    shorter model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        first: int,
        last: int,
        *,
        embedding: bool,
        head: bool,
        streamed: None,
    ):
        super().__init__()
        part = copy.deepcopy(model)
        part.model.layers = part.model.layers[first:last]
        part.config.num_hidden_layers = last - first
        if not head:
            part.model.norm = nn.Identity()
        part.set_attn_implementation(ATTENTION)
        self.whole = DecoderLayers(part, 0, last - first, embedding=True, head=True)
        self.embed, self.logits = self.whole.embed, self.whole.logits

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.whole(hidden, position_ids)


@pytest.mark.parametrize(
    ("family", "options"), [("granite", GRANITE), ("gemma3_text", {"num_hidden_layers": 8})]
)
def test_a_cut_layer_list_is_caught(family, options, judge):
    with pytest.raises(UserError, match=f"{family} cannot be cut into stages"):
        judge(CONFIG_MAPPING[family](**options), slicer=CutList)


def test_a_mask_that_does_not_isolate_documents_is_caught(judge):
    # transformers' own packing: gpt_oss does not hand its position_ids to its masks
    with pytest.raises(UserError, match="gpt_oss cannot be packed"):
        judge(CONFIG_MAPPING["gpt_oss"](num_hidden_layers=6), attention="eager")


def with_rounded_frequencies(*arguments, **options) -> DecoderLayers:
    part = slice_of(*arguments, **options)
    rotary = part.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()  # what .to(torch.bfloat16) does to a slice
    return part


def without_the_last_layer(model, first, last, **options) -> DecoderLayers:
    part = slice_of(model, first, last, **options)
    layers = decoder_layers(part.model)
    layers[last - 1].forward = lambda hidden_states, *_, **__: hidden_states
    return part


def with_half_of_the_gradient(*arguments, **options) -> DecoderLayers:
    part = slice_of(*arguments, **options)
    forward = part.forward
    part.forward = lambda hidden, positions: forward(
        hidden.detach() + 0.5 * (hidden - hidden.detach()), positions
    )
    return part


@pytest.mark.parametrize(
    "slicer", [with_rounded_frequencies, without_the_last_layer, with_half_of_the_gradient]
)
def test_a_wrong_slice_is_caught(slicer: Callable[..., DecoderLayers], judge):
    with pytest.raises(UserError, match="llama cannot be cut into stages"):
        judge(CONFIG_MAPPING["llama"](num_hidden_layers=6), slicer=slicer)


def without_the_scale_of_tokens(*arguments, **options) -> DecoderLayers:
    part = slice_of(*arguments, **options)
    part.embed = lambda ids: part.model.get_input_embeddings()(ids)
    return part


def without_the_scale_of_logits(*arguments, **options) -> DecoderLayers:
    part = slice_of(*arguments, **options)
    part.logits = lambda rows: part.model.get_output_embeddings()(rows)
    return part


@pytest.mark.parametrize(
    ("family", "slicer"),
    [("falcon_h1", without_the_scale_of_tokens), ("granite", without_the_scale_of_logits)],
)
def test_a_scale_that_a_slice_leaves_out_is_caught_though_the_model_has_it_at_1(
    family, slicer, judge
):
    with pytest.raises(UserError, match=f"{family} cannot be cut into stages"):
        judge(CONFIG_MAPPING[family](num_hidden_layers=6), slicer=slicer)


def test_the_probe_draws_scales_and_caps_and_leaves_counts_widths_and_bounds_alone():
    config = CONFIG_MAPPING["falcon_h1"](num_hidden_layers=6)
    before, after = config.to_dict(), draw_scales(config, 0).to_dict()
    changed = {key for key, value in after.items() if value != before[key]}
    scales = {key for key in before if "multiplier" in key}
    assert changed == scales and len(scales) == 9
    gates = zip(before["ssm_multipliers"], after["ssm_multipliers"], strict=True)
    assert all(0.6 <= drawn / value <= 0.9 for value, drawn in gates)
    # config.json gives these as whole numbers
    minimax = draw_scales(CONFIG_MAPPING["minimax"](), 0)
    assert 0.6 <= minimax.full_attn_alpha_factor <= 0.9


def test_a_difference_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="nan"):
        refuse_differences("llama", float("nan"), 0.0)
    with pytest.raises(UserError, match="nan"):
        refuse_differences("llama", 0.0, float("nan"))


def write_config(folder, family: str, **options) -> str:
    CONFIG_MAPPING[family](**options).save_pretrained(folder)
    return str(folder)


def records() -> list[dict]:
    return [read_json(file) for file in sorted(cache_folder("probe").glob("*.json"))]


@pytest.mark.nightly
def test_a_70b_config_passes_at_full_depth_and_is_remembered(tmp_path, monkeypatch):
    path = write_config(
        tmp_path,
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    probe(path, (20, 40, 60))
    (record,) = records()
    assert record["staged"] == 0
    assert record["packed"] < 2e-5
    monkeypatch.setattr(probing, "SECONDS", 0)
    probe(path, (20, 40, 60))  # no time to try it again
    with pytest.raises(UserError, match="did not finish"):
        probe(path, (21, 40, 60))  # another cut is another question
    assert len(records()) == 1


@pytest.mark.nightly
def test_a_family_whose_code_fails_is_refused_with_the_cause_and_not_remembered(tmp_path):
    # its attention computes with the mask
    path = write_config(tmp_path, "doge", num_hidden_layers=4)
    with pytest.raises(
        UserError, match=r"doge cannot be staged and packed.*AttributeError: 'Documents'"
    ):
        probe(path, (2,))
    assert records() == []


@pytest.mark.nightly
@pytest.mark.slow
def test_a_family_with_parameters_that_every_stage_needs_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"^xglm cannot be staged: every stage would need its model\.layer_norm$"
    ):
        probe(write_config(tmp_path, "xglm", num_layers=4), (2,))


def test_a_family_that_cannot_be_made_small_is_refused_before_memory_runs_out(tmp_path):
    with pytest.raises(
        UserError, match=r"intermediate_size \[16384, .*; needed is one number for all layers"
    ):
        probe(write_config(tmp_path, "gemma3n_text"), (10,))


def test_a_child_is_not_mistaken_by_what_a_library_prints(tmp_path, monkeypatch):
    (tmp_path / "chatty.py").write_text(
        "print('stray'); print('\\ndifferences 0.0 1e-06'); print('a last word')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(probing, "__name__", "chatty")
    probe(write_config(tmp_path, "llama"), (2,))
    assert [(record["staged"], record["packed"]) for record in records()] == [(0.0, 1e-06)]
