"""Frozen decoder layers that are whole only while they compute: their bytes are kept elsewhere, and
fetched in time.

a layer, loaded --StreamedLayers.take--> its parameters in one buffer --Source.keep--> what is kept
    of it
a list's uses in order (plan/instructions.py) --follow--> before each forward, and each gradient of
    the layer's output:
what is kept --Source.fetch--> the buffer, under the same parameters; the next other layer's fetch
    begins

Parameters keep identity, shape and type; only their memory comes and goes. So whatever autograd
keeps of a weight is right again once the layer is whole for its backward. In between nothing may
read them (`whole` lets it).

On a GPU a fetch runs on a stream of its own, and no call waits for it on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from mmtrain.model.weights.fingerprint import fingerprint
from mmtrain.plan.instructions import fetches_of, offsets_of, with_following

Wait = Callable[[], None]


class Source:
    """A store of streamed layers' weights, from which they are fetched to `device`."""

    name: str  # as plans call it
    is_exact = True  # what is fetched has the bits of what was kept

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def padded(self, size: int) -> int:
        return size

    def keep(self, layer: StreamedLayer) -> Any:
        """Return what this rank keeps of a layer, which is whole."""
        raise NotImplementedError

    def fetch(self, layer: StreamedLayer) -> Wait:
        """Begin to fill the layer's buffer from what is kept; the result lets what computes next
        wait for that.
        """
        raise NotImplementedError

    def fingerprints(self, layer: StreamedLayer) -> list[str]:
        """Return fingerprints of what this source has made of each parameter of a whole layer."""
        return [fingerprint(p) for p in layer.parameters]


class SideStream:
    """A GPU's stream on which buffers are filled beside computing; on a CPU the caller fills them
    itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, fill: Callable[[], None]) -> Wait:
        """Begin to `fill` once all is computed that was asked for so far, which may use the same
        memory.
        """
        if self._stream is None:
            fill()
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            fill()
            there = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(there)


class StreamedLayer:
    """One decoder layer whose parameters lie in one buffer that comes and goes."""

    def __init__(
        self,
        number: int,
        layer: nn.Module,
        source: Source,
        room: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """The layer is whole until `let_go`. `room` says where its buffer's memory comes from."""
        self.source = source
        self.parameters = list(layer.parameters())
        self.names = [f"llm.layers.{number}.{name}" for name, _ in layer.named_parameters()]
        self.homes = []  # views of the buffer, one for each parameter
        sizes = [p.nbytes for p in self.parameters]
        offsets, total = offsets_of(sizes)
        self.bytes = source.padded(total)
        with room():
            self.buffer = torch.empty(
                self.bytes,
                dtype=torch.uint8,
                device=source.device,
            )
        for parameter, offset, size in zip(self.parameters, offsets, sizes, strict=True):
            home = self.buffer[offset : offset + size].view(parameter.dtype).view(parameter.shape)
            home.copy_(parameter.detach())
            # A tensor of its own, with a count of its own of what is written to it: a fetch is no
            # change of a weight.
            parameter.data = home
            self.homes.append(home)
        self.loaded = [fingerprint(p) for p in self.parameters]  # as the files have them
        self.unfetched: set[int] = set()
        """Indices of parameters that fetches skip, because products read what is kept of them."""
        self.kept = source.keep(self)
        self._room = room
        self.wait: Wait | None = None

    def make_room(self) -> None:
        """Give the buffer memory, of unknown contents."""
        with self._room():
            self.buffer.untyped_storage().resize_(self.bytes)

    def let_go(self) -> None:
        self.buffer.untyped_storage().resize_(0)


class StreamedLayers:
    """The streamed layers of one rank, by number of the decoder layer."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.layers: dict[int, StreamedLayer] = {}
        self.fetch_count = self.planned_fetches = 0  # of all lists that were followed
        self.before_wait = lambda: None  # called around each wait for a fetch
        self.after_wait = lambda: None
        self._whole = []  # there, or on their way
        # Memory of buffers alone: what else a GPU allocates would take pieces of it, and no layer
        # would fit any more.
        self._pool = torch.cuda.MemPool() if source.device.type == "cuda" else None
        self._uses: Iterator[tuple[int, int | None]] | None = None  # None: no list is followed

    def take(self, number: int, layer: nn.Module) -> None:
        """Keep this frozen layer in the source from now on, with the parameters that it has now."""
        taken = self.layers[number] = StreamedLayer(number, layer, self.source, self._room)
        taken.let_go()

    def _room(self) -> AbstractContextManager[None]:
        if self._pool is None:
            return nullcontext()
        return torch.cuda.use_mem_pool(self._pool, self.source.device)

    def around(
        self,
        number: int,
        forward: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Wrap a layer's forward so that the layer is whole for it and for its backward."""
        return functools.partial(self._forward, number, forward)

    def _forward(
        self,
        number: int,
        forward: Callable[..., Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        self._use(number)
        output = forward(*arguments, **options)
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            # Its backward ends where another layer is used: not every layer has a gradient of its
            # input.
            hidden.register_hook(lambda _: self._use(number))
        return output

    def follow(self, uses: Sequence[int]) -> None:
        """Begin a list that uses layers in this order, and the fetches of the first two."""
        self._let_go_but(())
        self._uses = with_following(uses)
        self.planned_fetches += len(fetches_of(uses))
        if uses:
            self._fetch(next(with_following(uses)))

    def end(self) -> None:
        """End the list, or a use without one, and release all layers. Raises RuntimeError for uses
        that are left.
        """
        unused = list(self._uses or ())
        self._uses = None
        self._let_go_but(())
        if unused:
            raise RuntimeError(
                f"{len(unused)} uses of streamed layers are left, first of layer {unused[0][0]}"
            )

    def _use(self, number: int) -> None:
        """Make the layer whole; all before it have computed."""
        pair = number, None
        if self._uses is not None:
            pair = next(self._uses, (-1, None))
            if pair[0] != number:  # ranks that fetch from each other would wait for ever
                raise RuntimeError(
                    f"decoder layer {number} is used where the list has layer {pair[0]}"
                )
        self._fetch(pair)
        self._await(self.layers[number])

    def _await(self, layer: StreamedLayer) -> None:
        if layer.wait is not None:
            self.before_wait()
            layer.wait()
            layer.wait = None
            self.after_wait()

    def _fetch(self, wanted: Sequence[int | None]) -> None:
        self._let_go_but(wanted)
        for number in wanted:
            if number is not None and number not in self._whole:
                layer = self.layers[number]
                layer.make_room()
                layer.wait = self.source.fetch(layer)
                self._whole.append(number)
                if self._uses is not None:
                    self.fetch_count += 1

    def _let_go_but(self, wanted: Sequence[int | None]) -> None:
        for number in self._whole:
            if number not in wanted:
                # else it would be filled while the memory is somebody else's
                self._await(self.layers[number])
                self.layers[number].let_go()
        self._whole = [number for number in self._whole if number in wanted]

    @contextmanager
    def whole(self, number: int) -> Iterator[StreamedLayer]:
        """Make the layer whole outside lists, with weights that fetches skip."""
        layer = self.layers[number]
        unfetched = layer.unfetched
        layer.unfetched = set()
        try:
            self._use(number)
            yield layer
        finally:
            self.end()
            layer.unfetched = unfetched
