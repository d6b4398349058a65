"""The shape of a replica: pipeline x expert x tensor parallel. Layer: parallel. Paper: 4.4, C.

All rank arithmetic inside a replica is here. Ranks are laid out with the tensor-parallel axis
innermost, because its collectives are the most frequent: rank = (pp * EP + ep) * TP + tp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES: Final = ("pp", "ep", "tp")
"""Names of the mesh's dimensions, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """How many ranks of a replica lie along each axis. Raises ValueError for a size below 1."""

    pp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(f"{field.name} must be at least 1, got {size}")

    @property
    def ranks(self) -> int:
        """Return the number of ranks that one replica of this shape has."""
        return self.pp * self.ep * self.tp

    def __str__(self) -> str:
        return f"pp={self.pp} x ep={self.ep} x tp={self.tp}"

    def require(self, ranks: int) -> None:
        """Raise ValueError where a replica of ``ranks`` ranks cannot have this shape."""
        if ranks != self.ranks:
            raise ValueError(
                f"{self} = {self.ranks} ranks does not match the {ranks} rank(s) of each replica; "
                f"start it with --ranks-per-replica {self.ranks} or choose other sizes"
            )

    def rank_of(self, *, pp: int, ep: int, tp: int) -> int:
        """Return the rank, inside the replica, at these coordinates."""
        return (pp * self.ep + ep) * self.tp + tp

    def pipeline_ends(self) -> Iterator[tuple[int, int]]:
        """Yield, for each place (ep, tp), its ranks of the first and of the last pipeline rank."""
        for ep in range(self.ep):
            for tp in range(self.tp):
                yield self.rank_of(pp=0, ep=ep, tp=tp), self.rank_of(pp=self.pp - 1, ep=ep, tp=tp)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh ("pp", "ep", "tp") of the default group, which must have that many ranks.

        Collective over the replica. Raises ValueError where the sizes do not fit.
        """
        self.require(dist.get_world_size())
        return init_device_mesh(device_type, (self.pp, self.ep, self.tp), mesh_dim_names=AXES)
