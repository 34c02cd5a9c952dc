"""What a configuration may hold and how it is read; golden/refusals.json has most of what is
refused.
"""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.base.printing import disclosed
from mmtrain.config.keys import InsteadOf, OnResume, all_fields, marked
from mmtrain.config.load import DEMO, dump_config, load_config, restore_config
from mmtrain.config.problems import nearest_key
from mmtrain.config.schema import RunConfig, TrainSection

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL = """
run: {name: test}
model:
  llm: {path: some/llm}
  vision: {name: some_vit}
data: {shards: a.tar}
train: {packs_per_step: 8, max_steps: 10}
"""


@pytest.fixture
def minimal(tmp_path) -> Path:
    file = tmp_path / "minimal.yaml"
    file.write_text(MINIMAL)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    """The lines of the error that loading raises, without their indentation."""
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return [line.strip() for line in str(caught.value).splitlines()]


def written(folder: Path, text: str) -> Path:
    file = folder / "written.yaml"
    file.write_text(text)
    return file


def test_the_keys_without_a_default_are_enough(minimal):
    config = load_config(minimal)
    assert config.run.name == "test"
    assert config.train.packs_per_step == 8
    assert config.model.trainable == ("projector",)
    assert config.optimizer.lr == 1e-3


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_configuration_loads_and_survives_a_dump(file, tmp_path):
    config = load_config(file)
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_a_dump_holds_every_key(minimal):
    dumped = yaml.safe_load(dump_config(load_config(minimal)))
    for path, _ in all_fields(RunConfig):
        if "*" in path:  # an element of a list, which is null here
            continue
        if path == ("data", "allow_pipe"):  # no file says it
            continue
        value = dumped
        for part in path:
            if value is not None:  # a section that is null has no keys
                value = value[part]


def test_only_the_command_line_says_which_programs_may_run(minimal, tmp_path):
    allowing = load_config(minimal, ["data.allow_pipe=[curl]"])
    assert allowing.data.allow_pipe == ("curl",)
    assert load_config(written(tmp_path, dump_config(allowing))).data.allow_pipe == ()
    assert restore_config(allowing.model_dump(mode="json"), "state.json").data.allow_pipe == ()
    content = yaml.safe_load(minimal.read_text())
    content.setdefault("data", {})["allow_pipe"] = ["sh"]
    with pytest.raises(UserError, match=r"data\.allow_pipe .* on the command line"):
        load_config(written(tmp_path, yaml.safe_dump(content)))


def test_what_a_checkpoint_holds_that_no_configuration_may_is_refused_by_its_key(minimal):
    content = load_config(minimal).model_dump(mode="json")
    content["parallel"] |= {"stages_per_rank": "many"}
    with pytest.raises(
        UserError,
        match=r"state\.json: a configuration .*\n  parallel\.stages_per_rank: 'many' is not",
    ):
        restore_config(content, "state.json")


def test_every_key_says_what_it_means():
    leaves = [
        (path, field)
        for path, field in all_fields(RunConfig)
        if not hasattr(field.annotation, "model_fields")
    ]
    assert len(leaves) > 30
    assert [path for path, field in leaves if not field.description] == []


def test_every_key_says_whether_a_resumed_run_may_change_it():
    leaves = [
        path
        for path, field in all_fields(RunConfig)
        if not hasattr(field.annotation, "model_fields")
    ]
    assert [
        path for path, _ in all_fields(RunConfig) if path in marked(RunConfig, OnResume)
    ] == leaves
    for path, field in all_fields(RunConfig):
        assert sum(isinstance(mark, OnResume) for mark in field.metadata) == (path in leaves), path


TEXT = ("model.vision=null", "model.trainable=[llm.head]", "data.template=chat")


def test_a_section_may_be_null_and_comes_back_with_one_of_its_keys(minimal, tmp_path):
    config = load_config(minimal, TEXT)
    assert config.model.vision is None
    file = written(tmp_path, dump_config(config))
    assert load_config(file) == config
    assert load_config(file, ["model.vision.name=another"]).model.vision.name == "another"
    assert restore_config(config.model_dump(mode="json"), "state.json") == config
    assert (
        config.changed({"model.vision.dtype": "float32", "model.llm.dtype": "float32"}).model.vision
        is None
    )
    written(tmp_path, MINIMAL.replace("{name: some_vit}", "7"))
    (problem,) = problems(file)[1:]
    assert problem.startswith(
        "model.vision: 7 is not allowed; it should be a section (the vision encoder; null: none"
    )
    written(tmp_path, MINIMAL.replace("  vision: {name: some_vit}\n", ""))
    assert "model.vision: null trains on text alone" in problems(file)[1]


def test_a_section_that_may_not_be_null_gets_its_defaults_by_it(minimal):
    reset = load_config(minimal, ["model.projector.type=linear", "model.projector=null"])
    assert reset == load_config(minimal)
    assert "model.projector=null" in problems(minimal, *TEXT, "model.projector.type=linear")[1]
    assert (
        load_config(
            minimal, [*TEXT, "model.projector.type=linear", "model.projector=null"]
        ).model.vision
        is None
    )


def test_a_key_stands_instead_of_another_of_its_section():
    keys = {".".join(path) for path, _ in all_fields(RunConfig)}
    for (section, name), mark in marked(RunConfig, InsteadOf).items():
        assert mark.key in keys and mark.key.partition(".")[0] == section, name


def test_a_key_that_is_no_unicode_is_refused_with_a_message(minimal, tmp_path):
    (_, line) = problems(minimal, "optim\udcff.lr=1")
    assert line.startswith("its keys: {") and line.endswith(
        "unable to parse raw data as a unicode string"
    )
    (_, line) = problems(written(tmp_path, '"optim\\ud800": 1'))
    assert line.startswith("its keys: {'optim\\ud800': 1} is not allowed")


def test_values_cannot_change_after_loading(minimal):
    with pytest.raises(ValidationError, match="frozen"):
        load_config(minimal).run.seed = 3


def test_values_at_dotted_keys_are_changed_in_a_copy(minimal):
    config = load_config(minimal)
    changed = config.changed({"model.llm.dtype": "float32", "train.max_steps": 3})
    assert (changed.model.llm.dtype, changed.train.max_steps) == ("float32", 3)
    assert (
        config
        == load_config(minimal)
        == changed.changed({"model.llm.dtype": "bfloat16", "train.max_steps": 10})
    )


def test_overrides_apply_in_order_and_are_read_as_yaml(minimal):
    config = load_config(
        minimal,
        [
            "optimizer.lr=3",
            "optimizer.lr=2e-5",
            "parallel.pipeline=3",
            "parallel.boundaries=[4, 8]",
            "optimizer.clip_norm=null",
            "run.overwrite=true",
            "model.trainable=[projector, llm.layers.*.mlp.*]",
        ],
    )
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.clip_norm is None
    assert config.parallel.boundaries == (4, 8)
    assert config.run.overwrite is True
    assert config.model.trainable == ("projector", "llm.layers.*.mlp.*")


def test_an_override_of_a_text_key_is_taken_as_it_stands(minimal):
    config = load_config(minimal, ["run.name=7", "data.shards=*.tar", "model.llm.path=a=b: c"])
    assert (config.run.name, config.data.shards, config.model.llm.path) == ("7", "*.tar", "a=b: c")
    assert load_config(minimal, ["data.shards=[a.tar, b.tar]"]).data.shards == ("a.tar", "b.tar")


def test_a_text_key_that_may_be_null_is_null_in_file_and_override(tmp_path):
    without = load_config(written(tmp_path, MINIMAL)).eval
    assert without.shards is None
    file = written(tmp_path, MINIMAL + "eval: {shards: held/*.tar, every_steps: 5}\n")
    assert load_config(file).eval.shards == "held/*.tar"
    assert load_config(file, ["eval.shards=null", "eval.every_steps=null"]).eval == without
    assert load_config(written(tmp_path, MINIMAL), ["run.name=null"]).run.name == "null", (
        "which may not be null"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1.5e-3", 1.5e-3), ("2E+0", 2.0), ("1", 1.0)]
)
def test_exponents_without_a_point_are_numbers_in_file_and_override(minimal, tmp_path, text, value):
    assert load_config(minimal, [f"optimizer.lr={text}"]).optimizer.lr == value
    file = written(
        tmp_path, MINIMAL + f"optimizer: {{lr: {text}, betas: [9e-1, 0.95], clip_norm: {text}}}\n"
    )
    config = load_config(file)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.clip_norm) == (
        value,
        (0.9, 0.95),
        value,
    )


def test_a_section_with_all_keys_commented_out_is_an_empty_section(tmp_path):
    config = load_config(written(tmp_path, MINIMAL + "optimizer:\nparallel:\n  # pipeline: 4\n"))
    assert config.parallel.pipeline == 1


@pytest.mark.parametrize(
    ("slips", "meant"),
    [
        ("max_step train.max_step train.steps", "train.max_steps"),
        ("lr optim.lr train.lr optimizer.Lr", "optimizer.lr"),
        ("data.pack_len data.packlength", "data.pack_length"),
        ("checkpoint.every_step checkpoint.steps", "checkpoint.every_steps"),
        ("eval.every", "eval.every_steps"),
        ("optimizer.warmup", "optimizer.warmup_fraction"),
        ("optimizer.clipnorm optimizer.clip", "optimizer.clip_norm"),
        ("parallel.pipelines", "parallel.pipeline"),
        ("parallel.timeout", "parallel.timeout_seconds"),
        ("data.shard shards", "data.shards"),
        ("run.sed", "run.seed"),
        ("train.every_minutes", "checkpoint.every_minutes"),
        ("model.init_form", "model.init_from"),
        ("parallel.recompute", "parallel.recompute_layers"),
        ("data.packs_per_step", "train.packs_per_step"),
        ("checkpoint.keep", "checkpoint.keep_last"),
        ("model.lora.alhpa", "model.lora.alpha"),
        ("train.packs_per_batch", "train.packs_per_microbatch"),
        ("data.cache", "data.cache_gib"),
        ("name", "run.name"),
        ("lora model.loras", "model.lora"),
        ("vision_dtype", "model.vision.dtype"),
        ("optimiser", "optimizer"),
        ("checkpoints", "checkpoint"),
        (
            "foo banana x hooks augmentation notes description author model.attention model.foo "
            "run.tags "
            "run.project project train.loss train.ema train.mixup callbacks logging profiler "
            "tokenizer_path "
            "neftune_noise_alpha use_cache rope_scaling parallel.tensor data.video model.audio "
            "optimizer.momentum "
            "train.early_stopping eval.metrics export.push hub_token dpo ref_model temperature "
            "top_p metadata defaults "
            "env device nodes run.folder data.image_size model.vision.path key17 \u200b",
            None,
        ),
    ],
)
def test_the_nearest_key_is_named_where_it_is_near_alone(slips, meant):
    known = [path for path, _ in all_fields(RunConfig)]
    found = {slip: nearest_key(tuple(slip.split(".")), known) for slip in slips.split()}
    assert found == dict.fromkeys(found, meant and tuple(meant.split(".")))


def test_a_stranger_gets_the_keys_of_its_section_alone(minimal):
    _, line = problems(minimal, "train.mixup=1")
    assert (
        line == "train.mixup: unknown key (value 1); keys of train: "
        f"{', '.join(TrainSection.model_fields)}"
    )


def test_a_fraction_of_0_evaluates_nothing_and_leaves_held_out_shards(minimal):
    assert not load_config(minimal, ["eval.fraction=0"]).eval.is_on
    assert (
        load_config(minimal, ["eval.shards=held-out.tar", "eval.fraction=0"]).eval.shards
        == "held-out.tar"
    )


def test_missing_keys_say_what_they_mean(tmp_path):
    file = written(tmp_path, "run: {name: test}\ntrain: {packs_per_step: 8}\n")
    lines = problems(file)
    assert lines[0] == f"{file}: 4 problems"
    assert sorted(line[:42] for line in lines[1:]) == [
        "data.shards: set exactly one of data.shard",
        "model.llm.path: missing (model folder, or ",
        "model.vision.name: missing (timm model nam",
        "train.max_steps: set exactly one of train.",
    ]


def test_all_problems_are_reported_together(minimal):
    lines = problems(
        minimal,
        "train.lr=1",
        "train.max_steps=0",
        "parallel.boundaries=[1]",
        "run.nme=x",
        "run.seed=-1",
    )
    assert lines[0] == f"{minimal}: 5 problems"
    found = {line.split(":")[0] for line in lines[1:]}
    assert found == {"train.lr", "train.max_steps", "parallel.boundaries", "run.nme", "run.seed"}


def test_a_malformed_override_is_quoted_in_part(minimal):
    (line,) = problems(minimal, "a." * 5000 + "b=1")
    assert line.startswith("override 'a.a.a.")


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        ("run: &a {}\neval: *a\n", "line 1, column 6", "&, * and ! begin an anchor, an "
                                                       "alias and a tag"),
        ("eval: {<<: {every_steps: 1}}\n", "line 1, column 8", "could not determine a "
                                                               "constructor for the tag"),
        ("run: " + "[" * 40, "line 1, column 37", "nested more than 32 deep"),
        ("run: 2001-99-99\n", "line 1, column 6", "'2001-99-99' is not a valid timestamp"),
    ],
)  # fmt: skip
def test_a_yaml_mistake_names_file_line_and_column(tmp_path, text, where, problem):
    file = written(tmp_path, text)
    (line,) = problems(file)
    assert line.startswith(f"{file}, {where}: {problem}")


@pytest.mark.parametrize(
    "text", ['run: "\\UFFFFFFFF"\n', f"%YAML 1.{'9' * 5000}\n---\nrun: 1\n", "run: \x01\n"]
)
def test_what_yaml_itself_does_not_take_is_one_line(tmp_path, text):
    (line,) = problems(written(tmp_path, text))
    assert line.endswith(". Fix the YAML there")


def test_several_data_sets_are_a_list_of_sections_with_their_own_problems(minimal):
    sets = (
        "data.sets=[{name: captions, shards: a.tar}, {name: chat, shards: "
        "[b.tar, c.tar], weight: 0.5}]"
    )
    loaded = load_config(minimal, ["data.shards=null", sets])
    assert [(one.name, one.shards, one.weight) for one in loaded.data.sets] == [
        ("captions", "a.tar", 1.0),
        ("chat", ("b.tar", "c.tar"), 0.5),
    ]
    _, *lines = problems(
        minimal,
        "data.shards=null",
        "data.sets=[{name: a, shard: x.tar}, {name: b b, shards: y.tar}]",
    )
    assert len(lines) == 3
    assert lines[0].startswith("data.sets.0.shards: missing (webdataset shards: a tar file")
    assert (
        "data.sets.0.shard: unknown key (value 'x.tar'); nearest valid key: data.sets.*.shards"
        in lines[1]
    )
    assert lines[2].startswith("data.sets.1.name: 'b b' is not allowed")
    twice = "data.sets=[{name: a, shards: x.tar}, {name: a, shards: y.tar}]"
    assert (
        problems(minimal, "data.shards=null", twice)[1]
        == "data.sets: two sets have the same name (a, a). Names must differ"
    )
    assert "the list is empty" in problems(minimal, "data.shards=null", "data.sets=[]")[1]


def test_an_override_takes_the_place_of_the_key_in_the_file_that_says_the_same_thing(minimal):
    loaded = load_config(minimal, ["train.epochs=2", "data.sets=[{name: a, shards: x.tar}]"])
    assert (loaded.train.epochs, loaded.train.max_steps, loaded.data.shards) == (2, None, None)
    assert load_config(minimal, ["train.epochs=null"]).train.max_steps == 10
    both = written(minimal.parent, MINIMAL.replace("max_steps: 10", "max_steps: 10, epochs: 1"))
    assert (
        problems(both)[1] == "train.max_steps: set exactly one of train.max_steps and train.epochs"
    )


def test_of_very_many_problems_the_first_are_said(tmp_path):
    said = problems(written(tmp_path, MINIMAL + "".join(f"key{i}: 1\n" for i in range(5000))))
    assert len(said) < 30 and said[-1] == "and more. Fix these first"


def test_others_see_no_arguments_of_pipe_urls_and_no_logins(minimal):
    secret = "pipe:curl -sf -H 'Authorization: Bearer hf_SECRET' https://user:SECRET@host/a.tar"
    config = load_config(minimal, [f'data.shards=["{secret}", /d/a.tar]', "data.allow_pipe=[curl]"])
    assert yaml.safe_load(dump_config(config))["data"]["shards"] == [secret, "/d/a.tar"]
    shown = dump_config(config, for_others=True)
    assert yaml.safe_load(shown)["data"]["shards"] == ["pipe:curl ...", "/d/a.tar"]
    assert "SECRET" not in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://user:p@w@host/a@b?c@d", "https://host/a@b?c@d"),
        (
            {"s3://key:x@bucket": ["pipe: 'my curl' -H x", 3, None]},
            {"s3://bucket": ["pipe: 'my ...", 3, None]},
        ),
        ("data.shards: pipe:curl\n-H x -> pipe:curl -H y", "data.shards: pipe:curl ..."),
        ("broken pipe: its reader ended", "broken pipe: its reader ended"),
        ("you@host: https://host/pipe:curl", "you@host: https://host/pipe:curl"),
    ],
)
def test_what_is_disclosed_has_no_logins(value, shown):
    assert disclosed(value) == shown


@pytest.mark.parametrize("command", ["train", "plan", "calibrate", "inspect", "index"])
@pytest.mark.parametrize("key", ["data.shards", "eval.shards", "optimizer.lr"])
def test_a_key_given_twice_is_refused_and_braces_that_a_shell_took_apart_are_named(
    capfd, command, key
):
    with pytest.raises(SystemExit, match="2"):
        main([command, DEMO, f"{key}=0", "run.name=here", f"{key} =1"])
    said = capfd.readouterr().err
    assert f"error: {key}: given 2 times. Give it once" in said
    assert ("quote its braces" in said) == ("shards" in key)
