"""Who decides what goes wrong. Layer: sim.

An adversary within its :class:`~recover.sim.moves.Budget` answers two questions: what to do at a
point, and which ranks see a disturbed collective fail. All but the scripted one answer from one
stream of numbers, the *picks*; pick 0 is always the quiet answer. The picks that are not 0, by
their position, are enough to replay a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Protocol

from recover.core.mesh import Place
from recover.sim.gradients import Violation
from recover.sim.moves import Budget, Move, Point

Pick = Callable[[int], int]
"""Given n, return a number in 0..n-1."""
_ANY = 1 << 30


class Adversary(Protocol):
    """The source of everything that is not determined."""

    @property
    def budget(self) -> Budget:
        """What it may do in one run."""

    def strike(self, point: Point, moves: Sequence[Move]) -> Move | None:
        """Choose one of the moves that are possible here; asked again until it declines."""

    def unlucky(self, point: Point, places: Sequence[Place], *, but_all: bool) -> frozenset[Place]:
        """Choose who sees a disturbed collective fail: somebody, with ``but_all`` not everybody."""


class Picking:
    """An adversary made of a stream of picks."""

    def __init__(self, pick: Pick, budget: Budget, *, every_subset_up_to: int = _ANY) -> None:
        self.budget = budget
        self._pick = pick
        self._every_subset_up_to = every_subset_up_to

    def strike(self, point: Point, moves: Sequence[Move]) -> Move | None:
        """Decline on 0, else take the move of that number."""
        number = self._pick(1 + len(moves))
        return moves[number - 1] if number else None

    def unlucky(self, point: Point, places: Sequence[Place], *, but_all: bool) -> frozenset[Place]:
        """Take any subset that is allowed; in larger groups one rank, all others, or all."""
        everybody = frozenset(places)
        if len(places) == 1:
            return everybody
        if len(places) <= self._every_subset_up_to:
            mask = 1 + self._pick(2 ** len(places) - 1 - but_all)
            return frozenset(place for i, place in enumerate(places) if mask >> i & 1)
        one = frozenset(places[:1])
        subsets = [one, everybody - one] + [everybody] * (not but_all)
        return subsets[self._pick(len(subsets))]


def quiet() -> Picking:
    """Return the adversary that does nothing."""
    return Picking(lambda _: 0, Budget())


def sparse(
    picks: Mapping[int, int], budget: Budget, *, every_subset_up_to: int | None = None
) -> Picking:
    """Return an adversary that is quiet but for a few picks, given by position."""
    position = count()
    subsets = _ANY if every_subset_up_to is None else every_subset_up_to
    return Picking(lambda n: picks.get(next(position), 0) % n, budget, every_subset_up_to=subsets)


class SeededPicks:
    """Random picks, mostly 0; ``taken`` notes the others."""

    def __init__(self, random: Random, rate: float) -> None:
        self._random = random
        self._rate = rate
        self._position = -1
        self.taken: dict[int, int] = {}

    def __call__(self, n: int) -> int:
        """Pick."""
        self._position += 1
        if n == 1 or self._random.random() >= self._rate:
            return 0
        self.taken[self._position] = number = self._random.randrange(1, n)
        return number


class EveryPick:
    """Every sequence of picks, in lexicographic order; one per :meth:`begin`."""

    def __init__(self) -> None:
        self._picks: list[int] = []
        self._bounds: list[int] = []
        self._position = 0
        self._begun = False

    @property
    def on_new_ground(self) -> bool:
        """Whether the run has left the path that it shares with the one before."""
        return self._position == len(self._picks)

    @property
    def taken(self) -> dict[int, int]:
        """The picks of this run that are not 0."""
        return {i: pick for i, pick in enumerate(self._picks[: self._position]) if pick}

    def begin(self) -> bool:
        """Go on to the next sequence; False after the last one."""
        if not self._begun:
            self._begun = True
            return True
        del self._picks[self._position :], self._bounds[self._position :]
        while self._picks and self._picks[-1] + 1 == self._bounds[-1]:
            self._picks.pop()
            self._bounds.pop()
        if not self._picks:
            return False
        self._picks[-1] += 1
        self._position = 0
        return True

    def __call__(self, n: int) -> int:
        """Pick."""
        if self.on_new_ground:
            self._picks.append(0)
            self._bounds.append(n)
        self._position += 1
        return self._picks[self._position - 1]


@dataclass(frozen=True, slots=True)
class Cue:
    """One line of a script: what happens, where, and who sees it fail."""

    step: int
    epoch: int | None
    """None: at the first opportunity of the step."""
    move: str
    point: str
    unlucky: frozenset[Place] | None
    """None: everybody."""

    def fits(self, point: Point) -> bool:
        """Whether ``point`` is where this cue is due."""
        return (point.step, point.name) == (self.step, self.point) and (
            self.epoch in (None, point.epoch)
        )


class Scripted:
    """Follows cues, each one once, at its first opportunity."""

    def __init__(self, cues: Sequence[Cue]) -> None:
        self.budget = Budget(1 << 30, 1 << 30, 1 << 30, every_point=True)
        self._open = list(cues)
        self._fails: frozenset[Place] | None = None

    def strike(self, point: Point, moves: Sequence[Move]) -> Move | None:
        """Take the move of the first cue that is due."""
        by_text = {str(move): move for move in moves}
        for cue in self._open:
            if cue.fits(point) and cue.move in by_text:
                self._open.remove(cue)
                self._fails = cue.unlucky
                return by_text[cue.move]
        return None

    def unlucky(self, point: Point, places: Sequence[Place], *, but_all: bool) -> frozenset[Place]:
        """Return whom the cue names."""
        fails = frozenset(places) if self._fails is None else self._fails & frozenset(places)
        return fails or frozenset(places)

    def require_done(self) -> None:
        """Raise unless every cue came up: a script that misses its moment tests nothing."""
        if self._open:
            cue = self._open[0]
            raise Violation(f"the script's '{cue.move} {cue.point}' in step {cue.step} never came")
