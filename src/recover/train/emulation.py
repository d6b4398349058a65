"""An emulated device and network: work takes time without using the processor. Layer: train.

A machine with few cores shows the shape of a cluster this way. All that happens is real (passes,
processes, reductions, deaths); it only *takes at least* as long as it would on the device:

- a forward pass a third of ``microbatch_ms``, a backward pass two thirds, as their arithmetic is;
- an all-reduce over n ranks what a ring needs, 2 (n - 1) / n x bytes over the bandwidth. There is
  one network: the transfers of a rank follow one another, and may overlap with its passes.

Where the real work took longer, nothing is added. Values are never touched. What is not emulated:
latency, votes and probes, anything that a restart does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_FORWARD, _BACKWARD = 1 / 3, 2 / 3


@dataclass(slots=True)
class Device:
    """What one rank computes and communicates on; 0 emulates nothing."""

    microbatch_ms: float = 0.0
    bandwidth_mbps: float = 0.0
    """Megabits per second in each direction."""
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _idle_at: float = field(default=0.0)
    """When the network will have moved all that it was given."""

    @contextmanager
    def forward(self, microbatches: float = 1) -> Iterator[None]:
        """Take at least as long as the device's forward pass."""
        until = self.clock() + _FORWARD * microbatches * self.microbatch_ms / 1000
        yield
        self._wait(until)

    @contextmanager
    def backward(self, microbatches: float = 1) -> Iterator[None]:
        """Take at least as long as the device's backward pass."""
        until = self.clock() + _BACKWARD * microbatches * self.microbatch_ms / 1000
        yield
        self._wait(until)

    @contextmanager
    def passes(self, microbatches: int) -> Iterator[None]:
        """Take at least as long as forward and backward passes of so many microbatches."""
        until = self.clock() + microbatches * self.microbatch_ms / 1000
        yield
        self._wait(until)

    def transfer(self, nbytes: int, ranks: int) -> None:
        """Note that an all-reduce of so many bytes over so many ranks begins now."""
        self._idle_at = max(self._idle_at, self.clock()) + self.transfer_s(nbytes, ranks)

    def settle(self, *, done: bool = True) -> None:
        """Wait until the network has moved all that it was given; what failed is dropped."""
        if done:
            self._wait(self._idle_at)
        else:
            self._idle_at = self.clock()

    def transfer_s(self, nbytes: int, ranks: int) -> float:
        """Return the seconds that a ring all-reduce needs on this network."""
        if not self.bandwidth_mbps:
            return 0.0
        return 2 * (ranks - 1) / ranks * nbytes * 8 / (self.bandwidth_mbps * 1e6)

    def _wait(self, until: float) -> None:
        left = until - self.clock()
        if left > 0:
            self.sleep(left)
