"""pipe: URLs run the programs that the command line names, once, without a shell."""

import sys

import pytest

from mmtrain.base.errors import UserError
from mmtrain.data.shards.shard_list import expand_shards

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def source(tmp_path):
    for number in range(2):
        (tmp_path / f"s-{number}.tar").write_bytes(bytes([number]) * 1000)
    return tmp_path


def test_an_allowed_program_runs_once_and_its_output_stays_a_file(source, logged):
    url = f"pipe:cat {source}/s-{{0..1}}.tar"
    first = expand_shards(url, allow_pipe=("cat",))
    assert [path.read_bytes() for path in first] == [bytes([number]) * 1000 for number in range(2)]
    assert [line.split(":")[1] for line in logged[::2]] == [
        f" running cat {source}/s-{n}.tar" for n in range(2)
    ]
    for file in source.glob("s-*.tar"):
        file.unlink()
    logged.clear()
    assert expand_shards(url, allow_pipe=("cat",)) == first and logged == []
    assert expand_shards(url) == first and logged == []  # nothing runs, so nobody need allow it


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pipe:curl -s x.tar", r"would run a program, but data\.allow_pipe allows only cat\."),
        ("pipe:/bin/cat x.tar", "would run a program"),
        ("pipe:", "would run a program"),
        ("pipe:cat 'x.tar", "cannot be split into words"),
        ("pipe:cat /nowhere/x.tar", "failed with exit code 1: .*No such file"),
    ],
)
def test_other_programs_and_failing_ones_are_refused(tmp_path, url, message):
    with pytest.raises(UserError, match=rf"^data\.shards: .*{message}"):
        expand_shards(url, allow_pipe=("cat",))
    assert not list(tmp_path.rglob("*.tar*"))


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"no-such-program x' cannot be run"):
        expand_shards("pipe:no-such-program x", allow_pipe=("no-such-program",))


def test_there_is_no_shell(tmp_path):
    code = "import sys; print(sys.argv[1:])"
    (path,) = expand_shards(
        f"pipe:{sys.executable} -c '{code}' a;b > {tmp_path}/c | d", allow_pipe=(sys.executable,)
    )
    assert path.read_text() == f"['a;b', '>', '{tmp_path}/c', '|', 'd']\n"
    assert not (tmp_path / "c").exists()
