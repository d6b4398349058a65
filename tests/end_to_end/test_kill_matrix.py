"""Each of 4 replicas, killed at each of the 9 places of a step. Paper: 5.2, A.2.

Twelve runs kill three of four replicas each. In every run one dies while the others recover (in
repair, restore or an extra microbatch), together with the one that gives them reason to, and a
third one alone in another step. The runs rotate over both stacks, both ways to reduce, and the ways
to restore. B = 12 divides by 4, 3 and 2, so there is never a spare to promote: every step must
commit the failure-free set of microbatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recover.records import RunRecord, StepRecord
from tests.end_to_end.harness import Run, run_subject
from tests.end_to_end.oracle import assert_gradients
from tests.end_to_end.subject import Settings

pytestmark = pytest.mark.timeout(600)

REPLICAS = 4
DURING_RECOVERY = ("repair", "restore", "extra")
NOTICED_AT_ONCE = ("reduce", "consensus", "backward")
ALONE = ("optimizer", "data", "microbatch")
RESTORE = ("auto", "blocking", "non_blocking")
TOGETHER_IN = 3


@dataclass(frozen=True, slots=True)
class Kill:
    """One entry of a schedule."""

    step: int
    replica: int
    location: str

    @property
    def entry(self) -> dict[str, object]:
        return {
            "step": self.step,
            "replica": self.replica,
            "rank": 0,
            "location": self.location,
        }

    @property
    def noticed_in(self) -> int:
        """A death between the verdict and the optimizer disturbs the next step."""
        return self.step + (self.location == "optimizer")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the matrix."""

    kills: tuple[Kill, ...]
    settings: Settings

    def __str__(self) -> str:
        kills = ",".join(f"{kill.replica}@{kill.location}" for kill in self.kills)
        way = "in-place" if self.settings.in_place else "out-of-place"
        way += "-overlap" if self.settings.overlap else ""
        return f"{kills}:{self.settings.stack}:{way}:{self.settings.restore}"


def cases() -> Iterator[Case]:
    """Yield the runs: for each replica, one in which it dies in each stage of a recovery."""
    for replica in range(REPLICAS):
        for turn, during in enumerate(DURING_RECOVERY):
            cause, alone = (replica + 1) % REPLICAS, (replica + 2) % REPLICAS
            kills = (
                Kill(TOGETHER_IN, cause, NOTICED_AT_ONCE[(turn + replica) % 3]),
                Kill(TOGETHER_IN, replica, during),
                Kill(1 if replica % 2 else 5, alone, ALONE[(turn + 2 * replica) % 3]),
            )
            ddp = (replica + turn) % 3 == 0  # it takes twice as long
            settings = Settings(
                stack="ddp" if ddp else "plain",
                in_place=(replica + turn) % 2 == 1,
                overlap=(replica + turn) % 2 == 0 and not ddp,
                restore=RESTORE[replica % 3],
            )
            yield Case(kills, settings)


CASES = tuple(cases())


def test_the_matrix_is_complete() -> None:
    killed = {(kill.replica, kill.location) for case in CASES for kill in case.kills}
    assert len(killed) == REPLICAS * 9
    ways = {(case.settings.stack, case.settings.in_place) for case in CASES}
    assert len(ways) == 4
    assert any(case.settings.overlap for case in CASES)
    assert {case.settings.restore for case in CASES if case.settings.in_place} == set(RESTORE)


QUICK = (0, 3, 8, 10)
"""Runs in which each replica dies once during a recovery; the others are slow."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if number in QUICK else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_the_survivors_go_on_as_if_nobody_had_died(
    case: Case, undisturbed: Run, tmp_path: Path
) -> None:
    faults = [kill.entry for kill in case.kills]
    run = run_subject(tmp_path / "job", case.settings, replicas=REPLICAS, faults=faults).finished()
    for kill in case.kills:
        end = f"step: {kill.step}, replica: {kill.replica}, rank: 0, location: {kill.location}}}"
        assert end in run.stdout, f"{kill} never came{run.replay}"
    assert_same_training(run.record, undisturbed.record, run.replay)
    assert_events(run.record, case, run.replay)
    assert_gradients(run, case.settings)
    last = {kill.replica for kill in case.kills} ^ set(range(REPLICAS))
    assert set(run.checksums()) == last, run.replay


def assert_same_training(record: RunRecord, reference: RunRecord, replay: str) -> None:
    """No line is lost, each step commits the same microbatches, and the loss is the same."""
    assert [s.step for s in record.steps] == [s.step for s in reference.steps], replay
    for step, wanted in zip(record.steps, reference.steps, strict=True):
        assert step.microbatches == 12, replay
        assert committed(step) == committed(wanted), replay
        assert step.loss == pytest.approx(wanted.loss, rel=1e-4), (step.step, replay)
        assert step.tokens == wanted.tokens, replay


def committed(step: StepRecord) -> list[int]:
    return sorted(number for ids in step.ids.values() for number in ids)


def assert_events(record: RunRecord, case: Case, replay: str) -> None:
    """The recoveries name who died, in the step and at the place where that was noticed."""
    named = {(e.step, replica) for e in record.events for replica in e.replicas}
    assert named == {(kill.noticed_in, kill.replica) for kill in case.kills}, replay
    for event in record.events:
        assert event.ranks == event.replicas, replay
        assert event.promoted == (), replay
        assert event.detect_s >= 0, replay
        assert event.total_s >= event.repair_s > 0, replay
    places = {e.location for e in record.events if e.step == TOGETHER_IN}
    cause = case.kills[0].location
    first = next(e for e in record.events if e.step == TOGETHER_IN)
    assert places <= {"reduce", "consensus"}, replay
    assert first.location == ("consensus" if cause == "consensus" else "reduce"), replay


def test_losses_and_ids_of_the_undisturbed_run(undisturbed: Run) -> None:
    record = undisturbed.record
    for number, step in enumerate(record.steps):
        assert committed(step) == list(range(12 * number, 12 * number + 12))
        assert step.survivors == (0, 1, 2, 3)
        assert (step.epoch, step.failed, step.boundary, step.recovery_s) == (0, (), False, 0.0)
    assert record.events == ()
    assert record.steps[-1].loss < 0.8 * record.steps[0].loss, "the subject does not learn"
    assert_gradients(undisturbed, Settings())


def test_all_ranks_end_with_equal_parameters(undisturbed: Run) -> None:
    said = undisturbed.checksums()
    assert set(said) == {0, 1, 2, 3}
    assert len(set(said.values())) == 1
