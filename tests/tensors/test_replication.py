"""Making replicas equal at the start: byte for byte, whatever the types."""

import torch
from torch import Tensor

from recover.tensors.replication import ModelCopy
from tests.tensors.models import elements


def odd_tensors(seed: int) -> list[Tensor]:
    """Tensors of many types: strided, empty and scalar ones, NaN and infinity among the values."""
    torch.manual_seed(seed)
    special = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45]) if seed else torch.zeros(4)
    return [
        torch.randn(3, 5),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.randn(4, dtype=torch.float64),
        torch.randn(3, dtype=torch.complex64),
        torch.randint(-9, 9, (5,)),
        torch.randint(0, 2, (3,)).bool(),
        torch.randn(()),
        torch.zeros(0, 3),
        torch.randn(4, 6).t(),
        special,
    ]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def copy_from(source: list[Tensor], target: list[Tensor]) -> None:
    """Do what the guarded reduction does: one speaks, the other is muted."""
    speaker, listener = ModelCopy(source), ModelCopy(target)
    assert len(speaker) == len(listener)
    for bucket in range(len(speaker)):
        speaker.snapshot(bucket)
        listener.mute(bucket)
        sent = speaker.send(bucket)
        assert sent is not None
        total = elements(sent) + elements(listener.receive(bucket))
        for side in (speaker, listener):
            elements(side.receive(bucket)).copy_(total)
            side.received(bucket)
    for side in (speaker, listener):
        side.adopt()


def test_all_types_are_copied_byte_for_byte() -> None:
    source, target = odd_tensors(1), odd_tensors(2)
    before = [tensor.clone() for tensor in source]
    copy_from(source, target)
    for mine, theirs, kept in zip(source, target, before, strict=True):
        assert same_bytes(mine, kept)
        assert same_bytes(theirs, kept)


def test_the_tensors_stay_the_same_objects_in_the_same_memory() -> None:
    source, target = odd_tensors(1), odd_tensors(2)
    addresses = [tensor.data_ptr() for tensor in target]
    copy_from(source, target)
    assert [tensor.data_ptr() for tensor in target] == addresses


def test_nothing_changes_before_it_is_adopted() -> None:
    target = odd_tensors(2)
    before = [tensor.clone() for tensor in target]
    listener = ModelCopy(target)
    for bucket in range(len(listener)):
        listener.mute(bucket)
    assert all(same_bytes(*pair) for pair in zip(target, before, strict=True))


def test_parameters_that_require_a_gradient_are_overwritten_in_place() -> None:
    source = [torch.nn.Parameter(torch.ones(3))]
    target = [torch.nn.Parameter(torch.zeros(3))]
    copy_from(list(source), list(target))
    assert torch.equal(target[0], torch.ones(3))
    assert target[0].requires_grad
