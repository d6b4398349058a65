"""The collective effects of the protocol, performed over MPI. Layer: mpi.

A performer for a whole rank puts its local effects (gradients, snapshots, commits) around this one.
"""

from typing import Protocol

from recover.core.effects import Agree, Census, Detect, Reduce, Regroup, Shrink
from recover.mpi.transport import Span, UlfmTransport

Membership = Agree | Shrink | Census | Regroup
Collective = Detect | Reduce | Membership


class Buckets(Protocol):
    """Where this rank's buckets lie in host memory."""

    def send(self, bucket: int) -> Span | None:
        """Return what this rank adds to the sum; None where the receive span holds it already."""

    def receive(self, bucket: int) -> Span:
        """Return where the sum goes; as many elements of the same type as are sent."""

    def mute(self, bucket: int) -> None:
        """Zero the receive span, so that reducing it in place adds nothing.

        Zero it, never multiply: 0 x NaN is NaN.
        """


class CollectivePerformer:
    """Answers the collective effects of one rank; called on the thread that joined."""

    def __init__(self, transport: UlfmTransport, buckets: Buckets) -> None:
        self._transport = transport
        self._buckets = buckets

    def __call__(self, effect: Collective) -> object:
        """Perform ``effect`` and return its outcome."""
        match effect:
            case Detect(clean, bucket):
                return self._transport.detect(clean, self._buckets.receive(bucket))
            case Reduce(bucket, muted):
                return self._reduce(bucket, muted)
            case Agree() | Shrink() | Census() | Regroup():
                return perform_membership(self._transport, effect)

    def _reduce(self, bucket: int, muted: bool) -> bool:
        # Some ranks reduce in place and some do not. The MPI standard wants the same everywhere;
        # in Open MPI the difference is a local copy, which the conformance suite checks.
        if muted:
            self._buckets.mute(bucket)
            return self._transport.reduce(None, self._buckets.receive(bucket))
        return self._transport.reduce(self._buckets.send(bucket), self._buckets.receive(bucket))


def perform_membership(transport: UlfmTransport, effect: Membership) -> object:
    """Perform an effect that moves no gradient; return its outcome."""
    match effect:
        case Agree(clean):
            return transport.agree(clean)
        case Shrink():
            return transport.shrink()
        case Census(statement):
            return transport.census(statement)
        case Regroup(survivors):
            return transport.regroup(survivors)
