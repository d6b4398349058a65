"""What the protocol asks of the world. Layer: core.

A protocol coroutine awaits an effect and is sent its outcome; a *performer* drives it with
``coroutine.send``. No event loop is involved. The type parameter is the outcome's type.

Collective effects and their groups: ``Detect`` and ``Reduce`` run over the cross-replica group of
this rank's shard; ``Agree``, ``Shrink``, ``Census`` and ``Regroup`` run over all ranks of the job.

Contract of a performer
-----------------------
- ``Agree`` and ``Detect`` return True iff every member of the group arrived and voted True; the
  outcome is the same on every survivor of that group, and the group stays usable for both.
- ``Reduce``, ``Census`` and ``Regroup`` may succeed on some ranks and fail on others. Before a
  failure is reported the performer revokes the group, so that nobody is left inside. After a failed
  ``Reduce`` the bucket is undefined.
- ``Shrink`` returns the same new epoch everywhere. A rank that dies inside may still be a member;
  the next collective finds out. It returns None to a rank that the others have excluded.
- A performer that finds its own rank excluded or condemned never returns from ``Leave``.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from recover.core.data import Ids, Plan
from recover.core.mesh import Place
from recover.core.policies import RestoreMode
from recover.core.workload import Role, Share

T = TypeVar("T")


class Effect(Generic[T]):
    """A request; awaiting it yields it to the performer and returns the outcome."""

    __slots__ = ()

    def __await__(self) -> Generator["Effect[T]", T, T]:
        return (yield self)


# --- collective, uniform -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Detect(Effect[bool]):
    """Probe the cross-replica group before data moves in it (phase 1 of Algorithm 2)."""

    clean: bool
    bucket: int


@dataclass(frozen=True, slots=True)
class Agree(Effect[bool]):
    """Agree on one verdict over the whole job (Algorithm 3); every rank brings its vote."""

    clean: bool


@dataclass(frozen=True, slots=True)
class Shrink(Effect[int | None]):
    """Revoke the job's groups and form a group of the survivors; return the new epoch."""


# --- collective, not uniform ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank tells the others in a census."""

    share: Share
    fingerprint: int
    """Digest of what must be equal on all replicas, 0 <= fingerprint < 2**63."""


@dataclass(frozen=True, slots=True)
class Reduce(Effect[bool]):
    """Sum ``bucket`` over the cross-replica group; a muted rank adds nothing."""

    bucket: int
    muted: bool


@dataclass(frozen=True, slots=True)
class Census(Effect[Mapping[Place, Statement] | None]):
    """Gather every survivor's statement; None where the exchange failed."""

    statement: Statement


@dataclass(frozen=True, slots=True)
class Regroup(Effect[bool]):
    """Rebuild the job's groups from the replicas that are complete.

    Ranks of other replicas take part but are members of none of the new groups. The group that the
    following ``Agree`` runs over is the one from before.
    """

    survivors: tuple[int, ...]


# --- local ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accumulate(Effect[None]):
    """Hand these microbatches to the training loop, which adds their gradients to the buckets.

    May be answered before the last of them has run: ``NextBucket`` waits for its gradients.
    """

    ids: Ids
    extra: bool
    """Whether they make up for a failure in this iteration."""


@dataclass(frozen=True, slots=True)
class NextBucket(Effect[int | None]):
    """Return the next bucket whose gradient is complete, or None after the last one.

    Each synchronisation starts with the first bucket again.
    """


@dataclass(frozen=True, slots=True)
class Snapshot(Effect[None]):
    """Keep the pre-reduction state of a bucket."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Restore(Effect[None]):
    """Bring buckets back to their snapshots; how it is scheduled is up to ``mode``."""

    buckets: tuple[int, ...]
    mode: RestoreMode


@dataclass(frozen=True, slots=True)
class Discard(Effect[None]):
    """Drop the local gradient: a spare that is not admitted starts again from zero."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One pass of recovery, as agreed by the survivors."""

    epoch: int
    failed: tuple[int, ...]
    failed_ranks: tuple[int, ...]
    boundary: bool
    promoted: tuple[int, ...]
    extra: Mapping[int, int]
    restored: tuple[int, ...]
    """Buckets that this rank restored (local, all else is agreed)."""
    mode: RestoreMode


@dataclass(frozen=True, slots=True)
class Recovered(Effect[None]):
    """Tell the performer that a recovery was planned; nothing of it has run yet."""

    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Facts:
    """What an iteration committed, equal on all survivors."""

    step: int
    epoch: int
    survivors: tuple[int, ...]
    failed: tuple[int, ...]
    plan: Plan
    roles: Mapping[int, Role]
    accumulation: int
    boundary: bool
    divisor: int

    @property
    def contributions(self) -> dict[int, int]:
        """Microbatches that each survivor contributed."""
        return {r: a.share.contribution for r, a in self.plan.items()}


@dataclass(frozen=True, slots=True)
class Commit(Effect[None]):
    """Divide the reduced gradient and step the optimizer; the verdict was clean."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class Leave(Effect[None]):
    """This rank is no longer part of the job: write nothing, exit. Never returns."""

    reason: str


AnyEffect = (
    Detect
    | Agree
    | Shrink
    | Reduce
    | Census
    | Regroup
    | Accumulate
    | NextBucket
    | Snapshot
    | Restore
    | Discard
    | Recovered
    | Commit
    | Leave
)
"""Every effect there is."""
