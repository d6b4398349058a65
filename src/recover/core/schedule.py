"""Failures to inject: which rank dies in which step, and where in it. Layer: core. Paper: A.2.

A schedule is data, equal on all ranks. Whoever performs a step asks :meth:`FaultSchedule.at` at
each place where a rank may be told to die; the answer is this rank's own death or nothing.

A document is ``{"faults": [entry, ...]}`` with one mapping per death::

    {step: 3, replica: 1, rank: 0, location: reduce, bucket: 1}

``step`` counts from 0. ``rank`` is the shard inside the replica, 0 where it is left out. ``bucket``
goes with ``reduce`` only, ``microbatch`` (which one of those that the replica runs in this step,
from 0) with ``microbatch`` only; without them the first occurrence is meant. Several entries may
share a step. Ranks of one replica may die together in a step; nobody dies twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite
from typing import cast

from recover.core.mesh import Mesh, Place


class Location(StrEnum):
    """Where in a step a rank dies, in the order in which a step comes past them."""

    DATA = "data"
    """Before this step's microbatches are there."""
    MICROBATCH = "microbatch"
    """With a microbatch in hand, before its forward pass."""
    FORWARD = "forward"
    """When a forward pass of the model, or of a pipeline's stage, begins."""
    BACKWARD = "backward"
    """In a backward pass."""
    REDUCE = "reduce"
    """While other ranks are inside the reduction of a bucket."""
    CONSENSUS = "consensus"
    """Before this rank votes on the step's verdict."""
    REPAIR = "repair"
    """While the survivors of another failure regroup."""
    RESTORE = "restore"
    """While buckets are brought back to their snapshots."""
    EXTRA = "extra"
    """In a microbatch that makes up for another failure."""
    OPTIMIZER = "optimizer"
    """After a clean verdict, before the optimizer has stepped."""


AFTER_A_FAILURE = frozenset({Location.REPAIR, Location.RESTORE, Location.EXTRA})
"""Locations that a step comes past only where another failure hit it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One rank's death."""

    step: int
    replica: int
    rank: int
    """Shard inside the replica."""
    location: Location
    bucket: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.bucket is not None and self.location is not Location.REDUCE:
            raise ValueError(f"bucket goes with location reduce only, not {self.location}")
        if self.microbatch is not None and self.location is not Location.MICROBATCH:
            raise ValueError(f"microbatch goes with location microbatch only, not {self.location}")

    def __str__(self) -> str:
        return f"{{{', '.join(f'{key}: {value}' for key, value in entry(self).items())}}}"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """All deaths of a job, in the order of their steps."""

    faults: tuple[Fault, ...] = ()

    def at(
        self,
        step: int,
        place: Place,
        location: Location,
        *,
        bucket: int | None = None,
        microbatch: int | None = None,
    ) -> Fault | None:
        """Return the death of the rank at ``place`` that is due here, if any.

        An entry that names a bucket or a microbatch is due at that one, others at any: a rank that
        is still there to ask a second time was not killed the first time.
        """
        for fault in self.faults:
            here = (fault.step, fault.replica, fault.rank) == (step, place.replica, place.shard)
            if (
                here
                and fault.location is location
                and fault.bucket in (None, bucket)
                and fault.microbatch in (None, microbatch)
            ):
                return fault
        return None


def ordered(faults: Sequence[Fault]) -> FaultSchedule:
    """Return the schedule of these deaths, sorted by step, replica and rank."""
    return FaultSchedule(tuple(sorted(faults, key=lambda f: (f.step, f.replica, f.rank))))


# --- documents -----------------------------------------------------------------------------

KEYS = ("step", "replica", "rank", "location", "bucket", "microbatch")
EXAMPLE = "{step: 3, replica: 1, rank: 0, location: reduce}"


def entry(fault: Fault) -> dict[str, int | str]:
    """Return the mapping that a document has for ``fault``, made of plain values."""
    fields: dict[str, int | str | None] = {
        "step": fault.step,
        "replica": fault.replica,
        "rank": fault.rank,
        "location": fault.location.value,
        "bucket": fault.bucket,
        "microbatch": fault.microbatch,
    }
    return {key: value for key, value in fields.items() if value is not None}


def document(schedule: FaultSchedule) -> dict[str, list[dict[str, int | str]]]:
    """Return the document that :func:`parse` reads as ``schedule``."""
    return {"faults": [entry(fault) for fault in schedule.faults]}


def parse(document: object, mesh: Mesh) -> FaultSchedule:
    """Read a loaded document for a job of shape ``mesh``; the result is sorted.

    Raises one ValueError that lists everything that is wrong, one line per entry (numbered from 1).
    """
    entries, problems = _entries(document)
    faults: dict[int, Fault] = {}
    for number, fields in enumerate(entries, start=1):
        fault, wrong = _read(fields, mesh)
        if fault is not None:
            wrong = _dies_twice(fault, faults)
            faults[number] = fault
        if wrong:
            problems.append(f"entry {number}: {'; '.join(wrong)}")
    if problems:
        raise ValueError("\n".join(problems))
    return ordered(tuple(faults.values()))


def _entries(document: object) -> tuple[list[object], list[str]]:
    """Return the list under ``faults``, and what is wrong around it."""
    if not isinstance(document, Mapping):
        return [], [f"expected a mapping with the key 'faults', got {_shown(document)}"]
    top = cast(Mapping[object, object], document)
    problems = [_unknown_key(key, ("faults",)) for key in top if key != "faults"]
    if "faults" not in top:
        return [], [*problems, f"the key 'faults' is missing: a list of entries such as {EXAMPLE}"]
    entries = top["faults"]
    if not isinstance(entries, list):
        what = f"faults must be a list of entries such as {EXAMPLE}, got {_shown(entries)}"
        return [], [*problems, what]
    return cast(list[object], entries), problems


def _read(fields: object, mesh: Mesh) -> tuple[Fault | None, list[str]]:
    """Return the fault that an entry describes, or None and what is wrong with it."""
    if not isinstance(fields, Mapping):
        return None, [f"expected a mapping such as {EXAMPLE}, got {_shown(fields)}"]
    given = cast(Mapping[object, object], fields)
    problems = [_unknown_key(key, KEYS) for key in given if key not in KEYS]
    problems += [
        f"the key '{k}' is missing" for k in ("step", "replica", "location") if k not in given
    ]
    where = _location(given.get("location"))
    if "location" in given and where is None:
        problems.append(_unknown_location(given["location"]))
    problems += _numbers(given, mesh)
    problems += [
        f"{key} goes with location {owner} only, got {key} {_shown(given[key])} with {where}"
        for key, owner in (("bucket", Location.REDUCE), ("microbatch", Location.MICROBATCH))
        if key in given and where not in (None, owner)
    ]
    if problems or where is None:
        return None, problems
    numbers = {key: value for key, value in given.items() if isinstance(value, int)}
    return (
        Fault(
            step=numbers["step"],
            replica=numbers["replica"],
            rank=numbers.get("rank", 0),
            location=where,
            bucket=numbers.get("bucket"),
            microbatch=numbers.get("microbatch"),
        ),
        [],
    )


def _numbers(given: Mapping[object, object], mesh: Mesh) -> list[str]:
    """Return what is wrong with the values that must be numbers."""
    ends = {"replica": mesh.replicas, "rank": mesh.ranks_per_replica}
    problems = []
    for key in KEYS:
        value = given.get(key)
        if key == "location" or key not in given:
            continue
        end = ends.get(key)
        allowed = "0 or more" if end is None else f"0..{end - 1}" if end > 1 else "0"
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(f"{key} must be a whole number, {allowed}, got {_shown(value)}")
        elif value < 0 or (end is not None and value >= end):
            problems.append(f"{key} must be {allowed}, got {value}")
    return problems


def _dies_twice(fault: Fault, earlier: Mapping[int, Fault]) -> list[str]:
    for number, other in earlier.items():
        if fault == other:
            return [f"the same as entry {number}"]
        together = fault.step == other.step and fault.rank != other.rank
        if fault.replica == other.replica and not together:
            return [
                f"replica {fault.replica} dies twice: "
                f"entry {number} kills it in step {other.step} ({other.location})"
            ]
    return []


def _location(value: object) -> Location | None:
    return Location(value) if isinstance(value, str) and value in list(Location) else None


def _unknown_location(value: object) -> str:
    names = tuple(Location)
    return f"unknown location {_shown(value)}{_hint(value, names)}; allowed: {', '.join(names)}"


def _unknown_key(key: object, known: Sequence[str]) -> str:
    return f"unknown key {_shown(key)}{_hint(key, known)}; allowed: {', '.join(known)}"


def _hint(word: object, known: Sequence[str]) -> str:
    close = get_close_matches(str(word).lower(), known, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _shown(value: object) -> str:
    """Return a value as the user wrote it, shortened where it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- generation ----------------------------------------------------------------------------


def generate(
    mesh: Mesh, *, seed: int, count: int, steps: range, weights: Mapping[Location, float]
) -> FaultSchedule:
    """Draw ``count`` deaths of distinct replicas, spread over ``steps``; at least one survives.

    A pure function of its arguments, equal on all machines and in all versions: ``weights`` says
    how often each location is drawn, relative to the others.
    """
    if not 0 <= count < mesh.replicas:
        raise ValueError(
            f"count must be 0..{mesh.replicas - 1}, so that one of {mesh.replicas} replicas "
            f"survives, got {count}"
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be 0..2**64 - 1, got {seed}")
    if not steps or min(steps) < 0:
        raise ValueError(f"steps must be a range of at least one step from 0 on, got {steps}")
    _require_weights(weights)
    numbers = _splitmix64(seed)
    left = list(mesh.everyone())
    faults = []
    for _ in range(count):
        replica = left.pop(_below(len(left), numbers))
        step = steps[_below(len(steps), numbers)]
        rank = _below(mesh.ranks_per_replica, numbers)
        faults.append(Fault(step, replica, rank, _weighted(weights, numbers)))
    return ordered(faults)


def _require_weights(weights: Mapping[Location, float]) -> None:
    bad = {k: w for k, w in weights.items() if not (isfinite(w) and w >= 0)}
    if bad:
        shown = ", ".join(f"{location}={weight}" for location, weight in bad.items())
        raise ValueError(f"location weights must be finite and 0 or more, got {shown}")
    if not any(weights.values()):
        raise ValueError("at least one location needs a weight above 0")


def _splitmix64(seed: int) -> Iterator[int]:
    """Yield 64-bit numbers without end (Steele, Lea, Flood 2014: a counter and a mixing function).

    Spelled out here because the standard library's generator does not promise equal draws in all
    versions, and every rank must draw the same schedule.
    """
    mask = 2**64 - 1
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        yield mixed ^ (mixed >> 31)


def _below(end: int, numbers: Iterator[int]) -> int:
    """Draw from 0..end-1; the bias is below end / 2**64."""
    return (next(numbers) * end) >> 64


def _weighted(weights: Mapping[Location, float], numbers: Iterator[int]) -> Location:
    """Draw a location; they are looked at in the order of their definition."""
    choices = [(where, weights.get(where, 0.0)) for where in Location if weights.get(where)]
    target = (next(numbers) >> 11) * 2.0**-53 * sum(weight for _, weight in choices)
    for where, weight in choices:
        if target < weight:
            return where
        target -= weight
    return choices[-1][0]
