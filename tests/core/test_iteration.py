"""Algorithm 1 as one rank sees it: which effects, in which order, after which answers.

The performer here plays the rest of the world by a script; what many ranks do together is the
simulator's business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from recover.core.data import ExactLedger, StreamLedger
from recover.core.drive import drive
from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Commit,
    Detect,
    Discard,
    Facts,
    Leave,
    NextBucket,
    Recovered,
    Recovery,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Statement,
)
from recover.core.guard import Member, UnequalReplicas, repair, roll_call, synchronise
from recover.core.iteration import JobState, Rules, finish, iteration, start
from recover.core.ledger import BucketLedger
from recover.core.mesh import Mesh, Place
from recover.core.policies import RestoreMode, StaticWorldPolicy
from recover.core.workload import Layout, Role, Share


class Left(Exception):
    """The rank left the job."""


@dataclass
class Script:
    """Answers one rank's effects; collectives are numbered from 0 in the order they come."""

    buckets: int = 2
    failing_reduces: frozenset[int] = frozenset()
    """Reductions that fail here, by number."""
    failing_detects: frozenset[int] = frozenset()
    """Probes that somebody else fails, by number."""
    failing_votes: frozenset[int] = frozenset()
    """Agreements that somebody else fails, by number."""
    censuses: tuple[Mapping[Place, Statement] | None, ...] = ()
    epochs: tuple[int | None, ...] = (1, 2, 3)
    log: list[object] = field(default_factory=list)
    next_bucket: int = 0

    def perform(self, effect: object) -> object:
        number = sum(type(earlier) is type(effect) for earlier in self.log)
        self.log.append(effect)
        match effect:
            case NextBucket():
                self.next_bucket += 1
                return self.next_bucket - 1 if self.next_bucket <= self.buckets else None
            case Detect(clean):
                return clean and number not in self.failing_detects
            case Agree(clean):
                self.next_bucket = 0
                return clean and number not in self.failing_votes
            case Reduce():
                return number not in self.failing_reduces
            case Shrink():
                return self.epochs[number]
            case Census():
                return self.censuses[number]
            case Regroup():
                return True
            case Leave(reason):
                raise Left(reason)
        return None

    def saw(self, *kinds: type) -> list[object]:
        return [effect for effect in self.log if isinstance(effect, kinds)]

    def names(self) -> str:
        return " ".join(type(effect).__name__ for effect in self.log)

    @property
    def facts(self) -> Facts:
        (commit,) = self.saw(Commit)
        assert isinstance(commit, Commit)
        return commit.facts

    @property
    def recovery(self) -> Recovery:
        (recovered,) = self.saw(Recovered)
        assert isinstance(recovered, Recovered)
        return recovered.recovery


def census(shares: Mapping[int, Share], shards: int = 1) -> dict[Place, Statement]:
    return {Place(r, s): Statement(share, 0) for r, share in shares.items() for s in range(shards)}


def job(replicas: int, microbatches: int, data: str = "exact") -> tuple[Rules, JobState]:
    ledger = ExactLedger() if data == "exact" else StreamLedger.start(replicas)
    return Rules(StaticWorldPolicy(microbatches)), JobState(tuple(range(replicas)), ledger)


def full(*replicas: int, microbatches: int = 4) -> dict[Place, Statement]:
    return census({r: Share(microbatches, True) for r in replicas})


# --- an iteration --------------------------------------------------------------------------


def test_without_a_failure_one_probe_and_one_agreement_are_added() -> None:
    rules, state = job(4, 16)
    script = Script()
    after = drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert script.names() == (
        "Accumulate NextBucket Snapshot Detect Reduce NextBucket Snapshot Reduce "
        "NextBucket Agree Commit"
    )
    assert script.saw(Detect, Agree) == [Detect(clean=True, bucket=0), Agree(clean=True)]
    assert script.log[0] == Accumulate((4, 5, 6, 7), extra=False)
    assert script.saw(Reduce) == [Reduce(0, muted=False), Reduce(1, muted=False)]
    assert after == JobState((0, 1, 2, 3), ExactLedger(16), step=1, epoch=0)
    facts = script.facts
    assert facts.contributions == dict.fromkeys(range(4), 4)
    assert (facts.step, facts.epoch, facts.failed, facts.boundary) == (0, 0, (), False)
    assert (facts.divisor, facts.accumulation) == (16, 4)


def test_after_a_failed_reduction_this_rank_reduces_nothing_more_and_votes_no() -> None:
    rules, state = job(4, 16)
    script = Script(failing_reduces=frozenset({0}), censuses=(full(0, 1, 2),))
    after = drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert script.names() == (
        "Accumulate NextBucket Snapshot Detect Reduce Agree "
        "Shrink Census Agree Regroup Agree Recovered Restore Accumulate "
        "NextBucket Snapshot Detect Reduce NextBucket Snapshot Reduce NextBucket Agree "
        "Commit"
    )
    assert script.saw(Agree)[0] == Agree(clean=False)
    assert script.saw(Detect)[1] == Detect(clean=True, bucket=0), "the new group is probed again"
    assert script.saw(Restore) == [Restore((0,), RestoreMode.NON_BLOCKING)]
    assert script.saw(Accumulate)[1] == Accumulate((14,), extra=True)
    assert after == JobState((0, 1, 2), ExactLedger(16), step=1, epoch=1)
    assert script.facts.contributions == {0: 6, 1: 5, 2: 5}
    assert script.facts.boundary
    assert script.facts.failed == (3,)
    assert script.recovery == Recovery(
        epoch=1,
        failed=(3,),
        failed_ranks=(3,),
        boundary=True,
        promoted=(),
        extra={0: 2, 1: 1, 2: 1},
        restored=(0,),
        mode=RestoreMode.NON_BLOCKING,
    )


def test_a_rank_whose_reductions_all_succeeded_restores_too() -> None:
    rules, state = job(4, 16)
    script = Script(failing_votes=frozenset({0}), censuses=(full(0, 1, 3),))
    drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert script.saw(Restore) == [Restore((0, 1), RestoreMode.NON_BLOCKING)]
    assert script.facts.contributions == {0: 6, 1: 5, 3: 5}


def test_buckets_that_were_not_reached_are_not_restored() -> None:
    rules, state = job(4, 16)
    script = Script(buckets=5, failing_reduces=frozenset({1}), censuses=(full(0, 1, 2),))
    drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert script.recovery.restored == (0, 1)
    assert len(script.saw(Reduce)) == 2 + 5


def test_an_error_without_a_death_repeats_the_synchronisation() -> None:
    rules, state = job(2, 4)
    script = Script(failing_reduces=frozenset({1}), censuses=(full(0, 1, microbatches=2),))
    after = drive(iteration(Member(Place(0), Mesh(2)), rules, state), script.perform)
    assert script.recovery.failed == ()
    assert script.saw(Restore) == [Restore((0, 1), RestoreMode.BLOCKING)]
    assert len(script.saw(Accumulate)) == 1
    assert (after.survivors, after.epoch) == ((0, 1), 1)


def test_a_spare_is_muted_until_it_is_promoted() -> None:
    rules, state = job(5, 7)
    held = {r: Share(2, True) for r in (0, 1)} | {3: Share(1, True), 4: Share(2, False)}
    script = Script(failing_votes=frozenset({0}), censuses=(census(held),))
    after = drive(iteration(Member(Place(4), Mesh(5)), rules, state), script.perform)
    muted = [effect.muted for effect in script.saw(Reduce) if isinstance(effect, Reduce)]
    assert muted == [True, True, False, False]
    assert script.recovery.promoted == (4,)
    assert not script.facts.boundary
    assert script.facts.roles[4] is Role.MAJOR
    assert after.data == ExactLedger(9, (4, 5))


class OneLargeSpare(StaticWorldPolicy):
    """Two replicas contribute 2 each, a spare holds 3: it is too large to stand in for one."""

    def advance(self, survivors: Sequence[int]) -> Layout:
        """Return the one layout."""
        assert len(survivors) == 3
        return Layout({0: Share(2, True), 1: Share(2, True), 2: Share(3, False)}, 3)


def test_a_spare_that_is_too_large_discards_and_runs_what_is_missing() -> None:
    _, state = job(3, 4)
    held = {0: Share(2, True), 2: Share(3, False)}
    script = Script(failing_votes=frozenset({0}), censuses=(census(held),))
    rules = Rules(OneLargeSpare(4))
    after = drive(iteration(Member(Place(2), Mesh(3)), rules, state), script.perform)
    assert script.saw(Discard, Restore) == [Discard()]
    assert script.saw(Accumulate) == [
        Accumulate((4, 5, 6), extra=False),
        Accumulate((3,), extra=True),
    ]
    assert script.recovery.restored == ()
    assert script.facts.contributions == {0: 3, 2: 1}
    assert after.data == ExactLedger(4)


def test_a_spare_that_is_not_needed_restores_and_stays_muted() -> None:
    rules, state = job(5, 7)
    held = {0: Share(2, True), 1: Share(2, True), 2: Share(2, True), 4: Share(2, False)}
    script = Script(failing_votes=frozenset({0}), censuses=(census(held),))
    drive(iteration(Member(Place(4), Mesh(5)), rules, state), script.perform)
    assert script.saw(Discard, Restore) == [Restore((0, 1), RestoreMode.BLOCKING)]
    assert script.facts.contributions == {0: 3, 1: 2, 2: 2, 4: 0}
    assert all(effect.muted for effect in script.saw(Reduce) if isinstance(effect, Reduce))


def test_a_failure_while_recovering_goes_round_the_same_loop() -> None:
    rules, state = job(4, 16)
    again = {0: Share(6, True), 1: Share(5, True)}
    script = Script(
        failing_votes=frozenset({0, 3}), censuses=(full(0, 1, 2), census(again)), epochs=(1, 4)
    )
    after = drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert len(script.saw(Recovered)) == 2
    assert script.saw(Accumulate) == [
        Accumulate((4, 5, 6, 7), extra=False),
        Accumulate((14,), extra=True),
        Accumulate((11, 15), extra=True),
    ]
    assert script.facts.contributions == {0: 9, 1: 7}
    assert script.facts.failed == (2, 3)
    assert after == JobState((0, 1), ExactLedger(16), step=1, epoch=4)


def test_a_boundary_stays_one_when_a_later_recovery_needs_nothing_extra() -> None:
    rules, state = job(4, 16)
    mended = census({0: Share(6, True), 1: Share(5, True), 2: Share(5, True)})
    script = Script(failing_votes=frozenset({0, 3}), censuses=(full(0, 1, 2), mended))
    drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    recoveries = [r.recovery for r in script.saw(Recovered) if isinstance(r, Recovered)]
    assert [recovery.boundary for recovery in recoveries] == [True, False]
    assert script.facts.boundary


def test_a_census_that_is_not_the_plan_is_our_bug() -> None:
    rules, state = job(4, 16)
    script = Script(failing_votes=frozenset({0}), censuses=(full(0, 1, microbatches=3),))
    with pytest.raises(AssertionError, match="is not the plan"):
        drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)


def test_endless_streams_go_on_in_the_survivors_own() -> None:
    rules, state = job(4, 16, data="stream")
    script = Script(failing_votes=frozenset({0}), censuses=(full(0, 1, 3),))
    after = drive(iteration(Member(Place(1), Mesh(4)), rules, state), script.perform)
    assert script.saw(Accumulate) == [
        Accumulate((1, 5, 9, 13), extra=False),
        Accumulate((17,), extra=True),
    ]
    assert after.data == StreamLedger(4, {0: 6, 1: 5, 3: 5})


# --- synchronise and repair ----------------------------------------------------------------


def test_after_a_bad_probe_nothing_more_is_reduced() -> None:
    script = Script(buckets=3, failing_detects=frozenset({0}))
    assert not drive(synchronise(BucketLedger(), epoch=0, muted=False), script.perform)
    assert script.names() == "NextBucket Snapshot Detect Agree"


def test_a_failure_of_the_last_reduction_is_voted_on_in_the_closing_agreement() -> None:
    script = Script(failing_reduces=frozenset({1}))
    assert not drive(synchronise(BucketLedger(), epoch=0, muted=False), script.perform)
    assert script.log[-1] == Agree(clean=False)


def test_repair_repeats_until_census_and_groups_are_agreed() -> None:
    script = Script(failing_votes=frozenset({2}), censuses=(None, full(0, 1), full(1)))
    membership = drive(repair(Member(Place(1), Mesh(3)), Share(4, True), (0, 1, 2)), script.perform)
    assert script.names() == (
        "Shrink Census Agree Shrink Census Agree Regroup Agree Shrink Census Agree Regroup Agree"
    )
    assert script.saw(Agree)[0] == Agree(clean=False)
    assert (membership.epoch, membership.survivors) == (3, (1,))
    assert membership.dead_ranks == (0, 2)


def test_a_replica_that_lost_a_rank_is_condemned_as_a_unit() -> None:
    everyone = census({0: Share(4, True), 1: Share(4, True)}, shards=2)
    left = {place: what for place, what in everyone.items() if place != Place(1, 0)}
    script = Script(censuses=(left,))
    member = Member(Place(0, 1), Mesh(2, 2))
    membership = drive(repair(member, Share(4, True), (0, 1)), script.perform)
    assert membership.survivors == (0,)
    assert membership.dead_ranks == (2,)
    peer = Member(Place(1, 1), Mesh(2, 2))
    with pytest.raises(Left, match="condemned: replica 1 lost a rank"):
        drive(repair(peer, Share(4, True), (0, 1)), Script(censuses=(left,)).perform)


def test_a_rank_that_was_excluded_leaves() -> None:
    member = Member(Place(1), Mesh(3))
    with pytest.raises(Left, match="excluded"):
        drive(repair(member, Share(4, True), (0, 1, 2)), Script(epochs=(None,)).perform)


def test_replicas_that_hold_different_models_are_refused() -> None:
    unequal = {Place(0): Statement(Share(0, False), 5), Place(1): Statement(Share(0, False), 6)}
    member = Member(Place(0), Mesh(2), fingerprint=5)
    with pytest.raises(UnequalReplicas, match=r"shard 0\): \[0\] / \[1\]"):
        drive(roll_call(member, Share(0, False)), Script(censuses=(unequal,)).perform)
    shards = {Place(0, s): Statement(Share(0, False), s) for s in range(2)}
    member = Member(Place(0), Mesh(1, 2))
    drive(roll_call(member, Share(0, False)), Script(censuses=(shards,)).perform)


# --- before and after ----------------------------------------------------------------------


@pytest.mark.parametrize(("replica", "muted"), [(0, False), (2, True)])
def test_the_lowest_replica_gives_its_parameters_to_all(replica: int, muted: bool) -> None:
    nothing = census(dict.fromkeys(range(3), Share(0, False)))
    _, state = job(3, 6)
    script = Script(censuses=(nothing,))
    assert drive(start(Member(Place(replica), Mesh(3)), state), script.perform) == state
    assert script.saw(Reduce) == [Reduce(0, muted), Reduce(1, muted)]


def test_the_next_lowest_gives_its_own_after_a_death_at_the_start() -> None:
    nothing = dict.fromkeys(range(3), Share(0, False))
    left = census({1: nothing[1], 2: nothing[2]})
    _, state = job(3, 6)
    script = Script(censuses=(census(nothing), left), failing_votes=frozenset({1}))
    after = drive(start(Member(Place(1), Mesh(3)), state), script.perform)
    assert (after.survivors, after.epoch, after.step) == ((1, 2), 1, 0)
    assert script.saw(Restore) == [Restore((0, 1), RestoreMode.BLOCKING)]
    muted = [effect.muted for effect in script.saw(Reduce) if isinstance(effect, Reduce)]
    assert muted == [True, True, False, False]


def test_the_end_leaves_behind_who_died_after_the_last_commit() -> None:
    nothing = dict.fromkeys(range(3), Share(0, False))
    left = census({0: nothing[0], 2: nothing[2]})
    _, state = job(3, 6)
    script = Script(failing_votes=frozenset({0, 1}), censuses=(census(nothing), left))
    after = drive(finish(Member(Place(2), Mesh(3)), state), script.perform)
    assert (after.survivors, after.epoch) == ((0, 2), 1)
    assert script.log[-1] == Agree(clean=True)


def test_replicas_that_end_with_different_parameters_are_refused() -> None:
    unequal = {Place(0): Statement(Share(0, False), 5), Place(1): Statement(Share(0, False), 6)}
    _, state = job(2, 6)
    member = Member(Place(0), Mesh(2), fingerprint=5)
    with pytest.raises(UnequalReplicas, match=r"\[0\] / \[1\]"):
        drive(finish(member, state), Script(censuses=(unequal,)).perform)
