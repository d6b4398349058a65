"""Bucket tags and rank arithmetic."""

import pytest

from recover.core.ledger import BucketLedger
from recover.core.mesh import Mesh, Place

# --- bucket tags ---------------------------------------------------------------------------


def test_buckets_tagged_before_the_epoch_are_stale() -> None:
    ledger = BucketLedger()
    for bucket in (2, 0, 1):
        ledger.tag(bucket, epoch=3)
    assert ledger.stale(3) == ()
    assert ledger.stale(4) == (0, 1, 2)


def test_buckets_that_were_never_reached_are_not_stale() -> None:
    ledger = BucketLedger()
    ledger.tag(0, epoch=0)
    assert ledger.stale(5) == (0,)


def test_a_bucket_may_be_tagged_again_under_the_same_epoch_only() -> None:
    ledger = BucketLedger()
    ledger.tag(0, epoch=1)
    ledger.tag(0, epoch=1)
    with pytest.raises(AssertionError, match="bucket 0 is stale"):
        ledger.tag(0, epoch=2)


def test_restored_buckets_are_forgotten_and_may_be_reduced_again() -> None:
    ledger = BucketLedger()
    ledger.tag(0, epoch=1)
    ledger.forget()
    assert ledger.stale(2) == ()
    ledger.tag(0, epoch=2)


# --- mesh ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(5), Mesh(3, 4), Mesh(1, 7)])
def test_world_ranks_and_places_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world_size)]
    assert places == sorted(places)
    assert [mesh.world_rank(place) for place in places] == list(range(mesh.world_size))


def test_ranks_of_a_replica_are_neighbours() -> None:
    assert [str(Mesh(2, 3).place(rank)) for rank in range(6)] == [
        *("0.0", "0.1", "0.2"),
        *("1.0", "1.1", "1.2"),
    ]


@pytest.mark.parametrize("world_rank", [-1, 6])
def test_a_world_rank_outside_is_refused(world_rank: int) -> None:
    with pytest.raises(ValueError, match=rf"{world_rank} is outside 0\.\.5"):
        Mesh(2, 3).place(world_rank)


@pytest.mark.parametrize("place", [Place(2), Place(-1), Place(0, 3), Place(0, -1)])
def test_a_place_outside_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="is outside 0"):
        Mesh(2, 3).world_rank(place)


@pytest.mark.parametrize(("replicas", "ranks"), [(0, 1), (-2, 1), (1, 0)])
def test_a_mesh_has_replicas_with_ranks(replicas: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Mesh(replicas, ranks)


def test_a_replica_with_a_missing_rank_is_not_complete() -> None:
    mesh = Mesh(4, 2)
    everybody = [mesh.place(rank) for rank in range(8)]
    assert mesh.complete_replicas(everybody) == mesh.everyone() == (0, 1, 2, 3)
    assert mesh.complete_replicas(p for p in everybody if p != Place(2, 1)) == (0, 1, 3)
    assert mesh.complete_replicas([Place(3, 1), Place(1, 0), Place(3, 0)]) == (3,)
    assert mesh.complete_replicas([]) == ()
