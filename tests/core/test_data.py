"""The data ledger: every microbatch once, whatever dies."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.core.data import (
    Assignment,
    DataLedger,
    ExactLedger,
    Ids,
    StreamLedger,
    extended,
)
from recover.core.policies import AdaptiveWorldPolicy, Policy, StaticWorldPolicy

# --- by hand -------------------------------------------------------------------------------


def test_exact_gives_contributors_the_oldest_ids_and_spares_the_next_ones() -> None:
    layout = StaticWorldPolicy(10).advance(range(5))  # majors at 2
    assert [a.ids for a in ExactLedger().assign(layout).values()] == [
        *((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
    ]
    layout = StaticWorldPolicy(7).advance(range(5))  # 3 majors at 2, minor at 1, major-spare
    assert ExactLedger(20, (3, 11)).assign(layout) == {
        0: Assignment((3, 11), True),
        1: Assignment((20, 21), True),
        2: Assignment((22, 23), True),
        3: Assignment((24,), True),
        4: Assignment((25, 26), False),
    }


def test_exact_extras_are_the_ids_that_were_lost() -> None:
    policy, ledger = StaticWorldPolicy(8), ExactLedger(100)
    plan = ledger.assign(policy.advance(range(4)))
    adjustment = policy.adjust({r: plan[r].share for r in (0, 2, 3)})
    extra = ledger.extend(plan, adjustment)
    assert extra == {0: (102,), 2: (103,), 3: ()}
    after = ledger.commit(extended(plan, adjustment, extra))
    assert after == ExactLedger(108)


def test_exact_makes_up_for_a_lost_id_in_the_next_step_after_a_promotion() -> None:
    policy, ledger = StaticWorldPolicy(7), ExactLedger()
    plan = ledger.assign(policy.advance(range(5)))
    adjustment = policy.adjust({r: plan[r].share for r in (0, 2, 3, 4)})
    assert adjustment.promoted == (4,)
    after = ledger.commit(extended(plan, adjustment, ledger.extend(plan, adjustment)))
    assert after == ExactLedger(9, (2, 3))
    assert after.assign(policy.advance([0, 2, 3, 4]))[0].ids == (2, 3)


def test_exact_gives_back_the_ids_of_a_spare_that_discards() -> None:
    plan = {
        0: Assignment((0, 1), True),
        1: Assignment((5, 6), True),
        2: Assignment((2, 3, 4), False),
    }
    adjustment = StaticWorldPolicy(4).adjust({r: plan[r].share for r in (0, 2)})
    assert adjustment.discarded == (2,)
    extra = ExactLedger().extend(plan, adjustment)
    assert extra == {0: (2,), 2: (3,)}
    assert extended(plan, adjustment, extra)[2] == Assignment((3,), True)


def test_stream_ids_are_draws_of_each_replicas_own_stream() -> None:
    ledger = StreamLedger.start(4)
    plan = ledger.assign(StaticWorldPolicy(8).advance(range(4)))
    assert [a.ids for a in plan.values()] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert ledger.commit(plan).position == {0: 2, 1: 2, 2: 2, 3: 2}


def test_stream_extras_go_on_and_the_stream_of_the_dead_drops_out() -> None:
    policy, ledger = StaticWorldPolicy(8), StreamLedger.start(4)
    plan = ledger.assign(policy.advance(range(4)))
    adjustment = policy.adjust({r: plan[r].share for r in (0, 2, 3)})
    extra = ledger.extend(plan, adjustment)
    assert extra == {0: (8,), 2: (10,), 3: ()}
    assert ledger.commit(extended(plan, adjustment, extra)).position == {0: 3, 2: 3, 3: 2}


def test_a_stream_spare_that_was_not_admitted_keeps_its_position() -> None:
    policy, ledger = StaticWorldPolicy(7), StreamLedger.start(5)
    plan = ledger.assign(policy.advance(range(5)))
    assert plan[4] == Assignment((4, 9), False)
    assert ledger.commit(plan).position[4] == 0


def test_a_stream_spare_that_discards_draws_again() -> None:
    plan = {0: Assignment((0, 3), True), 2: Assignment((2, 5, 8), False)}
    adjustment = StaticWorldPolicy(4).adjust({r: a.share for r, a in plan.items()})
    assert adjustment.discarded == (2,)
    assert StreamLedger.start(3).extend(plan, adjustment) == {0: (6,), 2: (2,)}


# --- a whole job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one committed step of a played job did."""

    survivors: tuple[int, ...]
    failure_free: frozenset[int]
    committed: dict[int, Ids]
    promoted: bool
    disturbed: bool
    ledger: DataLedger


def play(policy: Policy, ledger: DataLedger, replicas: int, seed: int) -> Iterator[Step]:
    """Run a job in which replicas die at random, several at once and twice in a step included."""
    random = Random(seed)
    survivors = tuple(range(replicas))
    risk = random.choice((0.02, 0.1, 0.5))
    for _ in range(4 * replicas):
        plan = ledger.assign(policy.advance(survivors))
        failure_free = frozenset(i for a in plan.values() if a.admitted for i in a.ids)
        promoted = disturbed = False
        while len(plan) > 1 and random.random() < risk:
            dead = random.sample(sorted(plan), random.randint(1, len(plan) - 1))
            adjustment = policy.adjust({r: a.share for r, a in plan.items() if r not in dead})
            extra = ledger.extend(plan, adjustment)
            assert {r: len(ids) for r, ids in extra.items()} == adjustment.extra
            plan = extended(plan, adjustment, extra)
            assert {r: a.share for r, a in plan.items()} == adjustment.shares
            promoted = promoted or bool(adjustment.promoted)
            disturbed = True
            held = [i for a in plan.values() for i in a.ids]
            assert len(held) == len(set(held)), "two replicas hold the same microbatch"
        survivors = tuple(plan)
        ledger = ledger.commit(plan)
        committed = {r: a.ids if a.admitted else () for r, a in plan.items()}
        yield Step(survivors, failure_free, committed, promoted, disturbed, ledger)


jobs = st.tuples(st.integers(1, 24), st.integers(1, 100), st.integers(0, 2**32))


@given(jobs)
@settings(max_examples=75, deadline=None)
def test_exact_commits_every_id_once_and_loses_none(job: tuple[int, int, int]) -> None:
    replicas, microbatches, seed = job
    done: set[int] = set()
    for step in play(StaticWorldPolicy(microbatches), ExactLedger(), replicas, seed):
        ids = [i for own in step.committed.values() for i in own]
        assert len(ids) == microbatches
        assert done.isdisjoint(ids)
        assert len(set(ids)) == microbatches
        done.update(ids)
        if not step.promoted:
            assert set(ids) == step.failure_free
        ledger = step.ledger
        assert isinstance(ledger, ExactLedger)
        assert done.isdisjoint(ledger.missing)
        assert done | set(ledger.missing) == set(range(ledger.cursor))
        assert len(ledger.missing) < replicas
        if not step.disturbed:
            assert not ledger.missing or max(ids) < min(ledger.missing)


@given(jobs)
@settings(max_examples=50, deadline=None)
def test_exact_closes_its_gaps_as_soon_as_nothing_fails(job: tuple[int, int, int]) -> None:
    replicas, microbatches, seed = job
    policy = StaticWorldPolicy(microbatches)
    steps = list(play(policy, ExactLedger(), replicas, seed))
    survivors, ledger = steps[-1].survivors, steps[-1].ledger
    for _ in range(-(-replicas // microbatches)):
        ledger = ledger.commit(ledger.assign(policy.advance(survivors)))
    assert isinstance(ledger, ExactLedger)
    assert ledger.missing == ()
    assert ledger.cursor == microbatches * (len(steps) + -(-replicas // microbatches))


@given(jobs)
@settings(max_examples=75, deadline=None)
def test_stream_commits_each_stream_in_order_without_gaps(job: tuple[int, int, int]) -> None:
    replicas, microbatches, seed = job
    streams: dict[int, list[int]] = {replica: [] for replica in range(replicas)}
    for step in play(StaticWorldPolicy(microbatches), StreamLedger.start(replicas), replicas, seed):
        assert sum(len(ids) for ids in step.committed.values()) == microbatches
        for replica, ids in step.committed.items():
            streams[replica] += ids
        assert isinstance(step.ledger, StreamLedger)
        assert set(step.ledger.position) == set(step.survivors)
        for replica, position in step.ledger.position.items():
            expected = [draw * replicas + replica for draw in range(position)]
            assert streams[replica] == expected


@pytest.mark.parametrize("seed", range(20))
def test_adaptive_with_exact_data_loses_no_id_either(seed: int) -> None:
    done: set[int] = set()
    for step in play(AdaptiveWorldPolicy(20, 6), ExactLedger(), 6, seed):
        ids = {i for own in step.committed.values() for i in own}
        assert done.isdisjoint(ids)
        done |= ids
        assert isinstance(step.ledger, ExactLedger)
        assert done | set(step.ledger.missing) == set(range(step.ledger.cursor))
        assert len(step.ledger.missing) < 20
