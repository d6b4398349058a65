"""The lines of ``steps.jsonl`` and ``events.jsonl``: fields, units, JSON. Layer: files.

A number that is not finite is ``null`` in JSON and ``nan`` when read back, since JSON has neither
``NaN`` nor infinity. A reader ignores keys that it does not know: later versions may add some.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypeVar, cast, get_type_hints

from recover.core.data import Ids
from recover.core.policies import RestoreMode
from recover.core.workload import Role


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step."""

    step: int
    """Number of the step, from 0."""
    loss: float
    """Mean loss per microbatch: the sum over all contributions divided by the divisor."""
    microbatches: int
    """Microbatches that the gradient was summed over; always B under the static policy."""
    contributions: Mapping[int, int]
    """Microbatches that each survivor contributed; 0 for a spare."""
    ids: Mapping[int, Ids]
    """Ids of the microbatches that each survivor contributed, unique over the run."""
    epoch: int
    """World epoch that all of them were reduced under: shrinks of the job so far."""
    survivors: tuple[int, ...]
    """Replicas that were alive when the step committed, ascending."""
    accumulation: int
    """G: microbatches of a major in this step, extra ones not counted."""
    roles: Mapping[int, str]
    """Role of each survivor when the step committed: the value of a ``Role``."""
    boundary: bool
    """Whether a failure in this step crossed the policy boundary: extra microbatches were run."""
    failed: tuple[int, ...]
    """Replicas that left in this step, ascending."""
    tokens: int
    """Tokens in the contributed microbatches."""
    wall_s: float
    """Seconds from the start of the step to its commit; all times are the writer's own."""
    sync_s: float
    """Seconds of it spent in snapshots, probes, reductions and agreements, repairs left out."""
    recovery_s: float
    """Seconds of it from the first sign of trouble to the commit; 0 in an undisturbed step."""
    time: float
    """When the step committed, in seconds since 1970 on the clock of the writer's host."""
    checksum: str | None = None
    """Digest of the parameters after the last step of a run, equal on all survivors."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One recovery: what the survivors of a failure did to finish the step."""

    step: int
    """Step that was disturbed and then committed."""
    location: str
    """Where the writer noticed: ``reduce`` or ``consensus``."""
    replicas: tuple[int, ...]
    """Replicas that left, ascending; empty where an error hit nobody."""
    ranks: tuple[int, ...]
    """World ranks that died, ascending; as a rule all of a replica, whose ranks die together."""
    boundary: bool
    """Whether spares did not cover the loss, so that extra microbatches were run."""
    promoted: tuple[int, ...]
    """Spares whose finished microbatches were admitted, ascending."""
    extra: Mapping[int, int]
    """Extra microbatches that each survivor was given."""
    restored_buckets: tuple[int, ...]
    """Buckets that the writer brought back to their snapshots; survivors may differ."""
    mode: str
    """How the writer scheduled that: ``skip``, ``blocking`` or ``non_blocking``; may differ."""
    detect_s: float
    """Seconds inside the collective that reported the trouble, waiting for others included."""
    repair_s: float
    """Seconds spent on agreeing who is left and regrouping."""
    restore_s: float
    """Seconds spent restoring buckets, as far as no extra microbatch hid them."""
    extra_s: float
    """Seconds spent in extra microbatches."""
    total_s: float
    """Seconds from entering the collective that reported the trouble to the commit."""
    epoch: int
    """World epoch that the recovery led to; no two recoveries of a run have the same."""
    time: float
    """When the step committed, in seconds since 1970 on the clock of the writer's host."""


Record = TypeVar("Record", StepRecord, EventRecord)
_HINTS = {kind: get_type_hints(kind) for kind in (StepRecord, EventRecord)}


def to_json(record: StepRecord | EventRecord) -> str:
    """Return a record as one line of JSON, without the line's end."""
    values: dict[str, object] = {f.name: getattr(record, f.name) for f in fields(record)}
    if values.get("checksum", "") is None:
        del values["checksum"]
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return json.dumps(values, allow_nan=False)


def from_json(kind: type[Record], line: str | bytes) -> Record:
    """Read one line; raise ValueError where it is not a record of this kind."""
    try:
        loaded: object = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a record: nested too deeply") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"expected a JSON object, got {_shown(loaded)}")
    given = cast(dict[str, object], loaded)
    hints = _HINTS[kind]
    missing = [name for name in hints if name not in given and name != "checksum"]
    if missing:
        raise ValueError(f"the key {missing[0]!r} is missing")
    values = {name: _read(name, hints[name], given[name]) for name in hints if name in given}
    build = cast(Callable[..., Record], kind)
    return build(**values)


def _read(name: str, hint: object, value: object) -> object:
    try:
        return _NAMED[name](value) if name in _NAMED else _READERS[hint](value)
    except ValueError as error:
        raise ValueError(f"{name} must be {error}, got {_shown(value)}") from None


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a whole number from 0 on")
    return value


def _real(value: object) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("a number or null")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _one_of(names: type[StrEnum]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in list(names):
            raise ValueError(f"one of {', '.join(names)}")
        return names(value)

    return read


def _integers(value: object) -> Ids:
    if not isinstance(value, list):
        raise ValueError("a list of whole numbers")
    return tuple(_integer(item) for item in cast(list[object], value))


_Value = TypeVar("_Value")


def _per_replica(read: Callable[[object], _Value]) -> Callable[[object], dict[int, _Value]]:
    def read_all(value: object) -> dict[int, _Value]:
        if not isinstance(value, dict):
            raise ValueError("an object with replicas as keys")
        pairs = cast(dict[str, object], value).items()
        if not all(key.isascii() and key.isdigit() for key, _ in pairs):
            raise ValueError("an object with replicas as keys")
        return {int(key): read(item) for key, item in pairs}

    return read_all


_READERS: Mapping[object, Callable[[object], object]] = {
    int: _integer,
    float: _real,
    bool: _flag,
    str: _text,
    str | None: _text,
    tuple[int, ...]: _integers,
    Mapping[int, int]: _per_replica(_integer),
    Mapping[int, Ids]: _per_replica(_integers),
}

_NAMED: Mapping[str, Callable[[object], object]] = {
    "roles": _per_replica(_one_of(Role)),
    "mode": _one_of(RestoreMode),
}


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
