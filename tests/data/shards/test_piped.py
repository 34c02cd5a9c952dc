"""pipe: URLs run the programs that the command line names, once, without a shell."""

import sys
import time

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
    # without arguments, which may hold secrets
    assert logged[::2] == ["data.shards: running pipe:cat ..."] * 2
    assert "s-0.tar" not in "".join(logged)
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
        ("pipe:cat /nowhere/x.tar", "failed with exit code 1: .*/nowhere/x.tar: No such file"),
        ("pipe:cat x.tar | gunzip", r"holds \|, which needs a shell, and none is used"),
        ("pipe:cat x.tar || cat y.tar", r"holds \|, which needs a shell, and none is used"),
    ],
)
def test_other_programs_and_failing_ones_are_refused(tmp_path, url, message):
    with pytest.raises(UserError, match=rf"^data\.shards: .*{message}"):
        expand_shards(url, allow_pipe=("cat",))
    assert not list(tmp_path.rglob("*.tar*"))


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"'pipe:no-such-program \.\.\.' cannot be run"):
        expand_shards("pipe:no-such-program x", allow_pipe=("no-such-program",))


def test_there_is_no_shell(tmp_path):
    code = "import sys; print(sys.argv[1:])"
    (path,) = expand_shards(
        f"pipe:{sys.executable} -c '{code}' a;b > {tmp_path}/c 'a|d'", allow_pipe=(sys.executable,)
    )
    assert path.read_text() == f"['a;b', '>', '{tmp_path}/c', 'a|d']\n"
    assert not (tmp_path / "c").exists()


def test_no_argument_of_a_program_is_in_a_message(tmp_path):
    for url in (
        "pipe:cat --secret=confidential",
        "pipe:cat confidential 'x",
        "pipe:cat confidential | gunzip",
        "pipe:cat confidential {",
        "pipe:curl -H confidential https://host/a.tar",
    ):
        with pytest.raises(UserError) as refused:
            expand_shards(url, allow_pipe=("cat",))
        # what the program itself has said of them is the user's only hint
        said = str(refused.value).partition("failed with")[0]
        assert "confidential" not in said and "pipe:" in said


def test_a_program_that_says_nothing_has_its_exit_code_and_advice():
    with pytest.raises(UserError, match=r"exit code 3: it printed nothing; curl -sSf prints"):
        expand_shards("pipe:sh -c 'exit 3'", allow_pipe=("sh",))


def test_output_beyond_the_bound_stops_the_program_and_leaves_no_file(tmp_path):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"more than data\.cache_gib allows\. Raise it, or"):
        expand_shards("pipe:cat /dev/zero", allow_pipe=("cat",), cache_gib=0.01)
    assert time.monotonic() - start < 10
    assert not [path for path in tmp_path.rglob("*") if path.suffix != ".lock" and path.is_file()]


def test_the_bound_counts_what_earlier_programs_have_left(source):
    size = 1000
    bound = 1.5 * size / 2**30
    urls = [f"pipe:cat {source}/s-{number}.tar" for number in range(2)]
    expand_shards(urls[0], allow_pipe=("cat",), cache_gib=bound)
    with pytest.raises(UserError, match=r"data\.cache_gib"):
        expand_shards(urls[1], allow_pipe=("cat",), cache_gib=bound)
    expand_shards(urls[1], allow_pipe=("cat",), cache_gib=2 * bound)
