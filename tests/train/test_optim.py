"""The optimizer: what decays, the learning rate's shape, fp32 masters, and that it all learns."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from recover.train.model import Decoder, ModelConfig, build
from recover.train.optim import (
    MasterWeights,
    adamw,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)
from recover.train.text import TextWindows, load_text

MICRO = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, hidden=64, sequence=32)


def train(model: Decoder, *, steps: int, peak: float) -> list[float]:
    windows = TextWindows(load_text(), sequences_per_microbatch=8, sequence=32, seed=0)
    optimizer = adamw(model, peak=peak)
    losses = []
    for step in range(steps):
        lr = learning_rate(step, peak=peak, warmup=5, steps=steps, floor_fraction=0.1)
        set_learning_rate(optimizer, lr)
        optimizer.zero_grad()
        loss = model(windows[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_few_steps_on_the_default_text_learn_and_repeat_exactly() -> None:
    models = [build(MICRO, seed=0) for _ in range(2)]
    first, second = (train(model, steps=40, peak=1e-2) for model in models)
    assert first[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(first[-5:]) / 5 < first[0] - 1.5
    assert first == second
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_bfloat16_parameters_learn_alike() -> None:
    wide, narrow = build(MICRO, seed=0), build(MICRO, seed=0, dtype=torch.bfloat16)
    expected, losses = train(wide, steps=20, peak=1e-2), train(narrow, steps=20, peak=1e-2)
    assert losses[-1] < losses[0] - 1.0
    assert losses[-1] == pytest.approx(expected[-1], abs=0.1)


def test_norms_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    model = build(MICRO, seed=0)
    model.embedding.weight.requires_grad_(False)
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(vectors["params"]) == 2 * MICRO.layers + 1
    known = {id(p) for p in matrices["params"]}
    assert id(model.embedding.weight) not in known
    assert len(known) == 7 * MICRO.layers


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Identity has no trainable parameters"):
        adamw(nn.Identity(), peak=1e-3)


def test_fp32_parameters_get_torch_adamw() -> None:
    optimizer = adamw(build(MICRO, seed=0), peak=3e-3)
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["betas"], group["fused"], group["lr"]) == ((0.9, 0.95), False, 3e-3)
    set_learning_rate(optimizer, 1e-4)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}


def rate(step: int, *, warmup: int = 10, floor_fraction: float = 0.1) -> float:
    return learning_rate(step, peak=2.0, warmup=warmup, steps=110, floor_fraction=floor_fraction)


def test_the_learning_rate_rises_falls_and_stays() -> None:
    assert [rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert rate(60) == pytest.approx((2.0 + 0.2) / 2)  # half way down
    assert [rate(110), rate(10_000)] == pytest.approx([0.2, 0.2])
    curve = [rate(step) for step in range(111)]
    assert curve[:10] == sorted(curve[:10])
    assert curve[10:] == sorted(curve[10:], reverse=True)
    assert rate(0, warmup=0) == 2.0
    assert rate(109, warmup=110) == 2.0
    assert rate(109, floor_fraction=0.0) > 0.0
    assert {rate(step, warmup=0, floor_fraction=1.0) for step in range(120)} == {2.0}


@pytest.mark.parametrize(
    ("step", "warmup", "steps", "peak", "floor_fraction", "message"),
    [
        (-1, 0, 1, 1.0, 0.0, "step=-1"),
        (0, 0, 0, 1.0, 0.0, "steps=0"),
        (0, 5, 4, 1.0, 0.0, "warmup=5"),
        (0, 0, 1, 0.0, 0.0, "peak=0.0"),
        (0, 0, 1, math.nan, 0.0, "peak=nan"),
        (0, 0, 1, 1.0, 1.5, "floor_fraction=1.5"),
    ],
)
def test_a_wrong_schedule_is_refused(
    step: int, warmup: int, steps: int, peak: float, floor_fraction: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(step, peak=peak, warmup=warmup, steps=steps, floor_fraction=floor_fraction)


class Weights(nn.Module):
    """A matrix and a vector whose gradients the test writes."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rounded = torch.randn(4, 6, generator=generator).to(torch.bfloat16)
        self.matrix = nn.Parameter(rounded.to(dtype))
        self.vector = nn.Parameter(torch.ones(6, dtype=dtype))

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        for parameter in self.parameters():
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            parameter.grad = drawn.to(parameter.dtype)
        optimizer.step()


def masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry["master"] for entry in optimizer.state_dict()["state"].values()]


def test_masters_follow_fp32_adamw_exactly_and_weights_are_their_rounding() -> None:
    narrow, wide = Weights(), Weights(torch.float32)
    ours, theirs = adamw(narrow, peak=1e-3), adamw(wide, peak=1e-3)
    assert isinstance(ours, MasterWeights)
    for number in range(30):
        for optimizer in (ours, theirs):
            set_learning_rate(optimizer, 1e-3 / (1 + number))
        narrow.step(ours, number)
        wide.step(theirs, number)
    pairs = zip(masters_of(ours), wide.parameters(), narrow.parameters(), strict=True)
    for master, reference, rounded in pairs:
        assert torch.equal(master, reference)
        assert torch.equal(rounded, reference.to(torch.bfloat16))


def test_changes_too_small_for_bfloat16_add_up() -> None:
    masters, lossy = Weights(), Weights()
    bare = torch.optim.AdamW(lossy.parameters(), lr=1e-4, weight_decay=0.0)
    ours = adamw(masters, peak=1e-4, weight_decay=0.0)
    for _ in range(200):
        for model, optimizer in ((masters, ours), (lossy, bare)):
            model.vector.grad = torch.ones_like(model.vector)
            optimizer.step()
    assert torch.equal(lossy.vector, torch.ones(6, dtype=torch.bfloat16))
    torch.testing.assert_close(masters_of(ours)[1], torch.full((6,), 0.98), rtol=1e-3, atol=0)
    assert masters.vector[0].item() == pytest.approx(0.98, abs=4e-3)
    assert torch.equal(masters.matrix, Weights().matrix)  # it never had a gradient


def test_fp32_gradients_of_bfloat16_weights_are_read_as_they_are() -> None:
    model, wide = Weights(), Weights(torch.float32)
    ours, theirs = adamw(model, peak=1e-3), adamw(wide, peak=1e-3)
    grad = torch.randn(6, generator=torch.Generator().manual_seed(1)) * 1e-9  # eps matters
    if hasattr(model.vector, "grad_dtype"):
        model.vector.grad_dtype = torch.float32
    else:
        pytest.skip("this torch ties the type of a gradient to that of its parameter")
    model.vector.grad, wide.vector.grad = grad.clone(), grad.clone()
    ours.step()
    theirs.step()
    assert torch.equal(masters_of(ours)[1], wide.vector)
    ours.zero_grad()
    assert model.vector.grad is None


def test_a_weight_written_by_someone_else_becomes_the_master() -> None:
    """Replicas start by taking over the weights of one of them, after the optimizer was made."""
    changed, other = Weights(), Weights()
    with torch.no_grad():
        other.matrix.mul_(2)
    ours, theirs = adamw(changed, peak=1e-3), adamw(other, peak=1e-3)
    with torch.no_grad():
        changed.matrix.copy_(other.matrix)
    for number in range(3):
        changed.step(ours, number)
        other.step(theirs, number)
    for one, two in zip(masters_of(ours), masters_of(theirs), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_restored_optimizer_goes_on_bit_by_bit(steps_before: int) -> None:
    model = Weights()
    optimizer = adamw(model, peak=1e-3)
    for number in range(steps_before):
        model.step(optimizer, number)
    set_learning_rate(optimizer, 5e-4)
    saved = copy.deepcopy(optimizer.state_dict())
    restored = Weights()
    again = adamw(restored, peak=1e-3)
    restored.step(again, 99)
    again.load_state_dict(saved)
    for number in range(3, 6):
        model.step(optimizer, number)
        restored.step(again, number)
    assert {group["lr"] for group in again.param_groups} == {5e-4}
    for one, two in zip(masters_of(optimizer), masters_of(again), strict=True):
        assert torch.equal(one, two)
    for mine, yours in zip(model.parameters(), restored.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_a_state_without_masters_is_refused() -> None:
    optimizer = adamw(Weights(), peak=1e-3)
    plain = adamw(Weights(torch.float32), peak=1e-3).state_dict()
    with pytest.raises(ValueError, match="holds 0 parameters, this optimizer 2"):
        optimizer.load_state_dict(plain)


def test_masters_take_no_closure() -> None:
    with pytest.raises(ValueError, match="no closure"):
        adamw(Weights(), peak=1e-3).step(lambda: 0.0)
