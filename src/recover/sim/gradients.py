"""Symbolic gradients, and the buckets of a virtual rank that hold them. Layer: sim.

In the ``digits`` form microbatch k contributes 16**k. A sum is then a multiset: hex digit k counts
how often microbatch k is in it. The ``counted`` form keeps numbers short in long runs: the upper
bits count the microbatches, the lower ones are a fingerprint of which they are.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from recover.core.policies import RestoreMode

Gradient = int | None
"""A sum of symbols; None is undefined memory, which makes every sum it enters undefined."""
Symbol = Callable[[int], int]


class Violation(Exception):
    """The protocol broke a rule; the message says which, and how to see it again."""


def digits(microbatch: int) -> int:
    """Return the symbol of ``microbatch`` whose sums can be read."""
    return 1 << 4 * microbatch


def counted(microbatch: int) -> int:
    """Return the symbol of ``microbatch`` whose sums stay short."""
    mixed = (microbatch + 1) * 0x9E3779B97F4A7C15 & _WORD
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _WORD
    return (1 << 96) + (mixed ^ mixed >> 32)


_WORD = (1 << 64) - 1


def named(gradient: Gradient) -> str:
    """Return what a sum in the ``digits`` form consists of, for people."""
    if gradient is None:
        return "undefined"
    times = [(k, gradient >> 4 * k & 15) for k in range((gradient.bit_length() + 3) // 4)]
    return " ".join(str(k) if n == 1 else f"{k}(x{n})" for k, n in times if n) or "nothing"


def total(parts: Iterable[Gradient]) -> Gradient:
    """Add gradients up."""
    amount = 0
    for part in parts:
        if part is None:
            return None
        amount += part
    return amount


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a bucket holds when the optimizer reads it, and under which membership it was summed."""

    gradient: Gradient
    epoch: int | None
    """None: it was not reduced since the local gradient last changed."""
    replicas: tuple[int, ...]


class Memory:
    """The gradient buckets of one rank.

    ``in_place``: a reduction overwrites the local gradient, snapshots are real copies. Otherwise
    the result has memory of its own, and the local gradient is its own snapshot. A rewind on a side
    stream is finished by the first backward pass after it; using a bucket earlier is a violation.
    """

    def __init__(self, buckets: int, symbol: Symbol, *, in_place: bool) -> None:
        self._symbol = symbol
        self._in_place = in_place
        self._held: list[Gradient] = [0] * buckets
        self._result: list[Gradient] = self._held if in_place else [None] * buckets
        self._snapshots: list[Gradient] = [None] * buckets
        self._reduced: list[tuple[int, tuple[int, ...]] | None] = [None] * buckets
        self._rewinding: tuple[int, ...] = ()
        self._next = 0

    def load(self, gradient: int) -> None:
        """Put a value into every bucket."""
        self._held[:] = [gradient] * len(self._held)

    def accumulate(self, ids: Iterable[int], *, afresh: bool) -> None:
        """Run microbatches; ``afresh`` zeroes the gradient first."""
        if afresh:
            self.discard()
        for bucket in self._rewinding:
            self._held[bucket] = self._snapshots[bucket]
        self._rewinding = ()
        gradient = sum(map(self._symbol, ids))
        self._held[:] = [total((held, gradient)) for held in self._held]
        self._start_over()

    def discard(self) -> None:
        """Zero the local gradient."""
        self._settled("discarded")
        self._held[:] = [0] * len(self._held)
        self._start_over()

    def next_bucket(self) -> int | None:
        """Return the buckets one by one, then None."""
        self._next += 1
        return self._next - 1 if self._next <= len(self._held) else None

    def snapshot(self, bucket: int) -> None:
        """Keep what the bucket holds."""
        self._settled("snapshotted")
        self._snapshots[bucket] = self._held[bucket]

    def restore(self, buckets: tuple[int, ...], mode: RestoreMode) -> None:
        """Rewind buckets, at once or behind the next forward pass."""
        if (mode is RestoreMode.SKIP) != (not buckets):
            raise Violation(f"restore mode {mode} with stale buckets {buckets}")
        self._start_over()
        if not self._in_place:
            return
        if mode is RestoreMode.NON_BLOCKING:
            self._rewinding = buckets
            return
        for bucket in buckets:
            self._held[bucket] = self._snapshots[bucket]

    def part(self, bucket: int, *, muted: bool) -> Gradient:
        """Return what this rank brings to a reduction."""
        self._settled("reduced")
        return 0 if muted else self._held[bucket]

    def receive(
        self, bucket: int, gradient: Gradient, epoch: int, replicas: tuple[int, ...]
    ) -> None:
        """Store the result of a reduction, None where it failed."""
        self._result[bucket] = gradient
        self._reduced[bucket] = (epoch, replicas)

    def spoil(self) -> None:
        """Make what was reduced undefined.

        No survivor may rely on it once the membership has changed, and undefined is the worst that
        it can be, so this leaves out no violation; many states become the same.
        """
        for bucket, done in enumerate(self._reduced):
            if done is not None:
                self._result[bucket] = None
                self._reduced[bucket] = None

    def read(self) -> tuple[Reduced, ...]:
        """Return what the optimizer reads."""
        self._settled("read by the optimizer")
        return tuple(
            Reduced(gradient, *(done or (None, ())))
            for gradient, done in zip(self._result, self._reduced, strict=True)
        )

    def key(self) -> Hashable:
        """Return a value that tells apart what later use could tell apart."""
        result = None if self._in_place else tuple(self._result)
        kept = (tuple(self._snapshots), tuple(self._reduced), self._rewinding, self._next)
        return (tuple(self._held), result, kept)

    def _start_over(self) -> None:
        self._next = 0
        self._reduced[:] = [None] * len(self._held)

    def _settled(self, use: str) -> None:
        if self._rewinding:
            raise Violation(f"bucket {self._rewinding[0]} is {use} while its rewind is in flight")
