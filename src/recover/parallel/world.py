"""A replica is its own torch.distributed world. Layer: parallel. Paper: 4.4, C.

Its store is hosted by its shard 0, its default group spans its ranks alone: gloo on a CPU, NCCL for
the tensors of a GPU. Stock FSDP, tensor and pipeline parallelism, DeviceMesh and ``dist.*`` calls
work inside unchanged, and no other replica's death reaches them. Traffic between replicas goes
through the fault-tolerant transport and nowhere else.
"""

import functools
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from recover.core.mesh import Place
from recover.errors import RecoverError

_MEET_S = 120.0
_COLLECTIVE = timedelta(days=1)
"""Deaths are noticed by watching processes, and a hang by the launcher; never by a timeout."""


@functools.cache
def open_world(place: Place, ranks: int, meeting: Path) -> None:
    """Make the default group of torch.distributed that of this rank's replica.

    ``ranks`` is the size of the replica; ``meeting`` a file in which its shard 0 says where the
    store listens. A second call does nothing. Raises RecoverError where a default group exists
    already, or shard 0 is silent.
    """
    if dist.is_initialized():
        raise RecoverError(
            "torch.distributed has a default group already; call recover.init() instead of "
            "init_process_group: it makes the replica's own world the default group"
        )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_local_rank() % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_hosted(ranks, meeting) if place.shard == 0 else _joined(ranks, meeting),
        rank=place.shard,
        world_size=ranks,
        timeout=_COLLECTIVE,
    )


def abort_world() -> None:
    """Release whoever is blocked in a collective of the replica; safe from any thread."""
    if dist.is_initialized() and torch.cuda.is_available():
        dist.distributed_c10d._abort_process_group()  # every group, those of DeviceMesh included


def _hosted(ranks: int, meeting: Path) -> Store:
    """Open the store on the loopback, and only there: it does as it is told by anybody."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        ranks,
        is_master=True,
        timeout=_COLLECTIVE,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    partial = meeting.with_suffix(".new")
    partial.write_text(str(port), encoding="ascii")
    partial.replace(meeting)
    return store


def _joined(ranks: int, meeting: Path) -> Store:
    give_up_at = time.monotonic() + _MEET_S
    while not meeting.exists():
        if time.monotonic() > give_up_at:
            raise RecoverError(
                f"the first rank of this replica did not open its store within {_MEET_S:g} s"
            )
        time.sleep(0.005)
    port = int(meeting.read_text(encoding="ascii"))
    return TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=_COLLECTIVE)


def _local_rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
