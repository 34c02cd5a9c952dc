"""Measure messages between neighbouring ranks, and how fast streamed layers come to a device.

a stretch of compute alone, then the same with messages in it --difference--> sender's, receiver's
    seconds
a message there and one back, nobody computing --the rest of half of it--> the transfer's seconds

Messages are sent as a run sends them (`Channels`) and have its sizes: a calibration holds for one
size of micro-batch. On a CPU the differences include what a library's threads take from those that
compute.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.base.collectives import all_gather_object
from mmtrain.config.model import LlmSection
from mmtrain.engine.channels import Channels
from mmtrain.engine.process_groups import replica_group
from mmtrain.engine.stages import streamed_layers
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.stage import DTYPES
from mmtrain.model.weights.streaming import StreamedLayer, StreamedLayers
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan

MESSAGES = 3  # in a stretch
ECHOES = 4  # there and back, in a row
FETCHES = 7
SEND, RECEIVE, ECHO = "send", "receive", "echo"
MESSAGE, FEATURES = "message", "features"  # between stages; between slices of the encoder


class MessageCosts:
    """One rank's part: pipeline ranks 0 and 1 exchange messages, 2 and 3, and so on. Every method
    is collective.

    `messages` are the tensors of one message of each kind; `compute` works about as long as a stage
    does.
    """

    def __init__(
        self,
        plan: Plan,
        channels: Channels,
        messages: Mapping[str, Sequence[Tensor]],
        device: torch.device,
        compute: Callable[[], None],
    ) -> None:
        self._channels = channels
        self._messages = messages
        self._compute = compute
        self._synchronize = torch.get_device_module(device).synchronize
        self._stage = plan.ranks[dist.get_rank()].pipeline  # the first of this rank
        self._receives = self._stage % 2 == 1
        self._sends = not self._receives and self._stage + 1 < plan.pipeline
        sender = self._stage - self._receives
        takes_part = self._sends or self._receives
        self._echoes = takes_part and plan.first_trainable_stage <= sender

    def round(self) -> dict[str, float]:
        """Return seconds of a message of each kind, "send features" and so on; ECHO, one way, if
        messages go back.
        """
        seconds = {}
        alone = self._stretch(None)
        for kind, message in self._messages.items():
            more = (self._stretch(message) - alone) / MESSAGES
            if self._sends:
                seconds[f"{SEND} {kind}"] = more
            elif self._receives:
                seconds[f"{RECEIVE} {kind}"] = more
            dist.barrier()
            if self._echoes:
                seconds[f"{ECHO} {kind}"] = self._echo(message)
        return seconds

    def _stretch(self, message: Sequence[Tensor] | None) -> float:
        """Seconds of several computes; with messages, all are posted first and taken last, after
        they arrived.
        """
        channels = self._channels
        receives = []
        if message is not None and self._receives:
            receives = [_buffers(message) for _ in range(MESSAGES)]
        dist.barrier()
        self._synchronize()
        began = time.perf_counter()
        for number, buffers in enumerate(receives):
            channels.post_receive(Instruction(Op.RECEIVE_ACTIVATION, self._stage, number), buffers)
        for number in range(MESSAGES):
            if message is not None and self._sends:
                channels.send(Instruction(Op.SEND_ACTIVATION, self._stage, number), message)
            self._compute()
        self._compute()
        for number in range(len(receives)):
            channels.take(Instruction(Op.RECEIVE_ACTIVATION, self._stage, number))
        self._synchronize()
        seconds = time.perf_counter() - began
        channels.wait_for_sends()
        return seconds

    def _echo(self, message: Sequence[Tensor]) -> float:
        channels = self._channels
        send = Instruction(Op.SEND_ACTIVATION, self._stage, 0)
        receive = Instruction(Op.RECEIVE_GRADIENT, self._stage, 0)
        if self._receives:
            send = Instruction(Op.SEND_GRADIENT, self._stage, 0)
            receive = Instruction(Op.RECEIVE_ACTIVATION, self._stage, 0)
        began = time.perf_counter()
        for _ in range(ECHOES):
            channels.post_receive(receive, _buffers(message))
            if self._sends:
                channels.send(send, message)
            channels.take(receive)
            if self._receives:
                channels.send(send, message)
            self._synchronize()
        seconds = time.perf_counter() - began
        channels.wait_for_sends()
        return seconds / (2 * ECHOES)


def _buffers(message: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in message]


def measure_fetches(
    llm: LlmSection,
    plan: Plan,
    device: torch.device,
    timeout: int,
) -> dict[str, float]:
    """Return bytes a second of the plan's source, by its name; none for a plan that streams
    nothing. Collective.
    """
    if plan.streaming is None:
        return {}
    rank = dist.get_rank()
    replicas = replica_group(plan, rank, torch.device("cpu"), timeout)
    streamed = streamed_layers(plan, rank, device, replicas, timeout)

    # any layer that this rank streams
    here = itertools.chain.from_iterable(stage.streamed for stage in plan.ranks[rank].stages)
    number = next(here, 0)
    load_decoder_layers(
        llm.path,
        number,
        number + 1,
        embedding=False,
        head=False,
        dtype=DTYPES[llm.dtype],
        device=device,
        streamed=streamed,
        streamed_numbers=(number,),
    )
    layer = streamed.layers[number]
    _seconds_of_fetch(streamed, layer)  # warms up
    seconds = statistics.median(_seconds_of_fetch(streamed, layer) for _ in range(FETCHES))

    fetched = layer.bytes
    if plan.streaming.source == "peers":  # a rank keeps its own part
        fetched -= layer.bytes // plan.streaming.weight_shards
    return {plan.streaming.source: fetched / max(all_gather_object(seconds))}


def _seconds_of_fetch(streamed: StreamedLayers, layer: StreamedLayer) -> float:
    synchronize = torch.get_device_module(streamed.source.device).synchronize
    layer.make_room()
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    streamed.source.fetch(layer)()
    synchronize()
    seconds = time.perf_counter() - began
    layer.let_go()
    return seconds
