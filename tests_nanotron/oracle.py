"""What one process computes for the recorded microbatches: plain torch, nothing of Nanotron's."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from recover.records import RunRecord, StepRecord
from tests_nanotron.data import LAYERS, rows

Named = dict[str, Tensor]
TIED = "layers.0.pp_block.weight"
RELATIVE, ABSOLUTE = 2e-5, 1e-7
"""fp32 rounding of a sum of some ten numbers below 1."""


class Kept:
    """What the ranks of a run have kept, a file per step and rank."""

    def __init__(self, directory: Path, stages: int) -> None:
        self._directory, self._stages = directory, stages

    def of(self, step: int, replica: int) -> list[dict[str, Named]] | None:
        """Return what a replica kept of a step, stage by stage; None if it died before it could."""
        files = [
            self._directory / f"step-{step}-replica-{replica}-{stage}.pt"
            for stage in range(self._stages)
        ]
        if not all(file.exists() for file in files):
            return None
        return [torch.load(file, weights_only=True) for file in files]


def assert_run(record: RunRecord, kept: Kept, *, tie: bool) -> None:
    """Every step's gradient is that of its recorded microbatches, and the same on all survivors."""
    for step in record.steps:
        found = {replica: kept.of(step.step, replica) for replica in step.survivors}
        there = {replica: stages for replica, stages in found.items() if stages is not None}
        last = step is record.steps[-1]
        next_survivors = step.survivors if last else record.steps[step.step + 1].survivors
        assert set(next_survivors) <= set(there), f"step {step.step}: {sorted(there)}"
        first = next(iter(there.values()))
        for stages in there.values():
            assert_identical(stages, first, step.step)
        gradients, loss = recompute([stage["half"] for stage in first], step, tie)
        assert abs(loss - step.loss) <= RELATIVE * loss, (loss, step.loss)
        for stage in first:
            for name, gradient in stage["gradients"].items():
                torch.testing.assert_close(
                    gradient.double(), gradients[name], rtol=RELATIVE, atol=ABSOLUTE, msg=name
                )
        for stage in first:
            for name, half in stage["half"].items():
                master = stage["masters"][name].view(half.shape)
                assert torch.equal(master.bfloat16(), half), f"step {step.step}: {name}"


def assert_identical(
    stages: list[dict[str, Named]], first: list[dict[str, Named]], step: int
) -> None:
    """Two replicas hold the same on each stage, bit for bit."""
    for stage, (mine, other) in enumerate(zip(stages, first, strict=True)):
        for what, tensors in mine.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, other[what][name]), (step, stage, what, name)


def recompute(halves: list[Named], step: StepRecord, tie: bool) -> tuple[Named, float]:
    """Return the mean gradient by name, in fp64, and the mean loss."""
    weights = _layers(halves, tie)
    ids = sorted(number for ids in step.ids.values() for number in ids)
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    loss = 0.0
    for number in ids:
        x, y = rows(number)
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        for layer in range(LAYERS):
            weight, bias = (leaves[f"layers.{layer}.pp_block.{p}"] for p in ("weight", "bias"))
            x = torch.tanh(torch.nn.functional.linear(x, weight, bias))
        one = (x.float() - y.float()).square().mean()
        one.backward()  # type: ignore[no-untyped-call]
        loss += one.item()
        for name, leaf in leaves.items():
            sums[name] += cast(Tensor, leaf.grad).double()
    if tie:
        sums[TIED] += sums.pop(f"layers.{LAYERS - 1}.pp_block.weight")
    return {name: total / len(ids) for name, total in sums.items()}, loss / len(ids)


def _layers(halves: list[Named], tie: bool) -> Named:
    """Return all weights of the model by their own names."""
    weights = {name: weight for stage in halves for name, weight in stage.items()}
    if tie:
        weights[f"layers.{LAYERS - 1}.pp_block.weight"] = halves[-1][TIED]
        weights[TIED] = halves[0][TIED]
    return weights
