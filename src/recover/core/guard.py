"""Guarded synchronisation and repair: the bottom layer. Layer: core. Paper: 4.1, D.1, D.2.

Detect anywhere, act in one place: a reduction may succeed on one rank and fail on another, so its
outcome is never acted on. It only decides how the rank votes; the one verdict of the whole job, the
agreement at the end of :func:`synchronise`, decides whether everybody commits or everybody repairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recover.core.effects import (
    Agree,
    Census,
    Detect,
    Leave,
    NextBucket,
    Reduce,
    Regroup,
    Shrink,
    Snapshot,
    Statement,
)
from recover.core.ledger import BucketLedger
from recover.core.mesh import Mesh, Place
from recover.core.workload import Share
from recover.errors import RecoverError


@dataclass(frozen=True, slots=True)
class Member:
    """Who this rank is."""

    place: Place
    mesh: Mesh
    fingerprint: int = 0
    """Digest of what must be equal on all replicas: bucket layout, B, policy."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Who the job consists of, since when, and what they hold; agreed."""

    epoch: int
    shares: Mapping[int, Share]
    """Share of each surviving replica, in ascending order."""
    dead_ranks: tuple[int, ...]
    """World ranks that died since the last membership; as a rule all of a replica."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The replicas that are left."""
        return tuple(self.shares)


class UnequalReplicas(RecoverError):
    """Replicas of the same shard disagree about what must be equal everywhere.

    Raised on every rank alike, since it is computed from an agreed census.
    """


async def synchronise(ledger: BucketLedger, *, epoch: int, muted: bool) -> bool:
    """Reduce every bucket under one membership; return the agreed verdict.

    The group is probed once, before the first bucket, so that a death that has come to light by
    then costs nobody a reduction; every bucket is snapshotted and reduced (Algorithm 2). What this
    rank's own reduction did only decides how it votes: after a failure it reduces nothing more,
    since all of it would be rolled back, and goes to the closing agreement; others follow when
    their own next reduction fails, because the group was revoked, or when they are through.

    A probe before every bucket would be one more agreement per bucket and change no verdict: what
    a probe can see, the reduction or the agreement after it sees too. But no probe may follow the
    first reduction, or a rank that has left could meet it with its closing agreement.

    The closing agreement is the consensus (Algorithm 3) and the replica-consistency gate (Section
    4.4) in one: it runs over all ranks of all replicas.
    """
    clean, probed = True, False
    while clean and (bucket := await NextBucket()) is not None:  # ends: so many buckets there are
        ledger.tag(bucket, epoch)
        await Snapshot(bucket)
        clean = probed or await Detect(True, bucket)
        probed = True
        clean = clean and await Reduce(bucket, muted)
    return await Agree(clean)


async def repair(member: Member, share: Share, before: tuple[int, ...]) -> Membership:
    """Shrink the job to its complete replicas and agree on who they are and what they hold.

    Failure during a repair is not a special case: it goes round the same loop, which ends because
    every round that fails has lost a rank. ``before`` are the replicas that were alive before.
    """
    while True:
        epoch = await Shrink()
        if epoch is None:
            await Leave("excluded: the survivors went on without this rank")
            raise AssertionError("a performer returned from Leave")
        census = await Census(Statement(share, member.fingerprint))
        if not await Agree(census is not None):
            continue
        assert census is not None, "the agreement counted this rank's vote"
        survivors = member.mesh.complete_replicas(census)
        if not await Agree(await Regroup(survivors)):
            continue
        if member.place.replica not in survivors:
            await Leave(f"condemned: replica {member.place.replica} lost a rank")
        _require_equal(census)
        return _membership(member.mesh, epoch, census, survivors, before)


def _membership(
    mesh: Mesh,
    epoch: int,
    census: Mapping[Place, Statement],
    survivors: tuple[int, ...],
    before: tuple[int, ...],
) -> Membership:
    shards = range(mesh.ranks_per_replica)
    shares = {}
    for replica in survivors:
        (shares[replica],) = {census[Place(replica, shard)].share for shard in shards}
    dead = tuple(
        mesh.world_rank(Place(replica, shard))
        for replica in before
        for shard in shards
        if Place(replica, shard) not in census
    )
    return Membership(epoch, shares, dead)


def _require_equal(census: Mapping[Place, Statement]) -> None:
    by_shard: dict[int, dict[int, list[int]]] = {}
    for place, statement in sorted(census.items()):
        prints = by_shard.setdefault(place.shard, {})
        prints.setdefault(statement.fingerprint, []).append(place.replica)
    for shard, prints in by_shard.items():
        if len(prints) > 1:
            groups = " / ".join(str(replicas) for replicas in prints.values())
            raise UnequalReplicas(
                f"replicas hold different models or settings (shard {shard}): {groups}"
            )


async def roll_call(member: Member, share: Share) -> None:
    """Compare the fingerprints of all ranks without a failure; a death is left to the next verdict.

    Raises UnequalReplicas, on every rank alike.
    """
    census = await Census(Statement(share, member.fingerprint))
    if await Agree(census is not None):
        assert census is not None
        _require_equal(census)
