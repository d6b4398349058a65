"""A run as data: what each rank did and saw, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from recover.core.effects import Effect, Facts
from recover.core.mesh import Place
from recover.sim.adversary import Cue, Scripted
from recover.sim.gradients import Reduced
from recover.sim.job import Job, play
from recover.sim.moves import Point
from recover.sim.observer import Observer
from recover.sim.ranks import VirtualRank
from recover.sim.scenario import parse


class Record(Observer):
    """Everything that happened, by rank."""

    def __init__(self) -> None:
        self.effects: dict[Place, list[Effect[Any]]] = {}
        self.met_at: list[tuple[str, dict[Place, object]]] = []
        self.commits: dict[int, Facts] = {}
        self.sums: dict[int, set[int | None]] = {}

    def local(self, rank: VirtualRank[Any], effect: Effect[Any]) -> None:
        self.effects.setdefault(rank.place, []).append(effect)

    def met(
        self,
        point: Point,
        arrived: Sequence[VirtualRank[Any]],
        outcomes: Mapping[Place, object],
    ) -> None:
        self.met_at.append((point.name, dict(outcomes)))

    def committed(self, rank: VirtualRank[Any], facts: Facts, buckets: tuple[Reduced, ...]) -> None:
        self.commits[facts.step] = facts
        self.sums.setdefault(facts.step, set()).update(b.gradient for b in buckets)

    @property
    def meetings(self) -> list[str]:
        """The names of the meetings, in order."""
        return [name for name, _ in self.met_at]

    def of(self, replica: int, kind: type[Effect[Any]]) -> list[Any]:
        """The local effects of one kind of a replica's first rank."""
        return [e for e in self.effects.get(Place(replica), []) if isinstance(e, kind)]


def play_script(text: str) -> Record:
    """Run the head of a scenario under the referee; every cue must come up."""
    scenario = parse(text)
    return _play(scenario.job, scenario.cues)


def _play(job: Job, cues: Sequence[Cue]) -> Record:
    adversary, record = Scripted(cues), Record()
    play(job, adversary, observers=(record,))
    adversary.require_done()
    return record
