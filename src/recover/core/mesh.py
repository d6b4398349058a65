"""Rank arithmetic: which world rank is which shard of which replica. Layer: core.

World ranks are laid out replica by replica, so that a replica stays on as few hosts as possible.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """The job at its start: ``replicas`` model copies of ``ranks_per_replica`` ranks each."""

    replicas: int
    ranks_per_replica: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.ranks_per_replica < 1:
            raise ValueError(f"ranks_per_replica must be at least 1, got {self.ranks_per_replica}")

    @property
    def world_size(self) -> int:
        """Number of ranks that the job starts with."""
        return self.replicas * self.ranks_per_replica

    def place(self, world_rank: int) -> "Place":
        """Return where ``world_rank`` sits."""
        if not 0 <= world_rank < self.world_size:
            raise ValueError(f"world rank {world_rank} is outside 0..{self.world_size - 1}")
        return Place(*divmod(world_rank, self.ranks_per_replica))

    def world_rank(self, place: "Place") -> int:
        """Return the world rank at ``place``."""
        if not 0 <= place.replica < self.replicas:
            raise ValueError(f"replica {place.replica} is outside 0..{self.replicas - 1}")
        if not 0 <= place.shard < self.ranks_per_replica:
            raise ValueError(f"shard {place.shard} is outside 0..{self.ranks_per_replica - 1}")
        return place.replica * self.ranks_per_replica + place.shard

    def everyone(self) -> tuple[int, ...]:
        """Return the ids of all replicas that the job starts with."""
        return tuple(range(self.replicas))

    def complete_replicas(self, places: Iterable["Place"]) -> tuple[int, ...]:
        """Return, in order, the replicas of which every shard is among ``places``.

        A replica that lost one rank lost a part of the model and is condemned as a unit
        (Section 4.4).
        """
        present: dict[int, set[int]] = {}
        for place in places:
            present.setdefault(place.replica, set()).add(place.shard)
        return tuple(
            sorted(r for r, shards in present.items() if len(shards) == self.ranks_per_replica)
        )


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One rank's position: shard ``shard`` of replica ``replica``."""

    replica: int
    shard: int = 0

    def __str__(self) -> str:
        return f"{self.replica}.{self.shard}"
