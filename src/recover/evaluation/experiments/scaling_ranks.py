"""One rank of ``recover bench scaling``: agrees, and repairs what kills leave. Layer: evaluation.

Started by ``recover run``, which has joined MPI before this runs. Loads no torch: what is measured
is the bottom layer alone. All times are on a clock that the processes of a machine share.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from recover.core.drive import drive
from recover.core.effects import Agree, AnyEffect, Census, Regroup, Shrink
from recover.core.guard import Member, repair
from recover.core.workload import Share
from recover.launch import rank
from recover.mpi.performer import perform_membership
from recover.mpi.transport import UlfmTransport, current


def main() -> None:
    """Agree many times, then lose one rank after the other, the highest first."""
    told = json.loads(sys.argv[1])
    me, transport = rank.context(), current()
    assert me is not None, "`recover run` starts this"
    assert transport is not None, "it has joined"
    survivors = me.mesh.everyone()
    times = Times(me.out / f"times-{me.world_rank}.jsonl")
    for _ in range(told["agreements"] // 10 + 1):  # the first ones set up connections
        transport.agree(True)
    began = time.monotonic()
    for _ in range(told["agreements"]):
        transport.agree(True)
    mean = (time.monotonic() - began) / told["agreements"]
    times.note("agreement", len(survivors), 0, mean)
    for event in range(told["kills"]):
        victim = survivors[-1]
        mark = me.out / f"killed-{event}"
        transport.agree(True)
        if me.world_rank == victim:
            mark.write_text(f"{time.monotonic():.9f}")
            os.kill(os.getpid(), signal.SIGKILL)
        while transport.agree(True):  # ends: the victim does not come here again
            pass
        noticed = time.monotonic()
        before = survivors
        survivors = _repair(transport, before, times, event)
        recovered = time.monotonic()
        killed = float(mark.read_text())
        times.note("noticing", len(before), event, noticed - killed)
        times.note("recovery", len(before), event, recovered - killed)
    times.flush()


class Times:
    """What this rank measured, written at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines: list[str] = []

    def note(self, name: str, ranks: int, event: int, seconds: float) -> None:
        """Keep one time."""
        line = {"name": name, "ranks": ranks, "event": event, "seconds": seconds}
        self._lines.append(f"{json.dumps(line)}\n")

    def flush(self) -> None:
        """Write all of them."""
        self._file.write_text("".join(self._lines))


def _repair(
    transport: UlfmTransport, before: tuple[int, ...], times: Times, event: int
) -> tuple[int, ...]:
    """Return who is left, and note how long the parts took; the last try of each counts."""
    spent: dict[str, float] = {}

    def perform(effect: AnyEffect) -> object:
        assert isinstance(effect, Agree | Shrink | Census | Regroup), effect
        began = time.monotonic()
        outcome = perform_membership(transport, effect)
        spent[type(effect).__name__.lower()] = time.monotonic() - began
        return outcome

    member = Member(transport.place, transport.mesh)
    membership = drive(repair(member, Share(0, admitted=False), before), perform)
    for name in ("shrink", "census"):
        times.note(name, len(before), event, spent[name])
    return membership.survivors


if __name__ == "__main__":
    main()
