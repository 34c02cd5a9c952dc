"""The fake CUDA itself: memory, forks, host waits, streams, kernels with references, and NCCL under
NCCL's rules.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import run_gpu_ranks
from tiers import nightly

pytestmark = pytest.mark.gpu(fake=True)
MIB = 2**20
CUDA = torch.device("cuda:0")


# ---- one process


def use_one_device():
    """What the host sees of memory, forks, waits, streams and kernels; each by the name of the test
    that judges it.
    """
    from fake_cuda.late import RUNTIME

    from mmtrain.model.llm.attention import flash_agrees

    seen = {}
    held = torch.zeros(100 * MIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        torch.zeros(200 * MIB, dtype=torch.uint8, device=CUDA)
    del held
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    seen["memory"] = (free, total, RUNTIME.fake_cuda_device_peak(0), str(raised.value))

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.empty(3 * MIB, dtype=torch.uint8, device=CUDA)
    before = RUNTIME.fake_cuda_page_locked()
    locked = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    seen["pools"] = (pooled.is_cuda, locked.is_pinned(), RUNTIME.fake_cuda_page_locked() - before)

    if (child := os.fork()) == 0:
        os._exit(RUNTIME.cudaDeviceSynchronize())
    seen["fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def waits(action) -> int:
        before = RUNTIME.fake_cuda_host_waits()
        action()
        return RUNTIME.fake_cuda_host_waits() - before

    x = torch.arange(6.0, device=CUDA)
    actions = {
        "computing": lambda: (x * 2).sum(),
        "page-locked copy": lambda: torch.ones(3).pin_memory().to(CUDA, non_blocking=True),
        "item": lambda: x.sum().item(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 2],
        "pageable copy": lambda: torch.ones(3).to(CUDA),
        "synchronize": torch.cuda.synchronize,
    }
    seen["waits"] = {name: waits(action) for name, action in actions.items()}

    side, orders = torch.cuda.Stream(), range(16)
    seen["streams"] = {bound: [] for bound in (True, False)}
    for bound, order in itertools.product((True, False), orders):
        RUNTIME.fake_cuda_order_by(order)
        filled = torch.zeros(4, device=CUDA)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            filled += 1
        if bound:
            torch.cuda.current_stream().wait_stream(side)
        doubled = filled * 2
        seen["streams"][bound].append(doubled.tolist() == [2.0] * 4)
        torch.cuda.synchronize()

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x.exp()
    end.record()
    asked_early = end.query()
    end.synchronize()
    seen["events"] = (asked_early, begin.elapsed_time(end) > 0)

    cases = itertools.product((False, True), (64,), (False, True), (torch.bfloat16, torch.float16))
    seen["attention"] = [
        flash_agrees(grouped, width, windowed, t, CUDA) for grouped, width, windowed, t in cases
    ]
    seen["attention"] += [
        sdpa_agrees(dtype, **mask) for dtype in (torch.float32, torch.bfloat16) for mask in MASKS
    ]
    return seen


MASKS = ({"is_causal": True}, {"attn_mask": torch.ones(16, 16).tril().bool()}, {})


def sdpa_agrees(dtype, **mask) -> bool:
    """Whether torch's attention and its gradients are, within rounding, those of the CPU."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 4, 16, 32, generator=generator).to(dtype) for _ in range(4)]
    found = []
    for device in ("cpu", CUDA):
        inputs = [state.to(device).requires_grad_() for state in states[:3]]
        options = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in mask.items()
        }
        output = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        gradients = torch.autograd.grad(output, inputs, states[3].to(device))
        found.append([x.float().cpu() for x in (output, *gradients)])
    close = 1e-5 if dtype == torch.float32 else 3e-2
    return all(torch.allclose(a, b, rtol=close, atol=close) for a, b in zip(*found, strict=True))


@pytest.fixture(scope="module")
def seen():
    (found,) = run_gpu_ranks(1, use_one_device, MIB=256)
    return found


def test_memory_ends_at_its_limit_and_comes_back(seen):
    free, total, peak, message = seen["memory"]
    assert free == total == 256 * MIB and 100 * MIB <= peak <= 120 * MIB
    assert message.startswith("CUDA out of memory. Tried to allocate 200.00 MiB")


def test_pools_and_page_locked_memory_are_known(seen):
    # torch rounds page-locked memory to a power of two
    assert seen["pools"] == (True, True, 8 * MIB)


def test_a_forked_process_may_not_use_cuda(seen):
    assert seen["fork"] == 3  # cudaErrorInitializationError


def test_host_waits_are_counted(seen):
    none, one = {"computing", "page-locked copy"}, {"item", "nonzero", "mask", "synchronize"}
    # A copy of pageable memory may wait before it begins, too.
    assert seen["waits"] == dict.fromkeys(none, 0) | dict.fromkeys(one, 1) | {"pageable copy": 2}


def test_only_events_bind_streams_to_each_other(seen):
    assert all(seen["streams"][True])
    assert seen["streams"][False].count(False) >= 8


def test_events_are_reached_late_and_have_times(seen):
    assert seen["events"] == (False, True)


def test_attention_of_kernels_agrees_with_the_cpu(seen):
    assert all(seen["attention"]), seen["attention"]


# ---- NCCL


def join(seconds: float = 60) -> tuple[int, int, torch.device]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=seconds))
    return rank, world, device


def exchange():
    """Name of torch's implementation, and what went wrong in operations whose results are known."""
    rank, world, device = join()
    wrong = []

    def check(name, tensor, expected):
        if not torch.equal(
            tensor.cpu(), torch.as_tensor(expected).to(tensor.dtype).expand(tensor.shape)
        ):
            wrong.append((name, tensor.flatten()[:4].tolist(), expected))

    for dtype, count in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64, torch.int64), (1, 5, 70_001)
    ):
        x = torch.full((count,), rank + 1, dtype=dtype, device=device)
        dist.all_reduce(x)
        check(f"sum {dtype} {count}", x, 6)
        dist.all_reduce(x.fill_(rank), op=dist.ReduceOp.MAX)
        check(f"max {dtype} {count}", x, 2)
    counted = torch.arange(50_000, device=device) + rank
    gathered = torch.empty(world * 50_000, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, counted)
    check("all-gather", gathered, torch.cat([torch.arange(50_000) + r for r in range(world)]))
    scattered = torch.empty(50_000, dtype=torch.int64, device=device)
    dist.reduce_scatter_tensor(scattered, gathered)
    check("reduce-scatter", scattered, world * (torch.arange(50_000) + rank))
    x = torch.full((3,), rank, device=device)
    dist.broadcast(x, 1)
    check("broadcast", x, 1)
    parts = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(parts, x + rank)
    check("list of all-gather", torch.stack(parts)[:, 0], [1, 2, 3])
    pair = dist.new_group([0, 2])
    if rank != 1:
        x = torch.full((2,), rank, device=device)
        dist.all_reduce(x, group=pair)
        check("a group of two", x, 2)
    for count in (1, 100_000):
        sent, room = (
            torch.arange(count, device=device) + rank,
            torch.zeros(count, dtype=torch.int64, device=device),
        )
        following, previous = (rank + 1) % world, (rank - 1) % world
        both = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, room, previous)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        check(f"messages of {count}", room, torch.arange(count) + previous)
    dist.barrier()
    torch.cuda.synchronize()
    return type(dist.group.WORLD._get_backend(device)).__name__, wrong


@pytest.mark.parametrize(
    "implementation", ["", nightly("0")], ids=["torch's choice", "the older one"]
)
def test_nccl_moves_what_collectives_and_messages_say(monkeypatch, implementation):
    if implementation:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", implementation)
    names = set()
    for name, wrong in run_gpu_ranks(3, exchange, seed=5):
        assert wrong == []
        names.add(name)
    newest = (
        "ProcessGroupNCCL2"
        if hasattr(dist, "ProcessGroupNCCL2") and not implementation
        else "ProcessGroupNCCL"
    )
    assert names == {newest}


def reduce_in_another_order():
    rank, _, device = join(20)
    large, small = torch.ones(8, device=device), torch.ones(3, device=device)
    for x in (large, small) if rank == 0 else (small, large):
        dist.all_reduce(x)
    torch.cuda.synchronize()


def receive_more_than_was_sent():
    rank, _, device = join(20)
    x = torch.ones(8 if rank == 0 else 6, device=device)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    torch.cuda.synchronize()


def wait_for_a_dead_peer():
    """Seconds that rank 0 waits for what rank 1, which has ended, never sent."""
    rank, _, device = join(4)
    dist.barrier()
    if rank == 1:
        return 0.0
    began = time.monotonic()
    with pytest.raises((dist.DistBackendError, RuntimeError), match=r"(?i)time"):
        while time.monotonic() < began + 30:
            dist.recv(torch.ones(3, device=device), 1)
            torch.cuda.synchronize()
    return time.monotonic() - began


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            reduce_in_another_order,
            r"is at all-reduce of [38] elements of type 7 where rank [01] is at all-reduce of",
        ),
        (
            receive_more_than_was_sent,
            r"rank 1 is at receive of 6 elements of type 7 where rank 0 is at send of 8",
        ),
    ],
)
def test_nccl_compares_what_ranks_meet_for(function, message):
    with pytest.raises(AssertionError, match=message):
        run_gpu_ranks(2, function, timeout=60)


@pytest.mark.nightly
def test_a_receive_from_a_dead_peer_has_torchs_timeout():
    """By an exception or, as ProcessGroupNCCL2 does, by the end of the process."""
    try:
        seconds = run_gpu_ranks(2, wait_for_a_dead_peer, timeout=60)[0]
    except AssertionError as error:
        assert re.search(r"rank 0 of 2 failed(.|\n)*timed out after [4-9]\d{3} ms", str(error))
    else:
        assert 3 < seconds < 30
