"""The transport: membership, epoch and guarded collectives of this rank. Layer: mpi.

Theory of operation
-------------------
Two communicators carry the job. ``job`` spans all ranks and carries agreement, shrink and census;
``cross`` spans the ranks that hold this rank's shard in the other replicas and carries gradients. A
replica of one rank has one and the same communicator for both.

*Quiesce.* A raw MPI error says nothing about what the other ranks saw. The transport revokes both
communicators, so that nobody is left inside a collective, and from then on votes False and moves no
data until the next shrink.

*Fresh communicators.* Open MPI can crash when a communicator is revoked, or a member of it dies,
before every member has finished creating it. So a shrink waits until deaths that come together have
come to light, and before a new communicator is handed out its members agree that they have it.

Communicators of an old epoch are never freed: freeing is collective, and their members are dead.
"""

import contextlib
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import mpi4py

# These settings take effect when the MPI module is imported. To import it must not start MPI: only
# a rank of a job has a use for it, and an MPI that is never finalized leaves shared memory behind.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI

from recover.core.effects import Statement
from recover.core.mesh import Mesh, Place
from recover.core.workload import Share
from recover.errors import RecoverError


class ElementType(Enum):
    """Element types that can be summed, with their MPI counterparts.

    16-bit floats are missing on purpose: MPI has no such types, and handing their bytes over as
    another type gives NaN without an error. Reduce them as FLOAT32.
    """

    FLOAT32 = MPI.FLOAT
    FLOAT64 = MPI.DOUBLE
    INT64 = MPI.INT64_T
    INT32 = MPI.INT32_T
    BYTE = MPI.UINT8_T

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return _BYTES[self]


_BYTES = {
    ElementType.FLOAT32: 4,
    ElementType.FLOAT64: 8,
    ElementType.INT64: 8,
    ElementType.INT32: 4,
    ElementType.BYTE: 1,
}


class Operation(Enum):
    """How the members' elements are combined."""

    SUM = MPI.SUM
    MAX = MPI.MAX
    MIN = MPI.MIN


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous run of elements in host memory."""

    address: int
    count: int
    type: ElementType

    def buffer(self) -> tuple[MPI.buffer, int, MPI.Datatype]:
        """Return the span as mpi4py takes it."""
        memory = MPI.buffer.fromaddress(self.address, self.count * self.type.size)
        return memory, self.count, self.type.value

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.type.size

    @property
    def fingerprint(self) -> int:
        """15 bits that depend on the number and type of the elements."""
        words = self.count * 8 + _TYPE_NUMBER[self.type]
        return (words * 0x9E3779B97F4A7C15 >> 40) & _FINGERPRINT


_TYPE_NUMBER = {kind: number for number, kind in enumerate(ElementType)}
_FINGERPRINT = 0x7FFF
_SETTLE_S = 0.01
_UNIT_S = 0.5
"""A rank that outlives its replica by this much is left to the agreement, which condemns it."""
_FT_SWITCH = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`


class UlfmTransport:
    """This rank's end of the fault-tolerant transport. Every method runs on the joining thread."""

    def __init__(self, world: MPI.Intracomm, mesh: Mesh) -> None:
        self.mesh = mesh
        self.place = mesh.place(world.Get_rank())
        self.epoch = 0
        self._thread = threading.get_ident()
        self._quiesced = False
        self._next: tuple[MPI.Intracomm, MPI.Intracomm] | None = None
        self._everyone = world.Get_group()
        self._job = self._cross = world
        if mesh.ranks_per_replica > 1:  # a death here leaves it to the first repair
            self.agree(self.regroup(mesh.everyone()))

    # --- state ---------------------------------------------------------------------------

    @property
    def on_own_thread(self) -> bool:
        """Whether the caller is the thread that may call MPI."""
        return threading.get_ident() == self._thread

    @property
    def quiesced(self) -> bool:
        """Whether trouble was seen since the last shrink; no data moves while it is set."""
        return self._quiesced

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of the job's current group, dead ones included, in order."""
        group = self._job.Get_group()
        return tuple(MPI.Group.Translate_ranks(group, range(group.Get_size()), self._everyone))

    @property
    def cross_rank(self) -> int:
        """This rank's position in the current cross-replica group."""
        return int(self._cross.Get_rank())

    @property
    def cross_size(self) -> int:
        """Number of members of the current cross-replica group, dead ones included."""
        return int(self._cross.Get_size())

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas in the current cross-replica group, dead ones included."""
        ranks = self._cross.Get_group().Translate_ranks(group=self._everyone)
        return tuple(self.mesh.place(rank).replica for rank in ranks)

    def quiesce(self) -> None:
        """Stop data motion and vote False until the next shrink; release the others."""
        if not self._quiesced:
            self._quiesced = True
            for group in {id(c): c for c in (self._cross, self._job)}.values():
                with contextlib.suppress(MPI.Exception):  # already revoked by somebody else
                    group.Revoke()

    # --- uniform outcomes ----------------------------------------------------------------

    def agree(self, clean: bool) -> bool:
        """Return whether every rank of the job arrived and voted True (MPIX_Comm_agree)."""
        agreed = self._vote(self._job, clean, 0)
        if agreed and self._next is not None:
            self._job, self._cross = self._next
        self._next = None
        return agreed

    def detect(self, clean: bool, span: Span) -> bool:
        """Return whether the whole cross-replica group is alive and voted True.

        The vote also carries a fingerprint of what is about to be reduced. Raises RecoverError, on
        every member alike, where the members would reduce different things.
        """
        return self._vote(self._cross, clean, span.fingerprint)

    def shrink(self) -> int:
        """Form new communicators of the survivors; return the new epoch (MPIX_Comm_shrink)."""
        self.quiesce()
        self._next = None
        self._quiesced = False
        while True:  # ends: every round that fails has lost a member
            self._settle()
            try:
                self._job = _intracomm(self._job.Shrink())
            except MPI.Exception:
                continue
            self.epoch += 1
            if self._vote(self._job, True, 0):
                break
        self._cross = self._job  # replaced by `regroup` where replicas have several ranks
        return self.epoch

    # --- outcomes that may differ between ranks ------------------------------------------

    def reduce(
        self, send: Span | None, receive: Span, operation: Operation = Operation.SUM
    ) -> bool:
        """Sum over the cross-replica group into ``receive``; return whether it worked *here*.

        ``send`` None means that ``receive`` holds this rank's part and is reduced in place.
        """
        source = MPI.IN_PLACE if send is None else send.buffer()
        target, how = receive.buffer(), operation.value
        return self._attempt(lambda: self._cross.Allreduce(source, target, how))

    def broadcast(self, span: Span, root: int) -> bool:
        """Copy ``span`` of cross rank ``root`` to the cross-replica group."""
        return self._attempt(lambda: self._cross.Bcast(span.buffer(), root))

    def gather(self, send: Span, receive: Span) -> bool:
        """Concatenate every member's ``send`` into everybody's ``receive``, in rank order."""
        memory, count, kind = receive.buffer()
        block = (memory, count // self.cross_size, kind)  # mpi4py counts per block
        return self._attempt(lambda: self._cross.Allgather(send.buffer(), block))

    def census(self, statement: Statement) -> Mapping[Place, Statement] | None:
        """Gather the statements of all ranks of the job; None where it did not work *here*."""
        place, share = self.place, statement.share
        mine = array("q", (place.replica, place.shard, share.microbatches, share.admitted))
        mine.append(statement.fingerprint)
        rows = array("q", bytes(len(mine) * mine.itemsize * self._job.Get_size()))
        if not self._attempt(lambda: self._job.Allgather(mine, rows)):
            return None
        return {
            Place(replica, shard): Statement(Share(microbatches, bool(admitted)), fingerprint)
            for replica, shard, microbatches, admitted, fingerprint in zip(
                *(iter(rows),) * len(mine), strict=True
            )
        }

    def regroup(self, survivors: tuple[int, ...]) -> bool:
        """Build communicators of the ranks of ``survivors``; the next agreement adopts them.

        Building may fail here and succeed there. So nothing waits on the new communicators before
        that agreement, which runs over the old one and by ranks that have finished building.
        """
        if self.mesh.ranks_per_replica == 1:
            return True
        member = self.place.replica in survivors
        key = self.mesh.world_rank(self.place)

        def build() -> None:
            job = _intracomm(self._job.Split(1 if member else 0, key))
            cross = _intracomm(self._job.Split(1 + self.place.shard if member else 0, key))
            self._next = (job, cross)

        return self._attempt(build)

    def check_sum(self) -> None:
        """Sum what is known in advance; one exchange with everybody sets up all connections.

        A death meanwhile is left to the first agreement of the job.
        """
        size, rank = self._job.Get_size(), self._job.Get_rank()
        total = array("q", (rank + 1,))

        def exchange() -> None:
            self._job.alltoall([rank] * size)
            self._job.Allreduce(MPI.IN_PLACE, total)

        if self._attempt(exchange) and total[0] != size * (size + 1) // 2:
            raise RecoverError(
                f"MPI gave {total[0]} for a sum that is {size * (size + 1) // 2}: "
                "a collective component of this Open MPI is broken; `recover doctor` tells more"
            )

    # --- internals -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until no further death has come to light for a moment.

        Deaths come in groups (a host, a power supply), and one that is noticed while a shrink
        finishes its communicator can crash the survivors inside Open MPI. A replica that has lost
        a rank is about to lose the others, so those get longer.
        """
        known, since = -1, time.monotonic()
        while True:  # ends: there are only so many ranks, and each death is waited for so long
            MPI.COMM_SELF.Iprobe()  # lets MPI look at its connections
            dead = self._job.Get_failed()
            if dead.Get_size() != known:
                known, since = dead.Get_size(), time.monotonic()
            limit_s = _UNIT_S if self._partly_dead(dead) else _SETTLE_S
            if time.monotonic() - since >= limit_s:
                return
            time.sleep(_SETTLE_S / 20)

    def _partly_dead(self, dead: MPI.Group) -> bool:
        """Whether some replica has lost ranks and still has others."""
        if self.mesh.ranks_per_replica == 1:
            return False
        ranks = dead.Translate_ranks(group=self._everyone)
        lost = Counter(self.mesh.place(rank).replica for rank in ranks)
        held = Counter(self.mesh.place(rank).replica for rank in self.members)
        return any(held[replica] > count for replica, count in lost.items())

    def _vote(self, group: MPI.Intracomm, clean: bool, fingerprint: int) -> bool:
        """One fault-tolerant agreement: a bitwise and over (clean, fingerprint, its complement)."""
        assert self.on_own_thread, "MPI is called by the thread that joined"
        vote = clean and not self._quiesced
        flag = vote | fingerprint << 1 | (fingerprint ^ _FINGERPRINT) << 16
        try:
            flag = group.Agree(flag)
        except MPI.Exception:
            return False
        if (flag >> 1 ^ flag >> 16) & _FINGERPRINT != _FINGERPRINT:
            raise RecoverError(
                "replicas are about to reduce buckets of different sizes or types; "
                "they do not run the same model or the same program"
            )
        return bool(flag & 1)

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Run a raw collective; on any error revoke and quiesce. An error is not an exception."""
        assert self.on_own_thread, "MPI is called by the thread that joined"
        if self._quiesced:
            return False
        try:
            call()
        except MPI.Exception:
            self.quiesce()
            return False
        return True


def _intracomm(group: MPI.Comm) -> MPI.Intracomm:
    """Make errors return instead of ending the job."""
    assert isinstance(group, MPI.Intracomm)
    group.Set_errhandler(MPI.ERRORS_RETURN)
    return group


_joined: list[UlfmTransport] = []


def current() -> UlfmTransport | None:
    """Return the transport of this process, if it has joined."""
    return _joined[0] if _joined else None


def join(mesh: Mesh) -> UlfmTransport:
    """Join the job as the rank that the launcher made this process; once per process.

    Checks what would otherwise go wrong silently: that fault tolerance is active (without it an
    agreement is a plain all-reduce), that the size is as launched, and that a sum is right (some
    collective components give wrong sums across hosts).

    Raises RecoverError naming what is wrong.
    """
    if os.environ.get(_FT_SWITCH) not in ("1", "true"):
        raise RecoverError(
            "fault tolerance (ULFM) is not active in this MPI job; start it with `recover run`, "
            "or with `mpirun --with-ft ulfm` of Open MPI 5"
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)  # "multiple" can deadlock inside a shrink (tcp)
    _intracomm(MPI.COMM_SELF)  # where MPI reports the errors that concern no communicator
    world = _intracomm(MPI.COMM_WORLD)  # not a duplicate: a death inside Dup could hang the others
    if world.Get_size() != mesh.world_size:
        raise RecoverError(
            f"{mesh.replicas} replicas x {mesh.ranks_per_replica} ranks need {mesh.world_size} "
            f"processes, but {world.Get_size()} were started"
        )
    transport = UlfmTransport(world, mesh)
    transport.check_sum()
    _joined.append(transport)
    return transport
