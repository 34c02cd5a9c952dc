"""mmtrain inspect: what it tells of shards is what Python's tarfile, Pillow and the stock tokenizer
tell.
"""

import io
import json
import os
import re
import sys
import tarfile
from collections import Counter

import pytest
import yaml
from archives import conversation, picture, write_tar
from PIL import Image
from transformers import AutoTokenizer, LlavaNextImageProcessor, LlavaNextProcessor

from mmtrain.__main__ import main
from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.shards.index import index_path, read_index

INSPECT = [sys.executable, "-m", "mmtrain", "inspect"]


@pytest.fixture(scope="module")
def plain(tiny):
    """Words that name the tiny models and template plain."""
    return (str(tiny / "config.yaml"),)


@pytest.fixture(scope="module")
def stock(tiny):
    return AutoTokenizer.from_pretrained(tiny / "llm")


@pytest.fixture
def folder(make_tiny, tmp_path, monkeypatch):
    """60 tiny scenes in two shards, some without image, some with two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_tiny.make_tiny_shards(tmp_path / "shards", 60, 2, two_image_fraction=0.2)
    return tmp_path / "shards"


def run_json(capsys, *arguments):
    """Exit code and the JSON on stdout."""
    code = main(["inspect", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def stored(folder):
    """Each sample's members by suffix, as Python's tarfile reads them, by shard and key."""
    samples = {}
    for tar in sorted(folder.glob("*.tar")):
        with tarfile.open(tar) as archive:
            for member in archive:
                key, _, suffix = member.name.partition(".")
                samples.setdefault((tar.name, key), {})[suffix] = archive.extractfile(member).read()
    return samples


def caption(members):
    return json.loads(members["json"])["conversations"][-1]["value"]


def images_of(members):
    return sum(suffix != "json" for suffix in members)


def summary(values):
    """What the tool says of numbers, by its definition: quantiles are values, the first that enough
    do not exceed.
    """
    ordered = sorted(values)

    def at(share):
        return ordered[max(-(-len(ordered) * share // 100) - 1, 0)]

    mean = pytest.approx(sum(ordered) / len(ordered))
    return {
        "count": len(ordered),
        "mean": mean,
        "min": ordered[0],
        "median": at(50),
        "p95": at(95),
        "p99": at(99),
        "max": ordered[-1],
    }


def test_counts_and_image_sizes_are_those_that_tarfile_and_pillow_find(folder, capsys):
    samples = stored(folder)
    images = [
        [content for name, content in members.items() if name != "json"]
        for members in samples.values()
    ]
    sizes = [Image.open(io.BytesIO(content)).size for sample in images for content in sample]
    code, found = run_json(capsys, folder)
    assert code == 0
    assert (found["shards"], found["samples"], found["images"]) == (2, 60, len(sizes))
    assert found["bytes"] == sum(tar.stat().st_size for tar in folder.glob("*.tar"))
    assert found["samples_by_images"] == {
        str(n): count for n, count in Counter(map(len, images)).items()
    }
    assert set(found["samples_by_images"]) == {"0", "1", "2"}
    for name, values in {
        "image_width": [width for width, _ in sizes],
        "image_height": [height for _, height in sizes],
        "image_longer_side": [max(size) for size in sizes],
    }.items():
        assert found[name] == summary(values)
    assert found["unusable"] == {} and found["text_tokens"] is None and found["packing"] == []


def test_text_lengths_are_those_of_the_stock_tokenizer(folder, plain, stock, capsys):
    # <s> before the caption comes from the tokenizer, the template ends it with </s>
    lengths = [len(stock(caption(members)).input_ids) + 1 for members in stored(folder).values()]
    code, found = run_json(capsys, folder, *plain)
    assert code == 0
    assert found["text_tokens"] == summary(lengths)


def test_an_images_tokens_come_from_the_vision_encoder(folder, plain, capsys):
    lengths = ("--pack-length", 2048, 4096)
    code, found = run_json(capsys, folder, *plain, *lengths)
    assert code == 0
    assert found["tokens_per_image"] == 16  # 32 pixels in patches of 8
    assert [packing["pack_length"] for packing in found["packing"]] == [2048, 4096]
    tokens = [
        len(read_index(tar).image_sizes[place]) * 16 + tokens
        for tar in folder.glob("*.tar")
        for place, tokens in enumerate(next(iter(read_index(tar).texts.values())).tokens)
    ]
    first = found["packing"][0]
    assert first["fill"] == pytest.approx(sum(tokens) / (first["packs"] * 2048))


def test_the_text_for_people_holds_the_same_and_says_what_is_missing(folder, plain, capsys):
    assert main(["inspect", str(folder), *plain, "--pack-length", "1024"]) == 0
    printed = capsys.readouterr().out
    assert "indexing 2 of 2 shards" in printed
    _, found = run_json(capsys, folder, *plain, "--pack-length", 1024)
    assert list(found["expected"]) == ["data.expected_text_tokens"], "all images take the same"
    none, one, several = (found["samples_by_images"][images] for images in "012")
    assert f"60 samples: {none} without images, {one} with one, {several} with several" in printed
    assert f"half at most {found['text_tokens']['median']}, " in printed
    (packing,) = found["packing"]
    row = next(line for line in printed.splitlines() if line.lstrip().startswith("1,024 "))
    assert row.split()[1:3] == [str(packing["packs"]), f"{packing['fill']:.2%}"]
    assert max(len(line) for line in printed.splitlines() if line[:2] == "  ") <= 80, "tables"
    # Without a configuration the lengths are those of the one tokenizer of the indexes.
    assert main(["inspect", str(folder)]) == 0
    alone = capsys.readouterr().out
    assert f"half at most {found['text_tokens']['median']}, " in alone
    assert "how full packs become depends on the models: name a CONFIG" in alone


def test_unusable_samples_are_counted_by_reason(tmp_path, plain, capsys):
    files = [("a.json", conversation("<image>What?", "It.")), ("a.png", b"none")]
    files += [
        ("b.json", conversation("Hi.", "Ho.", "Hi again.", "Ho.")),
        ("c.json", conversation("Hi.", "Ho.")),
    ]
    write_tar(tmp_path / "s.tar", files)
    _, found = run_json(capsys, tmp_path, *plain)
    assert found["unusable"] == {"undecodable_image": 1, "template": 1}
    assert found["text_tokens"]["count"] == 1
    assert main(["inspect", str(tmp_path), *plain]) == 0
    assert "undecodable_image: an image file that Pillow cannot decode" in capsys.readouterr().out


def test_shards_without_index_get_one_if_a_configuration_is_given(folder, plain, capsys):
    indexes = sorted(map(index_path, folder.glob("*.tar")))
    run_json(capsys, folder, *plain)
    complete = [index.read_bytes() for index in indexes]
    for index in indexes:
        index.unlink()
    assert main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has no index" in error and "mmtrain index CONFIG" in error
    assert run_json(capsys, folder, *plain)[0] == 0
    assert [index.read_bytes() for index in indexes] == complete


def test_verify_finds_nothing_in_sound_shards(folder, capsys):
    assert main(["inspect", str(folder), "--verify"]) == 0
    printed = capsys.readouterr().out
    compared = sum(
        len(content) for members in stored(folder).values() for content in members.values()
    )
    assert f"2 shards, 60 samples, {compared:,} bytes compared: 0 damaged\n" in printed
    assert re.search(r"2 of 2 shards .* MB/s", printed)


def test_verify_lists_every_damage_by_shard_key_and_offset(folder, capsys):
    first, second = sorted(folder.glob("*.tar"))
    with tarfile.open(first) as archive:
        hit = archive.getmembers()[3]
    content = bytearray(first.read_bytes())
    content[hit.offset_data + 7] ^= 4
    first.write_bytes(content)
    os.truncate(second, second.stat().st_size - 512)
    code, found = run_json(capsys, folder, "--verify")
    assert code == 1
    one, other = found["damaged"]
    assert (one["shard"], one["key"], one["offset"]) == (
        str(first),
        hit.name.partition(".")[0],
        hit.offset_data,
    )
    assert (other["shard"], other["key"], other["offset"]) == (str(second), None, None)
    assert main(["inspect", str(folder), "--verify"]) == 1
    printed = capsys.readouterr().out
    assert f"damaged: {first}: sample {one['key']} at byte {hit.offset_data:,}: " in printed
    assert f"damaged: {second}: the whole: " in printed
    assert "2 damaged" in printed


def test_verify_needs_indexes_and_makes_none(folder, capsys):
    index = index_path(folder / "tiny-00001.tar")
    index.unlink()
    assert main(["inspect", str(folder), "--verify"]) == 2
    assert "1 of 2 shards have no index" in capsys.readouterr().err
    assert not index.exists()


def test_show_prints_the_tokens_and_labels_that_the_template_makes(folder, plain, stock, capsys):
    key, members = next(
        (key, found) for (_, key), found in stored(folder).items() if "1.png" in found
    )
    ids = stock(caption(members), add_special_tokens=False).input_ids
    bos, eos = stock.bos_token_id, stock.eos_token_id
    sizes = [Image.open(io.BytesIO(members[name])).size for name in ("0.png", "1.png")]
    code, found = run_json(capsys, folder, *plain, "--show", key)
    assert code == 0
    (sample,) = found["samples"]
    assert [member["suffix"] for member in sample["members"]] == ["json", "0.png", "1.png"]
    assert [member["size"] for member in sample["members"]] == [
        len(content) for content in members.values()
    ]
    assert sample["turns"] == [
        [turn["from"], turn["value"]] for turn in json.loads(members["json"])["conversations"]
    ]
    rows = sample["rows"]
    assert [(row["first"], row["positions"], row["token"]) for row in rows] == [
        (0, 1, bos),
        (1, 16, IMAGE_POSITION),
        (17, 16, IMAGE_POSITION),
        *((33 + number, 1, token) for number, token in enumerate([*ids, eos])),
    ]
    assert [row["label"] for row in rows] == [IGNORE, IGNORE, *ids, eos, IGNORE]
    assert [row["text"] for row in rows[1:3]] == [
        f"image {number}, {width}x{height} px" for number, (width, height) in enumerate(sizes)
    ]
    assert "".join(row["text"] for row in rows[3:-1]) == caption(members)
    assert main(["inspect", str(folder), *plain, "--show", key]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        rf"^ +17 - 32 +16 x image 1, {sizes[1][0]}x{sizes[1][1]} px +{ids[0]}  '",
        printed,
        re.MULTILINE,
    )
    assert max(map(len, printed.partition("  position")[2].splitlines())) <= 80
    total, labels = 34 + len(ids), len(ids) + 1
    assert f"{total} tokens: {len(ids) + 2} of text, 32 of images; {labels} supervised" in printed


def test_show_finds_a_key_in_every_shard_that_has_it(tmp_path, plain, capsys):
    for name, answer in (("0", "a red circle"), ("1", "a blue square")):
        write_tar(
            tmp_path / f"{name}.tar",
            [("x.json", conversation("Say.", "a")), ("y.json", conversation("Say.", answer))],
        )
    _, found = run_json(capsys, tmp_path, *plain, "--show", "y")
    assert [sample["shard"] for sample in found["samples"]] == [
        str(tmp_path / "0.tar"),
        str(tmp_path / "1.tar"),
    ]
    assert [sample["turns"][1][1] for sample in found["samples"]] == [
        "a red circle",
        "a blue square",
    ]
    assert main(["inspect", str(tmp_path), *plain, "--show", "y"]) == 0
    assert f"2 of 2 samples of this key: {tmp_path}/1.tar" in capsys.readouterr().out


def test_show_says_why_a_sample_cannot_be_trained_on(tmp_path, plain, capsys):
    files = [
        ("a.json", conversation("Hi.", "Ho.", "Hi.", "Ho.")),
        ("b.json", conversation("Hi.", "Ho.")),
    ]
    files += [("c.json", conversation("<image>What?", "It.")), ("c.png", b"none")]
    tar = write_tar(tmp_path / "s.tar", files)
    assert main(["inspect", str(tar), *plain]) == 0  # indexes
    with tarfile.open(tar) as archive:
        offset = archive.getmember("b.json").offset_data
    with tar.open("r+b") as stream:
        stream.seek(offset + 3)
        stream.write(b"?")
    capsys.readouterr()
    for key, reason in {"a": "template", "b": "checksum", "c": "undecodable_image"}.items():
        code, found = run_json(capsys, tar, *plain, "--show", key)
        (sample,) = found["samples"]
        assert (code, sample["fault"]["reason"], sample["rows"]) == (0, reason, [])
    assert main(["inspect", str(tar), *plain, "--show", "a"]) == 0
    printed = capsys.readouterr().out
    assert "cannot be trained on: template: " in printed and "  gpt: Ho.\n" in printed


def test_show_writes_parts_of_a_character_as_the_vocabulary_does_and_obeys_no_text(
    tmp_path, plain, stock, capsys
):
    answer = "é [bold]\x1b[31m\u202e end"
    write_tar(tmp_path / "s.tar", [("k\u202e.json", conversation("Say.", answer))])
    _, found = run_json(capsys, tmp_path, *plain, "--show", "k\u202e")
    rows = found["samples"][0]["rows"]
    parts = stock.convert_ids_to_tokens(stock("é", add_special_tokens=False).input_ids)
    assert len(parts) == 2, "the tiny tokenizer knows no é: it is two bytes"
    assert rows[1]["text"] == parts[0]
    assert main(["inspect", str(tmp_path), *plain, "--show", "k\u202e"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\u202e" not in printed
    assert "gpt: é [bold]\\x1b[31m\\u202e end" in printed


def test_without_an_encoder_images_make_samples_unusable_or_are_taken_out(folder, plain, capsys):
    text_alone = ("model.vision=null", "data.template=llava_v1", "model.trainable=[llm.layers.0]")
    shards = (folder, *plain, *text_alone)
    of_text = sum(images == 0 for images in map(images_of, stored(folder).values()))
    _, found = run_json(capsys, *shards)
    assert found["unusable"] == {"no_encoder": 60 - of_text} and found["packing"], (
        "as a text run finds them"
    )
    strip = (*shards, "data.images=strip")
    _, found = run_json(capsys, *strip, "--pack-length", 1024)
    assert found["unusable"] == {} and found["packing"][0]["overlong"] == 0
    key = next(key for (_, key), members in stored(folder).items() if images_of(members))
    [sample] = run_json(capsys, *strip, "--show", key)[1]["samples"]
    assert sample["rows"] and all(row["token"] != IMAGE_POSITION for row in sample["rows"])
    [sample] = run_json(capsys, *shards, "--show", key)[1]["samples"]
    assert sample["fault"]["reason"] == "no_encoder"


ANYRES = ("model.vision.layout=anyres", "data.pack_length=2048")
LLAVA_NEXT = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]


@pytest.fixture
def shapes(tmp_path):
    """A shard of pictures of four sizes, one sample with two, and one of text alone."""
    files = []
    for key, sizes in {
        "a": [(64, 32)],
        "b": [(32, 64), (20, 20)],
        "c": [(90, 31)],
        "d": [],
    }.items():
        files.append(
            (f"{key}.json", conversation("<image>" * len(sizes) + "Say.", f"a circle {key}"))
        )
        files += [(f"{key}.{number}.png", picture(*size)) for number, size in enumerate(sizes)]
    return write_tar(tmp_path / "s.tar", files)


def test_tiles_and_positions_of_images_are_those_of_the_stock_processor(
    shapes, plain, tiny, capsys
):
    pinpoints = [[32 * rows, 32 * columns] for rows, columns in LLAVA_NEXT]
    stock = LlavaNextProcessor(
        LlavaNextImageProcessor(
            size={"shortest_edge": 32}, crop_size=32, image_grid_pinpoints=pinpoints
        ),
        AutoTokenizer.from_pretrained(tiny / "llm"),
        patch_size=8,
        vision_feature_select_strategy="full",
    )
    sizes = [(64, 32), (32, 64), (20, 20), (90, 31)]
    positions = stock._get_num_multimodal_tokens(
        image_sizes=[[height, width] for width, height in sizes]
    )
    tiles = [len(stock.image_processor(Image.new("RGB", size)).pixel_values[0]) for size in sizes]
    _, found = run_json(capsys, shapes, *plain, *ANYRES)
    assert found["image_positions"] == summary(positions.num_image_tokens)
    assert found["image_tiles"] == summary(tiles)
    assert found["layout"] == "anyres" and found["tokens_per_image"] is None
    texts = found["text_tokens"]["mean"]
    assert found["expected"] == {
        "data.expected_text_tokens": round(texts),
        "data.expected_image_tiles": sum(tiles) / 4,
        "data.expected_image_positions": round(sum(positions.num_image_tokens) / 4, 1),
    }
    first = found["packing"][0]
    assert first["packs"] == 1
    assert first["fill"] == pytest.approx((4 * texts + sum(positions.num_image_tokens)) / 2048)


def test_what_is_printed_for_the_planner_is_taken_by_the_configuration(shapes, tiny, capsys):
    file = tiny / "config.yaml"
    tiled = (
        "model.vision.layout=tiles",
        "model.vision.max_tiles=4",
        "data.image_fit=null",
        "data.pack_length=300",
    )
    by_config = run_json(capsys, shapes, file, *tiled)
    assert main(["inspect", str(file), *tiled[:2], str(shapes), *tiled[2:]]) == 0
    printed = capsys.readouterr().out
    assert "tiles of an image (tiles)" in printed and "positions of an image (tiles)" in printed
    told = yaml.safe_load(printed[printed.rindex("  data:") :])["data"]
    assert {f"data.{key}": value for key, value in told.items()} == by_config[1]["expected"]
    config = load_config(file, [*tiled, *(f"data.{key}={value}" for key, value in told.items())])
    assert config.data.expected_image_tiles == told["expected_image_tiles"] == (3 + 3 + 1 + 4) / 4
    indexed = index_path(shapes).read_bytes()
    assert main(["index", str(file), str(shapes), *tiled]) == 0
    assert (
        "1 of 1 shards are ready" in capsys.readouterr().out
        and index_path(shapes).read_bytes() == indexed
    )


def test_show_names_the_tile_of_each_run_of_positions(shapes, plain, capsys):
    tiled = (*plain, "model.vision.layout=tiles", "--show")
    [sample] = run_json(capsys, shapes, *tiled, "b")[1]["samples"]
    images = [
        (row["positions"], row["text"]) for row in sample["rows"] if row["token"] == IMAGE_POSITION
    ]
    assert images == [
        (16, "image 0, 32x64 px, tile 1 of 2 x 1 tiles"),
        (16, "image 0, 32x64 px, tile 2 of 2 x 1 tiles"),
        (16, "image 0, 32x64 px, whole image"),
        (16, "image 1, 20x20 px"),
    ]
    written = "".join(
        "#" if row["token"] == IMAGE_POSITION else row["text"] for row in sample["rows"][1:-1]
    )
    assert written.replace(" ", "") == "TILE_1#TILE_2#TILE_GLOBAL#TILE_GLOBAL#acircleb"
    lines = (*plain, *ANYRES, "--show")
    [sample] = run_json(capsys, shapes, *lines, "c")[1]["samples"]
    [(positions, text)] = [
        (r["positions"], r["text"]) for r in sample["rows"] if r["token"] == IMAGE_POSITION
    ]
    assert (
        text == "image 0, 90x31 px, whole image, then 4 lines of 12 of 1 x 3 tiles"
        and positions == 16 + 4 * 13
    )


def test_a_key_that_no_sample_has_is_refused_with_those_that_are_like_it(folder, plain, capsys):
    assert main(["inspect", str(folder), *plain, "--show", "00003"]) == 2
    refused = capsys.readouterr().err
    assert "no sample has this key in 2 shards; similar keys: 000003, 000030, 000031" in refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--show", "k"), "--show depends on the models. Name a CONFIG before the SHARDS"),
        (("--pack-length", "64"), "--pack-length depends on the models. Name a CONFIG"),
        (("data.template=plain",), "data.template=plain: changes a CONFIG. Name one before it"),
        (("--pack-length", "0"), "--pack-length: 0: a whole number, at least 1, is needed"),
        (("--verify", "--show", "k"), "not allowed with"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "shards", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "index"])
def test_a_configuration_alone_names_the_shards(command, shapes, tiny, capsys):
    assert (
        main([command, str(tiny / "config.yaml"), f"data.shards={shapes}", "data.pack_length=300"])
        == 0
    )
    assert "4 samples" in " ".join(capsys.readouterr().out.split())
