"""The two policies and the choice of when to restore."""

import pytest

from recover.core.policies import (
    AdaptiveWorldPolicy,
    RestoreChoice,
    RestoreMode,
    StaticWorldPolicy,
)
from recover.core.workload import Role, Share, adjust, advance

# --- static --------------------------------------------------------------------------------


def test_static_commits_b_whoever_is_left() -> None:
    policy = StaticWorldPolicy(16)
    for world in range(1, 20):
        layout = policy.advance(range(world))
        assert layout == advance(range(world), 16)
        assert sum(share.contribution for share in layout.shares.values()) == 16
    census = {0: Share(4, True), 2: Share(4, True)}
    assert policy.adjust(census) == adjust(census, 16)
    assert policy.divisor(16) == 16


def test_static_refuses_to_divide_a_sum_that_is_not_b() -> None:
    with pytest.raises(AssertionError):
        StaticWorldPolicy(16).divisor(15)


@pytest.mark.parametrize("microbatches", [0, -3])
def test_static_needs_a_microbatch(microbatches: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {microbatches}"):
        StaticWorldPolicy(microbatches)


# --- adaptive: the strawman ----------------------------------------------------------------


def test_adaptive_lets_b_shrink_with_the_world() -> None:
    policy = AdaptiveWorldPolicy(16, 4)
    layout = policy.advance([0, 1, 3])
    assert layout.shares == {r: Share(4, True) for r in (0, 1, 3)}
    assert layout.accumulation == 4
    adjustment = policy.adjust({0: Share(4, True), 3: Share(4, True)})
    assert not adjustment.boundary
    assert (adjustment.promoted, adjustment.discarded) == ((), ())
    assert adjustment.extra == {0: 0, 3: 0}
    assert adjustment.shares == {0: Share(4, True), 3: Share(4, True)}
    assert policy.divisor(8) == 8


def test_adaptive_keeps_each_replica_its_first_share() -> None:
    policy = AdaptiveWorldPolicy(10, 4)
    at_first = policy.advance(range(4))
    assert [share.microbatches for share in at_first.shares.values()] == [3, 3, 2, 2]
    assert at_first.accumulation == 3
    assert at_first.role(0) is Role.MAJOR
    assert at_first.role(3) is Role.MINOR
    later = policy.advance([1, 3])
    assert later.shares == {1: Share(3, True), 3: Share(2, True)}


@pytest.mark.parametrize(("microbatches", "replicas"), [(3, 4), (0, 0), (2, 0)])
def test_adaptive_needs_a_microbatch_for_each_replica(microbatches: int, replicas: int) -> None:
    with pytest.raises(ValueError, match=f"B={microbatches}, replicas={replicas}"):
        AdaptiveWorldPolicy(microbatches, replicas)


# --- when to restore -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "stale", "extra", "mode"),
    [
        (RestoreChoice.AUTO, False, False, RestoreMode.SKIP),
        (RestoreChoice.AUTO, False, True, RestoreMode.SKIP),
        (RestoreChoice.AUTO, True, False, RestoreMode.BLOCKING),
        (RestoreChoice.AUTO, True, True, RestoreMode.NON_BLOCKING),
        (RestoreChoice.BLOCKING, True, True, RestoreMode.BLOCKING),
        (RestoreChoice.BLOCKING, False, True, RestoreMode.SKIP),
        (RestoreChoice.NON_BLOCKING, True, True, RestoreMode.NON_BLOCKING),
        (RestoreChoice.NON_BLOCKING, True, False, RestoreMode.BLOCKING),
        (RestoreChoice.NON_BLOCKING, False, False, RestoreMode.SKIP),
    ],
)
def test_restore_mode(choice: RestoreChoice, stale: bool, extra: bool, mode: RestoreMode) -> None:
    assert choice.mode(stale=stale, extra=extra) is mode
