"""The process group: torch's collectives, and what becomes of them when ranks die.

Importing torch is what these tests cost, so all of them look at one job.
"""

from typing import Any

import pytest

from tests.mpi.harness import launch

pytestmark = pytest.mark.timeout(200)  # five ranks import torch
Values = dict[int, Any]


@pytest.fixture(scope="module")
def values() -> Values:
    """What the two survivors of the job returned."""
    outcome = launch("tests.mpi.group_ranks:play", 5, deadline_s=150)
    assert not outcome.hung, outcome.text
    assert set(outcome.values) == {2, 3}, outcome.text
    return outcome.values


def test_every_collective_of_a_healthy_group_is_right(values: Values) -> None:
    first = values[2]["healthy"]
    assert first["epoch"] == 0
    assert len(set(first["losses"])) == 3
    assert all(result["healthy"] == first for result in values.values())


def test_a_death_in_the_backward_pass_of_ddp_breaks_nobodys_reducer(values: Values) -> None:
    for rank, result in values.items():
        assert result["ddp"] == {"last": [False, 1], "members": [rank - 1, 4]}


def test_survivors_without_a_trainer_agree_on_a_record_and_go_on(values: Values) -> None:
    for result in values.values():
        assert result["stream"]["records"] == [[2, [0, 2, 3], [4]]]
        assert result["stream"]["sums"] == [13.0, 13.0, 8.0]


def test_a_held_group_leaves_the_repair_to_its_owner(values: Values) -> None:
    for result in values.values():
        held = result["held"]
        assert held["failed"] == [True, True]
        assert held["quiet"] == [True, 3, False]
        assert held["epoch"] == 3
        assert held["mended"] == [False, 2, False, [2.0] * 4]


def test_the_survivors_leave_together(values: Values) -> None:
    assert all(result["end"] for result in values.values())
