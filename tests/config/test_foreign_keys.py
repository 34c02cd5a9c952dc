"""Who knows a key by another program's name is told what is set here instead; a whole file of
theirs is one line.
"""

import re

import pytest
import yaml

from mmtrain.__main__ import COMMANDS, main
from mmtrain.base.errors import UserError
from mmtrain.config.keys import all_fields
from mmtrain.config.load import DEMO, load_config
from mmtrain.config.problems import TABLE, answer_to
from mmtrain.config.schema import RunConfig

KEYS = {".".join(path) for path, _ in all_fields(RunConfig)}
ANSWERS = {entry["keys"]: entry["here"] for entry in yaml.safe_load(TABLE.read_text())}
NAMES = [name for names in ANSWERS for name in names.split()]
DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "bf16": {"enabled": true}
}"""
SWIFT = (
    "model: Qwen/Qwen2.5-VL-7B-Instruct\ndataset: [a.jsonl]\ntrain_type: lora\nfreeze_vit: "
    "true\ntorch_dtype: auto\n"
)
TRAINER = "learning_rate: 1.0e-4\nwarmup_ratio: 0.1\nbf16: true\nhidden: 1\n"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_every_name_is_known_once_and_every_key_of_an_answer_exists():
    assert len(set(NAMES)) == len(NAMES)
    for answer in ANSWERS.values():
        named = re.findall(
            r"\b(?:run|model|parallel|data|train|optimizer|eval|checkpoint|export)\.[a-z_.]+[a-z]",
            answer,
        )
        assert set(named) <= KEYS | {"run.dir/run.name"}, answer
        assert set(re.findall(r"mmtrain (shard|export|train)\b", answer)) <= set(COMMANDS)
        assert named or not answer.startswith("it is"), answer


def test_no_name_is_a_key_that_mmtrain_has_at_the_top_level():
    assert not set(NAMES) & set(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "batch_size=4",
            "batch_size: unknown key (value 4); here train.packs_per_step is the batch of a step",
        ),
        (
            "train.batch_size=4",
            "train.batch_size: unknown key (value 4); here train.packs_per_step is the batch",
        ),
        (
            "optimizer.Learning_Rate=1",
            "optimizer.Learning_Rate: unknown key (value 1); here it is optimizer.lr",
        ),
        ("model.lora.rank=8", "model.lora.rank: unknown key (value 8); here it is model.lora.r"),
        (
            "data.image_aspect_ratio=anyres",
            "data.image_aspect_ratio: unknown key (value 'anyres'); here model.vision.layout",
        ),
        (
            "optimizer.type=AdamW",
            "optimizer.type: unknown key (value 'AdamW'); here the optimizer is AdamW, set by ",
        ),
        (
            "deepspeed.zero_stage=2",
            "deepspeed: unknown key (value {'zero_stage': 2}); here models are cut into ",
        ),
    ],
)
def test_a_key_of_another_program_is_answered_wherever_it_stands(override, said):
    (line,) = problems("model.lora.r=4", override)
    assert line.startswith(said)


def test_every_name_is_answered_in_each_spelling():
    for name, answer in (
        (name, answer) for names, answer in ANSWERS.items() for name in names.split()
    ):
        assert (
            answer_to((name,)) == answer_to(("--" + name.upper().replace("_", "-"),)) == answer
        ), name
        assert answer_to(("data", "sets", "0", name)) == answer, name


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (
            DEEPSPEED,
            "train_micro_batch_size_per_gpu, gradient_accumulation_steps, zero_optimization",
        ),
        (SWIFT, "dataset, train_type, freeze_vit"),
        (TRAINER, "learning_rate, warmup_ratio, bf16"),
    ],
)
def test_a_whole_file_of_another_program_is_known_in_one_line(tmp_path, text, keys):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(file, ["run.name=mine"])
    said = f"{file}: a configuration of another program ({keys}); mmtrain's has the sections run, "
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["run: {name: a}\nbatch_size: 4\nlearning_rate: 1\n", "batch_size: 4\n", "a: 1\nb: 2\n"]
)
def test_a_file_that_may_be_meant_for_mmtrain_is_told_its_problems(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml: \d problems\n"):
        load_config(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--batch_size", "4"],
            "arguments: --batch_size 4; here train.packs_per_step is the batch of a step",
        ),
        (
            ["--learning-rate=1"],
            "arguments: --learning-rate=1; here it is optimizer.lr; keys are set without dashes, ",
        ),
        (
            ["--train.max_steps=1"],
            "arguments: --train.max_steps=1; here it is train.max_steps; keys are set",
        ),
        (["--max_step=1"], "arguments: --max_step=1; here it is train.max_steps; keys are set"),
        (["--frobnicate"], "arguments: --frobnicate\n"),
        (["-\x1b[31m"], "arguments: -\\x1b[31m\n"),
    ],
)
def test_a_key_given_as_an_option_is_answered_too(capfd, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", DEMO, *arguments])
    assert said in capfd.readouterr().err
