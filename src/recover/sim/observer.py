"""Those who look on: checkers and traces. Layer: sim."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from recover.core.effects import Effect, Facts
from recover.core.mesh import Place
from recover.sim.gradients import Reduced
from recover.sim.moves import Move, Point
from recover.sim.ranks import VirtualRank


class Observer:
    """Sees everything and changes nothing; a subclass overrides what it wants to see."""

    def local(self, rank: VirtualRank[Any], effect: Effect[Any]) -> None:
        """A rank is about to perform a local effect."""

    def committed(self, rank: VirtualRank[Any], facts: Facts, buckets: tuple[Reduced, ...]) -> None:
        """A rank steps its optimizer with what is in these buckets."""

    def met(
        self,
        point: Point,
        arrived: Sequence[VirtualRank[Any]],
        outcomes: Mapping[Place, object],
    ) -> None:
        """These ranks met in a collective; those that live on saw these outcomes."""

    def refused(self, rank: VirtualRank[Any], effect: Effect[Any]) -> None:
        """A rank's collective failed without a meeting: it is excluded, or its group revoked."""

    def struck(self, point: Point, move: Move) -> None:
        """The adversary made a move."""

    def ended(self, rank: VirtualRank[Any], reason: str) -> None:
        """A rank has finished, raised, or left for a reason."""

    def key(self) -> Hashable:
        """Return what later verdicts of this observer depend on."""
        return None
