"""The board: every rank's sign of life, readable by the launcher. Layer: launch.

One memory-mapped file in the control directory, one slot per rank, one writer per slot. A beat is
two memory writes and no system call, so it may stand in the middle of a training step. A beat means
*progress*: code that polls must not beat while it polls.

A slot is a counter of beats and two bodies. Beat n writes the body that readers do not look at, and
is published by the counter, in one store of eight bytes. So a writer that is stopped anywhere, for
however long, leaves its last beat readable: a half-written body is never taken for a phase.

Phases are free words. Those that begin with ``collective`` or ``repair`` mean that the rank waits
for the others, so the next phase must be shown as soon as the wait is over: a rank that computes
under such a name would be taken for one that is stuck. The launcher itself knows the phases below.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

START = ""
"""Python has not come to our code yet."""
JOIN = "join"
"""Joining MPI: a death here ends the job."""
SCRIPT = "script"
"""In the user's script, outside the trainer."""
FINISH = "finish"
"""The script returned; waiting for the other ranks to finish too."""
EXIT = "exit"
"""The last word: nothing is left to do but to end."""

_BODY = struct.Struct("<dqq40s")  # monotonic time, step, until, phase
_COUNTER_BYTES = 8
_SLOT_BYTES = _COUNTER_BYTES + 2 * _BODY.size
_PHASE_BYTES = 40


@dataclass(frozen=True, slots=True)
class Reading:
    """What one slot said at one moment."""

    beats: int
    at_s: float
    """Time of the last beat, on the clock of ``time.monotonic``."""
    step: int
    """The step that is running; meaningless while ``until`` is 0."""
    until: int
    """The step at which training ends; 0 before training has started."""
    phase: str


class Board:
    """One rank's slot."""

    def __init__(self, path: Path, world_rank: int) -> None:
        self._map = _mapped(path)
        self._offset = world_rank * _SLOT_BYTES
        reading = read_slot(self._map, world_rank)
        self._beats, self._step, self._until = reading.beats, reading.step, reading.until
        self._phase = reading.phase

    def beat(self, phase: str) -> None:
        """Say that this rank has just got to ``phase``."""
        self._phase = phase
        self._beats += 1
        _BODY.pack_into(
            self._map,
            _body_at(self._offset, self._beats),
            time.monotonic(),
            self._step,
            self._until,
            phase.encode()[:_PHASE_BYTES],
        )
        _counters(self._map)[self._offset // _COUNTER_BYTES] = self._beats

    def progress(self, *, step: int, until: int) -> None:
        """Say which step runs now, of a training that ends before step ``until``.

        From the first call on, a script that ends without the note "finished" has left the job.
        """
        self._step, self._until = step, until
        self.beat(self._phase)

    def read(self) -> Reading:
        """Return what this slot says."""
        return self.read_other(self._offset // _SLOT_BYTES)

    def read_other(self, world_rank: int) -> Reading:
        """Return what another rank's slot says."""
        return read_slot(self._map, world_rank)

    def read_all(self) -> list[Reading]:
        """Return what all slots say, by world rank; those of dead ranks say what they last said."""
        return [read_slot(self._map, rank) for rank in range(len(self._map) // _SLOT_BYTES)]


def create(path: Path, world_size: int) -> mmap.mmap:
    """Make the board of a job and return the launcher's view of it."""
    path.write_bytes(bytes(_SLOT_BYTES * world_size))
    return _mapped(path)


def read_slot(view: mmap.mmap, world_rank: int) -> Reading:
    """Return what ``world_rank`` has shown last, reading again where it went on meanwhile."""
    offset, counters = world_rank * _SLOT_BYTES, _counters(view)
    while True:  # ends: reading is quicker than a beat
        beats = counters[offset // _COUNTER_BYTES]
        at_s, step, until, phase = _BODY.unpack_from(view, _body_at(offset, beats))
        if beats == counters[offset // _COUNTER_BYTES]:
            return Reading(beats, at_s, step, until, phase.rstrip(b"\0").decode(errors="replace"))


def _body_at(offset: int, beats: int) -> int:
    return offset + _COUNTER_BYTES + beats % 2 * _BODY.size


def _counters(view: mmap.mmap) -> "memoryview[int]":
    """Return the board as numbers of eight bytes, each read or stored at once.

    What ``struct`` packs is filled with zeros first, so a reader could see a counter of zero.
    """
    return memoryview(view).cast("Q")


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
