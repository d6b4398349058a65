"""Bucket layout: what goes where, and that all replicas of a model agree about it."""

import pytest
import torch
from torch import nn

from recover.tensors.buckets import GradientBuckets
from tests.tensors.models import BUCKET_BYTES, odd_model


def linear_layers(*widths: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(width)) for width in widths]


def sizes(buckets: GradientBuckets) -> list[int]:
    return [buckets.receive(bucket).count for bucket in range(len(buckets))]


def test_the_layout_depends_on_shapes_and_types_alone() -> None:
    one = GradientBuckets(odd_model(0).parameters(), bucket_bytes=BUCKET_BYTES)
    other = GradientBuckets(odd_model(1).parameters(), bucket_bytes=BUCKET_BYTES)
    assert one.layout == other.layout
    assert sizes(one) == sizes(other)


@pytest.mark.parametrize("change", ["order", "shape", "type", "bound", "frozen"])
def test_the_digest_tells_different_models_apart(change: str) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(6))]
    before = GradientBuckets(parameters, bucket_bytes=64).layout
    changed, bound = list(parameters), 64
    if change == "order":
        changed.reverse()
    elif change == "shape":
        changed[0] = nn.Parameter(torch.zeros(3, 2))
    elif change == "type":
        changed[0] = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    elif change == "frozen":
        changed[0] = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    else:
        bound = 24
    assert GradientBuckets(changed, bucket_bytes=bound).layout != before


def test_the_digest_tells_which_of_two_equal_shapes_is_in_place() -> None:
    parameters = linear_layers(4, 4)
    out_of_place = GradientBuckets(parameters, bucket_bytes=64)
    in_place = GradientBuckets(parameters, bucket_bytes=64, in_place=True)
    assert out_of_place.layout == in_place.layout  # replicas may differ in it


def test_buckets_are_filled_from_the_last_parameter_and_bounded() -> None:
    parameters = linear_layers(10, 3, 100, 4, 4)  # bound: 8 elements of fp32
    buckets = GradientBuckets(parameters, bucket_bytes=32)
    assert sizes(buckets)[:-1] == [8, 100, 3, 10]
    assert [buckets.bucket_of(p) for p in parameters] == [3, 2, 1, 0, 0]


def test_a_bucket_has_one_type() -> None:
    parameters = linear_layers(1, 1, 1)
    parameters[1] = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    buckets = GradientBuckets(parameters, bucket_bytes=1 << 20)
    kinds = [buckets.receive(bucket).type.name for bucket in range(len(buckets))]
    assert kinds == ["FLOAT32", "FLOAT64", "FLOAT32", "FLOAT64"]


def test_the_bound_counts_bytes_of_the_accumulator() -> None:
    halves = [nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(2)]
    assert sizes(GradientBuckets(halves, bucket_bytes=32))[:-1] == [8]
    assert sizes(GradientBuckets(halves, bucket_bytes=31))[:-1] == [4, 4]
    doubles = [nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2)]
    assert sizes(GradientBuckets(doubles, bucket_bytes=63))[:-1] == [4, 4]


def test_a_tied_parameter_has_one_slot_and_a_frozen_one_none() -> None:
    model = odd_model()
    parameters = [*model.parameters(), *model.head.parameters()]
    buckets = GradientBuckets(parameters, bucket_bytes=BUCKET_BYTES)
    slots = [slot.parameter for slot in buckets.slots]
    assert sum(parameter is model.embed.weight for parameter in slots) == 1
    assert all(parameter is not model.frozen.weight for parameter in slots)
    assert len(slots) == len([p for p in model.parameters() if p.requires_grad])


def test_views_are_of_the_parameters_shape_and_do_not_overlap() -> None:
    buckets = GradientBuckets(odd_model().parameters(), bucket_bytes=BUCKET_BYTES)
    for number, slot in enumerate(buckets.slots):
        assert slot.accumulated.shape == slot.reduced.shape == slot.parameter.shape
        slot.accumulated.fill_(number + 1)
    for number, slot in enumerate(buckets.slots):
        assert (slot.accumulated == number + 1).all()


def test_memory_is_twice_the_gradients_in_either_mode() -> None:
    parameters = linear_layers(10, 20)
    tally = 8 * (3 + 2)
    for in_place in (False, True):
        buckets = GradientBuckets(parameters, bucket_bytes=64, in_place=in_place)
        assert buckets.nbytes == 2 * (30 * 4 + tally)


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        GradientBuckets([nn.Parameter(torch.zeros(1), requires_grad=False)], bucket_bytes=8)


def test_a_bound_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        GradientBuckets(linear_layers(1), bucket_bytes=0)


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = [*linear_layers(1), nn.Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(ValueError, match=r"several devices: \['cpu', 'meta'\]"):
        GradientBuckets(parameters, bucket_bytes=8)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        GradientBuckets([nn.Parameter(torch.zeros(1, dtype=torch.complex64))], bucket_bytes=8)
