"""One iteration of one replica, driven by the user's loop. Layer: train.

A :class:`Step` runs the protocol's ``iteration`` up to the next thing that only the training loop
can do, and turns that into an item of a loop: a microbatch, or for pipelines a whole pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from torch import Tensor

from recover.core.drive import Driver
from recover.core.effects import Accumulate, AnyEffect, Commit, Detect, NextBucket, Reduce, Snapshot
from recover.core.iteration import JobState, iteration
from recover.core.schedule import Location
from recover.errors import RecoverError
from recover.launch import rank
from recover.records import StepRecord
from recover.tensors.buckets import Clip
from recover.train.performer import Performer
from recover.train.report import event_records, step_record
from recover.train.source import IndexedSource, StreamSource
from recover.train.stopwatch import Stopwatch

if TYPE_CHECKING:
    from recover.train.trainer import Trainer

M = TypeVar("M")


class Step(Generic[M]):
    """One iteration on this replica.

    Iterate over it and give each microbatch's loss to ``backward``; or iterate over ``passes`` and
    tell each with ``ran``. Then ``commit``.
    """

    def __init__(
        self,
        trainer: "Trainer",
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
            trainer.job.transport, trainer.buckets, trainer.injector, self._watch, trainer.device
        )
        self._driver = Driver(iteration(trainer.job.member, trainer.job.rules, state))
        self._open: int | None = None  # the microbatch that backward is due for
        self._halfway = False  # whether some but not all microbatches in hand were yielded
        self._ready: SimpleQueue[int | None] | None = None  # where backward runs on another thread
        self._record: StepRecord | None = None
        trainer.buckets.begin()

    def __iter__(self) -> Iterator[M]:
        """Yield this replica's microbatches; after a failure more of them may follow."""
        while isinstance(effect := self._advance(), Accumulate):
            self._begin(effect)
            for index, microbatch_id in enumerate(effect.ids):
                last = index == len(effect.ids) - 1
                microbatch = self._fetch(microbatch_id, index, extra=effect.extra)
                self._trainer.signal.expect(self._on_complete(last and not effect.extra))
                if last:
                    self._answer(None)
                self._open, self._halfway = microbatch_id, not last
                yield microbatch
                self._require_backward()

    def passes(self) -> Iterator[list[M]]:
        """Yield all microbatches of a pass at once, for a pipeline that runs them together.

        The first pass is this replica's share; after a failure another, shorter one may follow. The
        caller runs forward and backward of all of them, then tells so with :meth:`ran`.
        """
        while isinstance(effect := self._advance(), Accumulate):
            self._begin(effect)
            pass_ = [
                self._fetch(microbatch_id, index, extra=effect.extra)
                for index, microbatch_id in enumerate(effect.ids)
            ]
            self._trainer.signal.expect(self._on_complete(False))
            self._trainer.buckets.before_backward()
            self._answer(None)
            self._open = effect.ids[0]
            self._trainer.injector.in_pass = True
            yield pass_
            self._trainer.injector.in_pass = False
            self._require_backward()

    def ran(self, losses: Sequence[Tensor] = (), *, tokens: int = 0) -> None:
        """Say that forward and backward of a pass have run.

        ``losses`` are scalars, one for each microbatch, on the ranks that have them: those of a
        pipeline's last stage. ``tokens``, of the whole pass, is only recorded.
        """
        if self._open is None:
            raise RecoverError(f"step {self.number}: ran was called without a pass")
        buckets = self._trainer.buckets
        for loss in losses:
            buckets.add_loss(loss)
        buckets.add_tokens(tokens)
        self._open = None
        self._trainer.signal.after_backward()

    def backward(self, loss: Tensor, *, tokens: int = 0) -> None:
        """Add the gradient of ``loss``, a scalar, to this replica's sum.

        ``tokens``, of the replica's whole microbatch, is only recorded. Call it once for every
        microbatch, on every rank of the replica.
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
        if self._ready is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward_beside_reductions(loss, self._ready)
        self._trainer.signal.after_backward()

    def commit(self) -> StepRecord:
        """Step the optimizer with the agreed gradient and return the record of this step.

        A trainer without an optimizer leaves that to the caller: the reduced gradient, divided by B
        (and clipped), is in ``param.grad`` until the next step begins.
        """
        self._require_backward()
        effect = self._advance()
        if not isinstance(effect, Commit):
            raise RecoverError(
                f"step {self.number}: commit was called before all microbatches of the step ran; "
                "iterate over the step to its end"
            )
        trainer, facts = self._trainer, effect.facts
        self._injector.at(Location.OPTIMIZER)
        trainer.replica_sum.sum_tied()
        clipped = trainer.clip_norm is not None
        totals, square_sum = trainer.replica_sum.agree(norm=clipped)
        clip = None if trainer.clip_norm is None else Clip(trainer.clip_norm, square_sum)
        trainer.buckets.publish(facts.divisor, clip)
        if trainer.optimizer is not None:
            trainer.optimizer.step()
        self._answer(None)
        mine = facts.plan[trainer.job.replica]
        self._source.committed(mine.ids if mine.admitted else ())
        wall_s = self._watch.committed()
        ended = self._last and trainer.optimizer is not None  # else the caller steps it later
        self._record = step_record(
            facts,
            totals,
            self._watch,
            wall_s=wall_s,
            time=time.time(),
            checksum=trainer.checksum() if ended else None,
        )
        if trainer.writer is not None:
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

    def _begin(self, effect: Accumulate) -> None:
        if self._halfway:
            raise RecoverError(
                f"step {self.number}: its loop was left early and begun again, so microbatches "
                "would count twice; go through a step once, to its end"
            )
        if effect.extra:
            self._watch.extra_begins()

    def _advance(self) -> AnyEffect | None:
        """Answer effects until the protocol asks for something that the user's loop does."""
        while not self._driver.done:
            effect = cast(AnyEffect, self._driver.pending)
            if isinstance(effect, Accumulate | Commit):
                return effect
            self._driver.answer(self._performer.perform(effect))
        return None

    def _on_complete(self, synchronise: bool) -> Callable[[int], None] | None:
        """Return whom to tell how many buckets are complete while the next backward pass runs."""
        overlap = synchronise and self._trainer.beside is not None
        self._ready = SimpleQueue() if overlap else None
        if self._ready is not None:
            return self._ready.put
        return self._complete if synchronise else None

    def _backward_beside_reductions(self, loss: Tensor, ready: "SimpleQueue[int | None]") -> None:
        """Run backward on the other thread; on this one, which may call MPI, reduce meanwhile."""
        assert self._trainer.beside is not None
        backward = self._trainer.beside.submit(loss.backward)
        backward.add_done_callback(lambda _: ready.put(None))
        while (buckets := ready.get()) is not None:
            self._complete(buckets)
        backward.result()

    def _complete(self, buckets: int) -> None:
        """Go on reducing during backward, as far as the first ``buckets`` buckets reach."""
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
