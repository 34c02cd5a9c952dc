"""The tool that plans real models with the encoder in slices, beside what else could be done."""

from __future__ import annotations

import json

import bench

MODEL = "SigLIP 81 + Qwen3-8B"
SMALL = ("--model", MODEL, "--pipeline", "2", "--microbatches", "4")


def planned(tmp_path, *arguments):
    file = tmp_path / "found.json"
    assert bench.main(["encoder_plans", *arguments, *SMALL, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_a_model_is_planned_in_every_way(tmp_path, capsys):
    found = planned(tmp_path, "models")
    (case,) = found["models"]
    assert (case["model"], case["pipeline"], case["microbatches"]) == (MODEL, 2, 4) and "scaling" not in found
    assert sum(case["blocks"]) == 27 and 0.1 < case["encoder_share"] < 0.15
    assert 1 <= case["slowest"] <= case["slices"] <= case["rank_0"] <= case["front"] < case["by_hand"]
    said = capsys.readouterr().out
    assert f"{case['by_hand']:.3f}" in said and "micro-batches" in said


def test_scaling_ends_with_as_many_ranks_as_are_asked_for(tmp_path):
    found = planned(tmp_path, "scaling", "--ranks", "12")["scaling"]
    assert [row["ranks"] for row in found] == [2, 4, 8, 12]
    efficiencies = [row["efficiency"] for row in found]
    assert efficiencies[0] == 1 and efficiencies == sorted(efficiencies, reverse=True)
