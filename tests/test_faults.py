"""Fault schedules as files and in words."""

from pathlib import Path

import pytest

from recover.core.mesh import Mesh
from recover.core.schedule import Fault, FaultSchedule, Location, generate
from recover.faults import dump, explain, load, parse_weights, unreached

MESH = Mesh(4)


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "faults.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load(path, MESH)
    return str(caught.value)


# --- files ---------------------------------------------------------------------------------


def test_the_file_of_the_manual_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "faults:\n"
        "  - {step: 3, replica: 1, rank: 0, location: reduce, bucket: 1}   # SIGKILL to itself\n"
        "  - step: 3\n    replica: 2\n    location: optimizer\n",
    )
    assert load(path, MESH).faults == (
        Fault(3, 1, 0, Location.REDUCE, bucket=1),
        Fault(3, 2, 0, Location.OPTIMIZER),
    )


def test_a_dumped_schedule_reads_back_and_says_what_it_was_made_from(tmp_path: Path) -> None:
    schedule = FaultSchedule(
        (
            Fault(0, 2, 0, Location.MICROBATCH, microbatch=3),
            Fault(3, 1, 0, Location.REDUCE, bucket=1),
        )
    )
    text = dump(schedule, {"seed": 7, "steps": "0..9"})
    assert text == (
        "# seed: 7\n"
        "# steps: 0..9\n"
        "faults:\n"
        "  - {step: 0, replica: 2, rank: 0, location: microbatch, microbatch: 3}\n"
        "  - {step: 3, replica: 1, rank: 0, location: reduce, bucket: 1}\n"
    )
    assert load(written(tmp_path, text), MESH) == schedule
    assert load(written(tmp_path, dump(FaultSchedule())), MESH) == FaultSchedule()


def test_a_generated_schedule_is_dumped_alike_every_time(tmp_path: Path) -> None:
    texts = {
        dump(generate(MESH, seed=5, count=3, steps=range(9), weights={Location.DATA: 1.0}))
        for _ in range(2)
    }
    (text,) = texts
    assert len(load(written(tmp_path, text), MESH).faults) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the fault schedule is empty"),
        ("# nothing\n", "the fault schedule is empty"),
        ("faults:\n  - {step: 3, replica: [1\n", "not valid YAML: line 3, column 1: "),
        ("faults:\n\t- a\n", "not valid YAML: line 2, column 1: while scanning for the next token"),
        ("faults: [{step: 1, step: 2}]", "line 1, column 20: the key 'step' stands twice in one"),
        ("faults: !!python/object/apply:os.getcwd []", "not valid YAML: line 1, column 9: could"),
        ("faults: [{[1]: 2}]", "not valid YAML: line 1, column 11: while constructing a mapping"),
        ("faults: [{step: 2024-13-45}]", "not valid YAML: month must be in 1..12"),
        ("[" * 1000, "not valid YAML: "),
        (b"faults: \xff", "not UTF-8 text (byte 8)"),
        (b"faults: \x00", "not valid YAML: unacceptable character"),
        ("faults: [{step: 1, replica: 7, location: data}]", "1 problem:\n  entry 1: replica must"),
        ("faults: [1, 2]", "2 problems:\n  entry 1: expected a mapping"),
        ("- 1", "1 problem:\n  expected a mapping with the key 'faults', got [1]"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = written(tmp_path, text)
    said = refused(path)
    assert said.startswith(f"{path}: ")
    assert message in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert refused(path) == f"{path}: cannot read the fault schedule: No such file or directory"
    assert "Is a directory" in refused(tmp_path)


# --- words ---------------------------------------------------------------------------------


def test_a_schedule_is_explained_step_by_step() -> None:
    schedule = FaultSchedule(
        (
            Fault(3, 1, 0, Location.REDUCE, bucket=1),
            Fault(3, 2, 0, Location.EXTRA),
            Fault(5, 3, 0, Location.RESTORE),
            Fault(9, 0, 0, Location.MICROBATCH, microbatch=0),
        )
    )
    assert explain(schedule, MESH) == (
        "step 3:\n"
        "  replica 1 dies while gradients are being reduced, bucket 1\n"
        "  replica 2 dies in an extra microbatch, if the other failure leads there\n"
        "  2 of 4 replicas go on\n"
        "step 5:\n"
        "  replica 3 dies while buckets are restored: never comes, as nothing else fails in this "
        "step\n"
        "  1 of 4 replicas goes on\n"
        "step 9:\n"
        "  replica 0 dies with a microbatch in hand, microbatch 0\n"
        "  nobody is left: the job ends with an error"
    )


def test_ranks_are_named_where_a_replica_has_several() -> None:
    schedule = FaultSchedule((Fault(0, 1, 0, Location.DATA), Fault(0, 1, 1, Location.DATA)))
    assert explain(schedule, Mesh(2, 2)) == (
        "step 0:\n"
        "  replica 1 (its rank 0) dies before its data is there\n"
        "  replica 1 (its rank 1) dies before its data is there\n"
        "  1 of 2 replicas goes on"
    )


def test_a_death_after_the_verdict_is_noticed_in_the_next_step() -> None:
    schedule = FaultSchedule((Fault(4, 1, 0, Location.OPTIMIZER), Fault(5, 2, 0, Location.REPAIR)))
    assert "while the survivors regroup, if the other failure" in explain(schedule, MESH)


def test_nobody_dies() -> None:
    assert explain(FaultSchedule(), MESH) == (
        "nobody dies; 4 replicas from the first step to the last"
    )


def test_every_location_has_its_words() -> None:
    for location in Location:
        assert "replica 1 dies " in explain(FaultSchedule((Fault(0, 1, 0, location),)), MESH)


def test_what_never_came_is_reported() -> None:
    first, second = Fault(3, 1, 0, Location.REDUCE), Fault(4, 2, 0, Location.EXTRA)
    schedule = FaultSchedule((first, second))
    assert unreached(schedule, [first]) == [second]
    assert unreached(schedule, [second, first]) == []
    assert unreached(schedule, []) == [first, second]


# --- command line --------------------------------------------------------------------------


def test_weights_are_read() -> None:
    assert parse_weights("reduce=8,optimizer=1") == {Location.REDUCE: 8, Location.OPTIMIZER: 1}
    assert parse_weights(" data = 0.5 ") == {Location.DATA: 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown location ''"),
        ("reduc=1", "unknown location 'reduc' in weights 'reduc=1'; allowed: data, microbatch"),
        ("reduce", "weights are written location=number, got 'reduce'"),
        ("reduce=", "the weight of reduce must be a number, got ''"),
        ("reduce=x", "the weight of reduce must be a number, got 'x'"),
        ("reduce=1,data=2,reduce=3", "location reduce stands twice"),
    ],
)
def test_wrong_weights_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_weights(text)
