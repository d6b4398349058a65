"""Roles and shares: the paper's numbers, every small case, and properties against a reference."""

from collections.abc import Iterator, Mapping
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.core.workload import (
    Adjustment,
    Layout,
    Role,
    Share,
    Shares,
    adjust,
    advance,
    role_of,
    roles_after,
)

MAJOR, MINOR = Role.MAJOR, Role.MINOR
MAJOR_SPARE, MINOR_SPARE = Role.MAJOR_SPARE, Role.MINOR_SPARE


def roles(layout: Layout) -> list[Role]:
    return [layout.role(replica) for replica in layout.shares]


def without(shares: Shares, *dead: int) -> dict[int, Share]:
    return {replica: share for replica, share in shares.items() if replica not in dead}


def total(shares: Shares) -> int:
    return sum(share.contribution for share in shares.values())


# --- the paper's numbers -------------------------------------------------------------------


def test_before_any_failure_32_replicas_are_majors_at_8() -> None:
    layout = advance(range(32), 256)
    assert layout.accumulation == 8
    assert roles(layout) == [MAJOR] * 32
    assert set(layout.shares.values()) == {Share(8, True)}


def test_first_failure_of_figure_5_gives_8_survivors_one_extra_and_23_none() -> None:
    layout = advance(range(32), 256)
    adjustment = adjust(without(layout.shares, 31), 256)
    assert adjustment.boundary
    assert (adjustment.promoted, adjustment.discarded) == ((), ())
    assert list(adjustment.extra.values()) == [1] * 8 + [0] * 23
    assert [share.microbatches for share in adjustment.shares.values()] == [9] * 8 + [8] * 23
    after = roles_after(layout, adjustment)
    assert list(after.values()) == [MAJOR] * 8 + [Role.BOUNDARY_MINOR] * 23
    assert total(adjustment.shares) == 248 + 8 == 256


def test_advancement_of_figure_5_gives_28_majors_at_9_one_minor_at_4_two_spares() -> None:
    layout = advance(range(31), 256)
    assert layout.accumulation == 9
    assert roles(layout) == [MAJOR] * 28 + [MINOR, MAJOR_SPARE, MINOR_SPARE]
    assert list(layout.shares.values()) == [
        *[Share(9, True)] * 28,
        Share(4, True),
        Share(9, False),
        Share(4, False),
    ]
    assert total(layout.shares) == 252 + 4 == 256


def test_second_failure_of_figure_5_promotes_the_minor_spare_within_the_boundary() -> None:
    layout = advance(range(31), 256)
    adjustment = adjust(without(layout.shares, 28), 256)
    assert not adjustment.boundary
    assert adjustment.promoted == (30,)
    after = roles_after(layout, adjustment)
    assert (after[30], after[29]) == (MINOR, MAJOR_SPARE)
    assert total(adjustment.shares) == 256


def test_a_dead_major_is_replaced_by_the_major_spare() -> None:
    layout = advance(range(31), 256)
    adjustment = adjust(without(layout.shares, 3), 256)
    assert (adjustment.promoted, adjustment.boundary) == ((29,), False)
    assert roles_after(layout, adjustment)[29] is MAJOR


# --- corners -------------------------------------------------------------------------------


def test_a_dead_minor_with_only_a_major_spare_left_does_not_overshoot() -> None:
    layout = advance(range(31), 256)
    adjustment = adjust(without(layout.shares, 28, 30), 256)
    assert adjustment.promoted == ()
    assert list(adjustment.extra.values()) == [1] * 4 + [0] * 25
    assert adjustment.shares[29] == Share(9, False)
    assert total(adjustment.shares) == 256


def test_a_spare_that_runs_extra_ones_contributes_those_alone() -> None:
    census = {0: Share(5, True), 1: Share(3, False)}
    adjustment = adjust(census, 7)
    assert adjustment.extra == {0: 1, 1: 1}
    assert adjustment.discarded == (1,)
    assert adjustment.shares == {0: Share(6, True), 1: Share(1, True)}


def test_the_largest_spare_that_fits_is_promoted_first() -> None:
    census = {0: Share(4, True), 1: Share(1, False), 2: Share(3, False), 3: Share(9, False)}
    assert adjust(census, 8).promoted == (1, 2)
    assert adjust(census, 7).promoted == (2,)


def test_more_replicas_than_microbatches_leaves_majors_of_one_and_spares() -> None:
    layout = advance(range(5), 3)
    assert layout.accumulation == 1
    assert roles(layout) == [MAJOR] * 3 + [MAJOR_SPARE] * 2
    adjustment = adjust(without(layout.shares, 0, 1, 2), 3)
    assert adjustment.promoted == (3, 4)
    assert adjustment.extra == {3: 1, 4: 0}


def test_the_last_survivor_runs_everything() -> None:
    assert advance([7], 256).shares == {7: Share(256, True)}
    adjustment = adjust({7: Share(8, True)}, 256)
    assert adjustment.shares == {7: Share(256, True)}
    assert adjustment.boundary


def test_nobody_lost_that_counted_changes_nothing() -> None:
    layout = advance(range(31), 256)
    adjustment = adjust(without(layout.shares, 29, 30), 256)
    assert not adjustment.boundary
    assert adjustment.shares == without(layout.shares, 29, 30)


def test_survivors_are_taken_in_ascending_order() -> None:
    assert list(advance([9, 2, 5], 4).shares) == [2, 5, 9]
    assert advance([9, 2, 5], 4) == advance([2, 5, 9], 4)


@pytest.mark.parametrize(("survivors", "microbatches"), [([], 4), ([0], 0), ([0], -1)])
def test_an_impossible_layout_is_refused(survivors: list[int], microbatches: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        advance(survivors, microbatches)


def test_survivors_that_hold_too_much_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="1 microbatches more than B=4"):
        adjust({0: Share(5, True)}, 4)


def test_a_role_is_read_off_a_share() -> None:
    assert role_of(Share(3, True), 3) is MAJOR
    assert role_of(Share(2, True), 3) is MINOR
    assert role_of(Share(3, False), 3) is MAJOR_SPARE
    assert role_of(Share(2, False), 3) is MINOR_SPARE


# --- every small case ----------------------------------------------------------------------


def check_layout(layout: Layout, world: int, microbatches: int) -> None:
    accumulation = layout.accumulation
    assert world * accumulation >= microbatches > world * (accumulation - 1)
    assert total(layout.shares) == microbatches
    assert all(1 <= share.microbatches <= accumulation for share in layout.shares.values())
    names = roles(layout)
    assert names.count(MINOR) <= 1
    assert names.count(MINOR_SPARE) <= names.count(MINOR)
    if names.count(MINOR) and len(names) - names.index(MINOR) > 2:
        assert names.count(MINOR_SPARE) == 1
    assert names == sorted(names, key=[MAJOR, MINOR, MAJOR_SPARE, MINOR_SPARE].index)


def check_adjustment(census: Shares, adjustment: Adjustment, microbatches: int) -> None:
    assert total(adjustment.shares) == microbatches
    assert list(adjustment.shares) == list(adjustment.extra) == sorted(census)
    extra = adjustment.extra.values()
    assert min(extra) >= 0
    assert max(extra) - min(extra) <= 1
    assert list(extra) == sorted(extra, reverse=True)
    for replica, share in adjustment.shares.items():
        before = census[replica]
        if before.admitted:
            assert share.admitted
            assert share.microbatches == before.microbatches + adjustment.extra[replica]
        if replica in adjustment.promoted:
            assert not before.admitted
            assert share.admitted
        if replica in adjustment.discarded:
            assert share == Share(adjustment.extra[replica], True)


def deaths(world: int) -> Iterator[tuple[int, ...]]:
    everyone = range(world)
    return chain.from_iterable(combinations(everyone, n) for n in range(1, world))


@pytest.mark.parametrize("world", range(1, 9))
def test_every_layout_and_every_set_of_deaths_up_to_8_by_8(world: int) -> None:
    for microbatches in range(1, 8 * world + 1):
        layout = advance(range(world), microbatches)
        check_layout(layout, world, microbatches)
        for dead in deaths(world):
            census = without(layout.shares, *dead)
            adjustment = adjust(census, microbatches)
            check_adjustment(census, adjustment, microbatches)
            after = roles_after(layout, adjustment)
            assert list(after) == list(census)
            assert (Role.BOUNDARY_MINOR in after.values()) == (
                len({*adjustment.extra.values()}) > 1
            )


@pytest.mark.parametrize("world", range(3, 6))
def test_two_failures_in_one_step_still_sum_to_b(world: int) -> None:
    for microbatches in range(1, 3 * world + 1):
        layout = advance(range(world), microbatches)
        for first in deaths(world):
            once = adjust(without(layout.shares, *first), microbatches)
            left = list(once.shares)
            for second in combinations(left, 1 if len(left) > 1 else 0):
                census = without(once.shares, *second)
                check_adjustment(census, adjust(census, microbatches), microbatches)


# --- against a reference that deals microbatches out one by one ----------------------------


def dealt_layout(world: int, microbatches: int) -> list[tuple[int, bool]]:
    """Lay out by dealing: (microbatches, admitted) for each survivor in order."""
    height = 1
    while height * world < microbatches:
        height += 1
    hands: list[int] = []
    for _ in range(microbatches):
        if not hands or hands[-1] == height:
            hands.append(0)
        hands[-1] += 1
    uneven = hands[-1] != height
    idle = world - len(hands)
    spares = [height] * idle
    if uneven and idle > 1:
        spares[-1] = hands[-1]
    return [(hand, True) for hand in hands] + [(spare, False) for spare in spares]


def dealt_adjustment(census: Mapping[int, Share], microbatches: int) -> dict[int, tuple[int, bool]]:
    """Mend by dealing: admit the largest spare that fits, then one microbatch each, in turns."""
    held = {r: s.microbatches for r, s in census.items()}
    counted = {r for r, s in census.items() if s.admitted}
    counted_sum = sum(held[r] for r in counted)
    waiting = [r for r in census if r not in counted]
    while waiting:
        fitting = [r for r in waiting if counted_sum + held[r] <= microbatches]
        if not fitting:
            break
        chosen = max(fitting, key=lambda r: (held[r], -r))
        waiting.remove(chosen)
        counted.add(chosen)
        counted_sum += held[chosen]
    turn = 0
    order = sorted(census)
    while counted_sum < microbatches:
        replica = order[turn % len(order)]
        if replica not in counted:
            counted.add(replica)
            held[replica] = 0
        held[replica] += 1
        counted_sum += 1
        turn += 1
    return {r: (held[r], r in counted) for r in order}


@st.composite
def failing_steps(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    world = draw(st.integers(1, 512))
    microbatches = draw(st.one_of(st.integers(1, 4096), st.integers(1, 65536)))
    few = draw(st.frozensets(st.integers(0, world - 1), max_size=40))
    dead = few if draw(st.booleans()) else frozenset(range(world)) - few
    return world, microbatches, dead if len(dead) < world else frozenset()


@given(failing_steps())
@settings(max_examples=60, deadline=None)
def test_layout_and_adjustment_equal_the_reference(case: tuple[int, int, frozenset[int]]) -> None:
    world, microbatches, dead = case
    layout = advance(range(world), microbatches)
    got = [(share.microbatches, share.admitted) for share in layout.shares.values()]
    assert got == dealt_layout(world, microbatches)
    census = without(layout.shares, *dead)
    adjustment = adjust(census, microbatches)
    check_adjustment(census, adjustment, microbatches)
    mended = {r: (s.microbatches, s.admitted) for r, s in adjustment.shares.items()}
    assert mended == dealt_adjustment(census, microbatches)
