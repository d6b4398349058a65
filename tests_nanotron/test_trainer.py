"""Nanotron's own DistributedTrainer, attached, with its sanity checks on."""

import json
from pathlib import Path

import pytest
from tests.end_to_end.harness import Run, recover, write_faults

from tests_nanotron import oracle, trainer_subject

pytestmark = pytest.mark.timeout(600)
STEPS, MICROBATCHES = 4, 6


def run(directory: Path, *, by_id: bool) -> Run:
    """Train under one failure in the reduction."""
    (directory / "kept").mkdir()
    told = {"directory": str(directory), "steps": STEPS, "microbatches": MICROBATCHES}
    fault = {"step": 1, "replica": 0, "rank": 1, "location": "reduce"}
    out = directory / "run"
    ended = recover(
        *("run", "--replicas", 2, "--ranks-per-replica", 2, "--out", out),
        *("--faults", write_faults(directory / "faults.yaml", [fault])),
        *(trainer_subject.__file__, json.dumps(told | {"by_id": by_id})),
        out=out,
        deadline_s=300,
    ).finished()
    steps = ended.record.steps
    assert [s.microbatches for s in steps] == [MICROBATCHES] * STEPS, ended.replay
    assert steps[-1].survivors == (1,)
    assert (directory / "checkpoints/latest.txt").read_text() == str(STEPS)  # replica 0 is dead
    return ended


def test_gradients_are_those_of_the_recorded_microbatches(tmp_path: Path) -> None:
    ended = run(tmp_path, by_id=True)
    oracle.assert_run(ended.record, oracle.Kept(tmp_path / "kept", 2), tie=False)


def test_a_loader_is_shared_out(tmp_path: Path) -> None:
    run(tmp_path, by_id=False)
