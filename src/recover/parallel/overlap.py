"""Which buckets are complete while the last backward pass still runs. Layer: parallel.

For models that are not DDP's: a plain module, FSDP2's shards. A gradient is complete when its hook
was called and it lies in the accumulator; a bucket when all of its gradients are. What cannot be
told from the hooks (FSDP1's flat shards, sums over tensor-parallel ranks that are still to be made,
parameters that a pass does not use) is simply not complete before the end of the pass.
"""

from collections.abc import Callable, Sequence

from recover.errors import RecoverError
from recover.tensors.buckets import GradientBuckets, Slot


class CompletionSignal:
    """Tells how many of the leading buckets are complete; from the thread that runs the pass."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._on_complete: Callable[[int], None] | None = None
        self._missing: list[set[Slot]] = []
        self._complete = 0
        self._late: Sequence[Slot] = ()
        buckets.on_use = self._used

    def expect(self, on_complete: Callable[[int], None] | None) -> None:
        """Prepare the next backward pass; without a callback, gradients are only accumulated."""
        self._on_complete, self._complete, self._late = on_complete, 0, ()
        if on_complete is not None:
            self._missing = self._buckets.slots_by_bucket()

    def after_backward(self) -> None:
        """Bring in what the pass left outside the accumulators.

        Raises RecoverError where a gradient was added to after its bucket had been handed over:
        what was reduced is not this rank's gradient, so this rank must not vote for it.
        """
        self._on_complete = None
        if self._late:
            raise RecoverError(
                "a backward pass added twice to the gradient of a parameter of shape "
                f"{tuple(self._late[0].holder.shape)}, the second time when it was being reduced "
                "already; train this model without overlap"
            )
        self._buckets.collect()

    def _used(self, bucket: int, slot: Slot) -> None:
        if self._on_complete is None:
            return
        if bucket < self._complete:
            self._late = (slot,)
        elif slot.settled:
            self._missing[bucket].discard(slot)
            while self._complete < len(self._missing) and not self._missing[self._complete]:
                self._complete += 1
            self._on_complete(self._complete)
