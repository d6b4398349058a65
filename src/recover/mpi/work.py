"""What a collective of the ulfm process group returns. Layer: mpi. Paper: C."""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What all survivors agreed on after a failure."""

    epoch: int
    survivors: tuple[int, ...]
    """Replicas that are left."""
    failed_ranks: tuple[int, ...]
    """World ranks that died since the last record."""


class WorkUlfm(Work):
    """A collective that is over, with its failure record. Waiting for it returns at once."""

    def __init__(
        self, tensors: list[Tensor], *, epoch: int, failed: bool, record: FailureRecord | None
    ) -> None:
        super().__init__()
        self.epoch = epoch
        """World epoch when the call returned."""
        self.record = record
        """Agreed by all survivors; None unless this very call repaired the group."""
        self.failed_ranks = record.failed_ranks if record else ()
        self.survivors = record.survivors if record else None
        self._tensors = tensors
        self._failed = failed
        devices: list[int | str | torch.device] = [*{t.device for t in tensors if t.is_cuda}]
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(tensors)

    def has_failures(self) -> bool:
        """Return whether the output is undefined *here*; other ranks may have been luckier."""
        return self._failed

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return whether the output is good *here*."""
        return not self._failed

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True; a failure is no exception."""
        return True

    def result(self) -> list[Tensor]:
        """Return the output."""
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """Return a future that is done and holds the output tensors."""
        return self._future
