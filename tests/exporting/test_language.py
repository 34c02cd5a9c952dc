"""The LLM in an exported folder: names, rows, settings, and the families that a stock LLaVA cannot
hold.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from chat_styles import STYLES
from json_files import read_json
from PIL import Image
from safetensors.torch import load_file, save_file
from tiers import nightly
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from untrained_runs import (
    compared,
    config_of,
    drawn_adapters,
    export,
    load_stock,
    make_checkpoint,
    make_tower,
    run_export,
    weights,
)
from whole_models import save_whole, whole_config

from mmtrain.api.generate import generate
from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.exporting.hf import refuse_loading_faults, refuse_unfit_family
from mmtrain.exporting.language import language_for_export
from mmtrain.exporting.tensors import in_memory
from mmtrain.exporting.verify import read_samples
from mmtrain.stock.exporters import stock_class

LLAVA = stock_class("llava")
UNFIT = {
    "gemma2": ({}, "logits differ"),
    "cohere2": ({}, "logits differ"),
    "granite": ({"logits_scaling": 8.0}, "logits differ"),
    "gpt2": ({}, "does not fit"),
    "phi": ({}, "head has a bias"),
}


@pytest.mark.parametrize("family", UNFIT)
def test_a_family_that_the_stock_model_would_compute_wrongly_is_refused(
    make_tiny, tmp_path, family
):
    values, why = UNFIT[family]
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2, **values)
    with pytest.raises(UserError, match=f"{why}.*--format safetensors exports any"):
        refuse_unfit_family(LLAVA, tmp_path / "llm")


OTHERS = ("mistral", "glm4", "granite", "smollm3", "olmo2", "starcoder2")


@pytest.mark.parametrize("family", ["qwen3", "gemma", *map(nightly, OTHERS)])
def test_families_that_fit_are_not_refused(make_tiny, tmp_path, family):
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2)
    refuse_unfit_family(LLAVA, tmp_path / "llm")


@pytest.mark.parametrize(
    "keys",
    [
        (),
        nightly(
            (
                *(
                    "model.projector.type=shuffle_linear",
                    "model.vision.layout=idefics3",
                    "data.image_fit=resize",
                ),
                *("model.vision.final_norm=true", "model.vision.select_layer=-1"),
            )
        ),
    ],
    ids=["llava", "idefics3"],
)
def test_an_llm_with_a_cache_of_its_own_answers_in_a_multimodal_class(
    tiny, make_tiny, llm_with, tmp_path, keys
):
    marks = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    made = make_tiny.make_tiny_llm(tmp_path / "llm", "minimax", layers=2)
    llm = llm_with(STYLES["qwen2.5"][0], (*marks, *STYLES["qwen2.5"][1]), source=made)
    vision = make_tower(tmp_path / "vision", "vit_base_patch16_siglip_224", {})
    config = config_of(tiny, f"model.llm.path={llm}", f"model.vision.name={vision}", *keys)
    checkpoint = make_checkpoint(tmp_path / "run", config)
    assert run_export(checkpoint.path, "hf", tmp_path / "out", "--verify", "2") == 0
    picture = Image.new("RGB", (30, 40), "red")
    assert isinstance(generate(tmp_path / "out", picture, max_new_tokens=2), str)


def test_a_tensor_too_many_too_few_or_of_another_shape_is_found_before_anything_is_written(
    checkpoint, tmp_path
):
    export(checkpoint, tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    tensors = {name: in_memory(tensor) for name, tensor in weights(tmp_path / "out").items()}
    refuse_loading_faults(LLAVA, config, tensors)
    norm = "language_model.model.norm.weight"
    with pytest.raises(UserError, match=r"missing_keys: model\.language_model\.norm\.weight"):
        refuse_loading_faults(
            LLAVA, config, {name: source for name, source in tensors.items() if name != norm}
        )
    with pytest.raises(UserError, match=r"unexpected_keys: .*extra"):
        refuse_loading_faults(
            LLAVA, config, {**tensors, "language_model.model.extra": tensors[norm]}
        )
    with pytest.raises(UserError, match=r"mismatched_keys: .*norm"):
        refuse_loading_faults(LLAVA, config, {**tensors, norm: in_memory(torch.ones(3))})


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def without_spare_row(request, tiny, make_tiny, tmp_path_factory):
    """An LLM whose embedding is full, and its export."""
    folder = tmp_path_factory.mktemp("full")
    size = len(make_tiny.make_tokenizer())
    make_tiny.make_tiny_llm(folder / "llm", "llama", layers=2, tied=request.param, vocab_size=size)
    checkpoint = make_checkpoint(
        folder / "run", config_of(tiny, f"model.llm.path={folder / 'llm'}")
    )
    return checkpoint, export(checkpoint, folder / "out"), folder / "out", size, request.param


def test_a_full_embedding_gains_a_row_and_all_else_stays(without_spare_row):
    checkpoint, exported, out, size, tied = without_spare_row
    model = load_stock(out)
    assert model.config.image_token_id == size
    own = AutoModelForCausalLM.from_pretrained(checkpoint.config.model.llm.path)
    for matrix, before in (
        (model.get_input_embeddings().weight, own.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, own.get_output_embeddings().weight),
    ):
        assert torch.equal(matrix[:size], before)
        assert torch.allclose(matrix[size], before.mean(0), atol=1e-6) and len(matrix) == size + 1
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    found = compared(checkpoint, exported, torch.float32, 4)
    assert found.difference <= 1e-4 and found.agreeing == found.tokens
    assert "gained 1" in (out / "README.md").read_text()


TEXT = ("model.vision=null", "data.template=llava_v1", "model.trainable=[llm.layers.1]")
FORMS = {
    "multimodal": ("qwen2", ()),
    "multimodal, adapters beside it": (
        "qwen2",
        ("model.lora.r=2", "model.lora.targets=[llm.layers.0.self_attn]"),
    ),
    "text alone": ("qwen2", TEXT),
    "text alone, by default": ("gemma", TEXT),
    "text alone, one matrix twice": ("qwen2", TEXT),
    "whole": ("qwen2_5_vl", ()),
}


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=pytest.mark.nightly if "adapters" in form else ()) for form in FORMS],
)
def test_an_export_says_that_a_head_is_tied_only_where_it_is_the_embedding(
    tiny, make_tiny, tmp_path, form
):
    family, keys = FORMS[form]
    folder, out = tmp_path / "llm", tmp_path / "out"
    if form == "whole":
        folder.mkdir()
        save_whole(family, folder, make_tiny.make_tokenizer())
        config = whole_config(folder)
    else:
        make_tiny.make_tiny_llm(folder, family, layers=2, tied=True)
        config = config_of(tiny, f"model.llm.path={folder}", *keys)
    content = read_json(folder / "config.json")
    assert content.pop("tie_word_embeddings") is True
    if "default" not in form:
        content["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (
        tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")
    )
    head = embedding.clone() if "twice" in form else embedding.flip(0)
    save_file(
        {**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"}
    )

    if "adapters" in form:
        make_checkpoint(tmp_path / "run", config, drawn_adapters(config))
        assert run_export(tmp_path / "run", "peft", out, "--base", "hf", "--dtype", "float32") == 0
        out = out / "base"
    else:
        export(make_checkpoint(tmp_path / "run", config), out)
    written = read_json(out / "config.json")
    says = {
        written["tie_word_embeddings"],
        written.get("text_config", written)["tie_word_embeddings"],
    }
    assert says == {"twice" in form}
    stock = AutoModelForCausalLM.from_pretrained(out) if "text" in form else load_stock(out)
    assert torch.equal(stock.get_output_embeddings().weight, head.to(stock.dtype))
    assert torch.equal(stock.get_input_embeddings().weight, embedding.to(stock.dtype))


def test_the_card_bounds_what_new_rows_add_to_the_loss(without_spare_row):
    checkpoint, _, out, size, _ = without_spare_row
    bound = f"{math.log(1 + 1 / size):.1e}"
    assert (
        f"loss of every token by at most {bound} nats: ln(1 + 1 / {size})."
        in (out / "README.md").read_text()
    )
    model, losses = load_stock(out), []
    for _, batch in read_samples(checkpoint.config, 3):
        ids = batch.input_ids.masked_fill(batch.input_ids == IMAGE_POSITION, size)
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=batch.tiles).logits[0].double()
        kept = [
            cross_entropy(rows, batch.labels[0], reduction="none")
            for rows in (logits, logits[:, :size])
        ]
        losses.append((kept[0] - kept[1])[batch.labels[0] != IGNORE])
    tokens = torch.cat(losses)
    assert 0 < tokens.mean() <= tokens.max() <= math.log(1 + 1 / size)


def test_buffers_of_old_files_are_left_out(tiny, make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "llama", layers=2)
    tensors = load_file(tmp_path / "llm" / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file(tensors, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    checkpoint = make_checkpoint(
        tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}")
    )
    export(checkpoint, tmp_path / "out")
    load_stock(tmp_path / "out")
    assert not any("inv_freq" in name for name in weights(tmp_path / "out"))


def test_files_saved_without_the_head_get_their_full_names(make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "llama", layers=2, tied=True)
    tensors = load_file(tmp_path / "llm" / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    found = language_for_export(LLAVA, tmp_path / "llm", {}, 0, "float32").tensors
    assert found.keys() == {f"language_model.{name}" for name in tensors}


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_settings_that_only_version_5_reads_are_also_written_for_version_4(
    make_tiny, tmp_path, scaled
):
    rope = (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5} if scaled else {"rope_theta": 5e5}
    )
    make_tiny.make_tiny_llm(
        tmp_path / "llm", "llama", layers=1, rope_parameters={"rope_type": "default", **rope}
    )
    written = language_for_export(LLAVA, tmp_path / "llm", {}, 0, "float32").config
    assert written["rope_theta"] == 5e5
    assert ("rope_scaling" in written) == scaled and (
        not scaled or written["rope_scaling"]["factor"] == 2.0
    )
