"""The data ledger: which microbatch goes where, so that data is consumed exactly once. Layer: core.

A microbatch has an integer id, unique over the run. The ledger is part of the agreed state and a
plan is a pure function of it, so every rank knows every other rank's microbatches without asking.

``exact`` (data addressed by index): ids are handed out oldest first. An extra microbatch after a
failure is the very one that was lost, so the failing step commits the failure-free set.
``stream`` (endless streams, Appendix F): each replica draws from its own; a dead replica's stream
drops out. Draw k of replica r has the id k x W_init + r.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Protocol

from recover.core.workload import Adjustment, Layout, Share

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The microbatches that a replica holds in an iteration, and whether they count."""

    ids: Ids
    admitted: bool

    @property
    def share(self) -> Share:
        """The same, as a count."""
        return Share(len(self.ids), self.admitted)


Plan = Mapping[int, Assignment]


class DataLedger(Protocol):
    """What has been committed so far, and the rule that hands out the rest."""

    def assign(self, layout: Layout) -> dict[int, Assignment]:
        """Return each replica's microbatches for an undisturbed iteration."""

    def extend(self, plan: Plan, adjustment: Adjustment) -> dict[int, Ids]:
        """Return the ids of each survivor's extra microbatches."""

    def commit(self, plan: Plan) -> "DataLedger":
        """Return the ledger after an iteration that committed the admitted part of ``plan``."""


@dataclass(frozen=True, slots=True)
class ExactLedger:
    """Ids below ``cursor`` are committed, all but ``missing``; ids from ``cursor`` on are not."""

    cursor: int = 0
    missing: Ids = ()

    def uncommitted(self) -> Iterator[int]:
        """Yield the ids that are still to be committed, oldest first, without end."""
        return chain(self.missing, count(self.cursor))

    def assign(self, layout: Layout) -> dict[int, Assignment]:
        """Give the contributors the B oldest ids in order, then the spares the next ones."""
        fresh = self.uncommitted()
        plan = {}
        for admitted in (True, False):
            for replica, share in layout.shares.items():
                if share.admitted == admitted:
                    ids = tuple(islice(fresh, share.microbatches))
                    plan[replica] = Assignment(ids, admitted)
        return dict(sorted(plan.items()))

    def extend(self, plan: Plan, adjustment: Adjustment) -> dict[int, Ids]:
        """Hand out the oldest ids that no survivor holds: those that were lost."""
        held = {i for r in adjustment.shares if r not in adjustment.discarded for i in plan[r].ids}
        fresh = (i for i in self.uncommitted() if i not in held)
        return {r: tuple(islice(fresh, n)) for r, n in sorted(adjustment.extra.items())}

    def commit(self, plan: Plan) -> "ExactLedger":
        """Move the cursor past the newest committed id; what it skips stays known as missing."""
        done = {i for a in plan.values() if a.admitted for i in a.ids}
        cursor = max(self.cursor, max(done, default=-1) + 1)
        open_ids = chain(self.missing, range(self.cursor, cursor))
        return ExactLedger(cursor, tuple(i for i in open_ids if i not in done))


@dataclass(frozen=True, slots=True)
class StreamLedger:
    """How many microbatches of its own stream each living replica has committed."""

    replicas: int
    """W_init: replicas at the start of the job, the stride between ids of one stream."""
    position: Mapping[int, int]

    @classmethod
    def start(cls, replicas: int) -> "StreamLedger":
        """Return the ledger of a job that has committed nothing."""
        return cls(replicas, dict.fromkeys(range(replicas), 0))

    def draws(self, replica: int, skip: int, number: int) -> Ids:
        """Return ``number`` ids of a replica's stream, after ``skip`` uncommitted ones."""
        first = self.position[replica] + skip
        return tuple((first + k) * self.replicas + replica for k in range(number))

    def assign(self, layout: Layout) -> dict[int, Assignment]:
        """Give every replica the next microbatches of its own stream."""
        return {
            r: Assignment(self.draws(r, 0, share.microbatches), share.admitted)
            for r, share in layout.shares.items()
        }

    def extend(self, plan: Plan, adjustment: Adjustment) -> dict[int, Ids]:
        """Go on in each survivor's own stream; a spare that discards starts its draws again."""
        return {
            r: self.draws(r, 0 if r in adjustment.discarded else len(plan[r].ids), n)
            for r, n in sorted(adjustment.extra.items())
        }

    def commit(self, plan: Plan) -> "StreamLedger":
        """Advance the survivors' streams by what counted; the streams of the dead drop out."""
        return StreamLedger(
            self.replicas, {r: self.position[r] + a.share.contribution for r, a in plan.items()}
        )


def extended(plan: Plan, adjustment: Adjustment, extra: Mapping[int, Ids]) -> dict[int, Assignment]:
    """Return what each survivor holds once its extra microbatches have run."""
    return {
        r: Assignment((() if r in adjustment.discarded else plan[r].ids) + extra[r], share.admitted)
        for r, share in adjustment.shares.items()
    }
