"""Failure schedules: what a document may say, when an entry is due, and drawing one."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.core.mesh import Mesh, Place
from recover.core.schedule import (
    Fault,
    FaultSchedule,
    Location,
    _splitmix64,
    document,
    generate,
    ordered,
    parse,
)

MESH = Mesh(4, 2)


def wrong(text: object, mesh: Mesh = MESH) -> list[str]:
    """Return the lines of the error that ``text`` is refused with."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text, mesh)
    return str(caught.value).splitlines()


def entry(**changes: object) -> dict[str, Any]:
    return {"step": 3, "replica": 1, "rank": 0, "location": "reduce"} | changes


# --- reading -------------------------------------------------------------------------------


def test_a_document_is_read_and_sorted() -> None:
    schedule = parse(
        {
            "faults": [
                entry(bucket=1),
                {"step": 0, "replica": 3, "location": "microbatch", "microbatch": 2},
                entry(replica=2, rank=1, location="optimizer"),
            ]
        },
        MESH,
    )
    assert schedule.faults == (
        Fault(0, 3, 0, Location.MICROBATCH, microbatch=2),
        Fault(3, 1, 0, Location.REDUCE, bucket=1),
        Fault(3, 2, 1, Location.OPTIMIZER),
    )


@pytest.mark.parametrize("location", list(Location))
def test_every_location_may_be_named(location: Location) -> None:
    (fault,) = parse({"faults": [entry(location=str(location))]}, MESH).faults
    assert fault.location is location


def test_no_faults_at_all_are_a_schedule() -> None:
    assert parse({"faults": []}, MESH) == FaultSchedule()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "redcue"}, "unknown location 'redcue' (did you mean 'reduce'?); allowed: da"),
        ({"location": 7}, "unknown location 7; allowed: data, microbatch, forward, backward"),
        ({"location": None}, "unknown location nothing; allowed: data"),
        ({"replica": 4}, "replica must be 0..3, got 4"),
        ({"replica": -1}, "replica must be 0..3, got -1"),
        ({"rank": 2}, "rank must be 0..1, got 2"),
        ({"step": -1}, "step must be 0 or more, got -1"),
        ({"step": True}, "step must be a whole number, 0 or more, got True"),
        ({"step": 1.0}, "step must be a whole number, 0 or more, got 1.0"),
        ({"step": "3"}, "step must be a whole number, 0 or more, got '3'"),
        ({"replica": None}, "replica must be a whole number, 0..3, got nothing"),
        ({"rank": [0]}, "rank must be a whole number, 0..1, got [0]"),
        ({"bucket": -1}, "bucket must be 0 or more, got -1"),
        ({"bucket": False}, "bucket must be a whole number, 0 or more, got False"),
        ({"microbatch": 0}, "microbatch goes with location microbatch only, got microbatch 0 with"),
        ({"location": "data", "bucket": 0}, "bucket goes with location reduce only, got bucket 0"),
        (
            {"bukcet": 1},
            "unknown key 'bukcet' (did you mean 'bucket'?); allowed: step, replica, ra",
        ),
        ({"zzz": 1}, "unknown key 'zzz'; allowed: step, replica, rank, location, bucket, microbat"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    changes: dict[str, object], message: str
) -> None:
    (line,) = wrong({"faults": [entry(), entry(replica=2) | changes]})
    assert line.startswith(f"entry 2: {message}")


@pytest.mark.parametrize("key", ["step", "replica", "location"])
def test_a_missing_key_is_named(key: str) -> None:
    fields = entry()
    del fields[key]
    assert wrong({"faults": [fields]}) == [f"entry 1: the key '{key}' is missing"]


def test_the_only_rank_of_a_replica_is_0() -> None:
    (line,) = wrong({"faults": [entry(rank=1)]}, Mesh(4))
    assert line == "entry 1: rank must be 0, got 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a mapping with the key 'faults', got nothing"),
        ([entry()], "expected a mapping with the key 'faults', got [{"),
        ("faults", "expected a mapping with the key 'faults', got 'faults'"),
        ({}, "the key 'faults' is missing: a list of entries such as {step: 3"),
        ({"faults": None}, "faults must be a list of entries such as {step: 3, replica: 1, rank"),
        ({"faults": {"step": 1}}, "faults must be a list of entries"),
        ({"faults": [], "seed": 1}, "unknown key 'seed'; allowed: faults"),
        ({"faults": [3]}, "entry 1: expected a mapping such as {step: 3, replica: 1, rank: 0, l"),
    ],
)
def test_a_wrong_document_is_refused(text: object, message: str) -> None:
    assert wrong(text)[0].startswith(message)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    lines = wrong(
        {
            "fautls": 1,
            "faults": [entry(step=-1, replica=9), "x", entry(), entry(location="nowhere")],
        }
    )
    assert [line.split(":")[0] for line in lines] == [
        *("unknown key 'fautls' (did you mean 'faults'?); allowed", "entry 1", "entry 2", "entry 4")
    ]
    assert lines[1] == "entry 1: step must be 0 or more, got -1; replica must be 0..3, got 9"


def test_a_repeated_entry_and_a_second_death_are_refused() -> None:
    lines = wrong(
        {"faults": [entry(), entry(), entry(step=5), entry(location="data"), entry(rank=1, step=9)]}
    )
    assert lines == [
        "entry 2: the same as entry 1",
        "entry 3: replica 1 dies twice: entry 1 kills it in step 3 (reduce)",
        "entry 4: replica 1 dies twice: entry 1 kills it in step 3 (reduce)",
        "entry 5: replica 1 dies twice: entry 1 kills it in step 3 (reduce)",
    ]


def test_two_ranks_of_a_replica_may_die_together() -> None:
    schedule = parse({"faults": [entry(rank=1, location="repair"), entry()]}, MESH)
    assert [fault.rank for fault in schedule.faults] == [0, 1]


@pytest.mark.parametrize("field", ["bucket", "microbatch"])
def test_an_index_at_a_wrong_location_is_refused_in_code_too(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} goes with location"):
        Fault(0, 0, 0, Location.DATA, **{field: 1})


# --- when an entry is due ------------------------------------------------------------------


def test_a_fault_is_due_for_its_rank_at_its_step_and_location_only() -> None:
    fault = Fault(3, 1, 1, Location.CONSENSUS)
    schedule = FaultSchedule((fault,))
    assert schedule.at(3, Place(1, 1), Location.CONSENSUS) is fault
    assert schedule.at(2, Place(1, 1), Location.CONSENSUS) is None
    assert schedule.at(3, Place(1, 0), Location.CONSENSUS) is None
    assert schedule.at(3, Place(2, 1), Location.CONSENSUS) is None
    assert schedule.at(3, Place(1, 1), Location.REPAIR) is None


def test_an_entry_without_an_index_is_due_at_the_first_occurrence() -> None:
    fault = Fault(0, 1, 0, Location.REDUCE)
    schedule = FaultSchedule((fault,))
    assert schedule.at(0, Place(1), Location.REDUCE, bucket=0) is fault
    assert schedule.at(0, Place(1), Location.REDUCE) is fault


def test_an_entry_with_an_index_waits_for_it() -> None:
    reduce = Fault(0, 1, 0, Location.REDUCE, bucket=2)
    forward = Fault(0, 2, 0, Location.MICROBATCH, microbatch=1)
    schedule = FaultSchedule((reduce, forward))
    due = [schedule.at(0, Place(1), Location.REDUCE, bucket=b) for b in (None, 0, 1, 2, 3)]
    assert due == [None, None, None, reduce, None]
    due = [schedule.at(0, Place(2), Location.MICROBATCH, microbatch=m) for m in (None, 0, 1)]
    assert due == [None, None, forward]


# --- drawing -------------------------------------------------------------------------------

meshes = st.builds(Mesh, st.integers(1, 40), st.integers(1, 4))
weightings = st.dictionaries(st.sampled_from(Location), st.floats(0.0, 1e6), min_size=1).filter(
    lambda weights: any(weights.values())
)


@given(meshes, weightings, st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=75, deadline=None)
def test_a_drawn_schedule_is_valid_and_reads_back(
    mesh: Mesh, weights: dict[Location, float], seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, mesh.replicas - 1))
    steps = range(data.draw(st.integers(0, 5)), data.draw(st.integers(6, 30)))
    schedule = generate(mesh, seed=seed, count=count, steps=steps, weights=weights)
    backwards = dict(reversed(weights.items()))
    assert schedule == generate(mesh, seed=seed, count=count, steps=steps, weights=backwards)
    assert parse(document(schedule), mesh) == schedule == ordered(schedule.faults)
    assert len(schedule.faults) == len({fault.replica for fault in schedule.faults}) == count
    for fault in schedule.faults:
        assert fault.step in steps
        assert fault.rank in range(mesh.ranks_per_replica)
        assert weights[fault.location] > 0


def test_a_seed_means_the_same_schedule_for_ever() -> None:
    schedule = generate(
        Mesh(8, 2),
        seed=2024,
        count=3,
        steps=range(10, 20),
        weights={Location.REDUCE: 3, Location.OPTIMIZER: 1},
    )
    assert [str(fault) for fault in schedule.faults] == [
        "{step: 10, replica: 4, rank: 0, location: reduce}",
        "{step: 14, replica: 1, rank: 0, location: optimizer}",
        "{step: 15, replica: 6, rank: 0, location: reduce}",
    ]


def test_the_numbers_are_those_of_splitmix64() -> None:
    numbers = _splitmix64(0)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [next(numbers) for _ in published] == published


def test_weights_say_how_often_a_location_is_drawn() -> None:
    drawn = Counter(
        fault.location
        for seed in range(100)
        for fault in generate(
            Mesh(11),
            seed=seed,
            count=10,
            steps=range(5),
            weights={Location.REDUCE: 8, Location.DATA: 2, Location.EXTRA: 0},
        ).faults
    )
    assert set(drawn) == {Location.REDUCE, Location.DATA}
    assert 750 < drawn[Location.REDUCE] < 850


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 4}, r"count must be 0\.\.3, so that one of 4 replicas survives, got 4"),
        ({"count": -1}, r"count must be 0\.\.3"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"steps": range(3, 3)}, "steps must be a range of at least one step"),
        ({"steps": range(-1, 3)}, "from 0 on"),
        ({"weights": {}}, "at least one location needs a weight above 0"),
        ({"weights": {Location.DATA: 0.0}}, "at least one location"),
        ({"weights": {Location.DATA: -1.0}}, "finite and 0 or more, got data=-1"),
        ({"weights": {Location.DATA: float("nan")}}, "finite and 0 or more"),
    ],
)
def test_an_impossible_draw_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "seed": 1,
        "count": 1,
        "steps": range(3),
        "weights": {Location.DATA: 1.0},
    }
    with pytest.raises(ValueError, match=message):
        generate(MESH, **(arguments | changes))
