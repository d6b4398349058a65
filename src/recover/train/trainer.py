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
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from recover.core.drive import Driver, drive
from recover.core.effects import Accumulate, AnyEffect, Commit, Detect, NextBucket, Reduce, Snapshot
from recover.core.guard import Member
from recover.core.iteration import JobState, finish, iteration, start
from recover.core.schedule import FaultSchedule, Location
from recover.errors import RecoverError
from recover.faults import load
from recover.launch import rank
from recover.parallel.ddp import BackwardSignal
from recover.records import RecordWriter, StepRecord, config_text, write_config
from recover.tensors.buckets import GradientBuckets
from recover.tensors.replication import ModelCopy
from recover.train.injection import Injector, board_watch
from recover.train.job import Job
from recover.train.performer import Buckets, Performer
from recover.train.report import event_records, run_settings, step_record
from recover.train.source import Data, IndexedSource, StreamSource, source_of
from recover.train.stopwatch import Stopwatch

M = TypeVar("M")
_NO_STEP = -1


class Trainer:
    """Runs committed steps of ``model`` and ``optimizer`` as one replica of ``job``.

    ``model`` is any module, or a ``DistributedDataParallel`` over ``job.process_group``.
    ``clip_norm`` clips the gradient by its global norm before the optimizer's step.
    ``bucket_mb`` bounds a gradient bucket (MiB of fp32). ``in_place`` reduces in the accumulators
    and keeps real snapshots: the same memory, and one copy more per step. ``config`` is added to
    the run's ``config.yaml``.

    Raises ValueError for a wrong setting.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        bucket_mb: float = 25.0,
        in_place: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm}")
        self.job, self.model, self.optimizer = job, model, optimizer
        self.clip_norm = clip_norm
        self.buckets = GradientBuckets(
            model.parameters(), bucket_bytes=int(bucket_mb * 2**20), in_place=in_place
        )
        self.signal = BackwardSignal(model, self.buckets, lambda: job.process_group)
        self.injector = _injector(job)
        self.writer = RecordWriter(job.out, job.replica)
        self._config = dict(config or {}) | {"bucket_mb": bucket_mb, "in_place": in_place}
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
            if self.job.replica == min(state.survivors):
                write_config(self.job.out, self._config)
            _show_progress(state.step, until)
            step: Step[M] = Step(self, state, source, last=state.step == until - 1)
            yield step
            state = step.result()
        self._finish(state, until)

    def _start(self, state: JobState, until: int) -> JobState:
        """Compare what must be equal and copy the lowest replica's model to the others."""
        settings = (self.buckets.layout, self.job.rules, type(state.data).__name__, until)
        copy = ModelCopy((*self.model.parameters(), *self.model.buffers()))
        state = self._run(_member(self.job, repr(settings)), state, copy, ending=False)
        copy.adopt()
        return state

    def _finish(self, state: JobState, until: int) -> None:
        """Agree that everybody is done and that all survivors hold the same parameters."""
        checksum = parameter_checksum(self.model)
        flushed: tuple[int, ...] = ()
        while True:  # ends: each further round has lost a replica, perhaps the one that writes
            state = self._run(_member(self.job, checksum), state, self.buckets, ending=True)
            if state.survivors == flushed:
                break
            flushed = state.survivors
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


class Step(Generic[M]):
    """One iteration on this replica: iterate over it, ``backward`` each microbatch, ``commit``."""

    def __init__(
        self,
        trainer: Trainer,
        state: JobState,
        source: IndexedSource | StreamSource,
        *,
        last: bool,
    ) -> None:
        self.number = state.step
        self._last = last
        self._trainer, self._source = trainer, source
        self._watch = Stopwatch()
        self._injector = trainer.injector
        self._injector.step = state.step
        self._performer = Performer(
            trainer.job.transport, trainer.buckets, trainer.injector, self._watch
        )
        self._driver = Driver(iteration(trainer.job.member, trainer.job.rules, state))
        self._open: int | None = None  # the microbatch that backward is due for
        self._halfway = False  # whether some but not all microbatches in hand were yielded
        self._record: StepRecord | None = None
        trainer.buckets.begin()

    def __iter__(self) -> Iterator[M]:
        """Yield this replica's microbatches; after a failure more of them may follow."""
        while isinstance(effect := self._advance(), Accumulate):
            if self._halfway:
                raise RecoverError(
                    f"step {self.number}: its loop was left early and begun again, so microbatches "
                    "would count twice; go through a step once, to its end"
                )
            if effect.extra:
                self._watch.extra_begins()
            for index, microbatch_id in enumerate(effect.ids):
                last = index == len(effect.ids) - 1
                microbatch = self._fetch(microbatch_id, index, extra=effect.extra)
                self._trainer.signal.expect(self._complete if last and not effect.extra else None)
                if last:
                    self._answer(None)
                self._open, self._halfway = microbatch_id, not last
                yield microbatch
                self._require_backward()

    def backward(self, loss: Tensor, *, tokens: int = 0) -> None:
        """Add the gradient of ``loss``, a scalar, to this replica's sum.

        ``tokens`` is only recorded. Call it once for every microbatch.
        """
        if self._open is None:
            raise RecoverError(f"step {self.number}: backward was called without a microbatch")
        buckets = self._trainer.buckets
        buckets.before_backward()
        buckets.add_loss(loss)
        buckets.add_tokens(tokens)
        if self._injector.schedule.faults:
            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda _: self._injector.at(Location.BACKWARD)
            )
        self._open = None
        loss.backward()  # type: ignore[no-untyped-call]
        self._trainer.signal.after_backward()

    def commit(self) -> StepRecord:
        """Step the optimizer with the agreed gradient and return the record of this step."""
        self._require_backward()
        effect = self._advance()
        if not isinstance(effect, Commit):
            raise RecoverError(
                f"step {self.number}: commit was called before all microbatches of the step ran; "
                "iterate over the step to its end"
            )
        trainer, facts = self._trainer, effect.facts
        self._injector.at(Location.OPTIMIZER)
        totals = trainer.buckets.publish(facts.divisor, trainer.clip_norm)
        trainer.optimizer.step()
        self._answer(None)
        mine = facts.plan[trainer.job.replica]
        self._source.committed(mine.ids if mine.admitted else ())
        wall_s = self._watch.committed()
        self._record = step_record(
            facts,
            totals,
            self._watch,
            wall_s=wall_s,
            time=time.time(),
            checksum=parameter_checksum(trainer.model) if self._last else None,
        )
        events = event_records(facts, self._watch, time.time())
        trainer.writer.commit(self._record, facts.survivors, events)
        return self._record

    def result(self) -> JobState:
        """Return the state that the next step starts from.

        Raises RecoverError if this step was not committed: none is ever skipped silently.
        """
        if not self._driver.done:
            raise RecoverError(f"step {self.number} was left without a commit")
        return self._driver.result

    # --- driving the protocol ------------------------------------------------------------

    def _advance(self) -> AnyEffect | None:
        """Answer effects until the protocol asks for something that the user's loop does."""
        while not self._driver.done:
            effect = cast(AnyEffect, self._driver.pending)
            if isinstance(effect, Accumulate | Commit):
                return effect
            self._driver.answer(self._performer.perform(effect))
        return None

    def _complete(self, buckets: int) -> None:
        """Go on reducing from inside backward, as far as the first ``buckets`` buckets reach."""
        if self._trainer.buckets.in_place or not self._trainer.job.transport.on_own_thread:
            return  # DDP still reads the gradients, or this is autograd's thread: reduce afterwards
        while True:
            effect = cast(AnyEffect, self._driver.pending)
            ready = isinstance(effect, NextBucket) and self._performer.next_bucket < buckets
            if not (ready or isinstance(effect, Snapshot | Detect | Reduce)):
                return
            self._driver.answer(self._performer.perform(effect))

    def _answer(self, outcome: object) -> None:
        effect = cast(AnyEffect, self._driver.pending)
        self._watch.measure(effect, outcome, time.perf_counter())
        self._driver.answer(outcome)

    def _fetch(self, microbatch_id: int, index: int, *, extra: bool) -> M:
        slot = rank.board()
        if slot is not None:
            slot.beat("extra" if extra else "compute")
        self._injector.at(Location.EXTRA if extra else Location.DATA)
        microbatch = cast(M, self._source.fetch(microbatch_id))
        if not extra:
            self._injector.at(Location.MICROBATCH, microbatch=index)
        return microbatch

    def _require_backward(self) -> None:
        if self._open is not None:
            raise RecoverError(
                f"step {self.number}: microbatch {self._open} was not given to step.backward; "
                "its gradient would be missing from the sum"
            )


def parameter_checksum(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, byte for byte, in order.

    Buffers are left out: running statistics, such as batch norm's, are each replica's own.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
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
