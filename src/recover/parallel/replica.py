"""What the ranks of a replica add up among themselves. Layer: parallel.

Each rank reduces its own shard with the other replicas. Three things belong to the replica as a
whole and are summed inside it, after the reduction: gradients of parameters that several ranks hold
(:class:`Tied`), the global norm of the gradient, and the loss. A rank that dies here takes its
replica with it; the verdict has been clean, so the others commit the same step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recover.parallel.tied import Tied
from recover.tensors.buckets import GradientBuckets, Slot, Totals
from recover.tensors.holders import Holder


class ReplicaSum:
    """Sums over the ranks of this replica, all of which call the same methods in the same order.

    ``holders`` names what the gradients of ``buckets`` belong to; the ranks that hold parts of the
    same thing call it the same. Raises ValueError where a tied parameter is none of these.
    """

    def __init__(
        self, buckets: GradientBuckets, holders: Mapping[str, Holder], tied: Sequence[Tied] = ()
    ) -> None:
        self._buckets = buckets
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._tied = [
            (t.group, [_slot(buckets, p) for p in t.parameters if p.requires_grad]) for t in tied
        ]
        named = {id(holder): name for name, holder in holders.items()}
        self._copies = self._count_copies([named[id(slot.holder)] for slot in buckets.slots])

    def sum_tied(self) -> None:
        """Give every holder of a tied parameter the sum of what the holders computed."""
        for group, slots in self._tied:
            flat = torch.cat([slot.reduced.flatten() for slot in slots])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [slot.reduced.numel() for slot in slots])
            for slot, part in zip(slots, parts, strict=True):
                slot.reduced.copy_(part.view_as(slot.reduced))

    def agree(self, *, norm: bool) -> tuple[Totals, float]:
        """Return the replica's totals, and with ``norm`` its gradient's sum of squares.

        A loss (and a number of tokens) is the mean over the ranks that gave one: ranks that share
        a microbatch give their parts' losses, tensor-parallel ranks all the same one, and only a
        pipeline's last stage gives any.
        """
        own = self._buckets.totals
        squares = float(self._buckets.square_sum(self._copies)) if norm else 0.0
        if self._ranks == 1:
            return own, squares
        said = [own.loss, float(own.losses), float(own.losses > 0)]
        said += [float(own.tokens), float(own.tokens > 0), squares]
        total = torch.tensor(said, dtype=torch.float64)
        dist.all_reduce(total)
        loss, losses, tellers, tokens, counters, squares = total.tolist()
        tellers, counters = max(1.0, tellers), max(1.0, counters)
        return Totals(loss / tellers, int(losses / tellers), round(tokens / counters)), squares

    def digest(self, own: str) -> str:
        """Return the digests of all ranks, this one's ``own`` among them, in order."""
        if self._ranks == 1:
            return own
        everyone: list[str] = [""] * self._ranks
        dist.all_gather_object(everyone, own)
        return "".join(everyone)

    def _count_copies(self, names: Sequence[str]) -> list[int]:
        """Count for each gradient the ranks that hold the very same part of it."""
        own = {id(slot): name for slot, name in zip(self._buckets.slots, names, strict=True)}
        for group, slots in self._tied:  # its holders may name a parameter differently
            said = _gathered([own[id(slot)] for slot in slots], group)
            own |= {id(slot): min(column) for slot, *column in zip(slots, *said, strict=True)}
        everyone = Counter(name for held in _gathered(list(own.values())) for name in held)
        return [
            max(1, everyone[own[id(slot)]] // slot.holder.shards) for slot in self._buckets.slots
        ]


def _gathered(names: list[str], group: dist.ProcessGroup | None = None) -> list[list[str]]:
    """Return the names that each member of a group says, the replica's by default."""
    if not dist.is_initialized():
        return [names]
    said: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(said, names, group=group)
    return said


def _slot(buckets: GradientBuckets, parameter: Tensor) -> Slot:
    try:
        return buckets.slot_of(parameter)
    except KeyError:
        raise ValueError(
            f"a tied parameter of shape {tuple(parameter.shape)} is not among the trained "
            "parameters of the model"
        ) from None
