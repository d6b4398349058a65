"""Which rank must die so that the others can go on. Layer: launch, pure: no clock, no processes.

ULFM reports deaths. A rank that hangs is not dead, so the launcher makes it so. A false alarm kills
a healthy replica, hence the rules:

- **Stopped.** A rank that is stopped by a signal for ``stopped_s`` dies.
- **Silent.** A rank that shows no progress, outside a wait for the others, is suspected by two
  signals: it uses no processor time, and it keeps ranks waiting. Both: it dies after ``hang_s``.
  One of them (a long checkpoint keeps others waiting, but works; a stalled data source idles
  everybody, but nobody waits): after ``stall_s``. None (it computes, in nobody's way): never.
- **Deadlock.** Where all ranks wait for each other and nothing has happened for ``wait_s``, one
  dies: an idle one (who waits in MPI does not sleep), else the one that got stuck first. Its death
  releases the others, who get ``wait_s`` again. This is also the deadline of a repair: a rank that
  is stuck in a shrink is the one that is behind.

Time is what the launcher has seen pass, so a launcher that was itself suspended suspects nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from recover.launch import board
from recover.launch.spec import Timeouts

_IDLE_FRACTION = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """What the launcher sees of one living rank at one moment."""

    phase: str
    beats: int
    beat_at_s: float
    """When it showed the phase, on the clock of the ranks: only good for an order."""
    stopped: bool
    cpu_s: float


@dataclass(frozen=True, slots=True)
class History:
    """A rank's last sample, and since when it has been so."""

    sample: Sample
    progress_at_s: float
    """When it last got anywhere."""
    progress_cpu_s: float
    """Processor time that it had used then."""
    stopped_at_s: float | None
    """When it was first seen stopped, if it still is."""

    def silent_s(self, now_s: float) -> float:
        """Time without progress."""
        return now_s - self.progress_at_s

    def idle(self, now_s: float) -> bool:
        """Whether it has used next to no processor time since it last got anywhere."""
        used_s = self.sample.cpu_s - self.progress_cpu_s
        return used_s < _IDLE_FRACTION * self.silent_s(now_s)


def observe(history: History | None, sample: Sample, now_s: float) -> History:
    """Add a sample to what is known of a rank."""
    stopped_at_s = now_s if sample.stopped else None
    if history is None or sample.beats != history.sample.beats:
        return History(sample, now_s, sample.cpu_s, stopped_at_s)
    if sample.stopped and history.stopped_at_s is not None:
        stopped_at_s = history.stopped_at_s
    return replace(history, sample=sample, stopped_at_s=stopped_at_s)


def condemn(
    ranks: Mapping[int, History], now_s: float, timeouts: Timeouts, *, last_death_s: float
) -> dict[int, str]:
    """Return the ranks that must die, each with the reason.

    ``last_death_s`` is when a rank died last: until then the others could not get anywhere.
    """
    sentenced = {
        rank: f"stopped (SIGSTOP) for {timeouts.stopped_s:g} s"
        for rank, history in ranks.items()
        if history.stopped_at_s is not None and now_s - history.stopped_at_s >= timeouts.stopped_s
    }
    if sentenced:
        return sentenced  # their death changes what the others wait for
    if all(_waits(history) for history in ranks.values()):
        return _deadlock(ranks, now_s, timeouts, last_death_s)
    kept_waiting = sum(
        _waits(history, in_training=True) and history.silent_s(now_s) >= timeouts.hang_s
        for history in ranks.values()
    )
    reasons = {
        rank: _silence(history, now_s, kept_waiting, timeouts)
        for rank, history in ranks.items()
        if not _waits(history)
    }
    return {rank: reason for rank, reason in reasons.items() if reason is not None}


def _silence(history: History, now_s: float, kept_waiting: int, timeouts: Timeouts) -> str | None:
    idle = history.idle(now_s)
    signals = idle + (kept_waiting > 0)
    deadline_s = {2: timeouts.hang_s, 1: timeouts.stall_s, 0: float("inf")}[signals]
    if history.silent_s(now_s) < deadline_s:
        return None
    return (
        f"no progress for {deadline_s:g} s in phase {history.sample.phase!r}"
        f"{', idle' if idle else ''}{', while others waited' if kept_waiting else ''}"
    )


def _deadlock(
    ranks: Mapping[int, History], now_s: float, timeouts: Timeouts, last_death_s: float
) -> dict[int, str]:
    happened_s = max([last_death_s, *(history.progress_at_s for history in ranks.values())])
    if not ranks or now_s - happened_s < timeouts.wait_s:
        return {}

    def suspicion(rank: int) -> tuple[bool, float, int]:
        history = ranks[rank]
        return history.idle(now_s), -history.sample.beat_at_s, rank

    stuck = max(ranks, key=suspicion)
    phase = ranks[stuck].sample.phase
    return {stuck: f"stuck in phase {phase!r}: all ranks waited for {timeouts.wait_s:g} s"}


def _waits(history: History, *, in_training: bool = False) -> bool:
    """Whether a rank waits for the others. Who waits for the end is not kept from anything."""
    phase = history.sample.phase
    return phase.startswith(("collective", "repair")) or (not in_training and phase == board.FINISH)
