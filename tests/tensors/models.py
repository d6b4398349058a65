"""What the tests of this package share: odd models, microbatches, and a reduction without MPI."""

import ctypes

import torch
from torch import Tensor, nn

from recover.mpi.transport import Span
from recover.tensors.buckets import GradientBuckets

BUCKET_BYTES = 256


class Odd(nn.Module):
    """Frozen, unused, tied and scalar parameters, and one in fp64, in a model of a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, 6, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:  # (n,) int64
        hidden = self.frozen(torch.tanh(self.body(self.embed(tokens))))  # (n, 6)
        hidden = self.scale * hidden + self.shift.to(hidden.dtype)
        return nn.functional.cross_entropy(self.head(hidden), tokens.roll(1))


def odd_model(seed: int = 0) -> Odd:
    """Return the model with parameters that depend on the seed alone."""
    torch.manual_seed(seed)
    return Odd()


def microbatch(number: int) -> Tensor:
    """Return microbatch ``number``: (5,) int64."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 7, (5,), generator=generator)


def accumulate(buckets: GradientBuckets, model: nn.Module, numbers: range) -> list[float]:
    """Run microbatches as the training loop does; return their losses."""
    losses = []
    for number in numbers:
        loss = model(microbatch(number))
        buckets.before_backward()
        buckets.add_loss(loss)
        buckets.add_tokens(5)
        loss.backward()
        buckets.collect()
        losses.append(loss.item())
    return losses


def reduce_all(members: list[GradientBuckets], muted: frozenset[int] = frozenset()) -> None:
    """Sum all buckets over the members, through the spans that MPI would be given."""
    for bucket in range(len(members[0])):
        for buckets in members:
            buckets.snapshot(bucket)
        parts = []
        for index, buckets in enumerate(members):
            if index in muted:
                buckets.mute(bucket)
            sent = None if index in muted else buckets.send(bucket)
            parts.append(elements(sent or buckets.receive(bucket)).clone())
        total = torch.stack(parts).sum(0)
        for buckets in members:
            elements(buckets.receive(bucket)).copy_(total)
            buckets.received(bucket)


def elements(span: Span) -> Tensor:
    """Return the memory of a span as a tensor."""
    size = span.count * span.type.size
    memory = (ctypes.c_byte * size).from_address(span.address)
    kind = {4: torch.float32, 8: torch.float64, 1: torch.uint8}[span.type.size]
    return torch.frombuffer(memory, dtype=kind)
