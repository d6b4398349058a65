"""The emulated device asks for the right durations, on a clock that the test moves."""

from dataclasses import dataclass, field

import pytest

from recover.train.config import TrainConfig
from recover.train.emulation import Device


@dataclass
class Clock:
    """Stands still but for what the test and the device's own sleeps add."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def device(clock: Clock, *, microbatch_ms: float = 0.0, bandwidth_mbps: float = 0.0) -> Device:
    return Device(microbatch_ms, bandwidth_mbps, clock=clock, sleep=clock.sleep)


def test_a_microbatch_takes_what_its_passes_leave_of_its_time() -> None:
    clock = Clock()
    subject = device(clock, microbatch_ms=30)
    with subject.forward():
        clock.now += 0.004
    with subject.backward():
        clock.now += 0.005
    assert clock.slept == pytest.approx([0.006, 0.015])
    assert clock.now == pytest.approx(0.030)


def test_work_that_takes_longer_than_emulated_is_not_slowed_down() -> None:
    clock = Clock()
    subject = device(clock, microbatch_ms=30)
    with subject.forward():
        clock.now += 0.011
    with subject.backward():
        clock.now += 0.021
    with subject.passes(2):
        clock.now += 0.061
    assert clock.slept == []


def test_a_pass_of_several_microbatches_takes_the_time_of_all() -> None:
    clock = Clock()
    with device(clock, microbatch_ms=30).passes(4):
        pass
    assert clock.slept == pytest.approx([0.120])


def test_an_error_in_a_pass_is_not_held_back() -> None:
    clock = Clock()
    with pytest.raises(ZeroDivisionError), device(clock, microbatch_ms=30).forward():
        raise ZeroDivisionError
    assert clock.slept == []


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 0.0), (2, 0.1), (4, 0.15), (16, 0.1875)])
def test_an_all_reduce_takes_what_a_ring_needs(ranks: int, seconds: float) -> None:
    subject = Device(bandwidth_mbps=80)  # 10 megabytes per second
    assert subject.transfer_s(1_000_000, ranks) == pytest.approx(seconds)


def test_transfers_follow_one_another_and_overlap_with_passes() -> None:
    clock = Clock()
    subject = device(clock, bandwidth_mbps=80)
    subject.transfer(1_000_000, 2)
    clock.now += 0.05  # half of the transfer is hidden behind something else
    subject.transfer(1_000_000, 2)
    subject.settle()
    assert clock.slept == pytest.approx([0.15])
    clock.now += 1.0
    subject.transfer(1_000_000, 2)
    subject.settle()
    assert clock.slept == pytest.approx([0.15, 0.1])  # the network was idle in between


def test_a_transfer_that_failed_holds_up_nothing() -> None:
    clock = Clock()
    subject = device(clock, bandwidth_mbps=80)
    subject.transfer(1_000_000, 2)
    subject.settle(done=False)
    subject.transfer(1_000_000, 2)
    subject.settle()
    assert clock.slept == pytest.approx([0.1])


def test_nothing_is_emulated_unless_it_is_asked_for() -> None:
    clock = Clock()
    subject = device(clock)
    with subject.forward(), subject.backward(), subject.passes(3):
        pass
    subject.transfer(1 << 30, 64)
    subject.settle()
    assert clock.slept == []


@pytest.mark.parametrize("name", ["microbatch_ms", "bandwidth_mbps"])
def test_negative_durations_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least 0, got -1"):
        TrainConfig(**{name: -1})  # type: ignore[arg-type]
