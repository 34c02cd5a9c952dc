"""`${NAME}` in a path stands for an environment variable: once, as text, and in no other key."""

from pathlib import Path

import pytest

from mmtrain.base.errors import UserError
from mmtrain.config.keys import NamesFiles, marked
from mmtrain.config.load import DEMO, dump_config, load_config, restore_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.shard_list import expand_shards

SETS = "data.sets=[{name: a, shards: '${DATA}/a.tar'}, {name: b, shards: ['${DATA}/b.tar', c.tar]}]"


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "/mnt/data")
    monkeypatch.delenv("NOT_THERE", raising=False)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, overrides)
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"{DEMO}: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return [line.strip() for line in lines]


def test_the_keys_that_name_files_are_marked():
    assert {".".join(path) for path in marked(RunConfig, NamesFiles)} == {
        "run.dir",
        "model.pretrained",
        "model.llm.path",
        "model.vision.name",
        "model.projector.init_from",
        "model.init_from",
        "parallel.calibration",
        "data.shards",
        "data.sets.*.shards",
        "data.template",
        "eval.shards",
    }


@pytest.mark.parametrize(
    "path", sorted(set(marked(RunConfig, NamesFiles)) - {("data", "template")})
)
def test_a_variable_is_filled_in_wherever_a_key_names_files(path):
    if "*" in path:
        one, other = load_config(DEMO, ["data.shards=null", SETS]).data.sets
        assert (one.shards, other.shards) == ("/mnt/data/a.tar", ("/mnt/data/b.tar", "c.tar"))
        return
    key = ".".join(path)
    assert (
        load_config(DEMO, [f"{key}=${{DATA}}/${{DATA}}-x"]).value_at(path)
        == "/mnt/data//mnt/data-x"
    )


def test_a_template_is_read_from_a_variable_folder_and_a_template_text_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA", str(tmp_path))
    Path("mine.jinja").write_text("{{ messages }} ${DATA} ${NOT_THERE}")
    config = load_config(DEMO, ["data.template=${DATA}/mine.jinja"])
    assert config.data.template == "{{ messages }} ${DATA} ${NOT_THERE}"
    Path("again.yaml").write_text(dump_config(config))
    assert load_config("again.yaml") == config


def test_in_a_file_as_in_an_override_and_the_whole_path_is_kept(monkeypatch):
    Path("mine.yaml").write_text(
        "run: {name: a, dir: '${DATA}/runs'}\nmodel: {pretrained: '${DATA}/llava'}\n"
        "train: {packs_per_step: 1, epochs: 1}\ndata:\n  shards: ${DATA}/x-{000..001}.tar\n"
    )
    config = load_config("mine.yaml")
    assert (config.run.dir, config.data.shards) == ("/mnt/data/runs", "/mnt/data/x-{000..001}.tar")
    assert (
        config.model.llm.path
        == config.model.vision.name
        == config.model.projector.init_from
        == "/mnt/data/llava"
    )
    Path("config.yaml").write_text(dump_config(config))
    monkeypatch.setenv("DATA", "/elsewhere")
    assert load_config("config.yaml") == config
    assert restore_config(config.model_dump(mode="json"), "state.json") == config


def test_braces_of_shards_stay_beside_those_of_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA", str(tmp_path))
    for number in range(3):
        Path(f"x-{number:03}.tar").touch()
    shards = load_config(DEMO, ["data.shards=${DATA}/x-{000..002}.tar"]).data.shards
    assert expand_shards(shards) == tuple(tmp_path / f"x-{number:03}.tar" for number in range(3))
    Path("x-$001.tar").touch()
    assert expand_shards(load_config(DEMO, ["data.shards=x-${001..001}.tar"]).data.shards) == (
        Path("x-$001.tar"),
    )


def test_a_value_is_text_and_no_yaml(monkeypatch):
    for value in (
        "null",
        "[a, b]",
        "1: {2",
        "a\nb: c",
        "$(touch x)",
        "`touch x`",
        "~",
        "\x1b[31m",
        "\udcff",
    ):
        monkeypatch.setenv("DATA", value)
        config = load_config(DEMO, ["data.shards=${DATA}", "run.dir=${DATA}/runs"])
        assert (config.data.shards, config.run.dir) == (value, f"{value}/runs")
        Path("config.yaml").write_text(dump_config(config))
        assert load_config("config.yaml") == config
    assert not Path("x").exists()


@pytest.mark.parametrize("value", ["${HOME}", "a/${HOME}/b", "{HOME}"])
def test_what_a_variable_holds_is_not_filled_in_again(monkeypatch, value):
    monkeypatch.setenv("DATA", value)
    prefix = "" if "$" in value else "$"
    (line,) = problems(f"run.dir={prefix}${{DATA}}/x")
    assert line.startswith(
        f"run.dir: {prefix}${{DATA}}/x still holds ${{...}} after its variables are filled in"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "run.dir=${NOT_THERE}/x",
            "run.dir: the environment variable of ${NOT_THERE} is not set. Set it, or write",
        ),
        (
            "eval.shards=${EMPTY}/x",
            "eval.shards: the environment variable of ${EMPTY} is empty. Set it, or write",
        ),
        (
            "data.shards=[a, '${NOT_THERE}/b']",
            "data.shards.1: the environment variable of ${NOT_THERE} is not set",
        ),
        (
            "run.dir=${DATA:-/x}/y",
            "run.dir: ${DATA:-/x}/y still holds ${...} after its variables are filled in. "
            "Write variables as",
        ),
        (
            "run.dir=${NOT_THERE:-${DATA}}",
            "run.dir: ${NOT_THERE:-${DATA}} still holds ${...} after its variables are filled in",
        ),
        (
            "model.llm.path=$DATA/llm",
            "model.llm.path: $DATA is neither a file nor a variable. Write ${DATA}",
        ),
        (
            "run.dir=${AWS_SECRET_ACCESS_KEY}",
            "run.dir: ${AWS_SECRET_ACCESS_KEY} looks like a secret by its name, and paths are",
        ),
        ("data.shards=${hf_token}", "data.shards: ${hf_token} looks like a secret by its name"),
        (
            "run.dir=${STORE_URL}",
            "run.dir: ${STORE_URL} holds an address with a login, and paths are shown",
        ),
        ("run.dir=${" + "N" * 1000 + "}", "run.dir: the environment variable of ${NNNN"),
    ],
)
def test_a_path_that_cannot_be_filled_in_is_one_line_with_its_remedy(monkeypatch, override, said):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("STORE_URL", "https://me:hidden@store/x")
    (line,) = problems(override)
    assert line.startswith(said) and len(line) < 200 and "hidden" not in line


def test_a_name_with_a_dollar_of_its_own_stays(tmp_path):
    Path("$DATA").mkdir()
    config = load_config(DEMO, ["data.shards=$DATA/x-*.tar", "run.dir=$NOT_THERE/%NOT_THERE%"])
    assert (config.data.shards, config.run.dir) == ("$DATA/x-*.tar", "$NOT_THERE/%NOT_THERE%")


def test_programs_get_no_variables_and_other_keys_have_none():
    url = "pipe:curl -sf https://host/${DATA}/${AWS_SECRET_ACCESS_KEY}"
    assert load_config(DEMO, [f"data.shards={url}", "data.allow_pipe=[curl]"]).data.shards == url
    (line,) = problems("run.name=${DATA}")
    assert line.startswith("run.name: '${DATA}' is not allowed; it should be letters, digits")
    assert load_config(DEMO, ["data.caption_prompt=${DATA}?"]).data.caption_prompt == "${DATA}?"


def test_within_brackets_of_yaml_the_error_says_to_quote():
    with pytest.raises(
        UserError,
        match=r"Fix the YAML there \(inside \[ \] and \{ \}, quote a path with a variable",
    ):
        load_config(DEMO, ["data.shards=[${DATA}/x.tar]"])
