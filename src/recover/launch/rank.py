"""A rank's side of the launch: who am I, I am alive, this is how I end. Layer: launch.

Needs neither MPI nor torch. How a rank ends is a rule of the transport, not a matter of style: with
ULFM, only a death by signal is one that the survivors recover from; an ``exit(1)`` can hang them
for ever. So a rank that has done everything notes that it finished and leaves with status 0, and
every other end goes through :func:`die`.
"""

import contextlib
import functools
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from recover.core.mesh import Mesh
from recover.launch import layout, note
from recover.launch.board import Board

_RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"


@dataclass(frozen=True, slots=True)
class RankContext:
    """Who this process is, and where its job keeps its files."""

    world_rank: int
    mesh: Mesh
    out: Path
    faults: Path | None
    control: Path


@functools.cache
def launch_description() -> dict[str, object]:
    """Return what the launcher wrote for its ranks; empty in a process of no job."""
    path = os.environ.get(layout.LAUNCH_VARIABLE)
    if path is None or _RANK_VARIABLE not in os.environ:
        return {}
    description: dict[str, object] = json.loads(Path(path).read_text(encoding="utf-8"))
    return description


@functools.cache
def context() -> RankContext | None:
    """Return who this process is, or None where ``recover run`` did not start it."""
    told = launch_description()
    if not told:
        return None
    faults = told["faults"]
    return RankContext(
        world_rank=int(os.environ[_RANK_VARIABLE]),
        mesh=Mesh(int(str(told["replicas"])), int(str(told["ranks_per_replica"]))),
        out=Path(str(told["out"])),
        faults=None if faults is None else Path(str(faults)),
        control=Path(str(told["control"])),
    )


@functools.cache
def board() -> Board | None:
    """Return this rank's slot of the board, or None where ``recover run`` did not start it."""
    me = context()
    return None if me is None else Board(layout.board_file(me.control), me.world_rank)


def note_end(kind: str, reason: str, step: int | None = None) -> None:
    """Note how this rank ends; the launcher reads it when the process is gone."""
    me = context()
    if me is None:
        return
    path = layout.end_file(me.control, me.world_rank)
    before = note.read(path)
    finished = kind == note.FINISHED or (before is not None and before.finished)
    flush()
    try:
        log_bytes = layout.rank_log(me.out, me.world_rank).stat().st_size
    except OSError:
        log_bytes = 0
    note.write(path, note.EndNote(kind, one_line(reason), step, log_bytes, finished))


def die(kind: str, reason: str, details: str = "") -> NoReturn:
    """Note why, append ``details`` to the log and SIGKILL this process."""
    with contextlib.suppress(Exception):  # nothing may come between a failing rank and its death
        note_end(kind, reason, _running_step())
        sys.stderr.write(details or f"recover: this rank ends: {reason}\n")
        flush()
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the signal arrives
        signal.pause()


def flush() -> None:
    """Write out what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def one_line(text: str, limit: int = 300) -> str:
    """Return the first line of ``text`` that says anything."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _running_step() -> int | None:
    slot = board()
    reading = None if slot is None else slot.read()
    return reading.step if reading is not None and reading.until else None
