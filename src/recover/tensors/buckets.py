"""Flat gradient buckets of one rank. Layer: tensors. Paper: 4.2.

Theory of operation
-------------------
Each bucket has two flat tensors of the same size. The *accumulator* holds this rank's own gradient,
summed over the microbatches that it ran; ``param.grad`` is a view of it during an iteration, so
autograd adds into it directly. The *result* receives the reduction; after a commit ``param.grad``
is a view of it. Since the accumulator is only read by a reduction, it *is* the snapshot S(b) of the
paper: taking it costs no copy and restoring it costs nothing. The price is memory: twice the
gradients in fp32, as much as in-place reduction with real snapshots.

Parameters of 16 bits get fp32 buckets: what autograd leaves in ``param.grad`` is added to the
accumulator as soon as it is there, microbatch by microbatch, and dropped (Path 2 of Appendix C).

Which tensors are a rank's gradients is the business of *holders*: a parameter's ``grad``, the local
part of a DTensor's, or what a stack keeps flat.

The last bucket is the *tally*, in fp64: the losses and their number, the tokens, and for each
gradient the number of replicas in which some microbatch added to it. A parameter that nobody used
keeps ``grad = None``, as it would without ReCoVer, so that the optimizer leaves it alone.

The layout depends on the parameters' order, shapes and types alone, never on timing.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recover.core.policies import RestoreMode
from recover.mpi.transport import Span
from recover.tensors.holders import Holder, ParameterHolder
from recover.tensors.ports import Port
from recover.tensors.snapshots import Snapshots

_LOSS, _LOSSES, _TOKENS, _FIRST_USE = 0, 1, 2, 3  # positions in the tally


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where one gradient lives."""

    holder: Holder
    accumulated: Tensor
    """View of the accumulator, of the holder's shape."""
    reduced: Tensor
    """View of the result, of the holder's shape."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, where the gradient is that of one."""
        assert isinstance(self.holder, ParameterHolder), self.holder.description
        return self.holder.parameter

    @property
    def direct(self) -> bool:
        """Whether autograd can add straight into the accumulator."""
        return self.holder.dtype == self.accumulated.dtype

    @property
    def settled(self) -> bool:
        """Whether the accumulator holds all that a backward pass has just added."""
        return self.holder.holds(self.accumulated) if self.direct else self.holder.seen() is None

    def bind(self) -> None:
        """Let autograd add straight into the accumulator, where the types allow it."""
        self.holder.show(self.accumulated if self.direct else None)

    def collect(self) -> None:
        """Add a gradient that autograd has put elsewhere to the accumulator."""
        grad = self.holder.seen()
        if grad is not None and grad.data_ptr() != self.accumulated.data_ptr():
            self.accumulated.add_(grad)
            self.bind()

    def absorb(self) -> None:
        """Do so while somebody else is still going to write to ``param.grad``.

        That must not be the accumulator then, unless what is written is what it holds.
        """
        grad = self.holder.seen()
        if grad is not None and grad.data_ptr() != self.accumulated.data_ptr():
            self.accumulated.add_(grad)
            self.holder.show(None)

    def publish(self, *, used: bool) -> None:
        """Show the optimizer the reduced gradient, in the type that it wants."""
        self.holder.show(self.reduced.to(self.holder.dtype) if used else None)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all contributions of an iteration, not divided."""

    loss: float
    losses: int
    """Number of losses in that sum."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Clip:
    """Scale the gradient down to at most ``largest``, its global norm."""

    largest: float
    square_sum: float
    """Of the undivided sums, over all parts of the model."""


class GradientBuckets:
    """The buckets over ``gradients``, parameters or other holders; the last one is the tally.

    ``bucket_bytes`` bounds a bucket's size in bytes of fp32; a larger gradient has its own bucket.
    ``in_place`` reduces in the accumulators and keeps real snapshots. ``eager`` takes gradients of
    16 bits over as soon as they are there; a stack that reads them afterwards (DDP) wants it off.
    Raises ValueError for no trainable parameter, or parameters on several devices.
    """

    def __init__(
        self,
        gradients: Iterable[nn.Parameter | Holder],
        *,
        bucket_bytes: int,
        in_place: bool = False,
        eager: bool = True,
    ) -> None:
        trainable = _holders(gradients)
        if not trainable:
            raise ValueError("the model has no parameter that requires a gradient")
        devices = {p.device for p in trainable}
        if len(devices) > 1:
            raise ValueError(f"parameters live on several devices: {sorted(map(str, devices))}")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        groups = _group(trainable[::-1], bucket_bytes)  # gradients become ready last to first
        sizes = [sum(h.shape.numel() for h in group) for group in groups]
        types = [_accumulation_type(group[0]) for group in groups]
        tally = _FIRST_USE + len(trainable)
        self._accumulators = [
            torch.zeros(n, dtype=t, device=devices.copy().pop())
            for n, t in zip(sizes, types, strict=True)
        ] + [torch.zeros(tally, dtype=torch.float64)]
        self._results = (
            self._accumulators if in_place else [torch.zeros_like(a) for a in self._accumulators]
        )
        self._loss, self._counted, self._tokens, self._losses = 0.0, 0, 0, list[Tensor]()
        self._used = [0] * len(trainable)
        self._snapshots = Snapshots(self._accumulators) if in_place else None
        placed = self._grouped = [self._place(group, b) for b, group in enumerate(groups)]
        self.slots = [slot for group in placed for slot in group]
        """One slot per gradient, bucket by bucket."""
        self._placed: dict[Tensor, tuple[int, Slot]] = {
            slot.parameter: (b, slot)
            for b, group in enumerate(placed)
            for slot in group
            if isinstance(slot.holder, ParameterHolder)
        }
        self.on_use: Callable[[int, Slot], None] | None = None
        """Called with bucket and slot whenever a backward pass has added to a gradient."""
        self._ports = [Port(a, r) for a, r in zip(self._accumulators, self._results, strict=True)]
        self._watch_use(eager=eager)

    # --- layout --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._accumulators)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._accumulators[0].device

    @property
    def in_place(self) -> bool:
        """Whether a reduction overwrites this rank's own gradient."""
        return self._snapshots is not None

    @property
    def layout(self) -> str:
        """Digest of sizes, shapes and types in order; equal on replicas of the same model."""
        text = [slot.holder.description for slot in self.slots]
        sizes = [a.numel() for a in self._accumulators]
        return hashlib.sha256(repr((text, sizes)).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets: accumulators and results, or accumulators and snapshots."""
        return 2 * sum(a.nbytes for a in self._accumulators)

    def bucket_of(self, parameter: Tensor) -> int:
        """Return the bucket that holds a parameter's gradient."""
        return self._placed[parameter][0]

    def slots_by_bucket(self) -> list[set[Slot]]:
        """Return the gradients of each bucket but the tally."""
        return [set(group) for group in self._grouped]

    def slot_of(self, parameter: Tensor) -> Slot:
        """Return where a parameter's gradient lives; KeyError for one that has none here."""
        return self._placed[parameter][1]

    # --- accumulation --------------------------------------------------------------------

    def begin(self) -> None:
        """Start an iteration: zero the accumulators and bind ``param.grad`` to them."""
        self.discard()
        for slot in self.slots:
            slot.bind()

    def before_backward(self) -> None:
        """Wait for a restoration that is under way."""
        if self._snapshots is not None:
            self._snapshots.wait()

    def collect(self) -> None:
        """Bring in the gradients that a backward pass left outside the accumulators."""
        for slot in self.slots:
            slot.collect()

    def collect_one(self, parameter: Tensor) -> None:
        """Bring in one parameter's gradient, to which its owner is still going to write."""
        self.slot_of(parameter).absorb()

    def rebind(self) -> None:
        """Drop gradients outside the accumulators, because they have been collected."""
        for slot in self.slots:
            slot.bind()

    def add_loss(self, loss: Tensor) -> None:
        """Count one microbatch's loss, a scalar; it is read only when the tally is reduced."""
        self._losses.append(loss.detach())

    def add_tokens(self, tokens: int) -> None:
        """Count the tokens of one microbatch."""
        self._tokens += tokens

    def discard(self) -> None:
        """Zero this rank's own gradient and tally."""
        self._loss, self._counted, self._tokens = 0.0, 0, 0
        self._losses.clear()
        self._used[:] = [0] * len(self._used)
        for accumulator in self._accumulators:
            accumulator.zero_()

    # --- reduction -----------------------------------------------------------------------

    def snapshot(self, bucket: int) -> None:
        """Keep the pre-reduction state; out of place that state is never touched."""
        if bucket == len(self) - 1:
            self._fill_tally()
        if self._snapshots is not None:
            self._snapshots.keep(bucket)

    def restore(self, buckets: tuple[int, ...], mode: RestoreMode) -> None:
        """Bring buckets back to this rank's own gradient; see :class:`Snapshots`."""
        if self._snapshots is not None and buckets:
            self._snapshots.restore(buckets, mode)

    def send(self, bucket: int) -> Span | None:
        """Return what this rank adds to the sum, or None where it is in ``receive`` already."""
        return self._ports[bucket].send()

    def receive(self, bucket: int) -> Span:
        """Return where the sum goes."""
        return self._ports[bucket].receive()

    def mute(self, bucket: int) -> None:
        """Make ``receive`` hold zeros, so that a reduction in it adds nothing."""
        self._ports[bucket].mute()

    def received(self, bucket: int) -> None:
        """Take the sum over from host memory."""
        self._ports[bucket].received()

    @property
    def totals(self) -> Totals:
        """What the tally's reduction gave."""
        loss, losses, tokens = self._results[-1][:_FIRST_USE].tolist()
        return Totals(float(loss), int(losses), int(tokens))

    def square_sum(self, copies: Sequence[int] | None = None) -> Tensor:
        """Return the sum of squares of the reduced sums, a scalar in fp64.

        Gradient k counts as one ``copies[k]``-th: so many ranks hold the same.
        """
        # One norm per gradient: over a whole bucket at once, fp32 loses four digits.
        norms = [torch.linalg.vector_norm(slot.reduced) for slot in self.slots]
        squares = torch.stack(norms).double().square()  # (slots,)
        return (squares / squares.new_tensor(copies) if copies else squares).sum()

    def publish(self, divisor: int, clip: Clip | None = None) -> None:
        """Divide the sums by ``divisor`` and hand them to whoever holds the gradients."""
        factor = 1.0 / divisor
        if clip is not None:
            norm = math.sqrt(clip.square_sum) / divisor
            factor *= min(1.0, clip.largest / (norm + 1e-6))
        for result in self._results[:-1]:
            result.mul_(factor)
        used = self._results[-1][_FIRST_USE:].tolist()
        for slot, uses in zip(self.slots, used, strict=True):
            slot.publish(used=uses > 0)

    # --- internals -----------------------------------------------------------------------

    def _fill_tally(self) -> None:
        """Write what was counted where the reduction finds it; tensors are slow to count in."""
        self._loss += sum(float(loss) for loss in self._losses)
        self._counted += len(self._losses)
        self._losses.clear()
        counted = [self._loss, *map(float, (self._counted, self._tokens, *self._used))]
        self._accumulators[-1].copy_(torch.tensor(counted, dtype=torch.float64))

    def _place(self, group: Sequence[Holder], bucket: int) -> list[Slot]:
        slots, start = [], 0
        for holder in group:
            run = slice(start, start + holder.shape.numel())
            accumulated = self._accumulators[bucket][run].view(holder.shape)
            reduced = self._results[bucket][run].view(holder.shape)
            slots.append(Slot(holder, accumulated, reduced))
            start = run.stop
        return slots

    def _watch_use(self, *, eager: bool) -> None:
        buckets = [b for b, group in enumerate(self._grouped) for _ in group]
        for position, (bucket, slot) in enumerate(zip(buckets, self.slots, strict=True)):

            def used(position: int = position, bucket: int = bucket, slot: Slot = slot) -> None:
                self._used[position] = 1
                if eager and not slot.direct:
                    slot.collect()
                if self.on_use is not None:
                    self.on_use(bucket, slot)

            slot.holder.watch(used)


def _holders(gradients: Iterable[nn.Parameter | Holder]) -> list[Holder]:
    """Return one holder for each trainable parameter, and those that were given."""
    return [
        ParameterHolder(gradient) if isinstance(gradient, nn.Parameter) else gradient
        for gradient in dict.fromkeys(gradients)
        if not isinstance(gradient, nn.Parameter) or gradient.requires_grad
    ]


def _accumulation_type(holder: Holder) -> torch.dtype:
    if not holder.dtype.is_floating_point:
        raise ValueError(f"a parameter of type {holder.dtype} has no gradient to reduce")
    return torch.float64 if holder.dtype == torch.float64 else torch.float32


def _group(holders: Sequence[Holder], bucket_bytes: int) -> list[list[Holder]]:
    """Split gradients, in order, into runs of one accumulation type and bounded size."""
    groups: list[list[Holder]] = []
    filled = 0
    for holder in holders:
        nbytes = holder.shape.numel() * _accumulation_type(holder).itemsize
        full = filled + nbytes > bucket_bytes
        if not groups or full or _accumulation_type(groups[-1][0]) != _accumulation_type(holder):
            groups.append([])
            filled = 0
        groups[-1].append(holder)
        filled += nbytes
    return groups
