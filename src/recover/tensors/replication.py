"""Making replicas equal at the start: the lowest replica's tensors, byte for byte. Layer: tensors.

Each tensor is one bucket of bytes. All replicas but one are muted, and a sum of bytes with zeros is
those bytes, whatever their type; so the copy goes through the same guarded reduction as gradients.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from recover.core.policies import RestoreMode
from recover.mpi.transport import Span
from recover.tensors.holders import local
from recover.tensors.ports import span


class ModelCopy:
    """The tensors to make equal, as buckets of a reduction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [part for t in tensors if (part := local(t)).numel()]
        self._own = [_bytes(t) for t in self._tensors]
        self._sum = [torch.empty_like(b) for b in self._own]

    def __len__(self) -> int:
        return len(self._tensors)

    def snapshot(self, bucket: int) -> None:
        """Nothing to do: the reduction is out of place."""

    def restore(self, buckets: tuple[int, ...], mode: RestoreMode) -> None:
        """Nothing to do: the reduction is out of place."""

    def discard(self) -> None:
        """Nothing to do: nothing is ever added to these tensors."""

    def send(self, bucket: int) -> Span | None:
        """Return this replica's bytes."""
        return span(self._own[bucket])

    def receive(self, bucket: int) -> Span:
        """Return where the lowest replica's bytes arrive."""
        return span(self._sum[bucket])

    def mute(self, bucket: int) -> None:
        """Bring zeros."""
        self._sum[bucket].zero_()

    def received(self, bucket: int) -> None:
        """Nothing to do before all have arrived."""

    def adopt(self) -> None:
        """Overwrite the tensors with what was received; call after a clean verdict."""
        for tensor, received in zip(self._tensors, self._sum, strict=True):
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
