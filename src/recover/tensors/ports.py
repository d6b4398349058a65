"""A flat tensor's way into MPI and back. Layer: tensors."""

import torch
from torch import Tensor

from recover.mpi.transport import ElementType, Span

_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
    torch.uint8: ElementType.BYTE,
}


class Port:
    """A bucket's way into MPI: its own memory on a CPU, pinned host memory for a GPU."""

    def __init__(self, accumulator: Tensor, result: Tensor) -> None:
        self._accumulator, self._result = accumulator, result
        self._host_send, self._host_receive = _host(accumulator), _host(result)
        self._in_place = accumulator is result
        self._send_span, self._receive_span = span(self._host_send), span(self._host_receive)

    def send(self) -> Span | None:
        """Return what this rank adds, or None where it is in ``receive`` already."""
        if self._in_place:
            if self._host_receive is not self._result:
                self._host_receive.copy_(self._result)
            return None
        if self._host_send is not self._accumulator:
            self._host_send.copy_(self._accumulator)
        return self._send_span

    def receive(self) -> Span:
        """Return where the sum goes."""
        return self._receive_span

    def mute(self) -> None:
        """Make ``receive`` hold zeros."""
        self._host_receive.zero_()

    def received(self) -> None:
        """Take the sum over from host memory."""
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
