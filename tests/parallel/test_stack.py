"""What a stack finds on one rank, without a job."""

import pytest
import torch
from torch import nn

from recover.parallel.stack import Stack
from recover.tensors.holders import ParameterHolder


class Half(nn.Module):
    """A part of a pipeline, which names its layer as the whole model does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 3))


def test_a_module_is_one_part_and_its_trained_parameters_have_holders() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    stack = Stack(model)
    holders = stack.holders()
    assert list(holders) == ["0.weight", "1.weight", "1.bias", "2.bias"]  # a tied one once
    held = [holder.parameter for holder in holders.values() if isinstance(holder, ParameterHolder)]
    assert len(held) == 4
    assert all(holder.shards == 1 for holder in holders.values())
    assert len(list(stack.parameters())) == 5  # the frozen one is part of the checksum
    buffers = [tensor for tensor in stack.state() if not isinstance(tensor, nn.Parameter)]
    assert len(buffers) == 3  # running statistics are copied at the start
    assert stack.ddp is None


def test_parts_are_held_in_order() -> None:
    parts = [Half("first"), Half("second")]
    stack = Stack(parts)
    assert list(stack.holders()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(stack.parameters()) == [p for part in parts for p in part.parameters()]


def test_parts_that_call_different_parameters_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two parts of the model have a parameter 'only\.weight'"):
        Stack([Half("only"), Half("only")]).holders()


def test_no_part_is_refused() -> None:
    with pytest.raises(ValueError, match="the list of its parts is empty"):
        Stack([])


def test_a_holder_shows_and_sees_the_gradient_of_its_parameter() -> None:
    model = nn.Linear(2, 1, bias=False)
    (holder,) = Stack(model).holders().values()
    uses: list[int] = []
    holder.watch(lambda: uses.append(1))
    accumulator = torch.ones(1, 2)
    holder.show(accumulator)
    torch.autograd.backward(model(torch.tensor([[1.0, 2.0]])).sum())
    assert uses == [1]
    assert accumulator.tolist() == [[2.0, 3.0]]
    assert holder.seen() is accumulator
    holder.show(None)
    assert model.weight.grad is None
