"""What the fake CUDA is for: a step that forgets to wait gives other numbers, in most orders of
streams.

Each bug is put into mmtrain's own code, and one step runs under eight orders; the right code runs
under twenty. A bug is caught where the loss or the gradients are not those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest
import torch
from gpu_ranks import fake_runtime, run_gpu_ranks
from ranks import run_ranks
from scenes import as_batch, join, make_config, make_document, make_engine, save_parts

from mmtrain.data.stream import packs
from mmtrain.engine import engine as engine_module
from mmtrain.engine.channels import Channels
from mmtrain.model.weights.streaming import SideStream, StreamedLayers

RIGHT, SEEDED = range(100, 120), range(200, 208)  # orders
STEP = [[[make_document(10 + i, images=(1, 0, 2, 1)[i])]] for i in range(4)]
Bug = Callable[[], AbstractContextManager[object]]

pytestmark = [pytest.mark.gpu(fake=True), pytest.mark.cpu_ranks]


# ---- bugs: each puts itself into mmtrain's code for a while


def fetch_is_not_awaited() -> AbstractContextManager[object]:
    right = SideStream.run

    def run(self: SideStream, fill: Callable[[], None]) -> Callable[[], None]:
        right(self, fill)
        return lambda: None

    return patch.object(SideStream, "run", run)


def fill_does_not_wait_for_earlier_work() -> AbstractContextManager[object]:
    return patch.object(torch.cuda.Stream, "wait_stream", lambda self, other: None)


def sent_memory_is_let_go_of() -> AbstractContextManager[object]:
    right = Channels.send

    def send(self: Channels, x: object, tensors: Sequence[torch.Tensor]) -> None:
        right(self, x, tensors)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.untyped_storage().resize_(0)

    return patch.object(Channels, "send", send)


def receive_is_read_before_its_wait() -> AbstractContextManager[object]:
    def take(self: Channels, receive: object) -> list[torch.Tensor]:
        works, tensors = self._awaited.pop(receive)
        for work, tensor in zip(works, tensors, strict=True):
            if not tensor.is_cuda:
                work.wait()
        return tensors

    return patch.object(Channels, "take", take)


def page_locked_memory_is_used_again() -> AbstractContextManager[object]:
    def copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        locked = tensor.pin_memory()
        moved = locked.to(device, non_blocking=True)
        locked.zero_()
        return moved

    return patch.object(packs, "copied", copied)


def batch_is_made_on_another_stream() -> AbstractContextManager[object]:
    """Copy all batches on one stream: on a new one each time a batch may find an equal, earlier one
    in its memory.
    """
    right, other = packs.to_device, torch.cuda.Stream()

    def to_device(batch: packs.PackedBatch, device: torch.device) -> packs.PackedBatch:
        with torch.cuda.stream(other):
            return right(batch, device)

    return patch.object(engine_module, "to_device", to_device)


def unused_fetch_is_not_awaited() -> AbstractContextManager[object]:
    """Fetch a layer too many each time, and let go of it at once. In the pool the next fetch would
    have its memory.
    """
    right = StreamedLayers._fetch

    def fetch(self: StreamedLayers, wanted: Sequence[int | None]) -> None:
        right(self, wanted)
        unused = next(layer for number, layer in self.layers.items() if number not in self._whole)
        unused._room = nullcontext
        unused.make_room()
        self.source.fetch(unused)
        unused.let_go()
        unused._room = self._room

    return patch.object(StreamedLayers, "_fetch", fetch)


BUGS: tuple[Bug, ...] = (
    fetch_is_not_awaited,
    fill_does_not_wait_for_earlier_work,
    unused_fetch_is_not_awaited,
    sent_memory_is_let_go_of,
    receive_is_read_before_its_wait,
    page_locked_memory_is_used_again,
    batch_is_made_on_another_stream,
)


# ---- on ranks


def one_step(config, orders: Sequence[int] = (0,), bugs: Sequence[Bug] = ()):
    """(loss, gradient norm) of the same step under each order, then for each bug under each of its
    orders.
    """
    join()
    engine = make_engine(config, warms_up=True)
    first = {name: weight.detach().cpu().clone() for name, weight in engine.trainable.items()}

    def step(order: int) -> tuple[float, float]:
        if (runtime := fake_runtime()) is not None:
            torch.cuda.synchronize()
            runtime.fake_cuda_order_by(order)
        engine.weights.load(first, {})
        batches = (as_batch(microbatch, config.data.pack_length) for microbatch in STEP)
        result = engine.train_step(batches if engine.pipeline_rank == 0 else None)
        engine.step_index = 0
        return result.loss, result.grad_norm

    found = [[step(order) for order in orders]]
    for bug in bugs:
        from fake_cuda import late

        # a failure's result is NaN; peers go on
        with bug(), patch.object(late, "raise_failure", lambda: None):
            found.append([step(order) for order in SEEDED])
            torch.cuda.synchronize()
        late._failure.clear()
    return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two ranks, all decoder layers streamed from the host and recomputed."""
    folder = tmp_path_factory.mktemp("bugs")
    save_parts(folder, layers=6)
    return make_config(
        folder,
        parallel__pipeline=2,
        parallel__boundaries=(3,),
        parallel__streamed_layers=6,
        parallel__recompute_layers=6,
        train__max_bad_steps=10**6,
    )


def reduce_in_another_order(config) -> None:
    """Let the second of two replicas add up its gradients last name first, which NCCL would mix up
    or hang on.
    """
    join()
    engine = make_engine(config)
    if engine.global_rank == 1:
        engine.weights.by_name = dict(reversed(engine.weights.by_name.items()))
    engine.train_step(
        as_batch(microbatch, config.data.pack_length)
        for microbatch in STEP[2 * engine.global_rank :]
    )


def is_right(step, expected) -> bool:
    return step == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_right_code_gives_the_cpus_numbers_and_each_bug_others(config):
    (expected,), *_ = run_ranks(2, one_step, config)[0]
    right, *of_bugs = run_gpu_ranks(2, one_step, config, RIGHT, BUGS, timeout=800)[0]
    print("right code:", right)
    caught = {
        bug.__name__: sum(not is_right(step, expected) for step in steps)
        for bug, steps in zip(BUGS, of_bugs, strict=True)
    }
    print(caught)
    assert [step for step in right if not is_right(step, expected)] == []
    assert {name: count for name, count in caught.items() if count < len(SEEDED) / 2} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("order", SEEDED)
def test_a_collective_in_another_order_on_one_rank_is_named(config, order):
    config = config.changed(
        {"parallel.pipeline": 1, "parallel.data": 2, "parallel.boundaries": None}
    )
    with pytest.raises(
        AssertionError,
        match=r"fake NCCL: .* is at all-reduce of \d+ elements .* is at all-reduce of",
    ):
        run_gpu_ranks(2, reduce_in_another_order, config, seed=order, timeout=90)
