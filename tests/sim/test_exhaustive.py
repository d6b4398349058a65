"""Every failure schedule of small jobs. Layer under test: the whole core.

Numbers of schedules and states depend on the core's code and are printed, not asserted: see
``pytest -s``. What they stand for is in ``recover.sim.search`` and ``recover.sim.strikes``.
"""

import pytest

from recover.sim.job import Job
from recover.sim.search import Explored, explore


def run(text: str) -> Explored:
    done = explore(Job.parse(text))
    print(f"\n{text}: {done.schedules} schedules, {done.states} states", end=" ")
    return done


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_4_replicas_of_2_shards_with_2_deaths() -> None:
    """The scope in which a smaller first model hid a real bug."""
    done = run("replicas=4 shards=2 microbatches=8 buckets=1 finish=0 memory=spoiled kills=2")
    assert done.schedules > 10_000


@pytest.mark.timeout(600)
def test_columns_that_leave_their_reductions_at_different_buckets() -> None:
    """Two columns of two buckets: one is through while the other has given up."""
    run("replicas=3 shards=2 microbatches=6 buckets=2 finish=0 memory=spoiled kills=2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "job",
    [
        "replicas=3 microbatches=6 kills=2",
        "replicas=4 microbatches=8 kills=2",
        "replicas=3 shards=2 microbatches=6 buckets=1 kills=1",
        "replicas=2 shards=3 microbatches=4 buckets=1 memory=spoiled kills=1",
        "replicas=3 shards=2 microbatches=6 buckets=3 finish=0 memory=spoiled kills=1",
        "replicas=4 microbatches=8 buckets=3 steps=2 memory=spoiled kills=1",
    ],
)
def test_deaths(job: str) -> None:
    run(job)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "job",
    [
        "replicas=5 microbatches=7 steps=2 kills=1",
        "replicas=5 microbatches=7 buckets=1 memory=spoiled kills=2",
        "replicas=4 microbatches=5 buckets=1 memory=spoiled kills=3",
        "replicas=5 microbatches=3 steps=2 kills=1",
    ],
)
def test_minors_and_spares(job: str) -> None:
    run(job)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "job",
    [
        "replicas=4 microbatches=8 excludes=1 kills=1 memory=spoiled",
        "replicas=3 shards=2 microbatches=6 buckets=1 memory=spoiled excludes=1",
        "replicas=3 microbatches=6 steps=2 excludes=1",
    ],
)
def test_excluded_but_alive(job: str) -> None:
    run(job)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "job",
    [
        "replicas=3 microbatches=6 glitches=2",
        "replicas=3 microbatches=6 glitches=1 kills=1",
        "replicas=3 shards=2 microbatches=6 buckets=1 finish=0 memory=spoiled glitches=1 kills=1",
    ],
)
def test_a_transport_error_without_a_death(job: str) -> None:
    run(job)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "job",
    [
        "replicas=3 microbatches=6 start=1 kills=1",
        "replicas=3 shards=2 microbatches=6 buckets=1 start=1 memory=spoiled kills=1",
        "replicas=5 microbatches=7 steps=2 data=stream memory=out_of_place kills=1",
        "replicas=4 microbatches=8 policy=adaptive memory=spoiled kills=2",
        "replicas=3 microbatches=5 steps=2 every_point=1 kills=1",
        "replicas=3 microbatches=6 restore=non_blocking memory=out_of_place kills=2",
    ],
)
def test_other_modes(job: str) -> None:
    run(job)
