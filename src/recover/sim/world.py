"""The virtual job: where ranks meet, and what each one gets to see. Layer: sim.

Ranks touch one another in collectives only, so it does not matter in which order they run in
between: a run is a sequence of meetings. The two columns of different shards have no collective in
common before the next one of the whole job, so their order does not matter either.

A meeting follows the performer contract of :mod:`recover.core.effects` at its worst:

- uniform outcomes are what the contract says: True iff every member arrived and voted True;
- a raw collective in which a member is missing fails everywhere; one in which a member died, or
  which the transport broke, fails where the adversary says; where it fails the buffer is undefined,
  and whoever sees it fail revokes its groups, so that later raw collectives in them fail too;
- a rank that dies inside a shrink is a member of the new group; after a shrink there is no column
  to meet in until an agreement has adopted those of a regroup;
- an excluded rank's collectives fail, and its shrink says so.

Members of a group that wait in different collectives, or for a rank that has finished, are
violations.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from recover.core.effects import (
    Accumulate,
    Agree,
    Census,
    Commit,
    Detect,
    Discard,
    Effect,
    Leave,
    NextBucket,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
)
from recover.core.guard import Member
from recover.core.mesh import Mesh, Place
from recover.sim.adversary import Adversary
from recover.sim.gradients import Memory, Violation, digits, total
from recover.sim.moves import Exclude, Glitch, Kill, Move, Point, When, name
from recover.sim.observer import Observer
from recover.sim.ranks import Group, Program, Status, VirtualRank
from recover.sim.strikes import Arsenal

T = TypeVar("T")

_COLLECTIVES = (Detect, Agree, Shrink, Reduce, Census, Regroup)
_RAW = (Reduce, Census, Regroup)
_IN_COLUMNS = (Detect, Reduce)
_VOTES = (Detect, Agree)
MakeMemory = Callable[[Place], Memory]


class World(Generic[T]):
    """A job of virtual ranks that all run ``program``."""

    def __init__(
        self,
        mesh: Mesh,
        program: Program[T],
        adversary: Adversary,
        *,
        memory: MakeMemory,
        observers: Sequence[Observer] = (),
        before_meeting: Callable[["World[T]"], None] | None = None,
        patience: int = 10_000,
        spoil: bool = False,
    ) -> None:
        self._mesh = mesh
        self._adversary = adversary
        self._arsenal = Arsenal(adversary.budget, mesh)
        self._observers = tuple(observers)
        self._before_meeting = before_meeting
        self._patience = patience
        self._spoil = spoil
        places = tuple(mesh.place(rank) for rank in range(mesh.world_size))
        job = Group(places, epoch=0)
        columns = _columns(places, epoch=0)
        self.ranks = {
            place: VirtualRank(
                Member(place, mesh), program, memory(place), job, columns[place.shard]
            )
            for place in places
        }

    def run(self) -> dict[Place, T]:
        """Run to the end; return what the ranks that finished returned.

        Raises Violation, or what the program raised, provided that it did so on every rank alike.
        """
        try:
            for rank in self.ranks.values():
                self._advance(rank, None)
            while waiting := [r for r in self.ranks.values() if r.waits is not None]:
                self._patience -= 1  # ends: every turn lets a rank run on
                if self._patience < 0:
                    raise Violation("no progress although the adversary has stopped")
                self._turn(waiting)
        finally:
            for rank in self.ranks.values():
                rank.close()
        return self._results()

    def key(self, known: dict[object, Hashable]) -> Hashable:
        """Return a value that is equal for worlds that behave equally from here on."""
        ranks = tuple(rank.key(known) for rank in self.ranks.values())
        return (self._arsenal.key(), ranks, tuple(o.key() for o in self._observers))

    # --- meetings ------------------------------------------------------------------------

    def _turn(self, waiting: list[VirtualRank[T]]) -> None:
        """Let one group meet."""
        meetings: dict[Group, list[VirtualRank[T]]] = {}
        for rank in waiting:
            group = rank.cross if isinstance(rank.waits, _IN_COLUMNS) else rank.job
            if rank.excluded or (group.revoked and isinstance(rank.waits, _RAW)):
                self._refuse(rank)
                return
            meetings.setdefault(group, []).append(rank)
        for group, ranks in meetings.items():
            expected = sum(self.ranks[place].live for place in group.members)
            if len(ranks) == expected:
                self._meet(group, ranks)
                return
        raise Violation(self._stuck(waiting))

    def _meet(self, group: Group, ranks: list[VirtualRank[T]]) -> None:
        effects = [rank.waits for rank in ranks]
        if len({_alike(effect) for effect in effects}) > 1:
            raise Violation(self._stuck(ranks))
        if self._before_meeting is not None:
            self._before_meeting(self)
        point = self._point(ranks[0], effects[0])
        whole = len(ranks) == len(group.members) and not any(map(_votes_no, effects))
        moves = self._strike(point, ranks, doomed=not whole)
        missing = {m.place for m in moves if not isinstance(m, Glitch) and m.when is When.BEFORE}
        late = [m for m in moves if not isinstance(m, Glitch) and m.when is When.DURING]
        for move in moves:
            if not isinstance(move, Glitch) and move.when is When.BEFORE:
                self._apply(move)
        arrived = [rank for rank in ranks if rank.place not in missing]
        if not arrived:
            return
        whole = len(arrived) == len(group.members)
        gone = {m.place for m in late if isinstance(m, Kill)}
        seeing = [rank for rank in arrived if rank.place not in gone]
        failed = self._failed(point, group, seeing, whole=whole, moves=moves)
        outcomes = self._outcomes(group, arrived, whole=whole, failed=failed)
        for move in late:
            self._apply(move)
        for observer in self._observers:
            observer.met(point, arrived, {r.place: outcomes[r.place] for r in seeing})
        for rank in seeing:
            self._advance(rank, outcomes[rank.place])

    def _failed(
        self,
        point: Point,
        group: Group,
        seeing: list[VirtualRank[T]],
        *,
        whole: bool,
        moves: Sequence[Move],
    ) -> frozenset[Place]:
        """Return who sees a raw collective fail, and revoke its groups."""
        if not seeing or not isinstance(seeing[0].waits, _RAW):
            return frozenset()
        places = [rank.place for rank in seeing]
        failed: frozenset[Place] = frozenset()
        if not whole:
            failed = frozenset(places)
        elif moves:
            dead = not any(isinstance(move, Glitch | Exclude) for move in moves)
            failed = self._adversary.unlucky(point, places, but_all=dead)
        if failed:
            group.revoked = True
            for rank in seeing:
                rank.job.revoked = rank.job.revoked or rank.place in failed
        return failed

    def _outcomes(
        self,
        group: Group,
        arrived: list[VirtualRank[T]],
        *,
        whole: bool,
        failed: frozenset[Place],
    ) -> dict[Place, object]:
        effect = arrived[0].waits
        places = [rank.place for rank in arrived]
        if isinstance(effect, _VOTES):
            verdict = whole and not any(_votes_no(rank.waits) for rank in arrived)
            if isinstance(effect, Agree):
                self._adopt(arrived, verdict)
            return dict.fromkeys(places, verdict)
        if isinstance(effect, Shrink):
            job = Group(tuple(places), group.epoch + 1)
            for rank in arrived:
                rank.job, rank.cross, rank.pending = job, Group((), job.epoch), None
                if self._spoil:
                    rank.memory.spoil()
            return dict.fromkeys(places, job.epoch)
        if isinstance(effect, Reduce):
            return self._reduced(group, arrived, failed)
        if isinstance(effect, Regroup):
            self._regrouped(group, arrived, effect.survivors, failed)
            return {place: place not in failed for place in places}
        census = {r.place: r.waits.statement for r in arrived if isinstance(r.waits, Census)}
        return {place: None if place in failed else census for place in places}

    def _reduced(
        self, group: Group, arrived: list[VirtualRank[T]], failed: frozenset[Place]
    ) -> dict[Place, object]:
        asked = [(r, r.waits) for r in arrived if isinstance(r.waits, Reduce)]
        amount = total(r.memory.part(e.bucket, muted=e.muted) for r, e in asked)
        for rank, effect in asked:
            result = None if rank.place in failed else amount
            rank.memory.receive(effect.bucket, result, group.epoch, group.replicas)
        return {rank.place: rank.place not in failed for rank in arrived}

    def _regrouped(
        self,
        group: Group,
        arrived: list[VirtualRank[T]],
        survivors: tuple[int, ...],
        failed: frozenset[Place],
    ) -> None:
        members = tuple(place for place in group.members if place.replica in survivors)
        job, columns = Group(members, group.epoch), _columns(members, group.epoch)
        for rank in arrived:
            rank.pending = None
            if rank.place in members and rank.place not in failed:
                rank.pending = (job, columns[rank.place.shard])

    def _adopt(self, arrived: list[VirtualRank[T]], verdict: bool) -> None:
        for rank in arrived:
            if verdict and rank.pending is not None:
                rank.job, rank.cross = rank.pending
            rank.pending = None

    def _refuse(self, rank: VirtualRank[T]) -> None:
        """Fail the collective of a rank that nobody waits for, or whose group is revoked."""
        effect = rank.waits
        assert effect is not None
        for observer in self._observers:
            observer.refused(rank, effect)
        rank.job.revoked = rank.job.revoked or not rank.excluded
        if isinstance(effect, Reduce):
            rank.memory.receive(effect.bucket, None, rank.cross.epoch, rank.cross.replicas)
        self._advance(rank, None if isinstance(effect, Shrink | Census) else False)

    # --- strikes -------------------------------------------------------------------------

    def _strike(self, point: Point, ranks: list[VirtualRank[T]], *, doomed: bool) -> list[Move]:
        """Ask the adversary for its moves here, in their order, until it declines."""
        taken: list[Move] = []
        places, effect = [rank.place for rank in ranks], ranks[0].waits
        doomed = doomed and not isinstance(effect, Shrink)
        moves = self._arsenal.at_meeting(places, raw=isinstance(effect, _RAW), doomed=doomed)
        while moves and (move := self._adversary.strike(point, moves)) is not None:
            taken.append(move)
            self._arsenal.spend(move)
            for observer in self._observers:
                observer.struck(point, move)
            moves = self._arsenal.more(moves, move)
        return taken

    def _strike_locally(self, rank: VirtualRank[T], effect: Effect[Any]) -> Move | None:
        if rank.excluded or not (moves := self._arsenal.in_local(rank.place, effect)):
            return None
        point = self._point(rank, effect)
        move = self._adversary.strike(point, moves)
        if move is not None:
            self._arsenal.spend(move)
            for observer in self._observers:
                observer.struck(point, move)
        return move

    def _apply(self, move: Kill | Exclude) -> None:
        rank = self.ranks[move.place]
        if isinstance(move, Kill):
            rank.end(Status.DEAD)
        else:
            rank.exclude()

    def _point(self, rank: VirtualRank[T], effect: Effect[Any] | None) -> Point:
        assert effect is not None
        return Point(rank.step, rank.job.epoch, name(effect, rank.after))

    # --- local effects -------------------------------------------------------------------

    def _advance(self, rank: VirtualRank[T], outcome: object) -> None:
        """Run a rank up to its next collective or its end."""
        while True:  # ends: a program that never meets the others again exhausts nobody's patience
            effect = rank.resume(outcome)
            if effect is None or isinstance(effect, Leave):
                if effect is not None:
                    rank.end(Status.LEFT)
                for observer in self._observers:
                    observer.ended(rank, effect.reason if effect is not None else "")
                return
            if isinstance(effect, _COLLECTIVES):
                rank.waits = effect
                return
            move = self._strike_locally(rank, effect)
            if isinstance(move, Kill) and move.when is When.BEFORE:
                self._apply(move)
                return
            outcome = self._perform(rank, effect)
            if isinstance(move, Kill):
                self._apply(move)
                return

    def _perform(self, rank: VirtualRank[T], effect: Effect[Any]) -> object:
        for observer in self._observers:
            observer.local(rank, effect)
        match effect:
            case Accumulate(ids, extra):
                rank.memory.accumulate(ids, afresh=not extra)
            case NextBucket():
                return rank.memory.next_bucket()
            case Snapshot(bucket):
                rank.memory.snapshot(bucket)
            case Restore(buckets, mode):
                rank.memory.restore(buckets, mode)
            case Discard():
                rank.memory.discard()
            case Commit(facts):
                for observer in self._observers:
                    observer.committed(rank, facts, rank.memory.read())
                rank.step = facts.step + 1
        return None

    # --- the end -------------------------------------------------------------------------

    def _stuck(self, waiting: list[VirtualRank[T]]) -> str:
        where = ", ".join(f"{r.place} in {name(r.waits, r.after)}" for r in waiting if r.waits)
        done = [str(r.place) for r in self.ranks.values() if r.status is Status.FINISHED]
        kinds = {name(r.waits, r.after) for r in waiting if r.waits}
        problem = "mismatched collectives" if len(kinds) > 1 else "deadlock"
        return f"{problem}: {where}" + (f"; finished: {', '.join(done)}" if done else "")

    def _results(self) -> dict[Place, T]:
        errors = [r.error for r in self.ranks.values() if r.error is not None]
        finished = [r for r in self.ranks.values() if r.status is Status.FINISHED]
        if errors:
            if finished or len({(type(e), str(e)) for e in errors}) > 1:
                raise Violation(f"an error on some ranks only: {errors[0]!r}")
            raise errors[0]
        return {rank.place: rank.result[0] for rank in finished}


def _alike(effect: Effect[Any] | None) -> object:
    """Return what must be equal for ranks to meet."""
    match effect:
        case Detect(_, bucket) | Reduce(bucket, _):
            return (type(effect), bucket)
        case Regroup(survivors):
            return (type(effect), survivors)
    return type(effect)


def _votes_no(effect: Effect[Any] | None) -> bool:
    return isinstance(effect, _VOTES) and not effect.clean


def _columns(places: tuple[Place, ...], epoch: int) -> dict[int, Group]:
    """Return the cross-replica group of each shard."""
    shards = sorted({place.shard for place in places})
    return {s: Group(tuple(p for p in places if p.shard == s), epoch) for s in shards}


def run_program(
    mesh: Mesh,
    program: Program[T],
    adversary: Adversary,
    *,
    memory: MakeMemory = lambda place: Memory(2, digits, in_place=True),
    observers: Sequence[Observer] = (),
) -> dict[Place, T]:
    """Run ``program`` on every rank of ``mesh``; return what the survivors returned."""
    return World(mesh, program, adversary, memory=memory, observers=observers).run()
