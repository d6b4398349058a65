"""Torch's DistributedDataParallel as the model: Path 1 of Appendix C. Layer: parallel.

DDP calls a communication hook for each of its own buckets, in the middle of the last backward pass,
as soon as the gradients in it are complete. The hook takes that as a *signal* and no more: it
advances the protocol, which reduces ReCoVer's own buckets (their layout never changes, DDP's does
after the first iteration), and gives DDP its bucket back as it was. So DDP leaves this rank's own
gradient in ``param.grad``, which is the accumulator and thereby the snapshot.

The hook never raises: an exception inside it would leave DDP's reducer unusable.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from recover.tensors.buckets import GradientBuckets


class BackwardSignal:
    """Tells how many of the buckets are complete while the last backward pass runs.

    Raises ValueError for a DDP module that reduces over another group, or owns gradient storage.
    """

    def __init__(
        self,
        model: DistributedDataParallel | None,
        buckets: GradientBuckets,
        group: Callable[[], dist.ProcessGroup],
    ) -> None:
        self._buckets = buckets
        self._model = model
        self._on_complete: Callable[[int], None] | None = None
        self._signalled = False
        self._missing: list[int] = []
        if self._model is not None:
            _require_ours(self._model, group())
            self._model.broadcast_buffers = False  # made equal at the start, by the trainer
            self._model.register_comm_hook(None, self._hook)

    def expect(self, on_complete: Callable[[int], None] | None) -> None:
        """Prepare the next forward and backward pass.

        With ``on_complete`` it is the last one before synchronisation: the callback gets the number
        of leading buckets that are complete. Without, gradients are only accumulated.
        """
        if self._model is None:
            return
        self._on_complete = on_complete
        self._model.require_backward_grad_sync = on_complete is not None
        if on_complete is None:
            return
        sizes = [0] * (len(self._buckets) - 1)
        for slot in self._buckets.slots:
            sizes[self._buckets.bucket_of(slot.parameter)] += 1
        self._missing = sizes
        if self._model.find_unused_parameters:
            self._show_gradients()

    def _show_gradients(self) -> None:
        """Give a gradient of zeros to parameters that have none in ``param.grad``.

        DDP remembers which parameters an earlier microbatch used and refuses to find no gradient
        there, although the accumulator has it. It adds nothing, and does not count as use.
        """
        for slot in self._buckets.slots:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)

    def after_backward(self) -> None:
        """Bring in what a backward pass left outside the accumulators, once."""
        if self._signalled:  # the hook has collected it; DDP has put a copy back
            self._buckets.rebind()
        else:  # accumulated only, or under the user's own `no_sync`
            self._buckets.collect()
        self._on_complete, self._signalled = None, False

    def _hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if self._on_complete is not None:  # else a backward pass of the user's own
            self._signalled = True
            for parameter in bucket.parameters():
                self._buckets.collect_one(parameter)
                self._missing[self._buckets.bucket_of(parameter)] -= 1
            complete = next((b for b, n in enumerate(self._missing) if n), len(self._missing))
            self._on_complete(complete)
        future: Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def _require_ours(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    if model.process_group is not group:
        raise ValueError(
            "the model's DistributedDataParallel reduces over another process group; "
            "construct it with process_group=job.process_group"
        )
    if model.gradient_as_bucket_view:
        raise ValueError(
            "DistributedDataParallel(gradient_as_bucket_view=True) keeps gradients in its own "
            "buckets; leave it False, ReCoVer's buckets already avoid the second copy"
        )
