"""The referee: checks a run from outside, with the truth about who is dead. Layer: sim.

It shares no code with the core. What it checks, at each rank's every commit:

- every bucket holds exactly the microbatches that the facts name, each once, under one membership,
  which is that of the commit and has only complete replicas; B of them under the static policy;
- all ranks commit the same facts; no microbatch is committed twice in a run;
- what a survivor finished counts (spares aside); nothing finished is run again (discards aside);
- shares, extras, promotions, roles, G and the divisor are what the rulebook says;
- ``exact``: without a promotion the oldest ids are committed; what a promotion skips is bounded;
  ``stream``: each replica goes through its own stream in order;
- no replica is given up that was not struck, and nobody leaves without a reason; who is excluded
  commits nothing.
"""

from collections.abc import Collection, Hashable
from itertools import count, islice
from typing import Any

from recover.core.effects import Accumulate, Commit, Discard, Effect, Facts, Recovered, Recovery
from recover.core.mesh import Place
from recover.sim.gradients import Reduced, Symbol, Violation, named
from recover.sim.moves import Glitch, Move, Point
from recover.sim.observer import Observer
from recover.sim.ranks import Status, VirtualRank, freeze
from recover.sim.rulebook import Rulebook

Rank = VirtualRank[Any]


class _Book:
    """What the referee knows about one step."""

    def __init__(self, rules: Rulebook, replicas: tuple[int, ...]) -> None:
        self.planned = rules.layout(replicas)
        self.loads = dict(self.planned)
        self.extra = dict.fromkeys(self.planned, 0)
        self.promoted = False
        self.facts: Facts | None = None

    def key(self) -> Hashable:
        """Return what is known; G and the planned loads follow from the replicas."""
        facts = None if self.facts is None else freeze(self.facts)
        loads, extra = tuple(self.loads.items()), tuple(self.extra.items())
        return (tuple(self.planned), loads, extra, self.promoted, facts)


class Referee(Observer):
    """Raises Violation as soon as a rule is broken."""

    def __init__(self, rules: Rulebook, *, shards: int, exact: bool, symbol: Symbol) -> None:
        self._rules = rules
        self._shards = shards
        self._exact = exact
        self._symbol = symbol
        self._struck: frozenset[int] = frozenset()
        self._gone: frozenset[Place] = frozenset()
        self._committed: frozenset[int] = frozenset()
        self._books: dict[int, _Book] = {}
        self._recovery: tuple[object, ...] = ()
        self._ran: dict[Place, tuple[int, ...]] = {}

    def key(self) -> Hashable:
        """Return the referee's knowledge."""
        books = tuple([(step, book.key()) for step, book in self._books.items()])
        truth = (self._struck, self._gone, self._committed)
        return (truth, books, self._recovery, tuple(self._ran.items()))

    def struck(self, point: Point, move: Move) -> None:
        """Note the truth."""
        if not isinstance(move, Glitch):
            self._struck |= {move.place.replica}
            self._gone |= {move.place}

    def ended(self, rank: Rank, reason: str) -> None:
        """Nobody leaves without a reason."""
        left = rank.status is Status.LEFT
        _require(
            not left or rank.place.replica in self._struck, f"{rank.place} left a whole replica"
        )

    def local(self, rank: Rank, effect: Effect[Any]) -> None:
        """Follow what is run, dropped and planned."""
        match effect:
            case Accumulate(ids, extra):
                self._accumulated(rank, ids, extra=extra)
            case Discard():
                spare = not self._books[rank.step].planned[rank.place.replica][1]
                _require(spare, f"{rank.place} is no spare and discards what it has run")
                self._ran[rank.place] = ()
            case Recovered(recovery):
                self._recovered(rank.step, recovery)
            case Commit():
                _require(not rank.excluded, f"{rank.place} commits although it is excluded")

    def committed(self, rank: Rank, facts: Facts, buckets: tuple[Reduced, ...]) -> None:
        """Check a commit."""
        who = f"{rank.place} in step {facts.step}"
        admitted = {r: a.ids for r, a in facts.plan.items() if a.admitted}
        ids = [i for held in admitted.values() for i in held]
        self._check_buckets(who, facts, ids, buckets)
        members = rank.job.members
        whole = {
            r for r in rank.job.replicas if sum(p.replica == r for p in members) == self._shards
        }
        _require(
            whole == set(rank.job.replicas) == set(facts.survivors),
            f"{who}: commits for {facts.survivors}, the group is {_list(members)}",
        )
        _require(rank.job.epoch == facts.epoch, f"{who}: epoch {facts.epoch} of a past group")
        ran = self._ran.pop(rank.place, ())
        mine = facts.plan[rank.place.replica]
        _require(sorted(ran) == sorted(mine.ids), f"{who}: holds {mine.ids}, has run {ran}")
        self._check_facts(who, facts, ids)

    def close_run(self, finished: Collection[Place]) -> None:
        """Whoever nothing happened to has finished, whoever is gone has not."""
        wrong = set(finished) & self._gone
        _require(not wrong, f"{_list(wrong)} finished although the others lost them")
        whole = {r for r in range(self._rules.replicas) if r not in self._struck}
        lost = {Place(r, s) for r in whole for s in range(self._shards)} - set(finished)
        _require(bool(finished) and not lost, f"{_list(lost)} did not finish")

    # --- what is run ---------------------------------------------------------------------

    def _accumulated(self, rank: Rank, ids: tuple[int, ...], *, extra: bool) -> None:
        replica = rank.place.replica
        if rank.step not in self._books:
            self._books[rank.step] = _Book(self._rules, rank.job.replicas)
            self._books.pop(rank.step - 2, None)
        book = self._books[rank.step]
        expected = book.extra[replica] if extra else book.planned[replica][0]
        before = self._ran.get(rank.place, ()) if extra else ()
        _require(len(ids) == expected, f"{rank.place} runs {len(ids)} microbatches, not {expected}")
        again = set(ids) & set(before)
        _require(not again, f"{rank.place} runs {again} again")
        self._ran[rank.place] = before + ids

    # --- what is planned -----------------------------------------------------------------

    def _recovered(self, step: int, recovery: Recovery) -> None:
        book = self._books[step]
        agreed = (
            recovery.epoch,
            recovery.failed,
            recovery.failed_ranks,
            recovery.boundary,
            recovery.promoted,
            tuple(sorted(recovery.extra.items())),
        )
        if self._recovery[:1] == (recovery.epoch,):
            _require(agreed == self._recovery, f"recoveries differ: {agreed}, {self._recovery}")
            return
        self._recovery = agreed
        healthy = set(recovery.failed) - self._struck
        _require(not healthy, f"replicas {healthy} were given up, but nothing happened to them")
        places = {Place(*divmod(rank, self._shards)) for rank in recovery.failed_ranks}
        _require(places <= self._gone, f"ranks {_list(places - self._gone)} are not dead")
        left = {r: load for r, load in book.loads.items() if r not in recovery.failed}
        mended = self._rules.mend(left)
        spread = set(recovery.extra.values())
        _require(max(spread) - min(spread) <= 1, f"extras are uneven: {recovery.extra}")
        expected = (
            mended.promoted,
            tuple(sorted(mended.extra.items())),
            any(mended.extra.values()),
        )
        planned = (recovery.promoted, agreed[5], recovery.boundary)
        _require(planned == expected, f"planned {planned}, the policy says {expected}")
        book.loads, book.extra = mended.loads, mended.extra
        book.promoted |= bool(mended.promoted)

    # --- what is committed ---------------------------------------------------------------

    def _check_buckets(
        self, who: str, facts: Facts, ids: list[int], buckets: tuple[Reduced, ...]
    ) -> None:
        expected = sum(map(self._symbol, ids))
        for number, bucket in enumerate(buckets):
            _require(
                bucket.epoch == facts.epoch and bucket.replicas == facts.survivors,
                f"{who}: bucket {number} was reduced in epoch {bucket.epoch} over replicas "
                f"{bucket.replicas}, committed in epoch {facts.epoch} for {facts.survivors}",
            )
            if bucket.gradient != expected:
                short = expected.bit_length() < 4096
                holds = named(bucket.gradient) if short else str(bucket.gradient)
                raise Violation(f"{who}: bucket {number} holds {holds}; the facts say {ids}")

    def _check_facts(self, who: str, facts: Facts, ids: list[int]) -> None:
        book, rules = self._books[facts.step], self._rules
        if book.facts is not None:
            _require(facts == book.facts, f"{who}: facts differ between ranks")
            return
        book.facts = facts
        loads = {r: (len(a.ids), a.admitted) for r, a in facts.plan.items()}
        _require(loads == book.loads, f"{who}: shares {loads}, the policy says {book.loads}")
        roles = rules.roles(book.planned, book.loads, book.extra)
        _require(dict(facts.roles) == roles, f"{who}: roles {facts.roles}, should be {roles}")
        planned = rules.accumulation(len(book.planned))
        _require(facts.accumulation == planned, f"{who}: G is {facts.accumulation}, not {planned}")
        _require(facts.divisor == rules.divisor(len(ids)), f"{who}: divides by {facts.divisor}")
        if not rules.adaptive:
            _require(len(ids) == rules.microbatches, f"{who}: commits {len(ids)} microbatches")
        failed = tuple(r for r in sorted(book.planned) if r not in facts.survivors)
        _require(facts.failed == failed, f"{who}: failed {facts.failed}, should be {failed}")
        again = self._committed & set(ids)
        _require(len(set(ids)) == len(ids) and not again, f"{who}: commits {again or ids} twice")
        if self._exact:
            self._check_exact(who, book, set(ids))
        else:
            self._check_stream(who, set(ids))
        self._committed |= set(ids)

    def _check_exact(self, who: str, book: _Book, ids: set[int]) -> None:
        if self._rules.adaptive:  # what the dead held is committed later, as far as it goes
            return
        before, after = _holes(self._committed), _holes(self._committed | ids)
        if book.promoted:
            spare = sum(n for n, counts in book.planned.values() if not counts)
            bound = max(before, spare)
        else:
            fresh = (i for i in count() if i not in self._committed)
            oldest = sorted(islice(fresh, len(ids)))
            _require(
                sorted(ids) == oldest, f"{who}: commits {sorted(ids)}, not the oldest {oldest}"
            )
            bound = max(0, before - len(ids))
        _require(after <= bound, f"{who}: {after} ids are missing, at most {bound} may be")

    def _check_stream(self, who: str, ids: set[int]) -> None:
        stride = self._rules.replicas
        for replica in {i % stride for i in ids}:
            done = [i for i in self._committed | ids if i % stride == replica]
            _require(
                max(done) == (len(done) - 1) * stride + replica,
                f"{who}: replica {replica} left something of its stream out: {sorted(done)}",
            )


def _holes(done: Collection[int]) -> int:
    """Return how many ids are missing below the newest one."""
    return max(done, default=-1) + 1 - len(done)


def _require(held: bool, broken: str) -> None:
    if not held:
        raise Violation(broken)


def _list(places: Any) -> str:
    return " ".join(map(str, sorted(places)))
