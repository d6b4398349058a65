"""Who must die so that the others can go on, without a process or a clock."""

import pytest

from recover.launch.board import FINISH
from recover.launch.liveness import History, Sample, condemn, observe
from recover.launch.spec import Timeouts

LIMITS = Timeouts(stopped_s=3, wait_s=10, hang_s=100, stall_s=1000)


def sample(
    phase: str, *, beats: int = 1, cpu_s: float = 0.0, stopped: bool = False, beat_at_s: float = 0.0
) -> Sample:
    return Sample(phase, beats, beat_at_s, stopped, cpu_s)


def since_0(phase: str, *, busy: bool = False, now_s: float, beat_at_s: float = 0.0) -> History:
    """A rank that has shown ``phase`` at time 0 and nothing since."""
    first = observe(None, sample(phase, beat_at_s=beat_at_s), 0.0)
    return observe(first, sample(phase, cpu_s=now_s if busy else 0.0, beat_at_s=beat_at_s), now_s)


def condemned(ranks: dict[int, History], now_s: float, last_death_s: float = 0.0) -> set[int]:
    return set(condemn(ranks, now_s, LIMITS, last_death_s=last_death_s))


@pytest.mark.parametrize(
    ("busy", "others", "deadline_s"),
    [
        (False, "collective reduce 0", LIMITS.hang_s),  # both signals
        (True, "collective reduce 0", LIMITS.stall_s),  # a long checkpoint
        (False, "compute", LIMITS.stall_s),  # a stalled data source
        (True, "compute", None),  # long computing, in nobody's way
        (False, FINISH, LIMITS.stall_s),  # who waits for the end is not kept from training
    ],
)
def test_a_silent_rank_is_judged_by_two_signals(
    busy: bool, others: str, deadline_s: float | None
) -> None:
    def ranks(now_s: float) -> dict[int, History]:
        other = since_0(others, busy=True, now_s=now_s)
        return {0: since_0("backward", busy=busy, now_s=now_s), 1: other}

    if deadline_s is None:
        assert condemned(ranks(1e6), 1e6) == set()
    else:
        assert condemned(ranks(deadline_s - 1), deadline_s - 1) == set()
        assert condemned(ranks(deadline_s), deadline_s) == {0}


def test_a_beat_starts_the_time_again() -> None:
    history = since_0("backward", now_s=99.0)
    history = observe(history, sample("backward", beats=2), 99.0)
    waiting = since_0("collective agree", busy=True, now_s=198.0)
    assert condemned({0: history, 1: waiting}, 198.0) == set()
    assert condemned({0: history, 1: waiting}, 199.0) == {0}


def test_a_stopped_rank_dies_first_and_only_if_it_stays_stopped() -> None:
    stopped = observe(None, sample("compute", stopped=True), 0.0)
    stopped = observe(stopped, sample("compute", stopped=True), 3.0)
    assert condemned({0: stopped, 1: since_0("compute", now_s=3.0)}, 3.0) == {0}
    resumed = observe(stopped, sample("compute"), 3.5)
    assert condemned({0: resumed}, 3.5) == set()
    again = observe(resumed, sample("compute", stopped=True), 4.0)
    assert condemned({0: again}, 6.9) == set()


def test_ranks_that_wait_for_one_that_works_are_left_alone() -> None:
    repairing = since_0("repair shrink", busy=True, now_s=99.0)
    assert condemned({0: repairing, 1: since_0("backward", busy=True, now_s=99.0)}, 99.0) == set()


def test_of_ranks_that_all_wait_the_one_that_is_behind_dies() -> None:
    ranks = {
        0: since_0("collective agree", busy=True, now_s=10.0, beat_at_s=5.0),
        1: since_0("repair shrink", busy=True, now_s=10.0, beat_at_s=4.0),
        2: since_0("collective agree", busy=True, now_s=10.0, beat_at_s=6.0),
    }
    assert condemned(ranks, 9.9) == set()
    assert condemned(ranks, 10.0) == {1}
    idle = since_0("collective agree", now_s=10.0, beat_at_s=9.0)
    assert condemned({**ranks, 3: idle}, 10.0) == {3}


def test_a_death_gives_those_who_wait_their_time_again() -> None:
    ranks = {0: since_0("repair shrink", busy=True, now_s=12.0)}
    assert condemned(ranks, 12.0, last_death_s=10.0) == set()
    assert condemned(ranks, 20.0, last_death_s=10.0) == {0}


def test_nobody_is_condemned_of_nobody() -> None:
    assert condemned({}, 1e6) == set()
