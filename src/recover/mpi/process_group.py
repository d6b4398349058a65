"""The transport as a torch process group, backend ``"ulfm"``. Layer: mpi. Paper: C, D.1.

Theory of operation
-------------------
Every collective is guarded by the four phases of Algorithm 2. *Detect* is uniform: all members go
on to move data, or none does. When it says no, a group that stands alone goes through *Repair* and
*Record* and returns the record in its work; the call moved no data, and rank() and size() have
changed. When *Reduce* (or a copy) fails here, that is only this rank's view: the work says so, and
the next guarded call makes it common knowledge. Each call detects as often on every member,
whatever happened to it, so that the members never meet in different calls.

A group that is *held* repairs nothing: the owner of the iteration does, at its verdict. Until then
the group is quiet, and every call is a no-op that returns a failed work.

A failed call does not raise: an exception in a hook would leave DDP's reducer unusable. Its output
is undefined. Errors of the caller do raise.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from recover.core.drive import drive
from recover.core.effects import Agree, AnyEffect, Census, Regroup, Shrink
from recover.core.guard import Member, repair
from recover.core.workload import Share
from recover.errors import RecoverError
from recover.mpi.performer import perform_membership
from recover.mpi.transport import ElementType, Operation, Span, UlfmTransport, current
from recover.mpi.work import FailureRecord, WorkUlfm

BACKEND = "ulfm"

_ELEMENTS = {
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
    torch.int64: ElementType.INT64,
    torch.int32: ElementType.INT32,
    torch.uint8: ElementType.BYTE,
}
_COMPUTED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.int8: torch.int32,
    torch.bool: torch.int32,
}
_OPERATIONS = (
    (dist.ReduceOp.SUM, Operation.SUM),
    (dist.ReduceOp.AVG, Operation.SUM),
    (dist.ReduceOp.MAX, Operation.MAX),
    (dist.ReduceOp.MIN, Operation.MIN),
)
_NOTHING = Span(0, 0, ElementType.BYTE)


@dataclass(frozen=True, slots=True)
class _Move:
    """One data motion inside a guarded call."""

    span: Span
    """What the members' detection compares."""
    run: Callable[[], bool]
    """Moves the data; returns whether that worked here."""


class ProcessGroupUlfm(dist.ProcessGroup):
    """The cross-replica group; a ``held`` one leaves the repair to its owner."""

    def __init__(self, transport: UlfmTransport, *, held: bool = False) -> None:
        if transport.mesh.ranks_per_replica > 1 and not held:
            raise ValueError(
                "a process group repairs by itself only replicas of one rank, these have "
                f"{transport.mesh.ranks_per_replica}: a verdict over one shard is none over the job"
            )
        super().__init__(transport.cross_rank, transport.cross_size)  # type: ignore[call-arg]
        self.held = held
        self._transport = transport
        self._quiet_epoch: int | None = None

    # --- identity ------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank's position among the current members."""
        return self._transport.cross_rank

    def size(self) -> int:
        """Return the number of current members."""
        return self._transport.cross_size

    getRank, getSize = rank, size  # the names that C++ calls

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    getBackendName = name

    @property
    def epoch(self) -> int:
        """World epoch: repairs so far."""
        return self._transport.epoch

    # --- failure handling ----------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether collectives are no-ops; a repair ends it."""
        return self._quiet_epoch == self._transport.epoch

    def set_quiesce(self, quiet: bool) -> None:
        """Make collectives no-ops, or end that; the same on all members."""
        self._quiet_epoch = self._transport.epoch if quiet else None

    def ulfm_allreduce(self, tensor: Tensor) -> WorkUlfm:
        """Sum ``tensor`` over the group, in place (Algorithm 2)."""
        return self.allreduce([tensor])

    def ulfm_consensus(self) -> WorkUlfm:
        """Turn what each member saw into one verdict (Algorithm 3: phases 1 to 3)."""
        self._require_own_thread()
        return self._work([], clean=True) if self._transport.agree(True) else self._failure([])

    def _guarded(self, tensors: list[Tensor], moves: Iterable[_Move]) -> WorkUlfm:
        self._require_own_thread()
        if self.quiet:
            return self._work(tensors, clean=False)
        clean = True
        for move in moves:
            if not self._transport.detect(clean, move.span):
                return self._failure(tensors)
            clean = not move.span.count or move.run()
        return self._work(tensors, clean=clean)

    def _failure(self, tensors: list[Tensor]) -> WorkUlfm:
        if self.held:
            self._transport.quiesce()
            self.set_quiesce(True)
            return self._work(tensors, clean=False)
        member = Member(self._transport.place, self._transport.mesh)
        protocol = repair(member, Share(0, admitted=False), self._transport.replicas)
        membership = drive(protocol, self._perform)
        record = FailureRecord(membership.epoch, membership.survivors, membership.dead_ranks)
        return self._work(tensors, clean=False, record=record)

    def _perform(self, effect: AnyEffect) -> object:
        assert isinstance(effect, Agree | Shrink | Census | Regroup), "one rank is never condemned"
        return perform_membership(self._transport, effect)

    def _work(
        self, tensors: list[Tensor], *, clean: bool, record: FailureRecord | None = None
    ) -> WorkUlfm:
        return WorkUlfm(tensors, epoch=self.epoch, failed=not clean, record=record)

    def _require_own_thread(self) -> None:
        assert self._transport.on_own_thread, (
            "the ulfm process group is used by the thread that joined the job; "
            "a backward pass on a CUDA device calls hooks from another one"
        )

    # --- collectives that combine --------------------------------------------------------

    @torch.no_grad()
    def allreduce(  # type: ignore[override]
        self, tensors: Tensor | list[Tensor], opts: object = dist.ReduceOp.SUM
    ) -> WorkUlfm:
        """Combine each tensor over the group, in place: SUM, AVG, MAX or MIN."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._guarded(tensors, [self._combine(t, t, opts) for t in tensors])

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: list[Tensor], opts: "dist.ReduceOptions") -> WorkUlfm:  # type: ignore[override]
        """Combine into the root's tensor; the others keep theirs."""
        root = self._is_root(opts)
        moves = [self._combine(t.clone(), t if root else None, opts) for t in tensors]
        return self._guarded(tensors, moves)

    def barrier(self, opts: object = None) -> WorkUlfm:
        """Wait for all members."""
        return self._guarded([], [_Move(_NOTHING, lambda: True)])

    def _combine(self, source: Tensor, target: Tensor | None, opts: object) -> _Move:
        wanted = getattr(opts, "reduceOp", opts)
        operation = next((ours for theirs, ours in _OPERATIONS if wanted == theirs), None)
        average = wanted == dist.ReduceOp.AVG
        host = _on_host(source, _COMPUTED_AS.get(source.dtype, source.dtype))
        element = _ELEMENTS.get(host.dtype)
        if not operation or not element or (average and not host.is_floating_point()):
            raise RecoverError(f"the ulfm process group cannot combine {source.dtype} by {wanted}")
        span = Span(host.data_ptr(), host.numel(), element)

        def run() -> bool:
            if not self._transport.reduce(None, span, operation=operation):
                return False
            if average:
                host.div_(self.size())
            _copy_back(host, target)
            return True

        return _Move(span, run)

    # --- collectives that copy -----------------------------------------------------------

    @torch.no_grad()
    def broadcast(self, tensors: list[Tensor], opts: "dist.BroadcastOptions") -> WorkUlfm:  # type: ignore[override]
        """Copy the root's tensors to all members."""
        self._is_root(opts)

        def move(tensor: Tensor) -> _Move:
            host = _on_host(tensor, tensor.dtype)
            span = _bytes(host)

            def run() -> bool:
                if not self._transport.broadcast(span, opts.rootRank):
                    return False
                _copy_back(host, tensor)
                return True

            return _Move(span, run)

        return self._guarded(tensors, [move(t) for t in tensors])

    @torch.no_grad()
    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> WorkUlfm:
        """Copy every member's input to all, in rank order.

        Where that fails every output is this rank's own input, so that code which compares the
        members, as DDP's constructor does, finds them equal and leaves the failure to the verdict.
        """

        def move(places: list[Tensor], tensor: Tensor) -> _Move:
            if len(places) != self.size():
                raise ValueError(f"{len(places)} outputs for a group of {self.size()} members")
            host = _on_host(tensor, tensor.dtype)
            rows = torch.empty((self.size(), *host.shape), dtype=host.dtype)  # (member, ...)
            span = _bytes(host)
            for place in places:
                place.copy_(tensor)

            def run() -> bool:
                everything = Span(rows.data_ptr(), span.count * self.size(), span.type)
                if not self._transport.gather(span, everything):
                    return False
                for place, row in zip(places, rows, strict=True):
                    place.copy_(row)
                return True

            return _Move(span, run)

        moves = [move(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._guarded([t for places in outputs for t in places], moves)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> WorkUlfm:
        """Copy every member's input to all, one after the other in ``output``."""
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: object = None
    ) -> WorkUlfm:
        """Do the same for several tensors."""
        pairs = zip(output_lists, input_list, strict=True)
        rows = [list(o.view(self.size(), *i.shape)) for o, i in pairs]
        return self.allgather(rows, input_list)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _is_root(self, opts: "dist.BroadcastOptions | dist.ReduceOptions") -> bool:
        if not 0 <= opts.rootRank < self.size():
            raise ValueError(f"root {opts.rootRank} is outside a group of {self.size()} members")
        return bool(opts.rootRank == self.rank())


def _refuse(name: str) -> Callable[..., Work]:
    def refuse(self: ProcessGroupUlfm, *args: object, **options: object) -> Work:
        raise RecoverError(
            f"the ulfm process group has no {name}: it carries gradients between replicas; "
            "use a gloo or NCCL group for what happens inside a replica"
        )

    return refuse


_ABSENT = """
    gather scatter reduce_scatter reduce_scatter_single _reduce_scatter_base
    reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced allgather_coalesced
    all_to_all_single alltoall_base alltoall send recv recv_anysource
"""
for _name in _ABSENT.split():
    setattr(ProcessGroupUlfm, _name, _refuse(_name))


def _on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor itself where MPI can read and write it, a copy otherwise."""
    if tensor.layout is not torch.strided:
        raise RecoverError(f"the ulfm process group moves dense tensors, not {tensor.layout}")
    if tensor.device.type == "cpu":
        return tensor.detach().to(dtype).contiguous()
    pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return pinned.copy_(tensor)  # returns when the data is there


def _copy_back(host: Tensor, target: Tensor | None) -> None:
    if target is not None and target.data_ptr() != host.data_ptr():
        target.copy_(host)


def _bytes(host: Tensor) -> Span:
    """Return the span of a tensor whose type does not matter, in as few elements as possible."""
    size = host.numel() * host.element_size()
    kind = ElementType.BYTE if size % 8 else ElementType.INT64
    return Span(host.data_ptr(), size // kind.size, kind)


def register() -> None:
    """Make ``torch.distributed.init_process_group("ulfm", ...)`` work; safe to call again."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def held_group(transport: UlfmTransport) -> ProcessGroupUlfm:
    """Return the one group of ``transport``; from now on its caller repairs it."""
    group = _group(transport)
    group.held = True
    return group


@functools.cache
def _group(transport: UlfmTransport) -> ProcessGroupUlfm:
    return ProcessGroupUlfm(transport, held=transport.mesh.ranks_per_replica > 1)


def _create(_store: object, rank: int, size: int, _timeout: timedelta) -> ProcessGroupUlfm:
    transport = current()
    if transport is None:
        raise RecoverError("the ulfm backend needs a job: start the script with `recover run`")
    if (rank, size) != (transport.cross_rank, transport.cross_size):
        raise RecoverError(
            f"the ulfm backend spans all replicas: this is rank {transport.cross_rank} of "
            f"{transport.cross_size}, not {rank} of {size}; subgroups are not possible"
        )
    return _group(transport)
