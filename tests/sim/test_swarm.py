"""Random jobs and random failures; one number is one run."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.sim.adversary import sparse
from recover.sim.gradients import Violation
from recover.sim.job import Job, command, play
from recover.sim.search import run_seed
from recover.sim.trace import Trace


@pytest.mark.timeout(300)
def test_a_swarm_of_jobs() -> None:
    struck = sum(bool(run_seed(seed)[1]) for seed in range(400))
    assert struck > 200, "most seeds should do some harm"


@pytest.mark.parametrize(
    "shape",
    [
        "replicas=64 microbatches=512 buckets=4 steps=6 kills=40",
        "replicas=24 shards=2 microbatches=100 steps=4 kills=20 excludes=2 glitches=3",
    ],
)
def test_long_runs_of_large_worlds(shape: str) -> None:
    job = Job.parse(f"{shape} gradients=counted memory=in_place every_point=1")
    picks = {30 * k: 1 + 7 * k for k in range(1, 60)}
    try:
        play(job, sparse(picks, job.budget()))
    except Violation as broken:
        pytest.fail(f"{broken}\nreplay: {command(job, picks)}")


schedules = st.dictionaries(st.integers(0, 120), st.integers(1, 63), max_size=5)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    schedule=schedules,
    shape=st.sampled_from(["replicas=6 shards=2 buckets=2", "replicas=9 buckets=3"]),
    microbatches=st.integers(1, 20),
    memory=st.sampled_from(["in_place", "out_of_place"]),
    data=st.sampled_from(["exact", "stream"]),
)
def test_sparse_schedules(
    schedule: dict[int, int], shape: str, microbatches: int, memory: str, data: str
) -> None:
    """Hypothesis shrinks a failure to the few picks that matter."""
    job = Job.parse(
        f"{shape} microbatches={microbatches} steps=2 start=1 kills=4 excludes=1 glitches=1 "
        f"every_point=1 memory={memory} data={data}"
    )
    try:
        play(job, sparse(schedule, job.budget()))
    except Violation as broken:
        pytest.fail(f"{broken}\nreplay: {command(job, schedule)}")


def test_a_run_is_a_function_of_its_seed() -> None:
    texts = []
    for _ in range(2):
        traces: list[Trace] = []

        def watch(job: Job, traces: list[Trace] = traces) -> list[Trace]:
            traces.append(Trace(job.shards))
            return traces[-1:]

        for seed in range(40):
            run_seed(seed, observers=watch)
        texts.append("\n".join(trace.text() for trace in traces))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("arguments", [["--seed", "11"], ["--seed", "27"]])
def test_the_command_prints_the_same_bytes_in_every_process(arguments: list[str]) -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "recover.sim", *arguments],
            capture_output=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert b"no rule broken" in outputs.pop()
