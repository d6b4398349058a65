"""A rank of the real port: symbolic gradients in real memory, deaths at named effects."""

import os
import signal
import threading
from array import array
from collections import Counter
from typing import Any, TypeAlias

from recover.core.drive import drive
from recover.core.effects import (
    Accumulate,
    AnyEffect,
    Commit,
    Discard,
    Leave,
    NextBucket,
    Recovered,
    Restore,
    Snapshot,
)
from recover.core.guard import Member
from recover.core.mesh import Mesh
from recover.mpi import transport as ulfm
from recover.mpi.performer import CollectivePerformer
from tests.conformance.programs import PROGRAMS, Strike, Value
from tests.mpi.rank_main import die

BUCKETS = (("q", 5, ulfm.ElementType.INT64), ("d", 40_000, ulfm.ElementType.FLOAT64))
Numbers: TypeAlias = "array[float]"
IN_PLACE, OUT_OF_PLACE = 0, 1
"""Bucket 0 is reduced in place and needs its snapshot; bucket 1 has an accumulator of its own."""


class SymbolicBuckets:
    """Two buckets in which microbatch k is 16**k; both ways to reduce."""

    def __init__(self) -> None:
        self._memory: list[Numbers] = [array(c, bytes(count * 8)) for c, count, _ in BUCKETS]
        self._accumulator = self._memory[OUT_OF_PLACE][:]
        self._snapshots: dict[int, Numbers] = {}

    def send(self, bucket: int) -> ulfm.Span | None:
        return _span(self._accumulator, bucket) if bucket == OUT_OF_PLACE else None

    def receive(self, bucket: int) -> ulfm.Span:
        return _span(self._memory[bucket], bucket)

    def mute(self, bucket: int) -> None:
        self._fill(self._memory[bucket], 0)

    def add(self, value: int) -> None:
        for local in (self._accumulator, self._memory[IN_PLACE]):
            self._fill(local, int(local[0]) + value)

    def clear(self) -> None:
        for local in (self._accumulator, self._memory[IN_PLACE]):
            self._fill(local, 0)

    def snapshot(self, bucket: int) -> None:
        if bucket == IN_PLACE:
            self._snapshots[bucket] = self._memory[bucket][:]

    def restore(self, buckets: tuple[int, ...]) -> None:
        for bucket in buckets:
            if bucket == IN_PLACE:
                self._memory[bucket][:] = self._snapshots[bucket]

    def check(self, expected: int) -> None:
        for bucket, memory in enumerate(self._memory):
            (value,) = set(memory)
            assert value == expected, f"bucket {bucket}: {int(value):x} is not {expected:x}"

    @staticmethod
    def _fill(memory: Numbers, value: int) -> None:
        values: Numbers = array(memory.typecode, (value,))
        memory[:] = values * len(memory)


def _span(memory: Numbers, bucket: int) -> ulfm.Span:
    address, count = memory.buffer_info()
    return ulfm.Span(address, count, BUCKETS[bucket][2])


class Rank:
    """Performs every effect of a program, and dies where it is told to."""

    def __init__(self, transport: ulfm.UlfmTransport, strikes: list[Strike]) -> None:
        self._buckets = SymbolicBuckets()
        self._transport = transport
        self._collective = CollectivePerformer(transport, self._buckets)
        self._strikes = {(s.effect, s.nth): s.when for s in strikes}
        self._seen: Counter[str] = Counter()
        self._next_bucket = 0

    def perform(self, effect: AnyEffect) -> object:
        name = type(effect).__name__
        when = self._strikes.get((name, self._seen[name]))
        self._seen[name] += 1
        if when == "before":
            die()
        if when == "during":  # the thread runs as soon as this one lets go of the interpreter
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
        outcome = self._answer(effect)
        if when == "during":
            die()
        if when == "fault":
            self._transport.quiesce()
            return False
        return outcome

    def _answer(self, effect: AnyEffect) -> object:
        match effect:
            case Accumulate(ids):
                self._next_bucket = 0
                self._buckets.add(sum(16**i for i in ids))
            case NextBucket():
                bucket, self._next_bucket = self._next_bucket, self._next_bucket + 1
                return bucket if bucket < len(BUCKETS) else None
            case Snapshot(bucket):
                self._buckets.snapshot(bucket)
            case Restore(buckets):
                self._next_bucket = 0
                self._buckets.restore(buckets)
            case Discard():
                self._next_bucket = 0
                self._buckets.clear()
            case Recovered():
                pass
            case Commit(facts):
                admitted = [i for a in facts.plan.values() if a.admitted for i in a.ids]
                assert len(admitted) == facts.divisor, facts
                self._buckets.check(sum(16**i for i in admitted))
                self._buckets.clear()
            case Leave():
                die()
            case _:
                return self._collective(effect)
        return None


def play(
    programs: list[str], strikes: list[dict[str, Any]], replicas: int, ranks_per_replica: int
) -> Value:
    """Run programs one after the other as this rank, over one job; return their values."""
    mesh = Mesh(replicas, ranks_per_replica)
    transport = ulfm.join(mesh)
    member = Member(transport.place, mesh)
    mine = [s for s in (Strike(**s) for s in strikes) if mesh.place(s.world_rank) == member.place]
    values = [drive(PROGRAMS[name](member), Rank(transport, mine).perform) for name in programs]
    transport.agree(True)  # leave together
    return values
