import hashlib
import io
import json

import pytest
import timm
import torch
import webdataset
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmtrain.__main__ import main
from mmtrain.config.load import load_config


def fingerprint(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "config.yaml"  # it holds the folder's own path
    }


def test_the_command_writes_a_run_and_says_how_to_start_it(tmp_path, capsys):
    main(["tiny", str(tmp_path / "one"), "--family", "qwen2", "--layers", "4", "--samples", "24"])
    printed = capsys.readouterr().out
    assert f"mmtrain train {(tmp_path / 'one').resolve()}/config.yaml" in printed
    config = load_config(tmp_path / "one" / "config.yaml")
    assert config.parallel.pipeline == 4
    llm = AutoModelForCausalLM.from_pretrained(config.model.llm.path)
    assert llm.config.model_type == "qwen2" and len(llm.model.layers) == 4
    assert len(AutoTokenizer.from_pretrained(config.model.llm.path)) < llm.config.vocab_size == 320
    assert len(timm.create_model(f"local-dir:{config.model.vision.name}", pretrained=True).blocks) == 4


def test_the_folder_is_a_function_of_its_arguments_and_seed(tmp_path):
    prints = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main(["tiny", str(tmp_path / name), "--layers", "2", "--samples", "6", "--seed", seed])
        prints.append(fingerprint(tmp_path / name))
    assert prints[0] == prints[1]
    changed = {name for name in prints[0] if prints[0][name] != prints[2][name]}
    assert {"llm/model.safetensors", "vision/model.safetensors", "shards/tiny-00000.tar"} <= changed


def test_shards_are_what_webdataset_and_pillow_read(make_tiny, tmp_path):
    paths = make_tiny.make_tiny_shards(tmp_path, samples=60, shards=3, text_only_fraction=0.2, two_image_fraction=0.3)
    assert len(paths) == 3
    formats, counts = set(), []
    for sample in webdataset.WebDataset([str(path) for path in paths], shardshuffle=False):
        record = json.loads(sample["json"])
        files = [content for name, content in sample.items() if name.endswith(("png", "jpg"))]
        formats |= {Image.open(io.BytesIO(content)).format for content in files}
        assert record["id"] == sample["__key__"]
        assert [turn["from"] for turn in record["conversations"]] == ["human", "gpt"]
        assert record["conversations"][0]["value"].count("<image>") == len(files)
        counts.append(len(files))
    assert formats == {"PNG", "JPEG"} and len(counts) == 60
    assert all(counts.count(images) >= 6 for images in (0, 1, 2))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_other_families_load_in_stock_transformers_with_signals_that_tests_can_see(make_tiny, tmp_path, family):
    folder = make_tiny.make_tiny_llm(tmp_path, family, layers=3)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)("a red circle on a blue background").input_ids])
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
    assert model.config.num_hidden_layers == 3 and outputs.logits.std() > 0.1
    changes = [
        (after - before).std()
        for before, after in zip(outputs.hidden_states[:2], outputs.hidden_states[1:3], strict=True)
    ]
    assert min(changes) > 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "50"], "not a multiple of 16"),
        (["--family", "lama"], "no such model_type; nearest: llama"),
        (["--layers", "0"], "--layers: 0: a whole number, at least 1"),
        (["--samples", "0"], "--samples: 0: a whole number"),
        (["--two-image-fraction", "2"], "--two-image-fraction: 2: a share from 0 to 1"),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["tiny", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
