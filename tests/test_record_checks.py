"""What is checked in the records of a run."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.core.data import DataLedger, ExactLedger, StreamLedger, extended
from recover.core.policies import AdaptiveWorldPolicy, Policy, StaticWorldPolicy
from recover.core.workload import Role, roles_after
from recover.records import EventRecord, RunRecord, StepRecord, check_run

from .record_samples import AFTER, CONFIG, EVENT, HIT, RUN, STEP


def test_a_sound_run_has_no_problems() -> None:
    assert check_run(RUN) == []
    assert check_run(RunRecord(CONFIG, (), ())) == []


@pytest.mark.parametrize(
    ("number", "changes", "problem"),
    [
        (0, {"microbatches": 7}, "step 0: 7 microbatches instead of B=6"),
        (0, {"microbatches": 7}, "step 0: contributions sum to 6, not to microbatches=7"),
        (
            0,
            {"ids": {0: (0,), 1: (2, 3), 2: (4, 5)}},
            "step 0: replica 0 has 1 ids but contributes",
        ),
        (0, {"survivors": (0, 2, 1)}, "step 0: survivors [0, 2, 1] are not in ascending order"),
        (1, {"survivors": (0, 0, 2)}, "step 1: survivors [0, 0, 2] are not in ascending order"),
        (1, {"survivors": (0, 1, 2)}, "step 1: contributions has replicas [0, 2], survivors are"),
        (1, {"survivors": (0, 2, 3)}, "step 1: replicas [3] came back"),
        (1, {"failed": ()}, "step 1: failed is [], but [1] left"),
        (1, {"epoch": 0}, "step 1: replicas [1] left but the epoch is still 0"),
        (2, {"epoch": 0}, "step 2: epoch fell from 1 to 0"),
        (2, {"epoch": 2}, "step 2: epoch rose from 1 to 2 without a recovery on record"),
        (1, {"epoch": 3}, "step 1: epoch rose from 0 to 3 without a recovery on record"),
        (1, {"boundary": False}, "step 1: boundary is False, its recoveries say otherwise"),
        (2, {"boundary": True}, "step 2: boundary is True, its recoveries say otherwise"),
        (2, {"ids": {0: (12, 13, 14), 2: (15, 16, 3)}}, "step 2: microbatch 3 was committed in 0"),
        (0, {"ids": {0: (0, 1), 1: (2, 3), 2: (4, 4)}}, "step 0: microbatch 4 was committed in 0"),
        (0, {"accumulation": 3}, "step 0: replica 0 is major but contributes 2 (G=3)"),
        (0, {"roles": {0: "major", 1: "minor", 2: "major"}}, "step 0: replica 1 is minor but cont"),
        (
            0,
            {"roles": {0: "major", 1: "boundary_minor", 2: "major"}},
            "step 0: replica 1 is boundary_minor but contributes 2 (G=2)",
        ),
        (
            1,
            {"roles": {0: "major", 2: "minor_spare"}},
            "step 1: replica 2 is minor_spare but contributes 3 at a boundary (G=2)",
        ),
        (0, {"roles": {0: "major"}}, "step 0: roles has replicas [0], survivors are [0, 1, 2]"),
    ],
)
def test_what_breaks_the_invariant_is_named(
    number: int, changes: dict[str, object], problem: str
) -> None:
    steps = list(RUN.steps)
    steps[number] = replace(steps[number], **changes)  # type: ignore[arg-type]
    problems = check_run(replace(RUN, steps=tuple(steps)))
    assert any(found.startswith(problem) for found in problems), problems


def test_recoveries_must_fit_their_step() -> None:
    assert check_run(replace(RUN, events=())) == [
        "step 1: epoch rose from 0 to 1 without a recovery on record",
        "step 1: failed is [1], its recoveries name []",
        "step 1: boundary is True, its recoveries say otherwise",
    ]
    late = replace(EVENT, step=2, replicas=(), boundary=False)
    assert check_run(replace(RUN, events=(EVENT, late))) == [
        "step 2: recoveries lead to epochs [1], the step committed under 1"
    ]


def test_the_first_step_may_be_hit_too() -> None:
    hit = replace(HIT, step=0)
    assert check_run(RunRecord(CONFIG, (hit,), (replace(EVENT, step=0),))) == []
    assert check_run(RunRecord(CONFIG, (hit,), ())) == [
        "step 0: epoch rose from 0 to 1 without a recovery on record",
        "step 0: failed is [1], its recoveries name []",
        "step 0: boundary is True, its recoveries say otherwise",
    ]


def test_a_job_may_have_shrunk_before_its_first_step() -> None:
    assert check_run(RunRecord(CONFIG, (replace(STEP, epoch=2),), ())) == []


def test_a_step_that_was_hit_twice_is_sound() -> None:
    hit = replace(
        HIT,
        contributions={0: 6},
        ids={0: (6, 7, 8, 9, 10, 11)},
        survivors=(0,),
        roles={0: Role.MAJOR},
        failed=(1, 2),
        epoch=2,
    )
    second = replace(EVENT, replicas=(2,), ranks=(2,), extra={0: 3}, epoch=2)
    assert check_run(RunRecord(CONFIG, (STEP, hit), (EVENT, second))) == []


def test_b_may_shrink_under_the_adaptive_policy_only() -> None:
    small = replace(
        AFTER,
        step=1,
        microbatches=4,
        contributions={0: 2, 2: 2},
        ids={0: (6, 7), 2: (8, 9)},
        accumulation=2,
        failed=(1,),
    )
    event = replace(EVENT, boundary=False)
    run = RunRecord(CONFIG | {"policy": "adaptive"}, (STEP, small), (event,))
    assert check_run(run) == []
    assert check_run(replace(run, config=CONFIG)) == ["step 1: 4 microbatches instead of B=6"]


def test_settings_without_b_cannot_be_checked() -> None:
    assert check_run(replace(RUN, config={})) == [
        "config: microbatches (B) must be a whole number, got None"
    ]


# --- runs that the policies play -----------------------------------------------------------


def played(policy: Policy, ledger: DataLedger, replicas: int, random: Random) -> RunRecord:
    """Return the records of a job whose replicas die at random, also several times in a step."""
    steps: list[StepRecord] = []
    events: list[EventRecord] = []
    survivors = tuple(range(replicas))
    epoch = 0
    for number in range(12):
        layout = policy.advance(survivors)
        plan = ledger.assign(layout)
        roles = {replica: layout.role(replica) for replica in plan}
        boundary = False
        while random.random() < 0.3:
            epoch += 1
            dead = random.sample(sorted(plan), random.randint(0, len(plan) - 1))
            adjustment = policy.adjust({r: a.share for r, a in plan.items() if r not in dead})
            plan = extended(plan, adjustment, ledger.extend(plan, adjustment))
            roles = roles_after(layout, adjustment)
            boundary = boundary or adjustment.boundary
            event = replace(EVENT, step=number, epoch=epoch, replicas=tuple(sorted(dead)))
            events.append(replace(event, boundary=adjustment.boundary))
        ledger = ledger.commit(plan)
        record = replace(
            STEP,
            step=number,
            microbatches=sum(a.share.contribution for a in plan.values()),
            contributions={r: a.share.contribution for r, a in plan.items()},
            ids={r: a.ids if a.admitted else () for r, a in plan.items()},
            epoch=epoch,
            survivors=tuple(plan),
            accumulation=layout.accumulation,
            roles=dict(roles),
            boundary=boundary,
            failed=tuple(r for r in survivors if r not in plan),
        )
        steps.append(record)
        survivors = record.survivors
    settings = {"microbatches": policy.microbatches, "replicas": replicas}
    name = "adaptive" if isinstance(policy, AdaptiveWorldPolicy) else "static"
    return RunRecord({**settings, "policy": name}, tuple(steps), tuple(events))


@given(st.integers(1, 12), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_whatever_a_policy_does_is_sound(
    replicas: int, microbatches: int, adaptive: bool, stream: bool, seed: int
) -> None:
    static = StaticWorldPolicy(microbatches)
    shrinking = AdaptiveWorldPolicy(microbatches + replicas, replicas)
    ledger = StreamLedger.start(replicas) if stream else ExactLedger()
    run = played(shrinking if adaptive else static, ledger, replicas, Random(seed))
    assert check_run(run) == []
