"""Failures beyond the matrix: several at once, spares, shrinking batches, and the last replica."""

from pathlib import Path

import pytest

from recover.records import StepRecord
from tests.end_to_end.harness import Run, run_subject
from tests.end_to_end.oracle import assert_gradients
from tests.end_to_end.subject import Settings

pytestmark = pytest.mark.timeout(600)


def kill(step: int, replica: int, location: str, **more: int) -> dict[str, object]:
    return {"step": step, "replica": replica, "rank": 0, "location": location, **more}


def committed(step: StepRecord) -> set[int]:
    return {number for ids in step.ids.values() for number in ids}


def test_all_but_one_die_in_one_step(undisturbed: Run, tmp_path: Path) -> None:
    """Rank 0 among them, two in the same reduction; the records go on in other hands.

    A script that zeroes its gradients where it should not loses none. (With DDP it may do so only
    where each microbatch uses the same parameters: DDP itself insists.)
    """
    settings = Settings(stack="ddp", clip_norm=0.1, careless=True, rare_every=1)
    faults = [
        kill(2, 0, "reduce", bucket=2),
        kill(2, 1, "reduce", bucket=2),
        kill(2, 3, "repair"),
    ]
    run = run_subject(tmp_path / "job", settings, replicas=4, faults=faults).finished()
    record = run.record
    assert [s.survivors for s in record.steps] == [(0, 1, 2, 3)] * 2 + [(2,)] * 5
    assert record.steps[2].failed == (0, 1, 3)
    assert record.steps[2].contributions == {2: 12}
    wanted = [committed(step) for step in undisturbed.record.steps]
    assert [committed(step) for step in record.steps] == wanted
    assert_gradients(run, settings)


def test_spares_fill_in_before_anybody_runs_more(tmp_path: Path) -> None:
    """B = 9 on 7: four majors of 2, a minor of 1, a major-spare and a minor-spare.

    The minor dies: the minor-spare fits, and its microbatch counts in place of the lost one. The
    next minor dies with only a major-spare left, which does not fit: the lost microbatch is run
    again. Two entries are for places that this run never comes past.
    """
    faults = [
        kill(1, 4, "reduce"),
        kill(3, 5, "consensus"),
        kill(4, 1, "extra"),
        kill(9, 2, "data"),
    ]
    settings = Settings(microbatches=9)
    run = run_subject(tmp_path / "job", settings, replicas=7, faults=faults).finished()
    record = run.record
    roles = ["major"] * 4 + ["minor", "major_spare", "minor_spare"]
    assert list(record.steps[0].roles.values()) == roles
    first, second = record.events
    assert (first.step, first.replicas, first.promoted, first.boundary) == (1, (4,), (6,), False)
    assert record.steps[1].contributions == {0: 2, 1: 2, 2: 2, 3: 2, 5: 0, 6: 1}
    assert (second.step, second.replicas, second.promoted, second.boundary) == (3, (5,), (), True)
    assert sum(record.steps[3].contributions.values()) == 9
    assert_nothing_is_lost(record.steps)
    assert committed(record.steps[1]) == {*range(9, 17), 20}, "17 was lost, 20 came in its place"
    assert committed(record.steps[2]) == {17, 18, 19, *range(21, 27)}, "the oldest come first"
    assert_gradients(run, settings)
    assert len(set(run.checksums().values())) == 1
    for entry in ("step: 4, replica: 1, rank: 0, location: extra", "step: 9, replica: 2"):
        assert entry in run.stdout, f"an entry that never came is not reported{run.replay}"


def assert_nothing_is_lost(steps: tuple[StepRecord, ...]) -> None:
    """What is skipped for a while is committed soon: ids are never lost for good."""
    done = {number for step in steps for number in committed(step)}
    assert done == set(range(len(done)))


def test_streams_drop_out_with_their_replicas(tmp_path: Path) -> None:
    """B = 7 on 5: three majors of 2, a minor of 1 and a major-spare, each on its own stream."""
    settings = Settings(microbatches=7, data="stream", stack="ddp")
    faults = [kill(1, 3, "data"), kill(4, 0, "optimizer")]
    run = run_subject(tmp_path / "job", settings, replicas=5, faults=faults).finished()
    record = run.record
    assert record.config["data"] == "stream"
    for replica in range(5):
        drawn = [n for step in record.steps for n in step.ids.get(replica, ())]
        assert drawn == list(range(replica, replica + 5 * len(drawn), 5)), "out of order, or a gap"
    assert record.steps[4].survivors == (0, 1, 2, 4)  # the verdict was clean when replica 0 died
    assert record.steps[5].survivors == (1, 2, 4)
    assert_gradients(run, settings)


def test_the_adaptive_policy_lets_the_batch_shrink(tmp_path: Path) -> None:
    """From the first step on: it dies there, not while the replicas are made equal before it.

    The script keeps DDP from reducing at all, which is as good: the trainer reduces.
    """
    settings = Settings(
        steps=5, microbatches=6, policy="adaptive", stack="ddp", dtype="bfloat16", no_sync=True
    )
    faults = [kill(0, 1, "consensus")]
    run = run_subject(tmp_path / "job", settings, replicas=3, faults=faults).finished()
    assert [s.microbatches for s in run.record.steps] == [4] * 5
    assert not any(s.boundary for s in run.record.steps)
    assert [(e.step, e.replicas) for e in run.record.events] == [(0, (1,))]
    assert_gradients(run, settings)


def test_bfloat16_and_a_death_after_the_last_verdict(tmp_path: Path) -> None:
    """Replica 0 dies with the last line of the records in its hands; replica 1 writes it."""
    settings = Settings(steps=4, microbatches=5, dtype="bfloat16", stack="ddp", in_place=True)
    faults = [kill(3, 0, "optimizer")]
    run = run_subject(tmp_path / "job", settings, replicas=2, faults=faults).finished()
    assert [s.step for s in run.record.steps] == [0, 1, 2, 3]
    assert set(run.checksums()) == {1}
    assert_gradients(run, settings)


def test_the_death_of_the_last_replica_is_one_clear_error(tmp_path: Path) -> None:
    faults = [kill(1, 0, "reduce"), kill(1, 1, "extra")]
    run = run_subject(tmp_path / "job", Settings(), replicas=2, faults=faults)
    assert run.status == 1, run.replay
    assert "no replica is left" in run.stderr, run.replay
    assert "Traceback" not in run.stdout + run.stderr, run.replay
    assert [s.step for s in run.record.steps] == [0]
