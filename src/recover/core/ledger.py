"""Bucket bookkeeping: which membership a bucket's snapshot belongs to. Layer: core.

A bucket is tagged with the world epoch in force when its snapshot was taken, just before it is
reduced (Section 4.2). A repair raises the epoch; a bucket whose tag is older is *stale*: whatever
its reduction did, the result mixes in a replica that is gone and must not be committed. The rule
is the same for a bucket that was reduced cleanly, reduced partly, or whose reduction failed here
and succeeded elsewhere, so no rank needs to know which of these happened.
"""


class BucketLedger:
    """The tags of one iteration on one rank."""

    def __init__(self) -> None:
        self._tags: dict[int, int] = {}

    def tag(self, bucket: int, epoch: int) -> None:
        """Note that ``bucket`` was snapshotted under ``epoch``.

        A stale tag must have been restored first: reducing such a bucket again would add a dead
        replica's gradient twice.
        """
        assert self._tags.get(bucket, epoch) == epoch, f"bucket {bucket} is stale"
        self._tags[bucket] = epoch

    def stale(self, epoch: int) -> tuple[int, ...]:
        """Return the buckets whose snapshot predates ``epoch``, in ascending order."""
        return tuple(sorted(b for b, tag in self._tags.items() if tag < epoch))

    def forget(self) -> None:
        """Drop all tags: every bucket holds this rank's own gradient again (Algorithm 5)."""
        self._tags.clear()
