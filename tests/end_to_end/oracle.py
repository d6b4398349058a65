"""The gradient of a recorded step, computed again: one process, plain torch, no protocol."""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from recover.records import RunRecord, StepRecord
from tests.end_to_end.harness import Run
from tests.end_to_end.subject import Odd, Sentences, Settings, build, kept_file

Named = dict[str, Tensor | None]
RELATIVE, ABSOLUTE = 2e-5, 2e-7
"""fp32 rounding of sums of some ten numbers below 1."""


def assert_gradients(run: Run, settings: Settings) -> None:
    """All survivors of a step had one gradient, that of exactly the recorded microbatches."""
    kept = run.out.parent / "kept"
    for record in run.record.steps:
        first: dict[str, Named] | None = None
        for replica in record.survivors:
            file = kept_file(kept, record.step, replica)
            if not file.exists():  # it died between the verdict and its optimizer's step
                assert not survived(run.record, record.step + 1, replica), (file, run.replay)
                continue
            stored = cast(dict[str, Named], torch.load(file, weights_only=True))
            if first is None:
                first = stored
                expected, loss = recompute(settings, stored["parameters"], record)
                assert abs(loss - record.loss) <= 1e-5 * abs(record.loss), run.replay
                compare(stored["gradients"], expected, settings, f"{file.name}{run.replay}")
            for what in ("parameters", "gradients"):
                assert identical(stored[what], first[what]), (file.name, what, run.replay)


def identical(one: Named, other: Named) -> bool:
    """Whether two replicas hold the same, bit for bit."""
    return one.keys() == other.keys() and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in ((one[name], other[name]) for name in one)
    )


def survived(record: RunRecord, step: int, replica: int) -> bool:
    """Whether a replica was alive when a step committed."""
    return step < len(record.steps) and replica in record.steps[step].survivors


def recompute(settings: Settings, parameters: Named, record: StepRecord) -> tuple[Named, float]:
    """Return the gradient and the loss of the recorded microbatches, divided by their number."""
    model = build(settings, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(cast(Tensor, parameters[name]))
    ids = sorted(number for ids in record.ids.values() for number in ids)
    sums: Named = dict.fromkeys(name for name, _ in model.named_parameters())
    loss = 0.0
    for number in ids:
        gradients, one = microbatch_gradient(model, number)
        loss += one
        for name, gradient in gradients.items():
            if gradient is not None:
                before = sums[name]
                sums[name] = gradient if before is None else before + gradient
    divided = {name: None if g is None else g / len(ids) for name, g in sums.items()}
    if settings.clip_norm is not None:
        clip(divided, settings.clip_norm)
    return divided, loss / len(ids)


def microbatch_gradient(model: Odd, number: int) -> tuple[Named, float]:
    """Return the gradient of one microbatch in fp64, and its loss."""
    model.zero_grad()
    loss = model(Sentences()[number])
    loss.backward()
    return {
        name: None if parameter.grad is None else parameter.grad.double()
        for name, parameter in model.named_parameters()
    }, loss.item()


def clip(gradients: Named, norm: float) -> None:
    """Clip by the global norm, with torch's own function."""
    carriers = []
    for name, gradient in gradients.items():
        if gradient is not None:
            carrier = nn.Parameter(torch.zeros_like(gradient))
            carrier.grad = copy.deepcopy(gradient)
            carriers.append((name, carrier))
    nn.utils.clip_grad_norm_([carrier for _, carrier in carriers], norm)
    for name, carrier in carriers:
        gradients[name] = carrier.grad


def compare(got: Named, expected: Named, settings: Settings, context: str) -> None:
    """Compare to the rounding of the type in which the optimizer gets gradients."""
    assert got.keys() == expected.keys(), context
    for name, gradient in got.items():
        wanted = expected[name]
        if gradient is None or wanted is None:
            assert gradient is None, f"{name} has a gradient that nobody computed: {context}"
            assert wanted is None, f"{name} has no gradient: {context}"
            continue
        rounding = 2.0**-7 if gradient.dtype == torch.bfloat16 else RELATIVE
        error = (gradient.double() - wanted).abs()
        allowed = ABSOLUTE + rounding * wanted.abs()
        assert bool((error <= allowed).all()), f"{name} is off by {error.max():.2e}: {context}"
