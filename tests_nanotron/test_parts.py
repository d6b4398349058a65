"""Nanotron's engines and fp32 accumulator in real jobs of replicas that die."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.end_to_end.harness import Run, recover, write_faults

from tests_nanotron import oracle, subject
from tests_nanotron.subject import Settings

pytestmark = pytest.mark.timeout(600)
SMALL = 0.0006
"""MiB of a bucket: a layer's weight and bias, or two biases."""


def run(
    directory: Path, settings: Settings, replicas: int, faults: list[Mapping[str, object]]
) -> Run:
    """Train in ``directory`` and check each step against one process."""
    kept = directory / "kept"
    kept.mkdir()
    told = replace(settings, kept=str(kept))
    out = directory / "run"
    ended = recover(
        *("run", "--replicas", replicas, "--ranks-per-replica", settings.stages, "--out", out),
        *("--faults", write_faults(directory / "faults.yaml", faults)),
        *(subject.__file__, told.to_json()),
        out=out,
        deadline_s=300,
    ).finished()
    record = ended.record
    assert len(record.steps) == settings.steps
    assert all(s.microbatches == settings.microbatches for s in record.steps), ended.replay
    oracle.assert_run(record, oracle.Kept(kept, settings.stages), tie=settings.tie)
    return ended


def test_all_forward_all_backward(tmp_path: Path) -> None:
    faults: list[Mapping[str, object]] = [
        {"step": 1, "replica": 1, "rank": 0, "location": "reduce", "bucket": 1},
        {"step": 3, "replica": 2, "rank": 1, "location": "microbatch"},
    ]
    ended = run(tmp_path, Settings("afab", bucket_mb=SMALL), 3, faults)
    assert ended.record.steps[-1].survivors == (0,)
    assert {step.epoch for step in ended.record.steps} == {0, 1, 2}


def test_one_forward_one_backward_with_tied_weights(tmp_path: Path) -> None:
    faults: list[Mapping[str, object]] = [
        {"step": 1, "replica": 0, "rank": 1, "location": "reduce"},
        {"step": 2, "replica": 2, "rank": 0, "location": "forward"},
    ]
    ended = run(tmp_path, Settings("1f1b", tie=True), 3, faults)
    assert ended.record.steps[-1].survivors == (1,)


def test_passes_shorter_than_the_pipeline_with_zero(tmp_path: Path) -> None:
    """Three stages and shares of two and one: 1F1B by itself refuses a pass of one."""
    faults: list[Mapping[str, object]] = [
        {"step": 2, "replica": 1, "rank": 2, "location": "reduce"},
    ]
    run(tmp_path, Settings("1f1b", stages=3, microbatches=3, zero=True), 2, faults)


def test_under_distributed_data_parallel(tmp_path: Path) -> None:
    """Nanotron's own hook adds the gradients of the last microbatch of a pass."""
    faults: list[Mapping[str, object]] = [
        {"step": 1, "replica": 0, "rank": 0, "location": "consensus"},
    ]
    run(tmp_path, Settings("1f1b", ddp=True), 2, faults)
