"""Every benchmark runs to its end, on few rounds; what it measures then is worth nothing."""

import sys

import pytest

from tests.end_to_end.harness import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = (
    "step_time --quick --preset tiny --replicas 2",
    "stack_time --quick --stacks fsdp2",
    "bandwidth --quick",
    "recovery_time --quick",
    "reliability --trials 2",
    "unit_kills --runs 1",
    "unit_kills --pairs 1",
)


@pytest.mark.parametrize("words", QUICK)
def test_a_benchmark_runs_to_its_end(words: str) -> None:
    module, *options = words.split()
    run = command(sys.executable, "-m", f"benchmarks.{module}", *options)
    assert run.status == 0, run.replay
    assert run.stdout.strip(), run.replay
