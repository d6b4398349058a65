"""The virtual port: the simulator's world, told to strike where the scenario says."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from recover.core.drive import Driver
from recover.core.effects import Facts
from recover.core.guard import Member
from recover.core.mesh import Place
from recover.sim.gradients import Reduced
from recover.sim.moves import Budget, Glitch, Kill, Move, Point, When
from recover.sim.observer import Observer
from recover.sim.ranks import VirtualRank
from recover.sim.world import run_program
from tests.conformance.programs import PROGRAMS, Scenario, Strike, Value


def run(scenario: Scenario) -> dict[Place, Value]:
    """Return what each survivor returned."""
    striker = _Striker(scenario)

    async def program(member: Member) -> Value:
        driver = Driver(PROGRAMS[scenario.program](member))
        while (effect := driver.pending) is not None:  # ends when the program does
            striker.note(member.place, type(effect).__name__)
            driver.answer(await effect)
        return driver.result

    values = run_program(scenario.mesh, program, striker, observers=(_Sums(),))
    assert not striker.open, f"{scenario}: {striker.open} never came up"
    return values


class _Striker:
    """Strikes ranks at their n-th effect of a kind."""

    def __init__(self, scenario: Scenario) -> None:
        self.budget = Budget(1 << 30, 1 << 30, 1 << 30, every_point=True)
        self.open = {
            (scenario.mesh.place(s.world_rank), s.effect, s.nth): s for s in scenario.strikes
        }
        self._seen: dict[Place, Counter[str]] = {}
        self._asked: dict[Place, tuple[str, int]] = {}
        self._faulty: Place | None = None

    def note(self, place: Place, effect: str) -> None:
        """Note what a rank asks for."""
        seen = self._seen.setdefault(place, Counter())
        self._asked[place] = (effect, seen[effect])
        seen[effect] += 1

    def strike(self, point: Point, moves: Sequence[Move]) -> Move | None:
        """Take the first move that the scenario wants."""
        places = [move.place for move in moves if not isinstance(move, Glitch)]
        for move in moves:
            if isinstance(move, Kill) and self._take(move.place, move.when.value):
                return move
            if isinstance(move, Glitch):
                self._faulty = next((p for p in places if self._take(p, "fault")), None)
                if self._faulty is not None:
                    return move
        return None

    def unlucky(self, point: Point, places: Sequence[Place], *, but_all: bool) -> frozenset[Place]:
        """Say who sees a collective fail: one rank a fault, all but one a death inside."""
        if self._faulty is not None:
            return frozenset((self._faulty,))
        return frozenset(places[:-1] if but_all and len(places) > 1 else places)

    def _take(self, place: Place, when: str) -> Strike | None:
        key = (place, *self._asked[place])
        return self.open.pop(key) if key in self.open and self.open[key].when == when else None


class _Sums(Observer):
    """Checks what is committed."""

    def committed(self, rank: VirtualRank[Any], facts: Facts, buckets: tuple[Reduced, ...]) -> None:
        admitted = [i for a in facts.plan.values() if a.admitted for i in a.ids]
        assert len(admitted) == facts.divisor, facts
        for bucket in buckets:
            assert bucket.gradient == sum(16**i for i in admitted), (facts, buckets)


assert {When.BEFORE.value, When.DURING.value} == {"before", "during"}
