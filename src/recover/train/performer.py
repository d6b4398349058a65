"""Answers the protocol's effects with real communicators and real tensors. Layer: train.

Every effect but three is answered here; the training loop itself answers ``Accumulate`` (it runs
the microbatches), ``NextBucket`` where gradients may still be on their way, and ``Commit``.
"""

import time
from typing import NoReturn, Protocol

from recover.core.effects import (
    Agree,
    AnyEffect,
    Census,
    Detect,
    Discard,
    Leave,
    NextBucket,
    Recovered,
    Reduce,
    Regroup,
    Restore,
    Shrink,
    Snapshot,
)
from recover.core.policies import RestoreMode
from recover.core.schedule import Location
from recover.launch import note, rank
from recover.mpi import performer as mpi
from recover.mpi.transport import UlfmTransport
from recover.train.emulation import Device
from recover.train.injection import Injector, inside
from recover.train.stopwatch import Stopwatch

_WAITS = (Detect, Reduce, Agree, Shrink, Census, Regroup)


class Buckets(mpi.Buckets, Protocol):
    """What is being reduced: gradients during training, parameters at the start."""

    def __len__(self) -> int: ...
    def snapshot(self, bucket: int) -> None: ...
    def restore(self, buckets: tuple[int, ...], mode: RestoreMode) -> None: ...
    def discard(self) -> None: ...
    def received(self, bucket: int) -> None: ...


class Performer:
    """Answers effects for one iteration, or for the start or the end of the job."""

    def __init__(
        self,
        transport: UlfmTransport,
        buckets: Buckets,
        injector: Injector,
        watch: Stopwatch,
        device: Device | None = None,
    ) -> None:
        self._transport, self._device = transport, device
        self._collective = mpi.CollectivePerformer(transport, buckets)
        self._buckets = buckets
        self._injector, self._watch = injector, watch
        self._board = rank.board()
        self._next_bucket = 0
        self._repairing = False

    def perform(self, effect: AnyEffect) -> object:
        """Answer one effect and account for its time."""
        started_at = time.perf_counter()
        outcome = self._answer(effect)
        if isinstance(effect, _WAITS):
            self._beat("compute")  # a rank that is slow from here on waits for nobody
        self._watch.measure(effect, outcome, started_at)
        return outcome

    @property
    def next_bucket(self) -> int:
        """The bucket that the next ``NextBucket`` will name, or the number of buckets."""
        return self._next_bucket

    def _answer(self, effect: AnyEffect) -> object:
        match effect:
            case NextBucket():
                return self._advance()
            case Snapshot(bucket):
                self._buckets.snapshot(bucket)
                return None
            case Detect():
                self._beat("collective detect")
                return self._collective(effect)
            case Reduce():
                return self._reduce(effect)
            case Agree():
                return self._agree(effect)
            case Shrink():
                self._repairing = True
                self._beat("repair shrink")
                return self._collective(effect)
            case Census():
                if self._repairing:
                    self._injector.at(Location.REPAIR)
                self._beat("repair census")
                return self._collective(effect)
            case Regroup():
                self._beat("repair regroup")
                return self._collective(effect)
            case Recovered():
                self._repairing = False
                return None
            case Restore(buckets, mode):
                self._injector.at(Location.RESTORE)
                self._buckets.restore(buckets, mode)
                return None
            case Discard():
                self._injector.at(Location.RESTORE)
                self._buckets.discard()
                return None
            case Leave(reason):
                self._leave(reason)
        raise AssertionError(f"no answer to {effect}")

    def _advance(self) -> int | None:
        if self._next_bucket == len(self._buckets):
            return None
        self._next_bucket += 1
        return self._next_bucket - 1

    def _reduce(self, effect: Reduce) -> bool:
        # From here on this rank shows itself inside the collective: a rank that is to die in it
        # waits for that, and its own part never arrives.
        self._beat(inside(effect.bucket))
        self._injector.at(Location.REDUCE, bucket=effect.bucket)
        if self._device is not None:
            span = self._buckets.receive(effect.bucket)
            self._device.transfer(span.nbytes, self._transport.cross_size)
        done = bool(self._collective(effect))
        if done:
            self._buckets.received(effect.bucket)
        if self._device is not None:
            self._device.settle(done=done)
        return done

    def _agree(self, effect: Agree) -> bool:
        if not self._repairing:
            self._next_bucket = 0
            self._injector.at(Location.CONSENSUS)
        self._beat("collective agree")
        return bool(self._collective(effect))

    def _leave(self, reason: str) -> NoReturn:
        rank.die(note.CONDEMNED, reason)

    def _beat(self, phase: str) -> None:
        if self._board is not None:
            self._board.beat(phase)
