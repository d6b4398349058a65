"""The paper's algorithms, line by line, on the virtual job.

====================================  ==========================================================
lines                                 test
====================================  ==========================================================
Algorithm 1, 1                        test_an_iteration_starts_from_zero_gradients
Algorithm 1, 2-6                      test_each_replica_runs_its_share_and_no_more
Algorithm 1, 7-10                     test_each_bucket_is_snapshotted_before_its_reduction
Algorithm 1, 11-13; 2, 8              test_a_spare_is_muted_until_it_is_promoted
Algorithm 1, 14-17                    test_the_last_step_before_the_commit_is_one_verdict
Algorithm 1, 18-22                    test_a_failure_anywhere_is_handled_by_everybody
Algorithm 1, 24 (loop) and 25         test_the_iteration_goes_on_until_it_commits_b_divided_by_b
Algorithm 1, 26-28; 7                 test_after_a_boundary_the_policy_advances
Algorithm 2, 1 (quiesced); 4, 5       test_after_the_first_sign_of_trouble_no_data_moves
Algorithm 2, 2 (detect), 7            test_a_death_is_detected_before_anything_is_reduced
Algorithm 2, 3-4 (repair)             test_a_repair_shrinks_and_raises_the_epoch
Algorithm 2, 5 (record)               test_the_record_is_one_agreed_census
Algorithm 2, 8-9 (reduce)             test_a_reduction_sums_every_admitted_gradient
Algorithm 3                           test_an_outcome_that_differs_becomes_one_verdict
Algorithm 4, 1-3, 7, 8                test_the_plan_is_made_from_the_record
Algorithm 4, 4                        test_the_boundary_split_is_installed_on_everybody
Algorithm 5, 1 (SKIP)                 test_skip_where_nothing_is_stale,
                                      test_what_was_restored_is_stale_again_only_when_...
Algorithm 5, 2                        test_what_was_tagged_before_the_repair_is_stale
Algorithm 5, 3-6 (NON_BLOCKING)       test_non_blocking_restoration_precedes_the_extra_microbatches
Algorithm 5, 7-10, 12-14 (BLOCKING)   test_blocking_restoration_reduces_again_without_extra_work
Algorithm 5, 11 (retry)               test_a_failed_re_reduction_is_handled_once_more
Algorithm 6, 1-4                      test_a_spare_that_covers_the_loss_changes_nothing_else
Algorithm 6, 5-10                     test_a_boundary_deals_out_exactly_what_is_missing
Algorithm 7, 1-3                      test_after_a_boundary_the_policy_advances
Algorithm 8                           test_the_adaptive_strawman_repairs_and_continues
====================================  ==========================================================
"""

from collections.abc import Sequence

import pytest

from recover.core.data import ExactLedger
from recover.core.effects import (
    Accumulate,
    Discard,
    NextBucket,
    Recovered,
    Recovery,
    Restore,
    Snapshot,
)
from recover.core.guard import Member
from recover.core.iteration import JobState, Rules, iteration
from recover.core.mesh import Mesh, Place
from recover.core.policies import RestoreMode
from recover.core.workload import Adjustment, Layout, Role, Share, Shares, adjust
from recover.sim.adversary import Cue, Scripted
from recover.sim.gradients import digits
from recover.sim.world import run_program
from tests.sim.record import Record, play_script

QUIET = "job: replicas=4 microbatches=8 steps=2"
BOUNDARY = "job: replicas=4 microbatches=8\nstep 0: kill 3.0 during reduce 1, fails on 0"
SPARE = "job: replicas=5 microbatches=7\nstep 0: kill 0.0 during reduce 1, fails on 1"


def recovery(record: Record, replica: int, number: int = 0) -> Recovery:
    found: Recovery = record.of(replica, Recovered)[number].recovery
    return found


def test_an_iteration_starts_from_zero_gradients() -> None:
    record = play_script(f"{QUIET} start=1")
    assert record.sums == {
        step: {sum(digits(k) for k in range(8 * step, 8 * step + 8))} for step in (0, 1)
    }, "neither the copied parameters nor the step before are in the sum"


def test_each_replica_runs_its_share_and_no_more() -> None:
    record = play_script("job: replicas=5 microbatches=7")
    ran = {r: [len(e.ids) for e in record.of(r, Accumulate)] for r in range(5)}
    assert ran == {0: [2], 1: [2], 2: [2], 3: [1], 4: [2]}, "majors, a minor, a spare"


def test_each_bucket_is_snapshotted_before_its_reduction() -> None:
    record = play_script("job: replicas=2 microbatches=4 buckets=3")
    order = [e for e in record.effects[Place(0)] if isinstance(e, NextBucket | Snapshot)]
    assert order == [
        *(e for b in range(3) for e in (NextBucket(), Snapshot(b))),
        NextBucket(),
    ]
    reductions = [name for name in record.meetings if name.startswith(("detect", "reduce"))]
    assert reductions == ["detect 0", "reduce 0", "reduce 1", "reduce 2"], "one probe, at the start"


def test_a_spare_is_muted_until_it_is_promoted() -> None:
    quiet = play_script("job: replicas=5 microbatches=7")
    assert quiet.sums[0] == {sum(map(digits, range(7)))}, "the spare's 7 and 8 are not in it"
    promoted = play_script(SPARE)
    assert promoted.sums[0] == {sum(map(digits, [2, 3, 4, 5, 6, 7, 8]))}
    assert recovery(promoted, 4).promoted == (4,)


def test_the_last_step_before_the_commit_is_one_verdict() -> None:
    record = play_script("job: replicas=3 shards=2 microbatches=6 buckets=1")
    name, outcomes = record.met_at[4]
    assert name == "consensus"
    assert len(outcomes) == 6, "all ranks of all replicas, not a column"


def test_a_failure_anywhere_is_handled_by_everybody() -> None:
    record = play_script(BOUNDARY)
    plans = {recovery(record, r).extra[0] for r in (0, 1, 2)}
    assert plans == {1}, "replica 1 and 2 saw the reduction succeed and recover like replica 0"


def test_the_iteration_goes_on_until_it_commits_b_divided_by_b() -> None:
    record = play_script(
        "job: replicas=4 microbatches=8\n"
        "step 0: kill 3.0 during reduce 1, fails on 0\n"
        "step 0, epoch 1: kill 2.0 before consensus\n"
        "step 0, epoch 2: kill 1.0 during reduce 0, fails on 0"
    )
    facts = record.commits[0]
    assert (sum(facts.contributions.values()), facts.divisor, facts.epoch) == (8, 8, 3)
    assert facts.survivors == (0,)


def test_after_a_boundary_the_policy_advances() -> None:
    record = play_script(f"{QUIET}\nstep 0: kill 3.0 during reduce 1, fails on 0")
    facts = record.commits[1]
    assert facts.accumulation == 3
    assert facts.contributions == {0: 3, 1: 3, 2: 2}
    assert facts.roles == {0: Role.MAJOR, 1: Role.MAJOR, 2: Role.MINOR}
    spares = play_script(
        "job: replicas=9 microbatches=18 steps=2\nstep 0: kill 8.0 during reduce 0, fails on 0"
    ).commits[1]
    assert [spares.roles[r] for r in (5, 6, 7)] == [
        Role.MAJOR,
        Role.MAJOR_SPARE,
        Role.MAJOR_SPARE,
    ], "18 = 6 x 3: no minor, so no minor-spare"


def test_after_the_first_sign_of_trouble_no_data_moves() -> None:
    record = play_script(
        "job: replicas=4 microbatches=8 buckets=4\nstep 0: kill 3.0 during reduce 1, fails on 0"
    )
    before = record.meetings[: record.meetings.index("shrink")]
    assert before == ["detect 0", "reduce 0", "reduce 1", "consensus"], "nobody meets in reduce 2"
    assert set(dict(record.met_at)["reduce 2"].values()) == {True}, "of the second pass"


def test_a_death_is_detected_before_anything_is_reduced() -> None:
    record = play_script("job: replicas=4 microbatches=8\nstep 0: kill 2.0 before detect 0")
    assert record.meetings[:3] == ["detect 0", "consensus", "shrink"]
    assert set(record.met_at[0][1].values()) == {False}


def test_a_repair_shrinks_and_raises_the_epoch() -> None:
    record = play_script(BOUNDARY)
    shrink = next(outcomes for name, outcomes in record.met_at if name == "shrink")
    assert shrink == {Place(0): 1, Place(1): 1, Place(2): 1}
    assert record.commits[0].epoch == 1


def test_the_record_is_one_agreed_census() -> None:
    record = play_script(f"{BOUNDARY}\nstep 0: kill 2.0 during census, fails on 1")
    first = record.meetings.index("shrink")
    assert record.meetings[first : first + 6] == [
        "shrink",
        "census",
        "census-verdict",
        "shrink",
        "census",
        "census-verdict",
    ]
    assert recovery(record, 0).failed == recovery(record, 1).failed == (2, 3)
    assert recovery(record, 0).failed_ranks == (2, 3)


def test_a_reduction_sums_every_admitted_gradient() -> None:
    record = play_script("job: replicas=3 shards=2 microbatches=7 buckets=3")
    assert record.sums[0] == {sum(map(digits, range(7)))}


def test_an_outcome_that_differs_becomes_one_verdict() -> None:
    record = play_script(
        "job: replicas=4 microbatches=8\nstep 0: glitch during reduce 1, fails on 2"
    )
    by_name = dict(reversed(record.met_at))
    assert by_name["reduce 1"] == {Place(r): r != 2 for r in range(4)}
    assert set(by_name["consensus"].values()) == {False}
    assert record.commits[0].survivors == (0, 1, 2, 3)


def test_the_plan_is_made_from_the_record() -> None:
    record = play_script(SPARE)
    assert [recovery(record, r) for r in (2, 3, 4)] == [recovery(record, 1)] * 3
    plan = recovery(record, 1)
    assert (plan.epoch, plan.failed, plan.boundary) == (1, (0,), False)
    assert (plan.restored, plan.mode) == ((0, 1), RestoreMode.BLOCKING)


def test_the_boundary_split_is_installed_on_everybody() -> None:
    record = play_script(BOUNDARY)
    extra = {r: [len(e.ids) for e in record.of(r, Accumulate) if e.extra] for r in (0, 1, 2)}
    assert extra == {0: [1], 1: [1], 2: []}
    assert record.commits[0].roles == {
        0: Role.MAJOR,
        1: Role.MAJOR,
        2: Role.BOUNDARY_MINOR,
    }


class LargeSpare:
    """Two replicas run one microbatch each, the third one is a spare that runs four."""

    microbatches = 2

    def advance(self, survivors: Sequence[int]) -> Layout:
        return Layout({0: Share(1, True), 1: Share(1, True), 2: Share(4, False)}, 4)

    def adjust(self, census: Shares) -> Adjustment:
        return adjust(census, self.microbatches)

    def divisor(self, contributions: int) -> int:
        return contributions


def test_skip_where_nothing_is_stale() -> None:
    """A spare that does not fit drops what it ran: there is nothing to restore."""
    rules, record, cues = Rules(LargeSpare()), Record(), []
    for replica in (0, 1):
        cues.append(Cue(0, None, f"kill {replica}.0 before", "consensus", None))

    async def program(member: Member) -> JobState:
        return await iteration(member, rules, JobState((0, 1, 2), ExactLedger()))

    run_program(Mesh(3), program, Scripted(cues), observers=(record,))
    assert recovery(record, 2).mode is RestoreMode.SKIP
    own = [e for e in record.effects[Place(2)] if isinstance(e, Accumulate | Discard | Restore)]
    assert own == [Accumulate((2, 3, 4, 5), False), Discard(), Accumulate((0, 1), True)]
    assert record.sums[0] == {digits(0) + digits(1)}


def test_what_was_restored_is_stale_again_only_when_it_was_reduced_again() -> None:
    record = play_script(f"{BOUNDARY}\nstep 0: kill 2.0 before restore")
    assert recovery(record, 0, 0).restored == (0, 1)
    assert recovery(record, 0, 1).restored == (0,), "the next detection, of bucket 0, found it"


def test_what_was_tagged_before_the_repair_is_stale() -> None:
    record = play_script(
        "job: replicas=4 microbatches=8 buckets=4\nstep 0: kill 3.0 during reduce 1, fails on 0"
    )
    assert [e.buckets for e in record.of(0, Restore)] == [(0, 1)], (
        "0 was reduced cleanly, 1 failed here, 2 and 3 were never visited"
    )
    assert [e.buckets for e in record.of(2, Restore)] == [(0, 1, 2)], (
        "1 succeeded here, 2 was snapshotted before it was found that the group is revoked"
    )


def test_non_blocking_restoration_precedes_the_extra_microbatches() -> None:
    record = play_script(BOUNDARY)
    tail = [e for e in record.effects[Place(0)] if isinstance(e, Restore | Accumulate)]
    assert tail[1:] == [Restore((0, 1), RestoreMode.NON_BLOCKING), Accumulate((6,), extra=True)]
    blocking = play_script(BOUNDARY.replace("microbatches=8", "microbatches=8 restore=blocking"))
    assert recovery(blocking, 0).mode is RestoreMode.BLOCKING
    assert blocking.sums == record.sums


def test_blocking_restoration_reduces_again_without_extra_work() -> None:
    record = play_script(SPARE)
    assert [e.mode for e in record.of(4, Restore)] == [RestoreMode.BLOCKING]
    assert not [e for r in range(5) for e in record.of(r, Accumulate) if e.extra]
    assert [name for name in record.meetings if name.startswith("reduce")] == [
        "reduce 0",
        "reduce 1",
    ] * 2


@pytest.mark.parametrize("second", ["4.0", "1.0"])
def test_a_failed_re_reduction_is_handled_once_more(second: str) -> None:
    """Within the boundary (the promoted spare's loss is covered by extras), and across it."""
    others = "1" if second == "4.0" else "2"
    record = play_script(
        f"{SPARE}\nstep 0, epoch 1: kill {second} during reduce 1, fails on {others}"
    )
    facts = record.commits[0]
    assert (facts.epoch, sum(facts.contributions.values())) == (2, 7)
    assert facts.boundary


def test_a_spare_that_covers_the_loss_changes_nothing_else() -> None:
    facts = play_script(SPARE).commits[0]
    assert facts.contributions == {1: 2, 2: 2, 3: 1, 4: 2}
    assert (facts.accumulation, facts.boundary) == (2, False)
    assert facts.roles == {1: Role.MAJOR, 2: Role.MAJOR, 3: Role.MINOR, 4: Role.MAJOR}


def test_a_boundary_deals_out_exactly_what_is_missing() -> None:
    """W=32, G=8: C_cur = 248, G_ext = 1, 31 - 8 = 23 boundary minors."""
    record = play_script(
        "job: replicas=32 microbatches=256\nstep 0: kill 31.0 during reduce 0, fails on 7"
    )
    facts = record.commits[0]
    assert sorted(facts.contributions.values()) == [8] * 23 + [9] * 8
    assert list(facts.roles.values()).count(Role.BOUNDARY_MINOR) == 23
    assert record.sums[0] == {sum(map(digits, range(256)))}, "the failure-free microbatches"


def test_the_adaptive_strawman_repairs_and_continues() -> None:
    record = play_script(
        "job: replicas=4 microbatches=8 steps=2 policy=adaptive\n"
        "step 0: kill 3.0 during reduce 1, fails on 0"
    )
    plan = recovery(record, 0)
    assert (plan.mode, plan.boundary, set(plan.extra.values())) == (
        RestoreMode.BLOCKING,
        False,
        {0},
    )
    for step in (0, 1):
        assert sum(record.commits[step].contributions.values()) == 6
        assert record.commits[step].divisor == 6
