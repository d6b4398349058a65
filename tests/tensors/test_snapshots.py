"""Real copies of buckets that are reduced in place, and the side stream that brings them back."""

import threading

import pytest
import torch
from torch import Tensor

from recover.core.policies import RestoreMode
from recover.tensors.snapshots import SideStream, Snapshots

MODES = pytest.mark.parametrize("mode", [RestoreMode.BLOCKING, RestoreMode.NON_BLOCKING])


def buckets() -> list[Tensor]:
    return [torch.arange(4.0), torch.arange(3.0) + 10, torch.zeros(2, dtype=torch.float64)]


@MODES
def test_restoring_brings_back_exactly_the_named_buckets(mode: RestoreMode) -> None:
    live, before = buckets(), buckets()
    snapshots = Snapshots(live)
    for bucket in range(3):
        snapshots.keep(bucket)
        live[bucket].fill_(float("nan"))
    snapshots.restore((0, 2), mode)
    snapshots.wait()
    assert torch.equal(live[0], before[0])
    assert live[1].isnan().all()
    assert torch.equal(live[2], before[2])


@MODES
def test_a_bucket_can_be_kept_and_restored_again(mode: RestoreMode) -> None:
    live = buckets()
    snapshots = Snapshots(live)
    for value in (1.0, 2.0):
        live[0].fill_(value)
        snapshots.keep(0)
        live[0].fill_(-1.0)
        snapshots.restore((0,), mode)
        snapshots.wait()
        assert (live[0] == value).all()


def test_waiting_without_a_restoration_returns() -> None:
    Snapshots(buckets()).wait()


def test_the_side_stream_works_beside_the_caller_until_it_waits() -> None:
    stream = SideStream(torch.device("cpu"))
    release, threads = threading.Event(), []

    def work() -> None:
        assert release.wait(60)
        threads.append(threading.get_ident())

    stream.submit(work)
    assert not threads  # submit did not wait for it
    release.set()
    stream.wait()
    assert threads
    assert threads[0] != threading.get_ident()


def test_an_error_on_the_side_stream_reaches_who_waits() -> None:
    stream = SideStream(torch.device("cpu"))

    def work() -> None:
        raise RuntimeError("no room")

    stream.submit(work)
    with pytest.raises(RuntimeError, match="no room"):
        stream.wait()
