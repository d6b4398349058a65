"""Failures on schedule: SIGKILL to itself at the place that a schedule names. Layer: train.

The schedule is the same on every rank; each rank looks for entries that name itself. A death in
``reduce`` comes after the probe of that bucket has passed and before this rank has brought its
part: the others are inside the all-reduce, or on their way into it, and cannot leave it without an
error. To have them inside for certain, the victim waits until the board shows them there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recover.core.mesh import Place
from recover.core.schedule import FaultSchedule, Location

_GATHER_DEADLINE_S = 5.0


@dataclass(slots=True)
class Injector:
    """Watches where this rank is and ends it where the schedule says so."""

    schedule: FaultSchedule
    place: Place
    die: Callable[[str], None]
    """Ends this process; gets the reason."""
    others_inside: Callable[[], bool] = lambda: True
    """Whether all other living ranks are inside the collective that comes next."""
    step: int = field(default=0)

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
        if location is Location.REDUCE:
            deadline = time.monotonic() + _GATHER_DEADLINE_S
            while not self.others_inside() and time.monotonic() < deadline:
                time.sleep(0.0002)
        self.die(f"fault schedule: step {self.step}, {location}")
