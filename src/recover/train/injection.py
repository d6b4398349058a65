"""Failures on schedule: SIGKILL to itself at the place that a schedule names. Layer: train.

The schedule is the same on every rank; each rank looks for entries that name itself. A death in
``reduce`` comes after the probe of that step has passed and before this rank has brought its
part: the others are inside the all-reduce, or on their way into it, and cannot leave it without an
error. To have them inside for certain, the victim waits until the board shows them there.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from recover.core.mesh import Place
from recover.core.schedule import FaultSchedule, Location
from recover.faults import delivery
from recover.launch.board import Board
from recover.mpi.transport import UlfmTransport

_GATHER_DEADLINE_S = 5.0


@dataclass(slots=True)
class Injector:
    """Watches where this rank is and ends it where the schedule says so."""

    schedule: FaultSchedule
    place: Place
    die: Callable[[str], None]
    """Ends this process; gets the reason."""
    others_inside: Callable[[int], bool] = lambda bucket: True
    """Whether all other holders of this shard are inside the all-reduce of a bucket."""
    step: int = field(default=0)
    in_pass: bool = field(default=False)
    """Whether a pass is running whose backward is not given a loss by the training loop."""

    def watch(self, parts: Iterable[nn.Module]) -> None:
        """See to it that deaths in the passes of these modules come."""
        if not self.schedule.faults:
            return
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self.at(Location.FORWARD))
            part.register_forward_hook(lambda _, __, output: self._in_backward_of(output))

    def _in_backward_of(self, output: object) -> None:
        if self.in_pass and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.at(Location.BACKWARD))  # type: ignore[no-untyped-call]

    def at(
        self, location: Location, *, bucket: int | None = None, microbatch: int | None = None
    ) -> None:
        """Die here, if an entry of the schedule says so."""
        if not self.schedule.faults:
            return
        fault = self.schedule.at(
            self.step, self.place, location, bucket=bucket, microbatch=microbatch
        )
        if fault is None:
            return
        if bucket is not None:
            deadline = time.monotonic() + _GATHER_DEADLINE_S
            while not self.others_inside(bucket) and time.monotonic() < deadline:
                time.sleep(0.0002)
        self.die(delivery(fault))


def board_watch(board: Board, transport: UlfmTransport) -> Callable[[int], bool]:
    """Return how an injector sees on the board that the others are inside an all-reduce.

    The others are those that hold this rank's shard: no one else is in it.
    """
    mesh, own = transport.mesh, transport.place

    def others_inside(bucket: int) -> bool:
        places = (Place(replica, own.shard) for replica in transport.replicas)
        others = (mesh.world_rank(place) for place in places if place != own)
        return all(board.read_other(rank).phase == inside(bucket) for rank in others)

    return others_inside


def inside(bucket: int) -> str:
    """Return the phase that a rank shows while it is inside the all-reduce of a bucket."""
    return f"collective reduce {bucket}"
