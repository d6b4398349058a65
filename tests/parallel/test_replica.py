"""What the ranks of a replica sum among themselves: alone without a world, and two of them."""

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from recover.parallel.replica import ReplicaSum
from recover.parallel.stack import Stack
from recover.parallel.tied import Tied
from recover.tensors.buckets import GradientBuckets, Totals
from recover.tensors.holders import Holder
from tests.parallel.harness import launch
from tests.tensors.models import reduce_all


def bucketed(model: nn.Module) -> tuple[GradientBuckets, dict[str, Holder]]:
    holders = Stack(model).holders()
    return GradientBuckets(holders.values(), bucket_bytes=64), holders


def test_a_rank_that_is_a_whole_replica_sums_alone() -> None:
    model = nn.Linear(2, 2, bias=False)
    buckets, holders = bucketed(model)
    alone = ReplicaSum(buckets, holders)
    buckets.begin()
    loss = model(torch.tensor([[3.0, 4.0]])).sum()
    buckets.add_loss(loss)
    buckets.add_tokens(7)
    torch.autograd.backward(loss)
    reduce_all([buckets])
    alone.sum_tied()
    totals, squares = alone.agree(norm=True)
    assert totals == Totals(loss.item(), 1, 7)
    assert squares == pytest.approx(50.0)
    assert alone.agree(norm=False) == (totals, 0.0)
    assert alone.digest("abc") == "abc"


def test_a_tied_parameter_must_be_one_of_the_model() -> None:
    buckets, holders = bucketed(nn.Linear(2, 2))
    stranger = nn.Parameter(torch.zeros(3, 5))
    group: Any = None
    with pytest.raises(ValueError, match=r"a tied parameter of shape \(3, 5\) is not among"):
        ReplicaSum(buckets, holders, [Tied([stranger], group)])
    with pytest.raises(ValueError, match="nothing is tied"):
        Tied([], group)


# --- two ranks -----------------------------------------------------------------------------


class Part(nn.Module):
    """Parameters of every kind; what a rank holds of the model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.dense = nn.Parameter(torch.zeros(3))
        self.sharded = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)]))
        self.copied = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        self.register_parameter(f"stage{rank}", nn.Parameter(torch.zeros(2)))
        self.register_parameter("head" if rank else "embed", nn.Parameter(torch.zeros(4)))


def sum_of_two() -> dict[str, Any]:
    """Run on each of two ranks: ones on rank 0 and twos on rank 1, where gradients differ."""
    rank = dist.get_rank()
    part, own = Part(rank), 1.0 + rank
    buckets, holders = bucketed(part)
    group = dist.group.WORLD
    assert group is not None
    shared = part.get_parameter("head" if rank else "embed")
    both = ReplicaSum(buckets, holders, [Tied([shared], group)])
    buckets.begin()
    if rank == 1:  # as a pipeline: the last stage alone has losses
        buckets.add_loss(torch.tensor(6.0))
    buckets.add_tokens(5)
    for slot in buckets.slots:
        name = next(name for name, holder in holders.items() if holder is slot.holder)
        slot.accumulated.fill_(3.0 if name in ("dense", "copied") else own)
    reduce_all([buckets])
    both.sum_tied()
    totals, squares = both.agree(norm=True)
    return {
        "tied": buckets.slot_of(shared).reduced.tolist(),
        "totals": [totals.loss, totals.losses, totals.tokens],
        "squares": squares,
        "digest": both.digest(hashlib.sha256(bytes([rank])).hexdigest()),
    }


def test_two_ranks_count_everything_once() -> None:
    first, second = launch("tests.parallel.test_replica:sum_of_two", 2, deadline_s=100)
    assert first == second
    assert first["tied"] == [3.0] * 4
    assert first["totals"] == [6.0, 1, 5]
    dense, copied = 3 * 9.0, 2 * 9.0
    sharded, stages, tied = 4 * 1.0 + 4 * 4.0, 2 * 1.0 + 2 * 4.0, 4 * 9.0
    assert first["squares"] == pytest.approx(dense + copied + sharded + stages + tied)
    assert len(first["digest"]) == 128
