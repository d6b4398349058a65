"""Runs the subject as a job of R x M ranks, and judges what its survivors kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recover.records import RunRecord, StepRecord
from tests.end_to_end.harness import Run, recover, write_faults
from tests.stacks import subject
from tests.stacks.model import MICROBATCH_TOKENS
from tests.stacks.oracle import assert_close, train_alone
from tests.stacks.subject import Settings, kept_file

RANKS = 2
"""Of a replica."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One entry of a schedule."""

    step: int
    replica: int
    shard: int
    location: str
    bucket: int | None = None

    @property
    def entry(self) -> dict[str, object]:
        fields: dict[str, object] = {"step": self.step, "replica": self.replica}
        fields |= {"rank": self.shard, "location": self.location}
        return fields if self.bucket is None else fields | {"bucket": self.bucket}

    @property
    def noticed_in(self) -> int:
        """A death between the verdict and the optimizer disturbs the next step."""
        return self.step + (self.location == "optimizer")

    @property
    def victim(self) -> int:
        """World rank of the one that is killed."""
        return self.replica * RANKS + self.shard

    @property
    def peer(self) -> int:
        """World rank of the other one of its replica."""
        return self.replica * RANKS + 1 - self.shard

    def __str__(self) -> str:
        return f"{self.replica}.{self.shard}@{self.location}"


def run_subject(
    directory: Path, settings: Settings, *, replicas: int, kills: Sequence[Kill] = ()
) -> Run:
    """Train the subject in ``directory``, which must not exist; it must reach the end."""
    kept, out = directory / "kept", directory / "run"
    kept.mkdir(parents=True)
    arguments: list[object] = ["run", "--replicas", replicas, "--ranks-per-replica", RANKS]
    arguments += ["--out", out]
    if kills:
        faults = write_faults(directory / "faults.yaml", [kill.entry for kill in kills])
        arguments += ["--faults", faults]
    told = replace(settings, kept=str(kept)).to_json()
    return recover(*arguments, subject.__file__, told, out=out).finished()


def assert_unit_deaths(run: Run, kills: Sequence[Kill]) -> None:
    """Every kill came, took its replica along, and was told by the recoveries."""
    for kill in kills:
        place = f"step: {kill.step}, replica: {kill.replica}, rank: {kill.shard}, "
        assert f"{place}location: {kill.location}" in run.stdout, f"{kill} never came{run.replay}"
        left = f"rank {kill.peer}: left with rank {kill.victim} of its replica"
        assert left in run.stdout, f"{kill}: {left}{run.replay}"
    named = {(event.step, replica) for event in run.record.events for replica in event.replicas}
    assert named == {(kill.noticed_in, kill.replica) for kill in kills}, run.replay


def assert_same_ids(run: Run, settings: Settings) -> None:
    """Every step committed exactly the microbatches of a run without failures."""
    record, count = run.record, settings.microbatches
    assert [step.step for step in record.steps] == list(range(settings.steps)), run.replay
    for step in record.steps:
        wanted = list(range(count * step.step, count * (step.step + 1)))
        assert committed(step) == wanted, run.replay
        assert step.tokens == count * MICROBATCH_TOKENS, run.replay


def committed(step: StepRecord) -> list[int]:
    return sorted(number for ids in step.ids.values() for number in ids)


def assert_as_alone(
    run: Run, settings: Settings, *, tolerance: float, loss_tolerance: float
) -> None:
    """Losses, gradients and parameters are those of one process, and equal shard by shard."""
    record = run.record
    alone = train_alone(record, settings.clip_norm, narrow=settings.stack.endswith("bf16"))
    for step, wanted in zip(record.steps, alone.losses, strict=True):
        assert step.loss == pytest.approx(wanted, rel=loss_tolerance), (step.step, run.replay)
    digests: dict[int, set[str]] = {}
    for replica, shard, kept in survivors(run, record):
        context = f"replica {replica}, shard {shard}{run.replay}"
        for number, step in enumerate(kept["steps"]):
            where = f"step {number}, {context}"
            assert_close(step["gradients"], alone.gradients[number], tolerance, where)
        assert_close(kept["parameters"], alone.parameters, tolerance, context)
        digests.setdefault(shard, set()).add(repr([step["digest"] for step in kept["steps"]]))
    assert all(len(seen) == 1 for seen in digests.values()), f"replicas differ{run.replay}"


def survivors(run: Run, record: RunRecord) -> list[tuple[int, int, Any]]:
    """Return what each rank of the last step kept, with its replica and shard."""
    found = []
    for replica in record.steps[-1].survivors:
        for shard in range(RANKS):
            file = kept_file(run.out.parent / "kept", replica, shard)
            found.append((replica, shard, torch.load(file, weights_only=True)))
    return found
