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
accumulator after every backward pass and dropped.

The last bucket is the *tally*, in fp64: the sum of losses, the tokens, and for each parameter the
number of replicas in which some microbatch gave it a gradient. A parameter that nobody used keeps
``grad = None``, as it would without ReCoVer, so that the optimizer leaves it alone.

The layout depends on the parameters' order, shapes and types alone, never on timing.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recover.core.policies import RestoreMode
from recover.mpi.transport import ElementType, Span
from recover.tensors.snapshots import Snapshots

_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
    torch.uint8: ElementType.BYTE,
}
_LOSS, _TOKENS, _FIRST_USE = 0, 1, 2  # positions in the tally


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lives."""

    parameter: nn.Parameter
    accumulated: Tensor
    """View of the accumulator, of the parameter's shape."""
    reduced: Tensor
    """View of the result, of the parameter's shape."""

    def bind(self) -> None:
        """Let autograd add straight into the accumulator, where the types allow it."""
        same = self.parameter.dtype == self.accumulated.dtype
        self.parameter.grad = self.accumulated if same else None

    def collect(self) -> None:
        """Add a gradient that autograd has put elsewhere to the accumulator."""
        grad = self.parameter.grad
        if grad is not None and grad is not self.accumulated:
            self.accumulated.add_(grad)
            self.bind()

    def absorb(self) -> None:
        """Do so while somebody else is still going to write to ``param.grad``.

        That must not be the accumulator then, unless what is written is what it holds.
        """
        grad = self.parameter.grad
        if grad is not None and grad is not self.accumulated:
            self.accumulated.add_(grad)
            self.parameter.grad = None

    def publish(self, *, used: bool) -> None:
        """Show the optimizer the reduced gradient, in the parameter's own type."""
        self.parameter.grad = self.reduced.to(self.parameter.dtype) if used else None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all contributions of an iteration, not divided."""

    loss: float
    tokens: int


class GradientBuckets:
    """The buckets over ``parameters``; the last one is the tally.

    ``bucket_bytes`` bounds a bucket's size in bytes of fp32; a larger parameter has its own bucket.
    ``in_place`` reduces in the accumulators and keeps real snapshots.
    Raises ValueError for no trainable parameter, or parameters on several devices.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int, in_place: bool = False
    ) -> None:
        trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        if not trainable:
            raise ValueError("the model has no parameter that requires a gradient")
        devices = {p.device for p in trainable}
        if len(devices) > 1:
            raise ValueError(f"parameters live on several devices: {sorted(map(str, devices))}")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        groups = _group(trainable[::-1], bucket_bytes)  # gradients become ready last to first
        sizes = [sum(p.numel() for p in group) for group in groups]
        types = [_accumulation_type(group[0]) for group in groups]
        tally = _FIRST_USE + len(trainable)
        self._accumulators = [
            torch.zeros(n, dtype=t, device=devices.copy().pop())
            for n, t in zip(sizes, types, strict=True)
        ] + [torch.zeros(tally, dtype=torch.float64)]
        self._results = (
            self._accumulators if in_place else [torch.zeros_like(a) for a in self._accumulators]
        )
        self._loss, self._tokens, self._losses = 0.0, 0, list[Tensor]()
        self._used = [0] * len(trainable)
        self._snapshots = Snapshots(self._accumulators) if in_place else None
        placed = [self._place(group, b) for b, group in enumerate(groups)]
        self.slots = [slot for group in placed for slot in group]
        """One slot per parameter, bucket by bucket."""
        self._slot_of: dict[Tensor, Slot] = {slot.parameter: slot for slot in self.slots}
        self._bucket_of: dict[Tensor, int] = {
            slot.parameter: b for b, group in enumerate(placed) for slot in group
        }
        self._ports = [_Port(a, r) for a, r in zip(self._accumulators, self._results, strict=True)]
        self._watch_use()

    # --- layout --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._accumulators)

    @property
    def in_place(self) -> bool:
        """Whether a reduction overwrites this rank's own gradient."""
        return self._snapshots is not None

    @property
    def layout(self) -> str:
        """Digest of sizes, shapes and types in order; equal on replicas of the same model."""
        text = [(tuple(s.parameter.shape), str(s.parameter.dtype)) for s in self.slots]
        sizes = [a.numel() for a in self._accumulators]
        return hashlib.sha256(repr((text, sizes)).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets: accumulators and results, or accumulators and snapshots."""
        return 2 * sum(a.nbytes for a in self._accumulators)

    def bucket_of(self, parameter: Tensor) -> int:
        """Return the bucket that holds a parameter's gradient."""
        return self._bucket_of[parameter]

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
        self._slot_of[parameter].absorb()

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
        self._loss, self._tokens = 0.0, 0
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

    def publish(self, divisor: int, clip_norm: float | None = None) -> Totals:
        """Divide the sums by ``divisor`` and hand them to ``param.grad``; return the totals.

        With ``clip_norm``, scale them down first to at most that global norm.
        """
        self._scale(divisor, clip_norm)
        tally = self._results[-1].tolist()
        for slot, used in zip(self.slots, tally[_FIRST_USE:], strict=True):
            slot.publish(used=used > 0)
        return Totals(float(tally[_LOSS]), int(tally[_TOKENS]))

    # --- internals -----------------------------------------------------------------------

    def _fill_tally(self) -> None:
        """Write what was counted where the reduction finds it; tensors are slow to count in."""
        self._loss += sum(float(loss) for loss in self._losses)
        self._losses.clear()
        counted = [self._loss, float(self._tokens), *map(float, self._used)]
        self._accumulators[-1].copy_(torch.tensor(counted, dtype=torch.float64))

    def _scale(self, divisor: int, clip_norm: float | None) -> None:
        """Divide and clip in one pass over the gradient, and one more for its norm."""
        results = self._results[:-1]
        if clip_norm is None:
            for result in results:
                result.div_(divisor)
            return
        # One norm per parameter: over a whole bucket at once, fp32 loses four digits.
        norms = [torch.linalg.vector_norm(slot.reduced) for slot in self.slots]
        norm = torch.linalg.vector_norm(torch.stack(norms).double()) / divisor
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0) / divisor
        for result in results:
            result.mul_(factor)

    def _place(self, group: Sequence[nn.Parameter], bucket: int) -> list[Slot]:
        slots, start = [], 0
        for p in group:
            run = slice(start, start + p.numel())
            accumulated = self._accumulators[bucket][run].view(p.shape)
            slots.append(Slot(p, accumulated, self._results[bucket][run].view(p.shape)))
            start += p.numel()
        return slots

    def _watch_use(self) -> None:
        for position, slot in enumerate(self.slots):

            def note(_: Tensor, position: int = position) -> None:
                self._used[position] = 1

            slot.parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]


class _Port:
    """A bucket's way into MPI: its own memory on a CPU, pinned host memory for a GPU."""

    def __init__(self, accumulator: Tensor, result: Tensor) -> None:
        self._accumulator, self._result = accumulator, result
        self._host_send, self._host_receive = _host(accumulator), _host(result)
        self._in_place = accumulator is result
        self._send_span, self._receive_span = span(self._host_send), span(self._host_receive)

    def send(self) -> Span | None:
        if self._in_place:
            if self._host_receive is not self._result:
                self._host_receive.copy_(self._result)
            return None
        if self._host_send is not self._accumulator:
            self._host_send.copy_(self._accumulator)
        return self._send_span

    def receive(self) -> Span:
        return self._receive_span

    def mute(self) -> None:
        self._host_receive.zero_()

    def received(self) -> None:
        if self._host_receive is not self._result:
            self._result.copy_(self._host_receive)


def span(tensor: Tensor) -> Span:
    """Return a contiguous host tensor as a span; the tensor must outlive it."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return Span(tensor.data_ptr(), tensor.numel(), _ELEMENT_TYPES[tensor.dtype])


def _host(tensor: Tensor) -> Tensor:
    """Return the tensor itself on a CPU, pinned memory of its size otherwise."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _accumulation_type(parameter: nn.Parameter) -> torch.dtype:
    if not parameter.dtype.is_floating_point:
        raise ValueError(f"a parameter of type {parameter.dtype} has no gradient to reduce")
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _group(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into runs of one accumulation type and bounded size."""
    groups: list[list[nn.Parameter]] = []
    filled = 0
    for p in parameters:
        nbytes = p.numel() * _accumulation_type(p).itemsize
        full = filled + nbytes > bucket_bytes
        if not groups or full or _accumulation_type(groups[-1][0]) != _accumulation_type(p):
            groups.append([])
            filled = 0
        groups[-1].append(p)
        filled += nbytes
    return groups
