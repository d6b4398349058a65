"""What autograd leaves in the buckets, what is reduced, and what the optimizer gets to see."""

import copy

import pytest
import torch
from torch import Tensor, nn

from recover.core.policies import RestoreMode
from recover.tensors.buckets import GradientBuckets
from tests.tensors.models import (
    BUCKET_BYTES,
    Odd,
    accumulate,
    elements,
    microbatch,
    odd_model,
    reduce_all,
)

IN_PLACE = pytest.mark.parametrize("in_place", [False, True])


def buckets_of(model: nn.Module, *, in_place: bool = False) -> GradientBuckets:
    return GradientBuckets(model.parameters(), bucket_bytes=BUCKET_BYTES, in_place=in_place)


def replicas(number: int, *, in_place: bool = False) -> tuple[list[Odd], list[GradientBuckets]]:
    models = [odd_model() for _ in range(number)]
    members = [buckets_of(model, in_place=in_place) for model in models]
    for buckets in members:
        buckets.begin()
    return models, members


def run_backward(tensor: Tensor) -> None:
    tensor.sum().backward()  # type: ignore[no-untyped-call]


def plain_gradients(model: Odd, numbers: range) -> dict[str, Tensor | None]:
    """What torch alone computes for the sum of these microbatches."""
    alone = copy.deepcopy(model)
    alone.head.weight = alone.embed.weight
    alone.zero_grad()
    for number in numbers:
        alone(microbatch(number)).backward()
    return {name: parameter.grad for name, parameter in alone.named_parameters()}


def assert_gradients(model: Odd, expected: dict[str, Tensor | None], divisor: int) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, wanted / divisor, msg=name)


def test_autograd_adds_straight_into_the_accumulators() -> None:
    model = odd_model()
    buckets = buckets_of(model)
    buckets.begin()
    model(microbatch(0)).backward()
    expected = plain_gradients(model, range(1))
    for slot in buckets.slots:
        assert slot.parameter.grad is slot.accumulated
    torch.testing.assert_close(model.body.weight.grad, expected["body.weight"])


@IN_PLACE
def test_the_reduced_gradient_is_the_sum_over_all_replicas(in_place: bool) -> None:
    models, members = replicas(3, in_place=in_place)
    losses = []
    for index, (model, buckets) in enumerate(zip(models, members, strict=True)):
        losses += accumulate(buckets, model, range(2 * index, 2 * index + 2))
    reduce_all(members)
    expected = plain_gradients(models[0], range(6))
    for model, buckets in zip(models, members, strict=True):
        buckets.publish(6)
        totals = buckets.totals
        assert totals.loss == pytest.approx(sum(losses))
        assert totals.tokens == 30
        assert_gradients(model, expected, 6)


@IN_PLACE
def test_a_second_iteration_starts_from_zero(in_place: bool) -> None:
    models, members = replicas(2, in_place=in_place)
    for first in (0, 4):
        for index, (model, buckets) in enumerate(zip(models, members, strict=True)):
            buckets.begin()
            accumulate(buckets, model, range(first + 2 * index, first + 2 * index + 2))
        reduce_all(members)
        for buckets in members:
            buckets.publish(4)
            assert buckets.totals.tokens == 20
    assert_gradients(models[0], plain_gradients(models[0], range(4, 8)), 4)


@IN_PLACE
def test_a_muted_replica_adds_nothing_even_where_it_holds_nan(in_place: bool) -> None:
    models, members = replicas(2, in_place=in_place)
    accumulate(members[0], models[0], range(2))
    accumulate(members[1], models[1], range(2, 4))
    for bucket in range(len(members[1])):
        members[1].snapshot(bucket)
    for slot in members[1].slots:
        slot.accumulated.fill_(float("nan"))
    reduce_all(members, muted=frozenset({1}))
    expected = plain_gradients(models[0], range(2))
    for model, buckets in zip(models, members, strict=True):
        buckets.publish(2)
        assert buckets.totals.tokens == 10
        assert_gradients(model, expected, 2)


def test_reduction_leaves_the_accumulators_as_they_were() -> None:
    models, members = replicas(2)
    for model, buckets in zip(models, members, strict=True):
        accumulate(buckets, model, range(2))
    before = [slot.accumulated.clone() for slot in members[0].slots]
    reduce_all(members)
    for slot, kept in zip(members[0].slots, before, strict=True):
        assert torch.equal(slot.accumulated, kept)


@IN_PLACE
def test_restored_buckets_go_on_from_this_ranks_own_gradient(in_place: bool) -> None:
    """A failed reduction leaves rubbish; the extra microbatch is added to what was there before."""
    for mode in (RestoreMode.BLOCKING, RestoreMode.NON_BLOCKING):
        models, members = replicas(1, in_place=in_place)
        (model,), (buckets,) = models, members
        accumulate(buckets, model, range(2))
        stale = tuple(range(len(buckets)))
        for bucket in stale:
            buckets.snapshot(bucket)
            elements(buckets.receive(bucket)).fill_(float("nan"))
        buckets.restore(stale, mode)
        accumulate(buckets, model, range(2, 3))
        reduce_all(members)
        buckets.publish(3)
        assert buckets.totals.tokens == 15
        assert_gradients(model, plain_gradients(model, range(3)), 3)


@IN_PLACE
def test_discard_starts_again_from_zero(in_place: bool) -> None:
    models, members = replicas(1, in_place=in_place)
    accumulate(members[0], models[0], range(3))
    members[0].snapshot(len(members[0]) - 1)
    members[0].discard()
    losses = accumulate(members[0], models[0], range(3, 4))
    reduce_all(members)
    members[0].publish(1)
    totals = members[0].totals
    assert totals.loss == pytest.approx(losses[0])
    assert totals.tokens == 5
    assert_gradients(models[0], plain_gradients(models[0], range(3, 4)), 1)


# --- parameters without a gradient ---------------------------------------------------------


def test_frozen_and_unused_parameters_keep_no_gradient() -> None:
    models, members = replicas(2)
    for model, buckets in zip(models, members, strict=True):
        accumulate(buckets, model, range(1))
    reduce_all(members)
    members[0].publish(2)
    assert models[0].unused.weight.grad is None
    assert models[0].frozen.weight.grad is None
    assert models[0].body.weight.grad is not None


def test_a_parameter_that_one_replica_used_has_a_gradient_on_all() -> None:
    models, members = replicas(2)
    for model, buckets in zip(models, members, strict=True):
        accumulate(buckets, model, range(1))
    models[1].unused(torch.ones(6)).sum().backward()
    reduce_all(members)
    for model, buckets in zip(models, members, strict=True):
        buckets.publish(2)
        torch.testing.assert_close(model.unused.weight.grad, torch.full((3, 6), 0.5))


def test_use_does_not_outlive_its_iteration() -> None:
    models, members = replicas(1)
    models[0].unused(torch.ones(6)).sum().backward()
    reduce_all(members)
    members[0].publish(1)
    assert models[0].unused.weight.grad is not None
    members[0].begin()
    accumulate(members[0], models[0], range(1))
    reduce_all(members)
    members[0].publish(1)
    assert models[0].unused.weight.grad is None


# --- what users do with gradients ----------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "between"])
def test_zero_grad_in_user_code_does_no_harm(when: str) -> None:
    """Between microbatches it hides the accumulator; what is there and what comes both count."""
    models, members = replicas(1)
    if when == "before":
        models[0].zero_grad(set_to_none=True)
    accumulate(members[0], models[0], range(1))
    if when == "between":
        models[0].zero_grad(set_to_none=True)
    accumulate(members[0], models[0], range(1, 2))
    reduce_all(members)
    members[0].publish(2)
    assert_gradients(models[0], plain_gradients(models[0], range(2)), 2)


def test_an_optimizer_steps_over_published_gradients() -> None:
    models, members = replicas(1)
    alone = odd_model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (models[0], alone)]
    for step in range(3):
        members[0].begin()
        accumulate(members[0], models[0], range(step, step + 1))
        reduce_all(members)
        members[0].publish(1)
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        alone(microbatch(step)).backward()
        optimizers[1].step()
    for mine, theirs in zip(models[0].parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# --- types ---------------------------------------------------------------------------------


def test_16_bit_parameters_accumulate_in_fp32() -> None:
    """In bf16, 1 + 1/512 is 1: a thousand small gradients after a large one would be lost."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buckets = GradientBuckets([parameter], bucket_bytes=64)
    buckets.begin()
    for gradient in (1.0, *[2.0**-9] * 1024):
        run_backward(parameter * torch.tensor(gradient, dtype=torch.bfloat16))
        buckets.collect()
    assert buckets.slots[0].accumulated.dtype == torch.float32
    assert float(buckets.slots[0].accumulated) == 3.0
    reduce_all([buckets])
    buckets.publish(2)
    assert parameter.grad is not None
    assert (parameter.grad.dtype, float(parameter.grad)) == (torch.bfloat16, 1.5)


def test_fp64_parameters_are_reduced_in_fp64() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    members = [GradientBuckets([parameter], bucket_bytes=64) for _ in range(2)]
    for buckets, gradient in zip(members, (1.0, 2.0**-40), strict=True):
        buckets.begin()
        run_backward(parameter * gradient)
        buckets.collect()
    reduce_all(members)
    members[0].publish(1)
    assert float(members[0].slots[0].reduced) == 1.0 + 2.0**-40


def test_scalars_and_empty_parameters_have_slots() -> None:
    scalar, empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))
    buckets = GradientBuckets([scalar, empty], bucket_bytes=64)
    buckets.begin()
    run_backward(scalar**2 + empty.sum())
    reduce_all([buckets])
    buckets.publish(1)
    assert scalar.grad is not None
    assert (scalar.grad.shape, float(scalar.grad)) == (torch.Size(()), 4.0)


def test_the_loss_is_summed_in_fp64() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    buckets = GradientBuckets([parameter], bucket_bytes=64)
    buckets.begin()
    for value in (2.0**24, 1.0, 1.0):
        buckets.add_loss(torch.tensor(value))
    reduce_all([buckets])
    buckets.publish(1)
    assert buckets.totals.loss == 2.0**24 + 2
