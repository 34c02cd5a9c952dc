"""The meeting of a run's ranks, which compare their plans there.

A store of torch's that listens on one address, and from which nothing is unpickled:

launcher of node 0: socket --> TCPStore <-- launchers of other nodes, and all ranks
    (init_process_group, env://)

torch's own stores listen on every interface, whatever the endpoint says, and its dynamic rendezvous
unpickles a key of the store every five seconds, which runs what a stranger puts there.
"""

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore, rendezvous
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.runtime.job import Agreement

BACKEND = "mmtrain"
"""Name of this rendezvous among torch's; its settings are `rank`, this node's number, and
`timeout`, in seconds.
"""
THIS_MACHINE = "127.0.0.1:0"
"""The endpoint of a run on one node: the operating system picks a free port, without a race."""
EVERY_INTERFACE = ""


class FixedNodes(StaticTCPRendezvous):
    """A fixed number of nodes, each with its own number. Node 0 holds the ranks' store."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for every node. Raises UserError for a node that joins twice, DistError in time."""
        if self.rank == 0:
            listener = listening_socket(f"{self.master_addr}:{self.master_port}")
            address, self.master_port = listener.getsockname()[:2]
            print(f"the run's store listens on {address}:{self.master_port}")
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                master_listen_fd=listener.detach(),
            )
        joined = super().next_rendezvous()
        # its ranks would hang, or take over connections
        if joined.store.add(f"node {self.rank}", 1) > 1:
            raise UserError(
                f"--node-rank {self.rank}: another launcher has joined this run with that number. "
                f"Give each machine its own, from 0 to {self.world_size - 1}. "
                "If that launcher has ended, start the run again on all"
            )
        return joined

    def shutdown(self) -> bool:
        """Close node 0's store, so that nothing listens once the run is over."""
        self._store = None
        return True

    def get_backend(self) -> str:
        return BACKEND


def agree(agreement: Agreement, rank: int, timeout_seconds: int) -> Store:
    """Return the store at which all ranks meet. Raises UserError on every rank unless all agree."""
    store, _, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    store.set(f"mmtrain/plan/{rank}", json.dumps(agreement))
    if rank == 0:
        plans = [json.loads(store.get(f"mmtrain/plan/{other}")) for other in range(world_size)]
        others = [other for other, (digest, _) in enumerate(plans) if digest != plans[0][0]]
        found = ""
        if others:
            found = _difference(plans[0][1], plans[others[0]][1], others)
        store.set("mmtrain/difference", found)
    difference = store.get("mmtrain/difference").decode()
    store.set(f"mmtrain/read/{rank}", "")
    if rank == 0:  # whose process may hold the store: it must not end before all have read
        store.wait([f"mmtrain/read/{other}" for other in range(world_size)])
    if difference:
        raise UserError(difference)
    return store


def _difference(first: dict[str, Any], other: dict[str, Any], others: Sequence[int]) -> str:
    """Return the message with three keys that differ on rank 0 and on the first of `others`."""
    values = []
    for key in first | other:
        mine = first.get(key)
        theirs = other.get(key)
        if mine != theirs:
            values.append(
                f"{key} is {escape(json.dumps(mine))} on rank 0 and "
                f"{escape(json.dumps(theirs))} on rank {others[0]}"
            )
    why = (
        "mmtrain's version, secrets in the config, --trace, the model's files, the calibration "
        "(name one file in parallel.calibration) and parallel.device_memory_gib (set it where GPUs "
        "differ) must be equal on every machine"
    )
    if values:
        why = f"{'; '.join(values[:3])}. Start every machine with the same configuration"
    return f"rank {', '.join(map(str, others))} planned a different run than rank 0: {why}"


def _handler(parameters: RendezvousParameters) -> FixedNodes:
    host, port = _split(parameters.endpoint)
    node, timeout = (int(parameters.config[name]) for name in ("rank", "timeout"))
    return FixedNodes(
        host,
        port,
        node,
        parameters.max_nodes,
        parameters.run_id,
        timeout,
    )


def listening_address(endpoint: str) -> str:
    """Return this machine's address that HOST of `endpoint` names, else EVERY_INTERFACE.

    It names none behind address translation, or where a machine calls itself 127.0.1.1.
    """
    host, _ = _split(endpoint)
    # a name may become known later, as in a cluster of containers
    with contextlib.suppress(OSError):
        for *_, (address, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            is_loopback = ipaddress.ip_address(address.split("%")[0]).is_loopback
            if host in ("localhost", address) or not is_loopback:
                with contextlib.suppress(OSError):
                    socket.create_server((address, 0), family=_family(address)).close()
                    return address
    return EVERY_INTERFACE


def listening_socket(endpoint: str) -> socket.socket:
    """Return a socket that listens on the endpoint's address. Raises UserError if none can."""
    address = listening_address(endpoint)
    (_, port) = _split(endpoint)
    where = f"{address}:{port}" if address else f"port {port}"
    both = address == EVERY_INTERFACE and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else _family(address)
    try:
        return socket.create_server(
            (address, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both
        )
    except OSError as error:
        raise UserError(
            f"nothing can listen on {where} ({os.strerror(error.errno)}). "
            "Give another port in --rdzv-endpoint on every machine"
        ) from error


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


rendezvous_handler_registry.register(BACKEND, _handler)
