"""Pre-reduction copies of buckets that are reduced in place. Layer: tensors. Paper: 4.2, D.3.

Only a stack that forces in-place reduction needs these. A snapshot costs one copy per bucket and
step, and as much memory as the gradients. Restoring is scheduled either in line or on a side
stream, behind the forward pass of the first extra microbatch: a CUDA stream where the buckets live
on a GPU, one helper thread on a CPU (a copy releases the interpreter lock).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from recover.core.policies import RestoreMode


class Snapshots:
    """The snapshots of one rank's buckets."""

    def __init__(self, buckets: list[Tensor]) -> None:
        self._buckets = buckets
        self._copies = [torch.empty_like(bucket) for bucket in buckets]
        self._side: SideStream | None = None

    def keep(self, bucket: int) -> None:
        """Copy a bucket before it is reduced."""
        self._copies[bucket].copy_(self._buckets[bucket])

    def restore(self, buckets: tuple[int, ...], mode: RestoreMode) -> None:
        """Copy snapshots back, in line or on the side stream as ``mode`` says."""

        def copy_back() -> None:
            for bucket in buckets:
                self._buckets[bucket].copy_(self._copies[bucket])

        if mode is RestoreMode.NON_BLOCKING:
            if self._side is None:
                self._side = SideStream(self._buckets[0].device)
            self._side.submit(copy_back)
        else:
            copy_back()

    def wait(self) -> None:
        """Return once no restoration is under way: call before a gradient is added."""
        if self._side is not None:
            self._side.wait()


class SideStream:
    """Runs copies beside the computation: on a CUDA stream, or on a thread for CPU tensors."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device)
        self._thread = None if self._stream else ThreadPoolExecutor(1, "recover-restore")
        self._running: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Start ``work``; it sees everything that the current stream was given before."""
        if self._thread is not None:
            self._running = self._thread.submit(work)
            return
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        """Order what follows in the current stream after everything submitted here."""
        if self._running is not None:
            self._running.result()
            self._running = None
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
