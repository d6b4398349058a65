"""What a report shows of a run, computed from its records alone. Layer: report.

A record never says when a replica was lost but in which step: it took part in the commits before
that step and in none from it on. Time goes the same way: a recovery's own time ends where the next
recovery of the same step begins, so that the times of all recoveries add up to what was lost.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from recover.records import EventRecord, RunRecord, StepRecord, check_run, read_run
from recover.report import words

PHASES = ("detect", "repair", "restore", "extra", "rest")
"""Parts of a recovery in the order in which they happen; the rest reduces again and agrees."""
DEAD = "dead"
"""Stands beside the roles of the records."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One recovery, with the time that was its own."""

    event: EventRecord
    lasted_s: float
    """Seconds from the first sign of trouble to the next one in the same step, or to the commit."""

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds of each of the phases; their sum is what the recovery lasted."""
        event = self.event
        known = (event.detect_s, event.repair_s, event.restore_s, event.extra_s)
        return dict(zip(PHASES, (*known, max(0.0, self.lasted_s - sum(known))), strict=True))

    @property
    def what(self) -> str:
        """Who was lost, in words."""
        lost = self.event.replicas
        if not lost:
            return "an error, nobody lost"
        return f"replica{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} lost"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive steps in which a replica did the same."""

    first: int
    last: int
    role: str
    """The value of a ``Role``, or DEAD."""
    contribution: int

    @property
    def steps(self) -> str:
        """The steps in words."""
        return words.steps(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps that the same number of replicas committed."""

    first: int
    last: int
    replicas: int
    per_s: float
    """All work of these steps over all their time, recoveries included."""


@dataclass(frozen=True, slots=True)
class RunView:
    """One run as the report shows it."""

    label: str
    run: RunRecord
    broken: tuple[str, ...]
    """Every way in which the records break the invariant."""

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The committed steps."""
        return self.run.steps

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of the job at its start, as far as the run says."""
        asked = self.run.config.get("replicas")
        seen = set(range(asked)) if isinstance(asked, int) else set()
        seen.update(*(step.survivors for step in self.steps[:1]), self.lost_in)
        return tuple(sorted(seen))

    @property
    def lost_in(self) -> Mapping[int, int]:
        """The step in which each replica was lost, for those whose loss is on record."""
        found = {replica: step.step for step in self.steps for replica in step.failed}
        found |= {replica: event.step for event in self.run.events for replica in event.replicas}
        return found

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All recoveries, in order."""
        following = (*self.run.events[1:], None)
        return tuple(
            Failure(
                event, event.total_s - (after.total_s if after and after.step == event.step else 0)
            )
            for event, after in zip(self.run.events, following, strict=False)
        )

    @property
    def wall_s(self) -> float:
        """Seconds spent in committed steps."""
        return sum(step.wall_s for step in self.steps)

    @property
    def lost_s(self) -> float:
        """Seconds from the first sign of trouble to the commit, over all steps."""
        return sum(step.recovery_s for step in self.steps)

    @property
    def unit(self) -> str:
        """In what work is counted: tokens, or microbatches in a run that does not tell tokens."""
        return "tokens" if self.steps and self.steps[0].tokens else "microbatches"

    def work(self, *steps: StepRecord) -> int:
        """Return how much of that some steps committed."""
        tokens = self.unit == "tokens"
        return sum(step.tokens if tokens else step.microbatches for step in steps)

    @property
    def stretches(self) -> Iterator[Stretch]:
        """The run, cut where the number of replicas changes."""
        for replicas, group in groupby(self.steps, key=lambda step: len(step.survivors)):
            part = list(group)
            rate = per_second(self.work(*part), sum(s.wall_s for s in part))
            yield Stretch(part[0].step, part[-1].step, replicas, rate)

    def spans(self, replica: int) -> Iterator[Span]:
        """What a replica did, and when; nothing for steps that are not on record."""

        def doing(step: StepRecord) -> tuple[str, int]:
            return step.roles.get(replica, DEAD), step.contributions.get(replica, 0)

        for (role, contribution), group in groupby(self.steps, key=doing):
            part = list(group)
            yield Span(part[0].step, part[-1].step, role, contribution)


def load(directories: Sequence[Path]) -> list[RunView]:
    """Read the runs; raises ValueError, with the place, for one that cannot be read."""
    names = [path.resolve().name for path in directories]
    labels = names if len(set(names)) == len(names) else [str(path) for path in directories]
    runs = [read_run(path) for path in directories]
    return [
        RunView(label, run, tuple(check_run(run))) for label, run in zip(labels, runs, strict=True)
    ]


def differences(views: Sequence[RunView]) -> list[dict[int, float]]:
    """Return each further run's losses minus the first one's, by step, where both are numbers."""
    first, *others = ({step.step: step.loss for step in view.steps} for view in views)
    apart = [
        {step: own - first[step] for step, own in run.items() if step in first} for run in others
    ]
    return [{step: gap for step, gap in run.items() if math.isfinite(gap)} for run in apart]


def thin(
    points: Sequence[tuple[int, float]], keep: Collection[int], limit: int
) -> list[tuple[int, float]]:
    """Return about ``limit`` points: of each group the lowest and the highest, in order.

    The first, the last, and all points of the steps in ``keep`` stay, as do numbers that are not
    finite: they are gaps.
    """
    if len(points) <= limit:
        return list(points)
    size = -(-2 * len(points) // limit)
    kept = {points[0], points[-1]}
    kept.update(point for point in points if point[0] in keep or not math.isfinite(point[1]))
    for begin in range(0, len(points), size):
        group = [p for p in points[begin : begin + size] if math.isfinite(p[1])]
        if group:
            kept |= {min(group, key=_value), max(group, key=_value)}
    return sorted(kept, key=lambda point: point[0])


def _value(point: tuple[int, float]) -> float:
    return point[1]


def per_second(amount: float, seconds: float) -> float:
    """Return a rate; nan where no time passed."""
    return amount / seconds if seconds > 0 else math.nan
