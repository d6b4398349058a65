"""Known-bad variants of the protocol. Each one must be caught by the simulator.

A mutant stands between the core's coroutine and the world and changes effects or their outcomes, or
it replaces a function of the core. ``change`` gets each effect and yields what the world is asked
instead; what it returns is what the protocol sees.
"""

import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from recover.core import iteration, policies, workload
from recover.core.data import ExactLedger
from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Detect,
    Discard,
    Effect,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
)
from recover.core.guard import Member
from recover.core.ledger import BucketLedger
from recover.core.mesh import Mesh
from recover.core.workload import Adjustment, Share, Shares
from recover.sim.job import Job, States, training
from recover.sim.ranks import Program

Asked = Effect[Any]
Change = Callable[[Asked], Generator[Asked, Any, Any]]


@types.coroutine
def _altered(inner: Coroutine[Any, Any, States], change: Change) -> Generator[Asked, Any, States]:
    outcome = None
    while True:  # ends with the inner coroutine
        try:
            effect = inner.send(outcome)
        except StopIteration as stop:
            result: States = stop.value
            return result
        outcome = yield from change(effect)


def mutated(make: Callable[[], Change]) -> Callable[[Job], Program[States]]:
    """Return a program of the job in which every rank's effects go through a change of its own."""

    def program_of(job: Job) -> Program[States]:
        async def program(member: Member) -> States:
            return await _altered(training(job)(member), make())

        return program

    return program_of


def stateless(change: Change) -> Callable[[Job], Program[States]]:
    return mutated(lambda: change)


# --- changed effects -----------------------------------------------------------------------


def no_restore(effect: Asked) -> Generator[Asked, Any, Any]:
    return None if isinstance(effect, Restore) else (yield effect)


def no_snapshot(effect: Asked) -> Generator[Asked, Any, Any]:
    return None if isinstance(effect, Snapshot) else (yield effect)


def spare_not_muted(effect: Asked) -> Generator[Asked, Any, Any]:
    return (yield replace(effect, muted=False) if isinstance(effect, Reduce) else effect)


def throw_everything_away(effect: Asked) -> Generator[Asked, Any, Any]:
    return (yield Discard() if isinstance(effect, Restore) else effect)


def epoch_not_bumped(effect: Asked) -> Generator[Asked, Any, Any]:
    outcome = yield effect
    return outcome and 0 if isinstance(effect, Shrink) else outcome


def excluded_goes_on(effect: Asked) -> Generator[Asked, Any, Any]:
    outcome = yield effect
    return 99 if isinstance(effect, Shrink) and outcome is None else outcome


def no_regroup(effect: Asked) -> Generator[Asked, Any, Any]:
    return True if isinstance(effect, Regroup) else (yield effect)


def restore_only_where_it_failed() -> Change:
    failed = set[int]()

    def change(effect: Asked) -> Generator[Asked, Any, Any]:
        if isinstance(effect, Restore):
            here = tuple(b for b in effect.buckets if b in failed)
            failed.clear()
            return (yield replace(effect, buckets=here)) if here else None
        outcome = yield effect
        if isinstance(effect, Reduce) and not outcome:
            failed.add(effect.bucket)
        return outcome

    return change


def restore_after_the_extra_work() -> Change:
    late = list[Restore]()

    def change(effect: Asked) -> Generator[Asked, Any, Any]:
        if isinstance(effect, Restore) and effect.buckets:
            late.append(replace(effect, mode=policies.RestoreMode.BLOCKING))
            return None
        if isinstance(effect, Accumulate):
            yield effect
            return (yield late.pop()) if late else None
        if late:  # no extra work on this rank
            yield late.pop()
        return (yield effect)

    return change


def _skips(after: tuple[type[Asked], ...], instead: Callable[[Agree], Asked | None]) -> Change:
    """Treat differently the agreements whose last collective is one of ``after``."""
    last: list[type[Asked]] = [Agree]

    def change(effect: Asked) -> Generator[Asked, Any, Any]:
        if isinstance(effect, Agree) and last[0] in after:
            other = instead(effect)
            last[0] = Agree
            return effect.clean if other is None else (yield other)
        if isinstance(effect, Detect | Reduce | Agree | Census | Regroup | Shrink):
            last[0] = type(effect)
        return (yield effect)

    return change


def act_on_the_raw_outcome() -> Change:
    return _skips((Detect, Reduce), lambda effect: None)


def trust_the_census() -> Change:
    return _skips((Census,), lambda effect: None)


def trust_the_regroup() -> Change:
    return _skips((Regroup,), lambda effect: None)


def vote_always_clean() -> Change:
    return _skips((Detect, Reduce), lambda effect: Agree(True))


def verdict_per_column() -> Change:
    return _skips((Detect, Reduce), lambda effect: Detect(effect.clean, -1))


def probe_before_every_bucket(effect: Asked) -> Generator[Asked, Any, Any]:
    """As the paper does; but a rank whose reduction failed is in the closing agreement by then."""
    if isinstance(effect, Reduce) and effect.bucket > 0 and not (yield Detect(True, effect.bucket)):
        return False
    return (yield effect)


# --- changed functions of the core ---------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def no_condemnation(patch: pytest.MonkeyPatch) -> None:
    def everybody(mesh: Mesh, places: Any) -> tuple[int, ...]:
        return tuple(sorted({place.replica for place in places}))

    patch.setattr(Mesh, "complete_replicas", everybody)


def double_admit(patch: pytest.MonkeyPatch) -> None:
    """Promote, and run extras for the same loss."""
    right = workload.adjust

    def adjust(census: Shares, microbatches: int) -> Adjustment:
        mended = right(census, microbatches)
        lost = microbatches - sum(s.contribution for s in census.values())
        if not mended.promoted or not lost:
            return mended
        extra = {r: int(i < lost) for i, r in enumerate(sorted(census))}
        shares = {r: Share(s.microbatches + extra[r], s.admitted) for r, s in mended.shares.items()}
        return Adjustment(shares, extra, mended.promoted, ())

    patch.setattr(policies, "adjust", adjust)
    patch.setattr(policies.StaticWorldPolicy, "divisor", lambda policy, _: policy.microbatches)


def promote_what_does_not_fit(patch: pytest.MonkeyPatch) -> None:
    """The paper's rule by role, read literally: any spare for any loss."""
    right = workload.adjust

    def adjust(census: Shares, microbatches: int) -> Adjustment:
        mended = right(census, microbatches)
        spares = [r for r, s in census.items() if not s.admitted]
        if not mended.boundary or not spares:
            return mended
        shares = {r: Share(s.microbatches, s.admitted or r in spares) for r, s in census.items()}
        return Adjustment(shares, dict.fromkeys(census, 0), tuple(spares), ())

    patch.setattr(policies, "adjust", adjust)
    patch.setattr(policies.StaticWorldPolicy, "divisor", lambda policy, _: policy.microbatches)


def extras_are_fresh_ids(patch: pytest.MonkeyPatch) -> None:
    def extend(ledger: ExactLedger, plan: Any, adjustment: Adjustment) -> dict[int, Any]:
        first = max(i for a in plan.values() for i in a.ids) + 1
        extra = {}
        for replica, number in sorted(adjustment.extra.items()):
            extra[replica] = tuple(range(first, first + number))
            first += number
        return extra

    patch.setattr(ExactLedger, "extend", extend)


def lost_ids_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def commit(ledger: ExactLedger, plan: Any) -> ExactLedger:
        return ExactLedger(max(i for a in plan.values() if a.admitted for i in a.ids) + 1)

    patch.setattr(ExactLedger, "commit", commit)


def shrinking_batch(patch: pytest.MonkeyPatch) -> None:
    """No extension: what was lost stays lost."""

    def adjust(census: Shares, microbatches: int) -> Adjustment:
        return Adjustment(dict(census), dict.fromkeys(census, 0), (), ())

    patch.setattr(policies, "adjust", adjust)
    patch.setattr(policies.StaticWorldPolicy, "divisor", lambda policy, _: policy.microbatches)


def divide_by_the_world(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        policies.StaticWorldPolicy, "divisor", lambda policy, contributions: contributions - 1
    )


def nothing_is_stale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketLedger, "stale", lambda ledger, epoch: ())


def tags_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketLedger, "forget", lambda ledger: None)


def roles_of_the_old_layout(patch: pytest.MonkeyPatch) -> None:
    def roles_after(layout: Any, adjustment: Adjustment) -> dict[int, Any]:
        return {r: layout.role(r) for r in adjustment.shares}

    patch.setattr(iteration, "roles_after", roles_after)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bad variant, a job in which it must be caught, and words of the verdict."""

    name: str
    job: str
    caught: str
    program: Callable[[Job], Program[States]] | None = None
    patch: Patch | None = None


_W3 = "replicas=3 microbatches=6 kills=1"
_W4 = "replicas=4 microbatches=8 buckets=1 kills=2 memory=spoiled"
_W5 = "replicas=5 microbatches=7 kills=1"
_GLITCH = "replicas=3 microbatches=6 glitches=1"
_GLITCHES = "replicas=3 microbatches=6 glitches=2"
_SHARDS = "replicas=3 shards=2 microbatches=6 buckets=1 kills=1"

MUTANTS = (
    Mutant("no_restore", _W3, "holds", stateless(no_restore)),
    Mutant("no_snapshot", _W3, "holds", stateless(no_snapshot)),
    Mutant("spare_not_muted", _W5, "holds", stateless(spare_not_muted)),
    Mutant("throw_everything_away", _W3, "discards", stateless(throw_everything_away)),
    Mutant("epoch_not_bumped", _W3, "recoveries differ|epoch|holds", stateless(epoch_not_bumped)),
    Mutant(
        "excluded_goes_on",
        "replicas=3 microbatches=6 excludes=1",
        "no progress",
        stateless(excluded_goes_on),
    ),
    Mutant("no_regroup", _W3, "deadlock", stateless(no_regroup)),
    Mutant("restore_only_where_it_failed", _W3, "holds", mutated(restore_only_where_it_failed)),
    Mutant("restore_after_the_extra_work", _W3, "holds", mutated(restore_after_the_extra_work)),
    Mutant("act_on_the_raw_outcome", _W3, "mismatched|holds", mutated(act_on_the_raw_outcome)),
    Mutant(
        "act_on_the_raw_outcome, no death", _GLITCH, "mismatched", mutated(act_on_the_raw_outcome)
    ),
    Mutant("trust_the_census", _W4, "mismatched", mutated(trust_the_census)),
    Mutant("trust_the_census, no death", _GLITCHES, "mismatched", mutated(trust_the_census)),
    Mutant("trust_the_regroup", _SHARDS, "mismatched", mutated(trust_the_regroup)),
    Mutant("vote_always_clean", _GLITCH, "holds undefined", mutated(vote_always_clean)),
    Mutant("verdict_per_column", _SHARDS, "mismatched", mutated(verdict_per_column)),
    Mutant("probe_before_every_bucket", _W3, "mismatched", stateless(probe_before_every_bucket)),
    Mutant(
        "probe_before_every_bucket, no death",
        _GLITCH,
        "mismatched",
        stateless(probe_before_every_bucket),
    ),
    Mutant("no_condemnation", _SHARDS, "KeyError", patch=no_condemnation),
    Mutant("double_admit", _W5, "the policy says", patch=double_admit),
    Mutant("promote_what_does_not_fit", _W5, "the policy says", patch=promote_what_does_not_fit),
    Mutant("extras_are_fresh_ids", _W3, "not the oldest", patch=extras_are_fresh_ids),
    Mutant("lost_ids_are_forgotten", f"{_W5} steps=2", "oldest", patch=lost_ids_are_forgotten),
    Mutant("shrinking_batch", _W3, "the policy says", patch=shrinking_batch),
    Mutant("divide_by_the_world", _W3, "divides by 5", patch=divide_by_the_world),
    Mutant("nothing_is_stale", _W3, "holds", patch=nothing_is_stale),
    Mutant("tags_are_kept", _W3, "is stale", patch=tags_are_kept),
    Mutant("roles_of_the_old_layout", f"{_W5} kills=2", "roles", patch=roles_of_the_old_layout),
)
