"""Where ranks meet: who can reach it, and what those get who do."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from processes import Command, listeners, running, wait_for
from tiers import nightly
from torch.distributed import TCPStore

from mmtrain.base.errors import UserError
from mmtrain.runtime.rendezvous import (
    EVERY_INTERFACE,
    FixedNodes,
    listening_address,
    listening_socket,
)

SECONDS_BETWEEN_READS = 5  # of the state that torch's dynamic rendezvous keeps in its store


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self._file}",)


def accepts(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), timeout=5).close()
        return True
    return False


def attack_store(port: int, poison: bytes) -> None:
    """Put a pickle into every key of the store at `port`, and into that of torch's dynamic
    rendezvous, in its way.
    """
    store = TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    for key in store.list_keys():
        store.set(key, poison)
    store.set("torch.rendezvous.mmtrain", base64.b64encode(poison))


def other_addresses() -> set[str]:
    """Of this machine, beside 127.0.0.1; a socket that listens on every interface answers at
    127.0.0.2, too.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing
        return {"127.0.0.2", outward.getsockname()[0]}
    return {"127.0.0.2"}


@pytest.fixture(params=["ranks alone", nightly("a training run")])
def run(request, tiny, tmp_path):
    """Two ranks in their first steps: without a model, or those of a run."""
    words = [Path(__file__).parents[1] / "failing_ranks.py", "stuck", tmp_path / "run"]
    if request.param == "a training run":
        words = ["-m", "mmtrain.launch", tiny / "config.yaml", f"run.dir={tmp_path}"]
        words += ["parallel.pipeline=2", "parallel.threads_per_rank=1", "train.max_steps=100000"]
    with running(words, tmp_path) as command:
        begun = re.compile("step 1/|to the console")
        wait_for(lambda: begun.search(command.stdout) or command.process.poll(), 200, "a step")
        assert command.process.poll() is None, command.stderr
        yield command


def test_of_a_run_on_one_machine_nothing_listens_for_others_and_nothing_put_into_its_store_runs(
    run: Command, tmp_path: Path
):
    family = run.family()
    assert len(family) >= 4  # launcher, fork server, two ranks
    found = listeners(family)
    stores = listeners([run.process.pid])
    marker = tmp_path / "attacked"
    poison = pickle.dumps(Touch(marker))
    for _, port in stores:
        attack_store(port, poison)
    for address, port in found - stores:
        with socket.create_connection((address, port)) as to_gloo:
            to_gloo.sendall(poison)
    time.sleep(SECONDS_BETWEEN_READS + 2)
    assert run.process.poll() is None and not marker.exists()

    assert len(stores) == 1 and {address for address, _ in found} == {"127.0.0.1"}
    assert not [
        (address, port)
        for _, port in found
        for address in other_addresses()
        if accepts(address, port)
    ]


def test_nothing_listens_any_more_once_the_run_is_over():
    nodes = FixedNodes("127.0.0.1", 0, 0, 1, "run", 60)
    nodes.next_rendezvous()
    assert accepts("127.0.0.1", nodes.master_port)
    assert nodes.shutdown()
    assert not accepts("127.0.0.1", nodes.master_port)


def test_the_first_of_several_machines_listens_on_the_address_that_the_others_are_given():
    given = other_addresses()
    assert {listening_address(f"{address}:29500") for address in given} == given
    assert listening_address("[::1]:29500") in ("::1", EVERY_INTERFACE)  # there may be no IPv6
    with listening_socket("127.0.0.2:0") as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize("endpoint", ["192.0.2.1:29500", "no-such-host.invalid:29500"])
def test_an_endpoint_that_is_no_address_of_this_machine_is_listened_for_everywhere(endpoint):
    """Behind address translation no interface has it; a name may become known later."""
    assert listening_address(endpoint) == EVERY_INTERFACE


def test_a_name_that_is_this_machine_to_itself_alone_is_listened_for_everywhere(monkeypatch):
    """Debian writes `127.0.1.1 NAME` into /etc/hosts: to the others the name is another address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    assert listening_address("node-0:29500") == EVERY_INTERFACE


def test_a_port_in_use_is_refused_with_the_address():
    with listening_socket("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError,
            match=rf"nothing can listen on 127\.0\.0\.1:{port} \(Address already in use\)",
        ):
            listening_socket(f"127.0.0.1:{port}")


def test_a_node_that_joins_twice_is_refused_and_the_first_one_is_not_disturbed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = [FixedNodes("127.0.0.1", port, number, 2, "mmtrain", 60) for number in (0, 1, 1)]
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(node.next_rendezvous) for node in nodes[:2])
        assert (first.result().rank, second.result().rank) == (0, 1)
        with pytest.raises(
            UserError, match=r"^--node-rank 1: another launcher has joined .* from 0 to 1\."
        ):
            nodes[2].next_rendezvous()
        first.result().store.set("alive", "yes")
        assert second.result().store.get("alive") == b"yes"
