"""Where the time of a step and of its recoveries went. Layer: train.

Times are this rank's own, in seconds. A recovery's clock starts with the collective that reported
the trouble, waiting included, and stops when the step commits.
"""

import time
from dataclasses import dataclass, field

from recover.core.effects import (
    Agree,
    AnyEffect,
    Census,
    Detect,
    Discard,
    NextBucket,
    Recovered,
    Recovery,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
)

_SYNCHRONISE = (Snapshot, Detect, Reduce, Agree)
_REPAIR = (Shrink, Census, Regroup, Agree)


@dataclass(slots=True)
class RecoveryTimes:
    """One recovery, with this rank's times in seconds."""

    location: str
    """Where this rank noticed: ``reduce`` or ``consensus``."""
    started_at: float
    detect_s: float
    """Time inside the collective that reported the trouble."""
    repair_s: float = 0.0
    restore_s: float = 0.0
    extra_s: float = 0.0
    total_s: float = 0.0
    recovery: Recovery | None = None


@dataclass(slots=True)
class Stopwatch:
    """Measures one iteration."""

    sync_s: float = 0.0
    protocol_s: float = 0.0
    """The part of ``sync_s`` that moved no gradient: probes, votes and snapshots."""
    recoveries: list[RecoveryTimes] = field(default_factory=list)
    _begun_at: float = field(default_factory=time.perf_counter)
    _repairing: bool = False
    _extra_since: float | None = None

    def measure(self, effect: AnyEffect, outcome: object, started_at: float) -> None:
        """Account for an effect that has just been answered."""
        now = time.perf_counter()
        spent = now - started_at
        self._repairing = self._repairing or isinstance(effect, Shrink)
        if self._repairing and isinstance(effect, _REPAIR):
            self.recoveries[-1].repair_s += spent
        elif isinstance(effect, _SYNCHRONISE):
            self.sync_s += spent
            self.protocol_s += 0.0 if isinstance(effect, Reduce) else spent
            if outcome is False:
                self._trouble(effect, started_at, spent)
        elif isinstance(effect, Recovered):
            self._repairing = False
            self.recoveries[-1].recovery = effect.recovery
        elif isinstance(effect, Restore | Discard):
            self.recoveries[-1].restore_s += spent
        elif isinstance(effect, NextBucket) and self._extra_since is not None:
            self.recoveries[-1].extra_s += now - self._extra_since
            self._extra_since = None

    def extra_begins(self) -> None:
        """Note that this rank starts on extra microbatches; the next bucket ends them."""
        self._extra_since = time.perf_counter()

    def committed(self) -> float:
        """Stop all clocks; return the seconds since the step began."""
        now = time.perf_counter()
        for times in self.recoveries:
            times.total_s = now - times.started_at
        return now - self._begun_at

    @property
    def recovery_s(self) -> float:
        """Seconds from the first sign of trouble to the commit; 0 in an undisturbed step."""
        return self.recoveries[0].total_s if self.recoveries else 0.0

    def _trouble(self, effect: AnyEffect, started_at: float, spent: float) -> None:
        open_already = bool(self.recoveries) and self.recoveries[-1].recovery is None
        if not open_already:
            location = "consensus" if isinstance(effect, Agree) else "reduce"
            self.recoveries.append(RecoveryTimes(location, started_at, spent))
