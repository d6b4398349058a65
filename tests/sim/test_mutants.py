"""Every known-bad variant of the protocol is caught, and the message says how to see it again."""

from collections.abc import Generator
from typing import Any

import pytest

from recover.core.effects import Detect
from recover.sim.gradients import Violation
from recover.sim.job import Job
from recover.sim.search import explore
from tests.sim.mutants import MUTANTS, Asked, Mutant, stateless


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_bad_protocol_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.parse(mutant.job)
    if mutant.patch is not None:
        mutant.patch(monkeypatch)
    program = mutant.program(job) if mutant.program is not None else None
    with pytest.raises(Violation, match=mutant.caught) as caught:
        explore(job, program=program)
    assert "python -m recover.sim --replay" in str(caught.value).splitlines()[-1]


def unchanged(effect: Asked) -> Generator[Asked, Any, Any]:
    return (yield effect)


def test_the_frame_of_the_mutants_changes_nothing_by_itself() -> None:
    job = Job.parse("replicas=3 microbatches=6 kills=1 glitches=1")
    explore(job, program=stateless(unchanged)(job))


def ignore_detections(effect: Asked) -> Generator[Asked, Any, Any]:
    outcome = yield effect
    return True if isinstance(effect, Detect) else outcome


def test_detection_saves_work_and_is_not_what_correctness_rests_on() -> None:
    """A variant that is *not* bad: the reductions fail instead, and the verdict says so."""
    job = Job.parse("replicas=3 microbatches=6 kills=1 glitches=1")
    explore(job, program=stateless(ignore_detections)(job))
