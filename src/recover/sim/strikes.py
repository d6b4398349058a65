"""Which moves an adversary has left at a point. Layer: sim.

Unless ``every_point`` is set, moves are left out that no survivor can tell from others that stay:

- a death inside a uniform collective, in a local effect, or in a collective that fails anyway: it
  looks like one before the victim's next collective;
- a death inside a raw collective that then succeeds everywhere (the same), or fails everywhere: it
  looks like one before that collective;
- a first strike against a shard other than 0: until then the shards are alike.

Moves at one point come in a fixed order, since their order means nothing to the survivors.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from recover.core.effects import Commit, Effect, NextBucket, Recovered, Snapshot
from recover.core.mesh import Mesh, Place
from recover.sim.moves import Budget, Exclude, Glitch, Kill, Move, When


class Arsenal:
    """What is left of a budget in a run."""

    def __init__(self, budget: Budget, mesh: Mesh) -> None:
        self._kills = budget.kills
        self._excludes = budget.excludes
        self._glitches = budget.glitches
        self._every_point = budget.every_point
        self._shards_alike = not budget.every_point
        self._replicas = mesh.replicas
        self._struck: frozenset[int] = frozenset()
        self._gone: frozenset[Place] = frozenset()

    def key(self) -> Hashable:
        """Return what later moves depend on."""
        return (self._kills, self._excludes, self._glitches, self._struck, self._gone)

    def spend(self, move: Move) -> None:
        """Take the price of a move."""
        self._shards_alike = False
        if isinstance(move, Glitch):
            self._glitches -= 1
            return
        if isinstance(move, Exclude):
            self._excludes -= 1
        elif move.place.replica not in self._struck:
            self._kills -= 1
        self._struck |= {move.place.replica}
        self._gone |= {move.place}

    def at_meeting(self, places: Sequence[Place], *, raw: bool, doomed: bool) -> list[Move]:
        """Return the moves against ranks that meet in a collective.

        ``doomed``: it fails whatever happens, because a member is missing or votes no.
        """
        moves: list[Move] = []
        if doomed and not self._every_point:
            return moves
        both = raw or self._every_point
        for place in places:
            if self._may_kill(place):
                moves.append(Kill(place, When.BEFORE))
                moves += [Kill(place, When.DURING)] * both
            if self._may_exclude(place):
                moves.append(Exclude(place, When.BEFORE))
                moves += [Exclude(place, When.DURING)] * raw
        if raw and self._glitches:
            moves.append(Glitch())
        return moves

    def more(self, moves: Sequence[Move], taken: Move) -> list[Move]:
        """Return what can be done in addition at the same point, after ``taken``."""
        later = moves[moves.index(taken) + 1 :]
        return [
            m
            for m in later
            if not isinstance(m, Glitch)
            and m.place not in self._gone
            and (self._may_kill if isinstance(m, Kill) else self._may_exclude)(m.place)
        ]

    def in_local(self, place: Place, effect: Effect[Any]) -> list[Move]:
        """Return the moves against a rank in a local effect."""
        if not self._every_point or isinstance(effect, NextBucket | Recovered | Snapshot):
            return []
        if not self._may_kill(place):
            return []
        whens = (When.BEFORE, When.AFTER) if isinstance(effect, Commit) else (When.BEFORE,)
        return [Kill(place, when) for when in whens]

    def _may_kill(self, place: Place) -> bool:
        if place.replica in self._struck:
            return place not in self._gone
        return self._kills > 0 and self._may_strike(place)

    def _may_exclude(self, place: Place) -> bool:
        fresh = place.replica not in self._struck
        return self._excludes > 0 and fresh and self._may_strike(place)

    def _may_strike(self, place: Place) -> bool:
        twin = self._shards_alike and place.shard > 0
        return len(self._struck) + 1 < self._replicas and not twin
