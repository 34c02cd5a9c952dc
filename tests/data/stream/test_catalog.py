import multiprocessing
import os
import shutil
import zlib

import pytest
from archives import conversation, picture, write_tar
from catalogs import is_held_out, lengths, opened, reasons, stored_set
from small_disk import small_disk

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.index import Member, TextLengths, index_path, read_index, write_index
from mmtrain.data.shards.indexing import ensure_indexes, scan_shard
from mmtrain.data.stream.catalog import Catalog, Reader
from mmtrain.data.stream.order import UNUSABLE, Capacity
from mmtrain.data.stream.stored import data_sets
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.registry import TEXT_ALONE
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles

CAPTION = conversation("Q", "A cat.")
LOOK = conversation("<image>", "A cat.")


def write_indexed(tar, files, text="feed", tokens=5):
    """A shard and its index; each sample's text is `tokens` long under the fingerprint `text`."""
    write_tar(tar, files)
    index = scan_shard(tar, lambda sample: None)
    index.texts[text] = TextLengths(
        [0 if place in index.faults["llava"] else tokens for place in range(len(index.keys))]
    )
    write_index(tar, index)
    return tar


def open_catalog(*tars, text="feed", tokens_per_image=16, **more):
    return opened(tars, Square(tokens_per_image), text, **more)


def test_samples_that_cannot_be_used_are_faults_with_key_shard_offset_and_reason(tmp_path):
    first = write_indexed(
        tmp_path / "0.tar", [("a.json", CAPTION), ("b.json", b"{"), ("c.json", CAPTION)]
    )
    second = write_indexed(
        tmp_path / "1.tar", [("d.json", LOOK), ("d.png", picture(30, 20)), ("e.json", CAPTION)]
    )
    index = read_index(first)
    index.texts["feed"].faults = {2: ("template", "why"), 1: ("template", "of a text that is none")}
    write_index(first, index)
    catalog = open_catalog(first, second, max_image_pixels=599)
    found = {
        number: (fault.key, fault.shard, fault.offset, fault.reason)
        for number, fault in zip((1, 2, 3), catalog.faults(), strict=True)
    }
    assert found == {
        1: ("b", str(first), 1536, "not_json"),
        2: ("c", str(first), 2560, "template"),
        3: ("d", str(second), 512, "too_many_pixels"),
    }
    assert catalog.fault(3).detail == "30 x 20 pixels; data.max_image_pixels is 599"
    assert lengths(catalog) == [5, UNUSABLE, UNUSABLE, UNUSABLE, 5]
    assert catalog.reasons == {"not_json": 1, "template": 1, "too_many_pixels": 1}
    assert reasons(open_catalog(first, second, max_image_pixels=600)).keys() == {1, 2}


def test_an_image_of_which_the_index_knows_no_size_cannot_be_cut_into_tiles(tmp_path):
    tar = write_indexed(
        tmp_path / "0.tar", [("a.json", LOOK), ("a.png", picture(30, 20)), ("b.json", CAPTION)]
    )
    index = read_index(tar)
    index.image_sizes[0] = ((0, 0),)
    write_index(tar, index)
    catalog = opened([tar], Tiles(16, 32))
    assert reasons(catalog) == {0: "undecodable_image"}
    assert lengths(catalog) == [UNUSABLE, 5]


def test_without_an_encoder_samples_with_images_are_faults_or_stripped_of_them(tiny, tmp_path):
    seen = [("a.json", conversation("<image>\nWhat is it?", "A cat.")), ("a.png", picture(30, 20))]
    asked = [("b.json", conversation("What is it?", "A cat."))]
    shown = [("c.json", conversation("Show it", "<image>")), ("c.png", picture(3, 2))]
    tar = write_tar(tmp_path / "0.tar", [*seen, *asked, *shown])

    def open_text(name):
        layout = TEXT_ALONE[name](0)
        ensure_indexes([tar], Tokenization(str(tiny / "llm"), "llava_v1", layout))
        text = text_fingerprint(tiny / "llm", "llava_v1", layout.texts)
        return opened([tar], layout, text, max_image_pixels=100)

    refused = open_text("require")
    assert reasons(refused) == {0: "no_encoder", 2: "no_encoder"}
    assert refused.fault(0).detail == "1 images"
    stripped = open_text("strip")
    assert reasons(stripped) == {2: "no_answer"}
    assert stripped.length(0) == stripped.length(1) == refused.length(1), (
        "the same text without its image"
    )
    assert not stripped.sample_sets[0].tiles.any()
    reader = Reader(stripped, 0)
    first, second = (reader.read(number) for number in (0, 1))
    assert first.turns == second.turns and first.images == second.images == ()


def test_the_held_out_share_is_a_hash_of_the_key_that_never_moves(tmp_path):
    keys = [f"{number:06d}" for number in range(40)] + ["GCC_train_002582585", "x/b", "é", "図書館"]
    tar = write_indexed(tmp_path / "0.tar", [(f"{key}.json", CAPTION) for key in keys])
    catalog = open_catalog(tar, held_out=0.2)
    held_out = [catalog.find(number).key for number in catalog.held_out.tolist()]
    assert held_out == ["000000", "000009", "000019", "000022", "000033"]
    assert held_out == [key for key in keys if is_held_out(key, 0.2)]
    assert catalog.held_out_samples == 5 and lengths(catalog) == [5] * len(keys)
    assert len(open_catalog(tar, held_out=0.7).held_out) == sum(
        is_held_out(key, 0.7) for key in keys
    )
    keys = [str(number) for number in range(20_000)]
    for fraction in (0.01, 0.2, 0.7):
        count = sum(is_held_out(key, fraction) for key in keys)
        # four standard deviations of a binomial count
        assert abs(count - fraction * 20_000) < 4 * (20_000 * fraction * (1 - fraction)) ** 0.5
    assert all(is_held_out(key, 0.7) for key in keys if is_held_out(key, 0.2))


def test_numbers_run_over_all_sets_and_shards_and_names_stand_before_keys(tmp_path, tiny):
    keys = {"a/0": "xyz", "a/1": "", "b/0": "x", "b/1": "wx"}
    for place, letters in keys.items():
        folder = tmp_path / place[0]
        folder.mkdir(exist_ok=True)
        write_indexed(
            folder / f"{place[2]}.tar", [(f"{letter}.json", CAPTION) for letter in letters]
        )
    listed = (
        f"[{{name: cats, shards: {tmp_path}/a/*.tar}}, {{name: dogs, shards: "
        f"{tmp_path}/b/*.tar, weight: 0.5}}]"
    )
    config = load_config(tiny / "config.yaml", ["data.shards=null", f"data.sets={listed}"])
    sets = data_sets(config.data)
    assert [(one.name, one.weight, len(one.shards)) for one in sets] == [
        ("cats", 1.0, 2),
        ("dogs", 0.5, 2),
    ]
    catalog = Catalog(
        [
            stored_set(one.shards, Square(16), weight=one.weight, name=one.name, form=one.form)
            for one in sets
        ]
    )
    found = [catalog.find(number) for number in range(len(catalog))]
    assert [place.key for place in found] == [
        "cats/x",
        "cats/y",
        "cats/z",
        "dogs/x",
        "dogs/w",
        "dogs/x",
    ]
    assert [str(place.shard)[-7:] for place in found] == ["a/0.tar"] * 3 + ["b/0.tar"] + [
        "b/1.tar"
    ] * 2
    step = 512 + -(-len(CAPTION) // 512) * 512  # of a member and its header
    assert [member for place in found for member in place.members] == [
        Member("json", 512 + number * step, len(CAPTION), zlib.crc32(CAPTION))
        for number in (0, 1, 2, 0, 0, 1)
    ]
    assert [(one.weight, one.firsts.tolist()) for one in catalog.sample_sets] == [
        (1.0, [0, 3, 3]),
        (0.5, [0, 1, 3]),
    ]
    assert open_catalog(tmp_path / "a" / "0.tar").find(1).key == "y"


def test_the_fingerprint_is_of_keys_bytes_lengths_and_what_is_held_out_but_not_of_the_folder(
    tmp_path,
):
    files = [("a.json", LOOK), ("a.png", picture(9, 9)), ("b.json", CAPTION), ("b.txt", b"note")]
    tar = write_indexed(tmp_path / "0.tar", files)
    fingerprints = [open_catalog(tar).fingerprint]
    (tmp_path / "elsewhere").mkdir()
    for name in ("0.tar", "0.tar.index"):
        shutil.copy(tmp_path / name, tmp_path / "elsewhere")
    assert open_catalog(tmp_path / "elsewhere" / "0.tar").fingerprint == fingerprints[0]

    others = [LOOK.replace(b"cat", b"dog"), picture(9, 8), CAPTION.replace(b"cat", b"dog"), b"nose"]
    for number, other in enumerate(others):
        changed = [
            (name, other if place == number else content)
            for place, (name, content) in enumerate(files)
        ]
        fingerprints.append(open_catalog(write_indexed(tmp_path / "0.tar", changed)).fingerprint)
    fingerprints.append(
        open_catalog(write_indexed(tmp_path / "0.tar", files, tokens=6)).fingerprint
    )
    fingerprints.append(
        open_catalog(write_indexed(tmp_path / "0.tar", files, text="0"), text="0").fingerprint
    )
    fingerprints.append(
        open_catalog(write_indexed(tmp_path / "0.tar", files), tokens_per_image=17).fingerprint
    )
    fingerprints.append(open_catalog(write_indexed(tmp_path / "0.tar", files[::-1])).fingerprint)
    renamed = [(name.replace("b.", "c."), content) for name, content in files]
    fingerprints.append(open_catalog(write_indexed(tmp_path / "0.tar", renamed)).fingerprint)
    fingerprints.append(
        open_catalog(write_indexed(tmp_path / "0.tar", files), held_out=0.999999).fingerprint
    )
    assert len(set(fingerprints)) == len(fingerprints)


def test_lengths_for_another_tokenizer_are_refused_and_say_how_to_make_them(tmp_path):
    tar = write_indexed(tmp_path / "0.tar", [("a.json", CAPTION)], text="0")
    with pytest.raises(
        UserError,
        match=rf"^{tar}: its index has no token lengths .*mmtrain index CONFIG {tar}$",
    ):
        open_catalog(tar)


def test_samples_that_fit_no_pack_are_refused_by_name(tmp_path):
    two = [
        ("c.json", conversation("<image><image>", "A cat.")),
        ("c.0.png", picture(9, 9)),
        ("c.1.png", picture(9, 9)),
    ]
    tar = write_indexed(tmp_path / "0.tar", [("a.json", CAPTION), ("b.json", b"{"), *two])
    open_catalog(tar, capacity=Capacity(37, 2)).refuse_overlong()
    with pytest.raises(
        UserError, match=rf"^{tar}: sample c: 37 tokens and 2 tiles do not fit .* 36 tokens \(1 "
    ):
        open_catalog(tar, capacity=Capacity(36)).refuse_overlong()
    with pytest.raises(
        UserError, match=rf"^{tar}: sample c: .* of 37 tokens and 1 tile \(1 samples in all"
    ):
        open_catalog(tar, capacity=Capacity(37, 1)).refuse_overlong()


def test_a_length_above_32_bits_is_overlong_and_wraps_into_no_other(tmp_path):
    tar = write_indexed(
        tmp_path / "s.tar", [("a.json", LOOK), ("a.png", picture(3, 2))], tokens=2**31 - 1
    )
    catalog = open_catalog(tar, tokens_per_image=2**20, capacity=Capacity(4096))
    assert lengths(catalog) == [2**31 - 1]
    with pytest.raises(UserError, match="sample a: 2147483647 tokens and 1 tile do not fit"):
        catalog.refuse_overlong()


def cached(tmp_path):
    """All files of the catalogues in the cache."""
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())


def two_shards(folder):
    files = [("a.json", LOOK), ("a.png", picture(9, 9)), ("b.json", b"{"), ("c.json", CAPTION)]
    first = write_indexed(folder / "0.tar", files)
    return first, write_indexed(folder / "1.tar", [("d.json", CAPTION)])


def seen(catalog):
    return (
        catalog.fingerprint,
        lengths(catalog),
        [catalog.find(number) for number in range(len(catalog))],
        list(catalog.faults()),
    )


@pytest.mark.usefixtures("own_cache")
def test_a_file_of_the_cache_that_is_cut_or_gone_is_made_again_with_the_same_bytes(tmp_path):
    tars = two_shards(tmp_path)
    before = seen(open_catalog(*tars))
    files = {path: path.read_bytes() for path in cached(tmp_path)}
    assert len(files) == 11
    for path, content in files.items():
        damages = [None, b"", content[:-1], content[: len(content) // 2], b"{" + content]
        damages += [b"PK\x03\x04" + content[4:], content.replace(b"), }", b"(, }")]
        for wrong in damages:
            if wrong is None:
                path.unlink()
            else:
                path.write_bytes(wrong)
            assert seen(open_catalog(*tars)) == before, path
        assert {path: path.read_bytes() for path in cached(tmp_path)} == files


@pytest.mark.usefixtures("own_cache")
def test_a_catalogue_is_made_again_when_a_shard_is_replaced_and_an_old_one_goes_a_day_later(
    tmp_path,
):
    tars = two_shards(tmp_path)
    before = seen(open_catalog(*tars))
    written = cached(tmp_path)
    open_catalog(*tars, held_out=0.5)
    assert len(cached(tmp_path)) == len(written) + 3, "another view of the same catalogue"
    write_indexed(tars[1], [("d.json", CAPTION), ("e.json", CAPTION)])
    assert len(open_catalog(*tars)) == 5
    assert len(cached(tmp_path)) == 2 * len(written) + 3, "ranks may be about to open the old one"
    for catalogue in (tmp_path / "cache" / "mmtrain" / "catalog").glob("*/*"):
        os.utime(catalogue, (0, 0))
    two_shards(tmp_path)
    assert seen(open_catalog(*tars)) == before
    assert len(cached(tmp_path)) == len(written)


@pytest.mark.usefixtures("own_cache")
def test_processes_that_count_at_once_make_one_catalogue(tmp_path):
    tars = two_shards(tmp_path)
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        found = pool.starmap(fingerprint_of, [(tars,)] * 8)
    assert set(found) == {open_catalog(*tars).fingerprint}
    assert len(cached(tmp_path)) == 11


def fingerprint_of(tars):
    return open_catalog(*tars).fingerprint


@pytest.mark.usefixtures("own_cache")
def test_a_cache_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    tars = two_shards(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        UserError, match=r"catalog.*: cannot be written \(Not a dir.*XDG_CACHE_HOME"
    ):
        open_catalog(*tars)


def test_a_disk_that_is_full_while_samples_are_counted_is_refused_by_name(tmp_path, monkeypatch):
    files = [(f"{number}.json", CAPTION) for number in range(3000)]
    tar = write_indexed(tmp_path / "0.tar", files)
    with small_disk(tmp_path / "disk", kilobytes=100) as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        with pytest.raises(UserError, match=r"be written \(\d+ requested and .*XDG_CACHE_HOME"):
            open_catalog(tar)
        assert not [path for path in disk.rglob("*.npy*") if path.is_file()]


@pytest.mark.usefixtures("own_cache")
def test_every_damaged_index_is_named_and_nothing_is_kept(tmp_path):
    tars = two_shards(tmp_path)
    for tar in tars:
        path = index_path(tar)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"^2 of 2 shards:\n  .*0\.tar\.index: is damaged.*\n  .*1\.tar\.index"
    ):
        open_catalog(*tars)
    assert cached(tmp_path) == []
