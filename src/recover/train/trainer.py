"""The training loop: plugs the protocol, the transport and the gradients together. Layer: train.

    job = recover.init(microbatches=32)
    trainer = recover.Trainer(job, model, optimizer)
    for step in trainer.steps(data, until=10_000):
        for microbatch in step:
            step.backward(model(microbatch))
        record = step.commit()

The inner loop runs this replica's share. Reduction, repair and restoration happen when it asks for
the next microbatch; what a failure leaves to be done comes out of the same loop as more of them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from recover.core.drive import drive
from recover.core.effects import AnyEffect
from recover.core.guard import Member
from recover.core.iteration import JobState, finish, start
from recover.core.schedule import FaultSchedule
from recover.errors import RecoverError
from recover.faults import load
from recover.launch import rank
from recover.parallel.ddp import BackwardSignal
from recover.parallel.overlap import CompletionSignal
from recover.parallel.replica import ReplicaSum
from recover.parallel.stack import Stack
from recover.parallel.tied import Tied
from recover.records import RecordWriter, config_text, write_config
from recover.tensors.buckets import GradientBuckets
from recover.tensors.holders import Holder, local
from recover.tensors.replication import ModelCopy
from recover.train.emulation import Device
from recover.train.injection import Injector, board_watch
from recover.train.job import Job
from recover.train.performer import Buckets, Performer
from recover.train.report import run_settings
from recover.train.source import Data, source_of
from recover.train.step import Step
from recover.train.stopwatch import Stopwatch

M = TypeVar("M")
_NO_STEP = -1


class Trainer:
    """Runs committed steps of ``model`` and ``optimizer`` as one rank of a replica of ``job``.

    ``model`` is any module: plain, a ``DistributedDataParallel`` over ``job.process_group``, or
    parallel inside the replica by FSDP1, FSDP2 or DTensor; or a list of modules, the pipeline
    stages of this rank, which name their parameters as the whole model does. Without an
    ``optimizer`` (None) the caller steps one after each commit.

    ``clip_norm`` clips the gradient by its global norm before the optimizer's step.
    ``bucket_mb`` bounds a gradient bucket (MiB of fp32). ``in_place`` reduces in the accumulators
    and keeps real snapshots: the same memory, and one copy more per step. ``overlap`` runs the last
    planned backward pass of a step on another thread and reduces buckets as they become complete;
    for models on a CPU, reduced out of place and not under DDP. ``tied`` names parameters that
    several ranks of the replica hold. ``holders`` replaces the gradients that are found in the
    model, for a stack that keeps them elsewhere. ``config`` is added to the run's ``config.yaml``.

    Raises ValueError for a wrong setting.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        *,
        clip_norm: float | None = None,
        bucket_mb: float = 25.0,
        in_place: bool = False,
        overlap: bool = False,
        tied: Sequence[Tied] = (),
        holders: Mapping[str, Holder] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        self.job, self.optimizer, self.clip_norm = job, optimizer, clip_norm
        self.stack = Stack(model)
        self.stack.keep_inside(lambda: job.process_group)
        gradients = holders if holders is not None else self.stack.holders()
        self.buckets = GradientBuckets(
            gradients.values(),
            bucket_bytes=int(bucket_mb * 2**20),
            in_place=in_place,
            eager=self.stack.ddp is None,
        )
        self.signal = (
            CompletionSignal(self.buckets)
            if overlap
            else BackwardSignal(self.stack.ddp, self.buckets, lambda: job.process_group)
        )
        if overlap:
            self._require_overlap_possible()
        self.beside = ThreadPoolExecutor(1, "recover-backward") if overlap else None
        """Where the last backward pass of a step runs, so that this thread can reduce."""
        self.replica_sum = ReplicaSum(self.buckets, gradients, tied)
        self.injector = _injector(job)
        self.injector.watch(self.stack.parts)
        self.writer = RecordWriter(job.out, job.replica) if job.shard == 0 else None
        """Writes the records; on the first rank of each replica."""
        self.device = Device()
        """What reductions take on an emulated network; none is emulated by default."""
        self._config = dict(config or {}) | {
            "bucket_mb": bucket_mb,
            "in_place": in_place,
            "overlap": overlap,
        }
        config_text(self._config)  # what cannot be written is found now
        self._started = False

    def steps(self, data: Data[M], *, until: int) -> "Iterator[Step[M]]":
        """Yield steps 0 to ``until`` - 1; each must be committed before the next is asked for.

        ``data`` is addressed by microbatch id where it has ``__getitem__`` (each id is committed
        once over the run, by whichever replica), or else it is this replica's own endless stream.
        The loop ends on all survivors together, with equal parameters.

        Raises RecoverError where a step is left uncommitted or replicas are found to differ.
        """
        if until < 1:
            raise ValueError(f"until must be at least 1, got {until}")
        if self._started:
            raise RecoverError("a trainer runs its steps once; construct another one")
        self._started = True
        source = source_of(data)
        state = JobState(self.job.mesh.everyone(), source.ledger(self.job.replicas))
        state = self._start(state, until)
        self._config |= run_settings(self.job, state, until)
        while state.step < until:
            if self.writer is not None and self.job.replica == min(state.survivors):
                write_config(self.job.out, self._config)
            _show_progress(state.step, until)
            step: Step[M] = Step(self, state, source, last=state.step == until - 1)
            yield step
            state = step.result()
        self._finish(state, until)

    def checksum(self) -> str:
        """Return a digest of the replica's parameters; called by all its ranks."""
        own = parameter_checksum(self.stack)
        if self.job.ranks_per_replica == 1:
            return own
        return hashlib.sha256(self.replica_sum.digest(own).encode()).hexdigest()

    def _require_overlap_possible(self) -> None:
        if self.buckets.in_place:
            raise ValueError("overlap=True needs in_place=False: backward still adds to buckets")
        if self.buckets.device.type != "cpu":
            raise ValueError(f"overlap=True is for models on a CPU, not {self.buckets.device}")
        if self.stack.ddp is not None:
            raise ValueError(
                "overlap=True is for models without DistributedDataParallel, which reduces by "
                "itself during backward; give the Trainer the module that is inside"
            )

    def _start(self, state: JobState, until: int) -> JobState:
        """Compare what must be equal and copy the lowest replica's model to the others."""
        settings = (self.buckets.layout, self.job.rules, type(state.data).__name__, until)
        copy = ModelCopy(self.stack.state())
        state = self._run(_member(self.job, repr(settings)), state, copy, ending=False)
        copy.adopt()
        return state

    def _finish(self, state: JobState, until: int) -> None:
        """Agree that everybody is done and that all survivors hold the same parameters."""
        checksum = parameter_checksum(self.stack)
        flushed: tuple[int, ...] = ()
        while True:  # ends: each further round has lost a replica, perhaps the one that writes
            state = self._run(_member(self.job, checksum), state, self.buckets, ending=True)
            if state.survivors == flushed:
                break
            flushed = state.survivors
            if self.writer is not None:
                self.writer.flush_final(flushed)
        print(f"recover: finished step {until - 1}, parameters sha256 {checksum}", flush=True)
        rank.note_end("finished", f"parameters sha256 {checksum}", state.step)

    def _run(self, member: Member, state: JobState, buckets: Buckets, *, ending: bool) -> JobState:
        self.injector.step = _NO_STEP  # what is scheduled for a step happens in that step
        performer = Performer(self.job.transport, buckets, self.injector, Stopwatch())
        protocol = (finish if ending else start)(member, state)

        def perform(effect: object) -> object:
            return performer.perform(cast(AnyEffect, effect))

        return drive(protocol, perform)


def parameter_checksum(stack: Stack) -> str:
    """Return the SHA-256 of all that this rank holds of the parameters, byte for byte, in order.

    Buffers are left out: running statistics, such as batch norm's, are each replica's own.
    """
    digest = hashlib.sha256()
    for parameter in stack.parameters():
        flat = local(parameter).cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


def _member(job: Job, told: str) -> Member:
    """Return this rank with a 63-bit fingerprint of ``told``."""
    digest = hashlib.sha256(told.encode()).digest()
    return replace(job.member, fingerprint=int.from_bytes(digest[:8], "big") >> 1)


def _injector(job: Job) -> Injector:
    schedule = FaultSchedule(()) if job.faults is None else load(Path(job.faults), job.mesh)
    injector = Injector(schedule, job.transport.place, lambda reason: rank.die("injected", reason))
    slot = rank.board()
    if slot is not None:
        injector.others_inside = board_watch(slot, job.transport)
    return injector


def _show_progress(step: int, until: int) -> None:
    slot = rank.board()
    if slot is not None:
        slot.progress(step=step, until=until)
