"""The same training by one process: plain torch on the recorded microbatch ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recover.records import RunRecord
from tests.stacks.gathering import Named
from tests.stacks.model import Momentum, Sentences, Tiny, build, loss_of


@dataclass(frozen=True, slots=True)
class Alone:
    """What one process saw."""

    losses: Sequence[float]
    gradients: Sequence[Named]
    """Of each step, as the optimizer got them."""
    norms: Sequence[float]
    """Of the gradients before they were clipped."""
    parameters: Named
    """At the end."""


def train_alone(record: RunRecord, clip_norm: float | None, *, narrow: bool = False) -> Alone:
    """Train on the recorded ids from the parameters of replica 0; ``narrow`` computes in bf16."""
    model = build(seed=0)
    optimizer = Momentum(model.parameters())
    losses, gradients, norms = [], [], []
    for step in record.steps:
        optimizer.zero_grad()
        ids = [number for numbers in step.ids.values() for number in numbers]
        losses.append(_accumulate(model, ids, narrow=narrow))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or torch.inf)))
        gradients.append(_tensors(model, gradients=True))
        optimizer.step()
    return Alone(losses, gradients, norms, _tensors(model, gradients=False))


def _accumulate(model: Tiny, ids: Sequence[int], *, narrow: bool) -> float:
    """Leave the mean gradient of the microbatches in the model; return their mean loss."""
    total = 0.0
    for number in sorted(ids):
        pieces = Sentences()[number].chunk(2 if narrow else 1)  # each rank rounds its own
        for words in pieces:
            logits = _narrow(model, words[:, :-1]) if narrow else model(words[:, :-1])
            loss = loss_of(logits, words[:, 1:]) / len(pieces)
            torch.autograd.backward(loss / len(ids))
            total += loss.item()
    return total / len(ids)


def _narrow(model: Tiny, words: Tensor) -> Tensor:
    """Compute in bf16 with parameters in fp32, as a mixed precision policy does."""
    names = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    logits: Tensor = torch.func.functional_call(model, names, words)
    return logits


def _tensors(model: Tiny, *, gradients: bool) -> Named:
    found: Named = {}
    for name, parameter in model.named_parameters():
        tensor: Any = parameter.grad if gradients else parameter
        found[name] = None if tensor is None else tensor.detach().clone()
    return found


def assert_close(got: Named, wanted: Named, tolerance: float, context: str) -> None:
    """Compare what a rank holds, all of the model or a stage of it, name by name."""
    for name, tensor in got.items():
        expected = _expected(wanted, name)
        if expected is None or tensor is None:  # a flat neighbour's zeros count as none
            zero = torch.zeros(()) if tensor is None else tensor.abs().max()
            assert expected is None, f"{name} has no gradient: {context}"
            assert zero == 0, f"{name} has a gradient that nobody computed: {context}"
            continue
        error = (tensor.double() - expected.double()).norm() / expected.double().norm()
        assert error <= tolerance, f"{name} is off by {error:.2e}: {context}"


def _expected(wanted: Named, name: str) -> Tensor | None:
    if name.startswith("frozen"):
        return wanted.get(name)
    return wanted["embed.weight" if name == "head.weight" else name]
