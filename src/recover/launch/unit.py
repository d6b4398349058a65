"""A replica dies as a unit: who loses a rank of its own replica ends at once. Layer: launch.

Paper: 4.4. Theory of operation
-------------------------------
One rank's death takes a part of the model away, so nothing that its replica still computes can be
used, and the others of it may be blocked where no error ever reaches them: in a collective, in a
pipeline's receive, behind a data loader. Every rank therefore watches the processes of its own
replica, on a thread that does nothing else. The kernel wakes it when one of them ends; it gives the
replica's communication a moment to be aborted (a GPU may be waiting inside a kernel of it), notes
why, and SIGKILLs its own process. No timeout of a collective is involved.

1. Rank 5 dies. The kernel takes it apart, which closes its connections and ends the watch on it.
2. Ranks 4, 6 and 7 of its replica wake up, and end. A connection may have broken a moment earlier
   and raised an error in the main thread; that thread waits for the watch before it blames itself.
3. The other replicas learn of all four deaths from the transport, which waits for the rest of a
   replica before it shrinks.

A rank that noted that it finished is not missed. One whose interpreter is locked up in a long call
cannot leave; the launcher ends it a second later.
"""

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from recover.core.mesh import Place
from recover.launch import layout, note, rank

_ABORT_S = 1.0
_BLAME_S = 0.25
"""How long an error may be ahead of the death that caused it."""
_lost = threading.Event()
_aborts: list[Callable[[], None]] = []


def watch(me: rank.RankContext) -> None:
    """Watch the other ranks of this replica from now on; to be called once they have all joined."""
    own = me.mesh.place(me.world_rank)
    places = (Place(own.replica, shard) for shard in range(me.mesh.ranks_per_replica))
    others = [me.mesh.world_rank(place) for place in places if place != own]
    if others:
        thread = threading.Thread(
            target=_watch, args=(me, others), name="recover-unit", daemon=True
        )
        thread.start()


def on_loss(abort: Callable[[], None]) -> None:
    """Have ``abort`` called, for a moment at most, before this process ends with its replica."""
    _aborts.append(abort)


def await_verdict() -> None:
    """Return if an error that this rank has just seen is its own and not its replica's end."""
    me = rank.context()
    if me is not None and me.mesh.ranks_per_replica > 1 and _lost.wait(_BLAME_S):
        while True:  # the watch is ending this process
            signal.pause()


def _watch(me: rank.RankContext, others: list[int]) -> None:
    ends = select.poll()
    watched = {}
    for world_rank in others:
        pid = int(layout.pid_file(me.control, world_rank).read_text(encoding="ascii"))
        try:
            watched[os.pidfd_open(pid)] = world_rank
        except ProcessLookupError:
            _leave_unless_finished(me, world_rank)
    for descriptor in watched:
        ends.register(descriptor, select.POLLIN)
    while watched:  # ends: each round has lost a rank
        for descriptor, _ in ends.poll():
            ends.unregister(descriptor)
            os.close(descriptor)
            _leave_unless_finished(me, watched.pop(descriptor))


def _leave_unless_finished(me: rank.RankContext, world_rank: int) -> None:
    ended = note.read(layout.end_file(me.control, world_rank))
    if ended is None or not ended.finished:
        _leave(world_rank)


def _leave(world_rank: int) -> NoReturn:
    _lost.set()
    for abort in _aborts:
        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(_ABORT_S)
    rank.die(note.CONDEMNED, f"left with rank {world_rank} of its replica")
