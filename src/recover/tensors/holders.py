"""Where a gradient is found: the seam between a training stack and the buckets. Layer: tensors.

A rank reduces whatever it holds: the gradient of a whole parameter, of its shard, or of many
parameters that a stack keeps flat. A *holder* knows where autograd (or the stack) puts that
gradient and where the optimizer looks for it; the buckets know nothing else about a stack.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


class Holder(Protocol):
    """One gradient of this rank, as a contiguous tensor of its local shape."""

    @property
    def shape(self) -> torch.Size:
        """Shape of what this rank holds."""

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the optimizer wants it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shards(self) -> int:
        """Number of ranks of the replica that hold different parts of it; 1 where it is whole."""

    @property
    def description(self) -> str:
        """What must be equal on the ranks of other replicas that hold the same shard."""

    def show(self, gradient: Tensor | None) -> None:
        """Put ``gradient``, or none, where it is added to and where the optimizer reads it."""

    def seen(self) -> Tensor | None:
        """Return what is there now: what was shown, added to or not, or something new."""

    def holds(self, gradient: Tensor) -> bool:
        """Return whether ``gradient`` is all there is, once ``used`` has been called."""

    def watch(self, used: Callable[[], None]) -> None:
        """Have ``used`` called whenever a backward pass has added to the gradient.

        ``used`` may take away what is there and show something else.
        """


class ParameterHolder:
    """A parameter's ``grad``; of a DTensor, this rank's part of it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._local = local(parameter)

    @property
    def shape(self) -> torch.Size:
        return self._local.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        return self._local.device

    @property
    def shards(self) -> int:
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return 1
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if isinstance(placement, Shard))

    @property
    def description(self) -> str:
        placed = self.parameter.placements if isinstance(self.parameter, DTensor) else ""
        return f"{tuple(self.shape)} of {tuple(self.parameter.shape)} {placed} {self.dtype}"

    def show(self, gradient: Tensor | None) -> None:
        parameter = self.parameter
        if gradient is not None and isinstance(parameter, DTensor):
            gradient = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = gradient

    def seen(self) -> Tensor | None:
        gradient = self.parameter.grad
        if isinstance(gradient, DTensor):
            assert isinstance(self.parameter, DTensor)
            if gradient.placements != self.parameter.placements:  # a sum that is still to be made
                gradient = gradient.redistribute(placements=self.parameter.placements)
            return gradient.to_local()
        return gradient

    def holds(self, gradient: Tensor) -> bool:
        there = self.parameter.grad
        if isinstance(there, DTensor):
            assert isinstance(self.parameter, DTensor)
            if there.placements != self.parameter.placements:
                return False
        return there is not None and local(there).data_ptr() == gradient.data_ptr()

    def watch(self, used: Callable[[], None]) -> None:
        # FSDP2 calls these hooks too, once it has added the reduced shard.
        self.parameter.register_post_accumulate_grad_hook(lambda _: used())  # type: ignore[no-untyped-call]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: itself, unless it is a DTensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
