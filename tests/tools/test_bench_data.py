"""tools/bench/bench_data.py: contestants take turns, do equal work, and every measurement is in the JSON."""

import json
import platform

import bench_data
import bench_loader
import bench_sharding
import pytest
from bench_photographs import make_photographs
from bench_timing import alternate, rates, ratios, spread


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_photographs(folder, 8)
    bench_sharding.shard(folder, folder / "shards", 1, "--tokenizer", bench_loader.LLM, "--template", "plain")
    return folder / "shards"


def test_contestants_take_turns_forwards_and_backwards():
    order = []
    times = alternate({name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert times == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_a_ratio_compares_times_of_the_same_repetition():
    times = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 3.0, 4.0]}
    assert ratios(times, "ours", "theirs") == spread([2.0, 1.5, 1.0])
    assert rates(times, 12)["ours"].values == (12.0, 6.0, 3.0)
    assert rates(times, 12)["ours"].text(".1f") == "6.0 (3.0 - 12.0)"


@pytest.mark.nightly
def test_the_planning_of_few_samples_is_that_of_one_window(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench_data.main(["planning", "--quick", "--json", str(out), "--folder", str(tmp_path)]) == 0
    text = out.read_text()
    result = json.loads(text)["planning"]
    assert result["indexes"]["samples"] == 3000
    assert [(one["kind"], one["pack_length"]) for one in result["lengths"]] == [
        (kind, length) for kind in ("captions", "mixed") for length in (2048, 4096, 8192)
    ]
    assert all(one["fill_ratio"] == 1 for one in result["lengths"])  # the whole epoch is the window
    assert all(0 < one["extra_peak_bytes"] < one["peak_bytes"] for one in result["lengths"])
    assert platform.node() not in text
    assert "peak of the process" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_race_of_loaders_reads_every_sample(shards):
    bench_loader.check_equal_work(shards, 2048)
    times = bench_loader.race(shards, 2048, 1, 1)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())
    assert list(times) == ["mmtrain", "webdataset", "Pillow alone", "mmtrain's images alone"]


def test_a_rival_that_makes_other_pixels_is_found(shards, monkeypatch):
    fit = bench_loader.plain_fit
    monkeypatch.setattr(bench_loader, "plain_fit", lambda image, transform: fit(image.rotate(1), transform))
    with pytest.raises(AssertionError, match="8 of 8 samples differ"):
        bench_loader.check_equal_work(shards, 2048)


def test_a_shard_that_lacks_an_image_is_found(shards):
    bench_sharding.check_equal_work(shards.parent, shards)
    first = min(shards.glob("*.tar"))
    content = first.read_bytes()
    first.write_bytes(bytes(1024))
    with pytest.raises(AssertionError, match=r"^7, 8 and 8 images"):
        bench_sharding.check_equal_work(shards.parent, shards)
    first.write_bytes(content)


def test_the_race_of_sharding_measures_each_contestant(shards):
    times = bench_sharding.race(shards.parent, [1], 1)
    assert list(times) == [
        "shard_dataset, 1 worker",
        "tar",
        "tar + flush",
        "tar + flush + image check",
        "tar + flush + full decode",
    ]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())


def test_photographs_are_the_same_every_time_and_no_two_are_alike(tmp_path):
    contents = []
    for name in ("a", "b"):
        make_photographs(tmp_path / name, 2)
        contents.append([file.read_bytes() for file in sorted((tmp_path / name).rglob("*.*"))])
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 3


def test_more_workers_than_shards_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_data.parse_arguments(["loader", "--workers", "0", "9"])
    assert "--workers 9: from 0 to 8" in capsys.readouterr().err
