"""Joining the job that ``recover run`` started. Layer: train."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from recover.core.guard import Member
from recover.core.iteration import Rules
from recover.core.mesh import Mesh
from recover.core.policies import (
    AdaptiveWorldPolicy,
    Policy,
    RestoreChoice,
    StaticWorldPolicy,
)
from recover.errors import NotLaunchedError
from recover.launch import layout, rank, unit
from recover.mpi import transport as ulfm
from recover.mpi.process_group import held_group, register
from recover.parallel.world import abort_world, open_world

_POLICIES = ("static", "adaptive")


@dataclass(frozen=True, slots=True)
class Job:
    """This rank's membership in the job."""

    transport: ulfm.UlfmTransport
    rules: Rules
    out: Path
    """The run directory."""
    faults: Path | None
    """The fault schedule to follow, if any."""

    @property
    def mesh(self) -> Mesh:
        """The job at its start."""
        return self.transport.mesh

    @property
    def replica(self) -> int:
        """This rank's replica: 0 to replicas - 1, kept for life."""
        return self.transport.place.replica

    @property
    def shard(self) -> int:
        """This rank's position in its replica: its rank in torch.distributed's default group."""
        return self.transport.place.shard

    @property
    def ranks_per_replica(self) -> int:
        """M: ranks of a replica, the size of torch.distributed's default group."""
        return self.mesh.ranks_per_replica

    @property
    def replicas(self) -> int:
        """W_init: replicas that the job started with."""
        return self.mesh.replicas

    @property
    def microbatches(self) -> int:
        """B: microbatches of an iteration."""
        return self.rules.policy.microbatches

    @property
    def member(self) -> Member:
        """This rank as the protocol knows it."""
        return Member(self.transport.place, self.mesh)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The cross-replica group: this rank and those that hold the same shard elsewhere.

        For ``DistributedDataParallel(process_group=...)``, and as the second group of FSDP1's
        ``HYBRID_SHARD``.

        The trainer repairs it inside a step. Until then a collective in it that fails says so in
        its work and leaves its output undefined; a gather leaves this rank's own values there.
        """
        return held_group(self.transport)


def init(*, microbatches: int, policy: str = "static", restore: str = "auto") -> Job:
    """Join the job that ``recover run`` started and return it.

    Afterwards the default group of torch.distributed is that of this rank's replica alone: what a
    script does with ``dist``, DeviceMesh or FSDP stays inside the replica.

    ``microbatches`` is B, the number that every iteration commits, whoever is left. ``policy`` is
    ``static``, or ``adaptive`` for the strawman that lets B shrink. ``restore`` is ``auto``,
    ``blocking`` or ``non_blocking`` and matters only where buckets are reduced in place.

    Raises NotLaunchedError in a process that ``recover run`` did not start, ValueError for a wrong
    setting, RecoverError where MPI cannot carry a fault-tolerant job.
    """
    context = rank.context()
    if context is None:
        raise NotLaunchedError(
            "this script is not running under ReCoVer; start it with "
            "`recover run --replicas R SCRIPT ARGS...`"
        )
    rules = Rules(_policy(policy, microbatches, context.mesh.replicas), _restore_choice(restore))
    transport = ulfm.current() or ulfm.join(context.mesh)
    register()
    place = transport.place
    open_world(
        place, context.mesh.ranks_per_replica, layout.store_file(context.control, place.replica)
    )
    unit.on_loss(abort_world)
    return Job(transport, rules, context.out, context.faults)


def _policy(name: str, microbatches: int, replicas: int) -> Policy:
    if name == "static":
        return StaticWorldPolicy(microbatches)
    if name == "adaptive":
        return AdaptiveWorldPolicy(microbatches, replicas)
    raise ValueError(f"policy must be one of {', '.join(_POLICIES)}, got {name!r}")


def _restore_choice(name: str) -> RestoreChoice:
    try:
        return RestoreChoice(name)
    except ValueError:
        allowed = ", ".join(RestoreChoice)
        raise ValueError(f"restore must be one of {allowed}, got {name!r}") from None
