"""One rank of the bandwidth benchmark; see :mod:`benchmarks.bandwidth`."""

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from benchmarks.measuring import arguments, leave_result
from recover.mpi.transport import ElementType, Span, UlfmTransport, current

_BLOCK_S = 0.03
"""Calls of small buffers are timed together, about this long."""
_BUDGET_S = 7.0
"""No new pair of blocks is begun for a size after this time, once there are a few."""
_FEW = 5


def main() -> None:
    """Time both paths for every size and leave one row of times for each."""
    told = arguments()
    transport = current()
    assert transport is not None, "the launcher's bootstrap has joined"
    rows = []
    for nbytes in told["sizes"]:
        rows.append(_measure(transport, nbytes, told["rounds"]))
    leave_result(rows)


def _measure(transport: UlfmTransport, nbytes: int, rounds: int) -> dict[str, object]:
    count = nbytes // 4
    send = np.full(count, 1.0 + transport.place.replica, dtype=np.float32)  # (count,)
    receive = np.zeros(count, dtype=np.float32)  # (count,)
    world = MPI.COMM_WORLD
    source, target = (Span(a.ctypes.data, count, ElementType.FLOAT32) for a in (send, receive))
    source_buffer, target_buffer = source.buffer(), target.buffer()

    def bare() -> None:
        world.Allreduce(source_buffer, target_buffer, MPI.SUM)

    def guarded() -> None:
        clean = transport.detect(True, target) and transport.reduce(source, target)
        assert clean, "nobody dies here"

    calls = _calls_per_block(bare, world)
    times: dict[str, list[float]] = {"bare": [], "guarded": []}
    give_up_at = time.perf_counter() + _BUDGET_S
    for number in range(rounds + 1):  # the first round warms up
        if not world.bcast(number <= _FEW or time.perf_counter() < give_up_at, root=0):
            break
        pair = (("bare", bare), ("guarded", guarded))
        for name, call in pair[:: 1 if number % 2 else -1]:
            spent = _block(call, calls, world)
            if number:
                times[name].append(spent)
    size = world.Get_size()
    assert receive[0] == receive[-1] == size * (size + 1) / 2, "a wrong sum"
    return {"bytes": nbytes, "calls": calls, **times}


def _block(call: Callable[[], None], calls: int, world: MPI.Intracomm) -> float:
    """Return the seconds per call, until the last rank is done."""
    world.Barrier()
    started_at = time.perf_counter()
    for _ in range(calls):
        call()
    world.Barrier()
    return (time.perf_counter() - started_at) / calls


def _calls_per_block(call: Callable[[], None], world: MPI.Intracomm) -> int:
    call()
    once = _block(call, 3, world)
    return int(world.bcast(max(1, round(_BLOCK_S / once)), root=0))


if __name__ == "__main__":
    main()
