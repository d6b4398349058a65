"""Replicas of several ranks in `recover train`: the curve of one process, whoever dies.

Each run trains the reference model through `recover train --parallel`. B divides by every number of
survivors, so there is never a spare: each step commits the failure-free microbatches, and its loss
is that of the plain model to fp32 rounding.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from recover.records import RunRecord
from tests.end_to_end.harness import Run, recover, write_faults

pytestmark = pytest.mark.timeout(600)

STEPS, BATCH = 20, 12
COMMON = ("--steps", STEPS, "--microbatches", BATCH, "--bucket-mb", 0.5)
Kill = tuple[int, int, int, str]
"""Step, replica, rank in it, location."""

DENSE, EXPERTS = "tiny", "tiny_moe"
RUNS: list[tuple[str, str, Sequence[object], int, int, Sequence[Kill]]] = [
    ("fsdp2", DENSE, (), 3, 2, [(8, 1, 1, "reduce"), (14, 0, 0, "forward")]),
    ("3d", DENSE, ("--tp", 2, "--pp", 2), 2, 4, ()),
    ("3d", DENSE, ("--tp", 2, "--pp", 2), 2, 4, [(10, 0, 3, "backward")]),
    ("3d", EXPERTS, ("--ep", 2), 3, 2, [(8, 0, 1, "forward"), (14, 2, 0, "reduce")]),
]


def trained(
    directory: Path,
    parallel: str,
    preset: str,
    options: Sequence[object],
    replicas: int,
    kills: Sequence[Kill] = (),
) -> Run:
    """Train the reference model under these deaths."""
    entries = [
        {"step": step, "replica": replica, "rank": rank, "location": location}
        for step, replica, rank, location in kills
    ]
    directory.mkdir(parents=True, exist_ok=True)
    faults = ("--faults", write_faults(directory / "faults.yaml", entries)) if kills else ()
    out = directory / "run"
    return recover(
        *("train", "--parallel", parallel, "--preset", preset, "--replicas", replicas),
        *("--out", out, *COMMON, *options, *faults),
        out=out,
    ).finished()


@functools.cache
def one_process(preset: str) -> RunRecord:
    """Return the run of the plain model in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), "plain", preset, (), replicas=1).record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "preset", "options", "replicas", "ranks", "kills"),
    RUNS,
    ids=lambda value: str(value).replace(" ", ""),
)
def test_every_stack_keeps_the_curve_of_one_process(
    parallel: str,
    preset: str,
    options: Sequence[object],
    replicas: int,
    ranks: int,
    kills: Sequence[Kill],
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, parallel, preset, options, replicas, kills)
    for step, wanted in zip(run.record.steps, one_process(preset).steps, strict=True):
        assert step.microbatches == BATCH, run.replay
        ids = sorted(number for given in step.ids.values() for number in given)
        assert ids == list(range(BATCH * step.step, BATCH * (step.step + 1))), run.replay
        assert step.loss == pytest.approx(wanted.loss, rel=1e-4), (step.step, run.replay)
        assert step.tokens == wanted.tokens, run.replay
    dead = {replica for _, replica, _, _ in kills}
    left = [replica for replica in range(replicas) if replica not in dead]
    assert list(run.record.steps[-1].survivors) == left, run.replay
    alive = {replica * ranks + shard for replica in left for shard in range(ranks)}
    said = run.checksums()
    assert set(said) == alive, run.replay
    for shard in range(ranks):  # survivors agree shard by shard
        assert len({said[rank] for rank in alive if rank % ranks == shard}) == 1, run.replay
    for _, replica, rank, _ in kills:
        for peer in set(range(ranks)) - {rank}:
            log = run.log(replica * ranks + peer)
            assert f"left with rank {replica * ranks + rank} of its replica" in log, run.replay


@pytest.mark.parametrize(
    ("name", "ranks"), [("fsdp2", 2), ("three_d", 4)], ids=lambda value: str(value)
)
def test_the_examples_go_on_after_a_death(name: str, ranks: int, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    entry = {"step": 5, "replica": 1, "rank": ranks - 1, "location": "reduce"}
    faults, out = write_faults(tmp_path / "faults.yaml", [entry]), tmp_path / "run"
    run = recover(
        *("run", "--replicas", 2, "--ranks-per-replica", ranks, "--faults", faults),
        *("--out", out, script),
        out=out,
    ).finished()
    assert [step.microbatches for step in run.record.steps] == [16] * 40
    assert run.record.steps[-1].survivors == (0,)
    assert run.record.steps[-1].loss < run.record.steps[0].loss


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--parallel 3d --tp 2 --ranks-per-replica 3", "ranks_per_replica must be pp x ep x tp"),
        ("--parallel plain --ranks-per-replica 2", "ranks_per_replica must be 1"),
        ("--parallel fsdp2 --sequences 3", "sequences must be a multiple of ranks_per_replica=2"),
        ("--parallel ddp --tp 2", "tp must be 1: it is used with parallel 3d only"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_sentence(options: str, sentence: str) -> None:
    run = recover("train", *options.split())
    assert run.status == 2
    assert run.stderr.startswith(f"recover: {sentence}"), run.stderr
