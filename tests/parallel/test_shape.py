"""Rank arithmetic inside a replica."""

import itertools

import pytest

from recover.parallel.shape import ReplicaShape


def test_the_tensor_axis_is_innermost() -> None:
    shape = ReplicaShape(pp=2, ep=3, tp=4)
    places = itertools.product(range(2), range(3), range(4))
    assert [shape.rank_of(pp=pp, ep=ep, tp=tp) for pp, ep, tp in places] == list(range(24))
    assert shape.ranks == 24


def test_the_ends_of_each_pipeline() -> None:
    assert list(ReplicaShape(pp=3, tp=2).pipeline_ends()) == [(0, 4), (1, 5)]


@pytest.mark.parametrize("axis", ["pp", "ep", "tp"])
def test_an_axis_has_at_least_one_rank(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis} must be at least 1, got 0"):
        ReplicaShape(**{axis: 0})


def test_a_shape_that_does_not_match_the_replica_is_refused_with_the_values() -> None:
    ReplicaShape(pp=2, tp=2).require(4)
    with pytest.raises(ValueError, match="pp=2 x ep=1 x tp=2 = 4 ranks does not match the 3 rank"):
        ReplicaShape(pp=2, tp=2).require(3)
