"""Which buckets are said to be complete while a backward pass runs, without a job."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from recover.errors import RecoverError
from recover.parallel.overlap import CompletionSignal
from recover.parallel.stack import Stack
from recover.tensors.buckets import GradientBuckets

LAYERS = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS)))


def signal_of(model: nn.Module) -> tuple[CompletionSignal, GradientBuckets]:
    """Return the signal with a bucket for each layer, and the buckets."""
    holders = Stack(model).holders().values()
    buckets = GradientBuckets(holders, bucket_bytes=12 * 4)
    signal = CompletionSignal(buckets)
    buckets.begin()
    return signal, buckets


def backward(model: nn.Module, signal: CompletionSignal) -> list[int]:
    """Run a pass; return what it says about its own progress."""
    said: list[int] = []
    signal.expect(said.append)
    torch.autograd.backward(model(torch.ones(2, 3)).sum())
    signal.after_backward()
    return said


def test_buckets_are_complete_from_the_last_layer_to_the_first() -> None:
    model = layers()
    signal, buckets = signal_of(model)
    assert len(buckets) == LAYERS + 1
    said = backward(model, signal)
    assert sorted(said) == said
    assert set(said) == set(range(LAYERS + 1))


def test_without_a_callback_nothing_is_said() -> None:
    model = layers()
    signal, _ = signal_of(model)
    assert backward(model, signal)
    signal.expect(None)
    torch.autograd.backward(model(torch.ones(2, 3)).sum())
    signal.after_backward()


def test_a_parameter_that_the_pass_does_not_use_keeps_its_bucket_back() -> None:
    model = layers()
    signal, _ = signal_of(model)
    said: list[int] = []
    signal.expect(said.append)
    torch.autograd.backward(model[3](model[1](model[0](torch.ones(2, 3)))).sum())
    signal.after_backward()
    assert max(said) == 1  # the last layer's


def test_a_gradient_outside_the_accumulator_is_not_complete() -> None:
    model = layers()
    signal, buckets = signal_of(model)
    model.zero_grad()  # as a careless loop does
    assert backward(model, signal) == []
    assert all(slot.settled for slot in buckets.slots)  # they were brought in afterwards


class Twice(nn.Module):
    """Uses its second layer in two parts of the pass that autograd runs one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in (self.stack[3], self.stack[0], self.stack[3]):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_in_two_pieces_is_refused() -> None:
    model = Twice()
    signal, _ = signal_of(model)
    with pytest.raises(RecoverError, match=r"added twice to .* without overlap"):
        backward(model, signal)


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2_completes_layer_by_layer_and_the_outermost_module_last() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.norm = nn.Linear(3, 3)  # of the outermost module: reduced last

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.norm(self.layers(x)))

    model, mesh = Model(), init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    signal, buckets = signal_of(model)
    assert len(buckets) == LAYERS + 2
    said = backward(model, signal)
    assert sorted(said) == said
    assert set(said) >= {1, 2, 3, LAYERS + 1}  # the first layer needs no gradient of its input
