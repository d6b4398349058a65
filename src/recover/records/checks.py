"""What must hold in the records of any run, checked from the outside. Layer: files.

Nothing here asks the policy what it would have done: the checks are arithmetic on the lines alone,
so that a mistake in the protocol cannot hide itself.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from recover.core.workload import Role
from recover.records.reader import RunRecord
from recover.records.schema import EventRecord, StepRecord

_SPARES = (Role.MAJOR_SPARE, Role.MINOR_SPARE)


def check_run(run: RunRecord) -> list[str]:
    """Return every way in which a run's records break the invariant; empty if they keep it."""
    problems = list(_check_microbatches(run))
    for record in run.steps:
        problems += _named(record, _check_sums(record))
        problems += _named(record, _check_roles(record))
    for before, record in zip((None, *run.steps), run.steps, strict=False):
        if before is not None:
            problems += _named(record, _check_membership(before, record))
        problems += _named(record, _check_events(before, record, run.events))
    return problems + list(_check_ids(run))


def _named(record: StepRecord, problems: Iterator[str]) -> list[str]:
    return [f"step {record.step}: {problem}" for problem in problems]


def _check_microbatches(run: RunRecord) -> Iterator[str]:
    """B in every step; the adaptive policy lets it shrink with the world."""
    if run.config.get("policy", "static") != "static":
        return
    expected = run.config.get("microbatches")
    if not isinstance(expected, int):
        yield f"config: microbatches (B) must be a whole number, got {expected!r}"
        return
    for record in run.steps:
        if record.microbatches != expected:
            yield f"step {record.step}: {record.microbatches} microbatches instead of B={expected}"


def _check_sums(record: StepRecord) -> Iterator[str]:
    if list(record.survivors) != sorted(set(record.survivors)):
        yield f"survivors {list(record.survivors)} are not in ascending order"
    total = sum(record.contributions.values())
    if total != record.microbatches:
        yield f"contributions sum to {total}, not to microbatches={record.microbatches}"
    for name, mapping in (
        ("contributions", record.contributions),
        ("ids", record.ids),
        ("roles", record.roles),
    ):
        if set(mapping) != set(record.survivors):
            yield f"{name} has replicas {sorted(mapping)}, survivors are {list(record.survivors)}"
    for replica in sorted(set(record.ids) & set(record.contributions)):
        ids, contribution = len(record.ids[replica]), record.contributions[replica]
        if ids != contribution:
            yield f"replica {replica} has {ids} ids but contributes {contribution}"


def _check_roles(record: StepRecord) -> Iterator[str]:
    """Majors contribute G, minors less, spares nothing; at a boundary only the spares are fixed."""
    full = record.accumulation
    for replica, role in sorted(record.roles.items()):
        got = record.contributions.get(replica, 0)
        if role in _SPARES:
            right = got == 0
        elif record.boundary:
            right = got > 0 or role == Role.BOUNDARY_MINOR
        elif role == Role.BOUNDARY_MINOR:
            right = False
        else:
            right = got == full if role == Role.MAJOR else 0 < got < full
        if not right:
            where = " at a boundary" if record.boundary else ""
            yield f"replica {replica} is {role} but contributes {got}{where} (G={full})"


def _check_membership(before: StepRecord, record: StepRecord) -> Iterator[str]:
    joined = sorted(set(record.survivors) - set(before.survivors))
    if joined:
        yield f"replicas {joined} came back"
    left = sorted(set(before.survivors) - set(record.survivors))
    if left != list(record.failed):
        yield f"failed is {list(record.failed)}, but {left} left"
    if record.epoch < before.epoch:
        yield f"epoch fell from {before.epoch} to {record.epoch}"
    if left and record.epoch == before.epoch:
        yield f"replicas {left} left but the epoch is still {record.epoch}"


def _check_events(
    before: StepRecord | None, record: StepRecord, run_events: tuple[EventRecord, ...]
) -> Iterator[str]:
    """The recoveries of a step lead from the epoch before it to the epoch that it committed.

    Before the first step the job may have shrunk already, with or without a recovery on record.
    """
    first = bisect_left(run_events, record.step, key=lambda event: event.step)
    last = bisect_right(run_events, record.step, key=lambda event: event.step)
    events = run_events[first:last]
    epochs = [event.epoch for event in events]
    start = 0 if before is None else before.epoch
    rose = bool(record.failed) if before is None else record.epoch > start
    if rose and record.epoch not in epochs:
        yield f"epoch rose from {start} to {record.epoch} without a recovery on record"
    outside = [epoch for epoch in epochs if not start < epoch <= record.epoch]
    if outside:
        yield f"recoveries lead to epochs {outside}, the step committed under {record.epoch}"
    named = sorted(replica for event in events for replica in event.replicas)
    right = set(record.failed) <= set(named) if before is None else named == list(record.failed)
    if not right:
        yield f"failed is {list(record.failed)}, its recoveries name {named}"
    if record.boundary != any(event.boundary for event in events):
        yield f"boundary is {record.boundary}, its recoveries say otherwise"


def _check_ids(run: RunRecord) -> Iterator[str]:
    """No microbatch counts twice, in one step or in two."""
    seen: dict[int, int] = {}
    for record in run.steps:
        for ids in record.ids.values():
            for microbatch in ids:
                if microbatch in seen:
                    first = seen[microbatch]
                    yield f"step {record.step}: microbatch {microbatch} was committed in {first}"
                seen[microbatch] = record.step
