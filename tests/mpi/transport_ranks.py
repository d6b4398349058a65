"""Rank side of the transport's tests."""

import threading
from array import array
from collections.abc import Callable

from recover.core.mesh import Mesh
from recover.errors import RecoverError
from recover.mpi.transport import ElementType, Span, join


def refused(replicas: int) -> str:
    """Return what joining a job of ``replicas`` is refused with."""
    return _message(lambda: join(Mesh(replicas)), RecoverError)


def misuse() -> dict[str, object]:
    """Return how the transport of two ranks answers wrong calls, and an error without a death."""
    wrong_size = refused(3)
    transport = join(Mesh(2))
    rank = transport.place.replica
    memory = array("d", (1.0, 2.0))
    span = Span(memory.buffer_info()[0], len(memory), ElementType.FLOAT64)
    uneven = Span(span.address, 1 + rank, span.type)
    result: dict[str, object] = {
        "wrong_size": wrong_size,
        "unequal": _message(lambda: transport.detect(True, uneven), RecoverError),
        "equal": transport.detect(True, span),
        "thread": _in_thread(lambda: transport.agree(True)),
    }
    if rank == 0:
        transport.quiesce()
    moved = transport.reduce(None, span)
    result["moved"], result["verdict"] = moved, transport.agree(moved)
    result["epoch"] = transport.shrink()
    result["mended"] = transport.detect(True, span) and transport.reduce(None, span)
    transport.agree(True)
    return result


def _message(call: Callable[[], object], kind: type[BaseException]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def _in_thread(call: Callable[[], object]) -> str:
    messages: list[str] = []
    thread = threading.Thread(target=lambda: messages.append(_message(call, AssertionError)))
    thread.start()
    thread.join()
    return messages[0]
