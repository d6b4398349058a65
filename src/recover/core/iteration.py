"""Algorithm 1: an iteration commits exactly B microbatches under one membership. Layer: core.

:func:`iteration` is a straight line with one loop: accumulate, synchronise, and while the verdict
is not clean: repair, adjust, restore, run what is missing, synchronise again. The extension of a
policy boundary and the re-reduction after a promotion are the same path; they differ in whether
anybody runs an extra microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from recover.core.data import Assignment, DataLedger, Ids, extended
from recover.core.effects import (
    Accumulate,
    Agree,
    Commit,
    Discard,
    Facts,
    Recovered,
    Recovery,
    Restore,
)
from recover.core.guard import Member, Membership, repair, roll_call, synchronise
from recover.core.ledger import BucketLedger
from recover.core.policies import Policy, RestoreChoice
from recover.core.workload import Adjustment, Role, Share, roles_after


@dataclass(frozen=True, slots=True)
class JobState:
    """What all survivors know alike between two iterations."""

    survivors: tuple[int, ...]
    data: DataLedger
    step: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What is fixed for a job and equal on all ranks."""

    policy: Policy
    restore: RestoreChoice = RestoreChoice.AUTO


@dataclass(frozen=True, slots=True)
class _Progress:
    """Where a disturbed iteration stands; agreed."""

    membership_epoch: int
    plan: dict[int, Assignment]
    roles: Mapping[int, Role]
    boundary: bool


async def iteration(member: Member, rules: Rules, state: JobState) -> JobState:
    """Run one iteration on this rank; return the state that the next one starts from."""
    replica = member.place.replica
    layout = rules.policy.advance(state.survivors)
    now = _Progress(
        state.epoch,
        state.data.assign(layout),
        {r: layout.role(r) for r in layout.shares},
        boundary=False,
    )
    ledger = BucketLedger()
    await Accumulate(now.plan[replica].ids, extra=False)
    while not await synchronise(
        ledger, epoch=now.membership_epoch, muted=not now.plan[replica].admitted
    ):
        membership = await repair(member, now.plan[replica].share, tuple(now.plan))
        held = {r: now.plan[r].share for r in membership.survivors}
        assert held == membership.shares, f"census {membership.shares} is not the plan {held}"
        adjustment = rules.policy.adjust(membership.shares)
        extra = state.data.extend(now.plan, adjustment)
        await _recover(member, rules, ledger, membership, adjustment, extra, tuple(now.plan))
        now = _Progress(
            membership.epoch,
            extended(now.plan, adjustment, extra),
            roles_after(layout, adjustment),
            now.boundary or adjustment.boundary,
        )
    contributions = sum(a.share.contribution for a in now.plan.values())
    facts = Facts(
        step=state.step,
        epoch=now.membership_epoch,
        survivors=tuple(now.plan),
        failed=tuple(r for r in state.survivors if r not in now.plan),
        plan=now.plan,
        roles=now.roles,
        accumulation=layout.accumulation,
        boundary=now.boundary,
        divisor=rules.policy.divisor(contributions),
    )
    await Commit(facts)
    return JobState(facts.survivors, state.data.commit(now.plan), state.step + 1, facts.epoch)


async def _recover(
    member: Member,
    rules: Rules,
    ledger: BucketLedger,
    membership: Membership,
    adjustment: Adjustment,
    extra: Mapping[int, Ids],
    before: tuple[int, ...],
) -> None:
    """Rewind this rank's buckets and run its extra microbatches (Algorithms 4 and 5)."""
    replica = member.place.replica
    mine = extra[replica]
    stale = () if replica in adjustment.discarded else ledger.stale(membership.epoch)
    mode = rules.restore.mode(stale=bool(stale), extra=bool(mine))
    await Recovered(
        Recovery(
            epoch=membership.epoch,
            failed=tuple(r for r in before if r not in membership.shares),
            failed_ranks=membership.dead_ranks,
            boundary=adjustment.boundary,
            promoted=adjustment.promoted,
            extra=adjustment.extra,
            restored=stale,
            mode=mode,
        )
    )
    if replica in adjustment.discarded:
        await Discard()
    else:
        await Restore(stale, mode)
    ledger.forget()
    if mine:
        await Accumulate(mine, extra=True)


async def start(member: Member, state: JobState) -> JobState:
    """Agree on who is there, compare fingerprints, and copy the lowest replica's buckets to all.

    The copy is a guarded reduction in which only the lowest survivor is not muted: adding nothing
    to a value leaves it as it is, so no further primitive is needed and a death at any point is
    handled by the same repair. Raises UnequalReplicas, on every rank alike.
    """
    await roll_call(member, _NOTHING)
    ledger = BucketLedger()
    while not await synchronise(
        ledger, epoch=state.epoch, muted=member.place.replica != min(state.survivors)
    ):
        state = await _shrunk(member, state)
        stale = ledger.stale(state.epoch)
        await Restore(stale, RestoreChoice.BLOCKING.mode(stale=bool(stale), extra=False))
        ledger.forget()
    return state


async def finish(member: Member, state: JobState) -> JobState:
    """Agree that everybody is done; whoever died after the last commit is left behind.

    Compares fingerprints, as :func:`start` does. Raises UnequalReplicas, on every rank alike.
    """
    await roll_call(member, _NOTHING)
    while not await Agree(True):
        state = await _shrunk(member, state)
    return state


async def _shrunk(member: Member, state: JobState) -> JobState:
    membership = await repair(member, _NOTHING, state.survivors)
    return JobState(membership.survivors, state.data, state.step, membership.epoch)


_NOTHING = Share(0, admitted=False)
