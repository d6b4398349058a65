"""Tasks that are refused, traces on file, shares of ranks: nothing is started here."""

from pathlib import Path

import pytest

from recover.core.schedule import Location
from recover.evaluation.contender import Commit, Kill, Task, Trace
from recover.evaluation.journal import Follower, Journal
from recover.evaluation.recipe import due, from_json, own_ids, present, to_json
from recover.evaluation.recover_job import faults


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"microbatch_ms": -1.0}, "microbatch_ms must be at least 0, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0"),
        ({"preset": "huge"}, "preset must be one of nano, tiny, .*, got huge"),
        ({"kills": (Kill(20, 0),)}, r"kills must be in steps 0..19 of 4, got Kill\(step=20"),
        ({"kills": (Kill(1, 0), Kill(2, 0))}, r"kills must be each of another replica"),
        ({"replicas": 1, "kills": (Kill(1, 0),)}, "kills must be fewer than replicas, got 1"),
    ],
)
def test_a_wrong_task_is_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Task(**settings)  # type: ignore[arg-type]


def test_a_task_reaches_the_ranks_whole() -> None:
    task = Task(replicas=3, kills=(Kill(4, 1), Kill(6, 0)), microbatch_ms=12.5)
    assert from_json(to_json(task)) == task


@pytest.mark.parametrize("ranks", [1, 3, 5, 16])
def test_ranks_share_a_step_without_gap_or_overlap(ranks: int) -> None:
    ids = [i for position in range(ranks) for i in own_ids(7, 16, position, ranks)]
    assert ids == list(range(112, 128))


def test_the_dead_are_due_once_and_gone_only_without_spares() -> None:
    task = Task(replicas=4, kills=(Kill(4, 1), Kill(6, 0)))
    assert due(task, 1, died_in=()) == 4
    assert due(task, 1, died_in={4}) is None
    assert due(task, 2, died_in=()) is None
    assert present(task, 4, {4}) == [0, 1, 2, 3]
    assert present(task, 3, {4}) == [0, 2, 3]
    assert present(task, 2, {4, 6}) == [2, 3]


def test_kills_become_deaths_in_the_reduction_of_the_second_bucket() -> None:
    (fault,) = faults(Task(kills=(Kill(4, 1),))).faults
    assert (fault.step, fault.replica, fault.location, fault.bucket) == (4, 1, Location.REDUCE, 1)


def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    Trace("recover", (Commit(0, 1.0, 4, 8, 2, 0.5),), (), {"seed": 1}).save(file)
    file.write_text(file.read_text() + '{"kind": "commit", "step": 1}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 3: not a line of a trace"):
        Trace.load(file)
    file.write_text("")
    with pytest.raises(ValueError, match="the line with its settings is missing"):
        Trace.load(file)


def test_lines_are_read_once_they_are_complete(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    follower = Follower(file)
    assert follower.new_lines() == []
    Journal(file, rank=2).moment("failure", 4, replica=1)
    with file.open("a") as torn:
        torn.write('{"kind": "com')
    (line,) = follower.new_lines()
    assert (line["name"], line["step"], line["rank"]) == ("failure", 4, 2)
    with file.open("a") as rest:
        rest.write('mit"}\n')
    assert follower.new_lines() == [{"kind": "commit"}]
