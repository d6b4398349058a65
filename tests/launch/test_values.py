"""The values of a launch: what is refused, and how an end is told."""

import os
from pathlib import Path

import pytest

from recover.core.mesh import Mesh
from recover.launch import LaunchSpec, Outcome, RankEnd, Timeouts, note
from recover.launch.display import describe_event
from recover.launch.outcome import LOST
from recover.launch.rank import one_line

# --- what is refused ---------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


@pytest.mark.parametrize("replicas", [0, -1])
def test_there_is_at_least_one_replica(script: Path, tmp_path: Path, replicas: int) -> None:
    with pytest.raises(ValueError, match=f"replicas must be at least 1, got {replicas}"):
        LaunchSpec(script=script, out=tmp_path / "run", replicas=replicas)


def test_files_must_exist(script: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no script .*missing\.py"):
        LaunchSpec(script=tmp_path / "missing.py", out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"there is no faults file .*faults\.yaml"):
        LaunchSpec(script=script, out=tmp_path / "run", faults=tmp_path / "faults.yaml")


def test_a_run_directory_holds_one_run(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "steps.jsonl").touch()
    LaunchSpec(script=script, out=out)  # an empty record is no run
    (out / "steps.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="already holds a run"):
        LaunchSpec(script=script, out=out)
    with pytest.raises(ValueError, match="is a file"):
        LaunchSpec(script=script, out=script)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_deadlines_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=f"join_s must be a positive number of seconds.*{value}"):
        Timeouts(join_s=value)


def test_deadlines_are_ordered() -> None:
    with pytest.raises(ValueError, match="3 / 120 / 60 / 3600"):
        Timeouts(stopped_s=3, wait_s=120, hang_s=60, stall_s=3600)


# --- how an end is told ------------------------------------------------------------------------


def outcome(*ends: RankEnd, problem: str = "", signal: int = 0, finished: int = 0) -> Outcome:
    return Outcome(
        mesh=Mesh(6),
        out=Path("/run"),
        finished=tuple(range(finished)),
        ends=ends,
        problem=problem,
        signal=signal,
    )


def test_equal_reasons_are_told_once_and_errors_come_first() -> None:
    block = outcome(
        RankEnd(3, LOST, "killed"),
        RankEnd(2, note.FAILED, "ImportError: foo"),
        RankEnd(0, note.FAILED, "ImportError: foo"),
        RankEnd(1, note.FAILED, "ImportError: foo"),
        RankEnd(5, note.FAILED, "ImportError: foo"),
        problem="no replica is left",
    ).block()
    assert block.splitlines() == [
        "recover: the job did not finish: no replica is left",
        "  replicas 0-2, 5: ImportError: foo",
        "    log: /run/logs/rank-0.log",
        "  replica 3: killed",
        "    log: /run/logs/rank-3.log",
    ]


def test_a_block_stays_short() -> None:
    ends = [RankEnd(rank, note.FAILED, f"error {rank}") for rank in range(50)]
    block = outcome(*ends, problem="x").block().splitlines()
    assert len(block) == 18
    assert block[-1] == "  and 42 more: /run/logs"


def test_the_status_says_who_ended_the_job() -> None:
    assert outcome(finished=6).status == 0
    assert outcome(problem="no replica is left").status == 1
    assert outcome(problem="ended by SIGINT", signal=2).status == 130
    assert outcome(problem="ended by SIGTERM", signal=15).status == 143


def test_a_summary_names_who_was_lost() -> None:
    told = outcome(RankEnd(4, note.INJECTED, "fault schedule: step 3, reduce"), finished=4)
    assert told.summary == ("finished on 4 of 6 ranks (replica 4: fault schedule: step 3, reduce)")


def test_a_recovery_is_one_line() -> None:
    record: dict[str, object] = {
        "step": 7,
        "location": "reduce",
        "replicas": [1, 3],
        "extra": {"0": 2, "2": 2},
        "total_s": 0.0312,
    }
    assert describe_event(record) == (
        "step 7: replica 1, 3 died (noticed in reduce), 4 microbatches made up for, 0.031 s"
    )
    assert describe_event({}) == "step ?: replica ? died"


def test_a_reason_is_one_line() -> None:
    assert one_line("\n  first \nsecond") == "first"
    assert one_line("") == ""
    assert len(one_line("x" * 1000)) == 300


def test_an_end_note_is_read_back(tmp_path: Path) -> None:
    ended = note.EndNote(note.LEFT, "stopped", step=3, log_bytes=12, finished=False)
    note.write(tmp_path / "rank-0.end", ended)
    assert note.read(tmp_path / "rank-0.end") == ended
    assert note.read(tmp_path / "rank-1.end") is None
    assert os.listdir(tmp_path) == ["rank-0.end"]
