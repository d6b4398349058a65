"""The programs of the conformance suite, which every port runs.

A program awaits effects and returns a value; whether real processes or the simulator perform the
effects, each survivor must return the same. Sums are checked by the port, whenever a program
commits: microbatch k adds 16**k to each element of each bucket.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from recover.core.data import Assignment, ExactLedger
from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Commit,
    Detect,
    Facts,
    NextBucket,
    Reduce,
    Shrink,
    Snapshot,
    Statement,
)
from recover.core.guard import Member, Membership, repair
from recover.core.iteration import JobState, Rules, finish, iteration
from recover.core.mesh import Mesh, Place
from recover.core.policies import StaticWorldPolicy
from recover.core.workload import Share

Value = Any
Program = Callable[[Member], Coroutine[Any, Any, Value]]


async def vote(member: Member) -> Value:
    """Agreement is true only where everybody says so; a No does not break the group."""
    no = member.place.replica == 1
    return [await Agree(True), await Agree(not no), await Agree(True), await Agree(no)]


async def detect(member: Member) -> Value:
    """A No concerns one column only."""
    no = member.place == Place(1, 0)
    return [await Detect(not no, 0), await Detect(True, 1), await Agree(True)]


async def reduce(member: Member) -> Value:
    """Reduce every bucket; replica 2 is muted. The port checks the sums at the commit."""
    plan = {r: Assignment((r,), admitted=r != 2) for r in member.mesh.everyone()}
    mine = plan[member.place.replica]
    outcomes = await _reduce_all(mine)
    outcomes.append(await Agree(all(outcomes)))
    await Commit(_facts(plan))
    return outcomes


async def reduce_once(member: Member) -> Value:
    """A death around a reduction: whatever a rank saw, the verdict is one."""
    outcomes = await _reduce_all(Assignment((member.place.replica,), admitted=True))
    return await Agree(all(outcomes))


async def census(member: Member) -> Value:
    """Everybody's statement, at everybody."""
    place = member.place
    mine = Statement(Share(place.replica + 1, admitted=place.shard == 0), 2**62 + place.replica)
    gathered = await Census(mine)
    assert gathered is not None
    return [
        [str(p), s.share.microbatches, s.share.admitted, s.fingerprint - 2**62]
        for p, s in sorted(gathered.items())
    ]


async def shrink(member: Member) -> Value:
    """After a shrink the group is whole again and the epoch is the same everywhere."""
    verdict = await Agree(True)
    epoch = await Shrink()
    gathered = await Census(Statement(Share(0, admitted=False), 0))
    sane = await Agree(gathered is not None)
    return [verdict, epoch, sorted(str(p) for p in gathered or ()), sane]


async def mend(member: Member) -> Value:
    """Repair, after a verdict that says so."""
    verdict = await Agree(True)
    if verdict:
        return "nobody died"
    share = Share(member.place.replica, admitted=True)
    membership = await repair(member, share, member.mesh.everyone())
    return [_told(membership), await Detect(True, 0), await Agree(True)]


async def train(member: Member) -> Value:
    """Two iterations of B = 6, and the end."""
    rules = Rules(StaticWorldPolicy(6))
    state = JobState(member.mesh.everyone(), ExactLedger())
    for _ in range(2):
        state = await iteration(member, rules, state)
    state = await finish(member, state)
    assert isinstance(state.data, ExactLedger)
    return {
        "survivors": list(state.survivors),
        "step": state.step,
        "committed": state.data.cursor - len(state.data.missing),
    }


PROGRAMS: Mapping[str, Program] = {
    program.__name__: program
    for program in (vote, detect, reduce, reduce_once, census, shrink, mend, train)
}


async def _reduce_all(mine: Assignment) -> list[bool]:
    await Accumulate(mine.ids, extra=False)
    outcomes: list[bool] = []
    while (bucket := await NextBucket()) is not None:
        await Snapshot(bucket)
        if not await Detect(all(outcomes), bucket):
            return [*outcomes, False]
        outcomes.append(await Reduce(bucket, muted=not mine.admitted))
    return outcomes


def _facts(plan: dict[int, Assignment]) -> Facts:
    return Facts(
        step=0,
        epoch=0,
        survivors=tuple(plan),
        failed=(),
        plan=plan,
        roles={},
        accumulation=1,
        boundary=False,
        divisor=sum(a.share.contribution for a in plan.values()),
    )


def _told(membership: Membership) -> Value:
    shares = {str(r): s.microbatches for r, s in membership.shares.items()}
    return [shares, list(membership.dead_ranks)]


@dataclass(frozen=True, slots=True)
class Strike:
    """One rank is hit at its n-th effect of a kind (from 0)."""

    world_rank: int
    effect: str
    nth: int = 0
    when: str = "before"
    """``before``: it dies and does not arrive. ``during``: it dies inside, or right after.

    ``fault``: nobody dies, the collective works, but this rank's transport says that it did not.
    """

    def __str__(self) -> str:
        return f"rank {self.world_rank} {self.when} {self.effect} {self.nth}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A program, who dies in it, and what each survivor returns."""

    program: str
    mesh: Mesh
    expected: Callable[[Place], Value]
    strikes: tuple[Strike, ...] = ()
    dead: tuple[int, ...] = field(default=())
    """World ranks that return nothing: those struck, and condemned peers."""

    def __str__(self) -> str:
        size = f"{self.mesh.replicas}x{self.mesh.ranks_per_replica}"
        return " - ".join((self.program, size, *map(str, self.strikes)))

    @property
    def survivors(self) -> list[Place]:
        """Places that return a value."""
        ranks = set(range(self.mesh.world_size)) - set(self.dead)
        return [self.mesh.place(rank) for rank in sorted(ranks)]
