"""A rank's clock, by hand-made steps; test_trace compares real ones."""

from __future__ import annotations

import torch

from mmtrain.base import devices
from mmtrain.engine.step_clock import RankSeconds, StepClock, heap_bytes
from mmtrain.engine.trace import Work
from mmtrain.plan.instructions import Instruction, Op

LOAD, FORWARD, SEND = (
    Instruction(Op.LOAD, 0, 1),
    Instruction(Op.FORWARD, 0, 1),
    Instruction(Op.SEND_ACTIVATION, 0, 1),
)
REDUCE, UPDATE = Instruction(Op.REDUCE_STATISTICS), Instruction(Op.OPTIMIZER_STEP)


class Hands:
    """Sets what the clock reads."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(devices.time, "perf_counter", lambda: self.now)

    def run(self, clock, instruction, seconds, waiting=0.0, fetching=0.0):
        clock.start(instruction)
        if waiting:
            self.now += waiting
            clock.waited()
        self.now += seconds
        if fetching:
            clock.done()
            self.now += fetching
            clock.fetched()
        clock.done()

    def step(self, clock):
        clock.begin()
        self.run(clock, LOAD, 2)
        self.run(clock, FORWARD, 4, waiting=3)
        self.run(clock, SEND, 1)
        clock.start(REDUCE)
        self.now += 0.5
        return clock.read()


def test_a_step_is_split_into_computing_communicating_loading_and_waiting(monkeypatch):
    hands = Hands(monkeypatch)
    clock = StepClock(torch.device("cpu"))
    hands.now += 10
    reading = hands.step(clock)
    assert reading == RankSeconds(-10, 4, 1.5, 2, 0, reading.peak_memory_bytes)
    hands.now += 5
    late = RankSeconds(-11, 6, 0, 0, 0, 2048)  # the other rank began a second later
    mine, other = clock.leave([reading, late])
    assert (mine.window, mine.compute, mine.communication, mine.data, mine.idle) == (
        15.5,
        4,
        1.5,
        2,
        8,
    )
    assert (other.window, other.compute, other.idle, other.peak_memory_bytes) == (
        14.5,
        6,
        8.5,
        2048,
    )
    clock.done()  # of the reduction, which `read` has marked
    hands.run(clock, UPDATE, 0.25)
    clock.start(None)
    hands.now += 0.75
    clock.waited()
    assert clock.seconds == 25.5
    assert clock.intervals() == [
        (Work.LOAD, LOAD, 10, 12),
        (Work.WAIT, FORWARD, 12, 15),
        (Work.FORWARD, FORWARD, 15, 19),
        (Work.COMMUNICATION, SEND, 19, 20),
        (Work.COMMUNICATION, REDUCE, 20, 20.5),
        (Work.WAIT, REDUCE, 20.5, 25.5),
        (Work.OPTIMIZER, UPDATE, 25.5, 25.75),
        (Work.WAIT, None, 25.75, 26.5),
    ]


def test_waiting_for_weights_is_neither_computing_nor_idle(monkeypatch):
    hands = Hands(monkeypatch)
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    hands.run(clock, FORWARD, 4, fetching=0.25)
    clock.start(REDUCE)
    (mine,) = clock.leave([clock.read()])
    assert (mine.compute, mine.fetching, mine.idle, mine.window) == (4, 0.25, 0, 4.25)
    assert clock.intervals()[:2] == [(Work.FORWARD, FORWARD, 0, 4), (Work.FETCH, FORWARD, 4, 4.25)]


def test_what_lies_between_two_steps_is_in_no_window_and_the_clock_goes_on(monkeypatch):
    hands = Hands(monkeypatch)
    clock = StepClock(torch.device("cpu"))
    clock.leave([hands.step(clock)])
    hands.now += 1000  # an evaluation, a checkpoint
    reading = hands.step(clock)
    hands.now += 1
    (mine,) = clock.leave([reading])
    assert mine.window == 11.5 and mine.idle == 4
    assert clock.seconds == 10.5 + 1000 + 11.5
    assert clock.intervals()[0].begin == 1010.5


def test_the_heap_holds_a_tensor_until_it_is_released():
    before = heap_bytes()
    tensor = torch.zeros(5_000_000)
    assert tensor.nbytes <= heap_bytes() - before < tensor.nbytes + 2**20
    del tensor
    assert abs(heap_bytes() - before) < 2**20
