import io
import tarfile

import pytest
from webdataset.shardlists import expand_urls

from mmtrain.base.errors import UserError
from mmtrain.data.shards.shard_list import expand_shards, find_shards, refuse_empty_shards
from mmtrain.facts.model_files import read_json


def write_tar(path, *members, form=tarfile.USTAR_FORMAT):
    """A tar of empty folders (names that end in /) and files of three bytes."""
    with tarfile.open(path, "w", format=form) as tar:
        for name in members:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = 0 if name.endswith("/") else 3
            tar.addfile(member, io.BytesIO(b"abc"))
    return path


def test_paths_globs_brace_ranges_and_lists_expand_in_order(tmp_path):
    for number in (0, 1, 2, 10):
        (tmp_path / f"s-{number:02}.tar").touch()
    names = lambda shards: [path.name for path in expand_shards(shards)]  # noqa: E731
    assert names(f"{tmp_path}/s-01.tar") == ["s-01.tar"]
    assert names(f"{tmp_path}/*.tar") == ["s-00.tar", "s-01.tar", "s-02.tar", "s-10.tar"]
    assert names(f"{tmp_path}/s-{{02..00}}.tar") == ["s-02.tar", "s-01.tar", "s-00.tar"]
    assert names(f"{tmp_path}") == names(f"{tmp_path}/") == names(f"{tmp_path}/*.tar")
    assert names((f"{tmp_path}/s-10.tar", f"{tmp_path}/s-0?.tar")) == [
        "s-10.tar",
        "s-00.tar",
        "s-01.tar",
        "s-02.tar",
    ]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("{}/none-*.tar", r"no file .*none-\*\.tar"),
        ("{}/s-{{00..01}}.tar", r"no file .*s-01\.tar \(from "),
        ((), "the list is empty"),
        (("{}/s-00.tar", "{}/*.tar"), r"s-00\.tar is named twice"),
        ("{}/none", r"^data\.shards: the folder .*/none holds no file"),
        ("/dev/null", "is not a regular file. Name tars, or folders"),
        (("{}/s-00.tar", "{}"), r"s-00\.tar is named twice"),
        ("pipe:cat {}/s-00.tar", "would run a program"),
        ("{}/a.tar::b.tar", "joins names by ::. Write a list of names"),
        ("{}/s-{{00..01.tar", "has braces that do not match"),
        ("{}/}}{{{{a,b}}{{.tar", "has braces that do not match"),
        ("{}/{{000000..999999}}{{000000..999999}}.tar", "more than 1,000,000 files"),
        ("{}/{{0..999999999999999999}}", "more than 1,000,000 files"),
        ("{}/{{0.." + "9" * 30 + "}}", "more than 1,000,000 files"),
        ("{}/" + "{{a,b}}" * 30, "more than 1,000,000 files"),
        ("{}/{{" + "{{a,b}}" * 30 + ",c}}", "more than 1,000,000 files"),
        ("{}/" + "{{" * 500 + "}}" * 500, "or are more than 100"),
        ("{}/" + "s" * 5000, "a path may have 4,096"),
        ("{}/**/*.tar", r"Write one \* per folder between"),
    ],
)
def test_shards_that_cannot_be_listed_are_refused(tmp_path, shards, message):
    (tmp_path / "s-00.tar").touch()
    (tmp_path / "none").mkdir()
    fill = lambda pattern: pattern.format(tmp_path)  # noqa: E731
    with pytest.raises(UserError, match=message):
        expand_shards(fill(shards) if isinstance(shards, str) else tuple(map(fill, shards)))


@pytest.mark.parametrize(
    "name", ["llava.json", "mix.JSONL", "captions.csv", "captions.tsv", "my train-0.parquet"]
)
def test_a_file_of_records_is_refused_with_the_command_that_makes_shards_of_it(tmp_path, name):
    (tmp_path / name).write_text("[]")
    command = rf"mmtrain shard --from '?{tmp_path}/{name}'? --images DIR --out FOLDER"
    with pytest.raises(
        UserError, match=rf"^eval\.shards: .*{name} is a file of records.* {command}"
    ):
        expand_shards(f"{tmp_path}/{name}", "eval.shards")


def test_a_colon_in_a_folder_name_is_no_url(tmp_path):
    folder = tmp_path / "2026-11-20 13:15"
    folder.mkdir()
    (folder / "a.tar").write_bytes(b"")
    assert expand_shards(f"{folder}/*.tar") == (folder / "a.tar",)


@pytest.mark.parametrize(
    "pattern", ["s-{00..02}.tar", "s-{a,b{1..3..2}}.tar", "{x}s.tar", "s-{01..00}-{2..10..4}.tar"]
)
def test_braces_mean_what_they_mean_to_webdataset(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    names = expand_urls(pattern)
    for name in names:
        (tmp_path / name).touch()
    assert [str(path) for path in expand_shards(pattern)] == names


def test_shards_without_a_file_or_a_byte_are_refused_by_the_key_that_listed_them(tmp_path):
    empty, folder = write_tar(tmp_path / "empty.tar"), write_tar(tmp_path / "folder.tar", "inside/")
    full = write_tar(tmp_path / "full.tar", "inside/", "inside/a.json")
    long_name = write_tar(tmp_path / "long.tar", "k" * 180 + ".json", form=tarfile.PAX_FORMAT)
    for paths in ([full], [empty, folder, full], [full, empty], [long_name]):
        refuse_empty_shards(paths)
    (tmp_path / "nothing.tar").touch()
    refused = {
        r"eval\.shards: .*empty\.tar is an empty archive": [empty],
        r"eval\.shards: all 2 shards are empty archives": [empty, folder],
        r"eval\.shards: .*nothing\.tar is empty \(0 bytes\)": [full, tmp_path / "nothing.tar"],
    }
    for message, paths in refused.items():
        with pytest.raises(UserError, match=f"^{message}"):
            refuse_empty_shards(paths, "eval.shards")


def test_a_link_to_what_an_unfinished_download_lacks_is_refused_by_its_target(tmp_path):
    (tmp_path / "s-0.tar").symlink_to("../../blobs/gone")
    (tmp_path / "config.json").symlink_to("../../blobs/config")
    for names in (str(tmp_path), f"{tmp_path}/s-0.tar", f"{tmp_path}/*.tar"):
        with pytest.raises(
            UserError, match=r"s-0\.tar: is a link to \.\./\.\./blobs/gone, which is not there"
        ):
            expand_shards(names)
    with pytest.raises(
        UserError, match=r"config\.json: is a link to \.\./\.\./blobs/config, which is not there"
    ):
        read_json(tmp_path / "config.json")


def test_a_tools_command_line_may_name_folders_too_and_a_shard_twice(tmp_path):
    for name in (
        "one/b.tar",
        "one/a.tar",
        "one/a.tar.index",
        "two/c.tar",
        "[x]/d.tar",
        "empty/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*arguments):
        found = find_shards([f"{tmp_path}/{argument}" for argument in arguments])
        return [path.relative_to(tmp_path).as_posix() for path in found]

    assert names("one", "two/*.tar") == ["one/a.tar", "one/b.tar", "two/c.tar"]
    assert names("[x]", "two") == ["[x]/d.tar", "two/c.tar"]
    assert names("one/b.tar", "one", "{two,one}/?.tar") == ["one/b.tar", "one/a.tar", "two/c.tar"]
    with pytest.raises(UserError, match=r"SHARDS: the folder .*/empty holds no file \*\.tar"):
        names("empty")
    with pytest.raises(UserError, match=r"SHARDS: no file .*none\.tar"):
        names("one", "none.tar")
